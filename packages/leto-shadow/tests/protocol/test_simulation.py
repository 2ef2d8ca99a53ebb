"""Thousands of seeded failure schedules through the real coordinator and agents, in simulated time.

A failing seed names the one command that repeats it. The deliberately broken variants at the end prove that
each invariant is able to fail.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from leto_shadow import messages as m
from leto_shadow.actions import UnexpectedEventError
from leto_shadow.agent_core import AgentCore, TrainerState
from leto_shadow.classifier import Classifier, Ruling, Verdict
from leto_shadow.coordinator import Coordinator
from leto_shadow.exit_codes import ExitCode
from leto_shadow.hang import HangDetector
from leto_shadow.levels import NextWorld
from leto_shadow.link import Link
from leto_shadow.phases import Phase
from leto_shadow.simulation import ViolationError, run_seed
from leto_shadow.simulation.plan import Scenario
from leto_shadow.simulation.trainers import SimTrainer

CHUNK = 100


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 2000, CHUNK))
def test_schedules_keep_the_invariants_and_end(first: int) -> None:
    for seed in range(first, first + CHUNK):
        run_seed(seed)


@pytest.mark.nightly
@pytest.mark.parametrize("first", range(2000, 30_000, 1000))
def test_many_more_schedules(first: int) -> None:
    for seed in range(first, first + 1000):
        run_seed(seed)


def test_the_same_seed_replays_the_same_run() -> None:
    first: list[str] = []
    second: list[str] = []
    assert run_seed(17, trace=first.append) == run_seed(17, trace=second.append)
    assert first == second
    assert len(first) > 50


@pytest.mark.parametrize("scenario", list(Scenario))
def test_every_scenario_is_reached_and_ends_as_defined(scenario: Scenario) -> None:
    codes = {run_seed(seed, scenario).exit_code for seed in range(30)}
    expected = {
        Scenario.RECOVERABLE: {ExitCode.FINISHED},
        Scenario.AGENT_DEATH: {ExitCode.AGENT_LOST},
        Scenario.ERROR_LOOP: {ExitCode.FATAL_LIMIT},
        Scenario.CANNOT_START: {ExitCode.CANNOT_START},
    }[scenario]
    assert expected <= codes


def test_a_failing_run_names_the_command_that_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HangDetector, "check", lambda self: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        run_seed(3)
    assert caught.value.__notes__ == ["repeat with: python -m leto_shadow.simulation --seed 3 --trace"]


# --- mutants ----------------------------------------------------------------------------------------


def promote_before_the_fence(patch: pytest.MonkeyPatch) -> None:
    """The coordinator goes on as soon as the first node has fenced."""
    original = Coordinator._arrived

    def arrived(self: Coordinator, node: int) -> bool:
        if self.phase is Phase.FENCING:
            self._waiting_for = {node}
        return original(self, node)

    receive = Coordinator.receive

    def without_latecomers(self: Coordinator, node: int, message: Any, now: float) -> Any:
        late = isinstance(message, m.Fenced) and self.phase is not Phase.FENCING
        return [] if late else receive(self, node, message, now)

    patch.setattr(Coordinator, "_arrived", arrived)
    patch.setattr(Coordinator, "receive", without_latecomers)


def fenced_before_the_dead_are_gone(patch: pytest.MonkeyPatch) -> None:
    """An agent answers the fence when it has sent the signals."""

    def fenced(self: AgentCore) -> None:
        if self._fence_owed:
            self._fence_owed = False
            self._tell(m.Fenced(self.generation))

    patch.setattr(AgentCore, "_maybe_fenced", fenced)
    patch.setattr(AgentCore, "_older", lambda self: [])


def fence_forgets_to_kill_survivors(patch: pytest.MonkeyPatch) -> None:
    """Only the failed rank's process is taken to be dangerous."""
    patch.setattr(AgentCore, "_older", lambda self: [])


def accept_stale_generations(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Coordinator, "_is_stale", lambda self, message: False)


def decide_on_partial_summaries(patch: pytest.MonkeyPatch) -> None:
    original = Coordinator._dispatch

    def dispatch(self: Coordinator, node: int, message: Any) -> None:
        if isinstance(message, m.SummaryOf) and not self._summaries:
            self._summaries = dict.fromkeys(range(self.world_size), message.payload)
        original(self, node, message)

    patch.setattr(Coordinator, "_dispatch", dispatch)


def forget_to_demote_the_world(patch: pytest.MonkeyPatch) -> None:
    """A lost shadow is replaced in the same world; the others keep their broken process groups."""
    patch.setattr(NextWorld, "_renew", lambda self, now: [])


def replace_only_the_dead_manager(patch: pytest.MonkeyPatch) -> None:
    original = AgentCore._start_managers

    def start(self: AgentCore, epoch: int) -> None:
        for manager in self.managers.values():
            if manager.status.value == "up":
                self.epoch = manager.epoch = epoch
        original_status = {rank: manager.status for rank, manager in self.managers.items()}
        if any(status.value == "up" for status in original_status.values()):
            for rank, manager in self.managers.items():
                if manager.status.value in ("none", "gone"):
                    self._start_manager(rank)
            if all(manager.status.value == "up" for manager in self.managers.values()):
                self._tell(m.ManagersReady(epoch))
        else:
            original(self, epoch)

    patch.setattr(AgentCore, "_start_managers", start)


def treat_a_dead_manager_as_operable(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Classifier, "_fatal_reason", lambda self, failure, recent: None)


def never_give_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Classifier, "classify", lambda self, failure, now: Ruling(Verdict.HOF, "always"))


def see_no_hang(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HangDetector, "check", lambda self: None)


def send_each_message_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Link, "poll", lambda self, now: [])


