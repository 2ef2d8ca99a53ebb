"""Chunk transactions into the free slot: the old slot is the undo copy (docs, "The free slot").

Role: the scheme "slots" of `leto_rmu.update`. A chunk is never changed where it is: the update writes it into
the free slot, parity goes from Q to Q' out of place, and COMMIT(j, q') makes both valid at once. Until then
nothing that is authoritative has been touched, so a crash in an open chunk costs nothing: recovery does the
chunk again. Upholds I-2 by two rules:

* the new chunk and Q' are complete before COMMIT(j, q') is visible;
* the slot that chunk j leaves is not written before COMMIT(j, q') is visible: chunks are updated strictly in
order,
  and chunk j + 1 goes there.

What may be written in one launch: the new chunk, Q' and the bf16 copies, in any order.
`SlotTransactions.work_ops` is the place to override for a kernel that does so; the mark stays an operation of
its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from leto_rmu import arrays
from leto_rmu.errors import ProtocolError
from leto_rmu.geometry import Rotation
from leto_rmu.marker import Phase
from leto_rmu.ops import Op
from leto_rmu.update import ChunkTransactions

__all__ = ["ChunkWork", "SlotTransactions"]


@dataclass(frozen=True)
class ChunkWork:
    """One transaction. ``chunk`` counts inside its group, ``index`` in the arena.

    The chunk is read from slot ``source`` and written to slot ``target``; parity is read from buffer ``old``
    of the ring and written to ``new``. `RankMemory.slot_pages`, `slot_runs` and `ring` have their memory
    (pages by parity position, the first of which is `first_position`), ``plan.pieces(group, chunk)`` the
    elements to update with their gradients, hyperparameter groups and copies, and `RankMemory.span` their
    place in a plane. Padding after the last element is part of the chunk: it is copied.
    """

    group: int
    chunk: int
    index: int
    source: int
    target: int
    old: int
    new: int
    first_position: int


class SlotTransactions(ChunkTransactions):
    """The update of one iteration under the scheme "slots"; what is left of it by the marker's records."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self.rotation = self.marker.rotation
        done = sum(self.plan.chunks_in(g) for g in self.drained) + sum(o.chunk for o in self.resumed.values())
        if done != self.rotation.moved:
            raise ProtocolError(f"{self.rotation.moved} chunks have moved, but {done} are said to be done")

    @property
    def where(self) -> Rotation:
        moved = sum(
            self.plan.chunks_in(g) if g in self.drained else self.committed.get(g, 0)
            for g in range(self.plan.groups)
        )
        return Rotation(self.rotation.turn, moved)

    def chunk_ops(self, group: int, chunk: int, old: int, new: int, redo: bool) -> Iterator[Op]:
        """One transaction; it is begun anew whatever an earlier trainer did of it."""
        yield from self.work_ops(self.work(group, chunk, old, new))
        yield self.mark(group, Phase.COMMIT, chunk, new, name="commit")

    def work(self, group: int, chunk: int, old: int, new: int) -> ChunkWork:
        """What the transaction of a chunk reads and writes."""
        geometry, index = self.plan.geometry, self.plan.index(group, chunk)
        turn = self.rotation.turn
        return ChunkWork(
            group,
            chunk,
            index,
            geometry.slot(index, Rotation(turn)),
            geometry.slot(index, Rotation(geometry.turned(turn))),
            old,
            new,
            chunk * geometry.positions_per_chunk,
        )

    def work_ops(self, work: ChunkWork) -> Iterator[Op]:
        """Everything before COMMIT: the new chunk, and Q'."""
        yield self.renew(work)
        yield self.renew_parity(work)

    def renew(self, work: ChunkWork) -> Op:
        """C' = update(C, G): a copy in the free slot, which is updated in place."""
        memory = self.memory
        source, target = memory.slot_runs(work.source), memory.slot_runs(work.target)

        def apply() -> None:
            for new, old in zip(target, source, strict=True):
                arrays.copy(new, old)
            self.update_slot(work.group, work.chunk, work.target)

        return self._op("update", work.group, work.chunk, target, apply)

    def renew_parity(self, work: ChunkWork) -> Op:
        """Q' = Q ^ RS_j(C ^ C')."""
        memory = self.memory
        source, target = memory.ring(work.old), memory.ring(work.new)
        old, new = memory.slot_pages(work.source), memory.slot_pages(work.target)

        def apply() -> None:
            memory.update_parity(source, target, work.chunk, old, new)

        return self._op("parity", work.group, work.chunk, [target], apply)
