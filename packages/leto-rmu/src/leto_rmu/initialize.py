"""First start: make freshly filled masters recoverable.

Role: the ops by which `ResumableUpdater.initialize` takes state over from outside (a new model, a
checkpoint). While they run the marker says LOADING, so that a crash among them never looks like recoverable
state (I-6); the ITERATION mark comes last. All parity is encoded from the data, whatever memory held before.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import torch

from leto_rmu.geometry import Rotation
from leto_rmu.jobstate import JobRecord, JobState
from leto_rmu.marker import GroupCell, Marker, Phase, RankCell
from leto_rmu.ops import Op
from leto_rmu.views import RankMemory

__all__ = ["initialize_ops"]


def _zero(plane: torch.Tensor) -> None:
    plane.zero_()


def initialize_ops(
    memory: RankMemory,
    marker: Marker,
    jobs: JobState,
    record: JobRecord,
    *,
    steps: int,
    epoch: int,
    keep_state: bool,
) -> Iterator[Op]:
    """Ops in order; ``keep_state``: moments were filled by the caller too, otherwise they become zero."""
    t, plan = record.iteration, memory.plan
    turn = marker.turn  # chunks are where the caller has filled them
    rotation = Rotation(turn)
    yield marker.write_headers()
    yield marker.write(None, RankCell(Phase.LOADING, t, 0, epoch, turn=turn))
    last = plan.chunks - 1
    padding = memory.span(
        last, plan.geometry.slot(last, rotation), plan.numel, plan.chunks * plan.chunk_elements
    )
    for name, plane in memory.planes.items():
        # Padding is part of the protected pages: it must have a defined value too.
        zeros = plane[padding] if name == "master" or keep_state else plane
        if zeros.numel():
            view = zeros if zeros.is_cuda else zeros.numpy()
            yield Op("fill", None, None, (view,), partial(_zero, zeros), t)
    for g in range(plan.groups):
        tier1 = memory.tier1(g)
        yield Op("encode", g, None, (tier1,), partial(memory.encode_group, g, rotation), t)
        if memory.tier2_code is not None:
            tier2 = memory.tier2(g)
            yield Op("tier2", g, None, (tier2,), partial(memory.tier2_code.encode, tier1, out=tier2), t)
    for g in range(plan.groups):
        yield marker.write(g, GroupCell(Phase.IDLE, t))
    yield jobs.stage(record)
    lost = tuple(sorted(memory.lost()))
    if lost:
        # All that is ever read before it is written again has just been written.
        yield Op("acknowledge", None, None, (), partial(memory.memory.acknowledge, lost), t, lost)
    yield marker.write(None, RankCell(Phase.ITERATION, t, steps, epoch, turn=turn))
