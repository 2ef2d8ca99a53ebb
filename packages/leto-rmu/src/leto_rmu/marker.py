"""The marker: the small record of the last completed step, read after a crash.

Role: says what is authoritative (paper section 5.2; the table of the marker protocol). One rank cell and
one cell per protection group. A cell has two slots with sequence numbers and keyed 64-bit checksums; it is
kept in three replicas on distinct pages. A write goes to the slot that does not hold the newest record, in
all replicas, so that a torn write leaves the previous record readable. The highest valid sequence wins.

Upholds I-6: a torn or foreign record never has a valid checksum (the layout hash is the key), and a replica
header written under another layout is refused. Before it writes anything else, recovery wipes what is torn (a
later torn write could complete it) and makes all replicas equal (a record that only one replica holds could
be lost after it was acted upon).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial
from typing import Protocol

import numpy as np

from leto_rmu import records
from leto_rmu.errors import LayoutMismatch, ProtocolError
from leto_rmu.geometry import Geometry, Rotation
from leto_rmu.memory import Region
from leto_rmu.ops import Bytes, Op
from leto_rmu.records import (
    MARKER_VERSION,
    RANK,
    RANK_PHASES,
    SLOT_BYTES,
    GroupCell,
    Phase,
    RankCell,
    SyncResult,
)
from leto_rmu.regions import CELL_BYTES, MARKER_REPLICAS

__all__ = ["MARKER_VERSION", "GroupCell", "Marker", "Phase", "RankCell", "SyncResult"]

_WIPED = 0xFF  # no byte of a record's magic


class MarkerLayout(Protocol):
    """What a marker depends on: a plan, or what a marker's header says about one."""

    @property
    def geometry(self) -> Geometry: ...
    @property
    def groups(self) -> int: ...
    @property
    def marker_pages(self) -> int: ...
    @property
    def layout_hash(self) -> bytes: ...


