"""Resumable Model Updater: optimizer steps as chunk transactions that survive a crash (paper section 5).

Lay the state out with `UpdatePlan`, hold it in a `ResumableUpdater`, and call `compute_begins` and `step`
once an iteration. After a crash a new updater over the same memory gives a `summary`, all summaries go
through `decide`, and `recover` brings every rank to the same iteration, bit for bit.
"""

from leto_rmu import faults
from leto_rmu._version import __version__
from leto_rmu.decision import Action, Decision, Summary, Vote, decide
from leto_rmu.derived import cast_masters
from leto_rmu.errors import (
    DecisionError,
    JobStateTooLarge,
    LayoutMismatch,
    PlanError,
    ProtocolError,
    RmuError,
    UnsupportedOption,
)
from leto_rmu.groups import protected_groups
from leto_rmu.layout import Segment, UpdatePlan
from leto_rmu.marker import MARKER_VERSION, SyncResult
from leto_rmu.memory import ArrayMemory, ClientMemory, Memory
from leto_rmu.muon import Muon
from leto_rmu.ops import OP_NAMES, Executor, Op
from leto_rmu.optimizers import SGD, AdamW, Hyper
from leto_rmu.recovery import Recovered
from leto_rmu.updater import ResumableUpdater

__all__ = [
    "MARKER_VERSION",
    "OP_NAMES",
    "SGD",
    "Action",
    "AdamW",
    "ArrayMemory",
    "ClientMemory",
    "Decision",
    "DecisionError",
    "Executor",
    "Hyper",
    "JobStateTooLarge",
    "LayoutMismatch",
    "Memory",
    "Muon",
    "Op",
    "PlanError",
    "ProtocolError",
    "Recovered",
    "ResumableUpdater",
    "RmuError",
    "Segment",
    "Summary",
    "SyncResult",
    "UnsupportedOption",
    "UpdatePlan",
    "Vote",
    "__version__",
    "cast_masters",
    "decide",
    "faults",
    "protected_groups",
]
