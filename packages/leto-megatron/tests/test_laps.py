"""The phases of an iteration, on the host's clock and on that of a played stream."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from test_stopwatch import Event, Stream

from leto_megatron import laps as module
from leto_megatron.laps import PHASES, Laps


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[float]]:
    """The host's clock: what is in the list; no collection comes in between."""
    now = [100.0]
    monkeypatch.setattr(module, "monotonic", lambda: now[0])
    gc.disable()
    yield now
    gc.enable()


def iterate(laps: Laps, clock: list[float], stream: Stream | None = None, scale: float = 1.0) -> None:
    """One iteration of two microbatches; phase k takes k + 1 seconds, on the device 10 times that."""
    laps.begin()
    for seconds, phase in enumerate((*PHASES[1:], ""), 1):
        clock[0] += scale * seconds
        if stream is not None:
            stream.kernel(10 * scale * seconds)
        if phase:
            laps.mark(phase)


def test_on_the_host(clock: list[float]) -> None:
    laps = Laps.on("host")
    for scale in (1.0, 2.0):
        iterate(laps, clock, scale=scale)
        told = laps.end()
        assert told.pop("lap_collection_s") == 0.0
        assert told == {f"lap_{phase}_s": scale * k for k, phase in enumerate(PHASES, 1)}
    laps.close()


def test_a_phase_that_comes_twice_is_added_up(clock: list[float]) -> None:
    laps = Laps()
    laps.begin()
    for phase in ("first", "others", "others", "backward"):
        clock[0] += 1.0
        laps.mark(phase)
    clock[0] += 1.0
    told = laps.end()
    assert (told["lap_data_s"], told["lap_first_s"], told["lap_others_s"], told["lap_backward_s"]) == (
        1,
        1,
        2,
        1,
    )
    laps.close()


def test_what_a_recovery_marks_counts_for_no_iteration(clock: list[float]) -> None:
    laps = Laps()
    laps.mark("update")
    clock[0] += 50.0
    iterate(laps, clock)
    assert laps.end()["lap_update_s"] == 7.0
    laps.close()


def test_on_a_device_one_iteration_later_and_without_waiting(clock: list[float]) -> None:
    stream, asked = Stream(), [7, 3 << 20]
    made: list[Event] = []

    def new_event() -> Event:
        made.append(Event(stream))
        return made[-1]

    laps = Laps(new_event, lambda: (asked[0], asked[1]))
    iterate(laps, clock, stream)
    asked[0] += 60
    told = laps.end()
    assert (told["lap_allocations"], told["lap_reserved_mib"]) == (60.0, 3.0)
    assert not any(name.startswith("gpu_") for name in told), "of the first one nothing is known yet"
    stream.run()
    iterate(laps, clock, stream, 2.0)
    told = laps.end()
    assert told["lap_allocations"] == 0.0
    assert {name: seconds for name, seconds in told.items() if name.startswith("gpu_")} == {
        f"gpu_lap_{phase}_s": pytest.approx(10.0 * k) for k, phase in enumerate(PHASES, 1)
    }
    iterate(laps, clock, stream)
    assert not any(name.startswith("gpu_") for name in laps.end()), "it has not run: nobody waits for it"
    stream.run()
    iterate(laps, clock, stream)
    assert laps.end()["gpu_lap_report_s"] == pytest.approx(80.0)
    assert len(made) == 2 * (len(PHASES) + 1), "events are used again"
    laps.close()


def test_the_collector_is_told_apart(clock: list[float]) -> None:
    laps = Laps()
    laps.begin()
    laps._collection("start", {})
    clock[0] += 3.0
    laps._collection("stop", {})
    told = laps.end()
    assert (told["lap_collection_s"], told["lap_data_s"]) == (3.0, 3.0)
    assert laps._collection in gc.callbacks
    laps.close()
    laps.close()
    assert laps._collection not in gc.callbacks
