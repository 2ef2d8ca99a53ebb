"""RankMemory on a GPU: what changes when pages are on the device and their parity is on the host.

Role: parity crosses between host and device a group at a time, which is what pinned registrations allow. The
reconstruction of a group runs where its pages are; tier 2, whose pages are H, is reconstructed on the host.
What is encoded again and again goes through plans of leto-ec, made once: no addresses are looked up or
checked in an update.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from typing import Any

import torch
import torch.utils.dlpack

from leto_ec import Reconstruction, ReedSolomon
from leto_rmu import arrays
from leto_rmu.cuda.fused import FusedChunks, NoKernel
from leto_rmu.cuda.kernels import Library, library
from leto_rmu.cuda.lanes import CudaQueues, Lanes
from leto_rmu.cuda.marks import MarkWriter
from leto_rmu.errors import PlanError
from leto_rmu.geometry import Rotation
from leto_rmu.layout import COPY_BYTES, UpdatePlan
from leto_rmu.memory import Memory
from leto_rmu.ops import Bytes
from leto_rmu.regions import GRAD_PARITY, GRADS, RING, RING_BUFFERS, UNDO
from leto_rmu.views import RankMemory

__all__ = ["CudaRankMemory"]

PLANS_KEPT = 2048  # of parity updates: a few KiB of device memory each
_log = logging.getLogger("leto_rmu")


class CudaRankMemory(RankMemory):
    """Arena, G, R, U and Q on one device; H, tier 2, marker and job state on the host.

    ``fused``: chunk transactions as one kernel, or None; ``no_kernel`` then says why. ``early``: an iteration
    and groups whose parity is loaded ahead of its update with their ring slots. ``kernel_variant``: as of
    `FusedChunks`.
    """

    use_kernels = True
    kernel_variant = "lean"
    no_kernel = ""

    def __init__(self, plan: UpdatePlan, memory: Memory) -> None:
        super().__init__(plan, memory)
        self.device = self.planes["master"].device
        for name in (UNDO, RING, GRADS, GRAD_PARITY):
            if name not in self._pages:
                continue
            pages: Any = self._pages[name]
            if not isinstance(pages, torch.Tensor) or pages.device != self.device:
                raise PlanError(f"region {name!r} is not on {self.device}, where the arena is")
        self.on_gpu = self.device.type == "cuda"
        self.lanes = Lanes(CudaQueues(self.device) if self.on_gpu else None)
        self.early: tuple[int, dict[int, int]] = (-1, {})
        self._plans: OrderedDict[Any, Any] = OrderedDict()

    # --- kernels --------------------------------------------------------------------------------------
    @cached_property
    def library(self) -> Library | None:
        """Kernels of this package, in the build that leto-ec chose for the device; None without a GPU."""
        if not self.on_gpu:
            return None
        rows = self._rows()
        return library(self.device, self._plan("encode", self.code, [rows[:1].clone()], [rows]).kernel)

    @cached_property
    def mark_writer(self) -> MarkWriter | None:
        return None if self.library is None else MarkWriter(self.device, self.library)

    @cached_property
    def fused(self) -> FusedChunks | None:
        if self.library is None or not self.use_kernels:
            self.no_kernel = "kernels are off" if self.on_gpu else f"the state is on {self.device}"
            return None
        try:
            return FusedChunks(self, self.library, self.kernel_variant)
        except NoKernel as reason:
            self.no_kernel = str(reason)
            _log.info("chunks are updated by separate operations: %s", reason)
            return None

    def _plan(self, kind: str, *args: Any, **more: Any) -> Any:
        from leto_ec.cuda import Plan

        make: Callable[..., Any] = getattr(Plan, kind)
        return make(*args, **more)

    def _kept(self, key: Any, make: Callable[[], Any]) -> Any:
        plan = self._plans.get(key)
        if plan is None:
            plan = self._plans[key] = make()
            if len(self._plans) > PLANS_KEPT:
                self._plans.popitem(last=False)
        else:
            self._plans.move_to_end(key)
        return plan

    def make_ready(self) -> None:
        """Make what every update uses, so that the first one after a takeover takes no longer than others.

        Plans of the gradients' parity and of tier 2, kernels and their tables. Plans of the scheme "undo" are
        of single chunks, and are made when they are first used.
        """
        if not self.on_gpu:
            return
        for groups in self._gradient_sizes():
            self._gradient_plan(groups)
        if self.tier2_code is not None:
            for slot in range(RING_BUFFERS):
                self._second_tier_plan(slot)
        self.mark_writer  # noqa: B018 (made when it is first asked for)
        if self.plan.scheme == "slots":
            self.fused  # noqa: B018

    # --- between host and device ------------------------------------------------------------------------
    def _rows(self) -> torch.Tensor:
        c = self.plan.config
        return torch.empty((c.tier1_pages, c.page_bytes), dtype=torch.uint8, device=self.device)

    def transfer(self, target: Any, source: Any) -> None:
        """A copy in stream order between pages of the host and of the device; may be under way on return."""
        if arrays.on_device(target):
            target.copy_(torch.from_numpy(source), non_blocking=True)
        else:
            torch.from_numpy(target).copy_(source, non_blocking=True)

    @cached_property
    def _top_rows(self) -> torch.Tensor:
        c = self.plan.config
        if self.device.type != "cuda":
            return torch.empty((c.tier2_pages, c.page_bytes), dtype=torch.uint8, device=self.device)
        # PyTorch takes 20 MiB of the driver for what is between 1 and 10; CuPy takes no more than this.
        import cupy

        with cupy.cuda.Device(self.device.index):
            return torch.utils.dlpack.from_dlpack(cupy.empty((c.tier2_pages, c.page_bytes), cupy.uint8))

    def second_tier(self, slot: int, target: Bytes) -> None:
        """Tier 2 of the parity in a buffer of the ring, on the device; may be under way on return."""
        code, rows, top = self.tier2_code, self.ring(slot), self._top_rows
        assert code is not None
        if self.on_gpu:
            self._second_tier_plan(slot).run()
        else:
            code.encode(rows, out=top)
        self.transfer(target, top)

    def _second_tier_plan(self, slot: int) -> Any:
        def make() -> Any:
            return self._plan("encode", self.tier2_code, [self.ring(slot)], [self._top_rows])

        return self._kept(("tier2", slot), make)

    # --- codes --------------------------------------------------------------------------------------
    def gradient_encodes(self) -> list[tuple[tuple[Any, ...], Callable[[], None]]]:
        """(places written, work) for R of all gradient groups, those of one size in one launch."""
        return [
            (tuple(self.grad_parity(k) for k in groups), partial(self._encode, groups))
            for groups in self._gradient_sizes()
        ]

    def _gradient_sizes(self) -> list[tuple[int, ...]]:
        """Gradient groups that have parity, those of one size together."""
        sizes: dict[int, list[int]] = {}
        if self.plan.gradients == "parity":
            for k, pages in enumerate(self.plan.grad_groups):
                sizes.setdefault(len(pages), []).append(k)
        return [tuple(groups) for groups in sizes.values()]

    def _encode(self, groups: tuple[int, ...]) -> None:
        if not self.on_gpu:
            for k in groups:
                self.code.encode(self.grad_run(k), out=self.grad_parity(k))
            return
        self._gradient_plan(groups).run()

    def _gradient_plan(self, groups: tuple[int, ...]) -> Any:
        def make() -> Any:
            pages, rows = [self.grad_run(k) for k in groups], [self.grad_parity(k) for k in groups]
            return self._plan("encode", self.code, pages, rows)

        return self._kept(("protect", groups), make)

    def encode_group(self, group: int, rotation: Rotation) -> None:
        """H_i = RS(C_i): on the device, then to the host as one copy."""
        rows = self._rows()
        self.code.encode(self.group_pages(group, rotation), out=rows)
        arrays.copy(self.tier1(group), rows)

    def update_parity(
        self,
        source: Bytes,
        target: Bytes,
        chunk: int,
        old: Sequence[Bytes | None],
        new: Sequence[Bytes | None],
    ) -> None:
        """Q' = Q ^ RS_j(old ^ new), straight from the old and the new contents."""
        index = chunk * self.plan.geometry.positions_per_chunk
        if not self.on_gpu:
            self.code.update(source, index=index, old=list(old), new=list(new), out=target)
            return
        buffers: tuple[Any, ...] = (source, target, old[0], new[0])
        key = ("parity", chunk, *(buffer.data_ptr() for buffer in buffers))

        def make() -> Any:
            return self._plan(
                "update", self.code, [source], index=index, olds=[list(old)], news=[list(new)], outs=[target]
            )

        self._kept(key, make).run()

    def copies(self, group: int, chunk: int) -> list[torch.Tensor]:
        """Places in derived memory of a chunk's bf16 copies, as bytes."""
        return [
            self.model[COPY_BYTES * p.model_lo : COPY_BYTES * (p.model_lo + p.hi - p.lo)]
            for p in self.plan.pieces(group, chunk)
            if p.model_lo is not None
        ]

    def reconstruct(
        self,
        code: ReedSolomon,
        pages: list[Bytes | None],
        rows: list[Bytes],
        lost_pages: set[int],
        lost_rows: set[int],
    ) -> Reconstruction:
        """As on the host; rows of the host that belong to pages of the device take part as copies."""
        mixed = arrays.on_device(pages[0]) and not arrays.on_device(rows[0])
        if not mixed:
            return super().reconstruct(code, pages, rows, lost_pages, lost_rows)
        copies = self._rows()
        for k, row in enumerate(rows):
            if k not in lost_rows:
                arrays.copy(copies[k], row)
        result = super().reconstruct(code, pages, list(copies), lost_pages, lost_rows)
        for k in sorted(lost_rows):
            arrays.copy(rows[k], copies[k])
        return result
