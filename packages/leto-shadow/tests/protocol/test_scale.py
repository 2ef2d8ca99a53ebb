"""What a recovery costs grows with the number of nodes, and no faster: messages, and steps of the code.

Nothing is timed here. Steps are lines of leto_shadow that the interpreter executes, which repeat exactly.
"""

from __future__ import annotations

import sys
from collections import Counter
from types import FrameType
from typing import Any

import pytest

from leto_shadow.actions import Action
from leto_shadow.config import BEAT_S, beat_s
from leto_shadow.levels import NextWorld
from leto_shadow.phases import Phase
from leto_shadow.simulation.scale import Cost, Failing, ScaledJob, measure

SIZES = (8, 32, 128)
GROWTH = 4.0  # of a cost that a job of four times as many nodes may have


def per_node(cost: Cost, nodes: int) -> tuple[Counter[str], Counter[str]]:
    """Messages of each kind and node, rounded: one message of a whole job is none of a node."""
    return tuple(Counter({k: round(n / nodes) for k, n in way.items()}) for way in (cost.up, cost.down))  # type: ignore[return-value]


@pytest.mark.parametrize("failing", list(Failing))
def test_messages_grow_with_the_nodes_and_rounds_do_not(failing: Failing) -> None:
    costs = {nodes: measure(nodes, failing) for nodes in SIZES}
    for part in range(3):  # the recovery, the shadows behind it, one round of beats
        small, middle, large = (costs[nodes][part] for nodes in SIZES)
        assert per_node(small, SIZES[0]) == per_node(middle, SIZES[1]) == per_node(large, SIZES[2])
        assert small.rounds == middle.rounds == large.rounds
        for way in ("up", "down", "up_bytes", "down_bytes"):
            first, second, third = (_total(getattr(cost, way)) for cost in (small, middle, large))
            # a straight line: four times as many nodes add four times as much (bytes: numbers get longer)
            assert abs((third - second) - 4 * (second - first)) <= third // 20, way


def _total(value: int | Counter[str]) -> int:
    return value if isinstance(value, int) else value.total()


def test_a_recovery_takes_a_known_number_of_messages_from_each_node() -> None:
    recovery, shadows, _ = measure(32, Failing.TRAINER)
    answers = {"Fenced": 1, "Repaired": 1, "SummaryOf": 1, "ResumedOf": 1}
    orders = {"Fence": 1, "Repair": 1, "Promote": 1, "Decide": 1}
    up, down = per_node(recovery, 32)
    assert {kind: up[kind] for kind in answers} == answers
    assert {kind: down[kind] for kind in orders} == orders
    assert recovery.up["ActiveFailed"] == 1
    assert shadows.up["ShadowAt"] == 3 * 32
    assert recovery.up.total() + recovery.down.total() <= 16 * 32


def test_ranks_of_one_node_share_its_messages() -> None:
    one, eight = (
        measure(16, Failing.TRAINER, local_ranks=1)[0],
        measure(16, Failing.TRAINER, local_ranks=8)[0],
    )
    for kind in ("Fence", "Repair", "Promote", "Decide"):
        assert one.down[kind] == eight.down[kind] == 16
    assert eight.up["SummaryOf"] == 8 * 16


def steps(nodes: int, failing: Failing) -> int:
    """Lines of leto_shadow executed for one recovery and the shadows behind it."""
    count = 0

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        nonlocal count
        if "leto_shadow" not in frame.f_code.co_filename:
            return None
        count += event == "line"
        return trace

    job = ScaledJob(nodes, shadow_level=0 if failing is Failing.TRAINER_COLD else 3)
    job.settle()
    job.fail(failing)
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        job.settle()
    finally:
        sys.settrace(before)
    assert job.phase is Phase.TRAINING
    return count


@pytest.mark.parametrize("failing", list(Failing))
def test_steps_grow_with_the_nodes(failing: Failing) -> None:
    small, large = steps(32, failing), steps(128, failing)
    assert large <= GROWTH * small, f"{small} steps for 32 nodes, {large} for 128"


def test_a_look_at_all_ranks_for_each_message_would_be_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: each report of one shadow makes the coordinator look at all of them."""
    original = NextWorld.advance

    def advance(self: NextWorld, now: float) -> list[Action]:
        self._unasked = set(self._node_of_rank)
        return original(self, now)

    monkeypatch.setattr(NextWorld, "advance", advance)
    small, large = steps(32, Failing.TRAINER), steps(128, Failing.TRAINER)
    assert large > 2 * GROWTH * small


def test_beats_become_rarer_where_the_coordinator_could_not_take_them() -> None:
    assert beat_s(1) == beat_s(1000) == BEAT_S
    assert 16_384 / beat_s(16_384) == pytest.approx(5000)
    job = ScaledJob(1200)
    job.settle()
    assert {node.agent.beat_s for node in job.nodes} == {1200 / 5000}
