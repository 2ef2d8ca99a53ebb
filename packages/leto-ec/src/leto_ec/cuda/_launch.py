"""Tables on the device, and the launches that read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import cupy
import numpy as np
from numpy.typing import NDArray

from leto_ec import _blocks
from leto_ec.cuda._library import Kernels
from leto_ec.field import WORD_BYTES

__all__ = ["Layer", "Tables", "combine", "delta", "product", "verify"]

WIDE = 16  # bytes of the widest access
STREAM_WORDS = 128  # words of a page that one block of threads of the streaming kernel owns
SHORT_BLOCKS = 8  # up to so many blocks the rows are a large part of what is read
ROWS_EACH = 4  # rows that a thread of the delta kernel updates: measured alike from 1 to 8

Launch = Callable[[], None]
Layer = tuple[NDArray[np.int64], list[NDArray[np.int64]]]  # page indices; addresses, group by group
Addresses = NDArray[np.int64]


@dataclass
class Tables:
    """Uploads small tables on the current stream, and keeps them alive."""

    kept: list[Any]

    def upload(self, table: NDArray[Any]) -> Any:
        on_device = cupy.asarray(table)
        self.kept.append(on_device)
        return on_device


def _grid(words: int, threads: int, groups: int, depth: int = 1) -> tuple[int, int, int]:
    return (words + threads - 1) // threads, groups, depth


def product(
    kernels: Kernels,
    tables: Tables,
    parity: int,
    layers: list[Layer],
    before: list[Addresses],
    after: list[Addresses],
    page_bytes: int,
) -> list[Launch]:
    """Launches of: after[g][r] = before[g][r] ^ sum over layers and pages j of c[r][j] * page j, for all
    rows r.

    Address 0 is a page or row of zeros, or a row that is not wanted.
    """
    groups, words = len(before), page_bytes // WORD_BYTES
    slices = (parity + _blocks.BLOCK - 1) // _blocks.BLOCK
    pages: list[Addresses] = []
    numbers: list[tuple[int, int]] = []
    for indices, addresses in layers:
        points = indices + parity
        begin, end = int(points[0]) >> _blocks.SHIFT, (int(points[-1]) >> _blocks.SHIFT) + 1
        table = np.zeros((groups, (end - begin) << _blocks.SHIFT), np.int64)
        for group in range(groups):
            table[group, points - (begin << _blocks.SHIFT)] = addresses[group]
        pages.append(table)
        numbers.append((begin, end))
    coefficients = _coefficients(tuple(numbers), slices)
    count = sum(end - begin for begin, end in numbers)
    all_pages = np.concatenate(pages, axis=1)
    rows = np.zeros((2, groups, slices << _blocks.SHIFT), np.int64)
    for group in range(groups):
        rows[0, group, : len(before[group])] = before[group]
        rows[1, group, : len(after[group])] = after[group]
    d_pages, d_f, d_rows = tables.upload(all_pages), tables.upload(coefficients), tables.upload(rows)
    blocks = np.uint32(count)
    if count <= SHORT_BLOCKS:
        whole = (d_pages, d_f, d_rows[0], d_rows[1], np.uint64(0), np.uint64(words), blocks)
        short_grid = _grid(words, 128, groups, slices)
        return [lambda: kernels.short(short_grid, (128,), whole)]
    launches: list[Launch] = []
    streamed = words - words % STREAM_WORDS if not (all_pages % WIDE).any() else 0
    if streamed:
        arguments = (d_pages, d_f, d_rows[0], d_rows[1], blocks)
        grid = _grid(streamed, STREAM_WORDS, groups, slices)
        launches.append(
            lambda: kernels.stream(grid, (STREAM_WORDS,), arguments, shared_mem=kernels.stream_bytes)
        )
    if streamed < words:
        rest = (d_pages, d_f, d_rows[0], d_rows[1], np.uint64(streamed), np.uint64(words), blocks)
        rest_grid = _grid(words - streamed, 128, groups, slices)
        launches.append(lambda: kernels.product(rest_grid, (128,), rest))
    return launches


@lru_cache(maxsize=64)
def _coefficients(numbers: tuple[tuple[int, int], ...], slices: int) -> NDArray[np.uint32]:
    order = np.concatenate([np.arange(begin, end) for begin, end in numbers])
    return np.concatenate([_blocks.dyadic(order ^ part) for part in range(slices)])


def delta(
    kernels: Kernels,
    tables: Tables,
    coefficients: NDArray[np.uint32],
    page: Addresses,
    minus: Addresses,
    before: list[Addresses],
    after: list[Addresses],
    length: int,
) -> list[Launch]:
    """Launches of: after[g][r] = before[g][r] ^ coefficients[r] * (page[g] ^ minus[g]), `length` bytes."""
    groups, rows, words = len(before), len(coefficients), length // WORD_BYTES
    both = np.stack([np.stack(before), np.stack(after)])
    aligned = not ((both % WIDE).any() or (page % WIDE).any() or (minus % WIDE).any())
    d_c, d_page, d_minus = tables.upload(coefficients), tables.upload(page), tables.upload(minus)
    d_rows = tables.upload(both)
    common = (d_page, d_minus, d_c, d_rows[0], d_rows[1])
    sizes = (np.uint32(rows), np.uint32(ROWS_EACH))
    depth = (rows + ROWS_EACH - 1) // ROWS_EACH
    launches: list[Launch] = []
    vectors = words // 4 if aligned else 0
    if vectors:
        wide_grid, wide = _grid(vectors, 256, groups, depth), (*common, np.uint64(vectors), *sizes)
        launches.append(lambda: kernels.delta(wide_grid, (256,), wide))
    if vectors * 4 < words:
        rest_grid = _grid(words - vectors * 4, 256, groups, depth)
        rest = (*common, np.uint64(vectors * 4), np.uint64(words), *sizes)
        launches.append(lambda: kernels.delta_words(rest_grid, (256,), rest))
    return launches


def combine(
    kernels: Kernels,
    tables: Tables,
    matrix: NDArray[np.uint32],
    inputs: Addresses,
    extra: Addresses,
    outputs: Addresses,
    page_bytes: int,
    verdict: Any,
) -> Launch:
    """Launch of: outputs[k] = extra[k] ^ sum of matrix[k][i] * inputs[i].

    Where a verdict is given and is not zero, nothing is written.
    """
    rows, columns = matrix.shape
    words = page_bytes // WORD_BYTES
    d_matrix = tables.upload(np.ascontiguousarray(matrix))
    d_in, d_extra, d_out = tables.upload(inputs), tables.upload(extra), tables.upload(outputs)
    gate = np.uint64(0) if verdict is None else verdict
    sizes = (np.uint64(words), np.uint32(columns), np.uint32(rows))
    arguments = (d_matrix, d_in, d_extra, d_out, *sizes, gate, np.uint32(0))
    return lambda: kernels.combine(_grid(words, 128, 1), (128,), arguments)


def verify(
    kernels: Kernels,
    tables: Tables,
    matrix: NDArray[np.uint32],
    inputs: Addresses,
    expected: Addresses,
    page_bytes: int,
    found: Any,
) -> Launch:
    """Launch of: found[0] = found[1 + k] = 1 where expected[k] is not the sum of matrix[k][i] * inputs[i]."""
    rows, columns = matrix.shape
    words = page_bytes // WORD_BYTES
    d_matrix = tables.upload(np.ascontiguousarray(matrix))
    d_in, d_expected = tables.upload(inputs), tables.upload(expected)
    arguments = (d_matrix, d_in, d_expected, np.uint64(words), np.uint32(columns), np.uint32(rows), found)
    return lambda: kernels.verify(_grid(words, 128, 1), (128,), arguments)
