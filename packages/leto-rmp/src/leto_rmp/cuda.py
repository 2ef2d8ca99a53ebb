"""CUDA backend, the manager's half: GPU pages without a CUDA context (paper section 4.2).

Data pages are physical memory, created and exported here, mapped by trainers only: several pages a handle, or
one (`PoolConfig.gpu_pages_per_handle`; a section's last handle holds what is left). The driver can neither
unmap nor replace a part of a handle, and takes as long for a small one as for a large one. So a lost page
takes its handle along, and the other pages in it are copied to the fresh one, before any writer is there: to
the clients they have only moved. Parity pages, and allocations placed on the host, are memfds of the host
backend.

A handle is kept as a file descriptor, exported once when it is made: to export takes 0.1 ms, too long
to do for thousands of them at a takeover. Where RLIMIT_NOFILE has no room for that, the driver's handles
are kept instead and descriptors are made when they are asked for: slower to attach, nothing refused.

What needs a context (reading pages, copying them, overwriting them for fault injection) is an errand of a
helper process.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from leto_rmp.backend import Backend, Handle, PoisonMethod, Section
from leto_rmp.device import runs_of
from leto_rmp.driver import UNREADABLE, Device, Driver, open_driver
from leto_rmp.errors import ConfigError, CudaError, LocalizationFailed, NotEnoughMemory
from leto_rmp.gpu_memory import free_bytes
from leto_rmp.host import HostBackend
from leto_rmp.layout import SectionLayout
from leto_rmp.limits import fd_room
from leto_rmp.localize import Reader, find_unreadable
from leto_rmp.prober import Helper
from leto_rmp.protocol import FDS_PER_MESSAGE_MAX

__all__ = ["CudaBackend", "CudaSection"]

_FD_SLACK = 512  # connections, batches in flight, a helper, and what Python opens for itself
_BATCH_SLACK = 16
_ERRAND_PAGES = 4096  # addresses of an errand that copies or overwrites pages; more need another helper
_READ_BYTES = 256 << 20
_log = logging.getLogger("leto_rmp")


class SharedPages(Handle):
    """A descriptor that keeps pages alive; closed with its last reference."""

    def __init__(self, fd: int) -> None:
        self._fd = fd

    def fileno(self) -> int:
        return self._fd

    def share(self) -> Handle:
        """Return something to send."""
        return self

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class LocalPages:
    """A driver's handle that keeps pages alive; descriptors are made on demand."""

    def __init__(self, driver: Driver, handle: int) -> None:
        self._driver = driver
        self._handle = handle

    def share(self) -> Handle:
        """Return something to send."""
        return SharedPages(self._driver.export(self._handle))

    def __del__(self) -> None:
        self._driver.release(self._handle)


