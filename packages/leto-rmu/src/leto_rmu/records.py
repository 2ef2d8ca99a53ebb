"""Records of the marker: what one cell says, its bytes, and the header that names the layout.

Role: the format of `leto_rmu.marker` (I-6). A record is 80 bytes: fields, and a checksum under the key of the
layout, so that a torn or foreign one is never valid. The header carries the layout hash and the arena's
geometry.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection
from dataclasses import dataclass
from enum import IntEnum

import msgspec

from leto_rmu.geometry import Geometry
from leto_rmu.ops import Bytes
from leto_rmu.regions import CELL_BYTES, MARKER_REPLICAS

__all__ = [
    "HEADER_BYTES",
    "MARKER_VERSION",
    "RANK",
    "RANK_PHASES",
    "SLOT_BYTES",
    "GroupCell",
    "Phase",
    "RankCell",
    "SyncResult",
    "checksum",
    "header",
    "pack",
    "read_header",
    "split_header",
    "unpack",
]

MARKER_VERSION = 2
RANK = 0  # cell index of the rank; group g is cell 1 + g
SLOT_BYTES = CELL_BYTES // 2
_MAGIC = 0x4D52544C  # "LTRM"
_HEADER = struct.Struct("<8sI32s")  # magic, version, layout hash; then its checksum
_GEOMETRY_AT = _HEADER.size + 8  # the geometry and its checksum follow
HEADER_BYTES = _GEOMETRY_AT + Geometry.wire.size + 8
_HEADER_MAGIC = b"LETO-RMU"
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


def pack(cell: int, sequence: int, value: RankCell | GroupCell, key: bytes) -> bytes:
    """The bytes of a record, SLOT_BYTES long."""
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
    return (body + checksum(body, key)).ljust(SLOT_BYTES, b"\0")


def unpack(cell: int, raw: bytes, key: bytes) -> tuple[int, RankCell | GroupCell] | None:
    """(sequence, record) of a cell's slot; None where these are not a valid record of it."""
    body = raw[: _BODY.size]
    if raw[_BODY.size : _BODY.size + 8] != checksum(body, key):
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


def checksum(body: bytes, key: bytes) -> bytes:
    """Eight bytes."""
    return hashlib.blake2b(body, digest_size=8, key=key).digest()


def header(key: bytes, geometry: Geometry) -> bytes:
    """The bytes of a header, HEADER_BYTES long."""
    raw, shape = _HEADER.pack(_HEADER_MAGIC, MARKER_VERSION, key), geometry.encode()
    return raw + checksum(raw, b"") + shape + checksum(shape, raw)


def split_header(raw: bytes) -> tuple[bool, int, bytes] | None:
    """(is it a marker's, version, layout hash) of a header; None where it is torn or lost."""
    body = raw[: _HEADER.size]
    if raw[_HEADER.size : _GEOMETRY_AT] != checksum(body, b""):
        return None
    magic, version, layout = _HEADER.unpack(body)
    return magic == _HEADER_MAGIC, version, layout


def read_header(pages: Bytes, lost_pages: Collection[int] = ()) -> tuple[bytes, Geometry] | None:
    """Layout hash and geometry from the first header that is whole; None where none is."""
    for replica in range(MARKER_REPLICAS):
        at = replica * (len(pages) // MARKER_REPLICAS)
        raw = pages[at, :HEADER_BYTES].tobytes()
        shape, sealed = raw[_GEOMETRY_AT:-8], raw[-8:]
        found = None if at in lost_pages else split_header(raw)
        if found is None or found[:2] != (True, MARKER_VERSION):
            continue
        if sealed == checksum(shape, raw[: _HEADER.size]):
            return found[2], Geometry.decode(shape)
    return None
