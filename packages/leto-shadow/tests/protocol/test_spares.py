"""Trainers that a spare node keeps ready: started without a rank, replaced, and given one."""

from __future__ import annotations

from typing import Any

from leto_shadow import messages as m
from leto_shadow import wire
from leto_shadow.agent_actions import (
    CheckDevices,
    KillTrainer,
    Note,
    RenameTrainer,
    SpawnTrainer,
    Tell,
    TellTrainer,
)
from leto_shadow.agent_core import AgentCore
from leto_shadow.config import Deadlines
from leto_shadow.trainer_states import TrainerState


def spare(shadow_level: int = 3) -> tuple[AgentCore, list[Any]]:
    """The agent of a spare node with places for two ranks, and the first things that it does."""
    agent = AgentCore(2, 2, "host", Deadlines(), (), 0.0, shadow_level)
    actions = agent.receive(m.Welcome(0, 4, spare=True), 1.0)
    assert agent.tick(1.0) == [CheckDevices(anew=False)]  # which takes its time here
    return agent, actions


def waiting() -> AgentCore:
    """Both trainers wait, at L2 and at L0."""
    agent, _ = spare()
    for place, level in ((-2, 2), (-1, 0)):
        sid = next(sid for sid, one in agent.trainers.items() if one.rank == place)
        agent.trainer_spawned(sid, 100 - place, 1.0)
        assert agent.trainer_says(sid, wire.Hello(100 - place, -1), 2.0) == [
            TellTrainer(sid, wire.Advance(2, 0))
        ]
        (note,) = agent.trainer_says(sid, wire.LevelReached(level, 0), 3.0)
        assert note == Note("spare_level", {"place": -1 - place, "level": level})
    return agent


def test_a_spare_starts_a_trainer_for_each_place() -> None:
    agent, actions = spare()
    assert [(type(one), one.rank) for one in actions] == [(SpawnTrainer, -2), (SpawnTrainer, -1)]
    assert agent.tick(2.0) == []
    assert agent.beat(2.0).progress == ()
    assert spare(0)[1] == [], "no shadows are wanted, and nothing warm"


def test_the_place_of_a_lost_node_is_taken_by_warm_processes() -> None:
    agent = waiting()
    by_place = {one.rank: one for one in agent.trainers.values()}
    agent.receive(m.Welcome(2, 4), 4.0)
    for rank, place in ((2, -1), (3, -2)):
        taken = by_place[place]
        old = taken.sid
        note, renamed = agent.receive(m.SpawnShadow(rank, 40 + rank, 7), 4.0)
        assert note == Note("spare_trainer_taken", {"rank": rank, "pid": 100 - place})
        assert renamed == RenameTrainer(old, 40 + rank, rank)
        assert agent.trainers[40 + rank] is taken
        assert (taken.rank, taken.world, taken.level) == (rank, 7, 0)
    assert agent.receive(m.AdvanceShadow(3, 43, 7, 2), 5.0) == [TellTrainer(43, wire.Advance(2, 7))]
    assert agent.trainer_says(43, wire.LevelReached(2, 7), 6.0) == [Tell(m.ShadowAt(3, 43, 7, 2))]
    assert agent.tick(7.0) == [], "no other ones are started: it is no spare any more"


def test_one_that_says_hello_late_is_taken_as_well() -> None:
    agent, _ = spare()
    agent.receive(m.Welcome(0, 4), 1.0)
    agent.receive(m.SpawnShadow(1, 9, 1), 1.0)
    assert agent.trainer_says(9, wire.Hello(5, -1), 2.0) == [], "it was started without a rank"
    assert agent.trainers[9].state is TrainerState.SHADOW


def test_one_that_has_ended_is_not_taken() -> None:
    agent = waiting()
    dead = next(sid for sid, one in agent.trainers.items() if one.rank == -1)
    agent.trainer_says(dead, wire.Failed("prepare", "an error"), 4.0)
    agent.receive(m.Welcome(2, 4), 4.0)
    assert agent.receive(m.SpawnShadow(2, 42, 7), 4.0) == [SpawnTrainer(42, 2)]
    assert agent.trainer_gone(dead, "exit status 1", False, 5.0) == [], "nobody misses it"


def test_one_that_fails_is_started_again_with_growing_pauses_and_then_no_more() -> None:
    agent, _ = spare()
    now = 1.0
    for failures, pause_s in ((1, 1.0), (2, 2.0), (3, 0.0)):
        sid = next(sid for sid, one in agent.trainers.items() if one.rank == -1)
        (note,) = agent.trainer_gone(sid, "exit status 1", False, now)
        assert note.fields["failures"] == failures
        if pause_s:
            assert agent.tick(now + pause_s - 0.1) == []
            assert [one.rank for one in agent.tick(now + pause_s)] == [-1]
            now += pause_s
            agent.receive(m.Beat(-1, 0), now)
    assert agent.tick(now + 20.0) == [], "its place is left to a cold start"


def test_a_spare_ends_with_its_trainers() -> None:
    agent = waiting()
    actions = agent.receive(m.Shutdown(0, "over"), 4.0)
    assert {one.sid for one in actions if isinstance(one, KillTrainer)} == set(agent.trainers)
    for sid in list(agent.trainers):
        assert not agent.done
        agent.trainer_gone(sid, "killed", False, 5.0)
    assert agent.done
