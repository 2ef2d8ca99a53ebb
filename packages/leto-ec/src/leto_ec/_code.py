"""What the operations know of a code: its parameters and how to compute (breaks an import cycle)."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from leto_ec._engines import Engine

__all__ = ["Code"]


class Code(Protocol):
    """A `ReedSolomon`, as seen from below."""

    @property
    def data(self) -> int: ...

    @property
    def parity(self) -> int: ...

    @property
    def threads(self) -> int: ...

    @property
    def device_kernel(self) -> str: ...

    @property
    def why(self) -> str: ...

    @property
    def coefficients(self) -> NDArray[np.uint32]: ...

    def _column(self, index: int) -> tuple[int, int]: ...

    @property
    def engine(self) -> Engine: ...
