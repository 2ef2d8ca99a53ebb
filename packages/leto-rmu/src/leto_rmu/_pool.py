"""The part of leto_rmp's vocabulary that the RMU speaks, gathered in one place."""

from __future__ import annotations

from leto_rmp import AllocationSpec, Interleave, Kind, PageMark, PageRef, PoolConfig
from leto_rmp.config import Placement

__all__ = ["AllocationSpec", "Interleave", "Kind", "PageMark", "PageRef", "Placement", "PoolConfig"]
