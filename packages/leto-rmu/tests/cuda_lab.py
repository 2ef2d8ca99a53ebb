"""The laboratory on a device: `World` with `CudaUpdater`, on a GPU or, as a stand-in, the CPU."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from lab_record import Point, Recorder, Truth, record_iteration
from lab_world import World, Wrong

from leto_rmu import Executor, Op, ResumableUpdater, arrays
from leto_rmu.cuda import CudaUpdater, TorchMemory


def on_host(array: Any) -> Any:
    """A numpy copy."""
    return array.cpu().numpy().copy() if isinstance(array, torch.Tensor) else np.array(array, copy=True)


class DeviceMemory(TorchMemory):
    """TorchMemory that can be copied and put back; arrays keep their addresses."""

    def _arrays(self) -> list[Any]:
        return [
            array
            for region in self.regions.values()
            for array in (region.pages, region.tier1, region.tier2)
            if array is not None
        ]

    def snapshot(self) -> SimpleNamespace:
        return SimpleNamespace(arrays=[arrays.saved(a) for a in self._arrays()], marks=frozenset(self.marks))

    def restore(self, state: SimpleNamespace) -> None:
        for array, saved in zip(self._arrays(), state.arrays, strict=True):
            arrays.copy(array, saved)
        self.marks = set(state.marks)


class OneKind:
    """A code that refuses a mixture of numpy arrays and tensors, as leto-ec does for host and GPU."""

    def __init__(self, code: Any) -> None:
        self._code = code

    def __getattr__(self, name: str) -> Callable[..., Any]:
        method = getattr(self._code, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            found = [a for a in (*args, *kwargs.values()) if not isinstance(a, (int, bool, type(None)))]
            flat = [b for a in found for b in (a if isinstance(a, list) else [a]) if b is not None]
            kinds = {isinstance(b, torch.Tensor) for b in flat if not isinstance(b, int)}
            assert len(kinds) == 1, f"{name} of arrays and tensors together"
            return method(*args, **kwargs)

        return call


class DeviceWorld(World):
    """The reference is torch.optim on the same device: foreach on a GPU."""

    def __init__(self, device: str, **options: Any) -> None:
        super().__init__(updater=CudaUpdater, **options)
        self.device = torch.device(device)

    def updater(
        self, memory: Any, executor: Executor | None = None, barrier: Callable[[], None] | None = None
    ) -> ResumableUpdater:
        up = super().updater(memory, executor, barrier)
        if self.device.type == "cpu":
            up.memory.code = OneKind(up.memory.code)  # type: ignore[assignment]
        return up

    def start(self, executor: Executor | None = None) -> tuple[Any, ResumableUpdater]:
        memory = DeviceMemory(self.pool, self.device)  # type: ignore[arg-type]
        memory.allocate(self.plan.specs())
        rng = np.random.default_rng(self.seed)
        for name in ("grads", "grad_parity", "undo", "parity_ring", "arena"):  # nobody may rely on zeros
            if name in memory.regions:
                pages = memory.regions[name].pages
                arrays.copy(pages, rng.integers(0, 256, tuple(pages.shape), np.uint8))
        up = self.updater(memory)
        self.fill(up)
        if executor is not None:
            up.executor = executor
        return memory, up

    def fill(self, up: ResumableUpdater) -> None:
        for s in self.plan.segments:
            up.write(s.name, "master", self.initial(s.name))
        up.initialize(0, self.job(0))

    def check(self, memory: Any, up: ResumableUpdater) -> None:
        up.wait()  # type: ignore[attr-defined]
        regions = {
            name: SimpleNamespace(
                pages=on_host(region.pages),
                tier1=None if region.tier1 is None else on_host(region.tier1),
                tier2=None if region.tier2 is None else on_host(region.tier2),
                groups=region.groups,
            )
            for name, region in memory.regions.items()
            if name not in ("model", "grads", "grad_parity", "undo", "parity_ring")
        }
        super().check(SimpleNamespace(regions=regions, marks=memory.marks), up)  # type: ignore[arg-type]
        model = memory.regions["model"].pages
        before = model.clone()
        self.derive(up)
        if not torch.equal(before, model):
            raise Wrong("derived state is not that of the masters")


class DeviceRecorder(Recorder):
    def _after(self, op: Op, truth: Truth) -> Truth:
        ring = self.memory.regions["parity_ring"].pages
        first: Any = op.writes[0] if op.name == "update" else None
        if first is not None and 0 <= first.data_ptr() - ring.data_ptr() < ring.numel():  # type: ignore[attr-defined]
            self._slots[op.group] = self._slot(op)  # type: ignore[index]  # update and parity in one
        return super()._after(op, truth)

    def _slot(self, op: Op) -> int:
        ring = self.memory.regions["parity_ring"].pages
        offset = op.writes[0].data_ptr() - ring.data_ptr()  # type: ignore[attr-defined]
        return int(offset) // (self.world.pool.tier1_pages * self.world.pool.page_bytes)


def record(world: DeviceWorld, *, seed: int, before: int = 1, tears: int = 1) -> list[Point]:
    """All crash points of iteration number ``before``."""
    return record_iteration(world, seed=seed, tears=tears, before=before, kind=DeviceRecorder)


__all__ = ["DeviceMemory", "DeviceWorld", "on_host", "record"]
