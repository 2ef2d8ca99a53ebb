"""Simulated time: a heap of callbacks, ordered by time and then by the order of their scheduling."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable

__all__ = ["Clock"]


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[[], None]]] = []
        self._count = 0

    def after(self, delay_s: float, callback: Callable[[], None]) -> None:
        """Run ``callback`` in ``delay_s`` simulated seconds."""
        assert delay_s >= 0
        self._count += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._count, callback))

    @property
    def next_at(self) -> float:
        """When the next callback is due; for ever if there is none."""
        return self._heap[0][0] if self._heap else math.inf

    def step(self) -> None:
        """Advance to the next callback and run it."""
        self.now, _, callback = heapq.heappop(self._heap)
        callback()
