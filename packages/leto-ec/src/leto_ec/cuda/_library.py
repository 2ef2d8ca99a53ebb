"""Loaded kernels, one set for each device and build."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import cupy

from leto_ec.cuda._choice import CLMAD, FOLDER, PORTABLE, Choice, choose

__all__ = ["Kernels", "kernels"]

_log = logging.getLogger("leto_ec")

# name of the streaming kernel: its dynamic shared memory; fewer bytes, fewer loads in flight
STREAMS = {f"leto_ec_product_stream_{kib}": kib << 10 for kib in (48, 40, 32)}
RESERVED = 1 << 10  # bytes of shared memory that the system takes for every block of threads


@dataclass(frozen=True)
class Kernels:
    """Kernels on one device."""

    choice: Choice
    product: Any
    short: Any
    stream: Any
    stream_bytes: int
    delta: Any
    delta_words: Any
    combine: Any
    verify: Any


def kernels(device: int, asked: str) -> Kernels:
    """Load the kernels for a device; `asked` is "auto" or a name. Compiling takes seconds, once a machine
    (CuPy's cache).

    Raises
    ------
    CodeError
        The kernel asked for cannot run there.
    """
    properties = _properties(device)
    return _loaded(device, choose((properties["major"], properties["minor"]), asked), asked == "auto")


@lru_cache(maxsize=64)
def _properties(device: int) -> dict[str, Any]:
    found: dict[str, Any] = cupy.cuda.runtime.getDeviceProperties(device)
    return found


@lru_cache(maxsize=64)
def _loaded(device: int, choice: Choice, may_change: bool) -> Kernels:
    with cupy.cuda.Device(device):
        if choice.kernel == CLMAD:
            module = cupy.RawModule(path=str(choice.cubin))
            try:
                module.get_function("leto_ec_product").num_regs  # noqa: B018 (loads the module)
            except cupy.cuda.driver.CUDADriverError as error:
                if not may_change:
                    raise
                note = f"the driver does not take {choice.cubin}: {error}"
                _log.warning("leto_ec: %s; the slower %s runs instead", note, PORTABLE)
                return _loaded(device, Choice(PORTABLE, note, None), may_change)
        else:
            source = (FOLDER / "kernels.cu").read_text()
            module = cupy.RawModule(code=source, options=("-std=c++17", f"-I{FOLDER}"))
        name, size = _stream_for(_properties(device)["sharedMemPerMultiprocessor"])
        stream = module.get_function(name)
        stream.max_dynamic_shared_size_bytes = size
        functions = [
            module.get_function(f"leto_ec_{each}")
            for each in ("product", "product_short", "delta", "delta_words", "combine", "verify")
        ]
        product, short, delta, delta_words, combine, verify = functions
        return Kernels(choice, product, short, stream, size, delta, delta_words, combine, verify)


def _stream_for(shared: int) -> tuple[str, int]:
    """Return the streaming kernel of which four blocks fit the shared memory of a multiprocessor."""
    fit = [(name, size) for name, size in STREAMS.items() if 4 * (size + RESERVED) <= shared]
    return fit[0] if fit else list(STREAMS.items())[-1]
