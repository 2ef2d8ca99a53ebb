"""Thousands of seeded failure schedules through the real coordinator and agents, in simulated time.

A failing seed names the one command that repeats it. The deliberately broken variants at the end prove that
each invariant is able to fail.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest

from leto_shadow import agent_state, classifier, wire
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
from leto_shadow.preinit import PreinitController
from leto_shadow.progress import Phase as TrainerPhase
from leto_shadow.reclaim import ReclaimDesk
from leto_shadow.roster import Roster
from leto_shadow.simulation import Cluster, ViolationError, run_seed
from leto_shadow.simulation.memory import SimManager
from leto_shadow.simulation.plan import Fault, FaultKind, Plan, Scenario, make_plan
from leto_shadow.simulation.torchrun import SimTorchrun
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
        Scenario.ADOPTION: {ExitCode.FINISHED},
        Scenario.SPARE: {ExitCode.FINISHED},
        Scenario.UNFIT: {ExitCode.FINISHED},
        Scenario.ERROR_LOOP: {ExitCode.FATAL_LIMIT},
        Scenario.CANNOT_START: {ExitCode.CANNOT_START},
    }[scenario]
    assert expected <= codes


def test_a_reclaim_that_is_heard_of_late_still_counts() -> None:
    """Cut off from the coordinator, an agent ends a shadow; the coordinator gives the same one up as slow."""
    run_seed(8425)


def test_a_failing_run_names_the_command_that_repeats_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(HangDetector, "check", lambda self, now: 1 / 0)
    with pytest.raises(ZeroDivisionError) as caught:
        run_seed(3)
    assert caught.value.__notes__ == ["repeat with: python -m leto_shadow.simulation --seed 3 --trace"]


# --- the death of agents ------------------------------------------------------------------------------


def quiet_plan(nodes: int, local_ranks: int, *faults: Fault, sigterm: bool, restarts: int = 3) -> Plan:
    """Nothing fails but what is given; the memory waits longer than any restart takes."""
    plan = make_plan(1, Scenario.ADOPTION)
    return replace(
        plan,
        nodes=nodes,
        local_ranks=local_ranks,
        iterations=5,
        policy=replace(plan.policy, shadow_level=3),
        faults=faults,
        loss=0.0,
        duplication=0.0,
        delay_s=0.02,
        slow_deaths=0.0,
        page_losses=0.0,
        shadow_errors=0.0,
        repair_errors=0.0,
        slow_decisions=0.0,
        heavy_losses=0.0,
        restarts=restarts,
        sigterm=sigterm,
    )


def recoveries(cluster: Cluster) -> list[tuple[str, int]]:
    return [(x["source"], x["iteration"]) for name, x in cluster.events if name == "recovered"]


@pytest.mark.parametrize("sigterm", [True, False], ids=["c10d", "static"])
@pytest.mark.parametrize("rank", [0, 1], ids=["coordinator", "agent"])
@pytest.mark.parametrize("phase", [phase for phase in Phase if phase is not Phase.DONE])
def test_an_agent_that_dies_in_any_phase_costs_no_memory(phase: Phase, rank: int, sigterm: bool) -> None:
    """Also while a recovery is under way: that of a killed trainer, and that of another agent's death."""
    for nth, delay_s in ((1, 0.0), (1, 0.15), (2, 0.0), (2, 0.15)):
        trainer = Fault(FaultKind.KILL_ACTIVE, 1, 2.0, Phase.TRAINING)
        agent = Fault(FaultKind.KILL_AGENT, rank, delay_s, phase, nth)
        cluster = Cluster(7, quiet_plan(2, 1, trainer, agent, sigterm=sigterm))
        outcome = cluster.run()
        if phase is Phase.STOPPING:  # some may have finished already: torchrun's affair
            assert outcome.exit_code in (ExitCode.FINISHED, ExitCode.AGENT_LOST)
            continue
        assert outcome.exit_code == ExitCode.FINISHED
        found = [source for source, _ in recoveries(cluster)]
        names = [name for name, _ in cluster.events]
        since = next(i for i, name in enumerate(names) if name in ("started", "recovered"))
        assert not {"memory_given_up", "fatal"} & set(names[since:]), f"nth {nth}, delay {delay_s}"
        assert set(found[names[since] == "recovered" :]) <= {"in-place"}, f"{found}, nth {nth}"


