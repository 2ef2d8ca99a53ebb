"""Checks of integers and indices, and the cutting of byte runs into words."""

from __future__ import annotations

import operator
from collections.abc import Iterable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from leto_ec._buffers import PageGroup
from leto_ec.errors import CodeError
from leto_ec.field import WORD_BYTES

__all__ = ["every", "index_set", "integer", "whole_words"]


@lru_cache(maxsize=32)
def every(count: int) -> NDArray[np.int64]:
    """Return 0 .. count - 1, read-only and the same object every time."""
    indices = np.arange(count, dtype=np.int64)
    indices.flags.writeable = False
    return indices


def integer(value: int, what: str, low: int, high: int) -> int:
    """Return `value` as an int of low..high, or raise CodeError."""
    try:
        number = operator.index(value)
    except TypeError as error:
        raise CodeError(f"{what}: an integer is expected, found {type(value).__name__}") from error
    if not low <= number <= high:
        raise CodeError(f"{what}: {low} to {high} is expected, found {number}")
    return number


def index_set(values: Iterable[int], what: str, count: int) -> tuple[int, ...]:
    """Return distinct indices below `count` in ascending order, or raise CodeError."""
    indices = tuple(integer(value, what, 0, count - 1) for value in values)
    if len(set(indices)) != len(indices):
        raise CodeError(f"{what}: every index once is expected, found {list(indices)}")
    return tuple(sorted(indices))


def whole_words(change: PageGroup, start: int) -> list[tuple[PageGroup, int]]:
    """Cut a run of changed bytes into (piece, page offset) of whole words.

    Only the first and the last word may be partial: they are copied and filled up with zero bytes, which
    change nothing. The words between are used where they are.
    """
    run = change.rows[0]
    stop = start + run.size
    pieces: list[tuple[PageGroup, int]] = []
    at = start
    while at < stop:
        word = at - at % WORD_BYTES
        whole_end = stop - stop % WORD_BYTES
        if at == word and whole_end > at:
            pieces.append((PageGroup([run[at - start : whole_end - start]], whole_end - at), at))
            at = whole_end
        else:
            end = min(word + WORD_BYTES, stop)
            filled = np.zeros(WORD_BYTES, np.uint8)
            filled[at - word : end - word] = run[at - start : end - start]
            pieces.append((PageGroup([filled], WORD_BYTES), word))
            at = end
    return pieces
