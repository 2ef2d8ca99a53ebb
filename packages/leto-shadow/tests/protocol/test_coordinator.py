"""The coordinator's tables: what follows what, what is stale, what is a bug, and what passing time does.

Case 7 (a new round believes the old round's messages): each message carries its generation or epoch; stale
ones are rejected and counted, and those from the future are a bug.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from leto_shadow import messages as m
from leto_shadow.actions import (
    AskDecision,
    AskHook,
    CloseStore,
    Done,
    HostStore,
    Record,
    Send,
    UnexpectedEventError,
)
from leto_shadow.config import Deadlines, JobPolicy, Limits
from leto_shadow.coordinator import Coordinator
from leto_shadow.exit_codes import ExitCode
from leto_shadow.operability import DeviceFacts
from leto_shadow.phases import FOLLOWS, LEGAL, Phase

POLICY = JobPolicy(
    Deadlines(
        join_s=10,
        managers_s=10,
        fence_s=10,
        repair_s=10,
        summary_s=10,
        decide_s=10,
        resume_s=10,
        stop_s=10,
        agent_s=1000,
    ),
    Limits(start_failures=2, manager_starts=2),
)


class Driver:
    """Two nodes with one rank each, driven step by step in the shortest way to a phase."""

    def __init__(self, policy: JobPolicy = POLICY) -> None:
        self.now = 0.0
        self.coordinator = Coordinator(2, policy, 0.0)
        self.sent: list[tuple[int, Any]] = []
        self.records: list[Record] = []
        self.done: Done | None = None
        self.closed: list[int] = []
        self.asked: list[AskDecision] = []
        self.hooked: list[AskHook] = []

    def take(self, actions: list[Any]) -> None:
        for action in actions:
            match action:
                case Send(node=node, message=message):
                    self.sent.append((node, message))
                case Record():
                    self.records.append(action)
                case Done():
                    self.done = action
                case CloseStore(world=world):
                    self.closed.append(world)
                case AskDecision():
                    self.asked.append(action)
                case AskHook():
                    self.hooked.append(action)
                case HostStore(world=world):
                    self.take(self.coordinator.store_ready(world, "host", 1, self.now))

    def say(self, node: int, message: Any) -> None:
        self.take(self.coordinator.receive(node, message, self.now))

    def tick(self, seconds: float) -> None:
        self.now += seconds
        self.take(self.coordinator.tick(self.now))

    def sent_to(self, node: int, kind: type[Any]) -> list[Any]:
        return [message for to, message in self.sent if to == node and isinstance(message, kind)]

    def shadows_up(self) -> None:
        """Both shadows climb as far as they are told."""
        world = self.coordinator.world
        assert world is not None
        for _ in range(3):
            for rank, member in list(world.members.items()):
                for level in range(member.level + 1, member.told + 1):
                    self.say(rank, m.ShadowAt(rank, member.sid, world.world, level))

    def to(self, phase: Phase) -> Driver:
        """Go to ``phase`` in the first generation (or on from where it is)."""
        steps = {
            Phase.JOINING: lambda: [self.say(node, m.Join(node, 1, "host")) for node in (0, 1)],
            Phase.STARTING: lambda: self.managers_up(),
            Phase.FENCING: lambda: self.both(m.Fenced(self.coordinator.generation)),
            Phase.REPAIRING: lambda: self.both(
                m.Repaired(self.coordinator.generation, self.coordinator.epoch, 0)
            ),
            Phase.PREPARING: self.shadows_up,
            Phase.EXCHANGING: self.summaries,
            Phase.DECIDING: lambda: self.take(
                self.coordinator.decided(self.coordinator.generation, b"decision", "", self.now)
            ),
            Phase.RESUMING: self.resumed,
        }
        while self.coordinator.phase is not phase:
            before = self.coordinator.phase
            steps[before]()
            assert self.coordinator.phase is not before, f"stuck in {before}"
        return self

    def both(self, message: Any) -> None:
        for node in (0, 1):
            self.say(node, message)

    def managers_up(self) -> None:
        self.both(m.ManagersReady(self.coordinator.epoch))

    def summaries(self) -> None:
        for rank in (0, 1):
            self.say(rank, m.SummaryOf(rank, self.coordinator.generation, b"s%d" % rank))

    def resumed(self, iteration: int = 4, source: str = "in-place") -> None:
        for rank in (0, 1):
            self.say(rank, m.ResumedOf(rank, self.coordinator.generation, iteration, source, {}))

    def die(self, rank: int, **more: Any) -> None:
        self.say(rank, m.ActiveFailed(rank, self.coordinator.generation, 4, "killed", **more))


def test_the_shortest_recovery() -> None:
    driver = Driver().to(Phase.TRAINING)
    driver.shadows_up()
    driver.die(1)
    assert driver.sent_to(0, m.Fence) == driver.sent_to(1, m.Fence) == [m.Fence(1)]
    driver.say(1, m.Fenced(1))
    assert driver.sent_to(0, m.Repair) == [], "one node has not fenced yet"
    driver.say(0, m.Fenced(1))
    assert driver.closed == [1], "the store of the dead world"
    driver.to(Phase.TRAINING)
    assert driver.sent_to(0, m.Promote) == [m.Promote(0, 1, 1), m.Promote(1, 2, 1)]
    assert driver.asked[-1] == AskDecision(1, (b"s0", b"s1"))
    assert driver.sent_to(1, m.Decide)[-1] == m.Decide(1, b"decision")
    assert [record.event for record in driver.records if record.event in ("started", "recovered")] == [
        "started",
        "recovered",
    ]
    assert driver.coordinator.last_recovery is not None
    assert not driver.coordinator.last_recovery["fatal"]


@pytest.mark.parametrize("phase", [Phase.EXCHANGING, Phase.DECIDING, Phase.RESUMING])
def test_a_failure_during_recovery_starts_the_next_generation(phase: Phase) -> None:
    driver = Driver().to(phase)
    driver.die(0)
    assert driver.coordinator.phase is Phase.FENCING
    assert driver.coordinator.generation == 1
    driver.to(Phase.TRAINING)


def test_a_refused_takeover_goes_on_in_place_and_later_shadows_wait_lower() -> None:
    """Case 4: others have taken what a shadow had parked. The job loses nothing, and says why."""
    driver = Driver().to(Phase.TRAINING)
    driver.shadows_up()
    driver.say(0, m.FootprintOf(0, 3, 972 << 20, 446 << 20))
    driver.die(1)
    driver.to(Phase.EXCHANGING)
    driver.say(0, m.ActiveFailed(0, 1, 4, "no room (1)", reported=True, refused_bytes=446 << 20))
    assert driver.coordinator.generation == 2
    driver.to(Phase.TRAINING)
    events = [record for record in driver.records if record.event in ("takeover_refused", "shadow_allowed")]
    assert [(record.event, record.fields["rank"]) for record in events] == [
        ("takeover_refused", 0),
        ("shadow_allowed", 0),
    ]
    assert events[0].fields["parked_bytes"] == 446 << 20
    assert (events[1].fields["level"], events[1].fields["reason"]) == (
        2,
        "headroom of 1417 MiB that a takeover was refused",
    )
    assert not driver.coordinator.last_recovery["fatal"]  # type: ignore[index]
    assert [record.event for record in driver.records if record.event == "fatal"] == []
    # What takes over next had parked nothing, so whatever ends it is no refusal: nothing repeats itself.
    waits = [one.waits for one in driver.sent_to(0, m.AdvanceShadow) if one.level == 3]
    assert waits == [False, True, False]


def two_refused_at_once() -> list[tuple[str, int, int]]:
    """Both ranks are refused in one takeover; what is recorded of it: (event, rank, generation or level)."""
    driver = Driver().to(Phase.TRAINING)
    driver.shadows_up()
    for rank in (0, 1):
        driver.say(rank, m.FootprintOf(rank, 3, 972 << 20, 446 << 20))
    driver.die(1)
    driver.to(Phase.EXCHANGING)
    for rank in (0, 1):  # the second when the first has begun the next generation
        driver.say(rank, m.ActiveFailed(rank, 1, 4, f"no room ({rank})", reported=True, refused_bytes=9))
    assert driver.coordinator.generation == 2, "one takeover more, and not one for each"
    assert driver.coordinator.stale == {"ActiveFailed": 1}
    driver.to(Phase.TRAINING)
    assert not driver.coordinator.last_recovery["fatal"]  # type: ignore[index]
    return [
        (record.event, record.fields["rank"], record.fields.get("level", record.fields.get("generation")))
        for record in driver.records
        if record.event in ("takeover_refused", "shadow_allowed")
    ]


BOTH_WAIT_LOWER = [
    ("takeover_refused", 0, 1),
    ("takeover_refused", 1, 1),
    ("shadow_allowed", 0, 2),
    ("shadow_allowed", 1, 2),
]


def test_all_ranks_that_were_refused_at_once_wait_lower_later() -> None:
    """Else the next recovery would find the second as it was, and be refused once more."""
    assert two_refused_at_once() == BOTH_WAIT_LOWER


def test_a_refusal_that_counts_only_if_it_is_the_first_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: what is heard of an older generation is only counted."""
    real = Coordinator._takeover_refused

    def only_of_this_generation(self: Coordinator, message: m.ActiveFailed) -> None:
        if message.generation == self.generation:
            real(self, message)

    monkeypatch.setattr(Coordinator, "_takeover_refused", only_of_this_generation)
    assert two_refused_at_once() != BOTH_WAIT_LOWER


