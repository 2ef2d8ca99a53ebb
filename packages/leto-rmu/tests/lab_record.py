"""Crash points: an executor that keeps memory as a crash before, or in, each operation would leave it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from lab_world import LabMemory, State, World

import leto_rmu
from leto_rmp import PageRef
from leto_rmu import Action, Decision, Executor, Op, ResumableUpdater
from leto_rmu.faults import Stopped, tear


@dataclass(frozen=True)
class Truth:
    """What has been completed, from the order of operations alone. ``groups``: (state, chunk, ring slot)."""

    phase: str
    iteration: int
    groups: tuple[tuple[str, int, int], ...]
    regrading: bool = False  # gradients in memory are being computed again

    @property
    def updating(self) -> bool:
        return self.phase == "SYNCED"


@dataclass
class Point:
    """A crash: memory as it was left, and what may be true of it (a torn mark may count or not)."""

    label: str
    state: State
    truths: list[Truth]


@dataclass
class Recorder(Executor):
    """Apply everything; keep a copy of memory before each op, and ``tears`` torn ones."""

    memory: LabMemory
    world: World
    truth: list[Truth]
    rng: np.random.Generator
    tears: int = 1
    shuffle: bool = False
    recovering: bool = False
    only: int | None = None  # keep this op's points only, then crash there
    regrade: bool = False  # recovering, with gradients computed again
    regraded: bool = False  # and that has been done
    points: list[Point] = field(default_factory=list)
    count: int = 0
    _slots: dict[int, int] = field(default_factory=dict)  # where a group's newest parity was written
    _last: dict[int, str] = field(default_factory=dict)  # a group's newest op that is no mark

    def choose(self, ready: list[str]) -> int:
        return int(self.rng.integers(len(ready))) if self.shuffle else 0

    def run(self, op: Op) -> None:
        if self.only is None or self.only == self.count:
            self._keep(op)
        if self.only == self.count:
            raise Stopped(str(op))
        self.count += 1
        op.apply()
        self.regraded |= op.name == "recompute"
        if op.group is not None and op.name not in ("mark", "commit"):
            self._last[op.group] = op.name
        self.truth = [self._after(op, truth) for truth in self.truth]

    def _keep(self, op: Op) -> None:
        here = self.memory.snapshot()
        label = f"op {self.count}{' of recovery' if self.recovering else ''}: {op}"
        self.points.append(Point(f"before {label}", here, list(self.truth)))
        for _ in range(self.tears):
            flying = [op, *(other for other in self.in_flight if self.rng.random() < 0.5)]
            possible = list(self.truth)
            slots = dict(self._slots)
            for one in flying:
                self._tear(one)
                possible += [self._after(one, truth) for truth in possible]
            self._slots = slots
            names = " + ".join(str(one) for one in flying[1:])
            self.points.append(
                Point(f"in {label} {'with ' + names if names else ''}", self.memory.snapshot(), possible)
            )
            self.memory.restore(here)

    def _tear(self, op: Op) -> None:
        if op.name == "acknowledge":
            kept = [ref for ref in op.refs if self.rng.random() < 0.5 and ref in self.memory.marks]
            self.memory.acknowledge(kept)
        else:
            tear([op], self.rng)

    def _after(self, op: Op, truth: Truth) -> Truth:
        """What is true once ``op`` is complete."""
        if op.name in ("load", "parity"):
            self._slots[op.group] = self._slot(op)  # type: ignore[index]
        if op.name not in ("mark", "commit"):
            return truth
        if op.group is None:
            return self._rank(truth)
        groups = list(truth.groups)
        slot = self._slots.get(op.group, groups[op.group][2])
        if op.name == "commit":
            groups[op.group] = ("commit", op.chunk or 0, slot)
        elif self._last.get(op.group) in ("drain", "tier2"):
            groups[op.group] = ("drained", 0, 0)
        else:
            groups[op.group] = ("undo", op.chunk or 0, slot)
        return dataclasses.replace(truth, groups=tuple(groups))

    def _rank(self, truth: Truth) -> Truth:
        idle = tuple(("idle", 0, 0) for _ in truth.groups)
        t = truth.iteration
        if self.regrade and truth.phase == "SYNCED" and truth.regrading == self.regraded:
            return dataclasses.replace(truth, regrading=not self.regraded)
        if self.recovering and truth.phase in ("COMPUTE", "PROTECTED"):
            return Truth("ITERATION", t, idle)
        following = {
            "ITERATION": Truth("COMPUTE", t, idle),
            "COMPUTE": Truth("PROTECTED", t, idle),
            "PROTECTED": Truth("SYNCED", t, idle),
            "SYNCED": Truth("UPDATED", t, idle),
            "UPDATED": Truth("ITERATION", t + 1, idle),
        }
        return following[truth.phase]

    def _slot(self, op: Op) -> int:
        ring = self.memory.regions["parity_ring"].pages
        offset = op.writes[0].__array_interface__["data"][0] - ring.__array_interface__["data"][0]
        return int(offset) // (self.world.pool.tier1_pages * self.world.pool.page_bytes)


def truth_of(world: World, up: ResumableUpdater) -> list[Truth]:
    """Between two iterations nothing is open."""
    return [Truth("ITERATION", up.iteration, tuple(("idle", 0, 0) for _ in range(world.plan.groups)))]


def record_iteration(
    world: World,
    *,
    seed: int,
    tears: int,
    shuffle: bool = False,
    before: int = 1,
    kind: type[Recorder] | None = None,
) -> list[Point]:
    """All crash points of iteration number ``before``, after so many uninterrupted ones."""
    memory, up = world.start()
    world.train(up, before)
    recorder = (kind or Recorder)(
        memory, world, truth_of(world, up), np.random.default_rng(seed), tears, shuffle
    )
    up.executor = recorder
    world.iterate(up)
    recorder.points.append(Point("after the last op", memory.snapshot(), list(recorder.truth)))
    up.executor = Executor()
    world.check(memory, up)
    return recorder.points


def interrupted_load(world: World, memory: LabMemory, up: ResumableUpdater) -> State:
    """initialize(): at no crash point before its last mark is it taken for state. Memory is left loaded."""
    recorder = Recorder(memory, world, [], np.random.default_rng(0), tears=3)
    up.executor = recorder
    up.initialize(0, world.job(0))
    done = memory.snapshot()
    accepted = []
    for point in recorder.points:
        memory.restore(point.state)
        if world.updater(memory).position().phase is not None:
            accepted.append(point.label)
    last = f"in op {recorder.count - 1}: mark"
    assert all(label.startswith(last) for label in accepted)  # one replica of the last mark was complete
    memory.restore(done)
    return done


def record_recovery(
    world: World,
    memory: LabMemory,
    point: Point,
    losses: Sequence[PageRef] = (),
    *,
    seed: int,
    tears: int = 1,
    shuffle: bool = False,
    only: int | None = None,
) -> list[Point]:
    """Crash points of the recovery from ``point`` with ``losses``; empty if that recovery is refused."""
    memory.restore(point.state)
    memory.lose(losses, seed)
    up = world.updater(memory)
    raw = leto_rmu.decide([up.summary()])
    action = Decision.decode(raw).action
    if action not in (Action.RESTART, Action.FINISH):
        return []
    ahead = ("ITERATION", "COMPUTE", "PROTECTED")
    truths = [t for t in point.truths if (t.phase in ahead) == (action is Action.RESTART)]
    recorder = Recorder(memory, world, truths, np.random.default_rng(seed), tears, shuffle, True, only)
    recorder.regrade = Decision.decode(raw).regrade
    up.executor = recorder
    try:
        up.recover(raw)
    except Stopped:
        pass
    else:
        recorder.points.append(Point("after recovery", memory.snapshot(), list(recorder.truth)))
    for found in recorder.points:
        found.label += f" (first crash {point.label}; lost {', '.join(map(str, losses)) or 'nothing'})"
    return recorder.points
