"""Callers' buffers as page addresses: numpy, memoryview, torch and DLPack, never copied.

Everything that can be wrong with a buffer is found here, before any byte is written (I-1: errors leave
buffers untouched). A `PageGroup` is what engines see: one address a page, all pages of one length.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from leto_ec.errors import BufferMismatch
from leto_ec.field import WORD_BYTES

__all__ = ["Addressed", "Bytes", "PageGroup", "address", "collect", "refuse_overlap", "strided", "view"]

Bytes = NDArray[np.uint8]

_char_at: Callable[[Any], ctypes.c_char] = ctypes.c_char.from_buffer

FEW = 64  # pages, of which Python's own lists are faster than arrays


def address(array: NDArray[Any]) -> int:
    """The address of the first byte; `array.ctypes.data` costs six times as much; it serves the rest."""
    flags = array.flags
    if flags.c_contiguous and flags.writeable and array.size:
        return ctypes.addressof(_char_at(array))
    return array.ctypes.data


def strided(first: int, step: int, count: int) -> NDArray[np.int64]:
    """Return `count` addresses, `step` apart."""
    if count <= FEW and step != 0:  # numpy's way costs three times as much for so few
        return np.array(list(range(first, first + step * count, step)), np.int64)
    return np.arange(count, dtype=np.int64) * step + first


class PageGroup:
    """Pages of one length, in logical order: a strided (n, page_bytes) array or a list of 1-D arrays.

    In a list, None is an absent page: it counts as zero and has address 0.
    """

    __slots__ = ("_rows", "addresses", "page_bytes")

    def __init__(
        self,
        rows: Bytes | list[Any] | Callable[[], list[Any]],
        page_bytes: int,
        addresses: NDArray[np.int64] | None = None,
    ) -> None:
        """`rows` may be a function, called when they are asked for, where `addresses` are given."""
        self._rows = rows
        self.page_bytes = page_bytes
        if addresses is not None:
            self.addresses = addresses
        elif isinstance(rows, np.ndarray):
            self.addresses = strided(address(rows), rows.strides[0], len(rows))
        else:
            assert isinstance(rows, list)
            self.addresses = np.array([0 if row is None else address(row) for row in rows], np.int64)

    @property
    def rows(self) -> Bytes | list[Any]:
        """The pages as arrays."""
        if callable(self._rows):
            self._rows = self._rows()
        return self._rows

    @classmethod
    def joined(cls, groups: Sequence[PageGroup], page_bytes: int) -> PageGroup:
        """Return the pages of several groups, one group after the other."""
        if len(groups) == 1:
            return groups[0]
        addresses = np.concatenate([group.addresses for group in groups])
        return cls(lambda: [row for group in groups for row in group.rows], page_bytes, addresses)

    def __len__(self) -> int:
        return len(self.addresses)

    def window(self, start: int, stop: int) -> PageGroup:
        """Return bytes start..stop of every page."""
        if start == 0 and stop == self.page_bytes:
            return self
        if isinstance(self.rows, np.ndarray):
            return PageGroup(self.rows[:, start:stop], stop - start)
        return PageGroup([None if row is None else row[start:stop] for row in self.rows], stop - start)

    def take(self, indices: Sequence[int] | NDArray[np.int64]) -> PageGroup:
        """Return the pages at these indices, in this order."""
        chosen = self.addresses[np.asarray(indices, np.int64)]
        return PageGroup(lambda: [self.rows[index] for index in indices], self.page_bytes, chosen)

    def followed_by_absent(self, count: int) -> PageGroup:
        """Return these pages and `count` absent ones."""
        addresses = np.concatenate([self.addresses, np.zeros(count, np.int64)])
        return PageGroup(lambda: [*self.rows, *([None] * count)], self.page_bytes, addresses)


def view(buffer: Any, what: str) -> Bytes:
    """Return a numpy view of one buffer without copying.

    Raises
    ------
    BufferMismatch
        Not a buffer, not in host memory, or its elements are not uint8.
    """
    array: Any
    try:
        if isinstance(buffer, np.ndarray):
            array = buffer
        elif hasattr(buffer, "data_ptr") and hasattr(
            buffer, "detach"
        ):  # a torch tensor; torch is not imported
            if buffer.device.type != "cpu":
                raise BufferMismatch(
                    f"{what}: a buffer in host memory is expected, found a tensor on {buffer.device}"
                )
            array = buffer.detach().numpy()
        elif hasattr(buffer, "__dlpack__"):
            array = np.from_dlpack(buffer)
        else:
            array = np.asarray(memoryview(buffer))
    except BufferMismatch:
        raise
    except (TypeError, ValueError, BufferError, RuntimeError) as error:
        raise BufferMismatch(
            f"{what}: a numpy array, memoryview, torch CPU tensor or DLPack object is expected, "
            f"found {type(buffer).__name__} ({error})"
        ) from error
    if array.dtype != np.uint8:
        raise BufferMismatch(
            f"{what}: elements of uint8 are expected, found {array.dtype}; pass a uint8 view"
        )
    result: Bytes = array
    return result


def _check_row(array: Bytes, what: str) -> None:
    if array.ndim != 1:
        raise BufferMismatch(f"{what}: a one-dimensional buffer is expected, found shape {array.shape}")
    if array.size > 1 and array.strides[0] != 1:
        raise BufferMismatch(
            f"{what}: the bytes of a page must be contiguous, found stride {array.strides[0]}"
        )


def collect(
    buffers: Any,
    what: str,
    *,
    page_bytes: int | None = None,
    writable: bool = False,
    whole_words: bool = True,
    absent: bool = False,
) -> PageGroup:
    """Return the pages of a (n, page_bytes) buffer or of a sequence of one-dimensional buffers.

    Parameters
    ----------
    page_bytes
        The length that every page must have; None takes the first page's.
    writable
        Refuse read-only buffers.
    whole_words
        Refuse a length that is not a positive multiple of 4 bytes.
    absent
        Allow None in a list of pages, for a page that is zero and has no memory.

    Raises
    ------
    BufferMismatch
    """
    rows: Bytes | list[Any]
    if isinstance(buffers, (list, tuple)):
        rows = [
            None if absent and buffer is None else view(buffer, f"{what}[{index}]")
            for index, buffer in enumerate(buffers)
        ]
        present = [(index, row) for index, row in enumerate(rows) if row is not None]
        if not rows:
            raise BufferMismatch(f"{what}: at least one page is expected, found an empty list")
        if not present:
            raise BufferMismatch(f"{what}: at least one page is expected, found None only")
        for index, row in present:
            _check_row(row, f"{what}[{index}]")
        first, length = present[0][0], present[0][1].size
        for index, row in present:
            if row.size != length:
                raise BufferMismatch(
                    f"{what}: pages of {length} bytes are expected, as page {first} is; "
                    f"page {index} has {row.size}"
                )
        read_only = [index for index, row in present if not row.flags.writeable] if writable else []
    else:
        rows = view(buffers, what)
        if rows.ndim != 2:
            raise BufferMismatch(
                f"{what}: shape (pages, page_bytes) or a list of pages is expected, found shape {rows.shape}"
            )
        count, length = rows.shape
        if count == 0:
            raise BufferMismatch(f"{what}: at least one page is expected, found shape {rows.shape}")
        if length > 1 and rows.strides[1] != 1:
            raise BufferMismatch(
                f"{what}: the bytes of a page must be contiguous, found strides {rows.strides}"
            )
        read_only = [0] if writable and not rows.flags.writeable else []
    if page_bytes is not None and length != page_bytes:
        raise BufferMismatch(f"{what}: pages of {page_bytes} bytes are expected, found {length}")
    if whole_words and (length == 0 or length % WORD_BYTES):
        raise BufferMismatch(
            f"{what}: page_bytes must be a positive multiple of {WORD_BYTES}, found {length}"
        )
    if read_only:
        raise BufferMismatch(
            f"{what}: writable memory is expected, but it is read-only (page {read_only[0]})"
        )
    return PageGroup(rows, length)


class Addressed(Protocol):
    """Pages somewhere, on the host or on a device."""

    addresses: NDArray[np.int64]
    page_bytes: int

    def __len__(self) -> int: ...


def _outside(group: Addressed, low: int, high: int) -> bool:
    """Whether all pages are outside low .. high."""
    size = group.page_bytes
    return all(start == 0 or start >= high or start + size <= low for start in group.addresses.tolist())


def refuse_overlap(outputs: Addressed, what: str, inputs: Sequence[tuple[Addressed, str]] = ()) -> None:
    """Refuse outputs that overlap one another or any input. Inputs may overlap each other.

    Raises
    ------
    BufferMismatch
    """
    length = outputs.page_bytes
    ascending = sorted(outputs.addresses.tolist())
    end = -length
    for start in ascending:
        if start < end:
            raise BufferMismatch(f"{what}: two pages that are to be written overlap in memory")
        end = start + length
    low, high = ascending[0], end
    for group, name in inputs:
        size = group.page_bytes
        if not len(group) or size == 0 or (len(group) <= FEW and _outside(group, low, high)):
            continue
        others = group.addresses[group.addresses != 0]
        if not len(others) or int(others.min()) >= high or int(others.max()) + size <= low:
            continue
        starts = np.array(ascending, np.int64)
        # An input page meets an output page at `start` iff it begins in (start - its length, start + theirs).
        others = np.sort(others)
        first = np.searchsorted(others, starts - size, side="right")
        last = np.searchsorted(others, starts + length, side="left")
        if bool((first < last).any()):
            raise BufferMismatch(f"{what} and {name} overlap in memory: outputs must be separate buffers")
