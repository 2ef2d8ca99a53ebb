"""An MoE-like load whose memory demand swings: the trainer of `memory_pressure.py` (paper figure 13).

Tokens are dispatched to experts in chunks of equal size; how many chunks an iteration keeps for its
backward pass varies from iteration to iteration, up to a peak that the driver sets in a file: how much of
the device is to stay free. The rest of the device is filled with ballast once, as a large model would.
Everything lives in PyTorch's allocator and every byte fits without a shadow: ballast, peak and all.

The weights and the count of iterations are retained memory (`leto_rmp`), so that a takeover goes on where
the dead trainer stopped. With ``--simulated LIBRARY`` the device is the tests' simulated one, through the
same cudaMalloc.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import time
from pathlib import Path
from typing import Any

import leto_shadow
from leto_rmp import AllocationSpec, Client, Kind, Role
from leto_shadow import Phase, oom_hook
from leto_shadow.preinit import MemoryView

MIB = 1 << 20
WIDTH, HIDDEN, TOKENS = 4096, 16384, 4096
CHUNK_BYTES = TOKENS * HIDDEN * 2
"""Hidden states of one chunk of tokens; a weight matrix is as large, so that all large blocks are of one
size."""


class OutOfMemoryError(RuntimeError):
    """What PyTorch raises."""


class Cuda:
    """The load on a GPU through PyTorch."""

    def build(self, ctx: leto_shadow.Context) -> None:
        import torch

        self.torch = torch
        torch.cuda.set_device(ctx.local_rank)
        a = torch.ones(256, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        (a @ a).sum().backward()  # context, modules, cuBLAS; forward and backward threads
        torch.cuda.synchronize()

    def connect(self, ctx: leto_shadow.Context) -> None:
        ctx.init_process_group("nccl")
        dist = __import__("torch").distributed
        for _ in range(3):  # tensor, pipeline and expert groups of a larger job
            group = dist.new_group(list(range(ctx.world_size)))
            dist.all_reduce(self.torch.zeros(1, device="cuda"), group=group)
        # The real shapes, once, at the smallest size: kernels are chosen and workspaces exist.
        x = self.torch.ones(TOKENS, WIDTH, device="cuda", dtype=self.torch.bfloat16)
        w = self.torch.ones(WIDTH, HIDDEN, device="cuda", dtype=self.torch.bfloat16, requires_grad=True)
        (x @ w).square().mean().backward()
        self.torch.cuda.synchronize()

    def attach(self, client: Client) -> int:
        """Map the retained memory; return how many chunks an iteration needs beside those that it keeps."""
        self.torch.cuda.empty_cache()  # what the warm-up left
        spec = AllocationSpec("weights", 4096 + WIDTH * HIDDEN * 2, Kind.RETAINED)
        allocation = client.allocate([spec])["weights"]
        client.acknowledge(client.marks())
        self.counter = allocation.tensor(self.torch.int64, 0, 1)
        weights = allocation.tensor(self.torch.bfloat16, 4096, WIDTH * HIDDEN).view(WIDTH, HIDDEN)
        self.weights = weights.requires_grad_()
        self.x = self.torch.ones(TOKENS, WIDTH, device="cuda", dtype=self.torch.bfloat16)
        self.weights.grad = self.torch.zeros_like(self.weights)
        if self.read() == 0:
            with self.torch.no_grad():
                self.weights.fill_(0.01)
        self.iterate(1)
        self.torch.cuda.reset_peak_memory_stats()
        before = self.torch.cuda.memory_allocated()
        self.iterate(4)
        peak = self.torch.cuda.max_memory_allocated() - before
        return -(-peak // CHUNK_BYTES) - 4

    def read(self) -> int:
        return int(self.counter.item())

    def write(self, iteration: int) -> None:
        self.counter.fill_(iteration)

    def free_bytes(self) -> int:
        self.torch.cuda.empty_cache()  # cached blocks are free for the load as well
        return int(self.torch.cuda.mem_get_info()[0])

    def fill(self, nbytes: int) -> None:
        self.ballast = self.torch.empty(nbytes, dtype=self.torch.uint8, device="cuda")

    def iterate(self, chunks: int) -> None:
        kept = [(self.x @ self.weights) for _ in range(chunks)]
        loss = sum(h.square().mean() for h in kept)
        kept.clear()
        loss.backward()
        with self.torch.no_grad():
            self.weights.sub_(self.weights.grad.clamp_(-1, 1).mul_(1e-6))
            self.weights.grad.zero_()
        self.torch.cuda.synchronize()

    def reserved_bytes(self) -> int:
        return int(self.torch.cuda.memory_reserved())


class Simulated:
    """The same on the tests' simulated device: PyTorch's order of events, without PyTorch."""

    def __init__(self, library: str) -> None:
        ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        self.cuda = ctypes.CDLL(None)
        self.used: list[tuple[int, int]] = []
        self.cached: list[tuple[int, int]] = []
        self.peak = 0
        self.temporaries = 3
        oom_hook.measure = self.measure

    def malloc(self, size: int) -> None:
        for index, (_, has) in enumerate(self.cached):
            if has == size:
                self.used.append(self.cached.pop(index))
                return
        found = self._raw(size)
        if found is None:
            for pointer, _ in self.cached:
                self.cuda.cudaFree(ctypes.c_void_p(pointer))
            self.cached.clear()
            found = self._raw(size)
        if found is None:
            raise OutOfMemoryError("the simulated device is full")
        self.used.append((found, size))
        self.peak = max(self.peak, sum(has for _, has in self.used))

    def _raw(self, size: int) -> int | None:
        pointer = ctypes.c_void_p()
        failed = self.cuda.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(size))
        return None if failed else pointer.value

    def measure(self) -> MemoryView:
        reserved = self.reserved_bytes()
        return MemoryView(self.free_bytes(), self.total_bytes(), reserved - self.peak)

    def _info(self) -> tuple[int, int]:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.cuda.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
        return free.value, total.value

    def free_bytes(self) -> int:
        return self._info()[0]

    def total_bytes(self) -> int:
        return self._info()[1]

    def reserved_bytes(self) -> int:
        return sum(has for _, has in self.used + self.cached)

    def build(self, ctx: leto_shadow.Context) -> None:
        self.malloc(950 * MIB)

    def connect(self, ctx: leto_shadow.Context) -> None:
        self.malloc(500 * MIB)

    def attach(self, client: Client) -> int:
        self.counter = client.allocate([AllocationSpec("weights", 4096, Kind.RETAINED)])["weights"]
        client.acknowledge(client.marks())
        return self.temporaries

    def read(self) -> int:
        return int(self.counter.pages[0][:8].view("int64")[0])

    def write(self, iteration: int) -> None:
        self.counter.pages[0][:8].view("int64")[0] = iteration

    def fill(self, nbytes: int) -> None:
        self.malloc(nbytes)

    def iterate(self, chunks: int) -> None:
        for _ in range(chunks + self.temporaries):
            self.malloc(CHUNK_BYTES)
        for _ in range(chunks + self.temporaries):
            self.cached.append(self.used.pop())


class Load(leto_shadow.Trainer):
    """Reads the driver's file in every iteration; writes its pid and the room it found."""

    def prepare(self, ctx: leto_shadow.Context) -> None:
        parser = argparse.ArgumentParser()
        parser.add_argument("--folder", type=Path, required=True)
        parser.add_argument("--room-mib", type=int, default=6144)
        parser.add_argument("--pause-s", type=float, default=0.05)
        parser.add_argument("--simulated")
        self.options = parser.parse_args(ctx.args)
        if self.options.simulated:
            os.environ["FAKE_GPU"] += f".{ctx.rank}"  # each rank has a device of its own
        self.device: Any = Simulated(self.options.simulated) if self.options.simulated else Cuda()
        if not self.options.simulated:
            import torch  # noqa: F401 - level 1 is imports

    def build(self, ctx: leto_shadow.Context) -> None:
        self.device.build(ctx)

    def connect(self, ctx: leto_shadow.Context) -> None:
        self.device.connect(ctx)

    def disconnect(self, ctx: leto_shadow.Context) -> None:
        raise leto_shadow.CannotDisconnectError("this load has one rank: its world ends with it")

    def train(self, ctx: leto_shadow.Context) -> None:
        client = Client.connect(ctx.manager_socket)
        client.attach(Role.WRITER, ctx.generation)
        temporaries = self.device.attach(client)
        iteration = json.loads(ctx.exchange(json.dumps(self.device.read()).encode()))
        folder, room = self.options.folder, self.options.room_mib * MIB
        # No shadow is alive now: what is free beyond the room is filled.
        self.device.fill((self.device.free_bytes() - room) // MIB * MIB)
        room = self.device.free_bytes()
        (folder / f"active-{ctx.rank}.json").write_text(
            json.dumps({"pid": os.getpid(), "generation": ctx.generation})
        )
        ctx.resumed(iteration, "in-place" if iteration else "fresh")
        draw = random.Random(ctx.generation)
        while not (folder / "stop").exists():
            ctx.progress(Phase.FORWARD, iteration)
            headroom = json.loads((folder / f"demand-{ctx.rank}.json").read_text())["headroom_bytes"]
            most = max(1, (room - headroom) // CHUNK_BYTES - temporaries)
            # Routing is uneven: most iterations need less than the peak, one in four reaches it.
            chunks = most if iteration % 4 == 3 else max(1, int(most * draw.uniform(0.75, 1.0)))
            started = time.monotonic()
            self.device.iterate(chunks)
            iteration += 1
            self.device.write(iteration)
            ctx.metrics(
                iteration,
                chunks=chunks,
                seconds=time.monotonic() - started,
                reserved=self.device.reserved_bytes(),
                room=room,
            )
            time.sleep(self.options.pause_s)  # a load, not a race: the rest of an iteration


def decide(summaries: list[bytes]) -> bytes:
    """All ranks go on where the one behind stands."""
    return json.dumps(min(json.loads(summary) for summary in summaries)).encode()


if __name__ == "__main__":
    leto_shadow.run(Load())
