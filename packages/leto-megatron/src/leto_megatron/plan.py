"""The demo's four failures, placed by a seed.

Role in the whole: `--seed` moves every injection point (iteration, rank, group, chunk, torn bytes, lost
pages), and any seed must pass. Failures are spaced so that shadows usually stand at level 3 again before the
next one, but nothing depends on it. Pure: numbers in, drills out.

The second failure loses as many data pages of one group as its tier-1 parity tolerates (H1), and poisons one
tier-1 parity page besides: where H is authoritative, tier 2 makes that page good first; where the group is
in flight, its parity is Q and the poisoned page of H is irrelevant.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from leto_shadow.drills import Drill, Lose

__all__ = ["POOLS", "TITLES", "Pool", "make_drills"]

TITLES = {
    "kill-forward": "SIGKILL in the forward pass",
    "kill-update": "SIGKILL in mid-update, pages lost",
    "hang": "hang holding the GIL",
    "manager": "state manager killed",
}
"""The failures in words, by kind."""

_PLANES = 3  # master, exp_avg, exp_avg_sq
_ELEMENT_BYTES = 4


@dataclass(frozen=True)
class Pool:
    """Sizes of the demo's retained memory: S, D, H1, H2."""

    page_bytes: int = 16 * 1024
    data_pages: int = 48
    tier1_pages: int = 6
    tier2_pages: int = 1
    backend: str = "host"

    def options(self) -> list[str]:
        """As options of `leto run`."""
        return [
            f"--backend={self.backend}",
            f"--page-bytes={self.page_bytes}",
            f"--data-pages={self.data_pages}",
            f"--tier1-pages={self.tier1_pages}",
            f"--tier2-pages={self.tier2_pages}",
        ]

    def chunks(self, numel: int) -> list[int]:
        """Chunks of each protection group of a rank that owns `numel` elements."""
        run = max(1, self.tier1_pages // _PLANES)
        total = -(-numel // (self.page_bytes // _ELEMENT_BYTES * run))
        per_group = self.data_pages // (run * _PLANES)
        return [min(per_group, total - first) for first in range(0, total, per_group)]


POOLS = {"cpu": Pool(), "cuda": Pool(2 << 20, 256, 16, 1, "cuda")}
"""The demo's pool on each device. GPU pages have 2 MiB, and H1 is the paper's."""


def make_drills(seed: int, iterations: int, world_size: int, numel: int, pool: Pool) -> dict[str, Drill]:
    """The drills of a seed: kind of failure -> drill.

    `numel`: elements that a rank's optimizer owns (the smallest rank's). Every failure falls into its own
    fifth of the run; the last one leaves iterations after it.
    """
    if iterations < 10:
        raise ValueError(f"four failures need at least 10 iterations, got {iterations}")
    rng = random.Random(seed)
    fifth = iterations / 5

    def moment(number: int) -> int:
        # The first failure leaves time for the second set of shadows; jitter is a quarter of a fifth.
        return max(1, int(fifth * (number + 0.75 + 0.25 * rng.random())))

    chunks = pool.chunks(numel)
    group = rng.randrange(len(chunks))
    # "Some chunks committed": not the first chunk of the group, where it has more than one.
    chunk = rng.randrange(1, chunks[group]) if chunks[group] > 1 else 0
    lose = Lose(
        allocation="arena",
        group=rng.randrange(len(chunks)),
        pages=pool.tier1_pages,
        tier1=1 if pool.tier2_pages else 0,
    )
    return {
        "kill-forward": Drill("kill-forward", "kill", rng.randrange(world_size), moment(0), "forward"),
        "kill-update": Drill(
            "kill-update",
            "kill",
            rng.randrange(world_size),
            moment(1),
            "update",
            group=group,
            chunk=chunk,
            op="update",
            seed=rng.randrange(1 << 30),
            lose=lose,
        ),
        "hang": Drill("hang", "hang", rng.randrange(world_size), moment(2), "forward"),
        "manager": Drill("manager", "kill_manager", rng.randrange(world_size), moment(3), "forward"),
    }
