"""Chunk transactions as single kernels: update, parity and bf16 copy in one pass (transaction.cuh).

Role: launches the kernel for chunks of the free-slot scheme. What does not change (pieces, coefficients) is
put on the device once; a launch carries the rest as its argument: where the chunk is and goes, Q and Q',
hyperparameters. `NoKernel` says for which plans there is no kernel; their chunks take the plain
operations.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from leto_ec.cuda import block_coefficients
from leto_rmu.cuda.kernels import MACHINE_CODE, Library, launch, ordinal
from leto_rmu.cuda.rules import RULES, Rule
from leto_rmu.layout import UpdatePlan
from leto_rmu.marker import SyncResult
from leto_rmu.optimizers import Hyper
from leto_rmu.regions import RING_BUFFERS
from leto_rmu.views import RankMemory

__all__ = ["VARIANTS", "FusedChunks", "NoKernel", "refusal"]

THREADS, STAGES, TABLE, STEPS = 128, 3, 64, 16  # as in transaction.cuh
PARITY = 16
VARIANTS = ("plain", "lean")
NO_COPY = (1 << 64) - 1
RESERVED = 1 << 10  # bytes of shared memory that the system takes for every block of threads
RESIDENT = 4  # blocks of threads that a multiprocessor is to hold
GRADIENTS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}

STEP = np.dtype([("value", "<f4", 11), ("flags", "<u4")])
PIECE = np.dtype(
    [(name, "<u8") for name in ("lo", "hi", "gradient", "copy")] + [("step", "<u4"), ("unused", "<u4")]
)
CHUNK = np.dtype(
    [
        (name, "<u8")
        for name in ("source", "target", "gradients", "copies", "pieces", "coefficients", "before", "after")
    ]
    + [("plane", "<u8"), ("words", "<u8"), ("blocks", "<u4"), ("piece_count", "<u4")]
    + [("inv_scale", "<f4"), ("clip", "<f4"), ("table", "<u4"), ("fault", "<u4"), ("first", PIECE)]
    + [("steps", STEP, STEPS)]
)


class NoKernel(ValueError):  # noqa: N818 (it is an outcome, and reads as one)
    """There is no kernel for a plan; the message says why."""


def refusal(plan: UpdatePlan) -> str:
    """Why no kernel does all of a chunk of this plan, in words; "" if one does.

    Pure: no GPU is looked at. Without the kernel a plan of scheme "slots" is updated by separate operations,
    which takes two to three times as long as "undo" does (`docs/benchmarks/rmu-updater-plain-h200.md`).
    """
    rule, shape = RULES.get(plan.optimizer.name), plan.geometry
    if rule is None:
        return f"there is no kernel for the optimizer {plan.optimizer.name}"
    if shape.scheme != "slots":
        return "the kernel writes chunks into free slots: make the plan with scheme='slots'"
    if plan.config.tier1_pages != PARITY:
        return f"the kernel updates {PARITY} parity pages, the pool has {plan.config.tier1_pages}"
    if (shape.planes, shape.subrun, shape.stride) != (rule.planes, rule.run, 16):
        return (
            f"the kernel wants sub-blocks of {rule.run} pages of {rule.planes} planes at each 16, "
            f"found {shape.subrun} pages of {shape.planes} planes at each {shape.stride}: "
            "align=True makes them so"
        )
    if plan.page_elements % THREADS:
        return f"page_bytes must be a multiple of {4 * THREADS}, found {plan.config.page_bytes}"
    groups = max(
        len({piece.group for piece in plan.pieces(g, c)})
        for g in range(plan.groups)
        for c in range(plan.chunks_in(g))
    )
    if groups > STEPS:
        return (
            f"a chunk holds segments of {groups} hyperparameter groups, the kernel takes {STEPS} "
            "(smaller chunk_pages may hold fewer)"
        )
    return ""


class FusedChunks:
    """The kernel of one rank. Chunks are numbered through the arena.

    ``variant``: "lean" (transaction.cuh), or "plain", which makes the same bits with more instructions.
    Rules that have no lean kernel, and builds by NVRTC, take the plain one.
    """

    def __init__(self, memory: RankMemory, library: Library, variant: str = "lean") -> None:
        plan = memory.plan
        if why := refusal(plan):
            raise NoKernel(why)
        self.memory, self.plan, self.library = memory, plan, library
        self.rule: Rule = RULES[plan.optimizer.name]
        self.device = memory.planes["master"].device
        if variant not in VARIANTS:
            raise ValueError(f"variant must be one of {VARIANTS}, found {variant!r}")
        lean = variant == "lean" and self.rule.lean and library.build == MACHINE_CODE
        self.name = f"leto_rmu_{self.rule.kernel}_{GRADIENTS[plan.grad_dtype]}" + "_lean" * lean
        self.function = library.function(self.name)
        self.words = plan.page_elements
        self.fault = 0
        # Computing gradients again needs the copies of iteration t, until all ranks are done: not here, then.
        self.copies = plan.gradients != "recompute"
        self._tables()
        self._shared_memory()
        self._templates()

    # --- what does not change -------------------------------------------------------------------------
    def _tables(self) -> None:
        plan = self.plan
        rows: list[tuple[int, ...]] = []
        counts: list[int] = []
        groups = np.zeros(
            (plan.chunks, STEPS), np.int64
        )  # hyperparameter groups of a chunk, as its pieces count them
        for g in range(plan.groups):
            for c in range(plan.chunks_in(g)):
                index, found = plan.index(g, c), plan.pieces(g, c)
                start = index * plan.chunk_elements
                # The largest group first: it is the one that the lean kernel has constants for.
                sizes = Counter[int]()
                for piece in found:
                    sizes[piece.group] += piece.hi - piece.lo
                local = sorted(sizes, key=lambda group: (-sizes[group], group))
                groups[index, : len(local)] = local
                counts.append(len(found))
                rows += [
                    (
                        p.lo - start,
                        p.hi - start,
                        p.grad_lo,
                        p.model_lo if p.model_lo is not None and self.copies else NO_COPY,
                        local.index(p.group),
                        0,
                    )
                    for p in found
                ]
        self._groups, self._pieces, self._piece_count = groups, np.array(rows, PIECE), np.array(counts)
        self._first_piece = np.cumsum(self._piece_count) - self._piece_count
        self._piece_table = self._upload(self._pieces)
        blocks = plan.chunks_per_group * plan.geometry.subblocks
        # Page j of the group has the point y = 16 + j: its first block is number 1.
        self._coefficients = self._upload(block_coefficients(PARITY // 16, blocks))

    def _upload(self, table: Any) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(table).view(np.uint8).reshape(-1)).to(self.device)

    def _shared_memory(self) -> None:
        """Room for as many sub-blocks' tables as let enough blocks of threads stay resident."""
        rule, blocks = self.rule, self.plan.geometry.subblocks
        stages = STAGES * (rule.planes * rule.run + rule.run) * THREADS * 4
        each = 16 * 8 + rule.run * (8 + 8 + 4)
        import cupy

        device = ordinal(self.device)
        properties = cupy.cuda.runtime.getDeviceProperties(device)
        room = properties["sharedMemPerMultiprocessor"] // RESIDENT - RESERVED - stages
        self._table = max(1, min(blocks, TABLE, room // each))
        # Tables stay aligned to 8 bytes: a sub-block's may be an odd multiple of 4.
        self._shared = stages + self._table * each + 8
        with cupy.cuda.Device(device):  # CuPy keeps a kernel and its attributes for each device
            self.function.max_dynamic_shared_size_bytes = max(
                self._shared, self.function.max_dynamic_shared_size_bytes
            )

    # --- one iteration --------------------------------------------------------------------------------
    def _templates(self) -> None:
        """The arguments of every chunk, but for what changes with the iteration and the place."""
        plan, memory = self.plan, self.memory
        all_chunks = np.zeros(plan.chunks, CHUNK)
        inside = np.arange(plan.chunks) % plan.chunks_per_group
        blocks = plan.geometry.subblocks
        all_chunks["gradients"] = memory.grads.data_ptr()
        all_chunks["copies"] = memory.model.data_ptr() if plan.model_bytes else 0
        all_chunks["pieces"] = self._piece_table.data_ptr() + self._first_piece * PIECE.itemsize
        all_chunks["piece_count"] = self._piece_count
        all_chunks["first"] = self._pieces[self._first_piece]
        all_chunks["coefficients"] = self._coefficients.data_ptr() + inside * (blocks * 16 * 4)
        all_chunks["plane"], all_chunks["words"] = plan.plane_pages * self.words, self.words
        all_chunks["blocks"], all_chunks["table"] = blocks, self._table
        self._arguments = all_chunks
        self._base = memory.planes["master"].data_ptr()
        self._slot_bytes = plan.run * plan.config.page_bytes
        rings: list[Any] = [memory.ring(k) for k in range(RING_BUFFERS)]
        self._ring = [ring.data_ptr() for ring in rings]
        self._prepared: tuple[int, tuple[Hyper, ...]] | None = None

    def prepare(self, hypers: Sequence[Hyper], step: int, sync: SyncResult) -> None:
        """Constants of one update; for all its launches. Cheaper when only ``sync`` is new."""
        chunks = self._arguments
        if self._prepared != (step, tuple(hypers)):
            steps = np.zeros(len(hypers), STEP)
            for k, hyper in enumerate(hypers):
                values, flags = self.rule.constants(hyper, step)
                steps[k]["value"][: len(values)] = values
                steps[k]["flags"] = flags
            chunks["steps"] = steps[self._groups]
            self._prepared = (step, tuple(hypers))
        chunks["inv_scale"] = 1.0 if sync.inv_scale is None else sync.inv_scale
        chunks["clip"] = 1.0 if sync.clip is None else sync.clip

    def launch(self, index: int, source: int, target: int, old: int, new: int) -> None:
        """Transaction of a chunk from slot ``source`` to ``target``, parity from ring ``old`` to ``new``."""
        one = self._arguments[index : index + 1]
        base, size = self._base, self._slot_bytes
        one["source"], one["target"] = base + source * size, base + target * size
        one["before"], one["after"] = self._ring[old], self._ring[new]
        one["fault"] = self.fault
        self._run(one)

    def _run(self, argument: Any) -> None:
        """Run the kernel with an argument, an array of one; the launch copies it."""
        launch(self.function, self.words // THREADS, THREADS, argument[0], self.device, self._shared)
