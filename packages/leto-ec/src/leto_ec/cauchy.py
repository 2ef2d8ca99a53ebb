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
    x = np.asarray(rows, np.uint32)
    y = np.asarray(pages, np.uint32) + np.uint32(parity)
    sums = y[:, None] ^ x[None, :]
    diagonal = np.eye(len(rows), dtype=np.uint32)  # turns the zero of an element with itself into a one
    u = field.multiply(field.product(sums, 1), field.inverse(field.product((y[:, None] ^ y) | diagonal, 1)))
    v = field.multiply(field.product(sums, 0), field.inverse(field.product((x[:, None] ^ x) | diagonal, 1)))
    return field.multiply(field.multiply(u[:, None], v[None, :]), field.inverse(sums))
