"""The Cauchy matrix of the code and the inverses of its square submatrices (theory: `leto_ec.field`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from leto_ec import field

__all__ = ["MAX_DATA", "MAX_PARITY", "coefficient", "generator", "solver"]

MAX_DATA = 65_535
MAX_PARITY = 64


def coefficient(row: int, page: int, parity: int) -> int:
    """Return c[row][page] = 1 / (row ^ (parity + page)) of a code with `parity` rows."""
    return field.scalar_inverse(row ^ (parity + page))


def generator(data: int, parity: int) -> NDArray[np.uint32]:
    """Return the whole matrix c, shape (parity, data), read-only."""
    rows = np.arange(parity, dtype=np.int64)[:, None]
    columns = np.arange(parity, parity + data, dtype=np.int64)[None, :]
    table = field.reciprocals((parity + data - 1).bit_length())
    matrix: NDArray[np.uint32] = table[rows ^ columns]
    matrix.flags.writeable = False
    return matrix


def solver(rows: Sequence[int], pages: Sequence[int], parity: int) -> NDArray[np.uint32]:
    """Return the inverse of the square submatrix c[rows][pages], shape (len(pages), len(rows)).

    Cauchy matrices have a closed inverse, with x the rows and y = parity + pages:

        b[j][i] = u_j v_i / (x_i + y_j),   u_j = prod_k (x_k + y_j) / prod_{k != j} (y_j + y_k),
                                           v_i = prod_k (x_i + y_k) / prod_{k != i} (x_i + x_k).
    """
    if len(rows) != len(pages):
        raise ValueError(f"a square submatrix is expected, found {len(rows)} rows and {len(pages)} pages")
    if not rows:
        return np.zeros((0, 0), np.uint32)
    x = np.asarray(rows, np.int64)
    y = np.asarray(pages, np.int64) + parity
    sums = y[:, None] ^ x[None, :]
    table = field.reciprocals(int(max(sums.max(), y.max(), x.max())).bit_length())

    def others(points: NDArray[np.int64]) -> NDArray[np.uint32]:
        """1 / (p_j + p_k), and 1 for an element with itself."""
        inverses: NDArray[np.uint32] = table[points[:, None] ^ points]
        return inverses | np.eye(len(points), dtype=np.uint32)

    # All factors of u, and of v: one product over 2 n elements for each.
    of_u = np.concatenate([sums.astype(np.uint32), others(y)], axis=1)
    of_v = np.concatenate([sums.T.astype(np.uint32), others(x)], axis=1)
    u, v = field.product(np.stack([of_u, of_v]), 2)
    return field.multiply(field.multiply(u[:, None], v[None, :]), table[sums])
