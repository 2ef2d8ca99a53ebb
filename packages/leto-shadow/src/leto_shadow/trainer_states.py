"""States of one trainer process as its agent sees it, and what the process may say in each.

    STARTING -> SHADOW -> PROMOTED -> EXCHANGED -> RESUMING -> TRAINING -> FINISHED
         PROMOTED to TRAINING -> LOST (a peer is gone: it waits for the fence)
         PROMOTED to TRAINING, LOST -> RETIRING (asked to) -> RELEASED (cannot write any more) -> SHADOW
         any of them -> FAILED (it said so, or broke the protocol) -> GONE
         any of them -> KILLED (fence, discard, shutdown)          -> GONE

A trainer that retires keeps its process and its sid. From RELEASED on it is unpromoted, and of no world.

A message that the table does not allow is the *trainer's* fault (user code can write to any descriptor): the
agent kills the trainer and reports why. It does not end the agent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from leto_shadow import wire
from leto_shadow.operability import DeviceFacts

__all__ = ["ACTIVE", "ALLOWED", "OUTDATED", "TrainerRecord", "TrainerState"]


class TrainerState(Enum):
    STARTING = "starting"
    SHADOW = "shadow"
    PROMOTED = "promoted"
    EXCHANGED = "exchanged"
    RESUMING = "resuming"
    TRAINING = "training"
    LOST = "peer lost"
    RETIRING = "retiring"
    RELEASED = "released"
    FINISHED = "finished"
    FAILED = "failed"
    KILLED = "killed"


_T = TrainerState
ACTIVE = frozenset({_T.PROMOTED, _T.EXCHANGED, _T.RESUMING, _T.TRAINING})

ALLOWED: dict[type, frozenset[TrainerState]] = {
    wire.Hello: frozenset({_T.STARTING}),
    wire.LevelReached: frozenset({_T.SHADOW}),
    wire.Summary: frozenset({_T.PROMOTED}),
    wire.Resumed: frozenset({_T.RESUMING}),
    wire.Metrics: frozenset({_T.TRAINING}),
    wire.Hint: frozenset({_T.TRAINING}),
    wire.Memory: frozenset({_T.TRAINING}),
    wire.DrillFired: ACTIVE | {_T.RETIRING},
    wire.PeerLost: ACTIVE,
    wire.Released: frozenset({_T.RETIRING}),
    wire.Retired: frozenset({_T.RELEASED}),
    wire.Finished: frozenset({_T.TRAINING}),
    wire.Failed: frozenset({_T.STARTING, _T.SHADOW, _T.LOST, _T.RETIRING, _T.RELEASED}) | ACTIVE,
}

OUTDATED = (
    wire.Summary,
    wire.Resumed,
    wire.Metrics,
    wire.Hint,
    wire.Memory,
    wire.PeerLost,
    wire.Finished,
)
"""What a trainer may have said before it heard that it is to retire."""


@dataclass
class TrainerRecord:
    """One trainer process. ``generation`` is None until it is promoted."""

    sid: int
    rank: int
    world: int
    state: TrainerState = TrainerState.STARTING
    generation: int | None = None
    from_spare: bool = False
    """It was started on a spare node, without a rank."""
    level: int = 0
    asked: int = 0
    """Level it was last asked for; above L1 it may hold GPU memory, whatever it has reached."""
    parked_bytes: int = 0
    """Memory of its device that it has given back until it is promoted; 0 again when it trains."""
    took: tuple[int, bool] | None = None
    """Of an active trainer whose allocation waits: the level of the shadow that was ended for it, and
    whether that shadow had reached it."""
    told_memory: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Lowest (free bytes, free and spare bytes) told to the coordinator, by level of the shadow at that
    time."""
    reclaimed: bool = False
    """It was killed because the active trainer needs its memory."""
    taken_by: int = -1
    """Generation of that active trainer."""
    pid: int = 0
    retires: bool = False
    """Its script can become a shadow again."""
    asked_at: float = 0.0
    """When it was asked to retire."""
    gave_up_s: float = 0.0
    """How long it took from there until it could not write any more."""
    survived: int | None = None
    """Of a trainer that has retired: the generation that it was active in."""
    announced: bool = False
    """The coordinator knows of this survivor."""
    iteration: int = 0
    error: str = ""
    secondary: bool = False
    python_error: bool = False
    """The error it reported is one of Python itself, no device's."""
    reported: bool = False
    """It said itself why it failed, at the end of `error`."""
    memory: bool = False
    """The error it reported says that the device has no memory left."""
    discarded: bool = False
    kill_at: float | None = None
    """When to kill it if it has not gone by itself; then, when to try again."""
    fired_at: float | None = None
    """When a drill announced that it would fire in this trainer."""
    hung_up_at: float | None = None
    """When its channel closed while it was active: its process is ending, or has thrown the channel away."""
    facts: DeviceFacts | None = None
    """What was observed of its device at that time, or is made up by an injection."""
    told: bool = False
    """The coordinator knows of its failure already."""
    changed_s: float = 0.0
    excused_s: float = 0.0
    """When it last stood still with leave: inside an allocation that waited for a shadow's memory."""
    phase: int = 0
    waiting: bool = False
    counter: int = 0

    @property
    def reserved(self) -> bool:
        """It has retired and belongs to no world yet: another trainer may be the shadow of its rank."""
        return self.survived is not None and self.world == 0
