"""The agent's side of a schedule of failures: each at its time after training has begun, exactly once.

The clock is CLOCK_MONOTONIC, and zero is when the node's ranks trained for the first time. An injection that
is due while its rank is recovering waits until it trains again; the event `injected` says when it was planned
and when it came, so an experiment is measured by what happened, not by what was planned. A schedule may ask
for a clock that stands still while shadows are on their way (`leto_shadow.schedule.Schedule`). A node that
gets the ranks of another one goes on with the job's clock, without what struck there (`leto_shadow.fired`).
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Container, Iterable
from typing import Any

from leto_shadow.control import Inject, Reply
from leto_shadow.events import Event
from leto_shadow.fired import of_injection
from leto_shadow.schedule import Injection, Schedule

__all__ = ["Injector", "begun_before"]

_PATIENCE_S = 60.0
"""Shadows that have not come up so long after a recovery are not waited for any more."""


class Injector:
    """Call `tick` often, and after `due_s` at the latest. ``training(rank)``: the local rank trains now.
    ``inject`` carries one out, after ``tell`` has told others its name. ``standing(rank)``: the rank's shadow
    has reached the level where it waits; asked where the schedule's clock is "ready". ``fired``: names of
    what has struck, anywhere. ``elapsed``: seconds since the job first trained, None if it has not."""

    def __init__(
        self,
        schedule: Schedule,
        inject: Callable[[Inject], Reply],
        ranks: Callable[[], range],
        training: Callable[[int], bool],
        record: Callable[..., Any],
        standing: Callable[[int], bool],
        fired: Container[str] = frozenset(),
        tell: Callable[[str], object] = str,
        elapsed: Callable[[], float | None] = lambda: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.key = schedule.key
        self._left = list(enumerate(schedule.injections))
        self._inject = inject
        self._ranks = ranks
        self._training = training
        self._record = record
        self._clock = clock
        self._standing = standing if schedule.clock == "ready" else None
        self._fired = fired
        self._tell = tell
        self._elapsed = elapsed
        self.began: float | None = None
        self._goes = False
        self._elapsed_s = 0.0
        self._looked: float | None = None  # when the clock was last found running
        self._trains_since: float | None = None

    @property
    def left(self) -> int:
        """How many are still to come, on all nodes."""
        return len(self._left)

    def resume(self, began: float) -> None:
        """Go on with the clock of a dead agent."""
        self.began = began

    def _has_struck(self, number: int) -> bool:
        return of_injection(self.key, number) in self._fired

    def _begin(self, now: float, ranks: range) -> None:
        """The node's ranks train for the first time; another node may have had them before."""
        self._goes = True
        struck = [one.at_s for number, one in self._left if one.rank in ranks and self._has_struck(number)]
        self._elapsed_s = max(struck, default=0.0)  # for how long shadows stood, nobody knows any more
        self._left = [(number, one) for number, one in self._left if not self._has_struck(number)]
        if self.began is None:
            elapsed_s = self._elapsed() or 0.0
            self.began = now - elapsed_s
            self._record(
                "injections_begun", count=len(self._left), schedule=self.key, elapsed_s=round(elapsed_s, 6)
            )

    @property
    def due_s(self) -> float:
        """Seconds until the next injection is due if its clock runs on; infinite while it stands still."""
        if self.began is None or not self._left or self._trains_since is None:
            return math.inf
        now = self._clock()
        if self._standing is None:
            elapsed_s = now - self.began
        elif self._looked is not None:
            elapsed_s = self._elapsed_s + now - self._looked
        else:
            return math.inf
        return max(0.0, self._left[0][1].at_s - elapsed_s)

    def _time(self, now: float, ranks: range) -> float:
        """Return what the schedule's clock shows."""
        assert self.began is not None
        if self._standing is None:
            return now - self.began
        since = self._trains_since
        runs = since is not None and (
            all(self._standing(rank) for rank in ranks) or now - since > _PATIENCE_S
        )
        if runs and self._looked is not None:
            self._elapsed_s += now - self._looked
        self._looked = now if runs else None
        return self._elapsed_s

    def tick(self) -> None:
        """Carry out what is due."""
        if not self._left:
            return
        ranks, now = self._ranks(), self._clock()
        trains = bool(ranks) and all(self._training(rank) for rank in ranks)
        if not trains:
            self._trains_since = None
        elif self._trains_since is None:
            self._trains_since = now
        if not self._goes:
            if not trains:
                return
            self._begin(now, ranks)
        elapsed_s = self._time(now, ranks)
        due = [(number, one) for number, one in self._left if one.at_s <= elapsed_s]
        for number, one in due:
            if one.rank not in ranks or self._has_struck(number):
                self._left.remove((number, one))  # another node's, or was
            elif all(self._training(rank) for rank in ranks):
                self._left.remove((number, one))
                self._carry_out(number, one, elapsed_s)
            else:
                return  # all are recovering, and come in their order

    def _carry_out(self, number: int, one: Injection, elapsed_s: float) -> None:
        self._tell(of_injection(self.key, number))
        reply = self._inject(as_request(one))
        self._record(
            "injected",
            schedule=self.key,
            number=number,
            kind=one.kind,
            rank=one.rank,
            planned_s=one.at_s,
            actual_s=round(elapsed_s, 6),
            done=reply.ok,
            detail=reply.detail,
        )


def as_request(one: Injection) -> Inject:
    """Return what `leto inject` would ask for the same failure."""
    if one.kind == "lose":
        return Inject("lose", one.rank, one.allocation, one.group, one.pages, seed=one.seed)
    if one.kind == "ff":
        return Inject("fatal", one.rank, xid=one.xid, heals_s=one.heals_s)
    return Inject(one.kind, one.rank)


def begun_before(events: Iterable[Event], node: int, schedule: str, since: float) -> float | None:
    """Return when a dead agent of this node began the schedule (monotonic); None if none did since ``since``
    (Unix seconds)."""
    for event in events:
        mine = event.get("node") == node and float(event.get("t", 0.0)) >= since
        if mine and event["event"] == "injections_begun" and event.get("schedule") == schedule:
            return float(event["mono"]) - float(event.get("elapsed_s", 0.0))
    return None
