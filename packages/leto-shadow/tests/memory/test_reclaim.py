"""A reclaim through the agent and the coordinator: who is killed, when the hook is answered, what comes
back."""

from __future__ import annotations

import socket
from typing import Any

import pytest

from leto_shadow import agent_actions as todo
from leto_shadow import messages as m
from leto_shadow import oom_hook, oom_protocol, wire
from leto_shadow.actions import CloseStore, HostStore, Send
from leto_shadow.agent_core import AgentCore, TrainerState
from leto_shadow.config import Deadlines, JobPolicy
from leto_shadow.levels import NextWorld
from leto_shadow.messages import AdvanceShadow, DiscardShadow, ShadowAt, SpawnShadow
from leto_shadow.oom_protocol import Ask, Report, Verdict
from leto_shadow.trainer_states import TrainerRecord

GIB = 1 << 30
ASK = Ask(7, 0, 2 * GIB, GIB, 80 * GIB)
REPORT = Report(7, 0, 2 * GIB, GIB, 80 * GIB, 2 * GIB, 0.1, True)


def agent(shadow_level: int = 3, state: TrainerState = TrainerState.SHADOW, asked: int = 3) -> AgentCore:
    """An agent of ranks 0 and 1: active trainers 1 and 2, the shadow 3 of rank 0, and a shadow 4 of rank 1
    at L3."""
    core = AgentCore(0, 2, "host", Deadlines(), (), 0.0)
    core.receive(m.Welcome(0, 2), 0.0)
    core.generation = 1
    for sid, rank in ((1, 0), (2, 1)):
        core.trainers[sid] = TrainerRecord(sid, rank, 1, TrainerState.TRAINING, generation=1, iteration=5)
    core.trainers[3] = TrainerRecord(3, 0, 2, state, level=shadow_level, asked=asked)
    core.trainers[4] = TrainerRecord(4, 1, 2, TrainerState.SHADOW, level=3, asked=3)
    return core


def of(kind: type[Any], actions: list[Any]) -> list[Any]:
    return [one for one in actions if isinstance(one, kind)]


def told(actions: list[Any]) -> list[Any]:
    return [one.message for one in of(todo.Tell, actions)]


# --- the agent --------------------------------------------------------------------------------------


def test_the_ranks_own_shadow_goes_and_the_answer_waits_for_its_end() -> None:
    core = agent()
    assert core.hook_asks(1, ASK, 1.0) == [todo.KillTrainer(3)]
    gone = core.trainer_gone(3, "killed by SIGKILL", False, 1.1)
    assert of(todo.AnswerHook, gone) == [todo.AnswerHook(1, 7, Verdict.GONE)]
    assert told(gone) == [m.ShadowReclaimed(0, 3, 3, 1)]
    reported = core.hook_reports(1, REPORT, 1.2)
    assert told(reported) == [m.Reclaimed(0, 1, 3, True, 2 * GIB, 2 * GIB, GIB, 80 * GIB, 0.1, True)]
    (note,) = of(todo.Note, reported)
    assert (note.event, note.fields["bytes"], note.fields["level"]) == ("reclaimed", 2 * GIB, 3)
    assert note.fields["iteration"] == 5


@pytest.mark.parametrize(
    ("level", "asked", "killed"), [(0, 1, False), (1, 1, False), (1, 2, True), (2, 3, True), (3, 2, True)]
)
def test_only_what_may_hold_memory_is_killed(level: int, asked: int, killed: bool) -> None:
    actions = agent(level, asked=asked).hook_asks(1, ASK, 1.0)
    answer = [todo.KillTrainer(3)] if killed else [todo.AnswerHook(1, 7, Verdict.NONE)]
    assert actions == answer


def test_a_shadow_on_its_way_is_no_measure_of_a_level() -> None:
    core = agent(2, asked=3)
    core.hook_asks(1, ASK, 1.0)
    core.trainer_gone(3, "killed by SIGKILL", False, 1.1)
    (message,) = told(core.hook_reports(1, REPORT, 1.2))
    assert (message.level, message.whole) == (3, False)


