"""What the scripts share that kill trainers inside their update: whom, when, and which kills count."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
from proof_children import Child, Job, Lane, Task, Tell, Work, in_lanes
from proof_lab import lose
from proof_place import Place, keep, progress, publish

from leto_rmp import Client

INSIDE = ("PROTECTED", "SYNCED", "UPDATED")
RECENT = 5  # updates that say how long one takes


class Kills:
    """Lives of trainers, each ended by SIGKILL, until enough of them were killed inside their update.

    A subclass has `one`, which is one life, and says what it left by ``left``: the phase in which the one
    that was killed first stood, until the state recovered from there has been compared.
    """

    IN_RECOVERY, ANYWHERE = 0.04, 0.04  # shares of the kills

    def __init__(self, spec: dict[str, Any], lane: Lane, tell: Tell) -> None:
        self.spec, self.lane, self.tell = spec, lane, tell
        self.rng = np.random.default_rng(spec["seed"])
        self.training = {name: spec[name] for name in ("seed", "optimizer", "scheme")}
        self.generation, self.iteration, self.goes_on_at = 0, 0, 0
        self.left = ""
        self.updates: list[float] = []  # how long they took, in seconds
        self.phases, self.seen = Counter[str](), Counter[str]()
        self.losses: list[dict[str, Any]] = []

    def one(self, last: bool = False) -> None:
        """A life, up to its end and what it left; the last one only has to be compared."""
        raise NotImplementedError

    def run(self) -> None:
        while not self.last:
            self.one()
        self.one(last=True)

    @property
    def inside(self) -> int:
        """Kills inside an update, recovered from and compared."""
        return sum(self.phases[name] for name in INSIDE)

    @property
    def last(self) -> bool:
        """The next life only has to be compared."""
        found = self.inside + (self.left in INSIDE)
        return found >= self.spec["kills"] or time.monotonic() > self.spec["until"]

    def drawn(self, last: bool) -> tuple[str, int]:
        """How the next life is to end, and in which of its updates; the first of all lives loads kernels."""
        first = not self.updates
        shares = [self.IN_RECOVERY, self.ANYWHERE, 1 - self.IN_RECOVERY - self.ANYWHERE]
        kind = str(self.rng.choice(["recovery", "anywhere", "update"], p=shares))
        return "last" if last else "update" if first else kind, 4 if first else 3

    @property
    def usual(self) -> float:
        """How long an update takes, in seconds."""
        return float(np.median(self.updates[-RECENT:]))

    def wait_in_update(self, child: Child, number: int, within_s: float) -> None:
        """Until an instant drawn from so many seconds, after a child protected the gradients of an update."""
        instant = child.noted(number) + float(self.rng.uniform(0, within_s))
        time.sleep(max(0.0, instant - time.monotonic()))

    def lose_pages(self, control: Client, groups: list[list[int]], whose: str = "") -> None:
        """15 or 16 pages in every group, and a parity page of each."""
        self.losses.append(lose(control, groups, self.rng, 16 - len(self.losses) % 2, poison=True))
        progress(f"{self.label}: {whose}{self.losses[-1]['lost']} pages lost")

    @property
    def label(self) -> str:
        return " ".join(
            str(self.spec[name]) for name in ("optimizer", "scheme", "state", "seed") if name in self.spec
        )

    def went_on(self, iteration: int) -> None:
        """The iteration that was recovered to; raises AssertionError if marks say another."""
        assert iteration == self.goes_on_at, f"it went on with {iteration}, and not with {self.goes_on_at}"
        self.iteration = iteration

    def counted(self) -> None:
        """What was recovered has been compared; only now the kill before it counts."""
        self.phases[self.left or "none"] += 1
        self.left = ""
        self.seen["compared"] += 1

    def result(self) -> dict[str, Any]:
        return {
            **{name: value for name, value in self.spec.items() if name != "until"},
            "kills inside the update": self.inside,
            "phases": dict(self.phases),
            "seen": dict(sorted(self.seen.items())),
            "iteration": self.iteration,
            "losses": self.losses,
        }


Page = Callable[[], tuple[dict[str, Any], str]]


def pages(
    where: dict[str, str],
    jobs: list[Job],
    total: Callable[[list[Job]], tuple[bool, str]],
    markdown: Callable[[dict[str, str], list[Job]], str],
) -> Page:
    """What makes the data and the page of the jobs as they are."""

    def page() -> tuple[dict[str, Any], str]:
        results = [job.result for job in jobs if job.result is not None]
        errors = {str(job.spec["seed"]): job.error for job in jobs if job.error}
        found = {"machine": where, "plan": total(jobs)[1], "runs": results, "errors": errors}
        return found, markdown(where, jobs)

    return page


def do(
    arguments: argparse.Namespace,
    jobs: list[Job],
    work: Work,
    tasks: dict[str, Task],
    page: Page,
    on_gpu: int,
) -> bool:
    """Do the jobs, keep the page; False: one failed. ``on_gpu``: lanes there, unless ``--lanes`` says."""
    until = time.monotonic() + arguments.seconds
    for job in jobs:
        job.spec["until"] = until
    lanes = arguments.lanes or (on_gpu if Place.on_gpu() else os.cpu_count() or 1)
    in_lanes(jobs, lanes, work, tasks, arguments.pool, lambda: keep(*page(), arguments.output))
    publish(*page(), arguments.output)
    for job in jobs:
        if job.error:
            spec = json.dumps({name: value for name, value in job.spec.items() if name != "until"})
            command = [sys.executable, sys.argv[0], "--device", arguments.device, "--one"]
            progress(f"failed, see above; repeat with {' '.join(command)} {spec!r}")
    return not any(job.error for job in jobs)
