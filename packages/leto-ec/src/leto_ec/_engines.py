"""The engines that carry out the arithmetic, and the choice among them at run time."""

from __future__ import annotations

import logging
import os
from functools import lru_cache, partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from leto_ec import _native, _reference
from leto_ec._buffers import PageGroup
from leto_ec._kernel import Kernel
from leto_ec._version import __version__
from leto_ec._work import Engine, Layer, Steps, Work
from leto_ec.errors import CodeError

__all__ = ["DEVICE_KERNELS", "Engine", "default_threads", "info", "is_device_kernel", "select"]

KERNEL_VARIABLE = "LETO_EC_KERNEL"
THREADS_VARIABLE = "LETO_EC_THREADS"
DEVICE_KERNELS = ("cuda-clmad", "cuda-portable")
_log = logging.getLogger("leto_ec")


class _Reference(Engine):
    """The numpy engine."""

    name = "reference"

    def combination(
        self,
        coefficients: NDArray[np.uint32],
        inputs: PageGroup,
        base: PageGroup | None,
        outputs: PageGroup,
        threads: int = 1,
    ) -> Work:
        return Steps([partial(_reference.combine, coefficients, inputs, base, outputs)])

    def encoding(
        self,
        matrix: NDArray[np.uint32],
        rows: NDArray[np.int64],
        layers: list[Layer],
        base: PageGroup | None,
        outputs: PageGroup,
        threads: int = 1,
    ) -> Work:
        columns = np.concatenate([indices for indices, _ in layers])
        inputs = PageGroup.joined([group for _, group in layers], outputs.page_bytes)
        return self.combination(matrix[np.ix_(rows, columns)], inputs, base, outputs)


@lru_cache(maxsize=1)
def _warn_slow(reason: str) -> None:
    """Say once a process that only the slow engine is there (a log record, so that -W error is unharmed)."""
    _log.warning(
        "leto_ec works without its native kernels, some hundred times slower than it could (%s); "
        "install a wheel for this platform, or a C compiler, and reinstall leto-ec",
        reason,
    )


@lru_cache(maxsize=8)
def _of(library: _native.Library) -> dict[str, Engine]:
    engines: dict[str, Engine] = {name: Kernel(name, library) for name in library.kernels}
    engines["reference"] = _Reference()
    return engines


def _engines() -> dict[str, Engine]:
    """Return what can run here, fastest first; the reference is always last."""
    return _of(_native.library())


def _choose(kernel: str) -> tuple[Engine, str]:
    engines = _engines()
    why = "asked for"
    if kernel == "auto":
        kernel = os.environ.get(KERNEL_VARIABLE, "auto")
        kernel = "auto" if is_device_kernel(kernel) else kernel
        why = f"{KERNEL_VARIABLE} asks for it"
    if kernel == "auto":
        name = next(iter(engines))
        return engines[
            name
        ], "the fastest that this processor supports" if name != "reference" else _native.library().problem
    if kernel not in engines:
        raise CodeError(
            f"kernel: one of auto, {', '.join([*engines, *DEVICE_KERNELS])} is expected on this machine, "
            f"found {kernel!r}"
        )
    return engines[kernel], why


def is_device_kernel(kernel: str) -> bool:
    """True for the name of a CUDA kernel (`leto_ec.cuda` chooses among them)."""
    return kernel in DEVICE_KERNELS


def default_threads() -> int:
    """Return what LETO_EC_THREADS says, or 1.

    Raises
    ------
    CodeError
        It says something else than 1 to 256.
    """
    text = os.environ.get(THREADS_VARIABLE, "1")
    if not text.isdecimal() or not 1 <= int(text) <= 256:
        raise CodeError(f"{THREADS_VARIABLE}: 1 to 256 is expected, found {text!r}")
    return int(text)


def select(kernel: str) -> tuple[Engine, str]:
    """Return the engine of this name and why it is taken; "auto": the fastest, or what LETO_EC_KERNEL names.

    Raises
    ------
    CodeError
        There is no such engine on this machine.
    """
    engine, why = _choose(kernel)
    if engine.name == "reference" and kernel == "auto" and KERNEL_VARIABLE not in os.environ:
        _warn_slow(why)
    return engine, why


def info() -> dict[str, Any]:
    """Describe this installation.

    Returns
    -------
    dict
        version: of leto_ec; kernels: names that work here, fastest first; kernel: what "auto" takes;
        why: the reason for that choice; native: bool; library: path of the shared library or None;
        unsupported: native kernels that were built but that this processor lacks; threads: of one call, where
        `threads` is not given; cuda: what there is for GPU memory (`leto_ec.cuda.info`).
    """
    from leto_ec import cuda  # here, because cuda needs CodeError and this module first

    engine, why = _choose("auto")
    library = _native.library()
    return {
        "version": __version__,
        "kernels": list(_engines()),
        "kernel": engine.name,
        "why": why,
        "native": bool(library.kernels),
        "library": library.path,
        "unsupported": list(library.unsupported),
        "threads": default_threads(),
        "cuda": cuda.info(),
    }
