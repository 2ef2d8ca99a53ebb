"""The kernels of this package, loaded for one device: which build runs, and why.

Role: as in leto-ec there are two builds. One uses the carry-less multiply-add of PTX 9.3 and was compiled
to machine code with the wheel; the other multiplies with integer instructions and is compiled on the
machine by NVRTC. Whichever leto-ec has chosen for the device runs here too. The exact same bits come from
both, though CuPy has NVRTC flush denormal numbers (-ftz=true, which an option of ours cannot take back): the
source computes by instructions that do not (device.cuh).
"""

from __future__ import annotations

import importlib.util
import json
import logging
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

import leto_ec.cuda

__all__ = ["Library", "info", "launch", "library", "ordinal"]

FOLDER = Path(__file__).parent
SOURCE = FOLDER / "kernels.cu"
CLMAD = "cuda-clmad"
MACHINE_CODE = "machine code"  # `Library.build`, if not NVRTC
_log = logging.getLogger("leto_rmu")


@dataclass(frozen=True)
class Library:
    """Loaded kernels of one device. ``build``: "machine code" or "NVRTC"."""

    module: Any
    build: str
    why: str

    def function(self, name: str) -> Any:
        """A kernel by name."""
        return self.module.get_function(name)


def cubins() -> dict[tuple[int, int], Path]:
    """Machine code of this installation, by compute capability."""
    return dict(
        sorted((divmod(int(p.stem.rpartition("_")[2]), 10), p) for p in FOLDER.glob("kernels_sm_*.cubin"))
    )


def cubin_for(capability: tuple[int, int]) -> Path | None:
    """Machine code for a chip: good for its major version, from its minor one up."""
    fit = [key for key in cubins() if key[0] == capability[0] and key[1] <= capability[1]]
    return cubins()[max(fit)] if fit else None


def build_note() -> str:
    """What the build of this installation says about its machine code."""
    path = FOLDER / "build.json"
    if not path.exists():
        return "this installation was built without machine code"
    return str(json.loads(path.read_text())["note"])


def library(device: torch.device, chosen: str) -> Library:
    """Load the kernels for a device; ``chosen`` is the name of leto-ec's kernel there.

    Without machine code for the chip NVRTC compiles, in seconds, once a machine (CuPy's cache).
    """
    return _loaded(ordinal(device), chosen)


def ordinal(device: torch.device) -> int:
    """Number of a device; without one it is the current one."""
    return device.index if device.index is not None else torch.cuda.current_device()


@lru_cache(maxsize=64)
def _loaded(device: int, chosen: str) -> Library:
    import cupy

    capability = torch.cuda.get_device_capability(device)
    with cupy.cuda.Device(device):
        why = f"leto-ec chose {chosen}"
        if chosen == CLMAD:
            path = cubin_for(capability)
            if path is None:
                why = (
                    f"no machine code for compute capability {capability[0]}.{capability[1]}: {build_note()}"
                )
            else:
                module = cupy.RawModule(path=str(path))
                try:
                    module.get_function("leto_rmu_mark").num_regs  # noqa: B018 (loads the module)
                except cupy.cuda.driver.CUDADriverError as error:
                    why = f"the driver does not take {path}: {error}"
                else:
                    return Library(module, MACHINE_CODE, why)
            _log.warning("leto_rmu: %s; kernels that NVRTC compiles run instead, more slowly", why)
        options = ("-std=c++17", f"-I{leto_ec.cuda.include_dir()}", f"-I{FOLDER}")
        return Library(cupy.RawModule(code=SOURCE.read_text(), options=options), "NVRTC", why)


def info() -> dict[str, Any]:
    """Describe what there is for GPU memory.

    Returns
    -------
    dict
        cupy: bool, whether CuPy is installed; cubins: compute capabilities with machine code; build: what the
        build said; leto_ec: ``leto_ec.cuda.info()``, whose choice of a kernel is followed here.
    """
    return {
        "cupy": importlib.util.find_spec("cupy") is not None,
        "cubins": list(cubins()),
        "build": build_note(),
        "leto_ec": leto_ec.cuda.info(),
    }


class _Foreign:
    """torch's stream, as the CUDA stream protocol has it."""

    def __init__(self, address: int) -> None:
        self._address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._address


@lru_cache(maxsize=256)
def _cupy_stream(address: int, device: int) -> Any:
    import cupy

    if address == 0:
        return cupy.cuda.Stream.null
    if hasattr(cupy.cuda.Stream, "from_external"):  # CuPy 14 and later
        return cupy.cuda.Stream.from_external(_Foreign(address))
    return cupy.cuda.ExternalStream(address, device)


def launch(
    function: Any, blocks: int, threads: int, argument: Any, device: torch.device, shared_bytes: int = 0
) -> None:
    """Put a kernel with one argument, a numpy structure, on torch's current stream."""
    stream = torch.cuda.current_stream(device)
    if stream.device_index != torch.cuda.current_device():
        with torch.cuda.device(stream.device_index):
            launch(function, blocks, threads, argument, device, shared_bytes)
        return
    with _cupy_stream(stream.cuda_stream, stream.device_index):
        function((blocks,), (threads,), (argument,), shared_mem=shared_bytes)