class CudaSection(Section):
    """Data pages on the device."""

    replaces_handles = True

    def __init__(self, backend: CudaBackend, layout: SectionLayout, keep_fds: bool) -> None:
        self.layout = layout
        self._backend = backend
        self._keep_fds = keep_fds
        self._handles: list[SharedPages | LocalPages | None] = []
        self._gone: set[int] = set()  # lost pages; a handle that holds one is not exported
        try:
            for pages in layout.handle_pages:
                self._handles.append(self._new(pages))
        except BaseException:
            self.close()  # all or nothing, and at once: an error's traceback would hold them
            raise

    def _new(self, pages: int) -> SharedPages | LocalPages:
        driver = self._backend.driver
        handle = driver.create(self._backend.device.ordinal, pages * self.layout.page_bytes)
        if not self._keep_fds:
            return LocalPages(driver, handle)
        try:
            return SharedPages(driver.export(handle))
        finally:
            driver.release(handle)  # the descriptor holds the memory from here on

    @property
    def handle_count(self) -> int:
        return len(self._handles)

    @property
    def kept_fds(self) -> int:
        """How many descriptors are kept open."""
        return sum(isinstance(handle, SharedPages) for handle in self._handles)

    def export(self, first: int, count: int) -> Sequence[Handle | None]:
        if not self._keep_fds:  # each costs a descriptor until it is sent: fewer at a time, then
            count = max(1, min(count, fd_room(count + _BATCH_SLACK) - _BATCH_SLACK))
        broken = {self.layout.handle_of(page) for page in self._gone}
        return [
            None if handle is None or number in broken else handle.share()
            for number, handle in enumerate(self._handles[first : first + count], first)
        ]

    def held(self) -> list[int]:
        """Return the handles that are there, although pages of them may be lost."""
        return [number for number, handle in enumerate(self._handles) if handle is not None]

    def held_handle(self, number: int) -> Handle:
        """Return one of them."""
        handle = self._handles[number]
        assert handle is not None, "a handle is given up with its last page"
        return handle.share()

    def probe(self, first: int, count: int) -> bool:
        return not any(first <= page < first + count for page in self._gone)

    def lose(self, index: int, noise: bytes) -> PoisonMethod:
        assert len(noise) == self.layout.page_bytes, "noise fills exactly one page"
        if index not in self._gone:
            with self._page_in_helper(index) as (helper, number):
                helper.write(number, noise)
            self._gone.add(index)
            where = self.layout.handle_of(index)
            if self._gone.issuperset(self.layout.pages_of(where)):
                self._handles[where] = None
        return PoisonMethod.UNMAPPED

    def poison(self, index: int, noise: bytes) -> PoisonMethod:
        # There is no way to poison GPU memory from here: the page is lost instead, and the answer says so.
        return self.lose(index, noise)

    def heal(self, index: int, unreadable: frozenset[int] = frozenset()) -> None:
        where = self.layout.handle_of(index)
        pages = self.layout.pages_of(where)
        gone = self._gone.union(unreadable).intersection(pages) | {index}
        fresh = self._new(len(pages))
        if len(gone) < len(pages):
            self._copy_rest(where, fresh, gone)
        self._handles[where] = fresh
        self._gone |= gone
        self._gone.discard(index)

    def _copy_rest(self, where: int, fresh: SharedPages | LocalPages, gone: set[int]) -> None:
        """Copy a page's neighbours, in a process that may die of it; nobody writes them meanwhile."""
        pages, backend = self.layout.pages_of(where), self._backend
        size = len(pages)
        name = f"{self.layout.allocation}[{pages.start} to {pages.stop - 1}]"
        try:
            with backend.errand(self.layout.page_bytes, 2 * size) as helper:
                source = backend.load(helper, self.held_handle(where), size, name)
                target = backend.load(helper, fresh.share(), size, name)
                for first, count in runs_of(bytearray(page not in gone for page in pages)):
                    helper.copy(source + first, target + first, count)
        except CudaError as error:
            if error.details.get("code") not in UNREADABLE:
                raise
            raise LocalizationFailed(
                f"another page of {name} cannot be read ({error.message}), so nothing was replaced: "
                "localize(read=True) tells which",
                allocation=self.layout.allocation,
            ) from error

    def flip(self, index: int, offset: int, mask: bytes) -> None:
        if index in self._gone:
            raise ConfigError(
                f"page {index} of {self.layout.allocation} is lost: remap it before its bytes are flipped"
            )
        with self._page_in_helper(index) as (helper, number):
            helper.flip(number, offset, mask)

    @contextmanager
    def _page_in_helper(self, index: int) -> Iterator[tuple[Helper, int]]:
        """Give a helper that has the page mapped, and the page's number there."""
        where = self.layout.handle_of(index)
        pages, backend = self.layout.pages_of(where), self._backend
        with backend.errand(self.layout.page_bytes, len(pages)) as helper:
            name = f"{self.layout.allocation}[{index}]"
            first = backend.load(helper, self.held_handle(where), len(pages), name)
            yield helper, first + index - pages.start

    def close(self) -> None:
        self._handles = []
        self._gone = set()


class _Around:
    """A reader that leaves out the pages that are known to be bad."""

    def __init__(self, helper: Helper, bad: set[int]) -> None:
        self._helper = helper
        self._bad = bad

    def read(self, first: int, count: int) -> bool:
        good = bytearray(index not in self._bad for index in range(first, first + count))
        return all(self._helper.read(first + start, length) for start, length in runs_of(good))


