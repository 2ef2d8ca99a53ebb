"""Memory: what the RMU needs from the pool, and its two implementations.

Role: the border between the protocol and the memory that survives a trainer (paper section 4). `ClientMemory`
speaks to a state manager through leto_rmp; `ArrayMemory` is plain numpy for tests and for use without a
manager. Both keep page marks outside the trainer: a page whose contents are gone stays *lost* until the
updater has repaired, checked and acknowledged it (I-6).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from leto_rmp import PageMark, ProtectionGroup, page_count, protection_groups
from leto_rmu import arrays
from leto_rmu._pool import AllocationSpec, Kind, PageRef, PoolConfig
from leto_rmu.errors import PlanError, ProtocolError
from leto_rmu.ops import Bytes

__all__ = ["ArrayMemory", "ClientMemory", "Memory", "Region"]


class Region(Protocol):
    """One allocation: uint8 ``pages`` (n, S), ``tier1`` (groups, H1, S) and ``tier2`` (groups, H2, S)."""

    @property
    def name(self) -> str: ...
    @property
    def pages(self) -> Bytes: ...
    @property
    def tier1(self) -> Bytes | None: ...
    @property
    def tier2(self) -> Bytes | None: ...
    @property
    def groups(self) -> Sequence[ProtectionGroup]: ...


class Memory(Protocol):
    """Memory of one rank that outlives its trainer."""

    def allocate(self, specs: Sequence[AllocationSpec]) -> Mapping[str, Region]:
        """Create the regions, or attach to those of the same names; refuse different sizes."""
        ...

    def lost(self) -> frozenset[PageRef]:
        """Pages that are usable but whose contents are gone and not yet repaired."""
        ...

    def acknowledge(self, refs: Sequence[PageRef]) -> None:
        """Declare repaired pages healthy."""
        ...


@dataclass(frozen=True)
class ArrayRegion:
    """A region in private numpy memory."""

    name: str
    spec: AllocationSpec
    pages: Bytes
    tier1: Bytes | None
    tier2: Bytes | None
    groups: tuple[ProtectionGroup, ...]

    def section(self, name: str) -> Bytes:
        """All pages of a section as (n, S), in PageRef order."""
        array = {"data": self.pages, "tier1": self.tier1, "tier2": self.tier2}[name]
        if array is None:
            raise PlanError(f"region {self.name!r} has no section {name!r}")
        return array.reshape(-1, self.pages.shape[1])


class ArrayMemory:
    """Memory in numpy arrays: survives an updater object, not a process."""

    region: type[ArrayRegion] = ArrayRegion

    def __init__(self, config: PoolConfig) -> None:
        self.config = config
        self.regions: dict[str, ArrayRegion] = {}
        self.marks: set[PageRef] = set()

    def allocate(self, specs: Sequence[AllocationSpec]) -> Mapping[str, ArrayRegion]:
        for spec in specs:
            known = self.regions.get(spec.name)
            if known is None:
                self.regions[spec.name] = self._create(spec)
            elif known.spec != spec:
                raise PlanError(f"region {spec.name!r} exists as {known.spec}, asked for {spec}")
        return {spec.name: self.regions[spec.name] for spec in specs}

    def _create(self, spec: AllocationSpec) -> ArrayRegion:
        c = self.config
        groups = protection_groups(spec, c) if spec.kind is Kind.RETAINED else ()

        return self.region(
            spec.name,
            spec,
            self._pages(spec),
            self._host_pages(len(groups), c.tier1_pages) if groups else None,
            self._host_pages(len(groups), c.tier2_pages) if groups and c.tier2_pages else None,
            groups,
        )

    def _pages(self, spec: AllocationSpec) -> Any:
        return self._host_pages(page_count(spec, self.config))

    def _host_pages(self, *count: int) -> Bytes:
        """Pages of zeros."""
        return np.zeros((*count, self.config.page_bytes), np.uint8)

    def lost(self) -> frozenset[PageRef]:
        return frozenset(self.marks)

    def acknowledge(self, refs: Sequence[PageRef]) -> None:
        unknown = [r for r in refs if r not in self.marks]
        if unknown:
            raise ProtocolError(f"acknowledged pages that were not lost: {unknown[:3]}")
        self.marks.difference_update(refs)

    def lose(self, refs: Iterable[PageRef], seed: int) -> None:
        """Destroy pages, as a failure and the remap after it would; contents become random bytes."""
        rng = np.random.default_rng(seed)
        for ref in refs:
            page = self.regions[ref.allocation].section(ref.section)[ref.index]
            arrays.copy(page, rng.integers(0, 256, page.shape[0], dtype=np.uint8))
            self.marks.add(ref)


class ClientMemory:
    """Memory of a state manager, through a leto_rmp ``Client`` that has the writer role."""

    def __init__(self, client: Any) -> None:
        self.client = client

    def allocate(self, specs: Sequence[AllocationSpec]) -> Mapping[str, Region]:
        regions: Mapping[str, Region] = self.client.allocate(specs)
        return regions

    def lost(self) -> frozenset[PageRef]:
        marks = self.client.marks()
        if PageMark.LOST in marks.values():
            # Whoever promoted this trainer has usually done this; here it is for a loss that was found since.
            self.client.localize()
            self.client.remap()
            marks = self.client.marks()
        return frozenset(ref for ref, mark in marks.items() if mark is not PageMark.HEALTHY)

    def acknowledge(self, refs: Sequence[PageRef]) -> None:
        self.client.acknowledge(list(refs))
