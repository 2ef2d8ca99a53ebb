"""Rank function: what a bind leaves of the memory that it is given, and of the meta device."""

from __future__ import annotations

import gc
import hashlib
from typing import Any

import torch
from worker_cpu import promises
from worker_modes import ArrayStorage, join, settings

from leto_megatron import model, placement, process, storage
from leto_megatron.shards import owned_shards
from leto_megatron.storage import Layout, LayoutError, Skeleton

SMALL = 16 * 1024  # bytes: constants that Megatron makes, of one element or one for each position


class MovingStorage(ArrayStorage):
    """Masters move: nobody may hold views of them."""

    moves = True

    def master(self, name: str) -> torch.Tensor:
        raise AssertionError("a view of what moves")

    def state(self, name: str, key: str) -> torch.Tensor:
        raise AssertionError("a view of what moves")


class Zeroes(placement.Placement):
    """As Megatron's own buffers come: that would wipe what another world still uses, or left behind."""

    def _place_buffers(self, storage: Any) -> None:
        super()._place_buffers(storage)
        storage.grads.zero_()


class CopiesParameters(placement.Placement):
    """Memory of its own: what is written there dies with the process."""

    def _place_parameters(self, storage: Any) -> None:
        super()._place_parameters(storage)
        for _name, parameter in self._parameters:
            parameter.data = parameter.detach().clone()


class ForgetsBuffers(placement.Placement):
    def _place_buffers(self, storage: Any) -> None:
        pass


class ForgetsCopies(placement.Placement):
    def _place_copies(self) -> None:
        pass


class ForgetsHooks(placement.Placement):
    def _hook(self) -> None:
        pass


MUTANTS = (Zeroes, CopiesParameters, ForgetsBuffers, ForgetsCopies, ForgetsHooks)


def tensors() -> list[torch.Tensor]:
    gc.collect()
    return [one for one in gc.get_objects() if issubclass(type(one), torch.Tensor)]


def nbytes(known: set[int]) -> int:
    """Bytes of memory behind all tensors, but for those whose storage is known."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors() if not t.is_meta}
    return sum(size for place, size in found.items() if place not in known)


def bits(place: ArrayStorage) -> str:
    total = hashlib.sha256()
    for tensor in (place.grads, place.model, *place.arrays.values()):
        total.update(tensor.view(torch.uint8).numpy().data)
    return total.hexdigest()


def problems(config: Any, moves: bool) -> list[str]:
    """What a skeleton and its bind do that they must not."""
    found: list[str] = []
    known = {t.untyped_storage().data_ptr() for t in tensors() if not t.is_meta}
    skeleton = Skeleton(config)
    if nbytes(known) > SMALL:
        found.append("a skeleton takes memory")
    place = (MovingStorage if moves else ArrayStorage)(skeleton.layout)
    before = bits(place)
    parts = skeleton.bind(place)
    if bits(place) != before:
        found.append("bind writes")
    if any(tensor.is_meta for tensor in tensors()):
        return [*found, "tensors stay on the meta device"]
    if storage._layout(config, parts) != skeleton.layout:
        found.append("laid out differently")
    found += lying(parts, place, skeleton.layout)
    try:
        skeleton.bind(place)
        found.append("bound twice")
    except LayoutError:
        pass
    return found


def lying(parts: model.Parts, place: ArrayStorage, layout: Layout) -> list[str]:
    """Where parameters and gradients lie, and whether gradients arrive."""
    found: list[str] = []
    inside = {t.untyped_storage().data_ptr() for t in (place.grads, place.model, *place.arrays.values())}
    parameters = dict(parts.ddp.module.named_parameters())
    for name, parameter in parameters.items():
        if parameter.untyped_storage().data_ptr() not in inside:
            found.append("a parameter lies elsewhere")
        base = layout.parameter_bases.get(name)
        if base is not None and parameter.data_ptr() != place.model.data_ptr() + base:
            found.append("a parameter lies at another place")
    for shard in owned_shards(parts.ddp, parts.optimizer):
        at = shard.parameter.main_grad.view(-1)[shard.start :].data_ptr() - place.grads.data_ptr()
        if at != 4 * shard.grad_offset:
            found.append("a gradient lies at another place")
        if not place.moves and shard.main.data_ptr() != place.master(shard.name).data_ptr():
            found.append("a master lies elsewhere")
    for buffer in parts.ddp.buffers:
        for bucket, (start, _end) in zip(buffer.buckets, buffer.bucket_indices, strict=True):
            if bucket.grad_data.data_ptr() != buffer.grad_data[start:].data_ptr():
                found.append("a bucket lies at another place")
    before = {name: one.main_grad.clone() for name, one in parameters.items()}
    torch.autograd.backward([one.float().sum() for one in parameters.values()])
    for name, one in parameters.items():
        if not torch.equal(one.main_grad, before[name] + 1.0) or one.grad is not None:
            found.append("a gradient does not arrive")
    return sorted(set(found))


def look(
    rank: int, world: int, folder: str, configurations: dict[str, dict[str, Any]]
) -> dict[str, dict[str, Any]]:
    """What the shim promises, in a process that has just installed it; then where a bind puts things."""
    promised = promises(rank, world, folder)
    return {"promises": promised, "placed": place_all(rank, world, folder, configurations)}


def place_all(
    rank: int, world: int, folder: str, configurations: dict[str, dict[str, Any]]
) -> dict[str, list[str]]:
    """Problems of every configuration; then of the first one with every mutant in its place."""
    result: dict[str, list[str]] = {}
    right = placement.Placement
    for number, (name, changes) in enumerate(configurations.items()):
        config = settings(changes)
        join(config, rank, world, folder, name)
        result[name] = problems(config, moves=False)
        if config.distributed_optimizer:
            result[f"{name}, moving"] = problems(config, moves=True)
        for mutant in MUTANTS if number == 0 else ():
            storage.Placement = mutant
            try:
                result[mutant.__name__] = problems(config, moves=False)
            finally:
                storage.Placement = right
        process.leave_groups()
    return result
