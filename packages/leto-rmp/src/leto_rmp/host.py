"""Host backend: pages in memfds, the embedded default; also holds all parity pages.

Contents are written and flipped through the file descriptor, never through the manager's mapping,
so an unreadable page cannot kill the manager. The mapping exists to be probed and poisoned only, and
is emptied after a clean probe: it costs addresses, not memory.
"""

from __future__ import annotations

import errno
import os
import resource
from collections.abc import Sequence

from leto_rmp import linux
from leto_rmp.backend import Backend, Handle, Mapper, PoisonMethod, Section
from leto_rmp.errors import ConfigError, LimitTooLow, LocalizationFailed, NotEnoughMemory
from leto_rmp.layout import SectionLayout
from leto_rmp.limits import check_map_count, require_fds
from leto_rmp.mapping import MappedRange
from leto_rmp.memory import available, require_memory
from leto_rmp.uffd import Poisoner, PoisonUnavailable

__all__ = ["HostBackend", "HostMapper", "HostSection"]

_FD_SLACK = 32  # connections, pidfds and what Python opens for itself


class MemfdHandle(Handle):
    """A memfd of `length` bytes, allocated up front; closed when the last reference goes."""

    def __init__(self, name: str, length: int) -> None:
        self._fd = -1
        try:
            self._fd = linux.memfd(name, length)
            os.posix_fallocate(self._fd, 0, length)
        except OSError as error:
            if error.errno in (errno.ENOMEM, errno.ENOSPC):
                raise NotEnoughMemory(
                    f"the kernel could not allocate {length} bytes for {name}: {error.strerror}", need=length
                ) from error
            if error.errno in (errno.EMFILE, errno.ENFILE):
                raise LimitTooLow(
                    f"no file descriptor for {name}: {error.strerror}", limit="RLIMIT_NOFILE"
                ) from error
            if error.errno == errno.EFBIG:
                have = resource.getrlimit(resource.RLIMIT_FSIZE)[0]
                raise LimitTooLow(
                    f"{name} needs {length} bytes in one memfd, which counts as a file: RLIMIT_FSIZE is "
                    f"{have}. Raise it (`ulimit -f unlimited`)",
                    limit="RLIMIT_FSIZE",
                    need=length,
                    have=have,
                ) from error
            raise

    def fileno(self) -> int:
        return self._fd

    def __del__(self) -> None:
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1


class HostSection(Section):
    """One section in one or more memfds."""

    def __init__(self, layout: SectionLayout, poisoner: Poisoner | None, can_probe: bool) -> None:
        self.layout = layout
        self._poisoner = poisoner
        self._can_probe = can_probe
        self._declared: set[int] = set()
        name = f"leto:{layout.allocation}:{layout.section}"
        size = layout.page_bytes
        self._handles = [MemfdHandle(f"{name}:{i}", n * size) for i, n in enumerate(layout.handle_pages)]
        self._range: MappedRange | None = MappedRange(layout.nbytes, writable=True)
        for handle, pages in zip(self._handles, layout.handle_pages, strict=True):
            self._range.place(handle.fileno(), pages * size)

    @property
    def handle_count(self) -> int:
        return len(self._handles)

    def export(self, first: int, count: int) -> Sequence[Handle]:
        return self._handles[first : first + count]

    @property
    def declared_pages(self) -> int:
        """How many pages are unreadable by declaration only."""
        return len(self._declared)

    def _address(self, first: int, count: int = 1) -> int:
        assert self._range is not None, "the section is closed"
        assert 0 <= first < first + count <= self.layout.pages, "pages outside the section"
        return self._range.address + first * self.layout.page_bytes

    def _where(self, index: int) -> tuple[int, int]:
        """Return (fd, offset in bytes) of a page."""
        assert 0 <= index < self.layout.pages, "page outside the section"
        which = self.layout.handle_of(index)
        inside = index - self.layout.pages_of(which).start
        return self._handles[which].fileno(), inside * self.layout.page_bytes

    def probe(self, first: int, count: int) -> bool:
        if any(first <= index < first + count for index in self._declared):
            return False
        if not self._can_probe:
            return True
        address, length = self._address(first, count), count * self.layout.page_bytes
        try:
            linux.madvise(address, length, linux.MADV_POPULATE_READ)
        except OSError as error:
            if error.errno == linux.EHWPOISON:
                return False
            raise LocalizationFailed(
                f"pages {first} to {first + count - 1} of {self.layout.allocation}/{self.layout.section} "
                f"could not be probed: {error.strerror}. Expected success or EHWPOISON"
            ) from error
        linux.madvise(address, length, linux.MADV_DONTNEED)  # only our page table entries, not the pages
        return True

    def lose(self, index: int, noise: bytes) -> PoisonMethod:
        # Host memory fails in one way only: a lost page is a poisoned page.
        return self.poison(index, noise)

    def poison(self, index: int, noise: bytes) -> PoisonMethod:
        assert len(noise) == self.layout.page_bytes, "noise fills exactly one page"
        fd, offset = self._where(index)
        _pwrite(fd, noise, offset)
        if self._poisoner is not None:
            self._poisoner.poison(self._address(index), self.layout.page_bytes)
            return PoisonMethod.USERFAULTFD
        self._declared.add(index)
        return PoisonMethod.SIMULATED

    def heal(self, index: int, unreadable: frozenset[int] = frozenset()) -> None:
        fd, offset = self._where(index)
        size = self.layout.page_bytes
        linux.madvise(self._address(index), size, linux.MADV_DONTNEED)  # drops the poison marker
        linux.punch_hole(fd, offset, size)
        try:
            os.posix_fallocate(fd, offset, size)
        except OSError as error:
            raise NotEnoughMemory(
                f"no healthy page for {self.layout.allocation}/{self.layout.section}[{index}]: "
                f"{error.strerror}",
                need=size,
            ) from error
        self._declared.discard(index)
        if not self.probe(index, 1):
            raise LocalizationFailed(
                f"page {index} of {self.layout.allocation}/{self.layout.section} is still unreadable after "
                "it was replaced: the memory behind this mapping cannot be trusted, restart the manager"
            )

    def flip(self, index: int, offset: int, mask: bytes) -> None:
        assert 0 <= offset <= self.layout.page_bytes - len(mask), "flip outside the page"
        fd, start = self._where(index)
        old = os.pread(fd, len(mask), start + offset)
        _pwrite(fd, bytes(a ^ b for a, b in zip(old, mask, strict=True)), start + offset)

    def close(self) -> None:
        self._handles = []
        self._range = None
        self._declared.clear()


