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

from leto_megatron.config import Config
from leto_rmp import PoolConfig
from leto_rmu import Segment, UpdatePlan
from leto_rmu.geometry import Geometry, Rotation
from leto_shadow.drills import Drill, Lose

__all__ = ["POOLS", "TITLES", "Pool", "make_drills"]

TITLES = {
    "kill-forward": "SIGKILL in the forward pass",
    "kill-update": "SIGKILL in mid-update, pages lost",
    "hang": "hang holding the GIL",
    "manager": "state manager killed",
}
"""The failures in words, by kind."""


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

    def geometry(self, numel: int, world_size: int, config: Config | None = None) -> Geometry:
        """Chunks and groups of a rank that owns `numel` elements, as the trainer's plan lays them out."""
        settings = config if config is not None else Config()
        sizes = PoolConfig(self.page_bytes, self.data_pages, self.tier1_pages, self.tier2_pages, self.backend)
        return UpdatePlan(
            [Segment("all", numel)],
            config=sizes,
            grad_numel=numel,
            scheme=settings.scheme_on(sizes),
            chunk_pages=settings.chunk_pages_on(sizes, world_size) or None,
        ).geometry


POOLS = {"cpu": Pool(), "cuda": Pool(2 << 20, 64, 16, 1, "cuda")}
"""The demo's pool on each device. GPU pages have 2 MiB, and H1 is the paper's."""


def make_drills(
    seed: int, iterations: int, world_size: int, numel: int, pool: Pool, config: Config | None = None
) -> dict[str, Drill]:
    """The drills of a seed: kind of failure -> drill.

    `numel`: elements that a rank's optimizer owns (the smallest rank's). Every failure falls into its own
    fifth of the run; the last one leaves iterations after it. `config`: the run, whose scheme and chunks
    decide where the update can be struck.
    """
    if iterations < 10:
        raise ValueError(f"four failures need at least 10 iterations, got {iterations}")
    rng = random.Random(seed)
    fifth = iterations / 5

    def moment(number: int) -> int:
        # The first failure leaves time for the second set of shadows; jitter is a quarter of a fifth.
        return max(1, int(fifth * (number + 0.75 + 0.25 * rng.random())))

    geometry = pool.geometry(numel, world_size, config)
    group = rng.randrange(geometry.groups)
    # "Some chunks committed": not the first chunk of the group, where it has more than one.
    chunks = geometry.chunks_in(group)
    chunk = rng.randrange(1, chunks) if chunks > 1 else 0
    pick = rng.randrange(geometry.groups)
    forward_rank, forward_iteration = rng.randrange(world_size), moment(0)
    rank, iteration = rng.randrange(world_size), moment(1)
    lose = Lose(
        allocation="arena",
        group=_to_lose(geometry, pool, pick, iteration, group * geometry.chunks_per_group + chunk),
        pages=pool.tier1_pages,
        tier1=1 if pool.tier2_pages else 0,
    )
    return {
        "kill-forward": Drill("kill-forward", "kill", forward_rank, forward_iteration, "forward"),
        "kill-update": Drill(
            "kill-update",
            "kill",
            rank,
            iteration,
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


def _to_lose(geometry: Geometry, pool: Pool, pick: int, iteration: int, chunk: int) -> int:
    """A group of the pool in which so many pages can be lost, and all of them matter; `pick` if it is one.

    Under the scheme "slots" the pool's groups are of slots, and one slot is free: nobody misses its pages.
    """
    sizes = [
        geometry.pages_per_chunk * min(geometry.chunks_per_group, geometry.slots - first)
        for first in range(0, geometry.slots, geometry.chunks_per_group)
    ]
    fit = [k for k, size in enumerate(sizes) if size >= pool.tier1_pages] or list(range(len(sizes)))
    if geometry.scheme == "slots":
        free = geometry.slot(chunk, Rotation(geometry.turned(iteration % geometry.slots)))
        fit = [k for k in fit if k != free // geometry.chunks_per_group] or fit
    return pick if pick in fit else fit[pick % len(fit)]
