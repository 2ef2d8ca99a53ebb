"""Survivors on one node: who is asked to retire, when one counts as fenced (I-4), what becomes of the others.

The whole protocol with survivors is in `test_simulation`; these are the agent's and the coordinator's single
steps, with nothing in between.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from leto_shadow import messages as m
from leto_shadow import wire
from leto_shadow.actions import Send
from leto_shadow.agent_actions import CheckReleased, KillTrainer, Note, RepairRank, Tell, TellTrainer
from leto_shadow.agent_core import AgentCore, TrainerState
from leto_shadow.classifier import Failure, FailureKind
from leto_shadow.config import Deadlines, JobPolicy
from leto_shadow.coordinator import Coordinator
from leto_shadow.operability import DeviceFacts
from leto_shadow.phases import Phase

FENCE = m.Fence(1, retire=(0, 1), retire_s=0.5)


class Node:
    """One agent of two ranks, promoted and training; trainers 0 and 1 are those of ranks 0 and 1."""

    def __init__(self, *, retires: bool = True) -> None:
        self.core = core = AgentCore(0, 2, "host", Deadlines(), (), 0.0)
        self.receive(m.Welcome(0, 2))
        self.receive(m.StartManagers(1))
        for rank in (0, 1):
            core.manager_up(rank, 1, "socket", 0.0)
            self.spawn(rank, rank, 1, retires=retires)
        self.receive(m.Promote(0, 1, 1))
        for rank in (0, 1):
            core.trainer_says(rank, wire.Summary(b"", 0), 0.0)
        self.receive(m.Decide(0, b""))
        for rank in (0, 1):
            core.trainer_says(rank, wire.Resumed(0, "fresh", {}, 0), 0.0)

    def spawn(self, rank: int, sid: int, world: int, *, retires: bool = True) -> None:
        self.receive(m.SpawnShadow(rank, sid, world))
        self.core.trainer_says(sid, wire.Hello(1, rank, retires=retires), 0.0)
        for level in (1, 2, 3):
            self.core.trainer_says(sid, wire.LevelReached(level, world), 0.0)

    def receive(self, message: Any, now: float = 1.0) -> list[Any]:
        return self.core.receive(message, now)

    def state(self, sid: int) -> TrainerState:
        return self.core.trainers[sid].state

    def release(self, sid: int, error: str | None = None, now: float = 1.1) -> list[Any]:
        """It says that it has given up writing, and the shell has looked."""
        asked = self.core.trainer_says(sid, wire.Released(0), now)
        assert asked == [CheckReleased(sid)], "its word is not enough"
        return self.core.released(sid, error, now)


def told(actions: list[Any]) -> list[Any]:
    return [action.message for action in actions if isinstance(action, Tell)]


def noted(actions: list[Any], event: str) -> list[dict[str, Any]]:
    return [action.fields for action in actions if isinstance(action, Note) and action.event == event]


def asked(actions: list[Any]) -> list[int]:
    return [
        one.sid for one in actions if isinstance(one, TellTrainer) and isinstance(one.message, wire.Retire)
    ]


def killed(actions: list[Any]) -> list[int]:
    return [action.sid for action in actions if isinstance(action, KillTrainer)]


def test_a_survivor_counts_when_it_was_seen_that_it_cannot_write() -> None:
    node = Node()
    node.core.trainer_gone(1, "killed", False, 0.9)
    assert asked(node.receive(FENCE)) == [0]
    assert node.core.awaits_survivors
    assert told(node.release(0)) == [m.Fenced(1, (), (m.Survivor(0, 0),))]
    assert not node.core.awaits_survivors
    assert node.core.active_of(0) is None
    actions = node.core.trainer_says(0, wire.Retired(2, 0), 1.3)
    assert told(actions) == [m.SurvivorAt(0, 0, 2)]
    [event] = noted(actions, "survived")
    assert (event["rank"], event["generation"], event["level"]) == (0, 0, 2)
    assert (event["gave_up_s"], event["seconds"]) == (pytest.approx(0.1), pytest.approx(0.3))
    assert node.state(0) is TrainerState.SHADOW


def test_a_survivor_that_is_a_shadow_before_the_fence_is_complete_is_told_with_it() -> None:
    node = Node()
    node.receive(FENCE)
    assert told(node.release(0)) == []
    assert told(node.core.trainer_says(0, wire.Retired(1, 0), 1.2)) == []
    assert told(node.release(1, now=1.3)) == [m.Fenced(1, (), (m.Survivor(0, 0, 1), m.Survivor(1, 1)))]


def test_past_the_deadline_a_survivor_is_killed_and_counts_when_it_is_gone() -> None:
    node = Node()
    node.core.trainer_gone(1, "killed", False, 0.9)
    node.receive(FENCE)
    assert killed(node.core.tick(1.4)) == []
    actions = node.core.tick(1.5)
    assert killed(actions) == [0]
    assert "not given up writing within 0.50 s" in noted(actions, "survivor_lost")[0]["detail"]
    assert node.core.trainer_says(0, wire.Released(0), 1.6) == [], "too late"
    assert killed(node.core.tick(2.0)) == []
    assert told(node.core.trainer_gone(0, "killed", False, 2.1, status=-9)) == [m.Fenced(1)]
    repairs = [one for one in node.receive(m.Repair(1, 1), 2.2) if isinstance(one, RepairRank)]
    assert {one.rank: one.read for one in repairs} == {0: False, 1: True}, "to be late is no memory error"


def test_a_survivor_that_can_write_after_all_is_killed() -> None:
    node = Node()
    node.core.trainer_gone(1, "killed", False, 0.9)
    node.receive(FENCE)
    actions = node.release(0, "it maps memfd:leto:arena writable")
    assert killed(actions) == [0]
    assert told(actions) == []
    assert told(node.core.trainer_gone(0, "killed", False, 1.3)) == [m.Fenced(1)]


def test_a_survivor_that_fails_or_dies_on_its_way_is_replaced() -> None:
    node = Node()
    node.receive(FENCE)
    actions = node.core.trainer_says(1, wire.Failed("retire", "a thread is left"), 1.1)
    assert (killed(actions), noted(actions, "survivor_lost")[0]["rank"]) == ([1], 1)
    assert told(node.core.trainer_gone(1, "exit status 1", False, 1.2)) == []
    assert told(node.release(0, now=1.3)) == [m.Fenced(1, (), (m.Survivor(0, 0),))]
    actions = node.core.trainer_gone(0, "killed by SIGSEGV", False, 1.4)
    assert isinstance(told(actions)[0], m.ShadowFailed)
    assert noted(actions, "survivor_lost")[0]["detail"] == "killed by SIGSEGV"


def test_a_survivor_that_never_becomes_a_shadow_is_replaced() -> None:
    node = Node()
    node.core.trainer_gone(1, "killed", False, 0.9)
    node.receive(FENCE)
    node.release(0)
    assert killed(node.core.tick(11.0)) == []
    assert killed(node.core.tick(11.2)) == [0]
    assert isinstance(told(node.core.trainer_gone(0, "killed", False, 11.3))[0], m.ShadowFailed)


@pytest.mark.parametrize(
    "why", ["not named", "no time", "cannot", "hung up", "drill", "inoperable", "finished"]
)
def test_who_is_not_asked(why: str) -> None:
    node = Node(retires=why != "cannot")
    trainer, fence = node.core.trainers[0], FENCE
    if why == "not named":
        fence = m.Fence(1, (1,), 0.5)
    elif why == "no time":
        fence = m.Fence(1)
    elif why == "hung up":
        node.core.trainer_hung_up(0, None, 0.9)
    elif why == "drill":
        node.core.trainer_says(0, wire.DrillFired("d", 0), 0.9)
    elif why == "inoperable":
        trainer.facts = DeviceFacts("observed", xids=(79,))
    elif why == "finished":
        node.core.trainer_says(0, wire.Finished(9), 0.9)
    actions = node.receive(fence)
    assert 0 in killed(actions)
    assert 0 not in asked(actions)


def test_one_that_is_asked_is_not_asked_again_and_a_fatal_fence_ends_it() -> None:
    node = Node()
    node.receive(FENCE)
    again = node.receive(m.Fence(2, (0, 1), 0.5), 1.2)
    assert (asked(again), killed(again)) == ([], [])
    assert killed(node.receive(m.Fence(3), 1.3)) == [0, 1]


def test_what_it_said_before_it_heard_is_dropped_and_a_drill_is_not() -> None:
    node = Node()
    node.receive(FENCE)
    for said in (wire.Metrics(3, {}, 0), wire.PeerLost("gone", 0), wire.Finished(9)):
        assert node.core.trainer_says(0, said, 1.1) == []
    assert noted(node.core.trainer_says(0, wire.DrillFired("d", 0), 1.1), "drill_fired")
    assert node.state(0) is TrainerState.RETIRING


def test_a_lost_peer_is_told_at_once_and_once() -> None:
    node = Node()
    [failed] = told(node.core.trainer_says(0, wire.PeerLost("connection closed by peer", 0), 0.8))
    assert isinstance(failed, m.ActiveFailed)
    assert (failed.rank, failed.secondary) == (0, True)
    node.core.trainer_gone(1, "killed", False, 0.9)
    assert asked(node.receive(FENCE)) == [0]
    assert told(node.release(0)) == [m.Fenced(1, (), (m.Survivor(0, 0),))]


def test_a_lost_peer_that_is_the_culprit_itself_ends() -> None:
    node = Node()
    node.core.trainer_says(0, wire.PeerLost("connection closed by peer", 0), 0.8)
    assert killed(node.receive(m.Fence(1, (1,), 0.5))) == [0]
    assert told(node.core.trainer_gone(0, "killed", False, 1.1)) == [], "it was told before"


def test_the_ready_shadow_is_promoted_and_not_the_survivor() -> None:
    node = Node()
    for rank in (0, 1):
        node.spawn(rank, 10 + rank, 2)
    node.core.trainer_gone(1, "killed", False, 0.9)
    node.receive(FENCE)
    node.release(0)
    node.core.trainer_says(0, wire.Retired(2, 0), 1.2)
    actions = node.receive(m.Promote(1, 2, 1))
    assert [one.sid for one in actions if isinstance(one, TellTrainer)] == [10, 11]
    assert node.core.active_of(0).sid == 10
    assert node.state(0) is TrainerState.SHADOW


def test_a_message_of_its_last_life_ends_a_survivor() -> None:
    node = Node()
    node.core.trainer_gone(1, "killed", False, 0.9)
    node.receive(FENCE)
    node.release(0)
    assert killed(node.core.trainer_says(0, wire.Metrics(3, {}, 0), 1.2)) == [0]


# --- the coordinator --------------------------------------------------------------------------------


def fences(coordinator: Coordinator, failure: Failure) -> list[m.Fence]:
    coordinator._fail(failure)
    return [
        one.message
        for one in coordinator._flush()
        if isinstance(one, Send) and isinstance(one.message, m.Fence)
    ]


def training(policy: JobPolicy) -> Coordinator:
    """Two nodes of two ranks, in training as far as `_fail` is concerned."""
    coordinator = Coordinator(2, policy, 0.0)
    for node in (0, 1):
        coordinator.receive(node, m.Join(node, 2, "host"), 0.0)
    coordinator.phase = Phase.TRAINING
    return coordinator


def test_all_but_the_culprit_may_retire() -> None:
    policy = JobPolicy(retire_s=0.5)
    failure = Failure(FailureKind.EXIT, 2, 7, "killed")
    assert fences(training(policy), failure) == [m.Fence(1, (0, 1), 0.5), m.Fence(1, (3,), 0.5)]


@pytest.mark.parametrize("why", ["off", "fatal", "shadows at L1"])
def test_nobody_may_retire(why: str) -> None:
    policy = JobPolicy(retire_s=0.0 if why == "off" else 0.5)
    if why == "shadows at L1":
        policy = replace(policy, shadow_level=1)
    kind = FailureKind.MANAGER if why == "fatal" else FailureKind.EXIT
    assert fences(training(policy), Failure(kind, 2, 7, "killed")) == [m.Fence(1)] * 2