@pytest.mark.slow
@pytest.mark.parametrize("sigterm", [True, False], ids=["c10d", "static"])
@pytest.mark.parametrize("shape", [(1, 2), (2, 1)], ids=["one node", "two nodes"])
def test_an_agent_that_dies_at_any_event_is_replaced(shape: tuple[int, int], sigterm: bool) -> None:
    """Every event of a run with a recovery in it: a message, a death, a tick of a clock."""
    nodes, local_ranks = shape
    trainer = Fault(FaultKind.KILL_ACTIVE, 1, 1.0, Phase.TRAINING)
    events = Cluster(3, quiet_plan(nodes, local_ranks, trainer, sigterm=sigterm)).run().events
    assert events > 200
    for event in range(1, events, 3):
        agent = Fault(FaultKind.KILL_AGENT, event % 2 if nodes == 2 else 0, 0.0, event=event)
        plan = quiet_plan(nodes, local_ranks, trainer, agent, sigterm=sigterm)
        try:
            Cluster(3, plan).run()
        except Exception as error:
            error.add_note(f"the agent died at event {event} of {plan}")
            raise


@pytest.mark.parametrize("kept", [True, False])
def test_what_the_death_of_an_agent_costs_is_told(kept: bool) -> None:
    """Nothing, if the memory is used; if it is lost besides, the iterations since the checkpoint."""
    agent = Fault(FaultKind.KILL_AGENT, 1, 4.6, Phase.TRAINING)
    manager = Fault(FaultKind.KILL_MANAGER, 0, 0.0, Phase.FENCING)
    faults = (agent,) if kept else (agent, manager)
    cluster = Cluster(7, replace(quiet_plan(2, 1, *faults, sigterm=True), iterations=12))
    cluster.run()
    (recovered,) = (fields for name, fields in cluster.events if name == "recovered")
    assert recovered["fatal"] is not kept
    first = [one for one in cluster.trainers.values() if one.home.attempt == 0 and one.generation == 0]
    reached = min(one.iteration for one in first)
    assert reached > 0
    assert recovered["iterations_lost"] == max(0, reached - recovered["iteration"])
    assert (recovered["iterations_lost"] == 0) is kept


def test_memory_is_given_up_when_nobody_comes_in_time() -> None:
    fault = Fault(FaultKind.KILL_AGENT, 1, 3.0, Phase.TRAINING)
    plan = quiet_plan(2, 1, fault, sigterm=False)  # the coordinator misses it after 12 s
    deadlines = replace(plan.policy.deadlines, grace_s=3.0)
    cluster = Cluster(5, replace(plan, policy=replace(plan.policy, deadlines=deadlines)))
    assert cluster.run().exit_code == ExitCode.FINISHED
    assert [x["reason"] for name, x in cluster.events if name == "memory_given_up"] == [
        "1 nodes hold some, expected 2; nodes [1] hold none"
    ]
    assert [name for name, _ in cluster.events if name in ("adopted", "recovered")] == []


def test_a_spare_takes_over_and_the_lost_node_comes_back_as_the_spare() -> None:
    fault = Fault(FaultKind.LOSE_NODE, 1, 3.0, Phase.TRAINING)
    plan = quiet_plan(2, 1, fault, sigterm=True, restarts=3)
    cluster = Cluster(4, replace(plan, iterations=40, spares=1, returns_s=25.0))
    assert cluster.run().exit_code == ExitCode.FINISHED
    names = [name for name, _ in cluster.events]
    assert names.count("node_replaced") == names.count("adopted") == 1
    assert names.index("node_replaced") < names.index("adopted")
    assert [source for source, _ in recoveries(cluster)] == ["checkpoint", "in-place"]
    assert [list(node.agent.ranks) for node in cluster.nodes] == [[0], [], [1]], "the ranks follow the memory"


def test_without_a_spare_the_loss_of_a_node_waits_for_torchrun_to_find_one() -> None:
    fault = Fault(FaultKind.LOSE_NODE, 1, 3.0, Phase.TRAINING)
    plan = quiet_plan(2, 1, fault, sigterm=True, restarts=3)
    cluster = Cluster(4, replace(plan, returns_s=25.0))
    assert cluster.run().exit_code == ExitCode.FINISHED
    assert "node_replaced" not in [name for name, _ in cluster.events]
    assert [x["reason"] for name, x in cluster.events if name == "memory_given_up"] == [
        "1 nodes hold some, expected 2; nodes [1] hold none"
    ]


