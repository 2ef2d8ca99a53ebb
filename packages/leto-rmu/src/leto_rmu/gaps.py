"""Gaps: which bytes of a few ranges are free, and pieces of them.

Role: the bookkeeping of `leto_rmu.lending`, without memory. Whoever asks for bytes gets them from the front,
from as many gaps as it takes: contents are copied in and out, so nothing needs to be in one piece.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterable, Sequence

__all__ = ["Gaps", "Piece"]

GRAIN = 512  # bytes: pieces begin and end at multiples of it, or where their range ends
Piece = tuple[int, int, int]  # range, first byte, end


class Gaps:
    """Free parts of ranges of the given sizes in bytes; all are free in the beginning."""

    def __init__(self, sizes: Sequence[int] = ()) -> None:
        self.free = sum(sizes)
        self._gaps: list[Piece] = [(k, 0, size) for k, size in enumerate(sizes) if size]

    def take(self, nbytes: int) -> list[Piece]:
        """Pieces of at least ``nbytes`` bytes together, the last of which may be longer.

        ValueError: so many are not free, or ``nbytes`` is not positive.
        """
        if not 0 < nbytes <= self.free:
            raise ValueError(f"{nbytes} bytes were asked for, {self.free} are free")
        taken: list[Piece] = []
        while nbytes > 0:
            k, lo, hi = self._gaps.pop(0)
            end = min(hi, lo + -(-nbytes // GRAIN) * GRAIN)
            taken.append((k, lo, end))
            if end < hi:
                self._gaps.insert(0, (k, end, hi))
            nbytes -= end - lo
            self.free -= end - lo
        return taken

    def give(self, pieces: Iterable[Piece]) -> None:
        """Take back pieces that were given out."""
        for piece in pieces:
            insort(self._gaps, piece)
            self.free += piece[2] - piece[1]
        merged: list[Piece] = []
        for k, lo, hi in self._gaps:
            if merged and merged[-1][0] == k and merged[-1][2] == lo:
                merged[-1] = (k, merged[-1][1], hi)
            else:
                merged.append((k, lo, hi))
        self._gaps = merged
