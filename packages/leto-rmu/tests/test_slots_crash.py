"""Crashes under the scheme "slots": the free slot costs nothing, rotations wrap (I-1, I-2)."""

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
    interrupted_load,
    loss_patterns,
    orders,
    record_iteration,
    record_recovery,
    rotation,
)

from leto_rmp import PageRef
from leto_rmu import SGD, Action, Decision, ProtocolError, Segment, protected_groups

pytestmark = pytest.mark.timeout(900)  # on a busy machine; usually a tenth of that


def small(**more: object) -> World:
    """Three chunks of two sub-blocks, in two groups: six pages a chunk, twice H1."""
    return World(  # type: ignore[arg-type]
        **{  # type: ignore[arg-type]
            "scheme": "slots",
            "pool": Pool(data_pages=17),
            "segments": (Segment("a", 170, 1, 0), Segment("b", 150, 0, 170)),
            "grad_numel": 320,
            "chunk_pages": 6,
            **more,
        }
    )


def some(rng: np.random.Generator, pages: list[int], count: int) -> list[PageRef]:
    return [
        PageRef("arena", "data", int(k))
        for k in rng.choice(pages, size=min(count, len(pages)), replace=False)
    ]


def full_losses(world: World, truth: Truth, rng: np.random.Generator) -> list[PageRef]:
    """The free slot, H1 pages of every group, one row of every parity that is on the host."""
    free = world.places(*rotation(world, truth))[1]
    assert free is not None
    lost = [PageRef("arena", "data", page) for page in world.slot_order(free) if page is not None]
    h1 = world.pool.tier1_pages
    for g, order in enumerate(orders(world, truth)):
        lost += some(rng, order, h1)
        if truth.groups[g][0] in ("idle", "drained") and world.pool.tier2_pages:
            lost.append(PageRef("arena", "tier1", g * h1 + int(rng.integers(h1))))
    return lost


WORLDS = {
    "chunks of twice H1": small(),
    "one page of a plane": World(scheme="slots", pool=Pool(data_pages=8)),
    "sgd": World(scheme="slots", pool=Pool(data_pages=8, tier1_pages=4), optimizer=SGD()),
}


@pytest.mark.parametrize("name", WORLDS)
def test_h1_pages_of_every_group_in_every_state(name: str) -> None:
    """Whatever a chunk's size and wherever the crash was: H1 pages, one H row and all of the free slot."""
    world = WORLDS[name]
    memory, tally = world.start()[0], Counter()
    for i, point in enumerate(record_iteration(world, seed=7, tears=1)):
        rng = np.random.default_rng([7, i])
        if len({rotation(world, truth) for truth in point.truths}) > 1:
            continue  # a torn COMMIT: nobody knows which slot is free
        outcome = examine(
            world, memory, point, full_losses(world, point.truths[0], rng), seed=i, go_on=int(i % 3 == 0)
        )
        assert outcome.action is not None, f"{point.label}: {outcome.reason}"
        tally[outcome.action] += 1
    assert tally[Action.FINISH] > tally[Action.RESTART] > 0


