"""Regions: the allocations of one rank, by stable name.

Role: what a plan asks of the pool (paper section 4): kinds, sizes and places of the arena and of everything
that an update keeps beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from leto_rmu._pool import AllocationSpec, Interleave, Kind, Placement

if TYPE_CHECKING:
    from leto_rmu.layout import UpdatePlan

__all__ = [
    "ARENA",
    "CELL_BYTES",
    "GRADS",
    "GRAD_PARITY",
    "JOB_STATE",
    "MARKER",
    "MARKER_REPLICAS",
    "MODEL",
    "RING",
    "RING_BUFFERS",
    "UNDO",
    "marker_pages",
    "specs",
]

RING_BUFFERS = 4  # prefetched, Q, Q', draining
MARKER_REPLICAS = 3
CELL_BYTES = 256  # one marker cell: two slots of 128 bytes
ARENA, GRADS, GRAD_PARITY, UNDO = "arena", "grads", "grad_parity", "undo"
RING, MARKER, JOB_STATE, MODEL = "parity_ring", "marker", "job_state", "model"


def marker_pages(groups: int, page_bytes: int) -> int:
    """Pages of one marker replica."""
    return -(-(CELL_BYTES * (2 + groups)) // page_bytes)


def specs(plan: UpdatePlan) -> tuple[AllocationSpec, ...]:
    """Allocations of a rank; the same plan always gives the same specs."""
    page, h1 = plan.config.page_bytes, plan.config.tier1_pages

    def transaction(name: str, pages: int, placement: Placement = "device") -> AllocationSpec:
        return AllocationSpec(name=name, nbytes=pages * page, kind=Kind.TRANSACTION, placement=placement)

    arena = AllocationSpec(
        name=ARENA,
        nbytes=plan.planes * plan.plane_pages * page,
        kind=Kind.RETAINED,
        interleave=Interleave(planes=plan.planes, run=plan.run),
        group_pages=plan.group_pages,
    )
    model = (
        (AllocationSpec(name=MODEL, nbytes=plan.model_bytes, kind=Kind.DERIVED),) if plan.model_bytes else ()
    )
    return (
        arena,
        transaction(GRADS, -(-plan.grad_bytes // page)),
        *((transaction(GRAD_PARITY, len(plan.grad_groups) * h1),) if plan.gradients == "parity" else ()),
        *((transaction(UNDO, plan.pages_per_chunk),) if plan.scheme == "undo" else ()),
        transaction(RING, RING_BUFFERS * h1),
        transaction(MARKER, MARKER_REPLICAS * plan.marker_pages, "host"),
        transaction(JOB_STATE, 2 * MARKER_REPLICAS * plan.job_pages, "host"),
        *model,
        *plan.extra_specs,
    )