def test_without_another_start_the_memory_goes_with_torchrun() -> None:
    fault = Fault(FaultKind.KILL_AGENT, 1, 1.0, Phase.TRAINING)
    assert (
        Cluster(5, quiet_plan(2, 1, fault, sigterm=True, restarts=0)).run().exit_code == ExitCode.AGENT_LOST
    )


# --- survivors --------------------------------------------------------------------------------------


def surviving_plan(nodes: int, local_ranks: int, *faults: Fault, **changes: Any) -> Plan:
    """Every survivor retires; nothing fails but what is given."""
    plan = quiet_plan(nodes, local_ranks, *faults, sigterm=True)
    honest = {"deaf_survivors": 0.0, "lying_survivors": 0.0, "stuck_survivors": 0.0, "dying_survivors": 0.0}
    policy = replace(plan.policy, retire_s=1.0)
    return replace(plan, policy=policy, **{"retires": True, "peers_notice": 1.0, **honest, **changes})


_RECOVERING = (
    *(Phase.FENCING, Phase.REPAIRING, Phase.PREPARING, Phase.EXCHANGING, Phase.DECIDING, Phase.RESUMING),
    Phase.TRAINING,
)


def origins(cluster: Cluster) -> dict[int, list[str]]:
    """Where the shadow of each rank at L3 came from, world by world."""
    found: dict[int, list[str]] = {}
    for name, fields in cluster.events:
        if name == "shadow_level" and fields["level"] == 3:
            found.setdefault(fields["world"], [""] * cluster.world_size)[fields["rank"]] = fields["origin"]
    return found


def test_survivors_are_the_shadows_of_the_next_world_but_one() -> None:
    """The ready shadows take over; behind them stand the survivors, and a new process for the failed rank."""
    first = Fault(FaultKind.KILL_ACTIVE, 1, 3.0, Phase.TRAINING)
    second = Fault(FaultKind.KILL_ACTIVE, 0, 6.0, Phase.TRAINING, 2)
    cluster = Cluster(3, replace(surviving_plan(2, 2, first, second), iterations=40))
    assert cluster.run().exit_code == ExitCode.FINISHED
    assert origins(cluster) == {
        1: ["new"] * 4,
        2: ["new"] * 4,
        3: ["survivor", "new", "survivor", "survivor"],
        4: ["new", "survivor", "survivor", "survivor"],
    }
    assert [source for source, _ in recoveries(cluster)] == ["in-place"] * 2


@pytest.mark.parametrize("kind", [FaultKind.KILL_ACTIVE, FaultKind.KILL_TWO, FaultKind.KILL_AGENT])
@pytest.mark.parametrize("phase", _RECOVERING)
def test_another_failure_while_survivors_retire_costs_no_memory(phase: Phase, kind: FaultKind) -> None:
    """Of a trainer, of two at once, of an agent: adoption ends what was on its way."""
    for nth, delay_s in ((1, 0.0), (1, 0.1), (2, 0.0), (2, 0.1)):
        first = Fault(FaultKind.KILL_ACTIVE, 1, 2.0, Phase.TRAINING)
        again = Fault(kind, 0, delay_s, phase, nth)
        cluster = Cluster(7, surviving_plan(2, 2, first, again))
        assert cluster.run().exit_code == ExitCode.FINISHED
        assert not {"memory_given_up", "fatal"} & {name for name, _ in cluster.events}
        assert {source for source, _ in recoveries(cluster)} <= {"in-place", "fresh"}


@pytest.mark.parametrize("way", ["deaf_survivors", "lying_survivors", "stuck_survivors", "dying_survivors"])
def test_a_survivor_that_does_not_retire_costs_its_process_and_no_more(way: str) -> None:
    for seed in range(10):
        fault = Fault(FaultKind.KILL_ACTIVE, 1, 3.0, Phase.TRAINING)
        plan = surviving_plan(2, 1, fault, **{way: 1.0})
        cluster = Cluster(seed, replace(plan, iterations=30))
        assert cluster.run().exit_code == ExitCode.FINISHED
        assert [source for source, _ in recoveries(cluster)] == ["in-place"]
        if way != "dying_survivors":  # some of them live
            assert "survivor" not in origins(cluster).get(3, [])


