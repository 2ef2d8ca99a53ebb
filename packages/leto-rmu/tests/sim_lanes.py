"""A device that works behind the host's back, without a device: lanes that run later, in an order drawn at
random.

Work is kept when it is issued, and done when the simulation gets to it: any lane whose next work waits for
nothing may go on. The process may die between any two works, with those that were under way torn.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from cuda_lab import DeviceWorld
from rmu_lab import Wrong

from leto_rmu import Executor, Hyper, Op, ResumableUpdater, SyncResult, arrays
from leto_rmu.cuda import CudaUpdater, LaneExecutor
from leto_rmu.cuda.lanes import COMPUTE, LANES, Lanes
from leto_rmu.cuda.ops import LaneOp
from leto_rmu.cuda.views import CudaRankMemory
from leto_rmu.faults import Stopped, tear


class Event:
    happened = False


class SimQueues:
    """Queues of `Lanes`. Work number ``stop`` is not done: the process dies there."""

    def __init__(self, rng: np.random.Generator, stop: int | None = None) -> None:
        self.rng, self.stop, self.done = rng, stop, 0
        self.op: Op | None = None  # what is being issued
        self.together = 0  # works that could have been under way beside another
        self._lanes: dict[str, deque[tuple[str, Any, Op | None]]] = {lane: deque() for lane in LANES}

    def put(self, lane: str, work: Callable[[], None]) -> None:
        self._lanes[lane].append(("work", work, self.op))
        for _ in range(int(self.rng.choice([0, 0, 0, 1, 2, 5]))):
            self._advance()

    def event(self, lane: str) -> Event:
        event = Event()
        self._lanes[lane].append(("event", event, None))
        return event

    def after(self, lane: str, event: Event) -> None:
        self._lanes[lane].append(("wait", event, None))

    def wait(self, event: Event) -> None:
        self._heads()
        while not event.happened:
            assert self._advance(), "lanes wait for each other"

    def settle(self) -> None:
        while self._advance():
            pass
        assert not any(self._lanes.values()), "lanes wait for each other"

    def _heads(self) -> list[str]:
        """Lanes that can go on with work, after all that costs nothing has happened."""
        moved = True
        while moved:
            moved = False
            for queue in self._lanes.values():
                while queue and (queue[0][0] == "event" or (queue[0][0] == "wait" and queue[0][1].happened)):
                    _, event, _ = queue.popleft()
                    event.happened, moved = True, True
        return [lane for lane, queue in self._lanes.items() if queue and queue[0][0] == "work"]

    def _advance(self) -> bool:
        heads = self._heads()
        if not heads:
            return False
        self.together += len(heads) > 1
        if self.done == self.stop:
            self._die(heads)
        self.done += 1
        lane = heads[int(self.rng.integers(len(heads)))]
        _, work, _ = self._lanes[lane].popleft()
        work()
        self._heads()
        return True

    def host(self, op: Op) -> None:
        """The host writes at once, whatever the lanes are at."""
        if self.done == self.stop:
            if self.rng.random() < 0.7:
                tear([op], self.rng)
            raise Stopped("the process died")
        self.done += 1
        op.apply()

    def _die(self, heads: list[str]) -> None:
        for lane in heads:
            _, work, op = self._lanes[lane][0]
            assert op is not None
            if self.rng.random() < 0.7:
                tear([Op(op.name, op.group, op.chunk, op.writes, work, op.iteration)], self.rng)
        raise Stopped("the process died")


class Issuing(LaneExecutor):
    """Tells the simulation what is issued; operations that are on no lane are the host's, or the stream's."""

    def __init__(self, queues: SimQueues) -> None:
        self.queues = queues

    def run(self, op: Op) -> None:
        queues = self.queues
        queues.op = op
        if isinstance(op, LaneOp) or op.name in ("mark", "commit"):
            op.apply()
        elif op.name == "acknowledge":
            queues.settle()
            op.apply()
        elif any(isinstance(place, torch.Tensor) for place in op.writes):
            queues.put(COMPUTE, op.apply)
            if op.name in ("repair", "restore"):  # they are read back
                queues.wait(queues.event(COMPUTE))
        else:
            queues.host(op)


class OneLaunch:
    """What the transaction kernel does, by torch and leto-ec."""

    def __init__(self, memory: CudaRankMemory) -> None:
        self.memory, self.plan, self.copies = memory, memory.plan, memory.plan.gradients != "recompute"

    def prepare(self, hypers: Sequence[Hyper], step: int, sync: SyncResult) -> None:
        self.now = (tuple(hypers), step, sync)

    def launch(self, index: int, source: int, target: int, old: int, new: int, now: Any = None) -> None:
        memory, plan = self.memory, self.plan
        hypers, step, sync = now or self.now
        group, chunk = divmod(index, plan.chunks_per_group)
        for after, before in zip(memory.slot_runs(target), memory.slot_runs(source), strict=True):
            arrays.copy(after, before)
        for piece in plan.pieces(group, chunk):
            place = memory.span(index, target, piece.lo, piece.hi)
            gradient = memory.grads[piece.grad_lo : piece.grad_lo + piece.hi - piece.lo].float().clone()
            for factor in (sync.inv_scale, sync.clip):
                gradient = gradient if factor is None else gradient * factor
            master, *states = (plane[place] for plane in memory.planes.values())
            plan.optimizer.apply(
                [master], [[state] for state in states], [gradient], hypers[piece.group], step
            )
            if piece.model_lo is not None and self.copies:
                first = 2 * piece.model_lo
                memory.model[first : first + 2 * master.numel()].view(torch.bfloat16).copy_(master)
        pages = [memory.slot_pages(slot) for slot in (source, target)]
        memory.update_parity(memory.ring(old), memory.ring(new), chunk, *pages)


class OneLaunchMemory(CudaRankMemory):
    """Takes the way of the kernel on the CPU."""

    @cached_property
    def fused(self) -> Any:
        return OneLaunch(self) if self.plan.scheme == "slots" else None


class OneLaunchUpdater(CudaUpdater):
    views = OneLaunchMemory


class OneLaunchWorld(DeviceWorld):
    """Chunks are updated in one launch: by the kernel, or by its stand-in on the CPU."""

    def __init__(self, device: str, **options: Any) -> None:
        super().__init__(device, **options)
        if device == "cpu":
            self.updater_class = OneLaunchUpdater

    def derive(self, up: ResumableUpdater) -> None:
        """The updater's own copies are all that is derived."""

    def check(self, memory: Any, up: ResumableUpdater) -> None:
        super().check(memory, up)
        for s in self.plan.segments:
            if s.model_offset is not None:
                copy = up.model.view(torch.bfloat16)[s.model_offset : s.model_offset + s.numel]
                if not torch.equal(copy, up.read(s.name).bfloat16()):
                    raise Wrong(f"the bf16 copy of {s.name}")


class SimWorld(OneLaunchWorld):
    """A world whose updater works on simulated lanes while ``queues`` is set."""

    lanes: type[Lanes] = Lanes

    def __init__(self, **options: Any) -> None:
        super().__init__("cpu", **options)
        self.queues: SimQueues | None = None

    def updater(
        self, memory: Any, executor: Executor | None = None, barrier: Callable[[], None] | None = None
    ) -> ResumableUpdater:
        up = super().updater(memory, executor, barrier)
        if self.queues is not None:
            assert isinstance(up, CudaUpdater)
            up.memory.lanes = up.marker.lanes = self.lanes(self.queues)
            up.executor = Issuing(self.queues)
        return up

    def begin(self, up: ResumableUpdater) -> None:
        up.wait()  # type: ignore[attr-defined]
        super().begin(up)
