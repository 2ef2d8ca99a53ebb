"""The laboratory of the crash tests: a deterministic training, a recording executor, an independent judge.

* `World` trains one rank whose gradients, hyperparameters, sync results and job states are functions of the
  seed and the iteration, and computes what every iteration must look like with plain torch.optim alone.
* `Recorder` is an executor that, before every operation, keeps copies of memory as a crash would leave it:
  not begun, or torn together with any operations of other streams that could be in flight.
* `examine` recovers from such a copy. The result is exact or it is refused; a refusal is held against
  `beyond_tolerance`, which knows only the order of operations and the counts of lost pages. `examine_all`
  does so for a matrix of crash points and losses.
"""

from __future__ import annotations

from lab_judge import Outcome, beyond_tolerance, examine, examine_all, orders, rotation
from lab_losses import loss_patterns
from lab_record import Point, Recorder, Truth, interrupted_load, record_iteration, record_recovery, truth_of
from lab_world import MATRICES, SEGMENTS, LabMemory, Pool, State, World, Wrong

__all__ = [
    "MATRICES",
    "SEGMENTS",
    "LabMemory",
    "Outcome",
    "Point",
    "Pool",
    "Recorder",
    "State",
    "Truth",
    "World",
    "Wrong",
    "beyond_tolerance",
    "examine",
    "examine_all",
    "interrupted_load",
    "loss_patterns",
    "orders",
    "record_iteration",
    "record_recovery",
    "rotation",
    "truth_of",
]
