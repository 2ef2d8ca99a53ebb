"""Phases of a job as the coordinator sees it, and which of them may follow which (paper section 3.4).

    JOINING -> STARTING -> PREPARING -> EXCHANGING -> DECIDING -> RESUMING -> TRAINING -> STOPPING -> DONE
           |      ^            ^                          any failure of a promoted trainer, or a hang:
           |      |            |                                     -> FENCING (generation + 1)
           +-> FENCING, if the agents were started again and hold the memory of all ranks; and from anywhere,
                  |            |  if a spare node takes the place of a lost one
                  |            |
                  |            +---- REPAIRING <---- hardware-operable <----+
                  +------------------ fatal: fresh managers <---------------+

`LEGAL` lists in which phases a message *of the current generation and epoch* may arrive; anything else is a
bug and raises `UnexpectedEventError`. Messages of older generations are dropped and counted before that.
"""

from __future__ import annotations

from enum import Enum

from leto_shadow import messages as m

__all__ = ["FOLLOWS", "LEGAL", "Phase"]


class Phase(Enum):
    JOINING = "joining"
    """Agents report in."""
    STARTING = "starting"
    """A fresh epoch of state managers comes up."""
    FENCING = "fencing"
    """Every trainer of the failed generation is being killed and proven dead, or gives up writing (I-4)."""
    REPAIRING = "repairing"
    """Lost pages are localized and remapped."""
    PREPARING = "preparing"
    """Shadows below L3 complete their deferred initialization."""
    EXCHANGING = "exchanging"
    """All shadows are promoted together; their summaries are awaited."""
    DECIDING = "deciding"
    """All summaries are in; the decision function is at work."""
    RESUMING = "resuming"
    """The decision is out; every trainer reconstructs and reports where it goes on (I-5)."""
    TRAINING = "training"
    STOPPING = "stopping"
    DONE = "done"


_P = Phase
_STOP = frozenset({_P.STOPPING})

FOLLOWS: dict[Phase, frozenset[Phase]] = {
    _P.JOINING: frozenset({_P.STARTING, _P.FENCING}) | _STOP,
    _P.STARTING: frozenset({_P.STARTING, _P.PREPARING, _P.FENCING}) | _STOP,
    _P.FENCING: frozenset({_P.REPAIRING, _P.STARTING, _P.FENCING}) | _STOP,
    _P.REPAIRING: frozenset({_P.PREPARING, _P.STARTING, _P.FENCING}) | _STOP,
    _P.PREPARING: frozenset({_P.EXCHANGING, _P.STARTING, _P.FENCING}) | _STOP,
    _P.EXCHANGING: frozenset({_P.DECIDING, _P.FENCING}) | _STOP,
    _P.DECIDING: frozenset({_P.RESUMING, _P.FENCING}) | _STOP,
    _P.RESUMING: frozenset({_P.TRAINING, _P.FENCING}) | _STOP,
    _P.TRAINING: frozenset({_P.FENCING}) | _STOP,
    _P.STOPPING: frozenset({_P.DONE}),
    _P.DONE: frozenset(),
}

_STARTED = frozenset(_P) - {_P.JOINING, _P.DONE}
_PROMOTED = frozenset({_P.EXCHANGING, _P.DECIDING, _P.RESUMING, _P.TRAINING, _P.STOPPING})

LEGAL: dict[type, frozenset[Phase]] = {
    m.Join: frozenset({_P.JOINING}) | _STOP,
    m.ManagersReady: frozenset({_P.STARTING}) | _STOP,
    m.ManagerFailed: _STARTED,
    m.ShadowAt: _STARTED,
    m.ShadowFailed: _STARTED,
    m.ShadowReclaimed: _STARTED,
    m.Reclaimed: _PROMOTED,
    m.MemoryOf: _PROMOTED,
    m.FootprintOf: _STARTED,
    m.SurvivorAt: _STARTED,
    m.Fenced: frozenset({_P.FENCING}) | _STOP,
    m.Repaired: frozenset({_P.REPAIRING}) | _STOP,
    m.RepairFailed: frozenset({_P.REPAIRING}) | _STOP,
    m.SummaryOf: frozenset({_P.EXCHANGING}) | _STOP,
    m.ResumedOf: frozenset({_P.RESUMING}) | _STOP,
    m.ActiveFailed: _PROMOTED,
    m.FinishedOf: frozenset({_P.RESUMING, _P.TRAINING}) | _STOP,
    m.Fired: _STARTED,
    m.SpareUnfit: _STARTED,
    m.Retired: _STARTED,
    m.Fit: _STARTED,
    m.Bye: frozenset(_P) - {_P.DONE},
}
