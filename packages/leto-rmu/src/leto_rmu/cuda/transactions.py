"""Chunk transactions on the device, on three lanes, and as one kernel where there is one.

Role: the streams of `leto_rmu.update` and `leto_rmu.slots` with their operations put on lanes
(`leto_rmu.cuda.lanes`). Each names what it shares with other lanes; what a mark allows reads that mark's
cell. That is the whole of the order between lanes (I-2):

* load of a parity buffer: after whatever last used the buffer, the mark included that made it free;
* a chunk's transaction: after its Q was loaded or written, and after Q' was free; chunks and their marks
  are in order on the compute lane;
* drain: after the COMMIT of the group's last chunk; its mark comes last, and the buffer is free only after
  it.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from typing import TYPE_CHECKING, Any

from leto_rmu.cuda.lanes import COMPUTE, DRAIN, PREFETCH
from leto_rmu.cuda.marks import StreamMarker
from leto_rmu.cuda.ops import LaneOp
from leto_rmu.marker import GroupCell, Phase
from leto_rmu.ops import Op
from leto_rmu.slots import ChunkWork, SlotTransactions
from leto_rmu.update import ChunkTransactions

if TYPE_CHECKING:
    from leto_rmu.cuda.views import CudaRankMemory

__all__ = ["NOT_EARLY", "CudaSlotTransactions", "CudaTransactions", "load_op"]

Resource = tuple[Hashable, ...]
NOT_EARLY: tuple[int, dict[int, int]] = (-1, {})


def load_op(memory: CudaRankMemory, group: int, slot: int, iteration: int) -> Op:
    """Q = H_i, on the prefetch lane."""
    source, target = memory.tier1(group), memory.ring(slot)
    return LaneOp(
        memory.lanes,
        PREFETCH,
        "load",
        group,
        None,
        iteration,
        lambda: memory.transfer(target, source),
        lambda: (target,),
        reads=(("H", group),),
        writes=(("ring", slot),),
    )


class _OnLanes(ChunkTransactions):
    memory: CudaRankMemory
    marker: StreamMarker

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        iteration, loaded = self.memory.early
        if iteration == self.iteration and not self.resumed and not self.drained:
            # Parity of the first groups is on its way already.
            self.current.update(loaded)
            self.loaded.update(loaded)
        self.memory.early = NOT_EARLY

    def load(self, group: int, slot: int) -> Op:
        return load_op(self.memory, group, slot, self.iteration)

    def mark(self, group: int, phase: Phase, chunk: int, slot: int, name: str = "mark") -> Op:
        lane = DRAIN if phase is Phase.DRAINED else COMPUTE
        reads: tuple[Resource, ...] = (("ring", slot),)
        if phase is Phase.COMMIT:
            reads = (("ring", slot), ("ring", self.current[group]))  # until it is visible the old Q is needed
        place = (lane, reads, (("cell", group),))
        return self.marker.write_on(place, group, GroupCell(phase, self.iteration, chunk, slot), name)

    def drain_ops(self, group: int, slot: int) -> Iterator[Op]:
        """Parity back to the host; tier 2 is computed on the device, from the same buffer; then the mark."""
        memory = self.memory
        source, target = memory.ring(slot), memory.tier1(group)
        yield self._draining("drain", group, slot, target, lambda: memory.transfer(target, source))
        if memory.tier2_code is not None:
            top = memory.tier2(group)
            yield self._draining("tier2", group, slot, top, lambda: memory.second_tier(slot, top))
        yield self.mark(group, Phase.DRAINED, 0, slot)

    def _draining(self, name: str, group: int, slot: int, target: Any, work: Callable[[], None]) -> Op:
        return LaneOp(
            self.memory.lanes,
            DRAIN,
            name,
            group,
            None,
            self.iteration,
            work,
            lambda: (target,),
            reads=(("ring", slot), ("cell", group)),
            writes=(("H", group),),
        )

    def _computing(self, op: Op, *rings: int) -> Op:
        """On the compute lane; ``rings``: buffers read and written."""
        reads, writes = (tuple(("ring", slot) for slot in part) for part in (rings[:1], rings[1:]))
        return LaneOp.of(self.memory.lanes, COMPUTE, op, reads=reads, writes=writes)


class CudaTransactions(_OnLanes):
    """The scheme "undo": separate launches, parity straight from the old and the new contents."""

    def undo(self, group: int, chunk: int) -> Op:
        return self._computing(super().undo(group, chunk))

    def update(self, group: int, chunk: int) -> Op:
        return self._computing(super().update(group, chunk))

    def parity(self, group: int, chunk: int, old: int, new: int) -> Op:
        return self._computing(super().parity(group, chunk, old, new), old, new)


class CudaSlotTransactions(_OnLanes, SlotTransactions):
    """The scheme "slots": one kernel a chunk where there is one for the plan, else separate launches."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        fused = self.memory.fused
        if fused is not None:
            self.copies = fused.copies
            fused.prepare(self.hypers, self.step, self.sync)

    def work_ops(self, work: ChunkWork) -> Iterator[Op]:
        """Everything before COMMIT: the new chunk, Q', and with the kernel the bf16 copies too."""
        if self.memory.fused is not None:
            yield self.transaction(work)
        else:
            yield from super().work_ops(work)

    def transaction(self, work: ChunkWork) -> Op:
        """The new chunk, Q' and bf16 copies in one kernel."""
        memory, fused = self.memory, self.memory.fused
        assert fused is not None

        def places() -> list[Any]:
            copies = memory.copies(work.group, work.chunk) if fused.copies else []
            return [memory.ring(work.new), *memory.slot_runs(work.target), *copies]

        return LaneOp(
            memory.lanes,
            COMPUTE,
            "update",
            work.group,
            work.chunk,
            self.iteration,
            lambda: fused.launch(work.index, work.source, work.target, work.old, work.new),
            places,
            reads=(("ring", work.old),),
            writes=(("ring", work.new),),
        )

    def renew(self, work: ChunkWork) -> Op:
        return self._computing(super().renew(work))

    def renew_parity(self, work: ChunkWork) -> Op:
        return self._computing(super().renew_parity(work), work.old, work.new)
