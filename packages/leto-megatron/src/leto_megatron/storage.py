"""Megatron's model in memory that outlives the process: shapes from the meta device, storage from outside.

Role in the whole (paper, retained memory): parameters, gradients, masters and moments are views into
regions that a state manager owns. The model is first built on the meta device, with Megatron's DDP and
optimizer around it, which tells every size without memory; the regions are then allocated (or re-attached),
and every tensor gets its place in them (:mod:`leto_megatron.placement`). Training on such storage is
bit-identical to stock.

Where things lie
    gradients                       `grads`   (transaction memory)
    bf16 parameters, or the whole
    parameter buffer of ZeRO-1      `model`   (derived memory: rebuilt from masters)
    fp32 masters and Adam moments   arena     (retained memory)
    fp32 parameters without ZeRO-1  arena     (they are the masters)
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from leto_megatron import model as build
from leto_megatron import process
from leto_megatron.config import Config
from leto_megatron.placement import LayoutError, Placement
from leto_megatron.shards import all_buffers, buffer_offsets, inner_optimizers, owned_shards

__all__ = ["Layout", "LayoutError", "ShardSpec", "Skeleton", "Storage"]

_PARAMETER_ALIGNMENT = 128  # bytes; Megatron's own padding of parameters in a bucket


class Storage(Protocol):
    """The regions of one rank. All tensors are views of memory that survives the process.

    Where masters and moments *move* with every update, nobody may hold views of them: `master` and `state`
    are not called then.
    """

    moves: bool

    @property
    def grads(self) -> torch.Tensor:
        """fp32, one dimension, `Layout.grad_numel` elements at least."""

    @property
    def model(self) -> torch.Tensor:
        """uint8, one dimension, `Layout.model_bytes` at least."""

    def master(self, name: str) -> torch.Tensor:
        """fp32, one dimension: the master copy of a shard."""

    def state(self, name: str, key: str) -> torch.Tensor:
        """fp32, one dimension: `exp_avg` or `exp_avg_sq` of a shard."""

    def write(self, name: str, key: str, values: torch.Tensor) -> None:
        """Fill `master`, `exp_avg` or `exp_avg_sq` of a shard, before the first step."""


@dataclass(frozen=True)
class ShardSpec:
    """One optimizer parameter of this rank: `numel` fp32 elements, gradient at `grad_offset` elements.

    `copy_offset`: where its bf16 parameter begins in `model`, in elements; None: there is no such copy.
    """

    name: str
    numel: int
    group: int
    grad_offset: int
    copy_offset: int | None = None


@dataclass(frozen=True)
class Layout:
    """What a rank needs: shards in optimizer order, sizes of `grads` (elements) and `model` (bytes)."""

    shards: tuple[ShardSpec, ...]
    grad_numel: int
    model_bytes: int
    group_count: int
    grad_bases: tuple[int, ...]  # element offset in `grads` of each gradient buffer
    buffer_bases: tuple[int, ...] = ()  # byte offset in `model` of each parameter buffer (ZeRO-1)
    parameter_bases: dict[str, int] = field(default_factory=dict)  # otherwise: of each bf16 parameter

    @property
    def masters_are_parameters(self) -> bool:
        """fp32 parameters without ZeRO-1: they lie in the arena itself."""
        return not self.parameter_bases


class Skeleton:
    """A rank's model without memory: built before the memory is known, bound to it in a moment.

    Making it is collective over the world, because of Megatron's optimizer.

    Parameters
    ----------
    config
        The run. Process groups must have been formed: a shard depends on the rank.
    """

    def __init__(self, config: Config) -> None:
        self.config = config
        self.transformer = build.transformer_config(config)
        self._model = build.build_gpt(config, self.transformer, device="meta")
        meta = [name for name, tensor in self._model.named_buffers() if tensor.is_meta]
        if meta:
            raise LayoutError(
                f"the model has buffers without values after construction on the meta device: {meta}"
            )
        with _buffers_on_meta():
            self._parts = build.wrap(config, self.transformer, self._model)
        _check_optimizer(self._parts)
        self.layout = _layout(config, self._parts)
        self._placement = Placement(self._parts, self.layout)

    def bind(self, storage: Storage) -> build.Parts:
        """Put model, DDP and optimizer into the storage. Nothing of the storage is changed.

        No rank waits for another. May be called once.
        """
        _check_regions(self.layout, storage)
        self._placement.fill(storage)
        return self._parts

    def initialize(self, parts: build.Parts, storage: Storage) -> None:
        """Write the initial values of iteration 0 into a bound model; draws exactly what stock draws.

        The values come from a model that Megatron initialises in ordinary memory and that is dropped here.
        """
        process.seed_everything(self.config)
        values = dict(build.build_gpt(self.config, self.transformer).named_parameters())
        with torch.no_grad():
            for name, parameter in parts.ddp.module.named_parameters():
                parameter.copy_(values[name])
            if storage.moves:
                for shard in owned_shards(parts.ddp, parts.optimizer):
                    flat = shard.parameter.detach().view(-1)
                    storage.write(shard.name, "master", flat[shard.start : shard.start + shard.numel])
                return  # moments are zeroed by the updater's own initialize
            parts.optimizer.reload_model_params()
            for shard in owned_shards(parts.ddp, parts.optimizer):
                for key in ("exp_avg", "exp_avg_sq"):
                    shard.moments()[key].zero_()


def _layout(config: Config, parts: build.Parts) -> Layout:
    """Read the layout off Megatron's objects, on the meta device or in memory."""
    grad_bases, grad_numel = buffer_offsets(parts.ddp)
    bases: list[int] = []
    parameters: dict[str, int] = {}
    total = 0
    if config.distributed_optimizer:
        names = {p: n for n, p in parts.ddp.module.named_parameters()}
        for buffer in all_buffers(parts.ddp):
            bases.append(total)
            for parameter in buffer.params:
                start = buffer.param_index_map[parameter][0]
                parameters[names[parameter]] = total + start * parameter.dtype.itemsize
            total = _aligned(total + buffer.numel * buffer.param_dtype.itemsize)
    elif config.precision == "bf16":
        for name, parameter in parts.ddp.module.named_parameters():
            parameters[name] = total
            total = _aligned(total + parameter.numel() * parameter.dtype.itemsize)
    item = torch.bfloat16.itemsize
    shards = tuple(
        ShardSpec(
            s.name,
            s.numel,
            s.group,
            s.grad_offset,
            parameters[s.name] // item + s.start if s.parameter.dtype == torch.bfloat16 else None,
        )
        for s in owned_shards(parts.ddp, parts.optimizer)
    )
    groups = len(parts.optimizer.param_groups)
    return Layout(shards, grad_numel, total, groups, tuple(grad_bases), tuple(bases), parameters)


