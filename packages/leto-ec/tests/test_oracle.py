"""The galois library as an independent oracle, on tiny shapes (it is slow)."""

from __future__ import annotations

import numpy as np
import pytest

import leto_ec
from leto_ec import ReedSolomon, field

galois = pytest.importorskip("galois", reason="the oracle is optional: pip install 'leto-ec[oracle]'")


@pytest.fixture(scope="module")
def oracle():
    terms = [32, *(k for k in range(31, -1, -1) if field.TAIL >> k & 1)]
    polynomial = galois.Poly.Degrees(terms)
    assert polynomial.is_irreducible()
    return galois.GF(2**32, irreducible_poly=polynomial, primitive_element=None, verify=False)


def test_products_and_inverses(oracle, rng: np.random.Generator) -> None:
    a = rng.integers(1, 1 << 32, 50, dtype=np.uint32)
    b = rng.integers(0, 1 << 32, 50, dtype=np.uint32)
    assert np.array_equal(np.asarray(oracle(a) * oracle(b)), field.multiply(a, b))
    assert np.array_equal(np.asarray(oracle(a) ** -1), field.inverse(a))


@pytest.mark.parametrize(("data", "parity"), [(1, 1), (5, 3), (50, 7)])
def test_encode(oracle, rng: np.random.Generator, data: int, parity: int) -> None:
    """Every kernel; the oracle's answer, which takes long, is asked for once."""
    pages = rng.integers(0, 256, (data, 12), dtype=np.uint8)
    denominators = np.arange(parity)[:, None] ^ np.arange(parity, parity + data)[None, :]
    expected = (oracle(denominators) ** -1) @ oracle(pages.view("<u4").astype(np.int64))
    for kernel in leto_ec.info()["kernels"]:
        found = ReedSolomon(data, parity, kernel=kernel).encode(pages).view("<u4")
        assert np.array_equal(np.asarray(expected), found), kernel