class CudaBackend(Backend):
    """Pages of one GPU, and memfds. `poison` concerns the memfds, as in the host backend."""

    clients_pin = True

    def __init__(self, poison: str = "auto", device: int = 0) -> None:
        self.driver = open_driver()
        self.device: Device = self.driver.device(device)
        self.device_uuid, self.device_name = self.device.uuid, self.device.name
        self._host = HostBackend(poison)
        self.poison_method = self._host.poison_method
        self.poison_reason = self._host.poison_reason
        self.localization = f"handles and reader, {self._host.localization}"
        self._sections: list[CudaSection] = []
        self._helper: Helper | None = None
        self._batches = 0

    def create(self, layout: SectionLayout) -> Section:
        if layout.placement == "host":
            return self._host.create(layout)
        unit = self.driver.granularity(self.device.ordinal)
        if layout.page_bytes % unit:
            raise ConfigError(
                f"page_bytes must be a multiple of {unit} on {self.device.name}, found {layout.page_bytes}"
            )
        handles = len(layout.handle_pages)
        keep_fds = fd_room(handles + _FD_SLACK) >= handles + _FD_SLACK
        if not keep_fds:
            _log.warning(
                "RLIMIT_NOFILE leaves no room for %d descriptors: the pages of %s are exported on demand: "
                "attaching is slower. Raise the hard limit (ulimit -Hn, LimitNOFILE=, --ulimit nofile=)",
                handles,
                layout.allocation,
            )
        section = CudaSection(self, layout, keep_fds)
        self._sections = [old for old in self._sections if old.handle_count] + [section]
        return section

    def check_room(self, layouts: Sequence[SectionLayout]) -> None:
        self._host.check_room([layout for layout in layouts if layout.placement == "host"])
        need = sum(layout.nbytes for layout in layouts if layout.placement == "device")
        free = free_bytes(self.device.uuid) if need else None
        if free is not None and need > free:
            raise NotEnoughMemory(
                f"{need} bytes of GPU memory were asked for, {free} are free on {self.device.name} "
                f"({self.device.uuid}). End what else runs there, or make the pool smaller",
                need=need,
                have=free,
                source="NVML",
            )

    # -- errands -------------------------------------------------------------------------------

    @contextmanager
    def batch(self) -> Iterator[None]:
        self._batches += 1
        try:
            yield
        finally:
            self._batches -= 1
            if not self._batches:
                self._end_helper()

    def _end_helper(self) -> None:
        if self._helper is not None:
            helper, self._helper = self._helper, None
            helper.close()

    @contextmanager
    def errand(self, page_bytes: int, pages: int) -> Iterator[Helper]:
        """Give a helper with room for so many pages more: the batch's, or one for this errand alone."""
        with self.batch():
            if self._helper is not None and self._helper.loaded + pages > self._helper.pages_max:
                self._end_helper()
            if self._helper is None:
                self._helper = Helper(self.device.uuid, _ERRAND_PAGES, page_bytes)
            try:
                yield self._helper
            except BaseException:
                self._end_helper()  # whatever state it is in
                raise

    def load(self, helper: Helper, handle: Handle, pages: int, name: str) -> int:
        """Map one handle in the helper; return the number of its first page there."""
        number = helper.loaded
        if helper.load([handle], pages):
            raise LocalizationFailed(f"the driver refuses to map page {name} in another process")
        return number

    def read_through(self, sections: Sequence[Section]) -> list[tuple[Section, int]]:
        """Have every device page queried and read by processes that may die of it."""
        held = [
            (section, number)
            for section in sections
            if isinstance(section, CudaSection)
            for number in section.held()
        ]
        if not held:
            return []
        where = [(section, page) for section, number in held for page in section.layout.pages_of(number)]
        page_bytes = where[0][0].layout.page_bytes
        known = {number for number, (section, page) in enumerate(where) if not section.probe(page, 1)}
        bad = set(known)

        @contextmanager
        def open_reader() -> Iterator[Reader]:
            with Helper(self.device.uuid, len(where), page_bytes) as helper:
                self._load_all(helper, held, bad)
                yield _Around(helper, bad)

        unread = find_unreadable(len(where), open_reader, max(1, _READ_BYTES // page_bytes))
        return [where[number] for number in sorted(bad.union(unread) - known)]

    def _load_all(self, helper: Helper, held: Sequence[tuple[CudaSection, int]], bad: set[int]) -> None:
        """Map all handles, in order; note pages that cannot be mapped, or that the driver does not know."""
        sizes = [len(section.layout.pages_of(number)) for section, number in held]
        start = 0
        while start < len(held):
            # handles of one size, and no more descriptors open at a time than a message takes
            stop = start + 1
            while stop < min(len(held), start + FDS_PER_MESSAGE_MAX) and sizes[stop] == sizes[start]:
                stop += 1
            handles = [section.held_handle(number) for section, number in held[start:stop]]
            bad.update(helper.load(handles, sizes[start]))
            start = stop
        bad.update(helper.query())

    # -- the rest ------------------------------------------------------------------------------

    def exported_handles(self) -> int:
        return sum(section.kept_fds for section in self._sections)

    def simulated_pages(self) -> int:
        return self._host.simulated_pages()

    def close(self) -> None:
        self._end_helper()
        for section in self._sections:
            section.close()
        self._sections = []
        self._host.close()
