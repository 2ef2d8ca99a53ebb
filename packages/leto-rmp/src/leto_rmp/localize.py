"""Find unreadable pages by reading regions and bisecting those that fail (paper section 4.2).

A healthy pool costs one probe per region; one lost page costs log2(region) more. Pure: the probe is
the backend's.
"""

from __future__ import annotations

from collections.abc import Callable

__all__ = ["find_lost"]


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
