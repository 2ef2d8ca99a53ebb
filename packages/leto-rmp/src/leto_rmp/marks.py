"""Page marks: which pages must not be trusted, and until when (docs/concepts/marker-protocol.md).

    HEALTHY --found--> LOST --remapped--> REMAPPED --acknowledged--> HEALTHY
                        ^                     |
                        +--------found--------+

A remapped page is readable and *empty*: it stays marked until the writer has reconstructed and
verified it, so that a second crash never trusts an empty page. There is no way from LOST to HEALTHY
but through both steps (I-1, I-6). The table is kept by the manager and survives every trainer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import StrEnum

from leto_rmp.errors import IllegalMark
from leto_rmp.layout import PageRef

__all__ = ["MarkEvent", "MarkTable", "PageMark"]


class PageMark(StrEnum):
    """State of one page."""

    HEALTHY = "healthy"
    LOST = "lost"
    REMAPPED = "remapped"


class MarkEvent(StrEnum):
    """What can happen to a page."""

    FOUND_LOST = "found-lost"
    REMAPPED = "remapped"
    ACKNOWLEDGED = "acknowledged"


TRANSITIONS: Mapping[tuple[PageMark, MarkEvent], PageMark] = {
    (PageMark.HEALTHY, MarkEvent.FOUND_LOST): PageMark.LOST,
    (PageMark.LOST, MarkEvent.FOUND_LOST): PageMark.LOST,
    (PageMark.REMAPPED, MarkEvent.FOUND_LOST): PageMark.LOST,
    (PageMark.LOST, MarkEvent.REMAPPED): PageMark.REMAPPED,
    (PageMark.REMAPPED, MarkEvent.ACKNOWLEDGED): PageMark.HEALTHY,
}

_ADVICE = {
    (PageMark.LOST, MarkEvent.ACKNOWLEDGED): "remap it and reconstruct its contents first",
    (PageMark.HEALTHY, MarkEvent.ACKNOWLEDGED): "acknowledge only the pages that marks() lists as remapped",
}


class MarkTable:
    """The marks of one pool. Only pages that are not healthy are stored."""

    def __init__(self, transitions: Mapping[tuple[PageMark, MarkEvent], PageMark] = TRANSITIONS) -> None:
        self._transitions = transitions
        self._marks: dict[PageRef, PageMark] = {}

    def mark(self, ref: PageRef) -> PageMark:
        """Return the mark of one page."""
        return self._marks.get(ref, PageMark.HEALTHY)

    def marks(self) -> dict[PageRef, PageMark]:
        """Return all pages that are not healthy, in order."""
        return dict(sorted(self._marks.items()))

    def refs(self, mark: PageMark) -> list[PageRef]:
        """Return the pages that carry this (not healthy) mark, in order."""
        return sorted(ref for ref, found in self._marks.items() if found is mark)

    def apply(self, event: MarkEvent, refs: Iterable[PageRef]) -> None:
        """Apply one event to all pages or, when one of them does not allow it, to none."""
        following: dict[PageRef, PageMark] = {}
        for ref in refs:
            mark = self.mark(ref)
            try:
                following[ref] = self._transitions[mark, event]
            except KeyError:
                advice = _ADVICE.get((mark, event), "")
                raise IllegalMark(
                    f"page {ref} is {mark} and cannot be {event}" + (f": {advice}" if advice else ""),
                    page=str(ref),
                    mark=str(mark),
                ) from None
        for ref, mark in following.items():
            if mark is PageMark.HEALTHY:
                self._marks.pop(ref, None)
            else:
                self._marks[ref] = mark

    def forget(self, allocation: str) -> None:
        """Drop the marks of an allocation that was freed."""
        self._marks = {ref: mark for ref, mark in self._marks.items() if ref.allocation != allocation}