def _check_regions(layout: Layout, storage: Storage) -> None:
    if storage.grads.dtype != torch.float32 or storage.grads.numel() < layout.grad_numel:
        raise LayoutError(
            f"`grads` must hold {layout.grad_numel} fp32 elements, found {storage.grads.numel()} "
            f"of {storage.grads.dtype}"
        )
    if layout.model_bytes and storage.model.numel() < layout.model_bytes:
        raise LayoutError(f"`model` must hold {layout.model_bytes} bytes, found {storage.model.numel()}")


def _check_optimizer(parts: build.Parts) -> None:
    """Raise LayoutError unless Megatron steps with the implementation whose bits the update reproduces."""
    for inner in inner_optimizers(parts.optimizer):
        found = type(inner.optimizer) if not getattr(inner, "is_stub_optimizer", False) else torch.optim.AdamW
        if found is not torch.optim.AdamW:
            raise LayoutError(
                f"Megatron-Core would step with {found.__module__}.{found.__qualname__}; the resumable "
                "update has the bits of torch.optim.AdamW: uninstall TransformerEngine and Apex, or train "
                "without Leto"
            )


@contextlib.contextmanager
def _buffers_on_meta() -> Iterator[None]:
    """Let Megatron's parameter and gradient buffers be on the meta device, whatever device they ask for."""
    from megatron.core.distributed import distributed_data_parallel as ddp_module
    from megatron.core.distributed import param_and_grad_buffer as buffer_module

    original = buffer_module._ParamAndGradBuffer

    class Provided:
        """The torch module as one buffer sees it: `zeros` is ours, once for each of its tensors."""

        def __init__(self, tensors: int) -> None:
            self._left = tensors

        def __getattr__(self, name: str) -> Any:
            return getattr(torch, name)

        def zeros(self, numel: int, *, dtype: torch.dtype, **_options: Any) -> torch.Tensor:
            if not self._left:
                raise LayoutError("Megatron's buffer asked for memory more often than expected")
            self._left -= 1
            return torch.empty(numel, dtype=dtype, device="meta")

    class ProvidedBuffer(original):  # type: ignore[misc,valid-type]
        def __init__(self, ddp_config: Any, *args: Any, **kwargs: Any) -> None:
            # Parameters and gradients; without the distributed optimizer gradients alone.
            buffer_module.torch = Provided(2 if ddp_config.use_distributed_optimizer else 1)
            try:
                super().__init__(ddp_config, *args, **kwargs)
            finally:
                buffer_module.torch = torch

    ddp_module._ParamAndGradBuffer = ProvidedBuffer
    try:
        yield
    finally:
        ddp_module._ParamAndGradBuffer = original


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _PARAMETER_ALIGNMENT) * _PARAMETER_ALIGNMENT
