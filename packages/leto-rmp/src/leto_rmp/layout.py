"""The arithmetic of pages and protection groups (paper section 4.1, figure 4). Pure functions.

An allocation has a data section and, when it is retained, a tier-1 and a tier-2 section:

* data index = physical page, 0 .. n - 1;
* tier-1 index = group * H1 + row;
* tier-2 index = group * H2 + row.

Groups cut the *logical* order of the data pages (`Interleave`) into runs of `group_pages`; only the
last group may be shorter. The layout hash covers the configuration and all specifications, so that
two processes that hash alike address the same bytes in the same way (I-6).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

import msgspec

from leto_rmp.config import AllocationSpec, Kind, Placement, PoolConfig
from leto_rmp.errors import ConfigError

__all__ = [
    "SECTIONS",
    "PageRef",
    "PageRun",
    "ProtectionGroup",
    "SectionLayout",
    "SectionName",
    "check_spec",
    "layout_hash",
    "page_count",
    "page_runs",
    "protection_groups",
    "section_layouts",
]

SectionName = Literal["data", "tier1", "tier2"]
SECTIONS: tuple[SectionName, ...] = ("data", "tier1", "tier2")


@dataclass(frozen=True, order=True)
class PageRef:
    """One page of one section of one allocation."""

    allocation: str
    section: SectionName
    index: int

    def __str__(self) -> str:
        return f"{self.allocation}/{self.section}[{self.index}]"


@dataclass(frozen=True)
class PageRun:
    """`count` consecutive pages of one section, from `first` on."""

    allocation: str
    section: SectionName
    first: int
    count: int


def page_runs(refs: Iterable[PageRef]) -> tuple[PageRun, ...]:
    """Return the runs that cover these pages, in order."""
    runs: list[PageRun] = []
    for ref in sorted(set(refs)):
        last = runs[-1] if runs else None
        if last is not None and (last.allocation, last.section, last.first + last.count) == (
            ref.allocation,
            ref.section,
            ref.index,
        ):
            runs[-1] = PageRun(last.allocation, last.section, last.first, last.count + 1)
        else:
            runs.append(PageRun(ref.allocation, ref.section, ref.index, 1))
    return tuple(runs)


@dataclass(frozen=True)
class ProtectionGroup:
    """Data pages that are protected together; `pages` are physical indices in logical order."""

    index: int
    pages: tuple[int, ...]


@dataclass(frozen=True)
class SectionLayout:
    """Size of one section and of the handles that hold it."""

    allocation: str
    section: SectionName
    kind: Kind
    pages: int
    page_bytes: int
    pages_per_handle: int
    placement: Placement = "host"

    @property
    def nbytes(self) -> int:
        """Bytes of the section, whole pages."""
        return self.pages * self.page_bytes

    @property
    def handle_pages(self) -> tuple[int, ...]:
        """Pages of each handle, in order; only the last may hold fewer."""
        per = self.pages_per_handle or self.pages
        full, rest = divmod(self.pages, per)
        return (per,) * full + ((rest,) if rest else ())

    def handle_of(self, page: int) -> int:
        """Return the number of the handle that holds a page."""
        return page // (self.pages_per_handle or self.pages)

    def pages_of(self, handle: int) -> range:
        """Return the pages that a handle holds."""
        per = self.pages_per_handle or self.pages
        return range(handle * per, min(self.pages, (handle + 1) * per))


def page_count(spec: AllocationSpec, config: PoolConfig) -> int:
    """Return the whole pages that hold `spec.nbytes`."""
    return -(-spec.nbytes // config.page_bytes)


def group_pages(spec: AllocationSpec, config: PoolConfig) -> int:
    """Return the data pages of a full group."""
    return config.data_pages if spec.group_pages is None else spec.group_pages


def check_spec(spec: AllocationSpec, config: PoolConfig) -> None:
    """Raise ConfigError when the specification cannot be laid out in this pool."""
    if group_pages(spec, config) > config.data_pages:
        raise ConfigError(
            f"allocation {spec.name!r}: group_pages is {spec.group_pages}, at most data_pages = "
            f"{config.data_pages} pages can be protected together"
        )
    try:
        spec.interleave.plane_pages(page_count(spec, config))
    except ConfigError as error:
        raise ConfigError(f"allocation {spec.name!r}: {error.message}") from None


def group_count(spec: AllocationSpec, config: PoolConfig) -> int:
    """Return how many groups cover the allocation, whatever its kind."""
    return -(-page_count(spec, config) // group_pages(spec, config))


def protection_groups(spec: AllocationSpec, config: PoolConfig) -> tuple[ProtectionGroup, ...]:
    """Return the groups that cover the allocation; they partition its pages.

    The kind does not matter here: the updater groups gradients in the same way although the pool
    keeps no parity for them.
    """
    check_spec(spec, config)
    order = spec.interleave.logical_order(page_count(spec, config))
    size = group_pages(spec, config)
    return tuple(
        ProtectionGroup(index, order[first : first + size])
        for index, first in enumerate(range(0, len(order), size))
    )


def section_layouts(spec: AllocationSpec, config: PoolConfig) -> tuple[SectionLayout, ...]:
    """Return the sections that exist for this allocation: data, and parity if it is retained."""
    check_spec(spec, config)
    pages: dict[SectionName, int] = {"data": page_count(spec, config)}
    if spec.kind is Kind.RETAINED:
        groups = group_count(spec, config)
        pages["tier1"] = groups * config.tier1_pages
        pages["tier2"] = groups * config.tier2_pages
    return tuple(
        _section(spec, config, section, pages[section]) for section in SECTIONS if pages.get(section, 0)
    )


def _section(spec: AllocationSpec, config: PoolConfig, section: SectionName, pages: int) -> SectionLayout:
    on_device = config.backend == "cuda" and section == "data" and spec.placement == "device"
    return SectionLayout(
        spec.name,
        section,
        spec.kind,
        pages,
        config.page_bytes,
        config.gpu_pages_per_handle if on_device else config.pages_per_handle,
        "device" if on_device else "host",
    )


def layout_hash(config: PoolConfig, specs: Iterable[AllocationSpec]) -> str:
    """Return the SHA-256 (hex) of the configuration and of all specifications, ordered by name.

    The number of the GPU is left out, and how many pages a handle there holds (1 stands for any number): no
    byte moves inside the pool.
    """
    document = {
        "version": 3,
        "config": replace(config, device=0, gpu_pages_per_handle=1),
        "specs": sorted(specs, key=lambda spec: spec.name),
    }
    return hashlib.sha256(msgspec.json.encode(document, order="deterministic")).hexdigest()