def test_a_shadow_that_is_dying_already_is_waited_for() -> None:
    killed = agent(state=TrainerState.KILLED)
    assert killed.hook_asks(1, ASK, 1.0) == []
    assert of(todo.AnswerHook, killed.trainer_gone(3, "killed", False, 1.1)) == [
        todo.AnswerHook(1, 7, Verdict.GONE)
    ]
    failed = agent(state=TrainerState.FAILED)
    assert failed.hook_asks(1, ASK, 1.0) == [todo.KillTrainer(3)]
    gone = failed.trainer_gone(3, "exit status 1", False, 1.1)
    assert isinstance(told(gone)[0], m.ShadowFailed), "it failed before it was reclaimed"


def test_two_requests_share_one_kill() -> None:
    core = agent()
    core.hook_asks(1, ASK, 1.0)
    assert core.hook_asks(1, Ask(8, 0, GIB, 0, 80 * GIB), 1.05) == []
    gone = core.trainer_gone(3, "killed", False, 1.1)
    assert [one.sequence for one in of(todo.AnswerHook, gone)] == [7, 8]


def test_no_shadow_takes_memory_from_anybody() -> None:
    core = agent()
    assert core.hook_asks(4, ASK, 1.0) == [todo.AnswerHook(4, 7, Verdict.NONE)]
    assert core.hook_reports(4, REPORT, 1.1) == []
    assert core.hook_asks(99, ASK, 1.0) == []


def test_an_asker_that_dies_needs_no_answer() -> None:
    core = agent()
    core.hook_asks(1, ASK, 1.0)
    core.trainer_gone(1, "killed", False, 1.1)
    assert of(todo.AnswerHook, core.trainer_gone(3, "killed", False, 1.2)) == []


def test_a_real_oom_is_noted() -> None:
    core = agent(1, asked=1)
    core.hook_asks(1, ASK, 1.0)
    report = Report(7, 0, 2 * GIB, GIB, 80 * GIB, 0, 0.0, False)
    (note,) = core.hook_reports(1, report, 1.1)
    assert isinstance(note, todo.Note)
    assert (note.event, note.fields["request_bytes"]) == ("out_of_memory", 2 * GIB)


def test_only_news_of_memory_is_passed_on() -> None:
    core = agent()

    def seen(free: int, spare: int = 0) -> list[Any]:
        return told(core.trainer_says(1, wire.Memory(free << 20, 80 * GIB, spare << 20, 1), 1.0))

    assert [one.held_level for one in seen(5000)] == [3]
    assert seen(4990) == [], "hardly less than before"
    assert seen(6000) == []
    assert len(seen(4900)) == 1
    assert len(seen(6000, spare=-2000)) == 1, "less will be left after a recovery"
    core.trainers[3].asked, core.trainers[3].level = 3, 2
    assert seen(100) == [], "what a shadow on its way holds is not known"


def test_a_trainer_that_waits_for_memory_does_not_hang() -> None:
    core = agent()

    def age(clock_s: float) -> float:
        return next(one.age_s for one in core.beat(clock_s).progress if one.rank == 0)

    core.progress(1, phase=5, waiting=False, iteration=5, counter=9, changed_s=100.0)
    assert age(101.0) == 1.0
    core.hook_asks(1, ASK, 1.0)
    assert age(140.0) == 0.0
    core.trainer_gone(3, "killed", False, 41.0)
    assert age(141.0) == 1.0, "the time that it waited is not counted afterwards"


def test_a_trainer_that_was_stopped_with_its_agent_does_not_hang() -> None:
    core = agent()

    def age(clock_s: float, *absence: float) -> float:
        lost = (lambda moment: absence[0] if moment < 120.0 else 0.0) if absence else (lambda _moment: 0.0)
        return next(one.age_s for one in core.beat(clock_s, lost).progress if one.rank == 0)

    core.progress(1, phase=5, waiting=False, iteration=5, counter=9, changed_s=100.0)
    assert age(140.0) == 40.0
    assert age(140.0, 38.5) == 1.5
    core.progress(1, phase=6, waiting=False, iteration=5, counter=10, changed_s=121.0)
    assert age(140.0, 38.5) == 19.0, "its agent was away before"


