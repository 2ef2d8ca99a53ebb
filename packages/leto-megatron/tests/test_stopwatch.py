"""What an update takes where the call returns before the work is done; a played stream, without a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from leto_megatron.stopwatch import DeviceStopwatch, HostStopwatch, stopwatch_for


class Stream:
    """Work in order, on a clock of its own; it runs only when it is told to."""

    def __init__(self) -> None:
        self.now = 0.0
        self._queue: list[Callable[[], None]] = []

    def issue(self, work: Callable[[], None]) -> None:
        self._queue.append(work)

    def kernel(self, seconds: float) -> None:
        def run() -> None:
            self.now += seconds

        self.issue(run)

    def run(self) -> None:
        for work in self._queue:
            work()
        self._queue.clear()


class Event:
    """As `torch.cuda.Event(enable_timing=True)`: reading it too early is an error."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream
        self._at: float | None = None

    def record(self) -> None:
        self._at = None

        def pass_it() -> None:
            self._at = self._stream.now

        self._stream.issue(pass_it)

    def query(self) -> bool:
        return self._at is not None

    def elapsed_time(self, end: Event) -> float:
        assert self._at is not None
        assert end._at is not None, "torch raises: both events must be completed"
        return (end._at - self._at) * 1e3

    def synchronize(self) -> None:
        pytest.fail("the host waits")


def step(watch: DeviceStopwatch, stream: Stream, seconds: float, *, lazy: bool = False) -> float | None:
    """An iteration: a long computation, then an update whose barrier waits for what was before it."""
    stream.kernel(10.0)
    watch.begin()
    stream.kernel(seconds / 2)
    if not lazy:
        stream.run()  # the barrier
    stream.kernel(seconds / 2)
    return watch.end()


def test_an_update_is_told_one_later_and_without_a_wait() -> None:
    stream = Stream()
    watch = DeviceStopwatch(lambda: Event(stream))
    told = [step(watch, stream, seconds) for seconds in (0.25, 0.5, 1.0, 0.125)]
    assert told == [None, pytest.approx(0.25), pytest.approx(0.5), pytest.approx(1.0)]


def test_what_has_not_passed_is_not_read() -> None:
    stream = Stream()
    watch = DeviceStopwatch(lambda: Event(stream))
    assert step(watch, stream, 0.25) is None
    assert step(watch, stream, 0.5, lazy=True) is None, "the device is behind: nothing is told of that update"
    assert step(watch, stream, 1.0) == pytest.approx(0.5), "and the next one is told again"


def test_the_clock_goes_with_the_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[dict[str, Any]] = []
    monkeypatch.setattr(torch.cuda, "Event", lambda **how: made.append(how))
    assert isinstance(stopwatch_for("cuda"), DeviceStopwatch)
    assert made == [{"enable_timing": True}] * 4
    watch = stopwatch_for("host")
    assert isinstance(watch, HostStopwatch)
    began = time.monotonic()
    watch.begin()
    told = watch.end()
    assert told is not None
    assert 0.0 <= told <= time.monotonic() - began
