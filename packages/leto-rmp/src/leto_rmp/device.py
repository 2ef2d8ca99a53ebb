"""The client's half of the cuda backend: retained GPU pages under one range of addresses.

Every handle, of one page or several, is imported from a descriptor, mapped and let go (the mapping holds
the memory), and access is set once over the whole range, which is where the time goes. A range is mapped
readable *and writable* from the start, so that an observer becomes the writer without touching it (the
takeover maps nothing); unlike on the host, the MMU does not stop an observer from writing. `release` and
`close` of a writer do make its range read-only, or unmap it where the driver knows no read-only pages.

A range lives until the last view of it is gone; then the context is drained, and pages are unmapped
before their addresses are given back. The pages of a lost handle are *holes* until its replacement is mapped.
"""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Iterator
from typing import Any

from leto_rmp.backend import Mapper
from leto_rmp.driver import Device, Driver, open_driver
from leto_rmp.errors import CudaError
from leto_rmp.host import HostMapper
from leto_rmp.layout import SectionLayout
from leto_rmp.mapping import SharedRange

__all__ = ["CudaMapper", "DeviceArray", "DeviceRange", "runs_of"]

_log = logging.getLogger("leto_rmp")


def runs_of(flags: bytearray, first: int = 0, count: int | None = None) -> Iterator[tuple[int, int]]:
    """Yield (first, count) of each run of set flags."""
    end = len(flags) if count is None else first + count
    while (start := flags.find(1, first, end)) >= 0:
        stop = flags.find(0, start, end)
        first = end if stop < 0 else stop
        yield start, first - start


class _Pages:
    """What the finalizer needs; it may not refer to the range."""

    def __init__(self, driver: Driver, device: Device, layout: SectionLayout) -> None:
        self.driver = driver
        self.device = device
        self.layout = layout
        self.page_bytes = layout.page_bytes
        self.length = layout.nbytes
        self.address = driver.reserve(self.length)
        self.mapped = bytearray(layout.pages)  # whole handles, always
        self.read_only = False

    def where(self, index: int) -> int:
        return self.address + index * self.page_bytes

    def unmap(self, first: int, count: int) -> None:
        """Unmap a run of mapped handles, in one call where the driver takes several mappings at once."""
        size, layout = self.page_bytes, self.layout
        handles = range(layout.handle_of(first), layout.handle_of(first + count - 1) + 1)
        try:
            self.driver.unmap(self.where(first), count * size)
        except CudaError:
            if len(handles) == 1:
                raise
            for pages in map(layout.pages_of, handles):
                self.driver.unmap(self.where(pages.start), len(pages) * size)
        self.mapped[first : first + count] = bytes(count)

    def drain(self) -> None:
        """Wait for all work of this process on the device: it may use these pages."""
        self.driver.drain(self.device.ordinal)


def _give_back(pages: _Pages, pid: int) -> None:
    if os.getpid() != pid:
        return  # CUDA is not inherited by forked children
    try:
        pages.drain()
    except CudaError as error:
        # The context is dead (an earlier fault), and with it all work that could use the pages.
        _log.warning("retained pages are unmapped although their context failed: %s", error)
    try:
        for first, count in list(runs_of(pages.mapped)):
            pages.unmap(first, count)
        pages.driver.free_addresses(pages.address, pages.length)
    except CudaError as error:
        _log.warning("retained pages stay mapped until this process ends: %s", error)


