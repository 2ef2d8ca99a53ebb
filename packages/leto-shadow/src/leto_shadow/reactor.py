"""One poll set for everything that an agent waits for: ZeroMQ sockets, pidfds, sockets of trainers, signals.

The clock of the protocol advances by at most `STEP_S` per turn of the loop. If this process was held up (a
slow import, a stopped virtual machine) the deadlines that it watches are held up with it, so that it does not
take its own absence for the silence of others.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from typing import Any

import zmq

__all__ = ["STEP_S", "Reactor"]

STEP_S = 1.0
_ABSENCES = 100  # how many are remembered: the older ones are counted as if nobody had been away


class Reactor:
    """Callbacks by descriptor or ZeroMQ socket."""

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._callbacks: dict[Any, Callable[[int], None]] = {}
        self._last = time.monotonic()
        self._absences: deque[tuple[float, float]] = deque(maxlen=_ABSENCES)
        """When each ended, and the seconds of it that `now` does not count."""
        self.now = self._last

    def watch(self, source: Any, callback: Callable[[int], None], events: int = zmq.POLLIN) -> None:
        """Call ``callback(events)`` when ``source`` is ready; a second call changes both."""
        self._poller.register(source, events)
        self._callbacks[source] = callback

    def forget(self, source: Any) -> None:
        """Stop watching; must come before the descriptor is closed, because numbers are reused."""
        if self._callbacks.pop(source, None) is not None:
            self._poller.unregister(source)

    @property
    def moment(self) -> float:
        """When this turn began, by `time.monotonic`."""
        return self._last

    def lost_since(self, moment: float) -> float:
        """Return the seconds since ``moment`` (of `time.monotonic`) that `now` does not count."""
        return sum(min(lost, end - moment) for end, lost in self._absences if end > moment)

    def turn(self, timeout_s: float) -> None:
        """Wait for something or the timeout, advance the clock, run the callbacks."""
        ready = self._poller.poll(max(0, math.ceil(timeout_s * 1000)))
        moment = time.monotonic()
        passed = moment - self._last
        self.now += min(passed, STEP_S)
        if passed > STEP_S:
            self._absences.append((moment, passed - STEP_S))
        self._last = moment
        for source, events in ready:
            callback = self._callbacks.get(source)
            if callback is not None:  # an earlier callback of this turn may have removed it
                callback(events)