def attempt_fails(driver: Driver, words: str, **more: Any) -> None:
    """A promoted generation that is set up and fails, before it has trained."""
    driver.to(Phase.EXCHANGING)
    text = f"train: Traceback:\n  line {len(driver.records)}\n{words}\n (exit status 1)"
    told: dict[str, Any] = {"reported": True, **more}
    driver.say(1, m.ActiveFailed(1, driver.coordinator.generation, 0, text, **told))


def test_set_ups_that_fail_alike_end_the_job_with_their_reason() -> None:
    driver = Driver()
    attempt_fails(driver, "NotEnoughMemory: 4096 bytes were asked for, 17 are left")
    assert driver.coordinator.phase is Phase.FENCING, "once is none"
    attempt_fails(driver, "NotEnoughMemory: 8192 bytes were asked for, 3 are left")
    driver.both(m.Bye(0, int(ExitCode.CANNOT_START)))
    driver.say(1, m.Bye(1, int(ExitCode.CANNOT_START)))
    assert driver.done == Done(
        int(ExitCode.CANNOT_START),
        "no rank has begun to train, and the last 2 attempts failed alike; rank 1: NotEnoughMemory: 8192 "
        "bytes were asked for, 3 are left",
    )


@pytest.mark.parametrize(
    "second",
    [
        {"words": "BrokenPipeError: another reason"},
        {"words": "NotEnoughMemory", "reported": False},
        {"words": "NotEnoughMemory", "secondary": True, "drill": True},
    ],
)
def test_set_ups_that_fail_otherwise_are_tried_again(second: dict[str, Any]) -> None:
    driver = Driver()
    attempt_fails(driver, "NotEnoughMemory")
    attempt_fails(driver, **second)
    if second.get("secondary"):
        driver.tick(POLICY.deadlines.culprit_s + 0.1)  # nobody else has failed
    attempt_fails(driver, "NotEnoughMemory")
    assert driver.coordinator.phase is Phase.FENCING
    driver.to(Phase.TRAINING)


