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

import hashlib
import struct
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import Protocol

import msgspec
import numpy as np

from leto_rmu.errors import LayoutMismatch, ProtocolError
from leto_rmu.geometry import Geometry, Rotation
from leto_rmu.layout import CELL_BYTES, MARKER_REPLICAS
from leto_rmu.memory import Region
from leto_rmu.ops import Bytes, Op

__all__ = ["MARKER_VERSION", "GroupCell", "Marker", "Phase", "RankCell", "SyncResult", "read_header"]

MARKER_VERSION = 2
RANK = 0  # cell index of the rank; group g is cell 1 + g
_SLOT_BYTES = CELL_BYTES // 2
_MAGIC = 0x4D52544C  # "LTRM"
_HEADER = struct.Struct("<8sI32s")  # magic, version, layout hash; then its checksum
_GEOMETRY_AT = _HEADER.size + 8  # the geometry and its checksum follow
_HEADER_BYTES = _GEOMETRY_AT + Geometry.wire.size + 8
_HEADER_MAGIC = b"LETO-RMU"
_WIPED = 0xFF  # no byte of the magic
# magic, version, phase, cell, epoch, sequence, iteration, steps, chunk, slot (of a rank: turn),
# flags, clip, scale, norm
_BODY = struct.Struct("<IHHIIQqQIIIddd")
_HAS_SYNC, _HAS_CLIP, _HAS_SCALE, _FOUND_INF, _REGRADING = 1, 2, 4, 8, 16


class Phase(IntEnum):
    """What a cell says was completed last."""

    LOADING = 1
    """Rank: masters are being filled from outside; nothing here may be trusted."""
    COMPUTE = 2
    PROTECTED = 3
    SYNCED = 4
    UPDATED = 5
    ITERATION = 6
    IDLE = 16
    """Group: not begun."""
    UNDO = 17
    COMMIT = 18
    DRAINED = 19


RANK_PHASES = frozenset(p for p in Phase if p < Phase.IDLE)


class SyncResult(msgspec.Struct, frozen=True):
    """Result of the global synchronization; the same on every rank.

    The effective gradient is ``(g * inv_scale) * clip``, two roundings; None leaves a factor out.
    ``found_inf`` makes the iteration a committed no-op.
    """

    clip: float | None = None
    inv_scale: float | None = None
    found_inf: bool = False
    grad_norm: float = 0.0


@dataclass(frozen=True)
class RankCell:
    """``steps`` counts optimizer steps done before this iteration (after UPDATED: including it).

    ``sync`` belongs to this iteration from SYNCED to UPDATED, otherwise to the one before. ``epoch`` counts
    how often the job's state was loaded from outside: ranks of different epochs have different sources (I-5).
    ``turn`` counts the updates that moved all chunks, modulo slots (`leto_rmu.geometry`): it changes with
    ``steps``, in the UPDATED record, but other than ``steps`` it is not set from outside.
    ``regrading``: gradients are being computed again, those in memory are not to be used.
    """

    phase: Phase
    iteration: int
    steps: int = 0
    epoch: int = 0
    sync: SyncResult | None = None
    turn: int = 0
    regrading: bool = False


@dataclass(frozen=True)
class GroupCell:
    """``chunk`` counts inside the group; ``slot`` is the parity buffer that is authoritative."""

    phase: Phase
    iteration: int
    chunk: int = 0
    slot: int = 0


def _pack(cell: int, sequence: int, value: RankCell | GroupCell, key: bytes) -> bytes:
    flags, factors, chunk, slot, steps, epoch = 0, (0.0, 0.0, 0.0), 0, 0, 0, 0
    if isinstance(value, RankCell):
        steps, epoch, slot, s = value.steps, value.epoch, value.turn, value.sync
        if s is not None:
            flags = _HAS_SYNC | _HAS_CLIP * (s.clip is not None) | _HAS_SCALE * (s.inv_scale is not None)
            flags |= _FOUND_INF * s.found_inf
            factors = (s.clip or 0.0, s.inv_scale or 0.0, s.grad_norm)
        flags |= _REGRADING * value.regrading
    else:
        chunk, slot = value.chunk, value.slot
    body = _BODY.pack(
        _MAGIC,
        MARKER_VERSION,
        value.phase,
        cell,
        epoch,
        sequence,
        value.iteration,
        steps,
        chunk,
        slot,
        flags,
        *factors,
    )
    return (body + _checksum(body, key)).ljust(_SLOT_BYTES, b"\0")


