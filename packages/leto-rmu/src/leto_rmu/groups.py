"""Which physical pages a protection group has now: for drills and tests, from retained memory alone.

Role: the pool groups physical pages, once and for all; the RMU's groups are logical, and under the scheme
"slots" their pages move with every step. Parity row r of logical group g is tier-1 page g x H1 + r of the
allocation. What is needed lies in the marker, whose header describes the arena, so neither the plan nor the
trainer is asked.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from leto_rmu.errors import ProtocolError
from leto_rmu.geometry import Geometry
from leto_rmu.marker import Marker, Phase
from leto_rmu.memory import Region
from leto_rmu.records import read_header
from leto_rmu.regions import MARKER, marker_pages
from leto_rmu.views import indices

__all__ = ["protected_groups"]


@dataclass(frozen=True)
class _Found:
    """What a marker's header says about the plan."""

    geometry: Geometry
    layout_hash: bytes
    marker_pages: int

    @property
    def groups(self) -> int:
        return self.geometry.groups


def protected_groups(memory: Any) -> tuple[tuple[int, ...], ...]:
    """Data pages of the arena that every protection group has now, in parity order.

    ``memory``: a leto_rmp ``Client`` in any role (CONTROL is enough), or any `Memory` whose regions are
    known. Ask while no trainer is at work. Pages in no group are free: losing them costs nothing. Pages of
    padding are in the last group, though repairing them takes no parity. Raises ProtocolError when memory
    holds no state, or its marker is lost.
    """
    clientlike = hasattr(memory, "allocations")
    regions: Mapping[str, Region] = memory.allocations() if clientlike else memory.regions
    if MARKER not in regions:
        raise ProtocolError(f"no region {MARKER!r}: there are {sorted(regions)}; has an updater been here?")
    pages = regions[MARKER].pages
    lost = indices(memory.marks(), MARKER) if clientlike else indices(memory.lost(), MARKER)
    header = read_header(pages, lost)
    if header is None:
        raise ProtocolError("no header of the marker can be read: memory is fresh, or the marker is lost")
    layout_hash, geometry = header
    found = _Found(geometry, layout_hash, marker_pages(geometry.groups, pages.shape[1]))
    marker = Marker(found, regions[MARKER], lost)
    if not marker.readable or marker.rank is None or marker.rank.phase is Phase.LOADING:
        raise ProtocolError("the marker speaks of no state: it is incomplete, or state was being loaded")
    rotation = marker.rotation
    return tuple(
        tuple(page for page in geometry.group_pages(g, rotation) if page is not None)
        for g in range(geometry.groups)
    )
