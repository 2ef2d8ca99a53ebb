"""Geometry: chunks, slots, sub-blocks and parity positions of an arena; where a chunk is now.

Role: the arithmetic that the plan, the marker's header and recovery share (docs/concepts/marker-protocol.md,
"The free slot"). An arena is ``planes`` planes of ``slots`` slots each; slot s of a plane is ``run``
contiguous pages. A chunk is the same slot of every plane.

Under the scheme "undo" a chunk stays in its slot: slot c holds chunk c. Under "slots" there is one slot more
than there are chunks, and an update writes chunk c into the slot before its own, modulo the number of slots,
which is free by then: chunk c - 1 has just left it. So after n updates chunk c is in slot (c - n) mod (chunks
+ 1).

Parity positions are logical and do not depend on slots. A chunk is ``subblocks`` sub-blocks of ``subrun``
pages of every plane, and each sub-block takes ``stride`` positions, the last of which may be *absent*: zero
pages that have no memory.
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from leto_rmu._pool import PoolConfig
from leto_rmu.errors import PlanError

__all__ = ["Geometry", "Rotation", "Scheme", "good_chunk_pages"]

Scheme = Literal["undo", "slots"]
_SCHEMES: tuple[Scheme, ...] = ("undo", "slots")
_ELEMENT_BYTES = 4
# Of positions in the parity: 256 of 2 MiB, which are 240 pages for AdamW. Twice as many would save 2.5 % of
# the update phase, and raise the peak of GPU memory by half a GiB.
_CHUNK_BYTES = 1 << 29
_PART = 8  # of the state: what the free slot and the last chunk's padding may take


def _sub_block(planes: int, h1: int) -> tuple[int, int]:
    """(positions, pages of a plane) of an aligned sub-block."""
    stride = 1 << (max(h1, planes) - 1).bit_length()
    return stride, stride // planes


def good_chunk_pages(pool: PoolConfig, planes: int, numel: int) -> int:
    """Pages of a chunk under "slots" on a GPU, of a state of `numel` elements in each plane.

    A chunk costs a launch, a mark and a pass over parity rows, whatever its size; but the free slot has the
    size of one, and the last one is padded. So: the most sub-blocks with which these two together take at
    most an eighth of the state, of which a chunk takes at most 512 MiB of parity positions and a group holds
    a whole number with hardly a rest; one sub-block where the state is too small for more.
    """
    stride, subrun = _sub_block(planes, pool.tier1_pages)
    in_group = pool.data_pages // stride
    most = min(in_group, _CHUNK_BYTES // (stride * pool.page_bytes))
    needed = -(-numel * _ELEMENT_BYTES // (pool.page_bytes * subrun))
    fit = (
        blocks
        for blocks in (in_group // chunks for chunks in range(1, in_group + 1))
        if blocks <= most and (-(-needed // blocks) + 1) * blocks * _PART <= needed * (_PART + 1)
    )
    return next(fit, 1) * planes * subrun


@dataclass(frozen=True)
class Rotation:
    """All chunks have been updated ``turn`` times (modulo slots), the first ``moved`` chunks once more."""

    turn: int = 0
    moved: int = 0


@dataclass(frozen=True)
class Geometry:
    """Sizes in pages; ``chunks`` counts those of the whole arena."""

    scheme: Scheme
    planes: int
    subrun: int
    subblocks: int
    stride: int
    chunks: int
    chunks_per_group: int

    wire = struct.Struct("<7I")

    @classmethod
    def of(
        cls,
        scheme: Scheme,
        align: bool,
        planes: int,
        group: tuple[int, int],
        chunk_pages: int | None,
        chunks: Callable[[int], int],
    ) -> Geometry:
        """The geometry of a plan; raise PlanError where there is none.

        ``group``: data pages and tier-1 pages. ``chunks`` says how many chunks of so many pages of a plane
        there are.
        """
        d, h1 = group
        if scheme not in _SCHEMES:
            raise PlanError(f"scheme must be 'undo' or 'slots', found {scheme!r}")
        if align:
            stride, subrun = _sub_block(planes, h1)
            block = planes * subrun
            subblocks, rest = divmod(block if chunk_pages is None else chunk_pages, block)
            if rest or subblocks < 1:
                raise PlanError(
                    f"chunk_pages must be a positive multiple of the {block} pages of an aligned sub-block, "
                    f"found {chunk_pages}: or make the plan with align=False"
                )
        else:
            subrun, rest = divmod(
                planes * max(1, h1 // planes) if chunk_pages is None else chunk_pages, planes
            )
            if rest or subrun < 1:
                raise PlanError(
                    f"chunk_pages must be a positive multiple of {planes} planes, found {chunk_pages}"
                )
            stride, subblocks = planes * subrun, 1
        if stride * subblocks > d:
            raise PlanError(
                f"a chunk of {planes * subrun * subblocks} pages, {stride * subblocks} in the parity, does "
                f"not fit a group of data_pages={d}"
            )
        count = chunks(subrun * subblocks)
        return cls(scheme, planes, subrun, subblocks, stride, count, d // (stride * subblocks))

    # --- sizes --------------------------------------------------------------------------------------
    @property
    def run(self) -> int:
        """Pages of each plane in a chunk."""
        return self.subrun * self.subblocks

    @property
    def pages_per_chunk(self) -> int:
        return self.run * self.planes

    @property
    def positions_per_chunk(self) -> int:
        """Parity positions of a chunk, absent ones included."""
        return self.stride * self.subblocks

    @property
    def slots(self) -> int:
        return self.chunks + (self.scheme == "slots")

    @property
    def plane_pages(self) -> int:
        """Pages of one plane."""
        return self.slots * self.run

    @property
    def groups(self) -> int:
        return -(-self.chunks // self.chunks_per_group)

    def chunks_in(self, group: int) -> int:
        return min(self.chunks_per_group, self.chunks - group * self.chunks_per_group)

    # --- places -------------------------------------------------------------------------------------
    def slot(self, chunk: int, rotation: Rotation) -> int:
        """Where chunk ``chunk`` of the arena is."""
        if self.scheme == "undo":
            return chunk
        updates = rotation.turn + (chunk < rotation.moved)
        return (chunk - updates) % self.slots

    def turned(self, turn: int) -> int:
        """The turn that follows a complete update."""
        return (turn + 1) % self.slots if self.scheme == "slots" else turn

    def slot_pages(self, slot: int) -> list[int | None]:
        """Physical page of every parity position of the chunk in ``slot``; None: absent."""
        return self._positions(self.plane_pages, slot * self.run)

    def buffer_pages(self) -> list[int | None]:
        """The same for a buffer of one chunk, plane after plane."""
        return self._positions(self.run, 0)

    def _positions(self, plane_stride: int, first: int) -> list[int | None]:
        absent: list[int | None] = [None] * (self.stride - self.planes * self.subrun)
        return [
            page
            for b in range(self.subblocks)
            for page in (
                *(
                    plane * plane_stride + first + b * self.subrun + k
                    for plane in range(self.planes)
                    for k in range(self.subrun)
                ),
                *absent,
            )
        ]

    def position_of(self, chunk: int, plane: int, page: int) -> int:
        """Position in the group of page ``page`` (0 .. run - 1) of a plane of its chunk ``chunk``."""
        block, k = divmod(page, self.subrun)
        return (chunk * self.subblocks + block) * self.stride + plane * self.subrun + k

    def group_pages(self, group: int, rotation: Rotation) -> list[int | None]:
        """Physical page of every parity position of a group; None: absent."""
        first = group * self.chunks_per_group
        return [
            page
            for chunk in range(first, first + self.chunks_in(group))
            for page in self.slot_pages(self.slot(chunk, rotation))
        ]

    # --- marker header ------------------------------------------------------------------------------
    def encode(self) -> bytes:
        return self.wire.pack(_SCHEMES.index(self.scheme), *self.numbers)

    @property
    def numbers(self) -> tuple[int, ...]:
        return (self.planes, self.subrun, self.subblocks, self.stride, self.chunks, self.chunks_per_group)

    @classmethod
    def decode(cls, raw: bytes) -> Geometry:
        """Raise PlanError when these are no sizes of an arena."""
        scheme, *numbers = cls.wire.unpack(raw)
        if scheme >= len(_SCHEMES) or min(numbers) < 1:
            raise PlanError(f"not the geometry of an arena: scheme {scheme}, sizes {numbers}")
        return cls(_SCHEMES[scheme], *numbers)
