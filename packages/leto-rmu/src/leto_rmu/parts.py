"""Segments, and the pieces of them that a chunk updates.

Role: the part of a plan that knows parameters by name (paper section 5.2): which runs of the planes share
hyperparameters and contiguous gradients, and what is refused.
"""

from __future__ import annotations

import dataclasses
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from leto_rmu.errors import PlanError

__all__ = ["COPY_BYTES", "Piece", "Pieces", "Segment", "check_segments"]

COPY_BYTES = 2  # copies of masters in derived memory are bf16


@dataclass(frozen=True)
class Segment:
    """A run of elements with one name: packed in the given order into the planes.

    ``group`` selects the hyperparameters; ``grad_offset`` counts elements in the gradient region. With a
    ``model_offset`` the updater keeps a bf16 copy of the master that many elements into the derived region.
    ``shape``: rows and columns of a matrix, row by row, for `Muon`; other optimizers ignore it.
    """

    name: str
    numel: int
    group: int = 0
    grad_offset: int = 0
    model_offset: int | None = None
    shape: tuple[int, int] | None = None


@dataclass(frozen=True)
class Piece:
    """Elements ``lo:hi`` of the state share hyperparameters, and take gradients ``grad_lo ...``.

    ``matrix`` names the segment where a layer-wise optimizer needs all of it. With a ``model_lo`` their bf16
    copies begin at that element of the derived region.
    """

    group: int
    lo: int
    hi: int
    grad_lo: int
    matrix: str | None = None
    model_lo: int | None = None

    def part(self, lo: int, hi: int) -> Piece:
        """The elements from ``lo`` to ``hi`` of it."""
        model_lo = None if self.model_lo is None else self.model_lo + lo - self.lo
        return Piece(self.group, lo, hi, self.grad_lo + lo - self.lo, self.matrix, model_lo)


def check_segments(segments: Sequence[Segment], grad_numel: int, model_bytes: int) -> None:
    """Raise PlanError for segments that contradict themselves, each other, or the size of a region."""
    names = [s.name for s in segments]
    if len(set(names)) != len(names):
        twice = sorted({n for n in names if names.count(n) > 1})
        raise PlanError(f"segment names must be unique, found twice: {twice[:5]}")
    for s in segments:
        if s.numel <= 0 or s.group < 0:
            raise PlanError(f"segment {s.name!r}: numel must be positive and group not negative, found {s}")
        if s.grad_offset < 0 or s.grad_offset + s.numel > grad_numel:
            raise PlanError(
                f"segment {s.name!r} takes gradients {s.grad_offset}..{s.grad_offset + s.numel}, "
                f"but grad_numel is {grad_numel}"
            )
        if s.shape is not None and (len(s.shape) != 2 or s.shape[0] * s.shape[1] != s.numel):
            raise PlanError(f"segment {s.name!r}: shape {s.shape} is no matrix of {s.numel} elements")
    end, before = 0, ""
    for s in sorted((s for s in segments if s.model_offset is not None), key=lambda s: s.model_offset or 0):
        assert s.model_offset is not None
        if s.model_offset < end or COPY_BYTES * (s.model_offset + s.numel) > model_bytes:
            raise PlanError(
                f"segment {s.name!r}: its bf16 copy at element {s.model_offset} overlaps "
                f"{before or 'the beginning'} or does not fit model_bytes={model_bytes}"
            )
        end, before = s.model_offset + s.numel, s.name


class Pieces:
    """Maximal runs with one hyperparameter group, contiguous gradients and copies; matrices alone."""

    def __init__(self, whole: Sequence[Piece]) -> None:
        self.runs: list[Piece] = []
        for here in whole:
            last = self.runs[-1] if self.runs else None
            if last and last.part(here.lo, here.hi) == here:
                self.runs[-1] = dataclasses.replace(last, hi=here.hi)
            else:
                self.runs.append(here)
        self._starts = [p.lo for p in self.runs]

    def between(self, lo: int, hi: int) -> list[Piece]:
        """The parts of the runs that lie in lo..hi, in order."""
        out = []
        for k in range(max(0, bisect_right(self._starts, lo) - 1), len(self.runs)):
            p = self.runs[k]
            if p.lo >= hi:
                break
            a, b = max(lo, p.lo), min(hi, p.hi)
            if a < b:
                out.append(p.part(a, b))
        return out