def deliver_repeated_frames(patch: pytest.MonkeyPatch) -> None:
    def receive(self: Link, frame: Any) -> list[bytes]:
        self._ack_due = True
        while self._unacked and self._unacked[0][0] <= frame.ack:
            self._unacked.popleft()
        self._expected = max(self._expected, frame.seq + 1)
        return [frame.payload] if frame.payload else []

    patch.setattr(Link, "receive", receive)


def end_before_the_processes(patch: pytest.MonkeyPatch) -> None:
    def end(self: AgentCore) -> None:
        if self.ending is not None and not self.done:
            self.done = True
            self._tell(m.Bye(self.node))
            self._out.append(self.ending)

    patch.setattr(AgentCore, "_maybe_end", end)


def forget_old_stores(patch: pytest.MonkeyPatch) -> None:
    original = Coordinator._on_fenced

    def fenced(self: Coordinator) -> None:
        self.active_world, kept = -1, self.active_world
        original(self)
        self.active_world = kept

    patch.setattr(Coordinator, "_on_fenced", fenced)


def promote_whatever_is_at_l2(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(
        NextWorld,
        "ready",
        property(
            lambda self: (
                len(self.members) == len(self._node_of_rank)
                and all(x.level >= 2 for x in self.members.values())
            )
        ),
    )


def forget_the_failed_shadow(patch: pytest.MonkeyPatch) -> None:
    """A shadow that dies is not replaced."""
    patch.setattr(NextWorld, "failed", lambda self, rank, sid, detail, now, secondary=False: [])


def ignore_failures_of_promoted_trainers(patch: pytest.MonkeyPatch) -> None:
    def failed(
        self: AgentCore, rank: int, generation: int, detail: str, trainer: Any = None, **_more: Any
    ) -> None:
        if trainer is not None and trainer.state is TrainerState.PROMOTED:
            return
        self._tell(m.ActiveFailed(rank, generation, 0, detail))

    patch.setattr(AgentCore, "_active_failed", failed)
    patch.setattr(Coordinator, "_fail_silent", lambda self, heard, detail: None)


def update_without_waiting_at_the_barrier(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimTrainer, "barrier", SimTrainer.update)


def report_repaired_without_looking(patch: pytest.MonkeyPatch) -> None:
    """No manager is asked for lost pages."""

    def repair(self: AgentCore, message: m.Repair) -> None:
        self._tell(m.Repaired(message.generation, message.epoch, 0))

    patch.setattr(AgentCore, "_repair", repair)


def take_a_refusal_for_a_decision(patch: pytest.MonkeyPatch) -> None:
    original = Coordinator.decided

    def decided(self: Coordinator, generation: int, payload: bytes, error: str, now: float) -> Any:
        return original(self, generation, payload, "", now)

    patch.setattr(Coordinator, "decided", decided)


def take_a_decision_of_an_older_generation(patch: pytest.MonkeyPatch) -> None:
    original = Coordinator.decided

    def decided(self: Coordinator, generation: int, payload: bytes, error: str, now: float) -> Any:
        return original(self, self.generation, payload, error, now)

    patch.setattr(Coordinator, "decided", decided)


def vote_for_torn_checkpoints(patch: pytest.MonkeyPatch) -> None:
    """A rank takes a checkpoint without a completion marker for a whole one."""

    def visible(self: SimTrainer) -> set[int]:
        return self.cluster.checkpoints[self.rank] | self.cluster.torn_checkpoints[self.rank]

    patch.setattr(SimTrainer, "visible_checkpoints", visible)


MUTANTS: dict[Callable[[pytest.MonkeyPatch], None], str] = {
    promote_before_the_fence: "I-4",
    fenced_before_the_dead_are_gone: "I-4",
    fence_forgets_to_kill_survivors: "I-4",
    accept_stale_generations: "table",
    decide_on_partial_summaries: "I-5",
    forget_to_demote_the_world: "levels",
    replace_only_the_dead_manager: "I-5",
    treat_a_dead_manager_as_operable: "liveness",
    never_give_up: "liveness",
    see_no_hang: "liveness",
    send_each_message_once: "liveness",
    deliver_repeated_frames: "table",
    end_before_the_processes: "I-7",
    forget_old_stores: "I-7",
    promote_whatever_is_at_l2: "liveness",  # the agents refuse, again and again
    forget_the_failed_shadow: "liveness",
    ignore_failures_of_promoted_trainers: "liveness",
    update_without_waiting_at_the_barrier: "I-3",
    report_repaired_without_looking: "I-6",
    take_a_refusal_for_a_decision: "I-6",
    take_a_decision_of_an_older_generation: "I-6",
    vote_for_torn_checkpoints: "I-6",
}
"""What each one must be caught by; "table": an event that the transition tables do not allow."""


def broken_by(seed: int) -> str:
    """The invariant that this run breaks; empty if none, or if it only crashes."""
    try:
        run_seed(seed)
    except ViolationError as error:
        return str(error).partition(":")[0]
    except UnexpectedEventError:
        return "table"
    except (AssertionError, KeyError):
        return ""  # the broken code tripped over itself, which proves nothing about the invariants
    return ""


@pytest.mark.parametrize(
    ("mutant", "invariant"), MUTANTS.items(), ids=[mutant.__name__ for mutant in MUTANTS]
)
def test_a_broken_protocol_is_caught(
    mutant: Callable[[pytest.MonkeyPatch], None], invariant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    assert any(broken_by(seed) == invariant for seed in range(400)), (
        f"{mutant.__name__} breaks {invariant} in none of 400 schedules"
    )


def test_every_invariant_of_the_protocol_has_a_mutant() -> None:
    assert {"I-3", "I-4", "I-5", "I-6", "I-7"} <= set(MUTANTS.values())
