"""Hardware-operable or fatal (paper section 2.2): which recovery a failure gets, and when to stop trying.

A failure is a HOF, recovered in place, unless a row of `_RULES` says otherwise: its memory is gone, its
device is not operable (`leto_shadow.operability`), or it repeats: more than N on one rank in a window, or
more than M at one iteration without a finished iteration in between (an error in the script at iteration 7
would otherwise fail at iteration 7 for ever). A fatal failure restarts all ranks from one checkpoint; more
than F of these without progress end the job. So every series of failures is of bounded length, whatever an
operator's hook (`leto_shadow.classify_hook`) says of single ones: it can neither overrule the end nor stop
the counting."""

from __future__ import annotations

import re
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, StrEnum

from leto_shadow.config import Limits
from leto_shadow.operability import DeviceFacts, judge

__all__ = ["Case", "Classifier", "Failure", "FailureKind", "Ruling", "Verdict", "last_words", "rule"]


_NUMBER = re.compile(r"0x[0-9a-f]+|[0-9]+")


class FailureKind(StrEnum):
    EXIT = "exit"
    HANG = "hang"
    MANAGER = "manager"
    DEVICE = "device"
    """After the fence a device is found not operable that nobody had complained of."""
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


_TRACEBACK = "Traceback (most recent call last):"


def last_words(detail: str) -> str:
    """The one line of a failure's detail that says most.

    Of a traceback the first line that names the exception: an error of CUDA ends with advice that is always
    the same. Else the last line that is not about the process: "(exit status 1, log ...)".
    """
    _, traceback, rest = detail.rpartition(_TRACEBACK)
    if traceback:
        for line in rest.splitlines():
            if line.strip() and not line[0].isspace():
                return line.strip()
    lines = [line.strip() for line in detail.splitlines()]
    return next((line for line in reversed(lines) if line and line[0] != "("), detail)


@dataclass(frozen=True)
class Failure:
    """One failure as it was detected; ``rank`` is the culprit, not the one that noticed."""

    kind: FailureKind
    rank: int
    iteration: int
    detail: str
    facts: DeviceFacts | None = None
    """What was observed of the rank's device; None if it could not be looked at, or has no say."""
    detected_s: float = 0.0
    drill: bool = False
    """Inflicted on purpose: it says nothing about the hardware, so it does not count towards a limit."""
    reported: bool = False
    """The trainer said itself why it failed; ``detail`` ends with its words."""

    @property
    def words(self) -> str:
        """The last line of what it said: the error itself, below the places that it came through."""
        return last_words(self.detail)

    def resembles(self, other: Failure | None) -> bool:
        """Whether both trainers said the same, but for numbers (bytes, processes, addresses)."""
        if other is None or not (self.reported and other.reported):
            return False
        return _NUMBER.sub("", self.words) == _NUMBER.sub("", other.words)


@dataclass(frozen=True)
class Case:
    """All that a verdict depends on."""

    failure: Failure
    recent: int = 1
    """Failures of this rank in the window, this one included."""
    stuck: int = 1
    """Failures of the job without a finished iteration in between, this one included."""
    stuck_at: int = 0
    fatals: int = 0
    """Fatal failures without a finished iteration in between, before this one."""


@dataclass(frozen=True)
class Ruling:
    verdict: Verdict
    reasons: tuple[str, ...]
    open: bool = True
    """An operator may overrule it: nothing but the judgement speaks against going on in place."""
    device: bool = False
    """The rank's device is to blame: it should get another one, if there is one."""

    @property
    def reason(self) -> str:
        """All reasons in one line."""
        return "; ".join(self.reasons)


@dataclass(frozen=True)
class _Rule:
    """A reason to call a failure fatal: the words for it, or () where it does not apply."""

    reasons: Callable[[Case, Limits], tuple[str, ...]]
    open: bool
    device: bool = False


def _if(condition: bool, text: str) -> tuple[str, ...]:
    return (text,) if condition else ()


def _device(case: Case, _limits: Limits) -> tuple[str, ...]:
    found = None if case.failure.facts is None else judge(case.failure.facts)
    if found is None or found.operable:
        return ()
    return tuple(f"the hardware is not operable: {reason}" for reason in found.reasons)


_RULES = (
    _Rule(
        lambda case, _: _if(
            case.failure.kind is FailureKind.MANAGER,
            "the state manager is gone, and the retained memory with it",
        ),
        open=False,
    ),
    _Rule(
        lambda case, _: _if(
            case.failure.kind is FailureKind.NODE,
            "a node is gone, and the retained memory of its ranks with it",
        ),
        open=False,
    ),
    _Rule(
        lambda case, _: _if(
            case.failure.kind is FailureKind.DECISION, "the ranks have no common state in memory"
        ),
        open=False,
    ),
    _Rule(_device, open=True, device=True),
    _Rule(
        lambda case, limits: _if(
            case.recent > limits.hofs_per_rank,
            f"rank {case.failure.rank} failed {case.recent} times within {limits.window_s:.0f} s",
        ),
        open=True,
        device=True,  # hardware that only looks healthy
    ),
    _Rule(
        lambda case, limits: _if(
            case.stuck > limits.hofs_same_iteration,
            f"{case.stuck} failures without progress beyond iteration {case.stuck_at}",
        ),
        open=True,
    ),
)


def rule(case: Case, limits: Limits) -> Ruling:
    """Return the verdict on one case. Pure: the counts are in the case."""
    failure = case.failure
    applying = [(rule, reasons) for rule in _RULES if (reasons := rule.reasons(case, limits))]
    if not applying:
        words = () if failure.facts is None else judge(failure.facts).reasons
        first = "a drill" if failure.drill else "the hardware is operable"
        return Ruling(Verdict.HOF, (first, *words))
    reasons = tuple(reason for _, found in applying for reason in found)
    if case.fatals >= limits.fatals:
        end = f"{limits.fatals} fatal recoveries brought no finished iteration"
        return Ruling(Verdict.ABORT, (*reasons, end), open=False)
    return Ruling(
        Verdict.FATAL,
        reasons,
        open=all(one.open for one, _ in applying),
        device=any(one.device for one, _ in applying),
    )


class Classifier:
    """Keeps the counts; pure apart from them."""

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._hofs: defaultdict[int, deque[float]] = defaultdict(deque)
        self._stuck_at = -1
        self._stuck = 0
        self._fatals = 0
        self.case: Case | None = None
        """The case that was ruled on last."""

    def progress(self, iteration: int) -> None:
        """All ranks reached ``iteration``: what failed before it no longer counts as stuck."""
        if iteration > self._stuck_at:
            self._stuck = 0
            self._fatals = 0

    def classify(self, failure: Failure, now: float) -> Ruling:
        """Rule on one failure and count it."""
        harmless = failure.drill and failure.kind is FailureKind.EXIT
        if harmless and (failure.facts is None or judge(failure.facts).operable):
            self.case = Case(
                failure, len(self._hofs[failure.rank]), self._stuck, self._stuck_at, self._fatals
            )
            return Ruling(Verdict.HOF, ("a drill",))
        self._stuck_at = max(self._stuck_at, failure.iteration)
        self._stuck += 1
        recent = self._hofs[failure.rank]
        recent.append(now)
        while recent[0] < now - self._limits.window_s:
            recent.popleft()
        self.case = Case(failure, len(recent), self._stuck, self._stuck_at, self._fatals)
        ruling = rule(self.case, self._limits)
        if ruling.verdict is not Verdict.HOF:
            recent.clear()
            self._fatals += 1
        return ruling