def _unpack(cell: int, raw: bytes, key: bytes) -> tuple[int, RankCell | GroupCell] | None:
    body = raw[: _BODY.size]
    if raw[_BODY.size : _BODY.size + 8] != _checksum(body, key):
        return None
    magic, version, kind, index, epoch, sequence, iteration, steps, chunk, slot, flags, clip, scale, norm = (
        _BODY.unpack(body)
    )
    if magic != _MAGIC or version != MARKER_VERSION or index != cell:
        return None
    phase = Phase(kind)
    if cell != RANK:
        return sequence, GroupCell(phase, iteration, chunk, slot)
    sync = None
    if flags & _HAS_SYNC:
        sync = SyncResult(
            clip if flags & _HAS_CLIP else None,
            scale if flags & _HAS_SCALE else None,
            bool(flags & _FOUND_INF),
            norm,
        )
    return sequence, RankCell(phase, iteration, steps, epoch, sync, slot, bool(flags & _REGRADING))


def _checksum(body: bytes, key: bytes) -> bytes:
    return hashlib.blake2b(body, digest_size=8, key=key).digest()


def read_header(pages: Bytes, lost_pages: Collection[int] = ()) -> tuple[bytes, Geometry] | None:
    """Layout hash and geometry from the first header that is whole; None where none is."""
    for replica in range(MARKER_REPLICAS):
        at = replica * (len(pages) // MARKER_REPLICAS)
        raw = pages[at, : _HEADER.size].tobytes()
        following = pages[at, _HEADER.size : _HEADER_BYTES].tobytes()
        geometry = following[8 : 8 + Geometry.wire.size]
        if at in lost_pages or following != _checksum(raw, b"") + geometry + _checksum(geometry, raw):
            continue
        magic, version, layout = _HEADER.unpack(raw)
        if magic == _HEADER_MAGIC and version == MARKER_VERSION:
            return layout, Geometry.decode(geometry)
    return None


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
        record = _unpack(cell, view.tobytes(), self._key)
        return record if record is not None and record[0] % 2 == slot else None

    def _check_headers(self, lost: set[tuple[int, int]]) -> None:
        for r, replica in enumerate(self._replicas):
            raw = replica[: _HEADER.size].tobytes()
            if (r, 0) in lost or replica[_HEADER.size : _HEADER.size + 8].tobytes() != _checksum(raw, b""):
                continue  # torn or lost: the other replicas, and the keyed cells, still speak
            magic, version, layout = _HEADER.unpack(raw)
            if magic != _HEADER_MAGIC or version != MARKER_VERSION:
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
        content = np.frombuffer(_pack(cell, sequence, value, self._key), np.uint8)
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
        views = tuple(replica[:_HEADER_BYTES] for replica in self._replicas)
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
            (replica[:_HEADER_BYTES], self._header()) for replica in self._replicas
        ]
        for cell, value in enumerate(self._values):
            if value is None:
                raise ProtocolError(f"marker cell {cell} has no valid record to heal from")
            sequence = self._sequence[cell]
            content = np.frombuffer(_pack(cell, sequence, value, self._key), np.uint8)
            places += [(self._slot(r, cell, sequence % 2), content) for r in range(MARKER_REPLICAS)]

        def apply() -> None:
            for view, content in places:
                if not np.array_equal(view, content):
                    view[:] = content

        return Op("heal", None, None, tuple(view for view, _ in places), apply)

    def _header(self) -> Bytes:
        raw = _HEADER.pack(_HEADER_MAGIC, MARKER_VERSION, self._key)
        geometry = self._plan.geometry.encode()
        return np.frombuffer(raw + _checksum(raw, b"") + geometry + _checksum(geometry, raw), np.uint8)

    @staticmethod
    def _offset(cell: int) -> int:
        return CELL_BYTES * (1 + cell)

    def _slot(self, replica: int, cell: int, slot: int) -> Bytes:
        at = self._offset(cell) + slot * _SLOT_BYTES
        return self._replicas[replica][at : at + _SLOT_BYTES]
