"""What trainers leave for those that come after them: kept by the agent, by rank, and passed on."""

from __future__ import annotations

from typing import Any

from test_survivors import FENCE, Node, killed

from leto_shadow import messages as m
from leto_shadow import wire
from leto_shadow.agent_actions import TellTrainer


def successors(node: Node, generation: int = 1) -> dict[int, dict[str, float]]:
    """Kill rank 1, and promote new trainers of both ranks: what each is told, by sid."""
    for rank in (0, 1):
        node.spawn(rank, 10 * generation + rank, generation + 1)
    node.core.trainer_gone(1, "killed", False, 0.9)
    node.receive(FENCE)
    node.core.trainer_gone(0, "killed", False, 1.1)
    actions = node.receive(m.Promote(generation, generation + 1, 1))
    told: list[Any] = [one for one in actions if isinstance(one, TellTrainer)]
    return {one.sid: one.message.hints for one in told}


def test_hints_are_kept_by_rank_newer_ones_in_the_place_of_older_ones() -> None:
    node = Node()
    for rank, values in ((0, {"a": 1.0, "b": 2.0}), (1, {"a": 5.0}), (0, {"b": 3.0})):
        assert node.core.trainer_says(rank, wire.Hint(values, 0), 0.5) == []
    assert successors(node) == {10: {"a": 1.0, "b": 3.0}, 11: {"a": 5.0}}


def test_without_hints_none_are_passed_on() -> None:
    assert successors(Node()) == {10: {}, 11: {}}


def test_a_trainer_that_leaves_too_many_is_ended_and_what_was_kept_stays() -> None:
    node = Node()
    most = {f"h{k}": float(k) for k in range(wire.HINTS_MAX)}
    assert killed(node.core.trainer_says(1, wire.Hint(most, 0), 0.5)) == []
    assert killed(node.core.trainer_says(1, wire.Hint({"one": 1.0}, 0), 0.6)) == [1]
    assert successors(node)[11] == most


def test_a_hint_that_crossed_the_order_to_retire_is_dropped() -> None:
    node = Node()
    node.core.trainer_gone(1, "killed", False, 0.9)
    node.receive(FENCE)
    stale = node.core.stale.total()
    assert killed(node.core.trainer_says(0, wire.Hint({"a": 1.0}, 0), 1.0)) == []
    assert node.core.stale.total() == stale + 1
