"""What failures cost a job, from its event log: I, R and the effective training time ratio (section 8.1).

* I, interruption: from the failure to training resumed on all ranks.
* R, recomputation: from there until the interrupted iteration is done, less what was left of it when the
  failure came, at the pace of an iteration without failures. Below zero if the recovery itself finished it.
* ETTR: the time that a run without failures needs for the same iterations, over the time that this one took.

The pace is measured in a reference run, or, where there is none, is the median of this run's own iterations
without a failure; then ETTR says nothing about what Leto costs between failures. An iteration is done when
the last rank has reported it, so a script that never calls `ctx.metrics` has I, but no R and no ETTR.

Role in the whole: `leto report`. Pure: events in, numbers out.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from leto_shadow.events import Event
from leto_shadow.timeline import FailureRow, Timeline

__all__ = ["Measures", "RecoveryMeasure", "iteration_times", "measure", "one_clock"]


@dataclass(frozen=True)
class RecoveryMeasure:
    """One recovery, in seconds. ``recompute_s`` is None where no iteration was reported after it (yet)."""

    interruption_s: float | None
    recompute_s: float | None
    done_s: float | None = None
    """What was done of the interrupted iteration when the failure came: the least that R can be."""
    first_extra_s: float | None = None
    """By how much the first iteration after it was slower than one without a failure; a part of R."""
    resumed_s: float | None = None
    """When training had resumed on all ranks, since the first event."""


@dataclass(frozen=True)
class Measures:
    """Of one job. Times in seconds, None where the events do not say."""

    iterations: int
    """Iterations that are done and were not taken back."""
    elapsed_s: float
    """From the beginning of the first iteration to the end of the last one, recoveries included."""
    iteration_s: float | None
    """Median time of an iteration without a failure."""
    reference_iteration_s: float | None
    """The same of the reference run, if one was given."""
    iteration_scatter_s: float | None
    """How much later than the median 95 of 100 iterations without a failure come at most."""
    reference_scatter_s: float | None
    """The same of the reference run: what one iteration cannot be told apart by, failures or not."""
    recoveries: tuple[RecoveryMeasure, ...]
    """One for each failure of the timeline, in their order."""

    @property
    def ettr(self) -> float | None:
        """Effective training time ratio, None if nothing is known about iterations."""
        pace = self.reference_iteration_s or self.iteration_s
        if pace is None or not self.elapsed_s:
            return None
        return self.iterations * pace / self.elapsed_s

    @property
    def interruption_s(self) -> float:
        """Seconds without training, in all."""
        return sum(one.interruption_s or 0.0 for one in self.recoveries)


def one_clock(events: Sequence[Event]) -> str:
    """The field to take times from: "mono" where one node wrote all events, as clocks may be set in mid-run;
    "t" where several did, as their monotonic clocks have nothing to do with each other."""
    return "mono" if len({event.get("node", 0) for event in events}) <= 1 else "t"


def iteration_times(events: Sequence[Event]) -> list[float]:
    """Seconds of each iteration without a failure; the first after a start or a recovery are left out."""
    if not events:
        return []
    clock = one_clock(events)
    return _times(_finished(events, clock, float(events[0][clock])))


@dataclass(frozen=True)
class _Done:
    """When the last rank reported an iteration. A stretch is a time without failures."""

    iteration: int
    stretch: int
    seconds: float


def measure(
    events: Sequence[Event], timeline: Timeline, reference: Sequence[Event] | None = None
) -> Measures:
    """Measure a job. ``timeline`` has been fed the same events, in order; ``reference``: those of a run
    without failures."""
    clock = one_clock(events)
    start = float(events[0][clock]) if events else 0.0
    done = _finished(events, clock, start)
    times = _times(done)
    iteration_s = statistics.median(times) if times else None
    iterations, elapsed_s = 0, timeline.training_s
    if done:
        iterations = done[-1].iteration - min(one.iteration for one in done)
    others = iteration_times(reference or [])
    recoveries = tuple(_measure_one(row, timeline, done, iteration_s) for row in timeline.failures)
    return Measures(
        iterations=iterations,
        elapsed_s=elapsed_s,
        iteration_s=iteration_s,
        reference_iteration_s=statistics.fmean(others) if others else None,
        iteration_scatter_s=_scatter(times),
        reference_scatter_s=_scatter(others),
        recoveries=recoveries,
    )


def _finished(events: Sequence[Event], clock: str, start: float) -> list[_Done]:
    """When each iteration was done, in order of time; `started` and `recovered` stand for the one before."""
    last: dict[tuple[int, int], float] = {}
    stretch = 0
    for event in events:
        seconds = float(event[clock]) - start
        if event["event"] in ("started", "recovered"):
            stretch += 1
            last[stretch, int(event["iteration"]) - 1] = seconds
        elif event["event"] == "metrics":
            last[stretch, int(event["iteration"])] = seconds
    found = [_Done(iteration, stretch, seconds) for (stretch, iteration), seconds in last.items()]
    return sorted(found, key=lambda one: (one.seconds, one.stretch, one.iteration))


def _times(done: Sequence[_Done]) -> list[float]:
    """Times of iterations; the first of each stretch, which is slower, is left out."""
    times = []
    for before, one, after in zip(done, done[1:], done[2:], strict=False):
        if before.stretch == one.stretch == after.stretch and after.iteration == one.iteration + 1:
            times.append(after.seconds - one.seconds)
    return times


def _scatter(times: Sequence[float]) -> float | None:
    """From the median to what 95 of 100 do not exceed."""
    return sorted(times)[-(-95 * len(times) // 100) - 1] - statistics.median(times) if times else None


def _measure_one(
    row: FailureRow, timeline: Timeline, done: Sequence[_Done], iteration_s: float | None
) -> RecoveryMeasure:
    if row.recovered_s is None:
        return RecoveryMeasure(None, None)
    resumed = row.seconds + row.recovered_s
    if iteration_s is None:
        return RecoveryMeasure(row.recovered_s, None, resumed_s=resumed)
    begun = max((one.seconds for one in done if one.seconds <= row.seconds), default=row.seconds)
    done_s = min(iteration_s, row.seconds - begun)
    left_s = iteration_s - done_s
    # What the recovery itself finished was done when it ended: that is the entry of `recovered`.
    finished = [
        one.seconds for one in done if one.seconds >= resumed - 1e-9 and one.iteration >= row.iteration
    ]
    if not finished:
        return RecoveryMeasure(row.recovered_s, None, done_s, resumed_s=resumed)
    first = next((one.seconds for one in done if one.seconds > resumed + 1e-9), None)
    extra_s = None if first is None else first - resumed - iteration_s
    recompute_s = max(0.0, finished[0] - resumed) - left_s
    return RecoveryMeasure(row.recovered_s, recompute_s, done_s, extra_s, resumed)
