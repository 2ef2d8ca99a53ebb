"""CudaUpdater: the protocol of `ResumableUpdater` over GPU memory, without waits of the host inside the
update.

Role: upholds I-2 on a device that works behind the host's back. Everything is issued in the order of the
protocol; lanes keep that order where operations touch the same memory (`leto_rmu.cuda.lanes`), and marks
are written in stream order (`leto_rmu.cuda.marks`). The host waits where it writes surviving memory itself,
or speaks to other ranks:

* before the job state of t + 1 is staged: ITERATION(t) is visible then, and the record overwritten is of no
  more use;
* before the barrier: PROTECTED(t) is complete on the device (I-3), and so is what came before it on the
  caller's stream, the reduction of the gradients above all (I-6, see `leto_rmu.updater`). The global
  synchronization, issued behind PROTECTED(t), has waited for both already where it brings a norm to the host;
* before recovery or initialize() looks at memory, and before pages are acknowledged.

Executors other than `LaneExecutor` (and the plain `Executor`) look at memory between operations. Under them
each operation has ended when it returns, on one lane.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from leto_rmu.cuda.marks import StreamMarker
from leto_rmu.cuda.memory import CudaMemory
from leto_rmu.cuda.transactions import NOT_EARLY, CudaSlotTransactions, CudaTransactions, load_op
from leto_rmu.cuda.views import CudaRankMemory
from leto_rmu.jobstate import JobRecord
from leto_rmu.layout import UpdatePlan
from leto_rmu.marker import Phase, RankCell, SyncResult
from leto_rmu.ops import Executor, Op
from leto_rmu.optimizers import Hyper
from leto_rmu.recovery import Recovered
from leto_rmu.regrade import RecomputeGradients
from leto_rmu.updater import ResumableUpdater

__all__ = ["CudaUpdater", "LaneExecutor"]


class LaneExecutor(Executor):
    """Issues prefetches first: copies are on their way when the device gets to the chunks that need them."""

    def choose(self, ready: list[str]) -> int:
        return ready.index("prefetch") if "prefetch" in ready else 0


class CudaUpdater(ResumableUpdater):
    """Crash-consistent optimizer of one rank, its state on a GPU.

    Parameters as of `ResumableUpdater`; ``memory`` is a leto_rmp ``Client`` of a pool with backend "cuda" and
    the writer role, or a memory of this package. Work is put on torch's current stream, and copies of
    parity on streams of their own: call step() on the stream that the gradients are complete on. step()
    returns when all of the update is issued; `wait` returns when it is done. The reference for bit equality
    is ``torch.optim`` with ``foreach=True`` on the same GPU.
    """

    transactions = CudaTransactions
    slot_transactions = CudaSlotTransactions
    views = CudaRankMemory
    markers = StreamMarker
    memory: CudaRankMemory
    marker: StreamMarker

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
        self._committed: Any = None  # event of the newest ITERATION mark

        def when_protected() -> None:
            self.memory.lanes.wait(self.memory.lanes.here())
            barrier()

        executor = LaneExecutor() if executor is None else executor
        super().__init__(memory, plan, when_protected, rebuild_derived, executor, recompute_gradients)

    @property
    def executor(self) -> Executor:
        """Runs every write."""
        return self._executor

    @executor.setter
    def executor(self, executor: Executor) -> None:
        self._executor = executor
        if hasattr(self, "memory"):
            self._set_concurrency()

    def _set_concurrency(self) -> None:
        lanes, executor = self.memory.lanes, self._executor
        lanes.settle()
        lanes.concurrent = lanes.queues is not None and (
            type(executor) is Executor or isinstance(executor, LaneExecutor)
        )

    def _attach(self) -> None:
        self.memory.lanes.settle()
        self.memory.early = NOT_EARLY
        super()._attach()
        self.marker.lanes = self.memory.lanes
        self.marker.writer = self.memory.mark_writer
        if self.marker.writer is not None:
            self.marker.writer.forget()
        self._set_concurrency()

    def wait(self) -> None:
        """Return when everything that was issued has ended."""
        self.memory.lanes.settle()

    # --- first start, recovery ----------------------------------------------------------------------
    def initialize(
        self,
        iteration: int = 0,
        job_state: bytes = b"",
        *,
        steps: int | None = None,
        keep_state: bool = False,
    ) -> None:
        self.wait()
        super().initialize(iteration, job_state, steps=steps, keep_state=keep_state)
        self.memory.make_ready()
        self.wait()

    def recover(self, decision: bytes) -> Recovered:
        self.wait()
        recovered = super().recover(decision)
        self.memory.make_ready()
        self.wait()
        return recovered

    # --- one iteration ------------------------------------------------------------------------------
    def step(self, hypers: Sequence[Hyper], job_state: bytes, sync: Callable[[], SyncResult]) -> SyncResult:
        lanes = self.memory.lanes
        lanes.wait(self._committed)
        result = super().step(hypers, job_state, sync)
        self._committed = lanes.here()
        return result

    def _lend(self) -> None:
        lanes = self.memory.lanes
        lanes.join()  # a step that failed before PROTECTED has begun to load parity
        super()._lend()
        lanes.fork()  # join() forgets what side lanes have to wait for

    def _take_back(self) -> bool:
        used = super()._take_back()
        if used:
            self.memory.lanes.fork()  # parity is loaded early into what activations were read from just now
        return used

    def protect_ops(self, cell: RankCell, record: JobRecord) -> Iterator[Op]:
        """As in the base class; beside it, two groups of parity are loaded; H stays authoritative."""
        memory, t = self.memory, cell.iteration
        memory.early = (t, {g: g for g in range(min(2, self.plan.groups))})
        for group, slot in memory.early[1].items():
            yield load_op(memory, group, slot, t)
        for targets, encode in memory.gradient_encodes():
            yield Op("protect", None, None, targets, encode, t)
        if memory.fused is not None:  # while the device is busy
            memory.fused.prepare(record.hypers, cell.steps + 1, SyncResult())
        yield self.jobs.stage(record)
        yield self._rank(Phase.PROTECTED, t, cell.steps, cell.sync)

    def update(self, hypers: Sequence[Hyper], sync: SyncResult, left: Any = None) -> None:
        self.memory.lanes.fork()
        super().update(hypers, sync, left)

    def _rank(self, phase: Phase, *args: Any, **more: Any) -> Op:
        """UPDATED comes after all lanes; the other records find nothing on them that they speak of."""
        op = super()._rank(phase, *args, **more)
        if phase is not Phase.UPDATED:
            return op

        def apply() -> None:
            self.memory.lanes.join()
            op.apply()

        return Op(op.name, op.group, op.chunk, op.writes, apply, op.iteration)
