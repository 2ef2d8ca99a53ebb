"""Bytes in host memory (numpy) or on a device (torch): the few things that are done to both.

Role: lets the same protocol, recovery and fault injection run over memory on a GPU. Work on device memory is
put on torch's current stream and may be under way when a function returns; what is returned to the host (a
copy into numpy, a comparison) is complete.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

__all__ = ["copy", "equal", "flat", "on_device", "saved", "zeros_like"]


def on_device(array: Any) -> bool:
    """Whether these are bytes of a torch tensor; otherwise numpy has them."""
    return isinstance(array, torch.Tensor)


def flat(pages: Any, dtype: torch.dtype) -> torch.Tensor:
    """One-dimensional tensor over the same bytes."""
    line = pages.reshape(-1)
    return (line if isinstance(line, torch.Tensor) else torch.from_numpy(line)).view(dtype)


def zeros_like(array: Any) -> Any:
    """Private memory of the same kind, shape and place."""
    return torch.zeros_like(array) if on_device(array) else np.zeros_like(array)


def saved(array: Any) -> Any:
    """A private copy in the same place."""
    return array.clone() if on_device(array) else np.array(array, copy=True)


def copy(target: Any, source: Any) -> None:
    """Bytes from anywhere to anywhere, of one shape. From or to the host the copy is complete on return."""
    if on_device(target):
        target.copy_(source if on_device(source) else torch.from_numpy(source))
    elif on_device(source):
        torch.from_numpy(target).copy_(source)
    else:
        np.copyto(target, source)


def equal(place: Any, content: Any) -> bool:
    """Whether both hold the same bytes; they are in one place."""
    if on_device(place):
        return bool(torch.equal(place, content))
    return bool(np.array_equal(place, content))
