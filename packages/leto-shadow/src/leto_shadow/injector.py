"""The agent's side of a schedule of failures: each at its time after training has begun, exactly once.

The clock is CLOCK_MONOTONIC, and zero is when the node's ranks trained for the first time. An injection that
is due while its rank is recovering waits until it trains again; the event `injected` says when it was planned
and when it came, so an experiment is measured by what happened, not by what was planned."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

from leto_shadow.control import Inject, Reply
from leto_shadow.events import Event
from leto_shadow.schedule import Injection

__all__ = ["Injector", "begun_before"]


class Injector:
    """Call `tick` often. ``training(rank)``: the local rank trains now. ``inject`` carries one out."""

    def __init__(
        self,
        injections: Iterable[Injection],
        inject: Callable[[Inject], Reply],
        ranks: Callable[[], range],
        training: Callable[[int], bool],
        record: Callable[..., Any],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._left = list(enumerate(injections))
        self._inject = inject
        self._ranks = ranks
        self._training = training
        self._record = record
        self._clock = clock
        self.began: float | None = None

    @property
    def left(self) -> int:
        """How many are still to come, on all nodes."""
        return len(self._left)

    def resume(self, began: float, done: set[int]) -> None:
        """Go on with the clock of a dead agent, without what it had injected."""
        self.began = began
        self._left = [(number, one) for number, one in self._left if number not in done]

    def tick(self) -> None:
        """Carry out what is due."""
        if not self._left:
            return
        ranks = self._ranks()
        if self.began is None:
            if not ranks or not all(self._training(rank) for rank in ranks):
                return
            self.began = self._clock()
            self._record("injections_begun", count=len(self._left))
        elapsed_s = self._clock() - self.began
        due = [(number, one) for number, one in self._left if one.at_s <= elapsed_s]
        for number, one in due:
            if one.rank not in ranks:
                self._left.remove((number, one))  # another node's
            elif all(self._training(rank) for rank in ranks):
                self._left.remove((number, one))
                self._carry_out(number, one, elapsed_s)
            else:
                return  # all are recovering, and come in their order

    def _carry_out(self, number: int, one: Injection, elapsed_s: float) -> None:
        reply = self._inject(as_request(one))
        self._record(
            "injected",
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
        return Inject("fatal", one.rank, xid=one.xid)
    return Inject(one.kind, one.rank)


def begun_before(events: Iterable[Event], node: int, since: float) -> tuple[float, set[int]] | None:
    """Return when a dead agent of this node began its schedule (monotonic), and what it had injected; None if
    none did since ``since`` (Unix seconds)."""
    began: float | None = None
    done: set[int] = set()
    for event in events:
        if event.get("node") != node or float(event.get("t", 0.0)) < since:
            continue
        if event["event"] == "injections_begun" and began is None:
            began = float(event["mono"])
        elif event["event"] == "injected":
            done.add(int(event["number"]))
    return None if began is None else (began, done)