@pytest.mark.parametrize("world", [small(), World()], ids=["slots", "undo"])
def test_what_belongs_to_a_group_follows_from_memory_alone(world: World) -> None:
    """Also with two of three replicas of the marker lost, and in the middle of an update."""
    memory = world.start()[0]
    for i, point in enumerate(record_iteration(world, seed=5, tears=1, before=3)):
        if len({rotation(world, truth) for truth in point.truths}) > 1:
            continue
        memory.restore(point.state)
        cells = world.plan.marker_pages
        if i % 3 and "in op" not in point.label:  # a torn record may be whole in one replica alone
            memory.lose(
                [PageRef("marker", "data", k) for k in range(3 * cells) if k // cells != i % 3], seed=i
            )
        expected = tuple(map(tuple, orders(world, point.truths[0])))
        assert protected_groups(memory) == expected, point.label


def test_groups_of_memory_without_state_are_refused() -> None:
    world = small()
    memory = LabMemory(world.pool)  # type: ignore[arg-type]
    with pytest.raises(ProtocolError, match="has an updater been here"):
        protected_groups(memory)
    up = world.updater(memory)
    with pytest.raises(ProtocolError, match="fresh, or the marker is lost"):
        protected_groups(memory)
    up.initialize()
    up.recover(Decision(Action.FRESH, 0, epoch=1).encode())
    with pytest.raises(ProtocolError, match="state was being loaded"):
        protected_groups(memory)
    memory.lose([PageRef("marker", "data", k) for k in range(3 * world.plan.marker_pages)], seed=1)
    with pytest.raises(ProtocolError, match="the marker is lost"):
        protected_groups(memory)


def test_every_crash_point_of_recoveries() -> None:
    """Recovery crashes at each of its ops and loses more pages; the third trainer must be exact."""
    world = small()
    memory, second, seen = world.start()[0], 0, Counter()
    for i, point in enumerate(record_iteration(world, seed=11, tears=1, before=4)):
        rng = np.random.default_rng([11, i])
        kinds = loss_patterns(world, rng, point.truths[-1])
        name = list(kinds)[i % len(kinds)]
        for k, again in enumerate(record_recovery(world, memory, point, kinds[name], seed=i)):
            more = (
                loss_patterns(world, rng, again.truths[-1])[f"{(1, 2, 4)[k % 3]} of anything"]
                if k % 2
                else []
            )
            outcome = examine(world, memory, again, more, seed=k, go_on=int(k % 11 == 0))
            second += 1
            seen[outcome.action] += 1
    assert second > 1000
    assert seen[Action.FINISH] > seen[Action.RESTART] > 0


@pytest.mark.parametrize("before", range(7))
def test_every_rotation(before: int) -> None:
    """Three chunks, four slots: the wrap is at another chunk in every iteration."""
    world = small(no_ops=frozenset({1, before}) if before % 3 == 2 else frozenset({1}))
    memory = world.start()[0]
    for i, point in enumerate(record_iteration(world, seed=before, tears=1, before=before, shuffle=True)):
        rng = np.random.default_rng([before, i])
        patterns = loss_patterns(world, rng, point.truths[int(rng.integers(len(point.truths)))])
        for name in ("none", "data at tolerance", list(patterns)[int(rng.integers(len(patterns)))]):
            examine(world, memory, point, patterns[name], seed=i, go_on=2 * int(i % 5 == 0))


def test_a_no_op_iteration_moves_nothing() -> None:
    world = small(no_ops=frozenset({1}))
    memory = world.start()[0]
    for i, point in enumerate(record_iteration(world, seed=3, tears=1)):
        rng = np.random.default_rng([3, i])
        for losses in loss_patterns(world, rng, point.truths[0]).values():
            examine(world, memory, point, losses, seed=i, go_on=int(i % 5 == 0))


def test_state_is_loaded_wherever_chunks_are() -> None:
    """A checkpoint over state that has moved; interrupted, it is never taken for state."""
    world = small()
    memory, up = world.start()
    world.train(up, 2)
    up.recover(Decision(Action.CHECKPOINT, 9, epoch=1, step=9).encode())
    for s in world.plan.segments:
        up.write(s.name, "master", world.initial(s.name))
    done = interrupted_load(world, memory, up)
    world.origin = -2  # as if two steps were behind it: that is where chunks were
    idle = (("idle", 0, 0),) * world.plan.groups
    examine(world, memory, Point("after", done, [Truth("ITERATION", 0, idle)]), go_on=5)


def test_a_lost_free_slot_is_healed_before_training_goes_on() -> None:
    world = small()
    memory, up = world.start()
    world.train(up, 3)
    free = world.places(3)[1]
    assert free is not None
    lost = [PageRef("arena", "data", page) for page in world.slot_order(free) if page is not None]
    memory.lose(lost, seed=1)
    assert isinstance(memory, LabMemory)
    idle = (("idle", 0, 0),) * world.plan.groups
    outcome = examine(world, memory, Point("idle", memory.snapshot(), [Truth("ITERATION", 3, idle)]), go_on=5)
    assert (outcome.action, outcome.verified) == (Action.RESTART, True)
    assert not memory.marks
