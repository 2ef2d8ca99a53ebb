"""Which CUDA kernel runs where, and why.

There are two builds of the same kernels. "cuda-clmad" uses the carry-less multiply-add of PTX 9.3, compiled
to machine code with the wheel, because drivers older than the compiler cannot take its PTX. "cuda-portable"
multiplies with integer instructions and is compiled on the machine by NVRTC.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from leto_ec._engines import DEVICE_KERNELS, KERNEL_VARIABLE
from leto_ec.errors import CodeError

__all__ = ["CLMAD", "PORTABLE", "Choice", "choose", "cubin_for", "info"]

CLMAD, PORTABLE = DEVICE_KERNELS
FOLDER = Path(__file__).parent

# CLMAD runs on the FP64 pipe, whose width differs by a factor of 30 between chips made for computing and
# others. Only 9.0 was measured (35 a clock and multiprocessor, where the portable product reaches about
# 1.3); the rest is reasoned from the ratio of FP64 to FP32 units that NVIDIA publishes.
FAST: dict[tuple[int, int], str] = {
    (8, 0): "A100: an FP64 pipe of half the FP32 width (reasoned, not measured)",
    (9, 0): "H100, H200: an FP64 pipe of half the FP32 width (measured: 8 T multiply-adds a second)",
    (10, 0): "B200: an FP64 pipe of half the FP32 width (reasoned, not measured)",
}
SLOW = (
    "a chip with a token FP64 pipe, on which CLMAD is slow: about 2 a clock and multiprocessor (not measured)"
)


@dataclass(frozen=True)
class Choice:
    """A kernel for one device."""

    kernel: str
    why: str
    cubin: Path | None  # None: compiled by NVRTC


def cubins() -> dict[tuple[int, int], Path]:
    """Return the cubins of this installation by compute capability."""
    found = {}
    for path in FOLDER.glob("kernels_sm_*.cubin"):
        number = int(path.stem.rpartition("_")[2])
        found[divmod(number, 10)] = path
    return dict(sorted(found.items()))


def cubin_for(capability: tuple[int, int]) -> Path | None:
    """Return the cubin for a chip: machine code is good for its major version, from its minor one up."""
    fit = [key for key in cubins() if key[0] == capability[0] and key[1] <= capability[1]]
    return cubins()[max(fit)] if fit else None


def choose(capability: tuple[int, int], asked: str = "auto") -> Choice:
    """Choose the kernel for a chip; `asked` or LETO_EC_KERNEL may name it.

    Raises
    ------
    CodeError
        The kernel asked for cannot run on this chip.
    """
    why = "asked for"
    variable = os.environ.get(KERNEL_VARIABLE, "auto")
    if asked == "auto" and variable in DEVICE_KERNELS:
        asked, why = variable, f"{KERNEL_VARIABLE} asks for it"
    cubin = cubin_for(capability)
    if asked == CLMAD:
        if cubin is None:
            raise CodeError(
                f"kernel: {CLMAD} has no machine code for compute capability {capability[0]}.{capability[1]} "
                f"in this installation, which has it for {sorted(cubins())}; use {PORTABLE}"
            )
        return Choice(CLMAD, why, cubin)
    if asked == PORTABLE:
        return Choice(PORTABLE, why, None)
    if cubin is None:
        return Choice(PORTABLE, f"no machine code for {capability[0]}.{capability[1]}: {build_note()}", None)
    if capability not in FAST:
        return Choice(PORTABLE, SLOW, None)
    return Choice(CLMAD, FAST[capability], cubin)


@lru_cache(maxsize=1)
def build_note() -> str:
    """Return what the build of this installation says about its cubins."""
    path = FOLDER / "build.json"
    if not path.exists():
        return "this installation was built without cubins"
    return str(json.loads(path.read_text())["note"])


def info() -> dict[str, Any]:
    """Describe what there is for GPU memory.

    Returns
    -------
    dict
        cupy: bool, whether CuPy is installed; cubins: compute capabilities with machine code; build: what
        the build said; devices: list of {name, capability, kernel, why} if CuPy is already imported (asking
        initialises CUDA), else None.
    """
    devices = None
    cupy = sys.modules.get("cupy")
    if cupy is not None:
        devices = []
        for ordinal in range(cupy.cuda.runtime.getDeviceCount()):
            properties = cupy.cuda.runtime.getDeviceProperties(ordinal)
            capability = (properties["major"], properties["minor"])
            choice = choose(capability)
            devices.append(
                {
                    "name": properties["name"].decode(),
                    "capability": capability,
                    "kernel": choice.kernel,
                    "why": choice.why,
                }
            )
    return {
        "cupy": importlib.util.find_spec("cupy") is not None,
        "cubins": list(cubins()),
        "build": build_note(),
        "devices": devices,
    }
