"""What differs between an updater on the host and one on a GPU: kernels to load, and the class.

Role in the whole: the one place of this package that knows leto_rmu's two updaters. Both follow one protocol;
the rest of the trainer does not care where the pages are.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable

import torch

from leto_rmp import Client
from leto_rmu import ClientMemory, Executor, ResumableUpdater, UpdatePlan

__all__ = ["import_kernels", "load_kernels", "make_updater"]


def import_kernels() -> None:
    """Import what works on GPU memory; no GPU is touched."""
    for name in ("leto_ec.cuda", "leto_rmu.cuda"):
        importlib.import_module(name)


def load_kernels() -> None:
    """Run the code's kernels once, so that a takeover does not wait for their modules to be loaded."""
    from leto_ec import ReedSolomon

    code = ReedSolomon(data=32, parity=16)
    pages = torch.zeros(32, 1 << 16, dtype=torch.uint8, device="cuda")
    parity = torch.zeros(16, 1 << 16, dtype=torch.uint8, device="cuda")
    code.encode(pages, out=parity)
    code.update(parity, index=0, delta=pages[:1], out=torch.zeros_like(parity))
    torch.cuda.synchronize()


def make_updater(
    client: Client,
    plan: UpdatePlan,
    barrier: Callable[[], None],
    rebuild_derived: Callable[[ResumableUpdater], None],
    executor: Executor,
) -> ResumableUpdater:
    """The updater of a rank, over the memory of its state manager, wherever that keeps its pages."""
    if client.config.backend == "host":
        return ResumableUpdater(ClientMemory(client), plan, barrier, rebuild_derived, executor)
    from leto_rmu.cuda import CudaUpdater

    return CudaUpdater(client, plan, barrier, rebuild_derived, executor)
