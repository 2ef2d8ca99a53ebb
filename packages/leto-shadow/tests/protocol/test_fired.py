"""A drill and an injection strike once in a job, also where their rank moves to a node that has seen nothing.

The pure cores first; then two real torchruns that give one rank to each other.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leto_shadow import linux
from leto_shadow import messages as m
from leto_shadow.actions import Send
from leto_shadow.agent_actions import Tell
from leto_shadow.agent_core import AgentCore
from leto_shadow.config import Deadlines, JobPolicy
from leto_shadow.coordinator import Coordinator
from leto_shadow.drills import Drill
from leto_shadow.exit_codes import ExitCode
from leto_shadow.fired import of_drill
from leto_shadow.schedule import Injection, Schedule, dump_schedule

DRILLS = tuple(Drill(name, "kill", 1, 3) for name in "ab")


def welcomes(actions: list[Any]) -> dict[int, m.Welcome]:
    """Those that were sent, by node."""
    sent = [one for one in actions if isinstance(one, Send) and isinstance(one.message, m.Welcome)]
    return {one.node: one.message for one in sent}  # type: ignore[misc]


def test_the_coordinator_tells_who_gets_ranks_what_has_struck() -> None:
    coordinator = Coordinator(3, JobPolicy(), 0.0, 2)
    coordinator.receive(0, m.Join(0, 1, "host"), 1.0)
    coordinator.receive(2, m.Join(2, 1, "host", fired=("old",), trained_s=10.0), 2.0)
    first = welcomes(coordinator.receive(1, m.Join(1, 1, "host", trained_s=3.0), 4.0))
    assert {node: (one.fired, one.trained_s, one.spare) for node, one in first.items()} == {
        0: (("old",), 12.0, False),
        1: (("old",), 12.0, False),
        2: (("old",), 12.0, True),
    }
    coordinator.receive(1, m.Fired("new"), 5.0)
    (again,) = welcomes(coordinator.receive(1, m.Bye(1, int(ExitCode.AGENT_LOST)), 6.0)).values()
    assert (again.first_rank, again.spare) == (1, False)
    assert (again.fired, again.trained_s) == (("new", "old"), 14.0)


def test_what_a_lost_node_said_last_counts() -> None:
    coordinator = Coordinator(3, JobPolicy(), 0.0, 2)
    for node in range(3):
        coordinator.receive(node, m.Join(node, 1, "host"), 1.0)
    coordinator.receive(1, m.Bye(1, int(ExitCode.AGENT_LOST)), 6.0)
    coordinator.receive(1, m.Fired("late"), 6.1)
    assert "late" in coordinator._fired
    assert coordinator.stale["Fired"] == 1


def test_an_agent_says_first_and_asks_no_trainer_for_what_has_struck() -> None:
    agent = AgentCore(1, 1, "host", Deadlines(), DRILLS, 0.0, fired=(of_drill("a"),))
    assert set(agent._drills) == {"b"}
    (joined,) = agent.start()
    assert isinstance(joined, Tell)
    assert (joined.message.fired, joined.message.trained_s) == ((of_drill("a"),), None)  # type: ignore[union-attr]
    agent.receive(m.Welcome(1, 2, fired=(of_drill("b"), "x"), trained_s=4.0), 9.0)
    assert not agent._drills
    assert agent.trains_since == 5.0
    assert agent.fires("y", 10.0) == [Tell(m.Fired("y"))]
    assert agent.fired == {of_drill("a"), of_drill("b"), "x", "y"}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rank_that_moves_to_a_spare_and_back_meets_each_failure_once(
    start_job: Callable[..., Any], tmp_path: Path
) -> None:
    """Node 0 loses its rank to the spare for an injected Xid, and gets it back when that node is lost.

    Each time all begins anew at iteration 0, so that whatever could strike again, would.
    """
    from torchruns import nodes_of  # skips without torch

    schedule = Schedule((Injection(0.2, 0, "ff", xid=79, heals_s=0.0), Injection(0.4, 0, "kill")))
    (tmp_path / "schedule.json").write_bytes(dump_schedule(schedule))
    stop = tmp_path / "stop"
    options = ("--injections", str(tmp_path / "schedule.json"))
    jobs, _ = nodes_of(start_job, stop, 2, options, name="fired", active=1)
    log = jobs[0]

    def counted(generation: int) -> bool:
        done = [one["iteration"] for one in log.events("metrics") if one["generation"] == generation]
        return bool(done) and max(done) >= 10

    log.until(lambda: log.events("spare_back") and counted(2))
    (replaced,) = log.events("node_replaced")
    assert (replaced["lost"], replaced["spare"]) == (0, 1)
    agent = log.status(1)["pid"]
    lost = next(job for job in jobs if agent in linux.descendants(job.process.pid))
    kept = next(job for job in jobs if job is not lost)
    os.kill(lost.process.pid, signal.SIGKILL)  # its agent sees it, and says that it goes for good
    lost.wait()
    kept.until(lambda: counted(3))
    stop.touch()
    assert kept.wait() == ExitCode.FINISHED, kept.text()
    assert [one["lost"] for one in log.events("node_replaced")] == [0, 1]
    injected = [(one["node"], one["number"], one["done"]) for one in log.events("injected")]
    assert injected == [(0, 0, True), (1, 1, True)]
    assert {one["schedule"] for one in log.events("injected")} == {schedule.key}
    assert [(one["node"], one["elapsed_s"] > 0) for one in log.events("injections_begun")] == [
        (0, False),
        (1, True),
    ]
    assert [one["fatal"] for one in log.events("recovered")] == [True, False, True]
    assert len(log.events("job_started")) == 1, "nobody was started again"
    kept.assert_nothing_left()
