"""The contract of an engine, held against schoolbook arithmetic: outputs = base ^ matrix x inputs."""

from __future__ import annotations

import hashlib
import threading
from functools import cache
from types import SimpleNamespace

import numpy as np
import pytest

import leto_ec
from leto_ec import _engines
from leto_ec._buffers import PageGroup

GUARD = 0xEE
EXTREMES = (0, 1, 2, 0x80000000, 0xFFFFFFFF, 0x00010000, 0x400007)


def engine(name: str) -> _engines.Engine:
    return _engines.select(name)[0]


def words(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Random words, every other one extreme: all-ones reach the 63rd bit of a product."""
    random = rng.integers(0, 1 << 32, shape, dtype=np.uint32)
    extreme = rng.choice(np.array(EXTREMES, np.uint32), shape)
    return np.where(rng.integers(0, 2, shape, dtype=bool), random, extreme)


def guarded(rng: np.random.Generator, count: int, size: int, gap: int) -> tuple[np.ndarray, list[np.ndarray]]:
    """A field of guard bytes with `count` pages in it, at addresses of any alignment."""
    memory = np.full((count + 1) * (size + gap), GUARD, np.uint8)
    rows = [memory[gap + i * (size + gap) :][:size] for i in range(count)]
    for row in rows:
        row[:] = words(rng, (size // 4,)).astype("<u4").view(np.uint8)
    return memory, rows


@pytest.mark.parametrize("count_words", [1, 3, 4, 5, 16, 33])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 2), (5, 9), (17, 8), (2, 0), (9, 17)])
def test_against_the_schoolbook(kernel: str, rng, scalar, rows: int, columns: int, count_words: int) -> None:
    matrix = words(rng, (rows, columns))
    size = 4 * count_words
    _, inputs = guarded(rng, columns, size, gap=3)
    sums = np.zeros((rows, count_words), np.uint32)
    for r in range(rows):
        for k in range(columns):
            products = [scalar(int(matrix[r, k]), int(word)) for word in inputs[k].view("<u4")]
            sums[r] ^= np.array(products, np.uint32)
    for base_is in ("none", "separate", "outputs"):
        memory, outputs = guarded(rng, rows, size, gap=5)
        guards = np.ones(memory.size, bool)
        for row in outputs:
            start = row.ctypes.data - memory.ctypes.data
            guards[start : start + size] = False
        _, separate = guarded(rng, rows, size, gap=1)
        base = {"none": None, "separate": separate, "outputs": outputs}[base_is]
        expected = sums.copy()
        for r in range(rows if base is not None else 0):
            expected[r] ^= base[r].view("<u4")
        group = None if base is None else PageGroup(base, size)
        engine(kernel).combine(matrix, PageGroup(inputs, size), group, PageGroup(outputs, size))
        assert np.array_equal([row.view("<u4") for row in outputs], expected)
        assert (memory[guards] == GUARD).all(), "bytes outside the outputs were written"


SHAPES = [(1, 3), (16, 1), (7, 1), (17, 2), (16, 4), (5, 6), (16, 20), (33, 9)]  # rows, columns


@cache
def across_strips(rows: int, columns: int, size: int) -> SimpleNamespace:
    """A combination and what the reference makes of it: asked once for all kernels, because it is slow."""
    rng = np.random.default_rng((rows, columns, size))
    matrix = words(rng, (rows, columns))
    _, inputs = guarded(rng, columns, size, gap=7)
    _, base = guarded(rng, rows, size, gap=2)
    expected = np.zeros((rows, size), np.uint8)
    groups = (PageGroup(inputs, size), PageGroup(base, size), PageGroup(expected, size))
    engine("reference").combine(matrix, *groups)
    return SimpleNamespace(matrix=matrix, inputs=groups[0], base=groups[1], expected=expected)


@pytest.mark.parametrize("size", [4092, 4096, 4100, 12_284, 70_000])
@pytest.mark.parametrize(("rows", "columns"), SHAPES)
def test_against_the_reference_across_strips(kernel: str, rng, rows: int, columns: int, size: int) -> None:
    case = across_strips(rows, columns, size)
    memory, outputs = guarded(rng, rows, size, gap=9)
    engine(kernel).combine(case.matrix, case.inputs, case.base, PageGroup(outputs, size))
    assert (memory[:9] == GUARD).all()
    assert (memory[-size:] == GUARD).all()
    assert np.array_equal(np.array(outputs), case.expected)


@cache
def within_a_line(rows: int, columns: int, size: int) -> SimpleNamespace:
    """The same in place, for pages that are to be put at many addresses."""
    rng = np.random.default_rng((rows, columns, size))
    matrix = words(rng, (rows, columns))
    original = words(rng, (rows + columns, size // 4)).astype("<u4").view(np.uint8)
    expected = original[:rows].copy()
    outputs = PageGroup(expected, size)
    engine("reference").combine(matrix, PageGroup(original[rows:], size), outputs, outputs)
    return SimpleNamespace(matrix=matrix, original=original, expected=expected)


@pytest.mark.parametrize("shift", [4, 16, 60, 1, 0])
@pytest.mark.parametrize("size", [16_384, 16_388, 20_480 - 4])
@pytest.mark.parametrize(("rows", "columns"), [(3, 1), (2, 5)])
def test_pages_that_begin_within_a_line(kernel: str, rows: int, columns: int, size: int, shift: int) -> None:
    """From 16 KiB on, what is before the first line of the cache is done apart, by the rows or the pages."""
    case = within_a_line(rows, columns, size)
    field = np.full((rows + columns + 1) * (size + 128), GUARD, np.uint8)
    start = -field.ctypes.data % 64
    places = [start + i * (size + 128 - size % 64) + shift * (1 + i // rows) for i in range(rows + columns)]
    pages = [field[place : place + size] for place in places]
    guards = np.ones(field.size, bool)
    for place, page, bytes_of_page in zip(places, pages, case.original, strict=True):
        page[:] = bytes_of_page
        guards[place : place + size] = False
    outputs = PageGroup(pages[:rows], size)
    engine(kernel).combine(case.matrix, PageGroup(pages[rows:], size), outputs, outputs)
    assert (field[guards] == GUARD).all(), "bytes outside the pages were written"
    assert np.array_equal(pages[rows:], case.original[rows:]), "inputs were written"
    assert np.array_equal(np.array(pages[:rows]), case.expected)


def test_threads_share_a_code(kernel: str, rng) -> None:
    code = leto_ec.ReedSolomon(24, 5, kernel=kernel)
    groups = [rng.integers(0, 256, (24, 1000), dtype=np.uint8) for _ in range(4)]
    expected = [hashlib.sha256(code.encode(pages)).hexdigest() for pages in groups]
    found: dict[int, set[str]] = {i: set() for i in range(4)}
    start = threading.Barrier(4)

    def work(i: int) -> None:
        start.wait(timeout=150)
        for _ in range(8):
            found[i].add(hashlib.sha256(code.encode(groups[i])).hexdigest())

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=150)
    assert found == {i: {expected[i]} for i in range(4)}
