"""The native kernels: a plain C library without any Python ABI, loaded with ctypes.

ctypes releases the GIL during a call, and the library keeps no state, so threads may call it at will.
The interface is native/leto_ec.h; ABI below must equal the number there, so that a stale library is
found out instead of trusted.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from leto_ec._buffers import PageGroup

__all__ = ["Library", "combine_with", "library", "load"]

ABI = 1
LIBRARY = Path(__file__).with_name("_kernels.dll" if sys.platform == "win32" else "_kernels.so")


@dataclass(frozen=True)
class Library:
    """The loaded library, or why there is none."""

    handle: ctypes.CDLL | None = None
    path: str | None = None
    kernels: tuple[str, ...] = ()  # usable here, fastest first
    unsupported: tuple[str, ...] = ()
    problem: str = ""


def load(path: Path) -> Library:
    """Load a library of kernels; whatever is wrong with it is told in `problem`."""
    if not path.exists():
        return Library(problem=f"no native library was built: {path.name} is missing")
    try:
        handle = ctypes.CDLL(str(path))
        handle.leto_ec_abi.restype = ctypes.c_uint32
        handle.leto_ec_abi.argtypes = ()
        found = int(handle.leto_ec_abi())
    except (OSError, AttributeError) as error:
        return Library(problem=f"the native library {path} cannot be loaded: {error}")
    if found != ABI:
        return Library(problem=f"the native library {path} has interface {found}, not {ABI}: build it again")
    handle.leto_ec_kernel_name.restype = ctypes.c_char_p
    handle.leto_ec_kernel_name.argtypes = (ctypes.c_uint32,)
    handle.leto_ec_kernel_supported.restype = ctypes.c_int
    handle.leto_ec_kernel_supported.argtypes = (ctypes.c_uint32,)
    handle.leto_ec_combine.restype = ctypes.c_int
    handle.leto_ec_combine.argtypes = (
        ctypes.c_char_p,
        ctypes.c_size_t,  # rows
        ctypes.c_size_t,  # columns
        ctypes.c_size_t,  # bytes
        ctypes.c_void_p,  # coefficients
        ctypes.c_void_p,  # inputs
        ctypes.c_void_p,  # base or null
        ctypes.c_void_p,  # outputs
    )
    kernels: list[str] = []
    unsupported: list[str] = []
    index = 0
    while (name := handle.leto_ec_kernel_name(index)) is not None:
        (kernels if handle.leto_ec_kernel_supported(index) else unsupported).append(name.decode())
        index += 1
    return Library(handle, str(path), tuple(kernels), tuple(unsupported))


@lru_cache(maxsize=1)
def library() -> Library:
    """Return this installation's library; loaded once."""
    return load(LIBRARY)


def combine_with(
    kernel: str, source: Library | None = None
) -> Callable[[NDArray[np.uint32], PageGroup, PageGroup | None, PageGroup], None]:
    """Return the function that runs one kernel; its contract is that of `_reference.combine`."""
    handle = (source or library()).handle
    assert handle is not None
    name = kernel.encode()
    call = handle.leto_ec_combine

    def combine(
        coefficients: NDArray[np.uint32], inputs: PageGroup, base: PageGroup | None, outputs: PageGroup
    ) -> None:
        rows, columns = coefficients.shape
        assert (rows, columns) == (len(outputs), len(inputs))
        matrix = np.ascontiguousarray(coefficients, np.uint32)
        status = call(
            name,
            rows,
            columns,
            outputs.page_bytes,
            matrix.ctypes.data,
            inputs.addresses.ctypes.data,
            None if base is None else base.addresses.ctypes.data,
            outputs.addresses.ctypes.data,
        )
        if status == 1:
            raise MemoryError("leto_ec: no memory for the accumulators of a strip")
        if status != 0:
            raise RuntimeError(f"leto_ec: kernel {kernel} returned {status}: a bug, please report it")

    return combine
