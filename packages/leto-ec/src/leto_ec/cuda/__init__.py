"""The erasure code on NVIDIA GPUs: which kernel runs, plans for the hot path, and the header to fuse with.

`ReedSolomon` takes GPU buffers by itself. A `Plan` is for those who call the same thing again and again: it
holds the device's tables, so that `run` only launches kernels; it neither allocates nor synchronises.
`include_dir` is where `gf32.cuh` is, for kernels that update parity on the way. Needs CuPy (`pip install
leto-ec[cuda]`), which is imported with the first GPU buffer and not before. Theory: `leto_ec.field`.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from leto_ec.cuda._choice import info

if TYPE_CHECKING:
    from leto_ec.cuda._plan import Plan
    from leto_ec.cuda._reconstruct import ReconstructPlan

__all__ = ["Plan", "ReconstructPlan", "block_coefficients", "include_dir", "info"]


def __getattr__(name: str) -> Any:
    if name in ("Plan", "ReconstructPlan"):  # they import CuPy
        from leto_ec.cuda import _plan, _reconstruct

        return _plan.Plan if name == "Plan" else _reconstruct.ReconstructPlan
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def include_dir() -> Path:
    """Return the folder of `gf32.cuh`, for `-I` of nvcc or NVRTC."""
    return Path(__file__).parent


def block_coefficients(first: int, count: int, rows: int = 0) -> NDArray[np.uint32]:
    """Return the coefficients that `multiply_add` of `gf32.cuh` takes for blocks first .. first + count - 1.

    Parameters
    ----------
    first, count : int
        Blocks of 16 points: page j of a code with H rows is at position (H + j) % 16 of block (H + j) // 16.
    rows : int
        Slice of 16 parity rows: 0 for rows 0 to 15.

    Returns
    -------
    uint32 array of shape (count, 16).
    """
    from leto_ec import _blocks

    return _blocks.dyadic(np.arange(first, first + count) ^ rows)
