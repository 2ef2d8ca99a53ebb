"""The engines that carry out the arithmetic, and the choice among them at run time."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from leto_ec import _native, _reference
from leto_ec._buffers import PageGroup
from leto_ec._version import __version__
from leto_ec.errors import CodeError

__all__ = ["Engine", "info", "select"]

Combine: TypeAlias = Callable[[NDArray[np.uint32], PageGroup, PageGroup | None, PageGroup], None]

KERNEL_VARIABLE = "LETO_EC_KERNEL"
_log = logging.getLogger("leto_ec")


@dataclass(frozen=True)
class Engine:
    """A named way to compute outputs = base ^ coefficients x inputs."""

    name: str
    combine: Combine


@lru_cache(maxsize=1)
def _warn_slow(reason: str) -> None:
    """Say once a process that only the slow engine is there (a log record, so that -W error is unharmed)."""
    _log.warning(
        "leto_ec works without its native kernels, some hundred times slower than it could (%s); "
        "install a wheel for this platform, or a C compiler, and reinstall leto-ec",
        reason,
    )


def _engines() -> dict[str, Engine]:
    """Return what can run here, fastest first; the reference is always last."""
    engines = {name: Engine(name, _native.combine_with(name)) for name in _native.library().kernels}
    engines["reference"] = Engine("reference", _reference.combine)
    return engines


def _choose(kernel: str) -> tuple[Engine, str]:
    engines = _engines()
    why = "asked for"
    if kernel == "auto":
        kernel = os.environ.get(KERNEL_VARIABLE, "auto")
        why = f"{KERNEL_VARIABLE} asks for it"
    if kernel == "auto":
        name = next(iter(engines))
        return engines[
            name
        ], "the fastest that this processor supports" if name != "reference" else _native.library().problem
    if kernel not in engines:
        raise CodeError(
            f"kernel: one of auto, {', '.join(engines)} is expected on this machine, found {kernel!r}"
        )
    return engines[kernel], why


def select(kernel: str) -> Engine:
    """Return the engine of this name; "auto" takes the fastest, or what LETO_EC_KERNEL names.

    Raises
    ------
    CodeError
        There is no such engine on this machine.
    """
    engine, why = _choose(kernel)
    if engine.name == "reference" and kernel == "auto" and KERNEL_VARIABLE not in os.environ:
        _warn_slow(why)
    return engine


def info() -> dict[str, Any]:
    """Describe this installation.

    Returns
    -------
    dict
        version: of leto_ec; kernels: names that work here, fastest first; kernel: what "auto" takes;
        why: the reason for that choice; native: bool; library: path of the shared library or None;
        unsupported: native kernels that were built but that this processor lacks.
    """
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
    }