def test_a_footprint_is_that_of_a_shadow() -> None:
    core = agent()
    assert told(core.footprint(3, 3, GIB, 1.0)) == [m.FootprintOf(0, 3, GIB)]
    assert core.footprint(1, 3, 9 * GIB, 1.0) == [], "an active trainer holds more than that"
    core.trainer_says(3, wire.LevelReached(3, core.trainers[3].world, 446 << 20), 1.0)
    assert told(core.footprint(3, 3, GIB, 1.0)) == [m.FootprintOf(0, 3, GIB, 446 << 20)]
    assert told(core.footprint(3, 3, 0, 1.0)) == [m.FootprintOf(0, 3, 0, 446 << 20)], "all that is known"


@pytest.mark.parametrize(
    ("memory", "trained", "refused"), [(True, False, 446 << 20), (True, True, 0), (False, False, 0)]
)
def test_a_takeover_that_does_not_get_back_what_was_parked(memory: bool, trained: bool, refused: int) -> None:
    core = agent()
    core.trainers[1].parked_bytes, core.trainers[1].state = 446 << 20, TrainerState.PROMOTED
    if trained:
        core.trainers[1].state = TrainerState.RESUMING
        core.trainer_says(1, wire.Resumed(5, "in-place", {}, 1), 1.0)
    core.trainer_says(1, wire.Failed("train", "OutOfMemoryError: no\n", memory=memory), 1.1)
    (failed,) = (
        one
        for one in told(core.trainer_gone(1, "exit status 1", False, 1.2))
        if isinstance(one, m.ActiveFailed)
    )
    assert failed.refused_bytes == refused


# --- the next world ---------------------------------------------------------------------------------


class World:
    """Two ranks on two nodes at L3."""

    def __init__(self) -> None:
        self.next = NextWorld({0: 0, 1: 1}, JobPolicy())
        self.next.begin(0.0, urgent=False)
        for level in (1, 2, 3):
            if level == 3:
                self.next.store_ready(1, "host", 7, 0.0)
            for rank in (0, 1):
                self.at(rank, level)
        assert self.next.ready

    def at(self, rank: int, level: int) -> list[Any]:
        return self.next.at(ShadowAt(rank, self.next.members[rank].sid, self.next.world, level), 0.0)


def messages(actions: list[Any]) -> list[Any]:
    return [one.message for one in actions if isinstance(one, Send)]


def test_a_reclaim_demotes_the_world_and_brings_one_shadow_back_lower() -> None:
    world = World()
    sid = world.next.members[0].sid
    world.next.limit(0, 1)
    actions = world.next.reclaimed(0, sid, 1.0)
    assert CloseStore(1) in actions
    sent = messages(actions)
    assert AdvanceShadow(1, world.next.members[1].sid, 2, 2) in sent, "L3 is a property of the world"
    new = world.next.members[0].sid
    assert [one for one in sent if one.rank == 0] == [SpawnShadow(0, new, 2), AdvanceShadow(0, new, 2, 1)]
    world.at(1, 2)
    world.at(0, 1)
    assert messages(world.next.tick(50.0)) == [], "nobody goes on while one rank may not"
    assert messages(world.next.allow(0, 2, 50.0)) == [AdvanceShadow(0, new, 2, 2)]
    assert world.at(0, 2)[1:] == [], "L3 is for all ranks or for none"
    assert HostStore(2) in world.next.allow(0, 3, 60.0)


def test_a_reclaim_is_no_failure_and_a_stale_one_nothing() -> None:
    world = World()
    assert world.next.reclaimed(0, 99, 1.0) == []
    assert world.next.stale == 1
    world.next.reclaimed(0, world.next.members[0].sid, 1.0)
    assert world.next.worst_rank() == (0, 0)


def test_a_shadow_above_what_is_allowed_is_replaced() -> None:
    """The word of a reclaim came late, and the next shadow has been told to go on meanwhile."""
    world = World()
    sid = world.next.members[0].sid
    sent = messages(world.next.allow(0, 1, 1.0))
    assert sent[0] == DiscardShadow(0, sid)
    new = world.next.members[0].sid
    assert new != sid
    assert [one for one in sent if one.rank == 0][1:] == [SpawnShadow(0, new, 2), AdvanceShadow(0, new, 2, 1)]
    assert messages(world.next.allow(0, 1, 1.0)) == []


