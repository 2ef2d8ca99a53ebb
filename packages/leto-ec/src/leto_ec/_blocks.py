"""Coefficients of blocks of 16 pages, by which fast kernels multiply instead of by the matrix itself.

Page j has the point y = H + j and lies in block y >> 4 at position y & 15. Rows are cut into slices of 16.
For slice a and block b the matrix of 1 / (row ^ y) is the matrix of 1 / (coset ^ r ^ s) with the coset 16
(a ^ b), so it depends on a ^ b alone and is the same for all codes (theory: `leto_ec.field`). Two sets of
coefficients serve:

* dyadic: the superset XOR sums of u -> 1 / (coset ^ u);
* fft: the twiddle factors of the inverse additive FFT on the coset, and the scale P / W4(coset).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from leto_ec import field

__all__ = ["BLOCK", "SHIFT", "block_of", "dyadic", "fft", "superset_sums"]

SHIFT = 4
BLOCK = 1 << SHIFT

Words = NDArray[np.uint32]


def block_of(page: int, parity: int) -> int:
    """Return the block in which a page lies."""
    return (parity + page) >> SHIFT


def superset_sums(values: Words) -> Words:
    """Return v[..., m] = XOR of values[..., s] over all s that contain m: an involution."""
    result = values.copy()
    for bit in range(SHIFT):
        step = 1 << bit
        without = [m for m in range(BLOCK) if not m & step]
        result[..., without] ^= result[..., [m | step for m in without]]
    return result


def dyadic(numbers: NDArray[np.int64]) -> Words:
    """Return the dyadic coefficients of cosets 16 * numbers, shape (n, 16).

    1/0 counts as 0: it occurs at coset 0 only and would belong to a point that is a row and a page at once.
    """
    denominators = (numbers[:, None] << SHIFT) ^ np.arange(BLOCK)
    table = field.reciprocals(int(denominators.max(initial=0)).bit_length() or 1)
    return superset_sums(table[denominators])


def fft(numbers: NDArray[np.int64]) -> Words:
    """Return the FFT coefficients of cosets 16 * numbers, shape (n, 16): level 0, 1, 2, 3, scale.

    Level l has the factors W_l(coset + g 2^(l+1)) / W_l(2^l), g = 0, 1, ... The scale of coset 0 does not
    exist and is given as 0: such a block needs other means.
    """
    one = np.ones(1, np.uint32)
    cosets = (numbers << SHIFT).astype(np.uint32)
    points = cosets[:, None] ^ np.arange(BLOCK, dtype=np.uint32)  # W_l at all points of the block
    units = np.left_shift(np.uint32(1), np.arange(SHIFT + 1, dtype=np.uint32))  # W_l at 1, 2, 4, 8
    columns: list[Words] = []
    for level in range(SHIFT):
        unit = units[level]
        factors = points[:, :: 2 << level]
        columns.append(factors if unit == 1 else field.multiply(factors, field.inverse(unit * one)))
        points = field.multiply(points, points ^ unit)
        units = field.multiply(units, units ^ unit)
    vanishing = points[:, 0]  # W_4 is constant on a coset
    spread = field.product(np.arange(1, BLOCK, dtype=np.uint32), 0)
    exists = vanishing != 0
    scale = np.zeros(len(numbers), np.uint32)
    scale[exists] = field.multiply(spread, field.inverse(vanishing[exists]))
    return np.concatenate([*columns, scale[:, None]], axis=1)
