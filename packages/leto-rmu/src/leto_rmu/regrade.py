"""Gradient policy "recompute": lost gradients are computed again instead of being protected.

Role: saves the parity R of the gradients, which "parity" (the paper's way) encodes in every iteration. It
rests on this: gradients of iteration t are a function of the derived parameters and the job state of t, and
both are kept until nobody needs the gradients any more. So

* derived state is overwritten only after a barrier of the world that every rank enters UPDATED(t), in a
  recovery too (`ResumableUpdater.rebuild_derived`); the job state of t keeps its slot until PROTECTED(t+1);
* a rank that needs gradients which are lost says so in its vote. Then all ranks run forward, backward and
  reduction of t once more, or, if one of them has lost derived pages, all go to the checkpoint;
* before the first gradient is overwritten, the marker says that gradients are being computed again. A crash
  in between leaves them torn, on every rank, and the next recovery computes them once more;
* a barrier of the world comes before they are looked at, so that what a broken reduction has left is neither
  compared nor used (`leto_rmu.updater`).

Gradient pages that had survived must come out with the bits that they had. If they do not, the computation is
not deterministic, and nothing that it gave may be trained on (I-6).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from leto_rmu import arrays
from leto_rmu.decision import Vote
from leto_rmu.errors import ProtocolError
from leto_rmu.marker import Phase, RankCell
from leto_rmu.ops import Op
from leto_rmu.regions import GRADS, MODEL
from leto_rmu.views import RankMemory, indices

if TYPE_CHECKING:
    from leto_rmu.updater import ResumableUpdater

__all__ = ["POLICIES", "RecomputeGradients", "regrade", "vote"]

POLICIES = ("parity", "recompute")

RecomputeGradients = Callable[["ResumableUpdater", int, bytes], None]
"""Called with the updater, the iteration t and the job state of t: leaves the gradients of t in ``grads``.

It runs forward, backward and reduction of t with derived state as it is, on all ranks at once.
"""


def vote(updater: ResumableUpdater) -> Vote:
    """Whether this rank can compute the gradients of its iteration again."""
    cell = updater.marker.rank
    if updater.plan.gradients != "recompute" or cell is None:
        return Vote(False, "gradients are protected by parity, not computed again")
    if updater.recompute_gradients is None:
        return Vote(False, "the updater was given no function to compute gradients again")
    if indices(updater.lost, MODEL):
        return Vote(False, "derived pages are lost, gradients cannot be computed again")
    if updater.jobs.read(cell.iteration) is None:
        return Vote(False, f"the job state of iteration {cell.iteration} is lost in all its replicas")
    return Vote(True)


def regrade(updater: ResumableUpdater, role: RankCell, needed: Collection[int]) -> None:
    """Gradients of ``role.iteration`` again, between two marks; ``needed`` pages were right, unless lost."""
    memory, t = updater.memory, role.iteration
    record, callback = updater.jobs.read(t), updater.recompute_gradients
    if record is None or callback is None:
        raise ProtocolError(f"this rank cannot compute the gradients of iteration {t} again, but voted so")
    kept = sorted(set(needed) - indices(updater.lost, GRADS))
    before = _sums(memory, kept)
    pages: Any = memory.regions[GRADS].pages
    run = lambda: callback(updater, t, record.job_state)  # noqa: E731
    updater.executor.run(Op("recompute", None, None, (pages,), run, t))
    updater._barrier()  # I-6
    if not torch.equal(before, _sums(memory, kept)):
        updater.executor.run(updater.marker.write(None, RankCell(Phase.LOADING, t, 0, role.epoch)))
        raise ProtocolError(
            f"gradients of iteration {t} that had survived were computed again with other bits: forward, "
            "backward or reduction is not deterministic, or depends on more than derived and job state. "
            'This rank\'s state is given up; use gradients="parity"'
        )
    if role.phase is Phase.SYNCED:
        updater.executor.run(updater.marker.write(None, replace(role, regrading=False)))


def _sums(memory: RankMemory, kept: list[int]) -> torch.Tensor:
    """Two sums of the words of each page, one of them weighted: (pages, 2)."""
    pages = memory.regions[GRADS].pages
    found = []
    for page in kept:
        words = arrays.flat(pages[page], torch.int64)
        weights = torch.arange(1, 2 * words.numel(), 2, device=words.device)
        found.append(torch.stack((words.sum(), (words * weights).sum())))
    return torch.stack(found) if found else torch.empty(0)
