"""The page backend: what a kind of memory must be able to do. One contract-test suite runs for each.

The manager side (`Backend`) owns the pages of sections and never needs a trainer: it creates them,
hands out handles, finds, makes and heals unreadable pages. The client side (`Mapper`) turns handles
into one contiguous range. `host.py` is the first; a CUDA backend creates its data sections on the
device, and its parity sections through the host backend, since parity lives in host memory.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from enum import StrEnum

from leto_rmp.errors import ConfigError
from leto_rmp.layout import SectionLayout
from leto_rmp.mapping import MappedRange

__all__ = ["Backend", "Handle", "Mapper", "PoisonMethod", "Section", "open_backend", "open_mapper"]


class PoisonMethod(StrEnum):
    """How an injected loss is made visible to localization."""

    USERFAULTFD = "userfaultfd"
    UNMAPPED = "unmapped"
    SIMULATED = "simulated"


class Handle(ABC):
    """A share of a section that can be sent to another process; closed with its last reference."""

    @abstractmethod
    def fileno(self) -> int:
        """Return the file descriptor to send; valid while this object lives."""


class Section(ABC):
    """The pages of one section. Indices and counts are pages of the section."""

    layout: SectionLayout

    @property
    @abstractmethod
    def handles(self) -> Sequence[Handle]:
        """The handles, in order; sizes are `layout.handle_pages`."""

    @abstractmethod
    def probe(self, first: int, count: int) -> bool:
        """Return whether all of these pages can be read. Never blocks, never touches the contents."""

    @abstractmethod
    def lose(self, index: int, noise: bytes) -> PoisonMethod:
        """Overwrite the page with `noise` (one page), then make it unreadable as a failed device would."""

    @abstractmethod
    def poison(self, index: int, noise: bytes) -> PoisonMethod:
        """Overwrite the page with `noise`, then poison it as an uncorrectable host memory error would."""

    @abstractmethod
    def heal(self, index: int) -> None:
        """Replace the page by a fresh zero page at the same address in every process."""

    @abstractmethod
    def flip(self, index: int, offset: int, mask: bytes) -> None:
        """XOR `mask` into the page at byte `offset`; the page stays readable (silent corruption)."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the pages; they live on only where a client still maps them."""


class Backend(ABC):
    """Creates sections; one per manager."""

    poison_method: PoisonMethod
    poison_reason: str
    """Why poison is only simulated; empty otherwise."""
    localization: str

    @abstractmethod
    def create(self, layout: SectionLayout) -> Section:
        """Allocate all pages of a section up front, zeroed, or nothing at all.

        Raises NotEnoughMemory or LimitTooLow.
        """

    @abstractmethod
    def check_room(self, layouts: Sequence[SectionLayout]) -> None:
        """Raise NotEnoughMemory or LimitTooLow when these sections cannot be created together."""

    @abstractmethod
    def simulated_pages(self) -> int:
        """Return how many pages are unreadable only by declaration."""

    @abstractmethod
    def close(self) -> None:
        """Release what the backend itself holds."""


class Mapper(ABC):
    """The client's half: map received handles."""

    @abstractmethod
    def reserve(self, layout: SectionLayout, writable: bool) -> MappedRange:
        """Return an empty range that takes the section's handles through `place`, in order."""


def open_backend(name: str, **options: str) -> Backend:
    """Return the manager's half of the backend called `name`."""
    if name == "host":
        from leto_rmp.host import HostBackend

        return HostBackend(**options)
    raise ConfigError(f"no backend is called {name!r}; there is: 'host'")


def open_mapper(name: str) -> Mapper:
    """Return the client's half of the backend called `name`."""
    if name == "host":
        from leto_rmp.host import HostMapper

        return HostMapper()
    raise ConfigError(f"no backend is called {name!r}; there is: 'host'")
