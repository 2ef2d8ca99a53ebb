"""The page backend: what a kind of memory must be able to do. One contract-test suite runs for each.

The manager side (`Backend`) owns the pages of sections and never needs a trainer: it creates them,
hands out handles, finds, makes and heals unreadable pages. The client side (`Mapper`) turns handles
into one contiguous range. `host.py` is the first; `cuda.py` creates data sections on the device, and
parity sections through the host backend, since parity lives in host memory.

The two kinds of memory differ in one respect that clients see. A host page is replaced *in place*: the
file's page changes under every mapping. A GPU page is replaced by *another handle* (`replaces_handles`):
clients map it anew at the same address, and the first writer to do so fills it with zeros. Where a handle
holds several pages, the others are copied: they keep their contents and lose their physical place.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from enum import StrEnum

from leto_rmp.errors import ConfigError
from leto_rmp.layout import SectionLayout
from leto_rmp.localize import find_lost
from leto_rmp.mapping import SharedRange

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
    replaces_handles = False
    """Whether a page that is lost or healed gets another handle, undefined until a writer has zeroed it."""

    @property
    @abstractmethod
    def handle_count(self) -> int:
        """How many handles there are; sizes are `layout.handle_pages`. 0 once the section is closed."""

    @abstractmethod
    def export(self, first: int, count: int) -> Sequence[Handle | None]:
        """Return at most `count` handles from `first` on; None for a page that is lost and has none."""

    def lost(self, region_pages: int) -> list[int]:
        """Return the pages that cannot be read, as far as this process can tell, in order."""
        return find_lost(self.layout.pages, self.probe, region_pages)

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
    def heal(self, index: int, unreadable: frozenset[int] = frozenset()) -> None:
        """Replace the page by a fresh zero page at the same address in every process.

        `unreadable`: other pages of the section that are lost too, whoever found that. Raises
        LocalizationFailed, with nothing replaced, when another page of the same handle cannot be read.
        """

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
    device_uuid = ""
    """The GPU that holds data pages; empty on the host backend."""
    device_name = ""
    clients_pin = False
    """Whether writers pin host pages: then these may not be replaced behind a living writer's back."""

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Group operations, so that a helper process that they need is started once."""
        yield

    def read_through(self, sections: Sequence[Section]) -> list[tuple[Section, int]]:
        """Return (section, page) of what only reading shows to be bad: in processes that may die of it."""
        return []

    @abstractmethod
    def create(self, layout: SectionLayout) -> Section:
        """Allocate all pages of a section up front, zeroed, or nothing at all.

        Raises NotEnoughMemory or LimitTooLow.
        """

    @abstractmethod
    def check_room(self, layouts: Sequence[SectionLayout]) -> None:
        """Raise NotEnoughMemory or LimitTooLow when these sections cannot be created together."""

    def exported_handles(self) -> int:
        """Return how many file descriptors of handles are kept open."""
        return 0

    @abstractmethod
    def simulated_pages(self) -> int:
        """Return how many pages are unreadable only by declaration."""

    @abstractmethod
    def close(self) -> None:
        """Release what the backend itself holds."""


class Mapper(ABC):
    """The client's half: map received handles."""

    @abstractmethod
    def reserve(self, layout: SectionLayout, writable: bool) -> SharedRange:
        """Return an empty range that takes the section's handles through `place`, in order."""


def _unknown(name: str) -> ConfigError:
    return ConfigError(f"no backend is called {name!r}; there are: 'host', 'cuda'")


def open_backend(name: str, poison: str = "auto", device: int = 0) -> Backend:
    """Return the manager's half of the backend called `name`. Raises CudaUnavailable."""
    if name == "host":
        from leto_rmp.host import HostBackend

        return HostBackend(poison)
    if name == "cuda":
        from leto_rmp.cuda import CudaBackend

        return CudaBackend(poison, device)
    raise _unknown(name)


def open_mapper(name: str, device_uuid: str = "") -> Mapper:
    """Return the client's half of the backend called `name`; the driver is opened when it is needed."""
    if name == "host":
        from leto_rmp.host import HostMapper

        return HostMapper()
    if name == "cuda":
        from leto_rmp.device import CudaMapper

        return CudaMapper(device_uuid)
    raise _unknown(name)
