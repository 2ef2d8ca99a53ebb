"""An active trainer's closed channel: told at once where its end takes long, and never told twice (I-4)."""

from __future__ import annotations

import signal
from typing import Any

import pytest

from leto_shadow import messages as m
from leto_shadow import wire
from leto_shadow.agent_actions import KillTrainer, Note, Tell
from leto_shadow.agent_core import AgentCore
from leto_shadow.config import Deadlines
from leto_shadow.operability import DeviceFacts


class Node:
    """One agent of two ranks, promoted and training; trainers 0 and 1 are those of ranks 0 and 1."""

    def __init__(self) -> None:
        self.core = core = AgentCore(0, 2, "host", Deadlines(), (), 0.0)
        self.receive(m.Welcome(0, 2))
        self.receive(m.StartManagers(1))
        for rank in (0, 1):
            core.manager_up(rank, 1, "socket", 0.0)
            self.receive(m.SpawnShadow(rank, rank, 1))
            core.trainer_says(rank, wire.Hello(1, rank), 0.0)
            for level in (1, 2, 3):
                core.trainer_says(rank, wire.LevelReached(level, 1), 0.0)
        self.receive(m.Promote(0, 1, 1))
        for rank in (0, 1):
            core.trainer_says(rank, wire.Summary(b"", 0), 0.0)
        self.receive(m.Decide(0, b""))
        for rank in (0, 1):
            core.trainer_says(rank, wire.Resumed(0, "fresh", {}, 0), 0.0)

    def receive(self, message: Any) -> list[Any]:
        return self.core.receive(message, 0.0)


def told(actions: list[Any]) -> list[Any]:
    return [action.message for action in actions if isinstance(action, Tell)]


def gone(node: Node, sid: int, now: float) -> list[Any]:
    return node.core.trainer_gone(sid, "killed by SIGKILL", False, now, status=-signal.SIGKILL)


def test_an_end_that_takes_long_is_told_by_the_channel() -> None:
    node = Node()
    assert not node.core.watches_an_end
    assert node.core.trainer_hung_up(1, None, 1.0) == []
    assert node.core.watches_an_end
    assert told(node.core.tick(1.01)) == []
    actions = node.core.tick(1.03)
    [failed] = told(actions)
    assert isinstance(failed, m.ActiveFailed)
    assert (failed.rank, failed.generation, failed.facts) == (1, 0, None)
    assert [action.sid for action in actions if isinstance(action, KillTrainer)] == [1], (
        "it may be alive still"
    )
    assert not node.core.watches_an_end
    assert told(node.core.tick(1.5)) == []
    # I-4: the fence stands only when both processes are gone.
    assert m.Fenced(1) not in told(node.receive(m.Fence(1)))
    assert m.Fenced(1) not in told(gone(node, 0, 1.6))
    last = gone(node, 1, 1.7)
    assert told(last) == [m.Fenced(1)]
    [ended] = [action for action in last if isinstance(action, Note) and action.event == "trainer_ended"]
    assert "killed by SIGKILL" in ended.fields["detail"]


def test_an_end_that_follows_at_once_says_how() -> None:
    node = Node()
    node.core.trainer_hung_up(1, None, 1.0)
    [failed] = told(gone(node, 1, 1.005))
    assert failed.detail == "killed by SIGKILL"
    assert told(node.core.tick(1.1)) == []


def test_it_is_not_told_twice_when_the_fence_is_late() -> None:
    node = Node()
    node.core.trainer_hung_up(1, None, 1.0)
    assert len(told(node.core.tick(1.1))) == 1
    assert told(gone(node, 1, 1.2)) == []


def test_an_inoperable_device_is_told_with_it() -> None:
    node = Node()
    [failed] = told(node.core.trainer_hung_up(0, DeviceFacts("GPU-1", xids=(79,)), 1.0))
    assert failed.facts == DeviceFacts("GPU-1", xids=(79,))
    assert "Xid 79" in failed.detail


def test_where_a_device_holds_up_the_end_it_is_told_at_once() -> None:
    node = Node()
    actions = node.core.trainer_hung_up(1, DeviceFacts("GPU-1"), 1.0)
    [failed] = told(actions)
    assert (failed.rank, failed.facts) == (1, DeviceFacts("GPU-1"))
    assert [action.sid for action in actions if isinstance(action, KillTrainer)] == [1]
    assert not node.core.watches_an_end
    assert told(node.core.tick(1.5)) == []
    # I-4: the fence stands only when both processes are gone.
    assert told(node.receive(m.Fence(1))) == []
    assert told(gone(node, 0, 1.6)) == []
    assert told(gone(node, 1, 1.7)) == [m.Fenced(1)]


def test_a_fence_that_is_faster_makes_it_the_fences_business() -> None:
    node = Node()
    node.core.trainer_hung_up(1, None, 1.0)
    node.receive(m.Fence(1))
    assert told(node.core.tick(1.1)) == []
    assert not node.core.watches_an_end


@pytest.mark.parametrize("state", ["shadow", "finished", "failed"])
def test_others_may_hang_up(state: str) -> None:
    """A shadow's end is reported when it is gone; one that finished or failed has said so."""
    node = Node()
    sid = 0
    if state == "shadow":
        sid = 2
        node.receive(m.SpawnShadow(0, sid, 2))
        node.core.trainer_says(sid, wire.Hello(1, 0), 1.0)
    elif state == "finished":
        node.core.trainer_says(sid, wire.Finished(5), 1.0)
    else:
        node.core.trainer_says(sid, wire.Failed("train", "ValueError: no"), 1.0)
    assert not node.core.is_active(sid)
    for facts in (None, DeviceFacts("GPU-1")):
        assert told(node.core.trainer_hung_up(sid, facts, 1.0)) == []
    assert told(node.core.tick(1.1)) == []
