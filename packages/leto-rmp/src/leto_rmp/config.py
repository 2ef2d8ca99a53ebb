"""What a pool is made of: its numbers, and the specification of one allocation.

Paper section 4.1: a protection group has D data pages (`data_pages`), H1 tier-1 (`tier1_pages`) and
H2 tier-2 parity pages (`tier2_pages`) of S bytes (`page_bytes`). All of these are plain values that
travel between the processes; both sides check them with the same code.
"""

from __future__ import annotations

import mmap
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from leto_rmp.errors import ConfigError

__all__ = ["AllocationSpec", "Interleave", "Kind", "Placement", "PoolConfig"]

NAME_BYTES_MAX = 128
CUDA_PAGE_BYTES = 2 << 20
"""Physical GPU memory comes in units of this, and one handle cannot be unmapped in part."""
GPU_PAGES_PER_HANDLE = 16
"""32 MiB: a process ends, and attaches, in a quarter of the time or less (docs/benchmarks/fence-study.md)."""
GPU_PAGES_PER_HANDLE_MAX = 512

Placement = Literal["host", "device"]


class Kind(StrEnum):
    """What is kept of an allocation when its trainer dies, and how (docs/concepts/vocabulary.md)."""

    RETAINED = "retained"
    """Kept and protected: groups with tier-1 and tier-2 parity pages."""
    TRANSACTION = "transaction"
    """Kept without parity of this pool: gradients, undo, parity buffers, markers."""
    DERIVED = "derived"
    """Kept, but always rebuilt after an attach: model copies."""
    PROCESS = "process"
    """Buffers of process state."""


@dataclass(frozen=True)
class PoolConfig:
    """Numbers of a pool, equal on all ranks. Page sizes are bytes, the rest are counts of pages."""

    page_bytes: int = 2 << 20
    data_pages: int = 1024
    tier1_pages: int = 16
    tier2_pages: int = 1
    backend: str = "host"
    """"host" (memfds) or "cuda" (data pages on a GPU, parity pages in memfds)."""
    pages_per_handle: int = 0
    """0: one handle holds a whole section; n: one handle for every n pages (1 mirrors CUDA). Of memfds."""
    device: int = 0
    """The GPU, as the state manager numbers them; the clients find the same one by its identifier."""
    gpu_pages_per_handle: int = GPU_PAGES_PER_HANDLE
    """GPU pages that one handle holds, 1 to 512. What is lost, marked and repaired is a page all the same:
    replacing one copies the others of its handle. The driver maps and unmaps by handles. Nothing in a pool of
    the host backend."""

    def __post_init__(self) -> None:
        if self.page_bytes <= 0 or self.page_bytes % mmap.PAGESIZE:
            raise ConfigError(
                f"page_bytes must be a positive multiple of {mmap.PAGESIZE} (the kernel's page), "
                f"found {self.page_bytes}"
            )
        if self.data_pages < 1 or self.tier1_pages < 1 or self.tier2_pages < 0:
            raise ConfigError(
                "data_pages and tier1_pages must be at least 1 and tier2_pages at least 0, found "
                f"{self.data_pages}, {self.tier1_pages}, {self.tier2_pages}"
            )
        if self.pages_per_handle < 0:
            raise ConfigError(f"pages_per_handle must not be negative, found {self.pages_per_handle}")
        if not self.backend:
            raise ConfigError("backend must be named, for example 'host'")
        if self.device < 0:
            raise ConfigError(f"device must not be negative, found {self.device}")
        if not 1 <= self.gpu_pages_per_handle <= GPU_PAGES_PER_HANDLE_MAX:
            raise ConfigError(
                f"gpu_pages_per_handle must be 1 to {GPU_PAGES_PER_HANDLE_MAX}, found "
                f"{self.gpu_pages_per_handle}"
            )
        if self.backend == "cuda" and self.page_bytes % CUDA_PAGE_BYTES:
            raise ConfigError(
                f"page_bytes must be a multiple of {CUDA_PAGE_BYTES} on the cuda backend, found "
                f"{self.page_bytes}"
            )


@dataclass(frozen=True)
class Interleave:
    """How the physical pages of an allocation follow each other logically.

    The allocation is `planes` planes of P pages each, one after the other in memory. The logical
    order takes `run` congruent pages of every plane in turn, so that a chunk (the same elements of
    master, exp_avg and exp_avg_sq) is a run of consecutive logical pages.
    """

    planes: int = 1
    run: int = 1

    def __post_init__(self) -> None:
        if self.planes < 1 or self.run < 1:
            raise ConfigError(f"planes and run must be at least 1, found {self.planes} and {self.run}")

    def plane_pages(self, pages: int) -> int:
        """Return P, the pages of one plane; raise ConfigError when `pages` cannot be laid out."""
        per_plane, rest = divmod(pages, self.planes)
        if rest or per_plane % self.run:
            raise ConfigError(
                f"{pages} pages cannot be {self.planes} equal planes of a multiple of {self.run} pages: "
                f"make nbytes a multiple of planes x run x page_bytes"
            )
        return per_plane

    def logical_order(self, pages: int) -> tuple[int, ...]:
        """Return the physical page index of every logical index, 0 .. pages - 1."""
        per_plane = self.plane_pages(pages)
        return tuple(
            plane * per_plane + first + i
            for first in range(0, per_plane, self.run)
            for plane in range(self.planes)
            for i in range(self.run)
        )


@dataclass(frozen=True)
class AllocationSpec:
    """A stable name, a size in bytes (rounded up to whole pages), a kind and a layout."""

    name: str
    nbytes: int
    kind: Kind
    interleave: Interleave = field(default_factory=Interleave)
    group_pages: int | None = None
    """Data pages per protection group, at most D; None: D."""
    placement: Placement = "device"
    """Where the data pages are: "device" is the GPU on the cuda backend and host memory on the host backend;
    "host" is host memory on both (markers, job state). Parity pages are always in host memory."""

    def __post_init__(self) -> None:
        if not self.name.isprintable() or not 0 < len(self.name.encode()) <= NAME_BYTES_MAX:
            raise ConfigError(
                f"an allocation's name must be 1 to {NAME_BYTES_MAX} printable bytes, found {self.name!r}"
            )
        if self.nbytes < 1:
            raise ConfigError(f"allocation {self.name!r}: nbytes must be at least 1, found {self.nbytes}")
        if self.group_pages is not None and self.group_pages < 1:
            raise ConfigError(
                f"allocation {self.name!r}: group_pages must be at least 1, found {self.group_pages}"
            )
        if self.placement not in ("host", "device"):
            raise ConfigError(
                f"allocation {self.name!r}: placement must be 'host' or 'device', found {self.placement!r}"
            )
