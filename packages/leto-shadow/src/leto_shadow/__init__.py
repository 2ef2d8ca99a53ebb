"""Shadow trainers, node agent and coordinator: in-place takeover of a failed trainer.

A training script subclasses `Trainer` and ends with `leto_shadow.run(MyTrainer())`; `leto run script.py` does
the rest.
"""

from leto_shadow._version import __version__
from leto_shadow.context import Context, ContextError
from leto_shadow.drills import Drill, DrillError, load_drills
from leto_shadow.events import EventReader, EventWriter, read_events
from leto_shadow.oom_hook import reclaim_at_first_failure
from leto_shadow.progress import Phase
from leto_shadow.run import run
from leto_shadow.trainer import CannotDisconnectError, Trainer

__all__ = [
    "CannotDisconnectError",
    "Context",
    "ContextError",
    "Drill",
    "DrillError",
    "EventReader",
    "EventWriter",
    "Phase",
    "Trainer",
    "__version__",
    "load_drills",
    "read_events",
    "reclaim_at_first_failure",
    "run",
]
