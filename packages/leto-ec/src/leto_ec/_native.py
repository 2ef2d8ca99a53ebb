"""The native kernels: a plain C library without any Python ABI, loaded with ctypes.

ctypes releases the GIL during a call, and the library keeps no state, so threads may call it at will.
The interface is native/leto_ec.h; ABI below must equal the number there, so that a stale library is
found out instead of trusted.
"""

from __future__ import annotations

import ctypes
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

__all__ = ["Library", "library", "load"]

ABI = 3
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
    index, size, pointer = ctypes.c_uint32, ctypes.c_size_t, ctypes.c_void_p
    for function, result, *arguments in (
        ("kernel_name", ctypes.c_char_p, index),
        ("kernel_supported", ctypes.c_int, index),
        ("kernel_basis", ctypes.c_int, index),
        ("kernel_block_bytes", size, index),
        ("kernel_block_cost", size, index),
        ("kernel_product_cost", size, index),
        # kernel, blocks, coefficients, prepared
        ("prepare", ctypes.c_int, index, size, pointer, pointer),
        # kernel, rows, columns
        ("matrix_bytes", size, index, size, size),
        # kernel, rows, columns, coefficients, prepared
        ("prepare_matrix", ctypes.c_int, index, size, size, pointer, pointer),
        # pieces of work, their number
        ("run", ctypes.c_int, pointer, size),
        # kernel, threads, rows, bytes, coefficients, step, delta, parity, stride
        ("update", ctypes.c_int, index, size, size, size, size, size, size, size, size),
    ):
        entry = getattr(handle, f"leto_ec_{function}")
        entry.restype, entry.argtypes = result, arguments
    kernels: list[str] = []
    unsupported: list[str] = []
    number = 0
    while (found_name := handle.leto_ec_kernel_name(number)) is not None:
        (kernels if handle.leto_ec_kernel_supported(number) else unsupported).append(found_name.decode())
        number += 1
    return Library(handle, str(path), tuple(kernels), tuple(unsupported))


@lru_cache(maxsize=1)
def library() -> Library:
    """Return this installation's library; loaded once."""
    return load(LIBRARY)
