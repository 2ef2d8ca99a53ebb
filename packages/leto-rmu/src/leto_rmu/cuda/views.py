"""RankMemory on a GPU: what changes when pages are on the device and their parity is on the host.

Role: parity crosses between host and device a group at a time, which is what pinned registrations allow. The
reconstruction of a group runs where its pages are; tier 2, whose pages are H, stays on the host.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from leto_ec import Reconstruction, ReedSolomon
from leto_rmu import arrays
from leto_rmu.errors import PlanError
from leto_rmu.geometry import Rotation
from leto_rmu.layout import GRAD_PARITY, GRADS, RING, UNDO, UpdatePlan
from leto_rmu.memory import Memory
from leto_rmu.ops import Bytes
from leto_rmu.views import RankMemory

__all__ = ["CudaRankMemory"]


class CudaRankMemory(RankMemory):
    """Arena, G, R, U and Q on one device; H, tier 2, marker and job state on the host."""

    def __init__(self, plan: UpdatePlan, memory: Memory) -> None:
        super().__init__(plan, memory)
        self.device = self.planes["master"].device
        for name in (UNDO, RING, GRADS, GRAD_PARITY):
            if name not in self._pages:
                continue
            pages: Any = self._pages[name]
            if not isinstance(pages, torch.Tensor) or pages.device != self.device:
                raise PlanError(f"region {name!r} is not on {self.device}, where the arena is")

    def wait(self) -> None:
        """Return when all work on the current stream has ended."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _rows(self) -> torch.Tensor:
        c = self.plan.config
        return torch.empty((c.tier1_pages, c.page_bytes), dtype=torch.uint8, device=self.device)

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
        self.code.update(source, index=index, old=list(old), new=list(new), out=target)

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