class DeviceRange(SharedRange):
    """Pages of one section on the device."""

    def __init__(self, driver: Driver, device: Device, layout: SectionLayout, writable: bool) -> None:
        self._pages = _Pages(driver, device, layout)
        self.device = device
        self.page_bytes = layout.page_bytes
        self.address = self._pages.address
        self.length = layout.nbytes
        self.writable = writable
        self._placed = 0
        self._finalizer = weakref.finalize(self, _give_back, self._pages, os.getpid())
        self._finalizer.atexit = False  # the process ends anyway, and the driver may be gone already

    @property
    def page_count(self) -> int:
        """How many pages the range has, mapped or not."""
        return len(self._pages.mapped)

    @property
    def layout(self) -> SectionLayout:
        """Sizes of the section and of its handles."""
        return self._pages.layout

    def _next(self, length: int) -> range:
        """Return the pages of the handle that is placed or skipped next."""
        found = self._pages.layout.pages_of(self._placed)
        assert length == len(found) * self.page_bytes, "the handles of a section come in order"
        self._placed += 1
        return found

    def place(self, fd: int, length: int) -> None:
        pages, found = self._pages, self._next(length)
        pages.driver.map_fd(pages.where(found.start), length, fd)
        pages.mapped[found.start : found.stop] = b"\1" * len(found)

    def skip(self, length: int) -> None:
        self._next(length)

    def finish(self) -> None:
        assert self._placed == len(self._pages.layout.handle_pages), "every handle was placed or skipped"
        for first, count in runs_of(self._pages.mapped):
            self._set_access(first, count, True)

    def _set_access(self, first: int, count: int, writable: bool) -> None:
        pages = self._pages
        pages.driver.set_access(pages.device.ordinal, pages.where(first), count * pages.page_bytes, writable)

    def holes(self) -> list[int]:
        """Return the pages that have nothing mapped: those of whole handles."""
        return [index for index, mapped in enumerate(self._pages.mapped) if not mapped]

    def replace(self, number: int, fd: int | None) -> None:
        """Map another handle (None: nothing) at the old one's address. Nothing uses its pages now."""
        pages, found = self._pages, self._pages.layout.pages_of(number)
        first, count = found.start, len(found)
        if pages.mapped[first]:
            pages.unmap(first, count)
        if fd is not None:
            pages.driver.map_fd(pages.where(first), count * pages.page_bytes, fd)
            pages.mapped[first : first + count] = b"\1" * count
            self._set_access(first, count, not pages.read_only)

    def zero(self, first: int, count: int) -> bool:
        """Fill pages with zeros and wait; return False when one of them is not mapped."""
        pages = self._pages
        if list(runs_of(pages.mapped, first, count)) != [(first, count)]:
            return False
        with pages.driver.context(pages.device.ordinal):
            pages.driver.zero(pages.where(first), count * pages.page_bytes)
            pages.driver.synchronize()
        return True

    def protect(self, writable: bool) -> None:
        pages = self._pages
        if writable and pages.read_only:
            for first, count in runs_of(pages.mapped):
                self._set_access(first, count, True)
            pages.read_only = False
        elif not writable and self.writable:
            self._make_read_only()
        self.writable = writable

    def seal(self) -> None:
        """Read-only is what every driver has; an observer's pages, which it could write, as well."""
        self._make_read_only()
        self.writable = False

    def _make_read_only(self) -> None:
        """No write of this process may come after this, whatever views it holds (I-4)."""
        pages = self._pages
        pages.drain()
        for first, count in list(runs_of(pages.mapped)):
            try:
                self._set_access(first, count, False)
                pages.read_only = True
            except CudaError:
                pages.unmap(first, count)  # holes, which the next `refresh` fills

    def unmapped(self) -> list[int]:
        """Return the pages that we mapped and that the driver does not know. It is asked once a handle."""
        pages = self._pages
        with pages.driver.context(pages.device.ordinal):
            return [
                page
                for found in map(pages.layout.pages_of, range(len(pages.layout.handle_pages)))
                if pages.mapped[found.start] and not pages.driver.is_mapped(pages.where(found.start))
                for page in found
            ]

    def read(self, offset: int, nbytes: int) -> bytes:
        """Copy bytes to the host (tools and tests; trainers use tensors)."""
        with self._pages.driver.context(self.device.ordinal):
            return self._pages.driver.read(self.address + offset, nbytes)

    def write(self, offset: int, data: bytes) -> None:
        """Copy bytes from the host, and wait."""
        with self._pages.driver.context(self.device.ordinal):
            self._pages.driver.write(self.address + offset, data)


class DeviceArray:
    """uint8 device memory for torch, CuPy and other readers of `__cuda_array_interface__`, without a copy.

    Keeps its range alive. `read` and `write` copy through the host, for tools without a GPU library.
    """

    def __init__(self, mapped: DeviceRange, shape: tuple[int, ...]) -> None:
        self._range = mapped
        self.shape = shape
        self.address = mapped.address
        self.nbytes = mapped.length

    def __len__(self) -> int:
        return self.shape[0]

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Describe the memory (version 3). torch refuses read-only arrays: the flag always says writable."""
        return {
            "version": 3,
            "shape": self.shape,
            "typestr": "|u1",
            "data": (self.address, False),
            "strides": None,
        }

    def read(self, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Return a copy of `nbytes` bytes (None: all that follow) from byte `offset` on."""
        return self._range.read(offset, self.nbytes - offset if nbytes is None else nbytes)

    def write(self, offset: int, data: bytes) -> None:
        """Copy `data` to byte `offset` and wait for it."""
        self._range.write(offset, data)


class CudaMapper(Mapper):
    """Maps device pages, and memfds as the host backend does."""

    def __init__(self, device_uuid: str) -> None:
        self._host = HostMapper()
        self._device_uuid = device_uuid
        self._device: Device | None = None

    @property
    def device(self) -> Device:
        """The pool's device as this process knows it; opens the driver. Raises CudaUnavailable."""
        if self._device is None:
            self._device = open_driver().find(self._device_uuid)
        return self._device

    def reserve(self, layout: SectionLayout, writable: bool) -> SharedRange:
        if layout.placement == "host":
            return self._host.reserve(layout, writable)
        return DeviceRange(open_driver(), self.device, layout, writable)