def test_a_recovery_raises_those_below_only_when_the_dead_are_gone() -> None:
    """Until then their memory may not be free; shadows that waited for want of it would run out of it."""
    world = World()
    world.next.limit(0, 1)
    world.next.reclaimed(0, world.next.members[0].sid, 1.0)
    world.at(0, 1)
    world.at(1, 2)
    assert messages(world.next.begin(2.0, urgent=True, crowded=True)) == []
    assert messages(world.next.make_room(3.0)) == [AdvanceShadow(0, world.next.members[0].sid, 2, 2)]
    assert HostStore(2) in world.at(0, 2)


def test_a_recovery_without_limits_waits_for_nobody() -> None:
    world = World()
    world.next.failed(0, world.next.members[0].sid, "died", 1.0)
    world.next.begin(2.0, urgent=True, crowded=True)
    world.at(1, 2)
    world.at(0, 1)
    assert HostStore(2) in world.at(0, 2)


# --- the wire and the start -------------------------------------------------------------------------


def test_messages_of_the_hook_are_checked() -> None:
    good = oom_protocol._REQUEST.pack(oom_protocol._MAGIC, 1, 1, 7, 0, 2 * GIB, GIB, 80 * GIB, 0, 0, 0)
    assert oom_protocol.decode(good) == ASK
    for bad in (b"", good[:-1], good + b"x", b"\0" * 64, good[:4] + b"\x09" + good[5:]):
        with pytest.raises(ValueError, match="allocator hook"):
            oom_protocol.decode(bad)


@pytest.mark.parametrize(
    ("name", "value", "refused"),
    [
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True", True),
        ("PYTORCH_ALLOC_CONF", "max_split_size_mb:128,expandable_segments: True", True),
        ("PYTORCH_CUDA_ALLOC_CONF", "backend:cudaMallocAsync", True),
        ("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False,backend:native", False),
        ("PYTORCH_CUDA_ALLOC_CONF", "", False),
    ],
)
def test_settings_that_bypass_the_hook_are_found(name: str, value: str, refused: bool) -> None:
    found = oom_hook.conflict({name: value})
    assert (found is not None) == refused
    if found is not None:
        assert name in found
        assert "--shadow-level 1" in found


def test_an_agent_without_the_hook_keeps_shadows_off_the_device(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    monkeypatch.setattr(oom_hook, "LIBRARY", tmp_path / "libleto_oom.so")
    monkeypatch.setattr(oom_hook, "unavailable", lambda: "no compiler")
    library, level, why = oom_hook.choose("cuda", 3, {})
    assert (library, level) == (None, 1)
    assert "no compiler" in why
    assert oom_hook.choose("cuda", 1, {}) == (None, 1, ""), "nothing to reclaim at L1"
    assert oom_hook.choose("host", 3, {}) == (None, 3, ""), "no GPU"
    monkeypatch.setattr(oom_hook, "unavailable", lambda: None)
    assert oom_hook.choose("cuda", 3, {})[:2] == (tmp_path / "libleto_oom.so", 3)
    assert oom_hook.choose("cuda", 3, {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})[:2] == (None, 1)


def test_a_missing_library_is_explained(tmp_path: Any) -> None:
    assert "no C compiler worked" in str(oom_hook.unavailable(tmp_path / "none.so"))


def test_the_library_comes_first_and_children_do_not_inherit_it() -> None:
    environment = {"LD_PRELOAD": "/lib/other.so"}
    oom_hook.preload(environment, oom_hook.LIBRARY)
    assert environment["LD_PRELOAD"] == f"{oom_hook.LIBRARY}:/lib/other.so"
    assert not oom_hook.attach(environment), "no socket was passed"


def test_a_preload_that_did_not_happen_is_an_error_not_a_surprise() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        environment = {oom_hook.FD_VARIABLE: str(theirs.fileno()), "LD_PRELOAD": ""}
        with pytest.raises(oom_hook.OomHookError, match="not loaded although the agent preloads it"):
            oom_hook.attach(environment)
    assert oom_hook.FD_VARIABLE not in environment
