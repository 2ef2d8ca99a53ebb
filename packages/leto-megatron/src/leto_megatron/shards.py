"""Which elements of which parameters a rank's optimizer owns, and where their gradients lie.

Role in the whole: the map between Megatron's three optimizers and the segments of the resumable update.
With the distributed optimizer (ZeRO-1) a rank owns a range of every bucket; without it, every parameter.
Gradient offsets count elements of the *gradient region*: the gradient buffers of the model laid one after
another, each starting at a multiple of :data:`BUFFER_ALIGNMENT` elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

__all__ = [
    "BUFFER_ALIGNMENT",
    "OwnedShard",
    "all_buffers",
    "buffer_offsets",
    "inner_optimizers",
    "owned_shards",
]

BUFFER_ALIGNMENT = 64


@dataclass(frozen=True)
class OwnedShard:
    """One optimizer parameter: the range `start ... start + numel` of a model parameter, flattened.

    `main` is the tensor that the inner optimizer steps (fp32); `group` indexes the optimizer's parameter
    groups; `grad_offset` is in elements of the gradient region.
    """

    name: str
    parameter: torch.nn.Parameter
    main: torch.Tensor
    group: int
    grad_offset: int
    start: int
    numel: int
    inner: Any

    def moments(self) -> dict[str, torch.Tensor]:
        """The optimizer state of this shard: `exp_avg`, `exp_avg_sq` (fp32) and `step`."""
        state: dict[str, torch.Tensor] = self.inner.optimizer.state[self.main]
        return state


def inner_optimizers(optimizer: Any) -> list[Any]:
    """The Megatron optimizers behind a ChainedOptimizer, or the one itself."""
    return list(getattr(optimizer, "chained_optimizers", [optimizer]))


def all_buffers(ddp: Any) -> list[Any]:
    """The parameter and gradient buffers of a model: dense ones first, then those of experts."""
    return [*ddp.buffers, *ddp.expert_parallel_buffers]


def buffer_offsets(ddp: Any) -> tuple[list[int], int]:
    """Where each gradient buffer starts in the gradient region, and the region's size; both in elements."""
    offsets: list[int] = []
    total = 0
    for buffer in all_buffers(ddp):
        offsets.append(total)
        total += -(-buffer.numel // BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT
    return offsets, total


def owned_shards(ddp: Any, optimizer: Any) -> list[OwnedShard]:
    """Every shard that this rank's optimizer steps, in the order of its parameter groups."""
    names = {parameter: name for name, parameter in ddp.module.named_parameters()}
    offsets, _total = buffer_offsets(ddp)
    places = {
        parameter: offsets[index] + buffer.param_index_map[parameter][0]
        for index, buffer in enumerate(all_buffers(ddp))
        for parameter in buffer.params
    }
    shards: list[OwnedShard] = []
    first_group = 0
    for inner in inner_optimizers(optimizer):
        if getattr(inner, "is_stub_optimizer", False):
            continue
        for group, parameter, main, start in _pairs(inner):
            shards.append(
                OwnedShard(
                    name=names[parameter],
                    parameter=parameter,
                    main=main,
                    group=first_group + group,
                    grad_offset=places[parameter] + start,
                    start=start,
                    numel=main.numel(),
                    inner=inner,
                )
            )
        first_group += len(inner.param_groups)
    return shards


def _pairs(inner: Any) -> Iterator[tuple[int, torch.nn.Parameter, torch.Tensor, int]]:
    """(group, model parameter, optimizer parameter, first element) for each of Megatron's optimizers."""
    if hasattr(inner, "shard_fp32_from_float16_groups"):  # DistributedOptimizer
        pairs = (
            (inner.model_fp32_groups, inner.shard_fp32_groups),
            (inner.model_float16_groups, inner.shard_fp32_from_float16_groups),
        )
        for group in range(len(inner.param_groups)):
            for models, mains in pairs:
                for parameter, main in zip(models[group], mains[group], strict=True):
                    where = inner._get_model_param_range_map(parameter)["param"]
                    yield group, parameter, main, where.start
    elif hasattr(inner, "fp32_from_float16_groups"):  # Float16OptimizerWithFloat16Params
        for group in range(len(inner.param_groups)):
            for parameter, main in zip(
                inner.float16_groups[group], inner.fp32_from_float16_groups[group], strict=True
            ):
                yield group, parameter, main, 0
            for parameter in inner.fp32_from_fp32_groups[group]:
                yield group, parameter, parameter, 0
    else:  # FP32Optimizer: the model's parameters are the masters
        for group, settings in enumerate(inner.param_groups):
            for parameter in settings["params"]:
                yield group, parameter, parameter, 0
