"""The generator matrix and its inverses."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

import leto_ec
from leto_ec import cauchy, field


def times(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Matrix product over the field."""
    return np.bitwise_xor.reduce(field.multiply(a[:, :, None], b[None, :, :]), axis=1)


@pytest.mark.parametrize(("data", "parity"), [(1, 1), (5, 3), (1024, 16), (48, 6), (1, 64)])
def test_generator_is_the_documented_formula(data: int, parity: int, scalar) -> None:
    matrix = cauchy.generator(data, parity)
    assert matrix.shape == (parity, data)
    for row, page in itertools.product({0, parity // 2, parity - 1}, {0, data // 2, data - 1}):
        assert scalar(int(matrix[row, page]), row ^ (parity + page)) == 1
        assert leto_ec.coefficient(row, page, parity) == matrix[row, page]


def test_the_largest_generator(scalar) -> None:
    matrix = cauchy.generator(cauchy.MAX_DATA, cauchy.MAX_PARITY)
    assert scalar(int(matrix[63, 65_534]), 63 ^ (64 + 65_534)) == 1
    assert matrix.all()


def test_every_square_submatrix_of_a_small_code_is_invertible() -> None:
    data, parity = 6, 4
    matrix = cauchy.generator(data, parity)
    for size in range(1, parity + 1):
        for rows in itertools.combinations(range(parity), size):
            for pages in itertools.combinations(range(data), size):
                solver = cauchy.solver(rows, pages, parity)
                assert np.array_equal(times(solver, matrix[np.ix_(rows, pages)]), np.eye(size))


def test_a_large_solver(rng: np.random.Generator) -> None:
    rows = np.sort(rng.choice(64, 48, replace=False)).tolist()
    pages = np.sort(rng.choice(65_535, 48, replace=False)).tolist()
    square = cauchy.generator(65_535, 64)[np.ix_(rows, pages)]
    assert np.array_equal(times(cauchy.solver(rows, pages, 64), square), np.eye(48))


def test_solver_wants_a_square() -> None:
    assert cauchy.solver([], [], 3).shape == (0, 0)
    with pytest.raises(ValueError, match="square"):
        cauchy.solver([0, 1], [0], 3)
