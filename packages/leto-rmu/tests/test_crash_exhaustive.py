"""Every crash point of a small configuration, crossed with losses in every kind of memory (I-1, I-2)."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from rmu_lab import (
    LabMemory,
    Point,
    Pool,
    Truth,
    World,
    examine,
    examine_all,
    interrupted_load,
    loss_patterns,
    record_iteration,
    record_recovery,
)

from leto_rmu import SGD, Action, Decision, Segment

pytestmark = pytest.mark.timeout(900)  # on a busy machine; usually a tenth of that

WORLDS = {
    "adamw": World(),
    "sgd, one plane more, no tier 2": World(
        pool=Pool(tier1_pages=4, tier2_pages=0, data_pages=8), optimizer=SGD(), chunk_pages=4
    ),
    "several chunks' runs, two tier-2 rows": World(
        pool=Pool(data_pages=13, tier1_pages=6, tier2_pages=2),
        segments=(Segment("a", 301, 1, 0), Segment("b", 350, 0, 310)),
        grad_numel=700,
    ),
    "slots": World(scheme="slots", pool=Pool(data_pages=8)),
    "slots, chunks of two sub-blocks": World(
        scheme="slots",
        pool=Pool(data_pages=17),
        segments=(Segment("a", 301, 1, 0), Segment("b", 250, 0, 310)),
        grad_numel=700,
        chunk_pages=6,
    ),
    "slots, sgd, no tier 2, not aligned": World(
        scheme="slots",
        align=False,
        pool=Pool(tier1_pages=3, tier2_pages=0, data_pages=7),
        optimizer=SGD(),
        chunk_pages=2,
        segments=(Segment("a", 100, 0, 3), Segment("b", 77, 1, 103)),
    ),
}


def any_truth(point: Point, rng: np.random.Generator) -> Truth:
    return point.truths[int(rng.integers(len(point.truths)))]


SOME = 5
"""Of so many patterns of losses CI takes one at a crash point; the nightly session takes them all."""


def memory_of(world: World) -> LabMemory:
    return world.start()[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "share"),
    [("adamw", 1)]
    + [(name, SOME) for name in WORLDS if name != "adamw"]
    + [pytest.param(name, 1, marks=pytest.mark.nightly) for name in WORLDS if name != "adamw"],
)
def test_every_crash_point_with_every_loss(name: str, share: int) -> None:
    """Stopped before and torn in the middle of every op, with every pattern of losses (or one in `share`)."""
    world = WORLDS[name]
    memory, tally = memory_of(world), Counter()

    def losses_of(point: Point, i: int) -> dict[str, list]:
        rng = np.random.default_rng([7, i])
        return loss_patterns(world, rng, any_truth(point, rng))

    points = record_iteration(world, seed=7, tears=1)
    for kind, outcome in examine_all(world, memory, points, losses_of, share=share):
        tally[kind, outcome.action] += 1
    refused = {kind for kind, action in tally if action is None}
    # The matrix must contain both: losses that are survived everywhere and losses that are refused.
    assert {"data beyond", "the marker", "the job state"} <= refused
    for kind in ("none", "one of U", "one Q buffer", "all of R", "all of the ring", "two marker replicas"):
        assert kind not in refused
        assert tally[kind, Action.FINISH] > tally[kind, Action.RESTART] > 0


@pytest.mark.slow
def test_every_crash_point_of_every_recovery() -> None:
    """Recovery crashes too, at each of its ops, and loses more pages; the third trainer must be exact."""
    world = WORLDS["adamw"]
    memory, second, seen = memory_of(world), 0, Counter()
    for i, point in enumerate(record_iteration(world, seed=11, tears=1)):
        rng = np.random.default_rng([11, i])
        kinds = loss_patterns(world, rng)
        name = list(kinds)[i % len(kinds)]
        for k, again in enumerate(record_recovery(world, memory, point, kinds[name], seed=i)):
            more = loss_patterns(world, rng)[f"{(1, 2, 4)[k % 3]} of anything"] if k % 2 else []
            outcome = examine(world, memory, again, more, seed=k, go_on=int(k % 11 == 0))
            second += 1
            seen[outcome.action] += 1
    assert second > 3000
    assert seen[Action.FINISH] > seen[Action.RESTART] > 0


@pytest.mark.slow
def test_parity_rows_lost_at_the_first_crash_and_data_at_the_second() -> None:
    """Lost parity is rebuilt before training goes on: the next loss finds full tolerance again."""
    world = WORLDS["adamw"]
    memory = memory_of(world)
    for i, point in enumerate(record_iteration(world, seed=5, tears=1)):
        for first in ("all H", "all of the ring", "all of R", "all of U"):
            rng = np.random.default_rng([5, i])
            losses = loss_patterns(world, rng)[first]
            points = record_recovery(world, memory, point, losses, seed=i, tears=0)
            if points:
                recovered = points[-1]
                outcome = examine(
                    world, memory, recovered, loss_patterns(world, rng)["data at tolerance"], seed=i
                )
                assert outcome.action is not None


def test_a_no_op_iteration_at_every_crash_point() -> None:
    """found_inf commits the iteration without touching state; a crash changes nothing about that."""
    world = World(no_ops=frozenset({1}))
    memory = memory_of(world)
    for i, point in enumerate(record_iteration(world, seed=3, tears=2)):
        for losses in loss_patterns(world, np.random.default_rng([3, i])).values():
            examine(world, memory, point, losses, seed=i, go_on=int(i % 5 == 0))


def test_initialize_at_every_crash_point_is_never_taken_for_state() -> None:
    """Until its last mark, interrupted initialization over older state leaves nothing to recover from."""
    world = World()
    memory, up = world.start()
    world.train(up, 2)
    up.recover(Decision(Action.CHECKPOINT, 2, epoch=1, step=2).encode())
    assert world.updater(memory).position().phase is None, "masters may be overwritten from here on"
    for s in world.plan.segments:
        up.master(s.name).copy_(world.initial(s.name))
    done = interrupted_load(world, memory, up)
    examine(
        world, memory, Point("after", done, [Truth("ITERATION", 0, (("idle", 0, 0),) * world.plan.groups)])
    )
