"""The updater over GPU memory: the same protocol and recovery, with the bulk of the state on the device.

Role: arena, gradients, their parity R, undo and the ring of parity buffers are on the GPU; H, tier 2, the
marker and the job state are in host memory. Every operation on the device is a few launches on torch's
current stream. The arithmetic is that of ``torch.optim`` with ``foreach=True`` on the same GPU, bit for bit.

    with Client.connect(socket) as client:  # a pool with backend="cuda"
        client.attach(Role.WRITER, generation)
        up = CudaUpdater(client, plan, barrier, rebuild_derived)

Under ``UpdatePlan(scheme="slots")`` a chunk is one kernel that does update, parity and bf16 copies in one
pass (`leto_rmu.cuda.fused`); other plans take separate launches. Marks are written in stream order, copies
of parity run beside the chunks, and the host waits for nothing inside the update. `info` says which kernels
this installation has. It needs leto-ec's CUDA kernels (CuPy). `TorchMemory` does without a manager, in
tests.
"""

from __future__ import annotations

from leto_rmu.cuda.fused import refusal
from leto_rmu.cuda.kernels import info
from leto_rmu.cuda.memory import CudaMemory, TorchMemory
from leto_rmu.cuda.updater import CudaUpdater, LaneExecutor

__all__ = ["CudaMemory", "CudaUpdater", "LaneExecutor", "TorchMemory", "info", "refusal"]
