"""What an engine is: it turns sums over pages into work that is ready to run, as often as one likes.

A `Work` holds addresses and tables; the pages' contents may change between runs. It is for one thread at a
time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from leto_ec._buffers import PageGroup

__all__ = ["Engine", "Layer", "Steps", "Work"]

Layer = tuple[NDArray[np.int64], PageGroup]


class Work(Protocol):
    """Something that can be done again and again."""

    def prepare(self) -> None:
        """Look up beforehand what `run` would otherwise look up each time."""

    def run(self) -> None:
        """Do it."""


class Steps:
    """Work of several parts, one after the other."""

    def __init__(self, parts: Sequence[Callable[[], None]]) -> None:
        self._parts = parts

    def prepare(self) -> None:
        """Nothing is to be looked up."""

    def run(self) -> None:
        for part in self._parts:
            part()


class Engine(ABC):
    """A named way to compute outputs = base ^ coefficients x inputs. Arguments were checked by the caller.

    `base` None stands for zero pages and may be `outputs`. In it and in inputs, address 0 is a page of zeros.
    """

    name: str

    @abstractmethod
    def combination(
        self,
        coefficients: NDArray[np.uint32],
        inputs: PageGroup,
        base: PageGroup | None,
        outputs: PageGroup,
        threads: int = 1,
    ) -> Work:
        """Any matrix: outputs[r] = base[r] ^ sum over k of coefficients[r, k] * inputs[k]."""

    @abstractmethod
    def encoding(
        self,
        matrix: NDArray[np.uint32],
        rows: NDArray[np.int64],
        layers: list[Layer],
        base: PageGroup | None,
        outputs: PageGroup,
        threads: int = 1,
    ) -> Work:
        """Part of the code's matrix: outputs[i] = base[i] ^ sum of matrix[rows[i], j] * page j.

        `layers` hold pages with their indices j, ascending in a layer; two layers may have the same j.
        """

    def joined(self, works: Sequence[Work]) -> Work:
        """All of them, one after the other."""
        return works[0] if len(works) == 1 else Steps([work.run for work in works])

    def update_page(
        self, column: int, step: int, parity: tuple[int, int, int], delta: int, page_bytes: int, threads: int
    ) -> bool:
        """Do the commonest update without any tables, or return False: the engine has no such way.

        `column` is the address of the coefficient of row 0, the others follow `step` words apart; `parity` is
        the address of row 0, the bytes to the next and the number of rows.
        """
        return False

    def combine(
        self,
        coefficients: NDArray[np.uint32],
        inputs: PageGroup,
        base: PageGroup | None,
        outputs: PageGroup,
        threads: int = 1,
    ) -> None:
        """Do a combination at once."""
        self.combination(coefficients, inputs, base, outputs, threads).run()

    def apply(
        self,
        matrix: NDArray[np.uint32],
        rows: NDArray[np.int64],
        layers: list[Layer],
        base: PageGroup | None,
        outputs: PageGroup,
        threads: int = 1,
    ) -> None:
        """Do an encoding at once."""
        self.encoding(matrix, rows, layers, base, outputs, threads).run()
