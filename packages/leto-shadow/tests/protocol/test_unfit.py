"""Nodes whose devices are not operable: a spare takes their place, and they are the spare when repaired.

Played devices and simulated clusters for the rules, and one job of three real torchruns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from leto_shadow import cli, control
from leto_shadow import messages as m
from leto_shadow.actions import Record
from leto_shadow.agent_actions import CheckDevices, KillManager, KillTrainer, Note, SpawnTrainer, Tell
from leto_shadow.agent_core import AgentCore
from leto_shadow.config import Deadlines, JobPolicy
from leto_shadow.coordinator import Coordinator
from leto_shadow.exit_codes import ExitCode
from leto_shadow.operability import RECOVERY, Class, DeviceFacts, healed, judge
from leto_shadow.phases import Phase
from leto_shadow.retirement import why_not_ready
from leto_shadow.simulation import Cluster
from leto_shadow.simulation.plan import Fault, FaultKind, Scenario, make_plan
from leto_shadow.succession import retired_before

GONE = DeviceFacts("GPU-1", answers=False, error="it is gone")

# --- when is a device fit again? ------------------------------------------------------------------------


def test_what_the_driver_asks_for_decides() -> None:
    """NVIDIA, GPU Memory Error Management: none, reset, reboot, drain P2P, drain and reset."""
    fatal = {action for action in range(7) if not judge(DeviceFacts(recovery=action)).operable}
    assert fatal == {1, 2, 3, 5, 6}, (
        "what drains and resets later may go on; an action that nobody knows may not"
    )
    assert set(RECOVERY) == set(range(5))
    assert RECOVERY[4][0] is Class.HOF
    for action in range(1, 7):
        assert not healed(DeviceFacts(recovery=action), after_xid=False).operable, "no new work while it asks"
    assert healed(DeviceFacts(recovery=0), after_xid=True).operable
    assert not healed(DeviceFacts("GPU-1"), after_xid=True).operable, "an older driver knows of no reset"
    assert healed(DeviceFacts("GPU-1"), after_xid=False).operable
    assert not healed(GONE, after_xid=False).operable


# --- the agent ------------------------------------------------------------------------------------------


def retired_agent(*, coordinates: bool = False) -> tuple[AgentCore, list[Any]]:
    """An agent whose two managers are up and whose shadow waits, and what it does when it has to retire."""
    agent = AgentCore(1, 2, "host", Deadlines(heal_s=60.0), (), 0.0, coordinates=coordinates)
    agent.receive(m.Welcome(2, 4), 1.0)
    agent.receive(m.StartManagers(1), 1.0)
    for rank in (2, 3):
        agent.manager_up(rank, 1, "socket", 2.0)
    agent.receive(m.SpawnShadow(2, 7, 1), 2.0)
    return agent, agent.receive(m.Retire(0, "a reason"), 3.0)


def empty(agent: AgentCore, now: float) -> list[Any]:
    assert agent.trainer_gone(7, "killed", False, now) == []
    assert agent.manager_gone(2, 1, "killed", now) == []
    return agent.manager_gone(3, 1, "killed", now)


def test_a_node_that_retires_ends_all_it_has_before_it_looks_at_its_devices() -> None:
    agent, actions = retired_agent()
    assert {type(one) for one in actions} >= {KillTrainer, KillManager}
    assert not agent.ranks
    assert CheckDevices() not in agent.tick(4.0), "a device that is in use cannot be reset"
    assert Tell(m.Retired(0)) in empty(agent, 5.0), "and the place is given away when nothing is left"
    assert CheckDevices() in agent.tick(5.0)
    assert CheckDevices() not in agent.tick(6.0), "one look at a time"
    assert agent.devices_checked((GONE,), 7.0) == []
    assert CheckDevices() not in agent.tick(8.0)
    assert CheckDevices() in agent.tick(13.0)
    assert Tell(m.Fit(1)) in agent.devices_checked((DeviceFacts("GPU-1"),), 14.0)
    assert agent.tick(20.0) == []
    assert agent.receive(m.Welcome(0, 2), 21.0) == []
    assert list(agent.ranks) == [0, 1]


@pytest.mark.parametrize("coordinates", [False, True])
def test_a_node_that_nobody_repairs_leaves_unless_it_has_the_coordinator(coordinates: bool) -> None:
    agent, _ = retired_agent(coordinates=coordinates)
    empty(agent, 5.0)
    for now in range(6, 60, 6):
        agent.receive(m.Beat(-1, 0), float(now))
        assert CheckDevices() in agent.tick(float(now))
        agent.devices_checked((GONE,), now + 0.5)
    assert agent.ending is None
    agent.receive(m.Beat(-1, 0), 64.0)
    agent.tick(64.0)
    agent.devices_checked((GONE,), 64.5)
    if coordinates:
        assert agent.ending is None
    else:
        assert agent.ending is not None
        assert agent.ending.exit_code == ExitCode.NODE_UNFIT
        assert "it is gone" in agent.ending.reason


def test_a_node_gives_its_place_away_before_it_leaves_however_long_that_takes() -> None:
    agent = AgentCore(1, 2, "host", Deadlines(heal_s=0.5), (), 0.0)
    agent.receive(m.Welcome(2, 4), 1.0)
    agent.receive(m.StartManagers(1), 1.0)
    for rank in (2, 3):
        agent.manager_up(rank, 1, "socket", 2.0)
    agent.receive(m.SpawnShadow(2, 7, 1), 2.0)
    agent.inject_fatal(2, 79, 2.5, heals_s=None)
    agent.receive(m.Retire(0, "a reason"), 3.0)
    agent.tick(9.0)
    assert agent.ending is None, "to the coordinator it would be a lost node, and not one with a bad device"
    assert Tell(m.Retired(0)) in empty(agent, 9.5)
    agent.tick(9.6)
    assert agent.ending is not None
    assert agent.ending.exit_code == ExitCode.NODE_UNFIT


def test_an_agent_that_is_started_again_knows_that_its_node_was_unfit(tmp_path: Path) -> None:
    from leto_shadow.events import EventWriter, read_events

    path = tmp_path / "events.jsonl"

    def before(launcher: int, since: float) -> str | None:
        return retired_before(read_events(path), launcher, since)

    with EventWriter(path) as events:
        events.write("retired", launcher=5, reason="first")
        events.write("fit", launcher=5)
        events.write("retired", launcher=6, reason="another host's")
        assert before(5, 0.0) is None
        events.write("retired", launcher=5, reason="second")
    assert before(5, 0.0) == "second"
    assert before(5, 1e12) is None, "another torchrun had that pid"
    agent = AgentCore(1, 1, "host", Deadlines(), (), 0.0)
    agent.retire_again("second")
    (joined,) = agent.start()
    assert joined.message.unfit == "second"
    agent.receive(m.Retire(0, "second"), 1.0)
    assert CheckDevices() in agent.tick(1.0)
    assert Tell(m.Fit(1)) not in agent.devices_checked((DeviceFacts("GPU-1"),), 2.0), (
        "nobody knows what it was, and the driver does not say"
    )
    assert Tell(m.Fit(1)) in agent.devices_checked((DeviceFacts("GPU-1", recovery=0),), 3.0)


def spare_agent() -> AgentCore:
    agent = AgentCore(2, 1, "host", Deadlines(), (), 0.0)
    actions = agent.receive(m.Welcome(0, 2, spare=True), 1.0)
    assert [type(one) for one in actions] == [SpawnTrainer]
    return agent


def test_a_spare_looks_at_its_devices_and_says_so_when_they_cannot_be_used() -> None:
    agent = spare_agent()
    assert agent.tick(1.0) == [CheckDevices(anew=False)]
    assert agent.tick(2.0) == [], "one look at a time"
    assert agent.devices_checked((), 3.0) == []
    assert agent.tick(12.0) == []
    agent.receive(m.Beat(-1, 0), 13.0)
    assert agent.tick(13.0) == [CheckDevices(anew=False)]
    (sid,) = agent.trainers
    assert agent.devices_checked((GONE,), 14.0) == [
        Note("retired", {"ranks": [], "reason": "GPU-1: the device cannot be reached: it is gone"}),
        Tell(m.SpareUnfit("GPU-1: the device cannot be reached: it is gone")),
        KillTrainer(sid),
    ]
    assert agent.tick(14.5) == [], "its trainer may hold the device"
    agent.trainer_gone(sid, "killed", False, 15.0)
    assert agent.tick(15.0) == [CheckDevices()], "and no other one is started"
    assert agent.devices_checked((GONE,), 16.0) == []
    assert agent.tick(21.0) == [CheckDevices()]
    assert Tell(m.Fit(2)) in agent.devices_checked((DeviceFacts("GPU-1"),), 22.0)
    assert [type(one) for one in agent.receive(m.Welcome(0, 2, spare=True), 23.0)] == [SpawnTrainer]


def test_a_spare_that_gets_ranks_while_it_looks_has_no_use_for_the_answer() -> None:
    agent = spare_agent()
    assert agent.tick(1.0) == [CheckDevices(anew=False)]
    agent.receive(m.Welcome(1, 2), 2.0)
    assert agent.devices_checked((GONE,), 3.0) == []
    assert agent.tick(20.0) == [], "what becomes of devices at work, the ends of trainers tell"


def test_a_spare_whose_driver_asks_for_a_reset_later_takes_no_new_work() -> None:
    assert judge(DeviceFacts(recovery=4)).operable
    assert why_not_ready([DeviceFacts("GPU-0"), DeviceFacts("GPU-1", recovery=4)]) == (
        "GPU-1: the driver asks for a reset when the work is done"
    )
    assert why_not_ready([]) == ""


def test_no_unfit_spare_is_chosen() -> None:
    coordinator = Coordinator(4, JobPolicy(), 0.0, 2)
    events: list[Record] = []

    def say(node: int, message: Any, now: float) -> None:
        events.extend(one for one in coordinator.receive(node, message, now) if isinstance(one, Record))

    for node, reason in enumerate(["", "", "", "no driver"]):
        say(node, m.Join(node, 1, "host", unfit=reason), 1.0)
    assert coordinator.spares == ([2], [3])
    say(2, m.SpareUnfit("a bad row"), 2.0)
    assert coordinator.spares == ([], [2, 3])
    say(3, m.Fit(3), 3.0)
    say(1, m.SpareUnfit("too late: it has ranks"), 3.5)
    assert coordinator.stale["SpareUnfit"] == 1
    say(1, m.Bye(1, int(ExitCode.AGENT_LOST)), 4.0)
    assert [list(coordinator.ranks_of[node]) for node in (0, 3)] == [[0], [1]]
    told = [(one.event, one.fields.get("spare"), one.fields.get("reason")) for one in events]
    assert ("spare_unfit", 3, "no driver") in told
    assert ("spare_unfit", 2, "a bad row") in told
    assert ("node_replaced", 3, None) in told


def test_a_lost_node_without_a_fit_spare_ends_the_attempt() -> None:
    coordinator = Coordinator(3, JobPolicy(), 0.0, 2)
    for node in range(3):
        coordinator.receive(node, m.Join(node, 1, "host"), 1.0)
    coordinator.receive(2, m.SpareUnfit("a bad row"), 2.0)
    coordinator.receive(1, m.Bye(1, int(ExitCode.AGENT_LOST)), 4.0)
    assert coordinator.outcome is not None
    assert coordinator.outcome.exit_code == ExitCode.AGENT_LOST


# --- simulated clusters ---------------------------------------------------------------------------------


def run(*faults: Fault, spares: int, seed: int = 4, heals_s: float = 1.0, iterations: int = 30) -> Cluster:
    """Two nodes of one rank each, and spares; nothing fails but devices, which heal after so long."""
    plan = make_plan(1, Scenario.UNFIT)
    names = ("loss", "duplication", "slow_deaths", "stuck_demotions", "page_losses", "repair_errors")
    quiet = dict.fromkeys(names, 0.0)
    plan = replace(plan, nodes=2, local_ranks=1, iterations=iterations, spares=spares, faults=faults, **quiet)
    plan = replace(plan, policy=replace(plan.policy, shadow_level=3))
    cluster = Cluster(seed, plan)
    choice = cluster.rng.choice

    def chosen(options: Any) -> Any:
        return heals_s if len(options) == 3 and isinstance(options[0], float) else choice(options)

    cluster.rng.choice = chosen  # type: ignore[method-assign, assignment]
    assert cluster.run().exit_code == ExitCode.FINISHED
    return cluster


def unfit(rank: int, nth: int = 1, delay_s: float = 1.0) -> Fault:
    return Fault(FaultKind.UNFIT_DEVICE, rank, delay_s, Phase.TRAINING, nth)


def told(cluster: Cluster, *names: str) -> list[Any]:
    return [(name, fields) for name, fields in cluster.events if name in names]


def test_the_repaired_node_takes_the_next_place() -> None:
    cluster = run(unfit(1), unfit(1, 2, 6.0), spares=1)
    replaced = [x for _, x in told(cluster, "node_replaced")]
    assert [(x["lost"], x["spare"], x["unfit"]) for x in replaced] == [(1, 2, [1]), (2, 1, [1])]
    assert [list(node.agent.ranks) for node in cluster.nodes] == [[0], [1], []]
    names = [name for name, _ in cluster.events]
    assert names.count("job_started") == 1, "no agent was started again"
    assert names.count("spare_back") == 2
    assert {x["source"] for _, x in told(cluster, "recovered")} <= {"checkpoint", "fresh"}


def test_the_node_with_the_coordinator_gives_up_its_ranks_and_stays() -> None:
    cluster = run(unfit(0), spares=1, heals_s=float("inf"))
    assert [list(node.agent.ranks) for node in cluster.nodes] == [[], [1], [0]]
    assert cluster.nodes[0].exit is not None
    assert cluster.nodes[0].exit.exit_code == ExitCode.FINISHED


def test_a_node_that_stays_unfit_leaves_and_the_job_goes_on() -> None:
    cluster = run(unfit(1), spares=1, heals_s=float("inf"))
    assert cluster.nodes[1].exit is not None
    assert cluster.nodes[1].exit.exit_code == ExitCode.NODE_UNFIT
    names = [name for name, _ in cluster.events]
    assert names.count("job_started") == 1
    assert "spare_lost" in names


def test_without_a_spare_the_node_keeps_its_place() -> None:
    cluster = run(unfit(1), spares=0)
    assert [x["lost"] for _, x in told(cluster, "no_spare")] == [1]
    assert [list(node.agent.ranks) for node in cluster.nodes] == [[0], [1]]


@pytest.mark.parametrize(("spares", "taken_by"), [(1, 1), (2, 3)])
def test_a_spare_that_became_unfit_is_passed_over(spares: int, taken_by: int) -> None:
    """The first spare fails, then a node that trains: another spare takes its place, or none."""
    sick = Fault(FaultKind.UNFIT_SPARE, 0, 0.1, Phase.TRAINING, 1)
    cluster = run(sick, unfit(1, 1, 25.0), spares=spares, heals_s=float("inf"), iterations=400)
    assert [x["spare"] for _, x in told(cluster, "spare_unfit")] == [2]
    events = [name for name, _ in cluster.events if name in ("spare_unfit", "no_spare", "node_replaced")]
    assert events == ["spare_unfit", "no_spare" if spares == 1 else "node_replaced"]
    assert list(cluster.nodes[taken_by].agent.ranks) == [1]


def test_a_spare_that_is_fit_again_takes_the_place() -> None:
    sick = Fault(FaultKind.UNFIT_SPARE, 0, 0.1, Phase.TRAINING, 1)
    cluster = run(sick, unfit(1, 1, 40.0), spares=1, heals_s=15.0, iterations=600)
    names = [name for name, _ in cluster.events if name in ("spare_unfit", "spare_back", "node_replaced")]
    assert names[:3] == ["spare_unfit", "spare_back", "node_replaced"]


def test_two_devices_at_once() -> None:
    cluster = run(unfit(0, 1, 1.0), unfit(1, 1, 1.001), spares=2)
    assert [list(node.agent.ranks) for node in cluster.nodes] == [[], [], [0], [1]]
    assert len(told(cluster, "recovered")) == 1


# --- real torchruns -------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_spare_for_an_unfit_device_and_back(start_job: Callable[..., Any], tmp_path: Path) -> None:
    """Three torchruns. The first unfit node is repaired and takes its ranks back; the second leaves."""
    from torchruns import counted, holder, job_state, nodes_of, torchrun_of, trains  # skips without torch

    def active(job: Any, rank: int) -> dict[str, Any]:
        trainers = [one for node in range(3) for one in job.status(node)["trainers"]]
        return next(one for one in trainers if one["rank"] == rank and one["role"] == "active")

    stop = tmp_path / "stop"
    jobs, _ = nodes_of(start_job, stop, 3, ("--deadline-heal-s", "0.5"), name="unfit")
    first = jobs[0]
    first.until(lambda: trains(first, 0) and counted(first, 5))

    def fail(healing: str) -> tuple[int, Any]:
        node, agent = first.until(lambda: (found := holder(jobs, 1))[0] >= 0 and found)
        job, before = torchrun_of(jobs, agent), len(first.events("recovered"))
        staying = next(one for one in jobs if one is not job)
        words = ["inject", "fatal", "--rank", "1", "--heals-after", healing, "--run-dir", str(first.run_dir)]
        assert cli.main(words) == 0
        staying.until(lambda: len(first.events("recovered")) > before)
        staying.until(lambda: trains(first, job_state(first).get("generation", -1)))
        replaced = first.events("node_replaced")[-1]
        assert (replaced["lost"], replaced["unfit"]) == (node, [1])
        assert holder(jobs, 1)[0] == replaced["spare"]
        return node, job

    first.until(lambda: first.events("spare_level"))
    node, _ = fail("0")
    (taken,) = first.events("spare_trainer_taken")
    assert taken["rank"] == 1
    assert {"rank": 1, "role": "active", "pid": taken["pid"]}.items() <= active(first, 1).items(), (
        "the process that waited on the spare trains"
    )
    first.until(lambda: first.events("spare_back"))
    assert first.events("spare_back")[0]["spare"] == node
    assert [event["kind"] for event in first.events("failure")] == ["exit"]
    other, leaver = fail("never")
    assert other != node
    assert holder(jobs, 1)[0] == node, "it has its ranks again"
    if other != 0:  # that of the coordinator stays
        assert leaver.wait() == ExitCode.NODE_UNFIT, leaver.text()
        jobs.remove(leaver)
        first = jobs[0]
        first.until(lambda: first.events("spare_lost"))
        assert "not repaired within" in leaver.text()
    assert len(first.events("job_started")) == 1, "nobody was started again"
    assert [event["source"] for event in first.events("recovered")] == ["fresh", "fresh"]
    stop.touch()
    assert [job.wait() for job in jobs] == [ExitCode.FINISHED] * len(jobs), first.text()
    first.assert_nothing_left()
    assert isinstance(control.Inject("fatal", 0).heals_s, float)
