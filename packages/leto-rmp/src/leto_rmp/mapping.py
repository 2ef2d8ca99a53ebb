"""One contiguous range of addresses over the handles of one section.

Both sides use it: the client to read and write, the host backend to probe. The range lives until
its last reference is gone, numpy views and torch tensors included, so that a view never dangles. It
is not inherited by forked children: after the writer's death nobody else could write through it
(I-4), and a data loader's worker never holds retained memory.
"""

from __future__ import annotations

import errno
import os
import weakref
from abc import ABC, abstractmethod
from typing import Any

from leto_rmp import linux
from leto_rmp.limits import map_count_error

__all__ = ["MappedRange", "SharedRange", "WritableLook"]

_ALIGN_BYTES = 2 << 20  # what transparent huge pages and CUDA's page size want


def _give_back(address: int, length: int, pid: int) -> None:
    # In a forked child the range was never mapped; the addresses may be somebody else's by now.
    if os.getpid() == pid:
        linux.unmap(address, length)


class SharedRange(ABC):
    """Addresses that take the handles of one section, in order; usable after `finish`."""

    address: int
    length: int
    writable: bool
    """Whether this process may write now."""

    @abstractmethod
    def place(self, fd: int, length: int) -> None:
        """Map the next handle; the caller may close `fd` afterwards."""

    @abstractmethod
    def skip(self, length: int) -> None:
        """Leave a hole for a page that is lost and has no handle now."""

    @abstractmethod
    def finish(self) -> None:
        """All handles were placed or skipped: make the range usable."""

    @abstractmethod
    def protect(self, writable: bool) -> None:
        """Make the whole range writable or read-only, in place; existing views follow."""

    @abstractmethod
    def seal(self) -> None:
        """Take all access away that can be taken: what is left of its views is of the past."""


class MappedRange(SharedRange):
    """Reserve `length` bytes; `place` fills them with handles; then the range is usable."""

    def __init__(self, length: int, *, writable: bool) -> None:
        align = _ALIGN_BYTES if length >= _ALIGN_BYTES else 0
        self.length = length
        self.writable = writable
        self._placed = 0
        base = linux.reserve(length + align)
        self.address = -(-base // align) * align if align else base
        self.unmap = weakref.finalize(self, _give_back, base, length + align, os.getpid())
        self.unmap.atexit = False  # other threads may still write at exit

    def place(self, fd: int, length: int) -> None:
        assert self._placed + length <= self.length, "more handles than the section has"
        try:
            linux.map_fixed(self.address + self._placed, length, fd, self.writable)
            linux.madvise(self.address + self._placed, length, linux.MADV_DONTFORK)
        except OSError as error:
            if error.errno == errno.ENOMEM:
                raise map_count_error() from error
            raise
        self._placed += length

    def skip(self, length: int) -> None:
        raise AssertionError("host memory is replaced in place: it always has its handle")

    def finish(self) -> None:
        assert self.complete, "the handles cover the section"

    @property
    def complete(self) -> bool:
        """Whether every byte is mapped."""
        return self._placed == self.length

    def protect(self, writable: bool) -> None:
        assert self.complete, "a range is protected as a whole"
        linux.protect(self.address, self.length, writable)
        self.writable = writable

    def seal(self) -> None:
        linux.forbid(self.address, self.length)
        self.writable = False

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """Let numpy make a view (uint8, flat) that keeps this range alive."""
        return {
            "version": 3,
            "shape": (self.length,),
            "typestr": "|u1",
            "data": (self.address, not self.writable),
        }


class WritableLook:
    """The same bytes for consumers that refuse read-only buffers (torch); the MMU still protects them."""

    def __init__(self, mapped: SharedRange) -> None:
        self._mapped = mapped

    @property
    def __array_interface__(self) -> dict[str, Any]:
        """Let numpy make a view that claims to be writable and keeps the range alive."""
        mapped = self._mapped
        return {"version": 3, "shape": (mapped.length,), "typestr": "|u1", "data": (mapped.address, False)}
