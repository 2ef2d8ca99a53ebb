"""What the agent core asks its shell to do; the counterpart of `leto_shadow.actions` on each node.

Answers come back as events of `leto_shadow.agent_core.AgentCore`, named in each docstring.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from leto_shadow import messages as m
from leto_shadow import wire
from leto_shadow.drills import Lose
from leto_shadow.oom_protocol import Verdict

__all__ = [
    "AgentAction",
    "AnswerHook",
    "CheckDevices",
    "CheckReleased",
    "Exit",
    "FenceManager",
    "KillManager",
    "KillTrainer",
    "Note",
    "RenameTrainer",
    "RepairRank",
    "SpawnTrainer",
    "StartManager",
    "Tell",
    "TellTrainer",
]


@dataclass(frozen=True)
class SpawnTrainer:
    """Start the script as trainer ``sid`` of ``rank``; answer `trainer_spawned` or `trainer_gone`.

    A negative rank is that of a spare's trainer, which gets one later: -1 of the first local rank, and so on.
    """

    sid: int
    rank: int


@dataclass(frozen=True)
class RenameTrainer:
    """The trainer of a spare that was called ``old`` is trainer ``sid`` of ``rank`` now."""

    old: int
    sid: int
    rank: int


@dataclass(frozen=True)
class KillTrainer:
    """SIGKILL the trainer and its whole process tree; `trainer_gone` comes when all of it is gone."""

    sid: int


@dataclass(frozen=True)
class TellTrainer:
    sid: int
    message: wire.AgentMessage


@dataclass(frozen=True)
class CheckReleased:
    """See whether the trainer, which says no, can still write retained memory; answer `released`."""

    sid: int


@dataclass(frozen=True)
class AnswerHook:
    """Answer request ``sequence`` of the allocator hook in trainer ``sid``."""

    sid: int
    sequence: int
    verdict: Verdict


@dataclass(frozen=True)
class CheckDevices:
    """Look at the node's devices; answer `devices_checked`. ``anew``: at those that its ranks have used, with
    nothing on them, so that they can be reset; otherwise at those that ranks would have on this node, beside
    whatever waits there."""

    anew: bool = True


@dataclass(frozen=True)
class StartManager:
    """Start a fresh state manager; answer `manager_up` or `manager_gone`."""

    rank: int
    epoch: int


@dataclass(frozen=True)
class KillManager:
    """End the manager of this epoch; answer `manager_gone`."""

    rank: int
    epoch: int


@dataclass(frozen=True)
class FenceManager:
    """Have the manager that was taken over refuse older generations, and see that its last writer is gone;
    answer `manager_fenced`."""

    rank: int
    epoch: int
    generation: int


@dataclass(frozen=True)
class RepairRank:
    """Lose the pages of ``losses`` (drill id, what, seed), localize, remap; answer `repair_done`.

    ``read``: the trainer may have met a memory error that only reading shows (`leto_shadow.localization`).
    """

    rank: int
    generation: int
    epoch: int
    losses: tuple[tuple[str, Lose, int], ...]
    read: bool = True


@dataclass(frozen=True)
class Tell:
    """Send to the coordinator."""

    message: m.FromAgent


@dataclass(frozen=True)
class Note:
    """Write one line of the event log."""

    event: str
    fields: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Exit:
    """Nothing is left: the agent may end."""

    exit_code: int
    reason: str


AgentAction = (
    SpawnTrainer
    | RenameTrainer
    | KillTrainer
    | TellTrainer
    | CheckReleased
    | AnswerHook
    | CheckDevices
    | StartManager
    | KillManager
    | FenceManager
    | RepairRank
    | Tell
    | Note
    | Exit
)
