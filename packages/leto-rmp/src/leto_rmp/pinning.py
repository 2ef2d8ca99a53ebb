"""Pin host pages for the GPU, in pieces, and say what could not be pinned (case 5).

One registration of a very large range may fail where smaller ones succeed, so a range is registered in
pieces. Pieces never cut a group's parity rows in two: a copy that begins in one registration and ends in
another is an error of the driver. What cannot be registered stays pageable, which is slower and just as
right; it is logged once a range, and `PinStatus` has the numbers.

Only the writer pins, when it becomes the writer, and unpins before pages are replaced or given up:
a pinned page that is replaced would leave the GPU with the old one (case 14).
"""

from __future__ import annotations

import logging
import os
import weakref
from contextlib import suppress
from dataclasses import dataclass

from leto_rmp import linux
from leto_rmp.driver import Driver
from leto_rmp.errors import CudaError
from leto_rmp.mapping import MappedRange

__all__ = ["PIECE_BYTES", "Pin", "PinStatus", "pieces"]

PIECE_BYTES = 256 << 20
_log = logging.getLogger("leto_rmp")


@dataclass(frozen=True)
class PinStatus:
    """How much of this client's host memory is pinned; `failures` are the driver's names of its refusals."""

    pinned_bytes: int = 0
    pageable_bytes: int = 0
    failures: tuple[str, ...] = ()

    def __add__(self, other: PinStatus) -> PinStatus:
        return PinStatus(
            self.pinned_bytes + other.pinned_bytes,
            self.pageable_bytes + other.pageable_bytes,
            self.failures + other.failures,
        )


def pieces(length: int, unit_bytes: int, piece_bytes: int) -> list[tuple[int, int]]:
    """Cut `length` bytes into (offset, size) of about `piece_bytes`, never inside a unit."""
    size = max(1, piece_bytes // unit_bytes) * unit_bytes
    return [(offset, min(size, length - offset)) for offset in range(0, length, size)]


def _unpin(driver: Driver, ordinal: int, addresses: list[int], pid: int) -> None:
    if os.getpid() != pid or not addresses:
        return
    try:
        with driver.context(ordinal):
            while addresses:
                refusal = driver.host_unregister(addresses.pop())
                if refusal:
                    _log.warning("a pinned range could not be unregistered: %s", refusal)
    except CudaError as error:
        _log.warning("the context is gone, and its pinned ranges with it: %s", error)


class Pin:
    """The registrations of one range. Undone by `undo`, or just before the range is unmapped."""

    def __init__(
        self, driver: Driver, ordinal: int, mapped: MappedRange, unit_bytes: int, piece_bytes: int
    ) -> None:
        addresses: list[int] = []
        pinned, failures = 0, []
        with driver.context(ordinal):
            for offset, size in pieces(mapped.length, unit_bytes, piece_bytes):
                refusal = _register(driver, mapped.address + offset, size)
                if refusal:
                    failures.append(refusal)
                else:
                    addresses.append(mapped.address + offset)
                    pinned += size
        if failures:
            _log.warning(
                "%d of %d bytes of host memory stay pageable, copies from and to them will be slower: %s. "
                "RLIMIT_MEMLOCK and smaller pieces (pin_piece_bytes) are worth a look",
                mapped.length - pinned,
                mapped.length,
                ", ".join(sorted(set(failures))),
            )
        self.status = PinStatus(pinned, mapped.length - pinned, tuple(failures))
        # Finalizers of one object run latest first: before the one that unmaps the range.
        self._finalizer = weakref.finalize(mapped, _unpin, driver, ordinal, addresses, os.getpid())
        self._finalizer.atexit = False

    def undo(self) -> None:
        """Unregister everything; nothing uses the memory any more."""
        self._finalizer()


def _register(driver: Driver, address: int, size: int) -> str:
    with suppress(OSError):  # older than Linux 5.14, or unreadable: the registration tells
        # Fifteen times faster than letting the registration fault page after page.
        linux.madvise(address, size, linux.MADV_POPULATE_WRITE)
    return driver.host_register(address, size)
