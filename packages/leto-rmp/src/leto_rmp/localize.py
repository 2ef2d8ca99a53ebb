"""Find unreadable pages by reading regions and bisecting those that fail (paper section 4.2).

A healthy pool costs one probe per region; one lost page costs log2(region) more (`find_lost`). Where
every failure kills the process that read (contained ECC errors of a GPU), a failed region is read page by
page by the next process instead: a restart costs a thousand times a read, so a bad page costs two processes
whatever the region is (`find_unreadable`). Pure: probes and readers are the backend's.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Protocol

from leto_rmp.errors import LocalizationFailed

__all__ = ["Reader", "find_lost", "find_unreadable"]


class Reader(Protocol):
    """A process that may die of what it reads."""

    def read(self, first: int, count: int) -> bool:
        """Return whether all of these pages were read; after False this reader is of no more use."""
        ...


def find_lost(pages: int, probe: Callable[[int, int], bool], region_pages: int) -> list[int]:
    """Return the indices of the unreadable pages among 0 .. pages - 1, in order.

    `probe(first, count)` tells whether all of these pages are readable.
    """
    assert region_pages > 0, "a region has at least one page"
    lost: list[int] = []
    # A stack instead of recursion; the right half is pushed first so that the order is kept.
    pending = [(first, min(region_pages, pages - first)) for first in reversed(range(0, pages, region_pages))]
    while pending:
        first, count = pending.pop()
        if probe(first, count):
            continue
        if count == 1:
            lost.append(first)
            continue
        half = count // 2
        pending.append((first + half, count - half))
        pending.append((first, half))
    return lost


def find_unreadable(
    pages: int,
    open_reader: Callable[[], AbstractContextManager[Reader]],
    region_pages: int,
    readers_max: int = 64,
) -> list[int]:
    """Return the indices that no reader survives, in order.

    Raises LocalizationFailed when `readers_max` readers were used up: so much is not lost page by page.
    """
    assert region_pages > 0, "a region has at least one page"
    lost: list[int] = []
    pending = [(first, min(region_pages, pages - first)) for first in reversed(range(0, pages, region_pages))]
    readers = 0
    while pending:
        if readers == readers_max:
            raise LocalizationFailed(
                f"{readers_max} readers died and {sum(count for _, count in pending)} of {pages} pages are "
                "still unread: the device is not usable, treat the failure as fatal",
                readers=readers_max,
            )
        readers += 1
        with open_reader() as reader:
            while pending:
                first, count = pending.pop()
                if reader.read(first, count):
                    continue
                if count == 1:
                    lost.append(first)
                else:
                    pending += [(index, 1) for index in reversed(range(first, first + count))]
                break
    return lost
