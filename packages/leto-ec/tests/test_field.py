"""The field: against schoolbook arithmetic, published products, and the proof that p is irreducible."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leto_ec import field

words = st.integers(0, field.MAX_WORD)
nonzero = st.integers(1, field.MAX_WORD)


def times(a: int, b: int) -> int:
    return int(field.multiply(np.uint32(a), np.uint32(b)))


@pytest.mark.parametrize(
    ("tail", "product"), [(0x400007, 0x9F14AD51), (0xC5, 0xD299AA31), (0x8D, 0xA0313F8E), (0xAF, 0x30EB793D)]
)
def test_published_products(monkeypatch: pytest.MonkeyPatch, scalar, tail: int, product: int) -> None:
    monkeypatch.setattr(field, "TAIL", tail)
    assert times(0xDEADBEEF, 0x12345678) == product
    assert scalar(0xDEADBEEF, 0x12345678, tail) == product


def test_the_tail_is_the_one_of_the_golden_hashes() -> None:
    assert field.TAIL == 0x400007


def test_the_polynomial_is_irreducible(scalar) -> None:
    """Rabin's test for degree 32, whose only prime factor is 2: x^(2^32) = x, gcd(x^(2^16) - x, p) = 1."""
    power, halfway = 2, 0
    for squarings in range(1, 33):
        power = scalar(power, power)
        if squarings == 16:
            halfway = power
    assert power == 2
    a, b = 1 << 32 | field.TAIL, halfway ^ 2
    while b:
        while a.bit_length() >= b.bit_length():
            a ^= b << (a.bit_length() - b.bit_length())
        a, b = b, a
    assert a == 1


@given(words, words, words)
def test_multiplication(a: int, b: int, c: int) -> None:
    assert times(a, b) == times(b, a)
    assert times(a, b ^ c) == times(a, b) ^ times(a, c)
    assert times(times(a, b), c) == times(a, times(b, c))
    assert times(a, 1) == a


@pytest.mark.parametrize("a", [0, 1, 2, 0x80000000, 0xFFFFFFFF, 0x400007, 0xDEADBEEF])
@pytest.mark.parametrize("b", [0, 1, 3, 0x80000000, 0xFFFFFFFF, 0x12345678])
def test_multiplication_agrees_with_the_schoolbook(scalar, a: int, b: int) -> None:
    assert times(a, b) == scalar(a, b)


@given(nonzero)
def test_scalar_inverse(a: int) -> None:
    assert times(a, field.scalar_inverse(a)) == 1


@given(st.lists(nonzero, max_size=20))
def test_inverse_of_arrays(values: list[int]) -> None:
    array = np.array(values, np.uint32)
    assert field.inverse(array).tolist() == [field.scalar_inverse(value) for value in values]


def test_inverse_keeps_the_shape() -> None:
    array = np.arange(1, 7, dtype=np.uint32).reshape(2, 3)
    assert field.multiply(array, field.inverse(array)).tolist() == [[1] * 3] * 2


def test_zero_has_no_inverse() -> None:
    with pytest.raises(ZeroDivisionError):
        field.scalar_inverse(0)
    with pytest.raises(ZeroDivisionError):
        field.inverse(np.array([1, 0], np.uint32))
    with pytest.raises(OverflowError):
        field.scalar_inverse(1 << 32)


@given(st.lists(st.tuples(words, words), max_size=9))
def test_product(pairs: list[tuple[int, int]]) -> None:
    array = np.array(pairs, np.uint32).reshape(len(pairs), 2)
    expected = [1, 1]
    for pair in pairs:
        expected = [times(e, p) for e, p in zip(expected, pair, strict=True)]
    assert field.product(array, 0).tolist() == expected
    assert field.product(array.T, 1).tolist() == expected


def test_reciprocals_are_shared_and_therefore_read_only() -> None:
    table = field.reciprocals(6)
    assert table[0] == 0
    assert [times(v, int(table[v])) for v in range(1, 64)] == [1] * 63
    with pytest.raises(ValueError, match="read-only"):
        table[0] = 1
