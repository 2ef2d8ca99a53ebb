"""The updater over GPU memory: the same protocol and recovery, with the bulk of the state on the device.

Role: arena, gradients, their parity R, undo and the ring of parity buffers are on the GPU; H, tier 2, the
marker and the job state are in host memory. Every operation on the device is a few launches on torch's
current stream. The arithmetic is that of ``torch.optim`` with ``foreach=True`` on the same GPU, bit for bit.

    with Client.connect(socket) as client:  # a pool with backend="cuda"
        client.attach(Role.WRITER, generation)
        up = CudaUpdater(client, plan, barrier, rebuild_derived)

This is the plain version: a mark is written by the host after it has waited for the stream, so there are two
waits a chunk. It needs leto-ec's CUDA kernels (CuPy). `TorchMemory` does without a manager, in tests.
"""

from __future__ import annotations

from leto_rmu.cuda.memory import CudaMemory, TorchMemory
from leto_rmu.cuda.updater import CudaUpdater

__all__ = ["CudaMemory", "CudaUpdater", "TorchMemory"]
