"""CUDA backend, the manager's half: GPU pages without a CUDA context (paper section 4.2).

Every data page is physical memory of its own (the driver can neither unmap nor replace a part of a
handle), created and exported here, mapped by trainers only. Parity pages, and allocations placed on the
host, are memfds of the host backend.

A page is kept as a file descriptor, exported once when the page is made: to export takes 0.1 ms, too long
to do for thousands of pages at a takeover. Where RLIMIT_NOFILE has no room for that, the driver's handles
are kept instead and descriptors are made when they are asked for: slower to attach, nothing refused.

What needs a context (reading pages, overwriting them for fault injection) is an errand of a helper process.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from leto_rmp.backend import Backend, Handle, PoisonMethod, Section
from leto_rmp.device import runs_of
from leto_rmp.driver import Device, Driver, open_driver
from leto_rmp.errors import ConfigError, LocalizationFailed, NotEnoughMemory
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
_ERRAND_PAGES = 4096  # addresses of an errand that overwrites pages; more need another helper
_READ_BYTES = 256 << 20
_log = logging.getLogger("leto_rmp")


class SharedPage(Handle):
    """A descriptor that keeps a page alive; closed with its last reference."""

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


class LocalPage:
    """A driver's handle that keeps a page alive; descriptors are made on demand."""

    def __init__(self, driver: Driver, handle: int) -> None:
        self._driver = driver
        self._handle = handle

    def share(self) -> Handle:
        """Return something to send."""
        return SharedPage(self._driver.export(self._handle))

    def __del__(self) -> None:
        self._driver.release(self._handle)


class CudaSection(Section):
    """Data pages on the device."""

    replaces_handles = True

    def __init__(self, backend: CudaBackend, layout: SectionLayout, keep_fds: bool) -> None:
        self.layout = layout
        self._backend = backend
        self._keep_fds = keep_fds
        self._pages: list[SharedPage | LocalPage | None] = []
        try:
            for _ in range(layout.pages):
                self._pages.append(self._new_page())
        except BaseException:
            self.close()  # all or nothing, and at once: an error's traceback would hold them
            raise

    def _new_page(self) -> SharedPage | LocalPage:
        driver = self._backend.driver
        handle = driver.create(self._backend.device.ordinal, self.layout.page_bytes)
        if not self._keep_fds:
            return LocalPage(driver, handle)
        try:
            return SharedPage(driver.export(handle))
        finally:
            driver.release(handle)  # the descriptor holds the memory from here on

    @property
    def handle_count(self) -> int:
        return len(self._pages)

    @property
    def kept_fds(self) -> int:
        """How many descriptors are kept open."""
        return sum(isinstance(page, SharedPage) for page in self._pages)

    def export(self, first: int, count: int) -> Sequence[Handle | None]:
        if not self._keep_fds:  # each costs a descriptor until it is sent: fewer at a time, then
            count = max(1, min(count, fd_room(count + _BATCH_SLACK) - _BATCH_SLACK))
        return [None if page is None else page.share() for page in self._pages[first : first + count]]

    def probe(self, first: int, count: int) -> bool:
        return all(page is not None for page in self._pages[first : first + count])

    def lose(self, index: int, noise: bytes) -> PoisonMethod:
        assert len(noise) == self.layout.page_bytes, "noise fills exactly one page"
        page = self._pages[index]
        if page is not None:
            with self._backend.errand(self.layout.page_bytes) as helper:
                number = self._backend.load(helper, page.share(), f"{self.layout.allocation}[{index}]")
                helper.write(number, noise)
            self._pages[index] = None
        return PoisonMethod.UNMAPPED

    def poison(self, index: int, noise: bytes) -> PoisonMethod:
        # There is no way to poison GPU memory from here: the page is lost instead, and the answer says so.
        return self.lose(index, noise)

    def heal(self, index: int) -> None:
        self._pages[index] = self._new_page()

    def flip(self, index: int, offset: int, mask: bytes) -> None:
        page = self._pages[index]
        if page is None:
            raise ConfigError(
                f"page {index} of {self.layout.allocation} is lost: remap it before its bytes are flipped"
            )
        with self._backend.errand(self.layout.page_bytes) as helper:
            number = self._backend.load(helper, page.share(), f"{self.layout.allocation}[{index}]")
            helper.flip(number, offset, mask)

    def close(self) -> None:
        self._pages = []


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
        keep_fds = fd_room(layout.pages + _FD_SLACK) >= layout.pages + _FD_SLACK
        if not keep_fds:
            _log.warning(
                "RLIMIT_NOFILE leaves no room for %d descriptors: the pages of %s are exported on demand: "
                "attaching is slower. Raise the hard limit (ulimit -Hn, LimitNOFILE=, --ulimit nofile=)",
                layout.pages,
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
    def errand(self, page_bytes: int) -> Iterator[Helper]:
        """Give a helper with room for one more page: the batch's, or one for this errand alone."""
        with self.batch():
            if self._helper is not None and self._helper.loaded == self._helper.pages_max:
                self._end_helper()
            if self._helper is None:
                self._helper = Helper(self.device.uuid, _ERRAND_PAGES, page_bytes)
            try:
                yield self._helper
            except BaseException:
                self._end_helper()  # whatever state it is in
                raise

    def load(self, helper: Helper, page: Handle, name: str) -> int:
        """Map one page in the helper; return its number there."""
        number = helper.loaded
        if helper.load([page]):
            raise LocalizationFailed(f"the driver refuses to map page {name} in another process")
        return number

    def read_through(self, sections: Sequence[Section]) -> list[tuple[Section, int]]:
        """Have every device page queried and read by processes that may die of it."""
        where = [
            (section, index)
            for section in sections
            if isinstance(section, CudaSection)
            for index in range(section.layout.pages)
            if section.probe(index, 1)
        ]
        if not where:
            return []
        page_bytes = where[0][0].layout.page_bytes
        bad: set[int] = set()

        @contextmanager
        def open_reader() -> Iterator[Reader]:
            with Helper(self.device.uuid, len(where), page_bytes) as helper:
                self._load_all(helper, where, bad)
                yield _Around(helper, bad)

        unread = find_unreadable(len(where), open_reader, max(1, _READ_BYTES // page_bytes))
        return [where[number] for number in sorted(bad.union(unread))]

    def _load_all(self, helper: Helper, where: Sequence[tuple[CudaSection, int]], bad: set[int]) -> None:
        step = FDS_PER_MESSAGE_MAX  # so that no more descriptors than that are open at a time
        for start in range(0, len(where), step):
            handles = [section.export(index, 1)[0] for section, index in where[start : start + step]]
            bad.update(helper.load([handle for handle in handles if handle is not None]))
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
