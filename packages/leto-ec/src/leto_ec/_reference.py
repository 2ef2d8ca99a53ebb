"""The reference engine: plain numpy, deliberately naive, kept for ever as the oracle of the fast kernels.

A product with a constant is a sum over the four bytes of a word, so 4 x 256 table entries a coefficient
do: c (b0 + b1 x^8 + b2 x^16 + b3 x^24) = T0[b0] ^ T1[b1] ^ T2[b2] ^ T3[b3]. Reduction is part of the
tables; nothing is lazy here.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from leto_ec import field
from leto_ec._buffers import PageGroup

__all__ = ["combine"]


def _tables(column: NDArray[np.uint32]) -> NDArray[np.uint32]:
    """Return the split tables of every coefficient of one column, shape (rows, 4, 256)."""
    powers = np.left_shift(np.uint32(1), np.arange(32, dtype=np.uint32))
    basis = field.multiply(column[:, None], powers[None, :]).reshape(-1, 4, 8)
    tables = np.zeros((len(column), 4, 256), np.uint32)
    for bit in range(8):
        tables[:, :, 1 << bit : 2 << bit] = tables[:, :, : 1 << bit] ^ basis[:, :, bit, None]
    return tables


def combine(
    coefficients: NDArray[np.uint32], inputs: PageGroup, base: PageGroup | None, outputs: PageGroup
) -> None:
    """Write outputs[r] = base[r] ^ sum over k of coefficients[r, k] * inputs[k].

    `base` None stands for zero pages, as does None in it, and it may be `outputs`. Arguments were checked by
    the caller.
    """
    assert coefficients.shape == (len(outputs), len(inputs))
    sums = np.zeros((len(outputs), outputs.page_bytes // field.WORD_BYTES), np.uint32)
    for k in range(len(inputs)):
        page = inputs.rows[k]
        if page is None:
            continue
        tables = _tables(coefficients[:, k])
        lanes = page.reshape(-1, field.WORD_BYTES).T  # little-endian: byte 0 is x^0..x^7
        for r in range(len(outputs)):
            for lane in range(field.WORD_BYTES):
                sums[r] ^= tables[r, lane][lanes[lane]]
    for r in range(len(outputs)):
        result = sums[r].astype("<u4", copy=False).view(np.uint8)
        start = None if base is None else base.rows[r]
        outputs.rows[r][:] = result if start is None else start ^ result
