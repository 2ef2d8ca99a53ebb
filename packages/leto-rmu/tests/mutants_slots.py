"""Broken variants of the scheme "slots", each in one place; and those of `mutants` that it shares."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

from mutants import (
    MUTANTS,
    AcknowledgedEarly,
    DrainedEarly,
    DrainedFirst,
    ParityNotRebuilt,
    RingReused,
    with_recovery,
)

from leto_rmu import Op, ResumableUpdater
from leto_rmu.geometry import Rotation
from leto_rmu.marker import Marker, Phase
from leto_rmu.slots import ChunkWork, SlotTransactions


def slot_mutant(order: tuple[str, ...]) -> type[ResumableUpdater]:
    """A transaction whose ops come in another order."""

    class Transactions(SlotTransactions):
        def chunk_ops(self, group: int, chunk: int, old: int, new: int, redo: bool) -> Iterator[Op]:
            work = self.work(group, chunk, old, new)
            makers = {
                "update": lambda: self.renew(work),
                "parity": lambda: self.renew_parity(work),
                "commit": lambda: self.mark(group, Phase.COMMIT, chunk, new, name="commit"),
            }
            for name in order:
                yield makers[name]()

    return with_slots(Transactions)


def with_slots(kind: type[Any]) -> type[ResumableUpdater]:
    return type(kind.__name__, (ResumableUpdater,), {"slot_transactions": kind})


def shared(kind: type[Any]) -> type[ResumableUpdater]:
    """A mutant of the transactions in place, as one into slots."""
    return with_slots(type(kind.__name__, (kind, SlotTransactions), {}))


class ParityInPlace(SlotTransactions):
    """Q is overwritten by Q' before the commit; the buffer stays the same."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        self._kept: dict[int, int] = {}

    def _free(self) -> list[int]:
        kept = {s for g, s in self._kept.items() if g not in self.drained}
        return [s for s in super()._free() if s not in kept]

    def chunk_ops(self, group: int, chunk: int, old: int, new: int, redo: bool) -> Iterator[Op]:
        slot = self._kept.setdefault(group, old)
        work = self.work(group, chunk, slot, slot)
        yield self.renew(work)
        memory, source = self.memory, self.memory.ring(slot)
        before, after = memory.slot_pages(work.source), memory.slot_pages(work.target)

        def apply() -> None:
            memory.update_parity(source.copy(), source, chunk, before, after)

        yield Op("parity", group, chunk, (source,), apply, self.iteration)
        yield self.mark(group, Phase.COMMIT, chunk, slot, name="commit")

    def drain_ops(self, group: int, slot: int) -> Iterator[Op]:
        yield from super().drain_ops(group, self._kept.get(group, slot))


class FreeSlotTrusted(SlotTransactions):
    """A resumed update takes what is in the free slot for the open chunk, and computes only its parity."""

    def work_ops(self, work: ChunkWork) -> Iterator[Op]:
        first = self.resumed.get(work.group)
        if first is None or first.chunk != work.chunk:
            yield self.renew(work)
        yield self.renew_parity(work)


class SlotOfWrongSteps(SlotTransactions):
    """A resumed update counts the step that it is in the middle of."""

    def __init__(self, *args: Any, **more: Any) -> None:
        super().__init__(*args, **more)
        if more.get("open_groups") is not None:
            turn = self.plan.geometry.turned(self.rotation.turn)
            self.rotation = Rotation(turn, self.rotation.moved)


class NextBeforeCommit(SlotTransactions):
    """The next chunk goes into the slot that this one leaves before this one is committed."""

    def chunk_ops(self, group: int, chunk: int, old: int, new: int, redo: bool) -> Iterator[Op]:
        *work, commit = super().chunk_ops(group, chunk, old, new, redo)
        yield from work
        if chunk + 1 < self.plan.chunks_in(group):
            yield self.renew(self.work(group, chunk + 1, new, old))
        yield commit


class MovedIgnored(Marker):
    """Recovery looks for committed chunks where they were."""

    @property
    def rotation(self) -> Rotation:
        return Rotation(super().rotation.turn)


class MovedOneTooFar(Marker):
    """The open chunk counts as committed."""

    @property
    def rotation(self) -> Rotation:
        found = super().rotation
        return Rotation(found.turn, found.moved + (0 < found.moved < self._plan.geometry.chunks))


class Unchecked(SlotTransactions):
    """What is done follows from the groups, whatever the marker's rotation says."""

    def __init__(self, *args: Any, **more: Any) -> None:
        memory, marker = args[:2]
        done = sum(memory.plan.chunks_in(g) for g in more["drained"])
        done += sum(o.chunk for o in (more["open_groups"] or {}).values())
        kind = type(marker)
        right = type("Right", (kind,), {"rotation": Rotation(marker.turn, done)})
        marker.__class__ = right
        try:
            super().__init__(*args, **more)
        finally:
            marker.__class__ = kind


def with_marker(kind: type[Marker]) -> type[ResumableUpdater]:
    return type(kind.__name__, (ResumableUpdater,), {"markers": kind, "slot_transactions": Unchecked})


class TurnNotKept(ResumableUpdater):
    """A restart after a crash begins at the first rotation."""

    def recover(self, decision: bytes) -> Any:
        found = super().recover(decision)
        if self.cell.phase is Phase.ITERATION:
            cell = self.marker.rank
            assert cell is not None
            self.executor.run(self.marker.write(None, dataclasses.replace(cell, turn=0)))
        return found


SLOT_MUTANTS: dict[str, type[ResumableUpdater]] = {
    "commit before parity": slot_mutant(("update", "commit", "parity")),
    "commit before update": slot_mutant(("commit", "update", "parity")),
    "parity in place": with_slots(ParityInPlace),
    "free slot trusted": with_slots(FreeSlotTrusted),
    "slot of wrong steps": with_slots(SlotOfWrongSteps),
    "next chunk before commit": with_slots(NextBeforeCommit),
    "moved chunks ignored": with_marker(MovedIgnored),
    "moved chunks one too far": with_marker(MovedOneTooFar),
    "rotation lost in a restart": TurnNotKept,
    "drained before tier 2": shared(DrainedEarly),
    "drained before H": shared(DrainedFirst),
    "parity buffer reused before drained": shared(RingReused),
    "acknowledged early": with_recovery(AcknowledgedEarly),
    "parity not rebuilt": with_recovery(ParityNotRebuilt),
    **{
        name: MUTANTS[name]
        for name in (
            "marker not healed",
            "job state staged late",
            "derived not rebuilt",
            "step counted by iteration",
        )
    },
}
