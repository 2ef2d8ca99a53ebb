"""Segments by name: where their elements are, copies of them, and filling them before the first step.

Role: how a trainer reads and fills retained state without knowing where chunks lie (docs, "The free slot"). A
segment is in one piece where chunks stay in place, and in one piece a chunk where they move.
"""

from __future__ import annotations

import torch

from leto_rmu.errors import PlanError
from leto_rmu.views import RankMemory

__all__ = ["fill", "pieces", "read"]


def pieces(memory: RankMemory, name: str, plane: str) -> list[tuple[int, torch.Tensor]]:
    """(offset in the segment, contiguous 1-D view) of every piece, in order."""
    plan = memory.plan
    whole = memory.planes[plan.plane_of(name, plane)]
    at, segment = plan.offsets[name]
    return [(0, whole[at : at + segment.numel])]


def read(memory: RankMemory, name: str, plane: str, out: torch.Tensor | None) -> torch.Tensor:
    """Copy a segment into ``out``, or into a new tensor beside the state."""
    places = pieces(memory, name, plane)
    if out is None:
        out = torch.empty(memory.plan.offsets[name][1].numel, device=places[0][1].device)
    line = _line(memory, name, out)
    with torch.no_grad():
        for at, piece in places:
            line[at : at + piece.numel()].copy_(piece)
    return out


def fill(memory: RankMemory, name: str, plane: str, tensor: torch.Tensor) -> None:
    """Copy ``tensor`` into a segment."""
    places = pieces(memory, name, plane)
    line = _line(memory, name, tensor)
    with torch.no_grad():
        for at, piece in places:
            piece.copy_(line[at : at + piece.numel()])


def _line(memory: RankMemory, name: str, tensor: torch.Tensor) -> torch.Tensor:
    numel = memory.plan.offsets[name][1].numel
    if tensor.numel() != numel or not tensor.is_contiguous():
        raise PlanError(
            f"segment {name!r} needs a contiguous tensor of {numel} elements, found shape "
            f"{tuple(tensor.shape)} with strides {tensor.stride()}"
        )
    return tensor.detach().view(-1)
