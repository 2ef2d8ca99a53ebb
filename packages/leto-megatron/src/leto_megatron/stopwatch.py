"""How long an update takes: by the host's clock, or on a GPU by the device's.

On a GPU a step of the optimizer returns when its work is issued, which may be long before it is done. There
two events are put around it, in the order of the stream, and read one step later, when they have passed:
nobody waits for them.

Role in the whole: `MegatronTrainer` reports what it says as `update_s`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch

__all__ = ["DeviceStopwatch", "HostStopwatch", "Stopwatch", "stopwatch_for"]


class Stopwatch(Protocol):
    """Around each update."""

    def begin(self) -> None:
        """An update follows."""

    def end(self) -> float | None:
        """Return the seconds of the newest update of which they are known, once; None if there is no such."""


class HostStopwatch:
    """Where the work is done when the call returns."""

    def __init__(self) -> None:
        self._began = 0.0

    def begin(self) -> None:
        self._began = time.monotonic()

    def end(self) -> float | None:
        return time.monotonic() - self._began


class DeviceStopwatch:
    """On torch's current stream. ``new_event`` makes an event as of `torch.cuda.Event` with timing."""

    def __init__(self, new_event: Callable[[], Any] | None = None) -> None:
        make = new_event or partial(torch.cuda.Event, enable_timing=True)
        self._now, self._before = (make(), make()), (make(), make())
        self._running = False  # the events of the update before have been recorded

    def begin(self) -> None:
        self._now[0].record()

    def end(self) -> float | None:
        self._now[1].record()
        began, ended = self._before
        # The barrier of this update has waited for what was on the stream before it, so that has passed.
        told = began.elapsed_time(ended) / 1e3 if self._running and ended.query() else None
        self._now, self._before, self._running = self._before, self._now, True
        return told


def stopwatch_for(backend: str) -> Stopwatch:
    """The one that goes with a backend of the memory pool."""
    return DeviceStopwatch() if backend == "cuda" else HostStopwatch()
