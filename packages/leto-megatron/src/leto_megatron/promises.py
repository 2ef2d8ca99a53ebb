"""What the demo promises of its four recoveries, held against what was measured.

Role in the whole: equal bits alone could come from four checkpoints, or from drills that lost nothing. So the
verdict also wants every failure where it was placed, recovered from the promised source, and the lost pages
found missing by the state manager and made good by the rank (I-1, I-5). Pure: a timeline in, counts out.
"""

from __future__ import annotations

from collections.abc import Mapping

from leto_megatron.compare import Comparison
from leto_megatron.plan import Pool
from leto_shadow.drills import Drill
from leto_shadow.timeline import FailureRow, Timeline

__all__ = ["PROMISES", "count_promises"]

PROMISES = "recoveries as promised"
_IN_PLACE = ("kill-forward", "kill-update", "hang")


def count_promises(
    comparison: Comparison, timeline: Timeline, drills: Mapping[str, Drill], pool: Pool
) -> None:
    """Add one value for each promise to the comparison, under :data:`PROMISES`.

    `drills`: kind of failure -> drill, as :func:`leto_megatron.plan.make_drills` gives them.
    """
    for kind, drill in drills.items():
        rows = [row for row in timeline.failures if row.drill == drill.id]
        comparison.count(PROMISES, len(rows) == 1, f"{kind}: struck {len(rows)} times instead of once")
        for row in rows:
            for what, kept in _promises(kind, drill, row, pool):
                comparison.count(PROMISES, kept, f"{kind}: {what}")


def _promises(kind: str, drill: Drill, row: FailureRow, pool: Pool) -> list[tuple[str, bool]]:
    """(the promise and what was found, whether it was kept)."""
    source = "in-place" if kind in _IN_PLACE else "checkpoint"
    found = [
        (f"rank {row.rank} was blamed instead of rank {drill.rank}", row.rank == drill.rank),
        (f"source {row.source} instead of {source}", row.source == source),
    ]
    if kind in _IN_PLACE:
        lost = row.iterations_lost
        found.append((f"{'unknown' if lost is None else lost} iterations lost instead of 0", lost == 0))
    if drill.lose is not None:
        # The pool says what it must be, not the drill: a plan that asks for less is caught as well.
        data, parity = pool.tier1_pages, min(1, pool.tier2_pages)
        repaired = sum(r.pages_reconstructed for r in row.repairs if r.rank == drill.rank)
        found += [
            (
                f"{row.lost_pages} pages were missing instead of {data} data and {parity} parity pages",
                row.lost_pages >= data + parity,
            ),
            (
                f"rank {drill.rank} reconstructed {repaired} pages instead of {data} at least",
                repaired >= data,
            ),
        ]
    return found
