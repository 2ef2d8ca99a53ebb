"""Whether there is a GPU for a test."""

from __future__ import annotations

import pytest
import torch

from leto_rmp import driver
from leto_rmp.errors import CudaUnavailable


def need_gpu() -> None:
    """Skip where there is no GPU or no package for it; a GPU that does not work is a failure."""
    try:
        driver.open_driver().device(0)
    except CudaUnavailable as error:
        pytest.skip(f"no CUDA device: {error.message}")
    pytest.importorskip("cupy", reason="needs CuPy: pip install 'leto-ec[cuda]'")
    torch.cuda.init()


__all__ = ["need_gpu"]
