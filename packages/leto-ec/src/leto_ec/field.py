"""The field GF(2^32): theory and plain numpy arithmetic, on which everything else in leto_ec rests.

**The field.** A 32-bit word is a polynomial over GF(2) of degree below 32: bit k is the coefficient of
x^k. Addition is XOR. Multiplication is the product of polynomials modulo

    p(x) = x^32 + x^22 + x^2 + x + 1,            written x^32 + 0x400007,

the polynomial of Jerasure for w = 32, so that every parity byte can be checked with an independent
library. Words are little-endian in memory. p is irreducible, hence the residues form a field: every
non-zero word has an inverse. (p need not be primitive: nothing here uses logarithms, whose tables would
be 16 GiB each.)

**The code.** Data word d_j (0 <= j < D) of one byte position in D pages gives H parity words

    q_i = sum over j of c[i][j] d_j,             c[i][j] = 1 / (i ^ (H + j)),        0 <= i < H.

The code is systematic: data pages stay as they are and parity rows are appended, which is what lets
training state be protected in place. The x_i = i and y_j = H + j are D + H distinct words, so no
denominator is zero, and c is a Cauchy matrix. Every square submatrix of a Cauchy matrix is again one,
and its determinant is

    prod over a < b of (x_a + x_b)(y_a + y_b)  /  prod over all a, b of (x_a + y_b),

a quotient of products of non-zero elements of a field, hence not zero. So any e <= H lost data pages can
be solved for from *any* e surviving parity rows: the code is MDS, it has the highest tolerance that H
rows can give. The argument asks that the x and y be distinct in a field and for nothing else, so any
irreducible polynomial serves; that is not so for Vandermonde matrices put below an identity, which
published codes have got wrong. `leto_ec.cauchy` holds c and the closed form of its inverses.

**Deltas.** The code is linear: when page j changes by delta = old ^ new, the parity changes by
c[i][j] delta. No other page needs to be read.

**Lazy reduction.** Reduction modulo p is linear over GF(2): (a mod p) ^ (b mod p) = (a ^ b) mod p. The
carry-less product of two 32-bit words has at most 63 bits, XOR never carries out of them, and so any
number of raw products may be accumulated in one 64-bit word and reduced once, at the end. Kernels thus
pay one carry-less multiply and one XOR for each word and row.

**Blocks.** Fast kernels do not multiply by the matrix. In an aligned block of 16 points and 16 rows the
denominator
depends on the XOR of the two positions alone, which leaves 81 or 48 of 256 multiplications;
`docs/leto-ec/theory.md` has the proofs, `leto_ec._blocks` the coefficients.

**Reduction.** A 63-bit word A = a x^32 + l has the quotient q = floor(a mu / x^32) with
mu = floor(x^64 / p) (Barrett's method, which is exact over GF(2) because nothing carries), and
A mod p = l ^ (q * 0x400007 mod x^32): two carry-less multiplies. Where there is no such instruction,
the upper half is folded down with x^32 = 0x400007 until it is empty.

Nothing in this package depends on secrets, so table look-ups and early exits are harmless.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "MAX_WORD",
    "TAIL",
    "WORD_BYTES",
    "inverse",
    "multiply",
    "product",
    "reciprocals",
    "scalar_inverse",
]

TAIL = 0x400007
"""p(x) without its leading term x^32."""

WORD_BYTES = 4
MAX_WORD = 0xFFFFFFFF

Words = NDArray[np.uint32]

BITS = np.arange(32, dtype=np.uint64)
AT_ONCE = 512  # elements: below, 32 passes over the array cost more than 32 times the memory


def _reduce(raw: NDArray[np.uint64]) -> Words:
    """Reduce carry-less products (64 bits) modulo p, folding the upper half down until it is empty."""
    shifts = [np.uint64(k) for k in range(32) if TAIL >> k & 1]
    while True:
        upper = raw >> np.uint64(32)
        if not upper.any():
            return raw.astype(np.uint32)
        raw = raw & np.uint64(MAX_WORD)
        for shift in shifts:
            raw = raw ^ (upper << shift)


def multiply(a: Words, b: Words) -> Words:
    """Multiply words of GF(2^32) element by element, with numpy's broadcasting.

    Parameters
    ----------
    a, b : uint32 arrays
        Factors; any shapes that broadcast.

    Returns
    -------
    uint32 array of the broadcast shape.
    """
    a64 = np.asarray(a, np.uint64)
    b64 = np.asarray(b, np.uint64)
    one = np.uint64(1)
    shape = np.broadcast_shapes(a64.shape, b64.shape)
    if math.prod(shape) <= AT_ONCE:
        bits = (b64[..., None] >> BITS) & one
        return _reduce(np.bitwise_xor.reduce(bits * (a64[..., None] << BITS), axis=-1))
    raw = np.zeros(shape, np.uint64)
    for bit in range(32):
        shift = np.uint64(bit)
        raw ^= ((b64 >> shift) & one) * (a64 << shift)
    return _reduce(raw)


def scalar_inverse(a: int) -> int:
    """Return 1/a by Euclid's algorithm on polynomials.

    Raises
    ------
    ZeroDivisionError
        For a = 0.
    """
    if not 0 <= a <= MAX_WORD:
        raise OverflowError(f"a word of GF(2^32) is expected, found {a:#x}")
    if a == 0:
        raise ZeroDivisionError("0 has no inverse in GF(2^32)")
    # Invariant: r0 = s0 * a and r1 = s1 * a modulo p.
    r0, r1, s0, s1 = 1 << 32 | TAIL, a, 0, 1
    while r1 != 1:
        shift = r0.bit_length() - r1.bit_length()
        if shift < 0:
            r0, r1, s0, s1 = r1, r0, s1, s0
            continue
        r0 ^= r1 << shift
        s0 ^= s1 << shift
        if r0.bit_length() < r1.bit_length():
            r0, r1, s0, s1 = r1, r0, s1, s0
    return s1


def inverse(a: Words) -> Words:
    """Return 1/a for every element: one scalar inversion and three products an element.

    Neighbours are multiplied pairwise, the half as many products are inverted, and
    1/u = v * 1/(u v) unfolds the pairs again.
    """
    flat = np.ascontiguousarray(a, np.uint32).reshape(-1)
    if not flat.all():
        raise ZeroDivisionError("0 has no inverse in GF(2^32)")
    if flat.size == 0:
        return flat.reshape(np.shape(a))
    if flat.size == 1:
        return np.array([scalar_inverse(int(flat[0]))], np.uint32).reshape(np.shape(a))
    padded = flat if flat.size % 2 == 0 else np.append(flat, np.uint32(1))
    left, right = padded[0::2], padded[1::2]
    pairs = inverse(multiply(left, right))
    result = np.empty_like(padded)
    result[0::2] = multiply(pairs, right)
    result[1::2] = multiply(pairs, left)
    return result[: flat.size].reshape(np.shape(a))


def product(a: Words, axis: int) -> Words:
    """Multiply the elements along one axis (the empty product is 1)."""
    rest = np.moveaxis(np.asarray(a, np.uint32), axis, 0)
    while rest.shape[0] > 1:
        if rest.shape[0] % 2:
            rest = np.concatenate([rest, np.ones((1, *rest.shape[1:]), np.uint32)])
        rest = multiply(rest[0::2], rest[1::2])
    return rest[0] if rest.shape[0] else np.ones(rest.shape[1:], np.uint32)


@lru_cache(maxsize=32)
def reciprocals(bits: int) -> Words:
    """Return the table of 1/v for 0 < v < 2^bits (entry 0 is 0 and means nothing), read-only."""
    table = np.zeros(1 << bits, np.uint32)
    table[1:] = inverse(np.arange(1, 1 << bits, dtype=np.uint32))
    table.flags.writeable = False
    return table
