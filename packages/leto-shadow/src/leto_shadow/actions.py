"""What the coordinator asks its shell to do, and the error of an event that its tables do not allow.

The coordinator (paper section 3.4) is sans-IO: it takes events with their time and returns these values. The
shell on node rank 0 carries them out; the simulation in the tests does the same with a simulated network.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from leto_shadow.hook_question import Question
from leto_shadow.messages import ToAgent

__all__ = [
    "Action",
    "AskDecision",
    "AskHook",
    "CloseStore",
    "Done",
    "HostStore",
    "Record",
    "Send",
    "UnexpectedEventError",
]


class UnexpectedEventError(RuntimeError):
    """An event arrived in a state whose table does not list it: a bug, never a condition to live with."""


@dataclass(frozen=True)
class Send:
    """Deliver one message to the agent of ``node``."""

    node: int
    message: ToAgent


@dataclass(frozen=True)
class HostStore:
    """Open a TCPStore for ``world`` on a port that the kernel chooses; answer `Coordinator.store_ready`."""

    world: int


@dataclass(frozen=True)
class CloseStore:
    """The world is gone, and with it the use of its store (I-7)."""

    world: int


@dataclass(frozen=True)
class AskDecision:
    """Call the decision function on the summaries in rank order; answer with `Coordinator.decided`."""

    generation: int
    summaries: tuple[bytes, ...]


@dataclass(frozen=True)
class AskHook:
    """Ask the operator's hook about verdict ``number``; answer with `Coordinator.hook_answered`."""

    number: int
    question: Question


@dataclass(frozen=True)
class Record:
    """Write one line of the job's event log."""

    event: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Done:
    """The job is over."""

    exit_code: int
    reason: str


Action = Send | HostStore | CloseStore | AskDecision | AskHook | Record | Done