def test_a_generation_that_trained_is_no_failed_set_up() -> None:
    """What fails alike after that is bounded by other limits, and recovered in place until then."""
    driver = Driver().to(Phase.TRAINING)
    for _ in range(3):
        driver.shadows_up()
        driver.say(1, m.ActiveFailed(1, driver.coordinator.generation, 4, "Error: 1", reported=True))
        assert driver.coordinator.phase is Phase.FENCING
        driver.to(Phase.EXCHANGING)


def test_stale_messages_are_rejected_and_counted() -> None:
    """Case 7: late messages of generation 0, and of epoch 1, after the failures that ended them."""
    driver = Driver().to(Phase.TRAINING)
    driver.die(0)
    for message in (
        m.ActiveFailed(1, 0, 4, "killed"),
        m.SummaryOf(1, 0, b"old"),
        m.ResumedOf(1, 0, 3, "in-place", {}),
        m.FinishedOf(1, 0, 9),
    ):
        driver.say(1, message)
    assert sum(driver.coordinator.stale.values()) == 4
    assert driver.coordinator.phase is Phase.FENCING
    driver.take(driver.coordinator.decided(0, b"old", "", driver.now))
    assert driver.coordinator.stale["decided"] == 1
    driver.say(0, m.ManagerFailed(0, 1, "killed"))
    driver.to(Phase.STARTING)
    driver.say(1, m.ManagersReady(1))
    assert driver.coordinator.stale["ManagersReady"] == 1


