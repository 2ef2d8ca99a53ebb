"""What an operator's hook is asked, and what it may answer.

One JSON object on the hook's standard input, `Question`; one word on its standard output: ``hof`` (recover in
place), ``ff`` (fresh memory, from the checkpoint) or ``default`` (as Leto says). The counts are there so that
a hook can have limits of its own."""

from __future__ import annotations

from typing import Literal

import msgspec

from leto_shadow.classifier import Case, Ruling, Verdict
from leto_shadow.config import Limits
from leto_shadow.operability import DeviceFacts

__all__ = ["ANSWERS", "QUESTION_VERSION", "Question", "make_question"]

QUESTION_VERSION = 1

_DETAIL_CHARS = 8000  # whatever it holds, the question fits into a pipe

ANSWERS = ("hof", "ff", "default")


class Question(msgspec.Struct, frozen=True):
    """One failure that is to be classified, and how Leto would."""

    version: int
    kind: str
    rank: int
    generation: int
    iteration: int
    detail: str
    detected_s: float
    drill: bool
    facts: DeviceFacts | None
    """None: the device was not looked at (the host backend; a hang, whose trainer is alive still)."""
    failures_of_rank: int
    """In the window, this one included."""
    window_s: float
    failures_without_progress: int
    fatal_without_progress: int
    verdict: Literal["hof", "ff"]
    reasons: tuple[str, ...]


def make_question(case: Case, ruling: Ruling, generation: int, limits: Limits) -> Question:
    """Put a case and the built-in ruling on it into words."""
    failure = case.failure
    return Question(
        QUESTION_VERSION,
        str(failure.kind),
        failure.rank,
        generation,
        failure.iteration,
        failure.detail[-_DETAIL_CHARS:],
        failure.detected_s,
        failure.drill,
        failure.facts,
        case.recent,
        limits.window_s,
        case.stuck,
        case.fatals,
        "hof" if ruling.verdict is Verdict.HOF else "ff",
        ruling.reasons,
    )
