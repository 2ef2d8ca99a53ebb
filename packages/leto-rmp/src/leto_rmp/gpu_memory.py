"""Free GPU memory, measured, without a context: NVML through ctypes (case 4).

A dead trainer's memory is not free at the moment of its death. Whoever promotes a shadow waits until the
memory that is needed *is* free, for a bounded time, and says what is missing otherwise.
"""

from __future__ import annotations

import ctypes
import select
import time
from collections.abc import Callable
from functools import cache
from typing import Any

from leto_rmp.errors import CudaUnavailable, NotEnoughMemory

__all__ = ["free_bytes", "wait_free"]

_POLL_MS = 5


class _Memory(ctypes.Structure):
    _fields_ = [
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    ]


@cache
def _library() -> Any:
    """Return NVML, initialised once, or None where there is none."""
    try:
        library = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    return library if library.nvmlInit_v2() == 0 else None


def free_bytes(device_uuid: str) -> int | None:
    """Return the free bytes of a device (`GPU-...`), None where NVML cannot tell."""
    library = _library()
    if library is None:
        return None
    device, memory = ctypes.c_void_p(), _Memory()
    if library.nvmlDeviceGetHandleByUUID(device_uuid.encode(), ctypes.byref(device)) != 0:
        return None
    if library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) != 0:
        return None
    return int(memory.free)


def wait_free(
    device_uuid: str,
    need_bytes: int,
    timeout_s: float,
    measure: Callable[[str], int | None] = free_bytes,
) -> float:
    """Wait until `need_bytes` are free on the device; return the seconds that it took.

    Raises NotEnoughMemory past the bound, CudaUnavailable where free memory cannot be measured.
    """
    started_s = time.monotonic()
    while True:
        free = measure(device_uuid)
        waited_s = time.monotonic() - started_s
        if free is None:
            raise CudaUnavailable(
                f"free memory of {device_uuid or 'a pool without a GPU'} cannot be measured: NVML "
                "(libnvidia-ml.so.1) is missing or does not know it"
            )
        if free >= need_bytes:
            return waited_s
        if waited_s >= timeout_s:
            raise NotEnoughMemory(
                f"{need_bytes} bytes of GPU memory were not free within {timeout_s} s: {free} are on "
                f"{device_uuid}. A process of the old generation may still be there (nvidia-smi shows who)",
                need=need_bytes,
                have=free,
                source="NVML",
            )
        select.select([], [], [], _POLL_MS / 1000)  # the driver offers no event for freed memory
