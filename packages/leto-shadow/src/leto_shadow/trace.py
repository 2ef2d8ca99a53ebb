"""A job's events as a trace for Perfetto or chrome://tracing: what ranks did, where recoveries spent time.

The format is Chrome's JSON ("X" spans, "i" instants, "C" counters, "M" names), times in microseconds since
the first event. Process 0 is the job, as its coordinator saw it; process r + 1 is rank r. Spans of one thread
nest, as the format wants it.

Role in the whole: `leto report --trace`. Pure: events in, a JSON value out.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from leto_shadow.events import Event
from leto_shadow.measures import RecoveryMeasure, one_clock
from leto_shadow.timeline import NOT_SECONDS

__all__ = ["NEAR_S", "chrome_trace"]

_JOB = 0
_RECOVERY, _FAILURES = 1, 2  # threads of the job
_TRAINING, _TAKEOVER, _PARTS, _SHADOW = 1, 2, 3, 4  # threads of a rank


NEAR_S = 10.0
"""Seconds around a failure and its recovery whose iterations stay in the trace of a long job."""


def chrome_trace(
    events: Sequence[Event], iterations_max: int = 100_000, recoveries: Sequence[RecoveryMeasure] = ()
) -> dict[str, Any]:
    """Return the trace; write it with `json.dump`. ``events`` in order of time, as `leto report` has them.

    With more reports of iterations than ``iterations_max``, only those around failures are shown: no viewer
    takes all of them. ``recoveries``, as measured of the same events: the first iteration after each one has
    what it cost more in its arguments.
    """
    trace = _Trace(events, recoveries)
    if sum(event["event"] == "metrics" for event in events) > iterations_max:
        trace.only_near_failures()
    return trace.value()


@dataclass
class _Repair:
    """Of one rank in one recovery. Ranks are repaired side by side, and notes may come late."""

    free: tuple[float, float] | None = None  # the wait for memory of the dead, from and to
    located_at: float | None = None  # when that was noted
    seconds: float = 0.0  # what it took
    losing_s: float = 0.0  # what a drill's losses took before it
    facts: dict[str, Any] = field(default_factory=dict)


class _Trace:
    def __init__(self, events: Sequence[Event], recoveries: Sequence[RecoveryMeasure]) -> None:
        self._events = events
        self._recoveries = recoveries
        self._clock = one_clock(events)
        self._start = float(events[0][self._clock]) if events else 0.0
        self._out: list[dict[str, Any]] = []
        self._failed_s: float | None = None  # since when no rank trains
        self._promoted_s = 0.0
        self._last = self._silent_since = 0.0
        self._since: dict[int, float] = {}  # rank -> end of its last iteration
        self._level: dict[int, tuple[int, float]] = {}  # rank -> level of its shadow, since when
        self._ranks: set[int] = set()
        self._repairs: dict[tuple[int, int], _Repair] = {}  # (rank, generation) -> not drawn yet
        self._first: set[int] = set()  # ranks whose next iteration is the first after they resumed
        self._extra_s: float | None = None  # what the first iteration after the newest recovery cost more
        self._near: list[float] | None = None

    def only_near_failures(self) -> None:
        """Leave out iterations that are far from any failure or recovery."""
        near = {"failure", "recovered", "adopted", "started"}
        times = [float(event[self._clock]) - self._start for event in self._events if event["event"] in near]
        self._near = sorted(times)

    def _is_near(self, now: float) -> bool:
        if self._near is None:
            return True
        after = bisect.bisect_left(self._near, now)
        return any(abs(now - at) <= NEAR_S for at in self._near[max(0, after - 1) : after + 1])

    def value(self) -> dict[str, Any]:
        """Go through the events."""
        now = 0.0
        for event in self._events:
            now = float(event[self._clock]) - self._start
            handler = getattr(self, f"_on_{event['event']}", None)
            if handler is not None:
                handler(event, now)
            self._last = now
        self._draw_repairs(now)
        for rank in list(self._level):
            self._end_level(rank, now)
        self._name(_JOB, "job", {_RECOVERY: "recovery", _FAILURES: "failures"})
        for rank in sorted(self._ranks):
            threads = {_TRAINING: "training", _TAKEOVER: "takeover", _PARTS: "its parts", _SHADOW: "shadow"}
            self._name(rank + 1, f"rank {rank}", threads)
        return {"traceEvents": self._out, "displayTimeUnit": "ms"}

    # --- events -----------------------------------------------------------------------------------

    def _on_failure(self, event: Event, now: float) -> None:
        began = max(0.0, now - float(event.get("detected_s") or 0.0))
        text = f"{event.get('kind')} of rank {event.get('rank')}"
        facts = {name: event.get(name) for name in ("kind", "rank", "iteration", "generation", "phase")}
        self._span(_JOB, _FAILURES, f"detect: {text}", began, now, facts)
        self._instant(text, began)
        if self._failed_s is None:
            self._failed_s = began
        self._since.clear()
        self._first.clear()
        self._extra_s = None

    def _on_job_started(self, _event: Event, _now: float) -> None:
        self._silent_since = self._last

    def _on_adopted(self, _event: Event, now: float) -> None:
        """An agent died after the last event before `job_started`; it left no word of it."""
        self._span(_JOB, _FAILURES, "no agent", self._silent_since, now, {})
        self._failed_s = self._silent_since if self._failed_s is None else self._failed_s
        self._since.clear()

    def _on_promoted(self, event: Event, now: float) -> None:
        self._promoted_s = now
        self._draw_repairs(now)
        for rank in list(self._level):
            self._end_level(rank, now)

    def _on_memory_free(self, event: Event, now: float) -> None:
        one = self._repair(event)
        one.free = (now - float(event.get("waited_s") or 0.0), now)
        one.facts["free_bytes"] = event.get("free_bytes")

    def _on_localized(self, event: Event, now: float) -> None:
        one = self._repair(event)
        one.located_at, one.seconds = now, float(event.get("seconds") or 0.0)
        one.facts["lost_pages"] = event.get("lost_pages")

    def _on_pages_lost(self, event: Event, _now: float) -> None:
        self._repair(event).losing_s = float(event.get("seconds") or 0.0)  # of all losses of the rank

    def _on_resumed(self, event: Event, now: float) -> None:
        rank = self._rank(event)
        self._since[rank] = now
        self._first.add(rank)
        facts = {name: event.get(name) for name in ("iteration", "source", "generation")}
        if self._failed_s is not None:
            self._span(rank + 1, _TAKEOVER, "no trainer", self._failed_s, self._promoted_s, facts)
        self._span(rank + 1, _TAKEOVER, f"resume: {event.get('source')}", self._promoted_s, now, facts)
        parts = [
            (name, float(value))
            for name, value in (event.get("breakdown") or {}).items()
            if name not in NOT_SECONDS
        ]
        # Some of it may have been done ahead of the promotion: hence a thread of its own, back from the end.
        at = max(0.0, now - sum(seconds for _, seconds in parts))
        for name, seconds in parts:
            end = min(now, at + seconds)
            self._span(rank + 1, _PARTS, name, at, end, {})
            at = end

    def _on_started(self, event: Event, now: float) -> None:
        self._on_recovered(event, now)

    def _on_recovered(self, event: Event, now: float) -> None:
        breakdown = dict(event.get("breakdown") or {})
        total = float(breakdown.pop("total", 0.0))
        began = max(0.0, now - total)
        self._extra_s = next(
            (
                one.first_extra_s
                for one in self._recoveries
                if one.resumed_s is not None and abs(one.resumed_s - now) < 1e-6
            ),
            None,
        )
        outer = began if self._failed_s is None else min(began, self._failed_s)
        word = "start" if event["event"] == "started" else "recovery"
        facts = {
            name: event.get(name) for name in ("generation", "iteration", "iterations_lost", "lost_pages")
        }
        self._span(_JOB, _RECOVERY, f"{word}: {event.get('source')}", outer, now, facts)
        at = began
        for name, seconds in breakdown.items():
            end = min(now, at + float(seconds))
            self._span(_JOB, _RECOVERY, name, at, end, {})
            at = end
        self._failed_s = None

    def _on_metrics(self, event: Event, now: float) -> None:
        rank, iteration = self._rank(event), event.get("iteration")
        facts = {name: event[name] for name in event if name not in ("t", "mono", "event", "node")}
        if rank in self._first and self._extra_s is not None:
            facts["first_extra_s"] = self._extra_s
        self._first.discard(rank)
        if rank in self._since and self._is_near(now):
            self._span(rank + 1, _TRAINING, f"iteration {iteration}", self._since[rank], now, facts)
        self._since[rank] = now
        if rank == 0 and self._is_near(now):
            self._out.append(
                {
                    "ph": "C",
                    "name": "iteration",
                    "pid": _JOB,
                    "ts": _us(now),
                    "args": {"iteration": iteration},
                }
            )

    def _on_shadow_level(self, event: Event, now: float) -> None:
        rank = self._rank(event)
        self._end_level(rank, now)
        self._level[rank] = (int(event["level"]), now)

    def _on_shadow_failed(self, event: Event, now: float) -> None:
        self._end_level(self._rank(event), now)

    def _on_job_failed(self, event: Event, now: float) -> None:
        self._instant(f"job failed: {event.get('reason')}", now)

    def _on_finished(self, event: Event, now: float) -> None:
        self._instant("finished", now)

    # --- helpers ----------------------------------------------------------------------------------

    def _rank(self, event: Event) -> int:
        rank = int(event["rank"])
        self._ranks.add(rank)
        return rank

    def _repair(self, event: Event) -> _Repair:
        return self._repairs.setdefault((self._rank(event), int(event.get("generation") or 0)), _Repair())

    def _draw_repairs(self, until: float) -> None:
        """Draw what each rank was waiting for and looking for, between the failure and ``until``."""
        since = min(self._failed_s or 0.0, until)
        for (rank, _generation), one in self._repairs.items():
            spans = [] if one.free is None else [("memory free", *one.free)]
            if one.located_at is not None:
                # It begins when memory is free, and may be noted only after other ranks have been waited for.
                begin = one.located_at - one.seconds if one.free is None else one.free[1] + one.losing_s
                spans.append(("localize", begin, min(begin + one.seconds, one.located_at)))
            spans = [
                (name, min(max(begin, since), until), min(max(end, since), until))
                for name, begin, end in spans
            ]
            if spans:
                begin, end = min(begin for _, begin, _ in spans), max(end for *_, end in spans)
                self._span(rank + 1, _TAKEOVER, "repair", begin, end, one.facts)
                for name, begin, end in spans:
                    self._span(rank + 1, _TAKEOVER, name, begin, end, {})
        self._repairs.clear()

    def _end_level(self, rank: int, now: float) -> None:
        level, since = self._level.pop(rank, (0, now))
        if level:
            self._span(rank + 1, _SHADOW, f"L{level}", since, now, {})

    def _span(
        self, process: int, thread: int, name: str, begin: float, end: float, facts: dict[str, Any]
    ) -> None:
        begin_us = _us(begin)
        self._out.append(
            {
                "ph": "X",
                "name": name,
                "cat": "leto",
                "pid": process,
                "tid": thread,
                "ts": begin_us,
                "dur": max(0, _us(end) - begin_us),
                "args": facts,
            }
        )

    def _instant(self, name: str, at: float) -> None:
        self._out.append(
            {"ph": "i", "s": "g", "name": name, "cat": "leto", "pid": _JOB, "tid": _FAILURES, "ts": _us(at)}
        )

    def _name(self, process: int, name: str, threads: dict[int, str]) -> None:
        self._out.append({"ph": "M", "name": "process_name", "pid": process, "args": {"name": name}})
        self._out.append(
            {"ph": "M", "name": "process_sort_index", "pid": process, "args": {"sort_index": process}}
        )
        for thread, title in threads.items():
            self._out.append(
                {"ph": "M", "name": "thread_name", "pid": process, "tid": thread, "args": {"name": title}}
            )


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
