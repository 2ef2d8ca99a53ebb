"""The transaction kernel, compiled for the processor, behind the same launches as on a GPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path
from typing import Any

import torch

import leto_ec.cuda
import leto_rmu.cuda.kernels
from leto_rmu.cuda import fused
from leto_rmu.cuda.fused import FusedChunks
from leto_rmu.cuda.kernels import MACHINE_CODE
from leto_rmu.views import RankMemory

KERNELS = (
    *("adamw_f32", "adamw_bf16", "adamw_f16", "sgd_f32", "sgd_bf16", "sgd_f16"),
    *("adamw_f32_lean", "adamw_bf16_lean", "adamw_f16_lean"),
)


def compiler() -> str | None:
    return shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def build(folder: Path, optimize: str = "-O2", first: Path | None = None, exact: bool = False) -> ctypes.CDLL:
    """Compile into ``folder``; raise CalledProcessError.

    ``first``: its headers come before ours. ``exact``: operators of the language keep denormal numbers, which
    they flush otherwise, as in a build by NVRTC.
    """
    out, here = folder / f"host_kernel{'_exact' * exact}.so", Path(__file__).parent
    places = ((first,) if first else ()) + (here, leto_ec.cuda.include_dir(), leto_rmu.cuda.kernels.FOLDER)
    includes = [f"-I{place}" for place in places]
    options = ["-std=c++17", optimize, "-ffp-contract=off", "-Wno-unknown-pragmas", "-shared", "-fPIC"]
    options += ["-DLETO_RMU_EXACT"] * exact
    command = [str(compiler()), *options, *includes, "-o", str(out), str(here / "host_kernel.cpp")]
    subprocess.run(command, check=True, capture_output=True, timeout=300)
    library = ctypes.CDLL(str(out))
    library.run.argtypes = [ctypes.c_int, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint64, ctypes.c_uint]
    pointers = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p]
    library.apply.argtypes = [ctypes.c_int, ctypes.c_uint64, *pointers]
    library.roots.argtypes = [ctypes.c_uint32, ctypes.c_uint32]
    library.quotients.argtypes = [ctypes.c_uint64, ctypes.c_void_p, ctypes.c_void_p]
    library.roots.restype = library.quotients.restype = ctypes.c_int64
    return library


class _Functions:
    build = MACHINE_CODE

    def function(self, name: str) -> int:
        return KERNELS.index(name.removeprefix("leto_rmu_"))


class HostChunks(FusedChunks):
    """`FusedChunks` over memory of the processor; ``table`` as little shared memory as one likes."""

    def __init__(
        self,
        memory: RankMemory,
        library: ctypes.CDLL,
        table: int = 64,
        seed: int = 0,
        variant: str = "plain",
    ) -> None:
        self.host, self._table, self.seed = library, table, seed
        super().__init__(memory, _Functions(), variant)  # type: ignore[arg-type]

    def _shared_memory(self) -> None:
        rule = self.rule
        stages = fused.STAGES * (rule.planes * rule.run + rule.run) * fused.THREADS * 4
        self._table = min(self._table, self.plan.geometry.subblocks)
        self._shared = stages + self._table * (16 * 8 + rule.run * 20) + 8

    def _run(self, argument: Any) -> None:
        self.seed += 1
        blocks = self.words // fused.THREADS
        address = argument.ctypes.data if hasattr(argument, "ctypes") else None
        assert address is not None
        self.host.run(self.function, address, blocks, self._shared, self.seed)

    def apply(self, gradient: torch.Tensor, planes: list[torch.Tensor], step: Any) -> None:
        """The rule, element by element, in place."""
        pointers = (ctypes.c_void_p * len(planes))(*(plane.data_ptr() for plane in planes))
        rule = 0 if self.rule.kernel == "adamw" else 1
        self.host.apply(rule, gradient.numel(), gradient.data_ptr(), pointers, step.ctypes.data)
