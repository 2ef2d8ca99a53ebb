"""What a reconstruction computes, wherever the buffers are: which rows solve, which verify, and the matrices.

Syndrome of a row: the row, if it survives, XOR what the surviving pages contribute to it. Syndromes of
`used` rows are what the lost pages contribute to them, so `solver` times them is the lost pages. Syndromes
of `spare` rows must be `check` times those of the used rows. Lost rows are their pages' contribution plus
`of_lost` times the lost pages.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from leto_ec import cauchy, field
from leto_ec._arguments import index_set
from leto_ec.errors import ToleranceExceeded

__all__ = ["Reconstruction", "Repair", "repair"]

Words = NDArray[np.uint32]


@dataclass(frozen=True)
class Reconstruction:
    """What `ReedSolomon.reconstruct` did.

    Attributes
    ----------
    verified : bool
        Spare parity rows confirmed the result. False when none was left (or none was asked): then
        silent corruption of a surviving page or row would not have been noticed.
    spares_checked : int
        Spare rows compared; corruption of up to so many surviving pages or rows is certain to show.
    data, parity : tuple of int
        Pages and rows that were rewritten.
    """

    verified: bool
    spares_checked: int
    data: tuple[int, ...]
    parity: tuple[int, ...]


@dataclass(frozen=True)
class Repair:
    """One reconstruction, decided but not carried out. Indices are in ascending order."""

    kept: NDArray[np.int64]  # surviving pages
    lost_data: tuple[int, ...]
    lost_parity: tuple[int, ...]
    rows_kept: list[int]  # surviving rows
    used: list[int]
    spare: list[int]
    solver: Words  # (lost pages, used rows)
    check: Words  # (spare rows, used rows)
    of_lost: Words  # (lost rows, lost pages)

    @property
    def order(self) -> NDArray[np.int64]:
        """Rows whose syndromes are needed: used, spare, lost."""
        return np.array([*self.used, *self.spare, *self.lost_parity], np.int64)

    @property
    def result(self) -> Reconstruction:
        return Reconstruction(bool(self.spare), len(self.spare), self.lost_data, self.lost_parity)


def repair(
    matrix: Words, count: int, lost_data: Iterable[int], lost_parity: Iterable[int], verify: bool
) -> Repair:
    """Plan the reconstruction of a group of `count` pages under the code with this matrix.

    Raises
    ------
    ToleranceExceeded
    CodeError
        Indices out of range or given twice.
    """
    parity = len(matrix)
    data = index_set(lost_data, "lost_data", count)
    rows = index_set(lost_parity, "lost_parity", parity)
    if len(data) > parity - len(rows):
        raise ToleranceExceeded(len(data), len(rows), parity)
    gone = set(rows)
    rows_kept = [row for row in range(parity) if row not in gone]
    used, spare = rows_kept[: len(data)], rows_kept[len(data) :] if verify else []
    kept = np.delete(np.arange(count, dtype=np.int64), list(data))
    solver = cauchy.solver(used, data, parity)
    check = np.zeros((len(spare), len(used)), np.uint32)
    if spare and data:
        of_spare = matrix[np.ix_(spare, data)]
        check = np.bitwise_xor.reduce(field.multiply(of_spare[:, :, None], solver[None, :, :]), axis=1)
    return Repair(kept, data, rows, rows_kept, used, spare, solver, check, matrix[np.ix_(rows, data)])