class Marker:
    """Cells of one rank, as read at construction and kept up to date by the ops made here.

    Parameters: the plan, the marker region, and the indices of its pages whose contents are gone.
    """

    def __init__(self, plan: MarkerLayout, region: Region, lost_pages: Collection[int] = ()) -> None:
        self._plan = plan
        self._key = plan.layout_hash
        self._replicas = [
            region.pages[r * plan.marker_pages : (r + 1) * plan.marker_pages].reshape(-1)
            for r in range(MARKER_REPLICAS)
        ]
        lost = {divmod(k, plan.marker_pages) for k in lost_pages}
        self._check_headers(lost)
        self._sequence: list[int] = []
        self._values: list[RankCell | GroupCell | None] = []
        for cell in range(1 + plan.groups):
            page = self._offset(cell) // region.pages.shape[1]
            best = self._best(cell, [r for r in range(MARKER_REPLICAS) if (r, page) not in lost])
            self._sequence.append(best[0] if best else 0)
            self._values.append(best[1] if best else None)
        # All pages blank and none lost: memory that was never used, as opposed to a marker that is gone.
        self.blank = not lost and not any(replica.any() for replica in self._replicas)

    # --- reading ------------------------------------------------------------------------------------
    @property
    def readable(self) -> bool:
        """Every cell has at least one valid record."""
        return all(v is not None for v in self._values)

    @property
    def rank(self) -> RankCell | None:
        value = self._values[RANK]
        assert value is None or isinstance(value, RankCell)
        return value

    def group(self, group: int) -> GroupCell:
        value = self._values[1 + group]
        if not isinstance(value, GroupCell):
            raise ProtocolError(f"the marker of group {group} has no valid record")
        return value

    @property
    def turn(self) -> int:
        """The rank's turn; 0 where no record says otherwise."""
        return self.rank.turn if self.rank is not None else 0

    @property
    def rotation(self) -> Rotation:
        """Where chunks are, by the newest records; raise ProtocolError when these contradict each other."""
        rank, plan = self.rank, self._plan.geometry
        if rank is None or plan.scheme == "undo":
            return Rotation()
        if rank.phase is not Phase.SYNCED or (rank.sync is not None and rank.sync.found_inf):
            return Rotation(rank.turn)
        counts = [self._committed(g, rank.iteration) for g in range(plan.groups)]
        begun = [g for g, count in enumerate(counts) if count]
        if any(counts[g] < plan.chunks_in(g) for g in range(max(begun, default=0))):
            raise ProtocolError(f"chunks were committed out of order: {counts} of the groups' chunks")
        return Rotation(rank.turn, sum(counts))

    def _committed(self, group: int, iteration: int) -> int:
        cell = self.group(group)
        if cell.iteration != iteration or cell.phase not in (Phase.COMMIT, Phase.DRAINED):
            return 0
        return self._plan.geometry.chunks_in(group) if cell.phase is Phase.DRAINED else cell.chunk + 1

    def _best(self, cell: int, replicas: list[int]) -> tuple[int, RankCell | GroupCell] | None:
        found = [
            record
            for r in replicas
            for slot in (0, 1)
            if (record := self._valid(cell, slot, self._slot(r, cell, slot))) is not None
        ]
        return max(found, key=lambda record: record[0], default=None)

    def _valid(self, cell: int, slot: int, view: Bytes) -> tuple[int, RankCell | GroupCell] | None:
        record = records.unpack(cell, view.tobytes(), self._key)
        return record if record is not None and record[0] % 2 == slot else None

    def _check_headers(self, lost: set[tuple[int, int]]) -> None:
        for r, replica in enumerate(self._replicas):
            found = records.split_header(replica[: records.HEADER_BYTES].tobytes())
            if (r, 0) in lost or found is None:
                continue  # torn or lost: the other replicas, and the keyed cells, still speak
            known, version, layout = found
            if not known or version != MARKER_VERSION:
                raise LayoutMismatch(
                    f"the marker has layout version {version}, this leto-rmu writes {MARKER_VERSION}: "
                    "resume with the version that wrote it, or start the job under a new id"
                )
            if layout != self._key:
                raise LayoutMismatch(
                    f"the surviving memory was written under layout {layout.hex()[:16]}, this plan is "
                    f"{self._key.hex()[:16]}: resume with the same model, optimizer and pool configuration, "
                    "or start the job under a new id"
                )

    # --- writing ------------------------------------------------------------------------------------
    def write(self, group: int | None, value: RankCell | GroupCell, *, name: str = "mark") -> Op:
        """Op that records ``value``; visible in all replicas when it ends."""
        cell = RANK if group is None else 1 + group
        if (value.phase in RANK_PHASES) != (cell == RANK):
            raise ProtocolError(f"{value.phase.name} does not belong into cell {cell}")
        sequence = self._sequence[cell] + 1
        content = np.frombuffer(records.pack(cell, sequence, value, self._key), np.uint8)
        views = tuple(self._slot(r, cell, sequence % 2) for r in range(MARKER_REPLICAS))

        def apply() -> None:
            assert self._sequence[cell] in (sequence - 1, sequence), "two writers of one marker cell"
            self.store(views, content)
            self._sequence[cell] = sequence
            self._values[cell] = value

        chunk = value.chunk if isinstance(value, GroupCell) else None
        return Op(name, group, chunk, views, apply, value.iteration)

    def store(self, views: Sequence[Bytes], content: Bytes) -> None:
        """Write one record into all its places; after everything that it speaks of."""
        for view in views:
            view[:] = content

    def write_headers(self) -> Op:
        """Op that names the layout in every replica."""
        views = tuple(replica[: records.HEADER_BYTES] for replica in self._replicas)
        content = self._header()

        def apply() -> None:
            for view in views:
                view[:] = content

        return Op("layout", None, None, views, apply)

    def forget_torn(self) -> list[Op]:
        """Ops that leave nothing of torn records; before any cell is written again.

        A torn record X and the next one, Y, of the same sequence go to the same slot and share most bytes. If
        Y is torn as well it may supply just what X lacked: X would become valid long after it stopped being
        true. So torn slots are wiped, and first discredited by one byte, because a torn wipe could complete X
        too (X may lack only bytes that a wipe happens to write).
        """
        torn = [
            view
            for cell in range(len(self._values))
            for r in range(MARKER_REPLICAS)
            for slot in (0, 1)
            if self._refuted(cell, slot, view := self._slot(r, cell, slot)) and not (view == _WIPED).all()
        ]
        if not torn:
            return []
        first = tuple(view[:1] for view in torn)  # a byte of the magic: stored whole or not at all

        def store(views: Sequence[Bytes]) -> None:
            for view in views:
                view[:] = _WIPED

        return [
            Op("heal", None, None, first, partial(store, first)),
            Op("heal", None, None, tuple(torn), partial(store, torn)),
        ]

    def _refuted(self, cell: int, slot: int, view: Bytes) -> bool:
        """Torn, or on a lost page and newer than what was decided upon."""
        record = self._valid(cell, slot, view)
        return record is None or record[0] > self._sequence[cell]

    def heal(self) -> Op:
        """Op that gives every replica the newest record of every cell, and the header."""
        places: list[tuple[Bytes, Bytes]] = [
            (replica[: records.HEADER_BYTES], self._header()) for replica in self._replicas
        ]
        for cell, value in enumerate(self._values):
            if value is None:
                raise ProtocolError(f"marker cell {cell} has no valid record to heal from")
            sequence = self._sequence[cell]
            content = np.frombuffer(records.pack(cell, sequence, value, self._key), np.uint8)
            places += [(self._slot(r, cell, sequence % 2), content) for r in range(MARKER_REPLICAS)]

        def apply() -> None:
            for view, content in places:
                if not np.array_equal(view, content):
                    view[:] = content

        return Op("heal", None, None, tuple(view for view, _ in places), apply)

    def _header(self) -> Bytes:
        return np.frombuffer(records.header(self._key, self._plan.geometry), np.uint8)

    @staticmethod
    def _offset(cell: int) -> int:
        return CELL_BYTES * (1 + cell)

    def _slot(self, replica: int, cell: int, slot: int) -> Bytes:
        at = self._offset(cell) + slot * SLOT_BYTES
        return self._replicas[replica][at : at + SLOT_BYTES]
