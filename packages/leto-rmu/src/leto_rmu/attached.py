"""Attached: retained memory as a trainer sees it, by the names of its segments.

Role: the reading half of `leto_rmu.updater`: state, gradients and regions of one rank, and where the
marker says that it is. Nothing here writes but `Attached.write`, before training begins.
"""

from __future__ import annotations

import torch

from leto_rmu import segments
from leto_rmu.errors import PlanError, ProtocolError
from leto_rmu.geometry import Rotation
from leto_rmu.jobstate import JobRecord
from leto_rmu.layout import UpdatePlan
from leto_rmu.marker import Marker, Phase, RankCell, SyncResult
from leto_rmu.memory import Region
from leto_rmu.views import RankMemory

__all__ = ["Attached"]


class Attached:
    """One rank's memory and marker."""

    plan: UpdatePlan
    memory: RankMemory
    marker: Marker
    _ready: bool
    _record: JobRecord | None

    # --- views --------------------------------------------------------------------------------------
    def pieces(self, name: str, plane: str = "master") -> list[tuple[int, torch.Tensor]]:
        """Where a segment's elements are: (offset in the segment, contiguous 1-D fp32 view), in order.

        Views of retained memory, valid until step() or recover(); read-only once training has begun.
        """
        return segments.pieces(self.memory, self._rotation, name, plane)

    def read(self, name: str, plane: str = "master", out: torch.Tensor | None = None) -> torch.Tensor:
        """Copy a segment's state ("master", "exp_avg", ...) into ``out``, of any shape, dtype and device.

        None: a new 1-D fp32 tensor beside the state.
        """
        return segments.read(self.memory, self._rotation, name, plane, out)

    def write(self, name: str, plane: str, tensor: torch.Tensor) -> None:
        """Fill a segment's state from a tensor of any shape, dtype and device; before initialize() only."""
        cell = self.marker.rank
        if self._ready or (cell is not None and cell.phase is not Phase.LOADING):
            raise ProtocolError(
                f"write({name!r}) over state that can be recovered: only step() changes it; to load other "
                "state, recover() with a decision for a checkpoint first"
            )
        segments.fill(self.memory, self._rotation, name, plane, tensor)

    @property
    def _rotation(self) -> Rotation:
        """Where chunks are between two updates."""
        return Rotation(self.marker.turn)

    def master(self, name: str) -> torch.Tensor:
        """fp32 master of a segment: 1-D view of retained memory (scheme "undo" only)."""
        return self.state(name, "master")

    def state(self, name: str, plane: str) -> torch.Tensor:
        """State of a segment ("exp_avg", ...): 1-D fp32 view of retained memory (scheme "undo" only)."""
        if self.plan.scheme != "undo":
            raise PlanError(
                f"no view of {name!r} that lasts under the scheme {self.plan.scheme!r}, where chunks move: "
                "use read(), write() or pieces()"
            )
        [(_, whole)] = self.pieces(name, plane)
        return whole

    @property
    def grads(self) -> torch.Tensor:
        """All gradients, 1-D in ``plan.grad_dtype``; read-only from step() until it returns."""
        return self.memory.grads

    @property
    def model(self) -> torch.Tensor:
        """Derived memory, 1-D uint8, ``plan.model_bytes`` long."""
        return self.memory.model

    def region(self, name: str) -> Region:
        """Any region of the plan by name, ``extra_specs`` included; those are their owner's to protect."""
        if name not in self.memory.regions:
            raise PlanError(f"no region {name!r}: the plan has {sorted(self.memory.regions)}")
        return self.memory.regions[name]

    # --- where we are -------------------------------------------------------------------------------
    @property
    def cell(self) -> RankCell:
        """The rank's marker record."""
        cell = self.marker.rank
        if not self._ready or cell is None:
            raise ProtocolError("no state yet: call recover(decision), or initialize() on fresh memory")
        return cell

    @property
    def iteration(self) -> int:
        """The iteration in progress, or to be computed next."""
        return self.cell.iteration

    @property
    def steps(self) -> int:
        """Optimizer steps done so far: iterations less those with found_inf (torch's ``step``)."""
        return self.cell.steps

    @property
    def last_sync(self) -> SyncResult | None:
        """Result of the previous iteration's synchronization; survives crashes with the iteration."""
        return self.cell.sync

    @property
    def job_state(self) -> bytes:
        """Job state that is valid for the current iteration."""
        if not self._ready or self._record is None:
            raise ProtocolError("no job state yet: call recover(decision), or initialize() on fresh memory")
        return self._record.job_state