def test_a_message_from_the_future_is_a_bug() -> None:
    driver = Driver().to(Phase.TRAINING)
    with pytest.raises(UnexpectedEventError, match="ahead of generation 0"):
        driver.say(0, m.ActiveFailed(0, 1, 4, "killed"))
    with pytest.raises(UnexpectedEventError, match="ahead of epoch 1"):
        driver.say(0, m.ManagerFailed(0, 2, "killed"))


CURRENT = {
    m.Join: m.Join(0, 1, "host"),
    m.ManagersReady: m.ManagersReady(1),
    m.Fenced: m.Fenced(0),
    m.Repaired: m.Repaired(0, 1, 0),
    m.RepairFailed: m.RepairFailed(0, 0, 1, "bad"),
    m.SummaryOf: m.SummaryOf(0, 0, b"s"),
    m.ResumedOf: m.ResumedOf(0, 0, 4, "in-place", {}),
    m.ActiveFailed: m.ActiveFailed(0, 0, 4, "killed"),
    m.FinishedOf: m.FinishedOf(0, 0, 4),
}
REACHABLE = [
    Phase.STARTING,
    Phase.PREPARING,
    Phase.EXCHANGING,
    Phase.DECIDING,
    Phase.RESUMING,
    Phase.TRAINING,
]


@pytest.mark.parametrize("phase", REACHABLE, ids=lambda phase: phase.value)
@pytest.mark.parametrize("kind", list(CURRENT), ids=lambda kind: kind.__name__)
def test_an_event_that_the_table_does_not_allow_raises(kind: type[Any], phase: Phase) -> None:
    driver = Driver().to(phase)
    if phase in LEGAL[kind]:
        driver.say(0, CURRENT[kind])
    else:
        with pytest.raises(UnexpectedEventError, match=kind.__name__):
            driver.say(0, CURRENT[kind])


def test_every_message_and_every_phase_is_in_the_tables() -> None:
    assert set(FOLLOWS) == set(Phase)
    assert set(LEGAL) == set(m.FromAgent.__args__)
    reachable, grown = {Phase.JOINING}, True
    while grown:
        more = reachable.union(*(FOLLOWS[phase] for phase in reachable))
        reachable, grown = more, more != reachable
    assert reachable == set(Phase)


def test_a_node_that_answers_twice_is_a_bug() -> None:
    driver = Driver().to(Phase.STARTING)
    driver.say(0, m.ManagersReady(1))
    with pytest.raises(UnexpectedEventError, match="answered twice"):
        driver.say(0, m.ManagersReady(1))


def test_ranks_that_resume_differently_go_to_the_checkpoint() -> None:
    driver = Driver().to(Phase.RESUMING)
    driver.say(0, m.ResumedOf(0, 0, 4, "in-place", {}))
    driver.say(1, m.ResumedOf(1, 0, 5, "in-place", {}))
    assert driver.coordinator.phase is Phase.FENCING
    driver.both(m.Fenced(1))
    assert driver.coordinator.phase is Phase.STARTING, "fresh managers for all ranks"
    assert driver.sent_to(0, m.StartManagers)[-1] == driver.sent_to(1, m.StartManagers)[-1]
    assert driver.coordinator.epoch == 2


