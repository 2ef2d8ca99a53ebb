"""Segments by name: where their elements are, copies of them, and filling them before the first step.

Role: how a trainer reads and fills retained state without knowing where chunks lie (docs, "The free slot"). A
segment is in one piece where chunks stay in place, and in at most two where they move (three in the middle of
an update): chunks keep their order, but for the step from the last slot to the first.
"""

from __future__ import annotations

import torch

from leto_rmu.errors import PlanError
from leto_rmu.geometry import Rotation
from leto_rmu.views import RankMemory

__all__ = ["fill", "pieces", "read"]


def pieces(memory: RankMemory, rotation: Rotation, name: str, plane: str) -> list[tuple[int, torch.Tensor]]:
    """(offset in the segment, contiguous 1-D view) of every piece, in order."""
    plan = memory.plan
    whole = memory.planes[plan.plane_of(name, plane)]
    at, segment = plan.offsets[name]
    width, end = plan.chunk_elements, at + segment.numel
    spans: list[tuple[int, slice]] = []
    for chunk in range(at // width, (end - 1) // width + 1):
        lo, hi = max(at, chunk * width), min(end, (chunk + 1) * width)
        span = memory.span(chunk, plan.geometry.slot(chunk, rotation), lo, hi)
        if spans and spans[-1][1].stop == span.start:  # the next slot: chunks keep their order
            spans[-1] = (spans[-1][0], slice(spans[-1][1].start, span.stop))
        else:
            spans.append((lo - at, span))
    return [(first, whole[span]) for first, span in spans]


def read(
    memory: RankMemory, rotation: Rotation, name: str, plane: str, out: torch.Tensor | None
) -> torch.Tensor:
    """Copy a segment into ``out``, or into a new tensor beside the state."""
    places = pieces(memory, rotation, name, plane)
    if out is None:
        out = torch.empty(memory.plan.offsets[name][1].numel, device=places[0][1].device)
    line = _line(memory, name, out)
    with torch.no_grad():
        for at, piece in places:
            line[at : at + piece.numel()].copy_(piece)
    return out


def fill(memory: RankMemory, rotation: Rotation, name: str, plane: str, tensor: torch.Tensor) -> None:
    """Copy ``tensor`` into a segment."""
    places = pieces(memory, rotation, name, plane)
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
