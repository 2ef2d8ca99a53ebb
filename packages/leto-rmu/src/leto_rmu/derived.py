"""Derived state: low-precision model copies cast from the fp32 masters.

Role: the usual ``rebuild_derived`` callback for a plain training loop. Derived memory is never protected:
it is rebuilt from the masters after every update and every attach (docs/concepts/vocabulary.md). Copies that
the plan names (``Segment.model_offset``) the updater makes itself.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

from leto_rmu import segments
from leto_rmu.geometry import Rotation
from leto_rmu.ops import Op
from leto_rmu.views import RankMemory

if TYPE_CHECKING:
    from leto_rmu.updater import ResumableUpdater

__all__ = ["cast_masters", "copy_op"]


def cast_masters(parameters: Mapping[str, torch.Tensor]) -> Callable[[ResumableUpdater], None]:
    """Make a callback that casts each segment's master into the parameter of the same name.

    ``parameters``: segment name -> contiguous tensor with the segment's number of elements, of any float
    dtype.
    """

    def rebuild(updater: ResumableUpdater) -> None:
        with torch.no_grad():
            for name, parameter in parameters.items():
                updater.read(name, out=parameter)

    return rebuild


def copy_op(memory: RankMemory, rotation: Rotation, iteration: int) -> Op | None:
    """Op that makes the bf16 copies of the plan's segments; None where the plan asks for none."""
    wanted = [s for s in memory.plan.segments if s.model_offset is not None]
    if not wanted:
        return None
    copies = {s.name: memory.model_copy(s) for s in wanted}

    def apply() -> None:
        for name, copy in copies.items():
            segments.read(memory, rotation, name, "master", copy)

    writes = tuple(c.view(torch.uint8) if c.is_cuda else c.view(torch.uint8).numpy() for c in copies.values())
    return Op("copy", None, None, writes, apply, iteration)
