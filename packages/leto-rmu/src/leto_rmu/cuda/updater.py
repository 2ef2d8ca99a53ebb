"""CudaUpdater: the protocol of `ResumableUpdater`, its chunk transactions as launches on a stream.

Role: upholds I-2 on a device that works behind the host's back. An operation on the device may be under way
when the next one is issued; the stream keeps their order. What the host writes is ordered by waiting: a mark
is written only when everything issued before it has ended, and H reaches the host by a copy that waits,
before tier 2 is computed from it. A page is acknowledged only after all work on the device
(`leto_rmu.cuda.memory`).
"""

from __future__ import annotations

from collections.abc import Callable

from leto_rmu.cuda.memory import CudaMemory
from leto_rmu.cuda.views import CudaRankMemory
from leto_rmu.layout import UpdatePlan
from leto_rmu.marker import GroupCell, Marker, RankCell
from leto_rmu.ops import Executor, Op
from leto_rmu.regrade import RecomputeGradients
from leto_rmu.update import ChunkTransactions
from leto_rmu.updater import ResumableUpdater

__all__ = ["CudaTransactions", "CudaUpdater", "OrderedMarker"]


class OrderedMarker(Marker):
    """A marker that never leads the device."""

    wait: Callable[[], None]

    def write(self, group: int | None, value: RankCell | GroupCell, *, name: str = "mark") -> Op:
        op = super().write(group, value, name=name)

        def apply() -> None:
            self.wait()
            op.apply()

        return Op(op.name, op.group, op.chunk, op.writes, apply, op.iteration)


class CudaTransactions(ChunkTransactions):
    """Chunk transactions on the device."""


class CudaUpdater(ResumableUpdater):
    """Crash-consistent optimizer of one rank, its state on a GPU.

    Parameters as of `ResumableUpdater`; ``memory`` is a leto_rmp ``Client`` of a pool with backend "cuda" and
    the writer role, or a memory of this package. Work is put on torch's current stream: call step() on
    the stream that the gradients are complete on. The reference for bit equality is ``torch.optim`` with
    ``foreach=True`` on the same GPU.
    """

    transactions = CudaTransactions
    views = CudaRankMemory
    markers = OrderedMarker

    def __init__(
        self,
        memory: object,
        plan: UpdatePlan,
        barrier: Callable[[], None],
        rebuild_derived: Callable[[ResumableUpdater], None] | None = None,
        executor: Executor | None = None,
        recompute_gradients: RecomputeGradients | None = None,
    ) -> None:
        if hasattr(memory, "marks") and not hasattr(memory, "lost"):
            memory = CudaMemory(memory)
        super().__init__(memory, plan, barrier, rebuild_derived, executor, recompute_gradients)

    def _attach(self) -> None:
        super()._attach()
        assert isinstance(self.memory, CudaRankMemory)
        assert isinstance(self.marker, OrderedMarker)
        self.marker.wait = self.memory.wait
