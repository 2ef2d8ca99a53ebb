"""Lanes: three queues of device work (prefetch, compute, drain) and the order between them.

Role: lets the copies of parity between host and device run beside the chunk transactions (paper section
5.2) without any wait of the host. Operations are issued in an order that would be right one after the
other; each names what it reads and writes. An operation on one lane waits, on the device, for those on
other lanes that it conflicts with: readers for the last writer, a writer for the last writer and all
readers since. So whatever the device does at once, the outcome is that of the order of issue (I-2).

Resources are ``("ring", slot)``, ``("H", group)`` and ``("cell", group)``: a mark is a write like any
other, and what it allows reads it.

Side lanes, which do little, record an event after every operation. The compute lane does most of the work:
there an event is recorded only when another lane has to wait, and stands for all that was issued until then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Iterable
from typing import Any, Protocol

import torch

from leto_rmu.cuda.kernels import ordinal
from leto_rmu.cuda.streams import own_stream

__all__ = ["COMPUTE", "DRAIN", "PREFETCH", "CudaQueues", "Lanes", "Queues"]

PREFETCH, COMPUTE, DRAIN = "prefetch", "compute", "drain"
LANES = (PREFETCH, COMPUTE, DRAIN)
KEPT = 16  # events of a lane: more than are needed while four parity buffers go round
Resource = Hashable


class Queues(Protocol):
    """Where work of a lane is put; ``compute`` is the caller's stream."""

    def put(self, lane: str, work: Callable[[], None]) -> None:
        """Put work behind what its lane holds."""
        ...

    def event(self, lane: str) -> Any:
        """What happens when a lane has done all that it holds now."""
        ...

    def after(self, lane: str, event: Any) -> None:
        """Let a lane go on only after an event of another lane."""
        ...

    def wait(self, event: Any) -> None:
        """Return when an event has happened."""
        ...

    def settle(self) -> None:
        """Return when all work has ended."""
        ...


class CudaQueues:
    """A stream for each side lane; compute is torch's current stream at the time of the call.

    Where the caller has changed streams, the new one goes on after the one before, so that the lane keeps its
    order: two marks of one cell at once could tear both of its slots.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._side = {lane: own_stream(ordinal(device), lane) for lane in (PREFETCH, DRAIN)}
        self._compute: torch.cuda.Stream | None = None  # of the last call

    def _stream(self, lane: str) -> torch.cuda.Stream:
        if lane in self._side:
            return self._side[lane]
        now, before = torch.cuda.current_stream(self.device), self._compute
        if before is not None and now.cuda_stream != before.cuda_stream:
            now.wait_stream(before)
        self._compute = now
        return now

    def put(self, lane: str, work: Callable[[], None]) -> None:
        stream = self._stream(lane)
        if lane == COMPUTE:
            work()
            return
        with torch.cuda.stream(stream):
            work()

    def event(self, lane: str) -> Any:
        return self._stream(lane).record_event()

    def after(self, lane: str, event: Any) -> None:
        self._stream(lane).wait_event(event)

    def wait(self, event: Any) -> None:
        event.synchronize()

    def settle(self) -> None:
        for lane in LANES:
            self._stream(lane).synchronize()


class Lanes:
    """Issues work to lanes. Without queues, or while not ``concurrent``, work is done at once.

    ``concurrent`` is off under executors that look at memory between operations: then each operation has
    ended when it returns.
    """

    def __init__(self, queues: Queues | None) -> None:
        self.queues = queues
        self.concurrent = queues is not None
        self._count = dict.fromkeys(LANES, 0)  # operations issued
        # Newest events of a lane, each with the number of the last operation that it stands for.
        self._events: dict[str, deque[tuple[int, Any]]] = {lane: deque(maxlen=KEPT) for lane in LANES}
        self._wrote: dict[Resource, tuple[str, int]] = {}  # lane and number of the last writer
        self._read: dict[Resource, dict[str, int]] = {}  # of the last readers since

    def run(
        self,
        lane: str,
        work: Callable[[], None],
        reads: Iterable[Resource] = (),
        writes: Iterable[Resource] = (),
    ) -> None:
        """Do work on a lane, after everything before it that it conflicts with."""
        queues = self.queues
        if queues is None or not self.concurrent:
            work()
            self.settle()
            return
        need: dict[str, int] = {}
        for resource in (*reads, *writes):
            last = self._wrote.get(resource)
            if last is not None and last[0] != lane:
                need[last[0]] = max(last[1], need.get(last[0], 0))
        for resource in writes:
            for other, number in self._read.get(resource, {}).items():
                if other != lane:
                    need[other] = max(number, need.get(other, 0))
        for other, number in need.items():
            queues.after(lane, self._event(other, number))
        queues.put(lane, work)
        number = self._count[lane] = self._count[lane] + 1
        if lane != COMPUTE:
            self._events[lane].append((number, queues.event(lane)))
        for resource in writes:
            self._wrote[resource] = (lane, number)
            self._read.pop(resource, None)
        for resource in reads:
            self._read.setdefault(resource, {})[lane] = number

    def _event(self, lane: str, number: int) -> Any:
        """An event that comes after operation ``number`` of a lane."""
        for last, event in self._events[lane]:
            if last >= number:
                return event
        assert self.queues is not None
        event = self.queues.event(lane)
        self._events[lane].append((self._count[lane], event))
        return event

    def fork(self) -> None:
        """Everything on the caller's stream so far comes before what the side lanes do next."""
        if self.queues is not None and self.concurrent:
            event = self.queues.event(COMPUTE)
            for lane in (PREFETCH, DRAIN):
                self.queues.after(lane, event)

    def join(self) -> None:
        """Everything on the side lanes so far comes before what the caller's stream does next."""
        if self.queues is not None and self.concurrent:
            for lane in (PREFETCH, DRAIN):
                self.queues.after(COMPUTE, self.queues.event(lane))
        self._wrote.clear()
        self._read.clear()

    def here(self) -> Any:
        """What happens when the caller's stream has done all that it holds now."""
        return None if self.queues is None else self.queues.event(COMPUTE)

    def wait(self, event: Any) -> None:
        """Return when that has happened."""
        if self.queues is not None and event is not None:
            self.queues.wait(event)

    def settle(self) -> None:
        """Return when everything issued has ended."""
        if self.queues is not None:
            self.queues.settle()
