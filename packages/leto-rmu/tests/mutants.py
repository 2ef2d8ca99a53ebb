"""Deliberately broken orderings: each differs from the product in one place, and the tests must catch it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from leto_rmu import Op, ResumableUpdater
from leto_rmu.assess import Repair
from leto_rmu.jobstate import JobRecord
from leto_rmu.marker import Phase, RankCell, SyncResult
from leto_rmu.recovery import Recovery
from leto_rmu.update import ChunkTransactions


def chunk_mutant(order: tuple[str, ...]) -> type[ResumableUpdater]:
    """A transaction whose ops come in another order. "undo-mark" is the UNDO mark."""

    class Transactions(ChunkTransactions):
        def chunk_ops(self, group: int, chunk: int, old: int, new: int, redo: bool) -> Iterator[Op]:
            makers = {
                "undo": lambda: self.undo(group, chunk),
                "undo-mark": lambda: self.mark(group, Phase.UNDO, chunk, old),
                "update": lambda: self.update(group, chunk),
                "parity": lambda: self.parity(group, chunk, old, new),
                "commit": lambda: self.mark(group, Phase.COMMIT, chunk, new, name="commit"),
            }
            for name in order:
                if not (redo and name in ("undo", "undo-mark")):
                    yield makers[name]()

    class Updater(ResumableUpdater):
        transactions = Transactions

    return Updater


class ParityInPlace(ChunkTransactions):
    """Q is overwritten before the commit; each group keeps the buffer that it was loaded into."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kept: dict[int, int] = {}

    def _free(self) -> list[int]:
        kept = {s for g, s in self._kept.items() if g not in self.drained}
        return [s for s in super()._free() if s not in kept]

    def chunk_ops(self, group: int, chunk: int, old: int, new: int, redo: bool) -> Iterator[Op]:
        slot = self._kept.setdefault(group, old)
        if not redo:
            yield self.undo(group, chunk)
            yield self.mark(group, Phase.UNDO, chunk, slot)
        yield self.update(group, chunk)
        code, memory, plan = self.memory.code, self.memory, self.plan

        def apply() -> None:
            delta = memory.undo ^ np.concatenate(memory.chunk_runs(group, chunk))
            code.update(memory.ring(slot), index=chunk * plan.pages_per_chunk, delta=delta)

        yield Op("parity", group, chunk, (memory.ring(slot),), apply, self.iteration)
        yield self.mark(group, Phase.COMMIT, chunk, slot, name="commit")

    def drain_ops(self, group: int, slot: int) -> Iterator[Op]:
        yield from super().drain_ops(group, self._kept.get(group, slot))


class DrainedEarly(ChunkTransactions):
    """DRAINED before tier 2."""

    def drain_ops(self, group: int, slot: int) -> Iterator[Op]:
        first, second, mark = list(super().drain_ops(group, slot))
        yield from (first, mark, second)


class DrainedFirst(ChunkTransactions):
    """DRAINED before H holds the new parity: the marker leads the data."""

    def drain_ops(self, group: int, slot: int) -> Iterator[Op]:
        first, second, mark = list(super().drain_ops(group, slot))
        yield from (mark, first, second)


class RingReused(ChunkTransactions):
    """A parity buffer counts as free when its group is computed, before it is drained."""

    def _free(self) -> list[int]:
        held = {*self.spare.values(), *(s for g, s in self.current.items() if g not in self.computed)}
        return [s for s in range(4) if s not in held]


class UndoIgnored(Recovery):
    """C of the open chunk is taken as it is."""

    def restore_op(self, repair: Repair) -> Op:
        real = super().restore_op(repair)
        return Op("restore", real.group, real.chunk, (), lambda: None, real.iteration)


class UndoNotHealed(Recovery):
    """C is restored from reconstructed pages, but lost pages of U stay empty."""

    def repair_ops(self, repair: Repair) -> Iterator[Op]:
        undo = self.up.memory.undo
        mine = [(p, c) for p, c in repair.fixes if np.shares_memory(p, undo)]
        if not mine:
            yield from super().repair_ops(repair)
            return
        saved = undo.copy()
        for place, content in mine:
            at = next(k for k in range(len(undo)) if np.shares_memory(undo[k], place))
            saved[at] = content
        repair.fixes[:] = [(p, c) for p, c in repair.fixes if not np.shares_memory(p, undo)]
        if repair.fixes:
            yield self.write_op(repair)
        assert repair.group is not None
        assert repair.restore is not None
        runs = self.up.memory.chunk_runs(repair.group, repair.restore)
        flat = np.split(saved, len(runs))

        def apply() -> None:
            for target, source in zip(runs, flat, strict=True):
                target[:] = source

        yield Op("restore", repair.group, repair.restore, tuple(runs), apply, self._iteration)
        yield from self._acknowledge(repair.refs)


