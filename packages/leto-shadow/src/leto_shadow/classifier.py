"""Hardware-operable or fatal (paper section 2.2): which recovery a failure gets, and when to stop trying.

A failure is a HOF, recovered in place, unless the operability check says otherwise or it repeats: more than
N on one rank in a window, or more than M at one iteration without a finished iteration in between (an error
in the script at iteration 7 would otherwise fail at iteration 7 for ever). A fatal failure restarts all
ranks from one checkpoint; more than F of these without progress end the job. So every series of failures is
of bounded length.
"""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from enum import Enum, StrEnum

from leto_shadow.config import Limits

__all__ = ["Classifier", "Failure", "FailureKind", "Ruling", "Verdict"]


class FailureKind(StrEnum):
    EXIT = "exit"
    HANG = "hang"
    MANAGER = "manager"
    AGENT = "agent"
    """An agent died; all were started again and found the memory of all ranks."""
    NODE = "node"
    """A node is lost, and a spare takes its place."""
    RECOVERY = "recovery"
    """A step of the recovery itself failed or took too long."""
    DECISION = "decision"
    """The ranks could not agree on one state, or did not resume from the one decided (I-5)."""


class Verdict(Enum):
    HOF = "in place"
    FATAL = "fatal"
    ABORT = "abort"


@dataclass(frozen=True)
class Failure:
    """One failure as it was detected; ``rank`` is the culprit, not the one that noticed."""

    kind: FailureKind
    rank: int
    iteration: int
    detail: str
    operable: bool = True
    detected_s: float = 0.0
    drill: bool = False
    """Inflicted on purpose: it says nothing about the hardware, so it does not count towards a limit."""


@dataclass(frozen=True)
class Ruling:
    verdict: Verdict
    reason: str


class Classifier:
    """Keeps the counts; pure apart from them."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._hofs: defaultdict[int, deque[float]] = defaultdict(deque)
        self._stuck_at = -1
        self._stuck = 0
        self._fatals = 0

    def progress(self, iteration: int) -> None:
        """All ranks reached ``iteration``: what failed before it no longer counts as stuck."""
        if iteration > self._stuck_at:
            self._stuck = 0
            self._fatals = 0

    def classify(self, failure: Failure, now: float) -> Ruling:
        """Rule on one failure and count it."""
        if failure.drill and failure.operable and failure.kind is FailureKind.EXIT:
            return Ruling(Verdict.HOF, "a drill")
        self._stuck_at = max(self._stuck_at, failure.iteration)
        self._stuck += 1
        recent = self._hofs[failure.rank]
        recent.append(now)
        while recent[0] < now - self._limits.window_s:
            recent.popleft()
        fatal = self._fatal_reason(failure, len(recent))
        if fatal is None:
            return Ruling(Verdict.HOF, "the hardware is operable")
        recent.clear()
        self._fatals += 1
        if self._fatals > self._limits.fatals:
            count = self._limits.fatals
            return Ruling(Verdict.ABORT, f"{fatal}; {count} fatal recoveries brought no finished iteration")
        return Ruling(Verdict.FATAL, fatal)

    def _fatal_reason(self, failure: Failure, recent: int) -> str | None:
        limits = self._limits
        if failure.kind is FailureKind.MANAGER:
            return "the state manager is gone, and the retained memory with it"
        if failure.kind is FailureKind.NODE:
            return "a node is gone, and the retained memory of its ranks with it"
        if failure.kind is FailureKind.DECISION:
            return "the ranks have no common state in memory"
        if not failure.operable:
            return "the hardware is not operable"
        if recent > limits.hofs_per_rank:
            return f"rank {failure.rank} failed {recent} times within {limits.window_s:.0f} s"
        if self._stuck > limits.hofs_same_iteration:
            return f"{self._stuck} failures without progress beyond iteration {self._stuck_at}"
        return None
