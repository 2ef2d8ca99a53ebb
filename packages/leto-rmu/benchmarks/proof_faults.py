"""How `gpu_aborts` interrupts an update: builds of kernels that trap, and copies that leave random bytes."""

from __future__ import annotations

import importlib
import os
import signal
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from proof_place import Place

from leto_rmu import Executor, Op


class AtOne(Executor):
    """Knows when it is the turn of the n-th operation of one of the names, counted from 0."""

    def __init__(self, names: tuple[str, ...], count: int) -> None:
        self.names, self.left = names, count

    def its_turn(self, op: Op) -> bool:
        """Whether it is that operation's, or that of a later one of the names; to be asked once for each."""
        named = op.name in self.names
        self.left -= named
        return named and self.left < 0


class Scramble(AtOne):
    """Random bytes in the n-th operation of one of the names, then SIGKILL."""

    def __init__(self, names: tuple[str, ...], count: int, seed: int) -> None:
        super().__init__(names, count)
        self.rng = np.random.default_rng(seed)

    def run(self, op: Op) -> None:
        if not self.its_turn(op):
            op.apply()
            return
        Place.settle()
        for view in op.writes:
            noise = self.rng.integers(0, 256, view.nbytes, np.uint8).reshape(view.shape)
            view[...] = torch.from_numpy(noise).to(view.device) if isinstance(view, torch.Tensor) else noise
        Place.settle()
        os.kill(os.getpid(), signal.SIGKILL)


class Trap(AtOne):
    """The n-th operation of one of the names runs in a kernel's build for fault injection, which traps.

    ``arm`` puts it in the place of the kernel.
    """

    def __init__(self, names: tuple[str, ...], count: int, arm: Callable[[], None]) -> None:
        super().__init__(names, count)
        self.arm = arm

    def run(self, op: Op) -> None:
        if self.its_turn(op):
            self.arm()
        op.apply()
        Place.settle()


def faulty_kernel(up: Any) -> Any:
    """The updater's kernel, where it has one."""
    return getattr(up.memory, "fused", None)


def alone(source: str, name: str) -> str:
    """The source of the kernels with one transaction only: each takes the compiler seconds."""
    lines = source.splitlines(keepends=True)
    kept = [line for line in lines if not line.startswith("TRANSACTION(") or f"({name}," in line]
    assert sum(line.startswith("TRANSACTION(") for line in kept) == 1, f"no single kernel {name}"
    return "".join(kept)


def arm(kernel: Any, seed: int) -> None:
    import cupy

    import leto_ec.cuda
    from leto_rmu.cuda import kernels

    options = (
        "-std=c++17",
        "-DLETO_RMU_FAULT",
        f"-I{leto_ec.cuda.include_dir()}",
        f"-I{kernels.FOLDER}",
    )
    name = kernel.name
    module = cupy.RawModule(code=alone(kernels.SOURCE.read_text(), name), options=options)
    shared = kernel.function.max_dynamic_shared_size_bytes
    kernel.function = module.get_function(name)
    kernel.function.max_dynamic_shared_size_bytes = shared
    kernel.fault = seed


def arm_codes(up: Any, seed: int) -> None:
    """Put leto-ec's kernels that compute parity into the place of those that plans of this process launch."""
    import cupy

    library = importlib.import_module("leto_ec.cuda._library")
    device = up.memory.device.index
    kernels = library.kernels(device, up.memory.code.device_kernel)
    options = ("-std=c++17", "-DLETO_EC_FAULT", f"-I{library.FOLDER}")
    with cupy.cuda.Device(device):
        module = cupy.RawModule(code=(library.FOLDER / "kernels.cu").read_text(), options=options)
        names = {
            "product": "leto_ec_product",
            "short": "leto_ec_product_short",
            "stream": kernels.stream.name,
        }
        faulty = {field: module.get_function(name) for field, name in names.items()}
        faulty["stream"].max_dynamic_shared_size_bytes = kernels.stream_bytes
        module.get_function("leto_ec_set_fault")((1,), (1,), (np.uint32(seed),))
    Place.settle()
    for field, function in faulty.items():
        object.__setattr__(kernels, field, function)  # frozen, for everybody else
