"""Where callers' buffers are, host or GPU, without importing a GPU library."""

from __future__ import annotations

from typing import Any

import numpy as np

from leto_ec.errors import BufferMismatch

__all__ = ["on_device"]

DLPACK_CUDA = (2, 13)  # kDLCUDA, kDLCUDAManaged


def _is_cuda(buffer: Any) -> bool:
    """True for GPU memory. What is not a buffer counts as the host's: the host's checks then name it."""
    if isinstance(buffer, np.ndarray):
        return False
    device = getattr(buffer, "device", None)
    kind = getattr(device, "type", None)
    if isinstance(kind, str):  # a torch tensor
        return kind == "cuda"
    if hasattr(buffer, "__cuda_array_interface__"):
        return True
    if hasattr(buffer, "__dlpack_device__"):
        return int(buffer.__dlpack_device__()[0]) in DLPACK_CUDA
    return False


def on_device(buffers: dict[str, Any]) -> bool:
    """Return whether these buffers (None: not given) are on a GPU; refuse a mixture.

    Raises
    ------
    BufferMismatch
        Some are in host memory and some on a GPU.
    """
    found: dict[bool, str] = {}
    for what, buffer in buffers.items():
        if isinstance(buffer, (list, tuple)):
            for index, row in enumerate(buffer):
                if row is not None:
                    found.setdefault(_is_cuda(row), f"{what}[{index}]")
        elif buffer is not None:
            found.setdefault(_is_cuda(buffer), what)
    if len(found) == 2:
        raise BufferMismatch(
            f"all buffers on the host or all on one GPU are expected, but {found[True]} is on a GPU "
            f"and {found[False]} is not"
        )
    return True in found