def test_a_decision_that_fails_goes_to_the_checkpoint_once() -> None:
    driver = Driver().to(Phase.TRAINING)
    driver.die(0)
    driver.to(Phase.DECIDING)
    driver.take(driver.coordinator.decided(1, b"", "too much is lost", driver.now))
    assert driver.coordinator.phase is Phase.FENCING
    driver.to(Phase.DECIDING)
    assert driver.coordinator.epoch == 2
    driver.take(driver.coordinator.decided(2, b"", "no checkpoint", driver.now))
    assert driver.coordinator.outcome is not None
    assert driver.coordinator.outcome.exit_code == ExitCode.NO_DECISION
    assert "no checkpoint" in driver.coordinator.outcome.reason


def test_memory_beyond_repair_before_training_ever_began_is_given_up_for_fresh_memory() -> None:
    """I-6: ranks 0 and 1 wrote their first state, rank 0 died, its pages with it; nothing is lost yet."""
    driver = Driver().to(Phase.RESUMING)
    driver.die(0)
    driver.to(Phase.DECIDING)
    driver.take(driver.coordinator.decided(1, b"", "too much is lost", driver.now))
    assert driver.coordinator.phase is Phase.FENCING
    driver.to(Phase.TRAINING)
    assert driver.coordinator.epoch == 2


def test_the_rank_that_blames_a_peer_is_not_the_culprit() -> None:
    driver = Driver().to(Phase.TRAINING)
    driver.die(0, secondary=True)
    assert driver.coordinator.phase is Phase.TRAINING
    driver.now += 0.2
    driver.die(1)
    (failure,) = [record.fields for record in driver.records if record.event == "failure"]
    assert failure["rank"] == 1

    alone = Driver().to(Phase.TRAINING)
    alone.die(0, secondary=True)
    alone.tick(1.0)
    (failure,) = [record.fields for record in alone.records if record.event == "failure"]
    assert failure["rank"] == 0


@pytest.mark.parametrize("waits", [True, False])
def test_the_rank_that_gave_up_waiting_is_not_the_culprit_if_another_stands_still(waits: bool) -> None:
    """A communicator's timeout came before the deadline of the hang: nobody else will ever report."""
    driver = Driver().to(Phase.TRAINING)
    stood_s = POLICY.hang.min_s + 1.0
    driver.now += stood_s
    for rank, waiting in ((0, True), (1, waits)):
        progress = (m.RankProgress(rank, 0, 4, 5, waiting, 9, 0.0, stood_s),)
        driver.take(driver.coordinator.beat(rank, m.Beat(rank, 0, progress), driver.now))
    driver.die(0, secondary=True)
    driver.tick(POLICY.deadlines.culprit_s + 0.1)
    (failure,) = [record.fields for record in driver.records if record.event == "failure"]
    assert (failure["rank"], failure["kind"]) == ((0, "exit") if waits else (1, "hang"))
    assert waits or "in phase forward (its main thread stands still); rank 0 gave up" in failure["detail"]


@pytest.mark.parametrize(
    ("phase", "consequence"),
    [
        (Phase.JOINING, ExitCode.AGENT_LOST),
        (Phase.STARTING, Phase.STARTING),
        (Phase.FENCING, ExitCode.CANNOT_FENCE),
        (Phase.REPAIRING, Phase.STARTING),
        (Phase.EXCHANGING, Phase.FENCING),
        (Phase.DECIDING, ExitCode.NO_DECISION),
        (Phase.RESUMING, Phase.FENCING),
    ],
)
def test_every_phase_has_a_deadline_and_a_consequence(phase: Phase, consequence: Phase | ExitCode) -> None:
    driver = Driver()
    if phase in (Phase.FENCING, Phase.REPAIRING):
        driver.to(Phase.TRAINING)
        driver.die(0)
    driver.to(phase)
    driver.tick(10.0)
    assert driver.coordinator.phase is phase, "not yet"
    driver.tick(0.1)
    if isinstance(consequence, Phase):
        assert driver.coordinator.phase is consequence
        assert driver.coordinator.epoch + driver.coordinator.generation > 1
    else:
        assert driver.coordinator.outcome is not None
        assert driver.coordinator.outcome.exit_code == consequence
        assert driver.sent_to(0, m.Shutdown)