def run_with_garbage(seed: int) -> None:
    """Ranks die at any time, and the survivors' collectives are aborted and return garbage."""
    rng = random.Random(f"garbage-{seed}")
    nodes, local_ranks = rng.choice([(2, 2), (2, 2), (3, 1), (2, 1)])
    faults = [
        Fault(
            FaultKind.KILL_ACTIVE,
            rng.randrange(nodes * local_ranks),
            rng.uniform(0.5, 6.0),
            Phase.TRAINING,
            k,
        )
        for k in (1, 2, 3)
    ]
    plan = surviving_plan(nodes, local_ranks, *faults, garbage=True, split=rng.random() < 0.7)
    try:
        Cluster(seed, replace(plan, delay_s=rng.choice([0.02, 0.2]), iterations=12)).run()
    except Exception as error:
        error.add_note(f"repeat with: run_with_garbage({seed})")
        raise


def runs_with_garbage(count: int) -> None:
    for seed in range(count):
        run_with_garbage(seed)


def test_what_aborted_collectives_return_is_never_used() -> None:
    runs_with_garbage(100)


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
    patch.setattr(classifier, "_RULES", ())


def never_give_up(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Classifier, "classify", lambda self, failure, now: Ruling(Verdict.HOF, ("always",)))


def see_no_hang(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(HangDetector, "check", lambda self, now: None)


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


def take_memory_of_two_epochs(patch: pytest.MonkeyPatch) -> None:
    """Agents that held fresh memory and agents that held older memory go on together."""
    original = Roster.assign

    def assign(self: Roster) -> Any:
        newest = max((one.epoch for join in self.joined.values() for one in join.held), default=0)
        for node, join in self.joined.items():
            held = tuple(msgspec.structs.replace(one, epoch=newest) for one in join.held)
            self.joined[node] = msgspec.structs.replace(join, held=held)
        return original(self)

    def fenced(self: AgentCore, rank: int, epoch: int, error: str | None, now: float) -> Any:
        self._unfenced.discard(rank)
        self.managers[rank].epoch = self.epoch
        self._maybe_fenced()
        return self._flush()

    patch.setattr(Roster, "assign", assign)
    patch.setattr(AgentCore, "manager_fenced", fenced)


def count_generations_anew_after_a_restart(patch: pytest.MonkeyPatch) -> None:
    original = Roster.assign
    patch.setattr(Roster, "assign", lambda self: replace(original(self), generation=0))


def report_in_before_the_leftovers_are_dead(patch: pytest.MonkeyPatch) -> None:
    """Neither the agent nor the manager looks whether trainers of the dead agent live on."""
    patch.setattr(SimTorchrun, "leftovers_awaited", False)
    patch.setattr(SimManager, "fenced", lambda self, generation: True)


def keep_the_memory_of_a_finished_job(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(agent_state, "KEEPS_MEMORY", frozenset(ExitCode))


def wait_for_agents_that_are_dead(patch: pytest.MonkeyPatch) -> None:
    """At the end of an attempt the coordinator waits for the word of one that cannot speak any more."""
    patch.setattr(Coordinator, "_leave_the_silent", lambda self: None)
    patch.setattr(Coordinator, "_finish", lambda self: None)


def answer_the_hook_before_the_shadow_is_gone(patch: pytest.MonkeyPatch) -> None:
    original = ReclaimDesk.ask

    def ask(self: ReclaimDesk, asker: Any, sequence: int, trainers: Any) -> Any:
        original(self, asker, sequence, trainers)
        self._pending.clear()
        return []

    patch.setattr(ReclaimDesk, "ask", ask)


def never_answer_the_hook(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ReclaimDesk, "gone", lambda self, sid: [])


def return_to_the_reclaimed_level(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PreinitController, "_lower", lambda self, rank, level, now, why: [])


def mix_the_memory_of_survivors_with_a_spares(patch: pytest.MonkeyPatch) -> None:
    """Only the spare gets fresh managers; the others keep theirs."""
    replace_only_the_dead_manager(patch)


def be_a_spare_with_trainers_left(patch: pytest.MonkeyPatch) -> None:
    """A device is looked at while its processes end; it may be healthy already."""
    patch.setattr(AgentCore, "_nothing_left", True)


def count_a_survivor_as_fenced_when_it_is_asked(patch: pytest.MonkeyPatch) -> None:
    """It has not given up writing yet."""
    original = AgentCore._ask_to_retire

    def ask(self: AgentCore, trainer: Any, within_s: float) -> None:
        original(self, trainer, within_s)
        out, self._out = self._out, []
        self._out = out + self.released(trainer.sid, None, self._now)

    patch.setattr(AgentCore, "_ask_to_retire", ask)


def believe_a_survivor(patch: pytest.MonkeyPatch) -> None:
    """That it says so is taken for proof that it cannot write."""

    def believe(self: AgentCore, trainer: Any) -> None:
        out, self._out = self._out, []
        self._out = out + self.released(trainer.sid, None, self._now)

    patch.setattr(AgentCore, "_check_released", believe)


def wait_for_survivors_without_a_deadline(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(AgentCore, "_overdue", lambda self, trainer: trainer.state is TrainerState.RETIRING)


def hold_ranks_for_survivors_that_are_gone(patch: pytest.MonkeyPatch) -> None:
    """The ranks whose trainer might have survived never get a new process."""
    original = NextWorld.fenced

    def fenced(self: NextWorld, ranks: Any, survivors: Any, now: float) -> Any:
        return original(self, (), survivors, now)

    patch.setattr(NextWorld, "fenced", fenced)


def forget_to_tell_a_spares_trainer_its_rank(patch: pytest.MonkeyPatch) -> None:
    original = SimTrainer.hear

    def hear(self: SimTrainer, message: Any) -> None:
        if not isinstance(message, wire.TakeRank):
            original(self, message)

    patch.setattr(SimTrainer, "hear", hear)


def update_without_looking_whether_the_world_is_over(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SimTrainer, "leaves", lambda self: False)


def abort_before_the_main_thread_is_told(patch: pytest.MonkeyPatch) -> None:
    def end_world(self: SimTrainer) -> None:
        self.abort()
        self.later(0.05, 0.15, self.told)

    patch.setattr(SimTrainer, "end_world", end_world)


def barrier_before_the_sync(patch: pytest.MonkeyPatch) -> None:
    """Each rank looks for itself after the sync; nobody vouches for what its peers have done to it."""
    update = SimTrainer.update

    def synced(self: SimTrainer, true: bool) -> None:
        self.true_norm = true
        if not self.leaves():
            update(self)

    patch.setattr(SimTrainer, "synchronize", lambda self: self.vouch(True))
    patch.setattr(
        SimTrainer,
        "update",
        lambda self: self.collective(TrainerPhase.UPDATE, lambda true: synced(self, true)),
    )


@pytest.mark.parametrize(
    "mutant",
    [
        update_without_looking_whether_the_world_is_over,
        abort_before_the_main_thread_is_told,
        barrier_before_the_sync,
    ],
)
def test_garbage_that_is_used_is_seen(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises(ViolationError, match="I-6: "):
        runs_with_garbage(300)


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
    answer_the_hook_before_the_shadow_is_gone: "memory",
    never_answer_the_hook: "liveness",
    return_to_the_reclaimed_level: "memory",
    take_memory_of_two_epochs: "I-5",
    count_generations_anew_after_a_restart: "I-4",
    report_in_before_the_leftovers_are_dead: "I-4",
    keep_the_memory_of_a_finished_job: "I-7",
    wait_for_agents_that_are_dead: "liveness",
    mix_the_memory_of_survivors_with_a_spares: "I-5",
    be_a_spare_with_trainers_left: "I-7",
    count_a_survivor_as_fenced_when_it_is_asked: "I-4",
    believe_a_survivor: "I-4",
    wait_for_survivors_without_a_deadline: "liveness",
    hold_ranks_for_survivors_that_are_gone: "liveness",
    forget_to_tell_a_spares_trainer_its_rank: "levels",
}
"""What each one must be caught by; "table": an event that the transition tables do not allow."""


SCENARIO: dict[Callable[[pytest.MonkeyPatch], None], Scenario] = dict.fromkeys(
    (
        take_memory_of_two_epochs,
        count_generations_anew_after_a_restart,
        report_in_before_the_leftovers_are_dead,
        keep_the_memory_of_a_finished_job,
        wait_for_agents_that_are_dead,
    ),
    Scenario.ADOPTION,
) | {
    mix_the_memory_of_survivors_with_a_spares: Scenario.SPARE,
    be_a_spare_with_trainers_left: Scenario.UNFIT,
    forget_to_tell_a_spares_trainer_its_rank: Scenario.SPARE,
}


def broken_by(seed: int, scenario: Scenario | None = None) -> str:
    """The invariant that this run breaks; empty if none, or if it only crashes."""
    try:
        run_seed(seed, scenario)
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
    scenario = SCENARIO.get(mutant)
    assert any(broken_by(seed, scenario) == invariant for seed in range(400)), (
        f"{mutant.__name__} breaks {invariant} in none of 400 schedules"
    )


def test_every_invariant_of_the_protocol_has_a_mutant() -> None:
    assert {"I-3", "I-4", "I-5", "I-6", "I-7"} <= set(MUTANTS.values())
