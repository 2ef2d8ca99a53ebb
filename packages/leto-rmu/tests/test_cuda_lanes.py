"""Lanes: whatever the device does at once, and wherever it stops, the state is exact (I-2).

A simulated device runs the lanes in random order and dies at a random instant; a fresh updater takes over.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from rmu_lab import Pool, Wrong
from sim_lanes import SimQueues, SimWorld

import leto_rmu
from leto_rmp import PageRef
from leto_rmu import SGD, Decision, Segment
from leto_rmu.cuda.lanes import Lanes, Resource
from leto_rmu.errors import ProtocolError
from leto_rmu.faults import Stopped

SEGMENTS = (Segment("a", 300, 0, 3, 0), Segment("b", 277, 1, 303, 301), Segment("c", 590, 0, 590))
WORLDS: dict[str, dict[str, Any]] = {
    "undo": {},
    "slots": {"scheme": "slots", "pool": Pool(data_pages=8)},
    "slots, sgd": {
        "scheme": "slots",
        "optimizer": SGD(),
        "pool": Pool(data_pages=12, tier1_pages=4, tier2_pages=1),
    },
}


def world_of(name: str, lanes: type[Lanes] = Lanes) -> SimWorld:
    world = SimWorld(segments=SEGMENTS, grad_numel=1190, model_bytes=1200, **WORLDS[name])
    world.lanes = lanes
    assert world.plan.groups >= 4
    return world


def run(world: SimWorld, seed: int, stop: int | None, until: int = 2) -> tuple[Any, SimQueues, bool]:
    """Train on simulated lanes; did it come to its end?"""
    rng = np.random.default_rng(seed)
    world.queues = None
    memory, _ = world.start()
    queues = world.queues = SimQueues(rng, stop)
    up = world.updater(memory)
    ended = False
    try:
        up.recover(leto_rmu.decide([up.summary()]))
        world.train(up, until)
        up.wait()  # type: ignore[attr-defined]
        ended = True
    except Stopped:
        pass
    finally:
        world.queues = None
    return memory, queues, ended


def resume(world: SimWorld, memory: Any, seed: int) -> str:
    """A fresh updater recovers, with pages lost; exact, or Wrong."""
    rng = np.random.default_rng([seed, 1])
    plan, h1 = world.plan, world.pool.tier1_pages
    lost = [PageRef("arena", "data", int(rng.integers(plan.planes * plan.plane_pages)))]
    lost.append(PageRef("parity_ring", "data", int(rng.integers(4 * h1))))
    if rng.random() < 0.5:
        memory.lose(lost, seed)
    up = world.updater(memory)
    try:
        raw = leto_rmu.decide([up.summary()])
        action = Decision.decode(raw).action
        up.recover(raw)
    except ProtocolError as error:
        raise Wrong(str(error)) from error
    if action not in ("finish", "restart"):
        raise Wrong(f"refused: {Decision.decode(raw).reason}")
    world.check(memory, up)
    world.train(up, up.iteration + 1)
    world.check(memory, up)
    return str(action)


@pytest.mark.parametrize("name", WORLDS)
def test_work_of_three_lanes_in_any_order(name: str) -> None:
    world = world_of(name)
    for seed in range(4):
        memory, queues, ended = run(world, seed, None, until=3)
        assert ended
        assert queues.together > 10, "lanes never overlapped"
        up = world.updater(memory)
        up.recover(leto_rmu.decide([up.summary()]))
        assert up.iteration == 3
        world.check(memory, up)


@pytest.mark.parametrize("name", WORLDS)
def test_the_process_dies_while_three_lanes_work(name: str) -> None:
    world, tally = world_of(name), Counter[str]()
    _, queues, _ = run(world, 0, None)
    for seed in range(30):
        stop = int(np.random.default_rng([seed, 2]).integers(queues.done))
        memory, _, ended = run(world, seed, stop)
        if not ended:
            tally[resume(world, memory, seed)] += 1
    print(f"{name}: {dict(tally)}")
    assert tally["finish"] > tally["restart"] > 0


class NoReaders(Lanes):
    """A mutant: who writes does not wait for who still reads."""

    def run(
        self, lane: str, work: Any, reads: Iterable[Resource] = (), writes: Iterable[Resource] = ()
    ) -> None:
        super().run(lane, work, reads, writes)
        self._read.clear()


class NoWriters(Lanes):
    """A mutant: who reads does not wait for who still writes."""

    def run(
        self, lane: str, work: Any, reads: Iterable[Resource] = (), writes: Iterable[Resource] = ()
    ) -> None:
        super().run(lane, work, reads, writes)
        self._wrote.clear()


class NoJoin(Lanes):
    """A mutant: UPDATED does not wait for the drains."""

    def join(self) -> None:
        pass


@pytest.mark.parametrize("mutant", [NoReaders, NoWriters, NoJoin])
@pytest.mark.parametrize("name", ["undo", "slots"])
def test_mutants_are_caught(name: str, mutant: type[Lanes]) -> None:
    healthy, world = world_of(name), world_of(name, mutant)
    _, queues, _ = run(healthy, 0, None)
    for seed in range(60):
        rng = np.random.default_rng([seed, 2])
        stop = int(rng.integers(queues.done))
        if seed % 3 == 1:  # around the end of an iteration
            stop = queues.done // 2 * (1 + seed % 2) - int(rng.integers(15))
        try:
            memory, _, ended = run(world, seed, None if seed % 3 == 0 else stop)
            if ended:
                up = world.updater(memory)
                up.recover(leto_rmu.decide([up.summary()]))
                world.check(memory, up)
            else:
                resume(world, memory, seed)
        except Wrong as wrong:
            print(f"seed {seed}: {wrong}")
            return
    pytest.fail("the mutant passed")