class AcknowledgedEarly(Recovery):
    """Marks are cleared before the pages hold their contents."""

    def repair_ops(self, repair: Repair) -> Iterator[Op]:
        yield from self._acknowledge(repair.refs)
        refs, repair.refs[:] = list(repair.refs), []
        yield from super().repair_ops(repair)
        repair.refs[:] = refs


class ParityNotRebuilt(Recovery):
    """Only data pages are repaired; lost parity is acknowledged as it is."""

    def repair_ops(self, repair: Repair) -> Iterator[Op]:
        if repair.group is not None:
            arena = self.up.region("arena").pages
            repair.fixes[:] = [
                (p, c)
                for p, c in repair.fixes
                if np.shares_memory(p, arena)
                or (self.up.plan.scheme == "undo" and np.shares_memory(p, self.up.memory.undo))
            ]
        yield from super().repair_ops(repair)


class MarkerNotHealed(ResumableUpdater):
    """Recovery acts on a record that only one replica holds."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        marker = self.marker
        marker.heal = lambda: Op("heal", None, None, (), lambda: None)  # type: ignore[method-assign]

    def _attach(self) -> None:
        super()._attach()
        self.marker.heal = lambda: Op("heal", None, None, (), lambda: None)  # type: ignore[method-assign]


class StagedLate(ResumableUpdater):
    """The job state is staged after SYNCED."""

    def protect_ops(self, cell: RankCell, record: JobRecord) -> Iterator[Op]:
        self._late = record
        yield from (op for op in super().protect_ops(cell, record) if op.name != "stage")

    def update(self, hypers: Any, sync: SyncResult, left: Any = None) -> None:
        if left is None:
            self.executor.run(self.jobs.stage(self._late))
        super().update(hypers, sync, left)


class ProtectedEarly(ResumableUpdater):
    """PROTECTED before the gradients' parity is complete; only another rank's SYNCED brings it to light."""

    def protect_ops(self, cell: RankCell, record: JobRecord) -> Iterator[Op]:
        *protect, stage, mark = super().protect_ops(cell, record)
        yield from (stage, mark, *protect)


class CommittedBeforeDerived(ResumableUpdater):
    """ITERATION(t+1) is marked and the derived state of a resumed rank is not rebuilt."""

    def rebuild_derived(self) -> None:
        if self._ready and self.cell.phase is not Phase.ITERATION:
            super().rebuild_derived()


class StaleStep(ResumableUpdater):
    """The step count of a resumed update is taken from the iteration, as if no iteration had been skipped."""

    def update(self, hypers: Any, sync: SyncResult, left: Any = None) -> None:
        if left is not None:
            cell = self.cell
            self.executor.run(
                self.marker.write(
                    None, RankCell(cell.phase, cell.iteration, cell.iteration, cell.epoch, cell.sync)
                )
            )
        super().update(hypers, sync, left)


def with_transactions(kind: type[ChunkTransactions]) -> type[ResumableUpdater]:
    return type(kind.__name__, (ResumableUpdater,), {"transactions": kind})


def with_recovery(kind: type[Recovery]) -> type[ResumableUpdater]:
    return type(kind.__name__, (ResumableUpdater,), {"recovery": kind})


MUTANTS: dict[str, type[ResumableUpdater]] = {
    "undo mark late": chunk_mutant(("undo", "update", "undo-mark", "parity", "commit")),
    "undo mark before undo": chunk_mutant(("undo-mark", "undo", "update", "parity", "commit")),
    "commit before parity": chunk_mutant(("undo", "undo-mark", "update", "commit", "parity")),
    "commit before update": chunk_mutant(("undo", "undo-mark", "commit", "update", "parity")),
    "parity in place": with_transactions(ParityInPlace),
    "drained before tier 2": with_transactions(DrainedEarly),
    "drained before H": with_transactions(DrainedFirst),
    "parity buffer reused before drained": with_transactions(RingReused),
    "undo ignored": with_recovery(UndoIgnored),
    "undo not healed": with_recovery(UndoNotHealed),
    "acknowledged early": with_recovery(AcknowledgedEarly),
    "parity not rebuilt": with_recovery(ParityNotRebuilt),
    "marker not healed": MarkerNotHealed,
    "job state staged late": StagedLate,
    "derived not rebuilt": CommittedBeforeDerived,
    "step counted by iteration": StaleStep,
}
