"""The tests of I-1 have teeth: each deliberately broken code fails the check that the real one passes.

`check` is the property of test_code.py, for any code: every erasure pattern of small groups, and random ones
of larger groups at the tolerance and just beyond it. A loss within tolerance must give back the exact bytes,
lost parity included; one beyond must be refused and leave every buffer as it was.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import pytest

from leto_ec import CodeError, Reconstruction, ReedSolomon, ToleranceExceeded, cauchy, field

Loss = tuple[int, int, tuple[int, ...], tuple[int, ...]]  # data, parity, lost pages, lost rows


class Wrong(AssertionError):  # noqa: N818 - a verdict
    """The code broke I-1."""


def small_losses() -> Iterator[Loss]:
    """Every subset of the pages and rows of every small code."""
    for data, parity in itertools.product((1, 2, 3, 5), (1, 2, 3)):
        for lost in itertools.product((False, True), repeat=data + parity):
            indices = np.flatnonzero(lost).tolist()
            yield (
                data,
                parity,
                tuple(k for k in indices if k < data),
                tuple(k - data for k in indices if k >= data),
            )


def larger_losses(seed: int) -> Iterator[Loss]:
    """As many pages and rows as tolerated, one fewer and one more; with and without lost rows."""
    rng = np.random.default_rng(seed)
    for data, parity in ((48, 6), (130, 16)):
        for total, rows in itertools.product((parity - 1, parity, parity + 1), (0, 1, parity // 2)):
            yield (
                data,
                parity,
                tuple(rng.choice(data, total - rows, replace=False).tolist()),
                tuple(rng.choice(parity, rows, replace=False).tolist()),
            )


def erase(rows: np.ndarray, lost: Iterable[int], rng: np.random.Generator) -> None:
    """Overwrite with noise that differs from the original in every byte: nothing is right by chance."""
    for index in lost:
        rows[index] ^= rng.integers(1, 256, rows.shape[1], dtype=np.uint8)


def check(make: Callable[[int, int], ReedSolomon], seed: int = 0) -> None:
    """Raise Wrong unless codes from ``make(data, parity)`` keep I-1. The seed is of the bytes and losses."""
    rng = np.random.default_rng(seed)
    for data, parity, lost_data, lost_parity in (*small_losses(), *larger_losses(seed)):
        what = f"RS({data}, {parity}), lost pages {list(lost_data)} and rows {list(lost_parity)}, seed {seed}"
        code = make(data, parity)
        pages = rng.integers(0, 256, (data, 12), dtype=np.uint8)
        rows = code.encode(pages)
        damaged, damaged_rows = pages.copy(), rows.copy()
        erase(damaged, lost_data, rng)
        erase(damaged_rows, lost_parity, rng)
        before = damaged.copy(), damaged_rows.copy()
        spares = parity - len(lost_data) - len(lost_parity)
        try:
            result = code.reconstruct(damaged, damaged_rows, lost_data=lost_data, lost_parity=lost_parity)
        except ToleranceExceeded as refused:
            if spares >= 0:
                raise Wrong(f"refused within tolerance: {what}") from refused
            if not (np.array_equal(damaged, before[0]) and np.array_equal(damaged_rows, before[1])):
                raise Wrong(f"refused, but wrote to a buffer: {what}") from refused
            continue
        except CodeError as error:
            raise Wrong(f"failed with {type(error).__name__}: {what}") from error
        if spares < 0:
            raise Wrong(f"accepted beyond tolerance: {what}")
        if not np.array_equal(damaged, pages):
            raise Wrong(f"pages are not the original bytes: {what}")
        if not np.array_equal(damaged_rows, rows):
            raise Wrong(f"parity is not the original bytes: {what}")
        if result != Reconstruction(spares > 0, spares, tuple(sorted(lost_data)), tuple(sorted(lost_parity))):
            raise Wrong(f"reported {result}: {what}")


def test_the_product_passes(kernel: str) -> None:
    check(lambda data, parity: ReedSolomon(data, parity, kernel=kernel))


def test_the_product_passes_with_other_bytes_and_losses() -> None:
    for seed in range(1, 4):
        check(ReedSolomon, seed)


# Mutants of reconstruction


class OneErasureTooMany(ReedSolomon):
    """Tolerance off by one: of one lost page too many it solves the others, and trusts the last as it is."""

    def reconstruct(self, pages, parity, *, lost_data=(), lost_parity=(), **more) -> Reconstruction:  # type: ignore[no-untyped-def, override]
        lost = list(lost_data)
        if len(lost) + len(lost_parity) == self.parity + 1:
            lost.pop()
        return super().reconstruct(pages, parity, lost_data=lost, lost_parity=lost_parity, **more)


class OneErasureTooFew(ReedSolomon):
    """Tolerance off by one, the other way: it insists on a spare."""

    def reconstruct(self, pages, parity, *, lost_data=(), lost_parity=(), **more) -> Reconstruction:  # type: ignore[no-untyped-def, override]
        if len(lost_data) and len(lost_data) + len(lost_parity) == self.parity:
            raise ToleranceExceeded(len(lost_data), len(lost_parity), self.parity)
        return super().reconstruct(pages, parity, lost_data=lost_data, lost_parity=lost_parity, **more)


class LostParityNotReEncoded(ReedSolomon):
    """Lost pages come back, lost parity rows stay what they were, and the result claims both."""

    def reconstruct(self, pages, parity, *, lost_data=(), lost_parity=(), **more) -> Reconstruction:  # type: ignore[no-untyped-def, override]
        lost = list(lost_parity)
        kept = parity[lost].copy()
        result = super().reconstruct(pages, parity, lost_data=lost_data, lost_parity=lost, **more)
        parity[lost] = kept
        return result


class ClearedBeforeRefusal(ReedSolomon):
    """Lost pages are cleared for the result before the losses are counted."""

    def reconstruct(self, pages, parity, *, lost_data=(), **more) -> Reconstruction:  # type: ignore[no-untyped-def, override]
        pages[list(lost_data)] = 0
        return super().reconstruct(pages, parity, lost_data=lost_data, **more)


@pytest.mark.parametrize(
    ("mutant", "said"),
    [
        (OneErasureTooMany, "accepted beyond tolerance"),
        (OneErasureTooFew, "refused within tolerance"),
        (LostParityNotReEncoded, "parity is not the original bytes"),
        (ClearedBeforeRefusal, "refused, but wrote to a buffer"),
    ],
)
def test_a_broken_reconstruction_is_caught(mutant: type[ReedSolomon], said: str) -> None:
    with pytest.raises(Wrong, match=f"^{said}"):
        check(mutant)


# Mutants of the generator. The product inverts by Cauchy's formula; any matrix needs elimination.


def eliminated(matrix: np.ndarray) -> np.ndarray:
    """The inverse of a square matrix by Gauss-Jordan elimination; of a singular one, whatever is left."""
    size = len(matrix)
    table = np.concatenate([matrix, np.eye(size, dtype=np.uint32)], axis=1)
    for column in range(size):
        pivots = column + np.flatnonzero(table[column:, column])
        if not len(pivots):
            continue
        table[[column, pivots[0]]] = table[[pivots[0], column]]
        scale = np.uint32(field.scalar_inverse(int(table[column, column])))
        table[column] = field.multiply(table[column], scale)
        factors = table[:, column].copy()
        factors[column] = 0
        table ^= field.multiply(factors[:, None], table[column][None, :])
    return table[:, size:]


@pytest.fixture
def with_generator(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[np.ndarray], None]], None]:
    """Put an altered generator under the code, with the solver that belongs to it."""
    real = cauchy.generator

    def install(alter: Callable[[np.ndarray], None]) -> None:
        def generator(data: int, parity: int) -> np.ndarray:
            matrix = real(data, parity).copy()
            alter(matrix)
            return matrix

        def solver(rows: Sequence[int], pages: Sequence[int], parity: int) -> np.ndarray:
            if not rows:
                return np.zeros((0, 0), np.uint32)
            return eliminated(generator(max(pages) + 1, parity)[np.ix_(rows, pages)])

        monkeypatch.setattr(cauchy, "generator", generator)
        monkeypatch.setattr(cauchy, "solver", solver)

    return install


def by_the_matrix(data: int, parity: int) -> ReedSolomon:
    """A code on the kernel that multiplies by the matrix as it is given."""
    return ReedSolomon(data, parity, kernel="reference")


def test_the_true_generator_passes_with_elimination(with_generator) -> None:  # type: ignore[no-untyped-def]
    """The control: what fails below fails because of the generator."""
    with_generator(lambda matrix: None)
    check(by_the_matrix)


@pytest.mark.parametrize("which", ["first", "last"])
def test_a_generator_with_two_equal_rows_is_caught(with_generator, which: str) -> None:  # type: ignore[no-untyped-def]
    """Not MDS: two lost pages whose rows are equal cannot be told apart, yet nothing is refused."""

    def alter(matrix: np.ndarray) -> None:
        if len(matrix) > 1 and which == "first":
            matrix[1] = matrix[0]
        elif len(matrix) > 1:
            matrix[-1] = matrix[-2]

    with_generator(alter)
    with pytest.raises(Wrong, match=r"^pages are not the original bytes"):
        check(by_the_matrix)


def test_a_generator_with_a_zero_is_caught(with_generator) -> None:  # type: ignore[no-untyped-def]
    """Not MDS: one row that does not see one page."""

    def alter(matrix: np.ndarray) -> None:
        matrix[-1, -1] = 0

    with_generator(alter)
    with pytest.raises(Wrong, match=r"^pages are not the original bytes"):
        check(by_the_matrix)
