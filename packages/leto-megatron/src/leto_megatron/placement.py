"""Every tensor of a finished model, moved from the meta device to memory from outside, in a moment.

Role in the whole (paper, levels of initialisation): Megatron's DDP and optimizer are put around the model at
level 3, on the meta device. They take their time there (they walk all modules again and again, and speak to
all ranks), but no memory. At the takeover each tensor only gets the place that it has in the rank's regions:
objects, maps, groups and hooks stay as Megatron has made them.

A waiting shadow knows no address of retained memory, so it cannot write there before the fence (I-4); and
nothing here writes to what it places.

Parameters and masters are keys of Megatron's maps: they keep their identity and get another tensor inside
(`torch.utils.swap_tensors`). Nobody else may hold that tensor, which is why accumulation nodes of autograd,
and the hooks on them, are made again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from leto_megatron.shards import OwnedShard, all_buffers, owned_shards

if TYPE_CHECKING:
    from leto_megatron.model import Parts
    from leto_megatron.storage import Layout, Storage

__all__ = ["LayoutError", "Placement"]


class LayoutError(RuntimeError):
    """The memory offered is not what the model needs, or was offered before."""


@dataclass(frozen=True)
class _Copy:
    """Where the optimizer keeps its view of the shard of a 16-bit parameter: nothing else refers to that."""

    group: list[torch.Tensor]
    index: int
    parameter: torch.nn.Parameter
    start: int
    end: int


class Placement:
    """Which tensor of Megatron's objects goes where.

    Parameters
    ----------
    parts
        The model with DDP and optimizer around it, all of it on the meta device.
    layout
        Where its regions begin.
    """

    def __init__(self, parts: Parts, layout: Layout) -> None:
        self._ddp = parts.ddp
        self._layout = layout
        self._parameters = [(name, one) for name, one in parts.ddp.module.named_parameters()]
        self._buffers = all_buffers(parts.ddp)
        self._shards = owned_shards(parts.ddp, parts.optimizer)
        self._copies = list(_copies(self._shards))
        self._in_arena = {id(shard.parameter) for shard in self._shards if shard.main is shard.parameter}
        # These hold the parameters as they are now; and so do masters that are differentiable views of them.
        self._ddp.grad_accs.clear()
        for shard in self._shards:
            if shard.main is not shard.parameter and not shard.main.is_leaf:
                _put(shard.main, torch.empty_like(shard.main.detach()))

    def fill(self, storage: Storage) -> None:
        """Put all of it into the storage. Writes nothing there; may be called once."""
        self._place_parameters(storage)
        self._place_buffers(storage)
        self._place_copies()
        self._place_masters(storage)
        self._hook()

    def _place_parameters(self, storage: Storage) -> None:
        whole: dict[torch.dtype, torch.Tensor] = {}
        bases = self._layout.parameter_bases
        for name, parameter in self._parameters:
            if not parameter.is_meta:
                raise LayoutError("the model was put into memory before: make another skeleton")
            if name not in bases or id(parameter) in self._in_arena:
                flat = _master(storage, name, parameter.numel())
            else:
                dtype = parameter.dtype
                if dtype not in whole:
                    whole[dtype] = storage.model[: self._layout.model_bytes].view(dtype)
                start = bases[name] // dtype.itemsize
                flat = whole[dtype][start : start + parameter.numel()]
            wanted = parameter.requires_grad
            _put(parameter, torch.nn.Parameter(flat.view(parameter.shape), requires_grad=wanted))

    def _place_buffers(self, storage: Storage) -> None:
        """Megatron's parameter and gradient buffers, their buckets, and each parameter's gradient."""
        layout = self._layout
        for index, buffer in enumerate(self._buffers):
            grads = storage.grads[layout.grad_bases[index] :][: buffer.numel]
            data: torch.Tensor | None = None
            if buffer.param_data is not None:
                dtype = buffer.param_dtype
                base = layout.buffer_bases[index]
                data = storage.model[base : base + buffer.numel * dtype.itemsize].view(dtype)
            buffer.grad_data, buffer.param_data = grads, data
            for bucket, (start, end) in zip(buffer.buckets, buffer.bucket_indices, strict=True):
                bucket.grad_data = grads[start:end]
                bucket.param_data = None if data is None else data[start:end]
            for parameter, (start, end, _bucket) in buffer.param_index_map.items():
                parameter.main_grad = grads[start:end].view(parameter.shape)

    def _place_copies(self) -> None:
        for copy in self._copies:
            view = copy.parameter.detach().view(-1)[copy.start : copy.end]
            vars(view).update(vars(copy.group[copy.index]))
            copy.group[copy.index] = view

    def _place_masters(self, storage: Storage) -> None:
        """Make masters and moments views of the arena. The values already there are kept.

        Where these move, Megatron holds a stand-in of the right shape that takes no memory: its gradient is
        all that Megatron uses of a master before the step.
        """
        stand_in = torch.zeros(1, device=storage.grads.device) if storage.moves else None
        for shard in self._shards:
            shape = shard.main.shape
            if stand_in is not None:
                place = stand_in.expand(shape)
            else:
                place = _master(storage, shard.name, shard.numel).view(shape)
            if shard.main is shard.parameter:
                shard.main.data = place
            elif shard.main.requires_grad:  # of an fp32 parameter: a differentiable view of it, as stock
                view = shard.parameter.view(-1)[shard.start : shard.start + shard.numel]
                view.data = place
                _put(shard.main, view)
            else:
                _put(shard.main, place)
            if stand_in is None:
                shard.inner.optimizer.state[shard.main] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": storage.state(shard.name, "exp_avg").view(shape),
                    "exp_avg_sq": storage.state(shard.name, "exp_avg_sq").view(shape),
                }

    def _hook(self) -> None:
        """What DDP does at the end of its construction: add each gradient to its buffer when it is there."""
        for _name, parameter in self._parameters:
            if parameter.requires_grad:
                node: Any = parameter.expand_as(parameter).grad_fn
                accumulate = node.next_functions[0][0]
                accumulate.register_hook(self._ddp._make_backward_post_hook(parameter))
                self._ddp.grad_accs.append(accumulate)


def _copies(shards: list[OwnedShard]) -> list[_Copy]:
    """The distributed optimizer's views of 16-bit shards, each with the shard that it belongs to."""
    by_main = {id(shard.main): shard for shard in shards}
    found: list[_Copy] = []
    for inner in {id(shard.inner): shard.inner for shard in shards}.values():
        views = getattr(inner, "shard_float16_groups", [])
        mains = getattr(inner, "shard_fp32_from_float16_groups", [])
        for group, other in zip(views, mains, strict=True):
            for index, main in enumerate(other):
                shard = by_main[id(main)]
                found.append(_Copy(group, index, shard.parameter, shard.start, shard.start + shard.numel))
    return found


def _put(tensor: torch.Tensor, place: torch.Tensor) -> None:
    """Let an object be another tensor; what was set on it stays."""
    vars(place).update(vars(tensor))
    torch.utils.swap_tensors(tensor, place)  # type: ignore[no-untyped-call]


def _master(storage: Storage, name: str, numel: int) -> torch.Tensor:
    flat = storage.master(name)
    if flat.numel() != numel:
        raise LayoutError(f"master {name} must have {numel} elements, found {flat.numel()}")
    return flat
