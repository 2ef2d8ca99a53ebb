"""Errors of the RMU: few, named, and each says what was expected, what was found and what to do."""

# ruff: noqa: N818 - the names say what happened
from __future__ import annotations

__all__ = [
    "DecisionError",
    "JobStateTooLarge",
    "LayoutMismatch",
    "PlanError",
    "ProtocolError",
    "RmuError",
    "UnsupportedOption",
]


class RmuError(Exception):
    """Base of every error that the RMU raises."""


class PlanError(RmuError, ValueError):
    """The plan cannot be laid out: sizes, alignment or segments contradict each other."""


class UnsupportedOption(RmuError, ValueError):
    """An optimizer option that the RMU does not reproduce; the message names it."""


class LayoutMismatch(RmuError):
    """The surviving memory was written under another plan (I-6); nothing of it may be trusted."""


class JobStateTooLarge(RmuError, ValueError):
    """The job state does not fit its slot; the message says which size would do."""


class ProtocolError(RmuError):
    """A call out of order, or a decision that contradicts this rank's marker."""


class DecisionError(RmuError, ValueError):
    """Summaries that cannot be read or that belong to different jobs."""