def test_managers_that_never_start_end_the_job() -> None:
    driver = Driver().to(Phase.STARTING)
    driver.say(0, m.ManagerFailed(0, 1, "not enough memory"))
    assert driver.coordinator.phase is Phase.STARTING
    driver.say(0, m.ManagerFailed(0, 2, "not enough memory"))
    assert driver.coordinator.outcome is not None
    assert driver.coordinator.outcome.exit_code == ExitCode.CANNOT_START
    assert "not enough memory" in driver.coordinator.outcome.reason


def test_a_silent_agent_is_lost_but_not_one_that_only_beats() -> None:
    driver = Driver(JobPolicy(Deadlines(agent_s=5.0))).to(Phase.TRAINING)
    for _ in range(10):
        driver.now += 1.0
        for node in (0, 1):
            driver.take(driver.coordinator.beat(node, m.Beat(node, 0), driver.now))
        driver.tick(0.0)
    assert driver.coordinator.phase is Phase.TRAINING
    for _ in range(6):
        driver.now += 1.0
        driver.take(driver.coordinator.beat(0, m.Beat(0, 0), driver.now))
        driver.tick(0.0)
    assert driver.coordinator.outcome is not None
    assert driver.coordinator.outcome.exit_code == ExitCode.AGENT_LOST
    assert "node 1" in driver.coordinator.outcome.reason
    driver.say(0, m.Bye(0))
    assert driver.done is not None, "it does not wait for the lost one"


def test_another_protocol_version_is_refused_with_a_reason() -> None:
    driver = Driver()
    driver.say(0, m.Join(0, 1, "host", protocol=m.PROTOCOL + 1))
    assert driver.coordinator.outcome is not None
    assert "install the same leto-shadow" in driver.coordinator.outcome.reason


def test_the_end_waits_for_all_agents_within_bounds() -> None:
    driver = Driver().to(Phase.TRAINING)
    for rank in (0, 1):
        driver.say(rank, m.FinishedOf(rank, 0, 9))
    assert driver.coordinator.phase is Phase.STOPPING
    driver.say(0, m.Bye(0))
    assert driver.done is None
    driver.tick(11.0)
    assert driver.done is not None
    assert driver.done.exit_code == ExitCode.FINISHED


# --- verdicts and the operator's hook ---------------------------------------------------------------

HOOKED = replace(POLICY, classify_hook=True)
BAD = DeviceFacts("GPU-1", xids=(79,))


def verdicts(driver: Driver) -> list[tuple[Any, ...]]:
    found = [record.fields for record in driver.records if record.event == "verdict"]
    return [(one["rank"], one["verdict"], one["by"], one["built_in"]) for one in found]


def failed(driver: Driver, facts: DeviceFacts | None = None) -> Driver:
    driver.to(Phase.TRAINING)
    driver.say(1, m.ActiveFailed(1, driver.coordinator.generation, 3, "killed", facts))
    return driver


def test_every_verdict_is_an_event_with_its_reasons() -> None:
    driver = failed(Driver(), BAD)
    assert verdicts(driver) == [(1, "ff", "leto", "ff")]
    (record,) = [one for one in driver.records if one.event == "verdict"]
    assert "fallen off the bus" in record.fields["reasons"][0]
    assert record.fields["facts"]["xids"] == [79] or record.fields["facts"]["xids"] == (79,)
    driver.both(m.Fenced(1))
    assert driver.coordinator.phase is Phase.STARTING, "fresh managers"