def _pwrite(fd: int, data: bytes, offset: int) -> None:
    view = memoryview(data)
    while view:
        done = os.pwrite(fd, view, offset)
        view, offset = view[done:], offset + done


class HostBackend(Backend):
    """Creates memfd sections. `poison`: "auto" (real where the kernel allows it) or "simulated"."""

    def __init__(self, poison: str = "auto") -> None:
        if poison not in ("auto", "simulated"):
            raise ConfigError(f"poison must be 'auto' or 'simulated', found {poison!r}")
        self._sections: list[HostSection] = []
        self._poisoner: Poisoner | None = None
        self._can_probe = _populate_read_works()
        self.localization = "madvise" if self._can_probe else "simulated"
        self.poison_method = PoisonMethod.SIMULATED
        self.poison_reason = "simulation was asked for"
        if poison == "auto":
            self._try_real_poison()

    def _try_real_poison(self) -> None:
        if not self._can_probe:
            self.poison_reason = "MADV_POPULATE_READ needs Linux 5.14 or newer"
            return
        try:
            self._poisoner = Poisoner()
            seen = _poison_is_seen(self._poisoner)
        except (PoisonUnavailable, OSError) as error:
            self._drop_poisoner(str(error))
            return
        if not seen:
            self._drop_poisoner("a poisoned page was not found again by MADV_POPULATE_READ")
            return
        self.poison_method, self.poison_reason = PoisonMethod.USERFAULTFD, ""

    def _drop_poisoner(self, reason: str) -> None:
        if self._poisoner is not None:
            self._poisoner.close()
        self._poisoner, self.poison_reason = None, reason

    def create(self, layout: SectionLayout) -> HostSection:
        section = HostSection(layout, self._poisoner, self._can_probe)
        self._sections = [old for old in self._sections if old.handle_count] + [section]
        return section

    def check_room(self, layouts: Sequence[SectionLayout]) -> None:
        handles = sum(len(layout.handle_pages) for layout in layouts)
        require_fds(handles + _FD_SLACK, f"the state manager (for {handles} handles)")
        check_map_count(handles)
        require_memory(sum(layout.nbytes for layout in layouts), available())

    def simulated_pages(self) -> int:
        return sum(section.declared_pages for section in self._sections)

    def close(self) -> None:
        for section in self._sections:
            section.close()
        self._sections = []
        if self._poisoner is not None:
            self._poisoner.close()
            self._poisoner = None


def _scratch() -> tuple[MemfdHandle, MappedRange]:
    size = os.sysconf("SC_PAGESIZE")
    handle, mapped = MemfdHandle("leto:self-test", size), MappedRange(size, writable=True)
    mapped.place(handle.fileno(), size)
    return handle, mapped


def _populate_read_works() -> bool:
    _handle, mapped = _scratch()
    try:
        linux.madvise(mapped.address, mapped.length, linux.MADV_POPULATE_READ)
    except OSError:
        return False
    return True


def _poison_is_seen(poisoner: Poisoner) -> bool:
    _handle, mapped = _scratch()
    poisoner.poison(mapped.address, mapped.length)
    try:
        linux.madvise(mapped.address, mapped.length, linux.MADV_POPULATE_READ)
    except OSError as error:
        return error.errno == linux.EHWPOISON
    return False


class HostMapper(Mapper):
    """Maps memfds."""

    def reserve(self, layout: SectionLayout, writable: bool) -> MappedRange:
        check_map_count(len(layout.handle_pages))
        return MappedRange(layout.nbytes, writable=writable)
