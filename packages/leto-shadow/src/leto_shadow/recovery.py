"""One recovery in progress: what caused it, which way it goes, where the time went (paper section 8.1)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from leto_shadow.classifier import Failure, Verdict

__all__ = ["Recovery"]


@dataclass
class Recovery:
    """From the detection of a failure (or the start of the job) until all ranks have resumed."""

    started: float
    failure: Failure | None = None
    """None at the start of the job."""
    verdicts: dict[int, Verdict] = field(default_factory=dict)
    """By number: one for each failure that this recovery answers to."""
    suspects: dict[int, int] = field(default_factory=dict)
    """By number of the verdict: the rank whose device is to blame, if the verdict is fatal."""
    lost_pages: int = 0
    marks: dict[str, float] = field(default_factory=dict)
    """Seconds by part; they add up to the time since `started`."""

    @property
    def fatal(self) -> bool:
        """All ranks go to one checkpoint, with fresh memory."""
        return Verdict.FATAL in self.verdicts.values()

    @property
    def unfit(self) -> frozenset[int]:
        """Ranks that need another device."""
        fatal = (number for number, verdict in self.verdicts.items() if verdict is Verdict.FATAL)
        return frozenset(self.suspects[number] for number in fatal if number in self.suspects)

    def mark(self, name: str, now: float) -> None:
        """The part ``name`` ends now; it began where the last one ended."""
        spent = now - self.started - sum(self.marks.values())
        self.marks[name] = self.marks.get(name, 0.0) + spent

    def report(
        self, generation: int, iteration: int, source: str, reached: int, now: float
    ) -> dict[str, Any]:
        """Return the fields of the `recovered` event; ``reached`` is the iteration before the failure."""
        return {
            "generation": generation,
            "iteration": iteration,
            "source": source,
            "fatal": self.fatal,
            "lost_pages": self.lost_pages,
            "iterations_lost": max(0, reached - iteration),
            "breakdown": {**self.marks, "total": now - self.started},
        }