@pytest.mark.parametrize(
    ("facts", "answer", "phase", "verdict"),
    [
        (None, "default", Phase.REPAIRING, ("hof", "leto", "hof")),
        (None, "hof", Phase.REPAIRING, ("hof", "hook", "hof")),
        (None, "ff", Phase.STARTING, ("ff", "hook", "hof")),
        (BAD, "default", Phase.STARTING, ("ff", "leto", "ff")),
        (BAD, "hof", Phase.REPAIRING, ("hof", "hook", "ff")),
    ],
)
@pytest.mark.parametrize("early", [True, False])
def test_the_hook_has_the_last_word(
    facts: DeviceFacts | None, answer: str, phase: Phase, verdict: tuple[str, ...], early: bool
) -> None:
    """Before the fence stands or after it: where the way forks, its answer is waited for."""
    driver = failed(Driver(HOOKED), facts)
    (asked,) = driver.hooked
    assert asked.question.verdict == verdict[2]
    assert verdicts(driver) == []
    if not early:
        driver.both(m.Fenced(1))
        assert driver.coordinator.phase is Phase.FENCING
    driver.take(driver.coordinator.hook_answered(asked.number, answer, "", driver.now))
    if early:
        driver.both(m.Fenced(1))
    assert driver.coordinator.phase is phase
    assert verdicts(driver) == [(1, *verdict)]
    driver.take(driver.coordinator.hook_answered(asked.number, "ff", "", driver.now))
    assert verdicts(driver) == [(1, *verdict)], "it speaks once"


@pytest.mark.parametrize("how", ["late", "broken"])
def test_a_hook_that_fails_changes_nothing_and_is_told(how: str) -> None:
    driver = failed(Driver(HOOKED))
    driver.both(m.Fenced(1))
    if how == "late":
        driver.tick(POLICY.deadlines.classify_s / 2)
        assert driver.coordinator.asks_hook == {1}
        driver.tick(POLICY.deadlines.classify_s)
    else:
        driver.take(driver.coordinator.hook_answered(1, "", "exit status 3", driver.now))
    assert driver.coordinator.phase is Phase.REPAIRING
    assert driver.coordinator.asks_hook == frozenset()
    assert verdicts(driver) == [(1, "hof", "leto", "hof")]
    (record,) = [one for one in driver.records if one.event == "classify_hook_failed"]
    assert record.fields["detail"] == ("exit status 3" if how == "broken" else "no answer within 2 s")


def test_a_slow_hook_is_no_failed_fence() -> None:
    slow = replace(HOOKED, deadlines=replace(HOOKED.deadlines, classify_s=50.0))
    driver = failed(Driver(slow))
    driver.both(m.Fenced(1))
    driver.tick(30.0)  # longer than the deadline of a fence
    assert driver.coordinator.phase is Phase.FENCING
    driver.tick(30.0)
    assert driver.coordinator.phase is Phase.REPAIRING


def test_no_hook_is_asked_when_memory_is_gone() -> None:
    driver = Driver(HOOKED).to(Phase.TRAINING)
    driver.say(0, m.ManagerFailed(0, driver.coordinator.epoch, "killed"))
    assert driver.hooked == []
    assert verdicts(driver) == [(0, "ff", "leto", "ff")]


def test_a_manager_that_dies_while_the_hook_thinks_stays_fatal() -> None:
    driver = failed(Driver(HOOKED))
    driver.say(0, m.ManagerFailed(0, driver.coordinator.epoch, "killed"))
    driver.take(driver.coordinator.hook_answered(1, "hof", "", driver.now))
    driver.both(m.Fenced(1))
    assert driver.coordinator.phase is Phase.STARTING


def test_a_device_found_unfit_after_the_fence_is_fatal_whoever_failed() -> None:
    driver = failed(Driver())
    assert verdicts(driver) == [(1, "hof", "leto", "hof")]
    driver.say(0, m.Fenced(1, (m.Unfit(0, BAD),)))
    driver.say(1, m.Fenced(1))
    assert verdicts(driver)[1:] == [(0, "ff", "leto", "ff")]
    assert driver.coordinator.phase is Phase.STARTING


def test_a_device_that_was_ruled_on_is_not_ruled_on_again() -> None:
    driver = failed(Driver(HOOKED), BAD)
    driver.take(driver.coordinator.hook_answered(1, "hof", "", driver.now))
    driver.say(0, m.Fenced(1))
    driver.say(1, m.Fenced(1, (m.Unfit(1, BAD),)))
    assert len(driver.hooked) == 1
    assert driver.coordinator.phase is Phase.REPAIRING
