"""A made-up event log with the demo's four failures, for tests of what reads it."""

from __future__ import annotations

from typing import Any

from leto_shadow.drills import Drill, Lose

KINDS = {"kill-forward": "kill-forward", "kill-update": "kill-update", "hang": "hang", "manager": "manager"}


LOSE = Lose(allocation="arena", group=0, pages=6, tier1=1)
DRILLS = {
    "kill-forward": Drill("kill-forward", "kill", 1, 10, "forward"),
    "kill-update": Drill("kill-update", "kill", 0, 20, "update", group=0, chunk=1, op="update", lose=LOSE),
    "hang": Drill("hang", "hang", 1, 30, "forward"),
    "manager": Drill("manager", "kill_manager", 0, 37, "forward"),
}
"""The drills of :func:`four_failures`, for a pool with H1 = 6 and H2 = 1."""


class Story:
    """Collects events with a clock of its own."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self.now = 100.0
        self.generation = 0

    def add(self, event: str, after_s: float = 0.0, **fields: Any) -> None:
        self.now += after_s
        self.events.append({"t": self.now + 1e9, "mono": self.now, "event": event, **fields})

    def train(self, first: int, last: int) -> None:
        for iteration in range(first, last):
            for rank in (1, 0):
                values = {"loss": 5.0 / (1 + 0.1 * iteration), "tokens": 1024.0, "seconds": 0.25}
                self.add(
                    "metrics", 0.125, rank=rank, iteration=iteration, generation=self.generation, **values
                )

    def fail(self, drill: str | None, kind: str, rank: int, iteration: int, detected_s: float) -> None:
        if drill is not None:
            self.add("drill_fired", 0.1, id=drill, rank=rank, generation=self.generation)
        self.add(
            "failure",
            detected_s,
            kind=kind,
            rank=rank,
            iteration=iteration,
            detected_s=detected_s,
            detail="<gone>",
        )
        self.add("recovery_begun", generation=self.generation + 1, rank=rank, iteration=iteration)

    def recover(
        self,
        iteration: int,
        source: str,
        after_s: float,
        lost_pages: int = 0,
        repaired: tuple[int, int] | None = None,
    ) -> None:
        """`repaired`: (rank, pages) that it reconstructed, with no spare parity left."""
        self.generation += 1
        self.add("promoted", after_s * 0.75, generation=self.generation)
        for rank in (0, 1):
            parts = {"attach": 0.01}
            if source == "in-place":
                pages = repaired[1] if repaired is not None and repaired[0] == rank else 0
                parts |= {"pages_reconstructed": float(pages), "verified": float(pages == 0)}
            self.add(
                "resumed",
                rank=rank,
                iteration=iteration,
                source=source,
                generation=self.generation,
                breakdown=parts,
            )
        self.add(
            "recovered",
            after_s * 0.25,
            generation=self.generation,
            iteration=iteration,
            source=source,
            lost_pages=lost_pages,
            breakdown={
                "fence": after_s * 0.25,
                "prepare": after_s * 0.5,
                "resume": after_s * 0.25,
                "total": after_s,
            },
        )


def four_failures() -> list[dict[str, Any]]:
    story = Story()
    story.add("job_started", world_size=2)
    for rank in (0, 1):
        story.add("shadow_level", 1.0, rank=rank, level=3, world=1)
    story.add("promoted", generation=0)
    story.add("started", 0.5, generation=0, iteration=0, source="fresh")
    story.train(0, 10)
    story.fail("kill-forward", "exit", 1, 10, 0.125)
    story.recover(10, "in-place", 0.5)
    story.train(10, 20)
    story.fail("kill-update", "exit", 0, 20, 0.125)
    story.add("pages_lost", rank=0, generation=2, detail="kill-update: lost 6 pages, poisoned 1 parity pages")
    story.recover(21, "in-place", 0.5, lost_pages=7, repaired=(0, 6))
    story.train(21, 30)
    story.fail("hang", "hang", 1, 30, 3.0)
    story.recover(30, "in-place", 1.0)
    story.train(30, 37)
    story.fail("manager", "manager", 0, 36, 0.0)
    story.recover(25, "checkpoint", 2.0)
    story.train(25, 40)
    story.add("finished", iteration=40, exit_code=0)
    return story.events
