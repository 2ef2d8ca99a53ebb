"""ResumableUpdater: optimizer steps that a crash cannot tear (paper section 5).

Role: what a trainer holds. It owns one rank's marker and drives the protocol of one iteration: protect the
gradients, stage the job state, PROTECTED, global synchronization, world barrier (I-3), SYNCED, chunk
transactions, UPDATED, derived state, ITERATION(t+1). After a crash a new updater over the same memory gives
a summary, gets the common decision, and recovers (see `leto_rmu.recovery`).

Nothing that a broken collective has left behind becomes state (I-6). A collective that is aborted may return
as if it had ended, with any bits, and not only where it was aborted: NCCL's kernels tell their peers that
data is there when they leave without having sent it. So no rank can judge by itself what it has received.
The barrier judges for all, which is why it comes last before SYNCED:

1. whoever aborts communicators of a process says so to its main thread *before* (leto_shadow: a flag);
2. a rank enters the barrier when all that it has issued for t has ended (``sync`` has returned host values,
   on a device the caller's stream has been waited for), and if it finds then that nothing was said. So its
   part in every collective of t had ended before anything of it was aborted: what it received it has, what it
   owed to others it has sent;
3. the barrier returns on a rank only if every rank has entered it. Then 2. holds for all of them: no aborted
   kernel had a part in gradients and norm, they are true on every rank;
4. SYNCED(t) comes after it. A rank that is PROTECTED(t) may hold garbage, in its gradients, in R, in the
   staged job state; they are used only if another rank is SYNCED(t), and then they are true by 3. Otherwise t
   is computed again, and nobody reads them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import msgspec
import torch

from leto_rmu import arrays, regrade
from leto_rmu.assess import Assessment, assess
from leto_rmu.attached import Attached
from leto_rmu.decision import Summary, Vote
from leto_rmu.derived import copy_op
from leto_rmu.errors import PlanError, ProtocolError
from leto_rmu.initialize import initialize_ops
from leto_rmu.jobstate import JobRecord, JobState
from leto_rmu.layout import UpdatePlan
from leto_rmu.lending import MIN_BYTES, Lender
from leto_rmu.marker import Marker, Phase, RankCell, SyncResult
from leto_rmu.memory import ClientMemory, Memory
from leto_rmu.ops import Executor, Op
from leto_rmu.optimizers import Hyper, with_beginnings
from leto_rmu.recovery import Recovered, Recovery
from leto_rmu.regions import JOB_STATE, MARKER
from leto_rmu.regrade import RecomputeGradients
from leto_rmu.slots import SlotTransactions
from leto_rmu.update import ChunkTransactions
from leto_rmu.views import RankMemory, indices

__all__ = ["ResumableUpdater"]


class ResumableUpdater(Attached):
    """Crash-consistent optimizer of one rank.

    Parameters
    ----------
    memory
        A leto_rmp ``Client`` with the writer role, or any `Memory`.
    plan
        Layout; the same in every generation (LayoutMismatch otherwise).
    barrier
        Returns when every rank of the job has called it (I-3), raises where one has not and never will: gloo
        does, an aborted barrier of NCCL returns. Where communicators are aborted under a living trainer, it
        also raises if that has begun before it was called (``leto_shadow.Context.barrier`` does).
    rebuild_derived
        Called after every update and every recovery, exactly once on each rank: fills ``model`` (or any other
        derived state) from the masters; may use collectives. Copies of segments with a ``model_offset`` are
        there already. None: the caller does it.
    executor
        Runs every write; the default applies it.
    recompute_gradients
        For plans with gradients="recompute": called in recover(), on all ranks together, with the updater,
        the iteration t and its job state. Runs forward, backward and reduction of t again, with derived state
        as it is, and leaves in ``grads`` the very bits of the first time.
    """

    transactions: type[ChunkTransactions] = ChunkTransactions
    slot_transactions: type[SlotTransactions] = SlotTransactions
    recovery: type[Recovery] = Recovery
    views: type[RankMemory] = RankMemory
    markers: type[Marker] = Marker

    def __init__(
        self,
        memory: object,
        plan: UpdatePlan,
        barrier: Callable[[], None],
        rebuild_derived: Callable[[ResumableUpdater], None] | None = None,
        executor: Executor | None = None,
        recompute_gradients: RecomputeGradients | None = None,
    ) -> None:
        self.plan = plan
        self.recompute_gradients = recompute_gradients
        self.executor = executor if executor is not None else Executor()
        self.memory = self.views(plan, _as_memory(memory))
        if self._kind.copies and plan.gradients == "recompute" and plan.has_copies:
            raise PlanError(
                'gradients="recompute" keeps the parameters of t until all ranks are updated, but this '
                "updater writes bf16 copies (model_offset) chunk by chunk: leave model_offset out and cast "
                "the masters in rebuild_derived"
            )
        self._barrier = barrier
        self._rebuild = rebuild_derived
        self._ready = False
        self._record: JobRecord | None = None
        self._copied = False  # the update just done has written the bf16 copies of all chunks
        self.lender = Lender()
        self._padding_lent = False  # and not cleared since
        self._attach()

    @property
    def _kind(self) -> type[ChunkTransactions]:
        return self.slot_transactions if self.plan.scheme == "slots" else self.transactions

    def _attach(self) -> None:
        self.lost = lost = self.memory.lost()
        self._assessed: dict[bool, Assessment] = {}
        self.marker = self.markers(self.plan, self.memory.marker, indices(lost, MARKER))
        self.jobs = JobState(self.plan, self.memory.job_state, indices(lost, JOB_STATE))

    # --- first start --------------------------------------------------------------------------------
    def initialize(
        self,
        iteration: int = 0,
        job_state: bytes = b"",
        *,
        steps: int | None = None,
        keep_state: bool = False,
    ) -> None:
        """Take over masters that the caller has filled; the state is safe from here on.

        ``keep_state``: moments were filled too (from a checkpoint); otherwise they become zero. ``steps``:
        optimizer steps behind this state, default ``iteration``. The ITERATION mark is written last.
        """
        self._ready = self._copied = False
        self.lender.abandon()
        record = JobRecord(iteration, bytes(job_state))
        ops = initialize_ops(
            self.memory,
            self.marker,
            self.jobs,
            record,
            steps=iteration if steps is None else steps,
            epoch=self._epoch,
            keep_state=keep_state,
        )
        self.executor.run_all(ops)
        self.resume(record)
        self.rebuild_derived()

    # --- one iteration ------------------------------------------------------------------------------
    def compute_begins(self) -> None:
        """COMPUTE(t): forward and backward may now write gradients and derived state."""
        cell = self.cell
        if cell.phase not in (Phase.ITERATION, Phase.COMPUTE):
            raise ProtocolError(f"compute_begins() at {cell.phase.name}({cell.iteration}): recover first")
        self.executor.run(self._rank(Phase.COMPUTE, cell.iteration, cell.steps, cell.sync))

    def lending(self, min_bytes: int = MIN_BYTES) -> AbstractContextManager[Any]:
        """Around forward passes: memory that only the update needs holds tensors that autograd saves
        meanwhile.

        Tensors of at least ``min_bytes`` bytes are copied there while there is room, and copied out for the
        backward pass: the same bits, in less memory by `RankMemory.idle`'s sizes (`leto_rmu.lending`). What
        is still needed when step() begins is moved out. Does nothing but between compute_begins() and step().
        What `torch.autograd.graph.saved_tensors_hooks` does to a model holds inside (docs, "Memory lent to
        activations").
        """
        if not isinstance(min_bytes, int) or min_bytes < 1:
            raise ValueError(f"min_bytes must be a whole number of at least 1, found {min_bytes!r}")
        if not self._ready or self.cell.phase is not Phase.COMPUTE:
            return nullcontext()
        if not self.lender.lent:
            self._lend()
        return self.lender.activations(min_bytes)

    def _lend(self) -> None:
        self._padding_lent = True
        self.lender.open(self.memory.idle(self._rotation), self.memory.addresses)

    def _take_back(self) -> bool:
        """Nothing is lent any more; whether anything was used."""
        used = self.lender.take_back()
        if self._padding_lent:
            self.executor.run_all(self.clear_padding())
            self._padding_lent = False
        return used

    def clear_padding(self) -> Iterator[Op]:
        """Zeros where the last chunk holds no element: that memory is lent, and copied with its chunk."""
        runs, cell = self.memory.padding(self.marker.rotation), self.marker.rank

        def apply() -> None:
            for run in runs:
                arrays.flat(run, torch.uint8).zero_()

        if runs and cell is not None:
            yield Op("fill", None, None, tuple(runs), apply, cell.iteration)

    def step(self, hypers: Sequence[Hyper], job_state: bytes, sync: Callable[[], SyncResult]) -> SyncResult:
        """Update all state with the gradients; returns when ITERATION(t+1) is committed.

        ``hypers``: one per hyperparameter group, for this iteration. ``job_state``: what iteration t + 1
        starts with; where it depends on the sync result (loss scale), derive it from ``last_sync``.
        ``sync`` is called when this rank's gradients are protected, must return the same result on every
        rank, and have waited for the collectives that it is made of. It counts when all ranks have got that
        far (``barrier``).
        """
        cell = self.cell
        if cell.phase not in (Phase.ITERATION, Phase.COMPUTE):
            raise ProtocolError(
                f"step() at {cell.phase.name}({cell.iteration}): an update was left open, recover first"
            )
        t = cell.iteration
        before = self._record.hypers if self._record is not None else ()
        applied = cell.sync is None or not cell.sync.found_inf
        hypers = with_beginnings(self.plan.check_hypers(hypers), before, cell.steps, applied)
        record = JobRecord(t + 1, bytes(job_state), hypers)
        self._take_back()
        self.executor.run_all(self.protect_ops(cell, record))
        result = sync()
        self._barrier()  # I-3, I-6
        self.executor.run(self._rank(Phase.SYNCED, t, cell.steps, result))
        self.update(hypers, result)
        self.commit(record)
        return result

    def protect_ops(self, cell: RankCell, record: JobRecord) -> Iterator[Op]:
        """R of every gradient group, the job state of t + 1, then PROTECTED(t)."""
        memory = self.memory
        for k in range(len(self.plan.grad_groups) if self.plan.gradients == "parity" else 0):
            target = memory.grad_parity(k)
            yield Op(
                "protect",
                k,
                None,
                (target,),
                partial(memory.code.encode, memory.grad_run(k), out=target),
                cell.iteration,
            )
        yield self.jobs.stage(record)
        yield self._rank(Phase.PROTECTED, cell.iteration, cell.steps, cell.sync)

    def update(self, hypers: Sequence[Hyper], sync: SyncResult, left: Assessment | None = None) -> None:
        """From SYNCED(t) to UPDATED(t); ``left`` is what an interrupted update left behind."""
        cell = self.cell
        steps, turn = cell.steps, cell.turn
        if not sync.found_inf:
            steps, turn = steps + 1, self.plan.geometry.turned(turn)
            kind = self._kind
            transactions = kind(
                self.memory,
                self.marker,
                iteration=cell.iteration,
                step=steps,
                hypers=hypers,
                sync=sync,
                open_groups=left.open_groups if left else None,
                drained=left.drained if left else frozenset(),
            )
            self.executor.drive(transactions.streams())
            self._copied = transactions.copies and left is None
        self.executor.run(self._rank(Phase.UPDATED, cell.iteration, steps, sync, turn))

    def commit(self, record: JobRecord) -> None:
        """From UPDATED(t) to ITERATION(t+1): derived state, then the mark that makes ``record`` valid."""
        cell = self.cell
        self.rebuild_derived()
        self.executor.run(self._rank(Phase.ITERATION, cell.iteration + 1, cell.steps, cell.sync))
        self._record = record

    def _rank(
        self, phase: Phase, iteration: int, steps: int, sync: SyncResult | None, turn: int | None = None
    ) -> Op:
        turn = self.marker.turn if turn is None else turn
        return self.marker.write(None, RankCell(phase, iteration, steps, self._epoch, sync, turn))

    @property
    def _epoch(self) -> int:
        return self.marker.rank.epoch if self.marker.rank is not None else 0

    def rebuild_derived(self) -> None:
        """Derived state from the masters: the bf16 copies of the plan, then what the caller derives."""
        if self.plan.gradients == "recompute":
            self._barrier()  # until all ranks are UPDATED, one of them may need the parameters of t once more
        copies = None if self._copied else copy_op(self.memory, self._rotation, self.cell.iteration)
        self._copied = False
        if copies is not None:
            self.executor.run(copies)
        if self._rebuild is not None:
            self._rebuild(self)

    # --- after a crash ------------------------------------------------------------------------------
    def summary(self, checkpoints: Sequence[int] = ()) -> bytes:
        """What this rank found and how it votes, for `decide`. Writes nothing.

        ``checkpoints``: steps of the complete checkpoints that this rank can see.
        """
        self._attach()
        found = self.position()
        votes = {finish: self._vote(found, finish) for finish in (False, True)}
        return msgspec.structs.replace(
            found,
            restart=votes[False],
            finish=votes[True],
            regrade=regrade.vote(self),
            checkpoints=tuple(sorted(set(checkpoints))),
        ).encode()

    def position(self) -> Summary:
        """Where the marker says that this rank is, without votes."""
        cell = self.marker.rank
        if cell is not None and cell.phase is not Phase.LOADING:
            return Summary(cell.phase.name, cell.iteration, cell.epoch, cell.sync)
        if cell is not None:
            return Summary(None, epoch=cell.epoch, reason="initialization was interrupted")
        return Summary(
            None, reason="fresh memory" if self.marker.blank else "no replica of the marker is left"
        )

    def _vote(self, found: Summary, finish: bool) -> Vote:
        if not (found.can_finish if finish else found.ahead):
            return Vote(False, f"not possible at {found.phase}")
        result = self.assess(finish=finish)
        return Vote(result.ok, result.reason, result.regrade)

    def assess(self, *, finish: bool) -> Assessment:
        """What recovery would do from the state attached to; reads only."""
        if finish not in self._assessed:
            cell = self.marker.rank
            assert cell is not None
            self._assessed[finish] = assess(
                self.memory, self.marker, self.jobs, self.lost, cell, finish=finish
            )
        return self._assessed[finish]

    def recover(self, decision: bytes) -> Recovered:
        """Carry out the common decision on this rank; idempotent, and itself crash-consistent.

        FRESH or CHECKPOINT: nothing here is trusted any more; fill masters (and moments) and call
        initialize().
        """
        if self.memory.lost() != self.lost or self._ready:
            self._attach()  # not the state that summary() examined
        self._ready = self._copied = False  # copies may have been lost since
        self.lender.abandon()
        return self.recovery(self).run(decision)

    def resume(self, record: JobRecord) -> None:
        """The marker, the data and ``record`` belong together from here on."""
        self._record, self._ready = record, True
        self._assessed.clear()


def _as_memory(memory: object) -> Memory:
    if hasattr(memory, "lost") and hasattr(memory, "allocate"):
        return memory  # type: ignore[return-value]
    if hasattr(memory, "marks") and hasattr(memory, "allocate"):
        if getattr(getattr(memory, "config", None), "backend", "host") != "host":
            raise PlanError("the pool's pages are on a GPU: use leto_rmu.cuda.CudaUpdater")
        return ClientMemory(memory)
    raise PlanError(f"expected a leto_rmp Client or a Memory, found {type(memory).__name__}")
