"""The death of real agents under a real torchrun: all agents start again and go on from the memory."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torchruns import Start, counted, holder, job_state, nodes_of, torchrun_of, trains

from leto_shadow import linux
from leto_shadow.exit_codes import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # on a busy machine


def test_a_killed_agent_is_started_again_and_goes_on_from_the_memory(
    start_job: Start, agent_below: Callable[[int], int | None], tmp_path: Path
) -> None:
    stop = tmp_path / "stop"
    job = start_job(
        "adopt",
        *("--", "100000", "--until", str(stop), "--child"),
        torchrun=("--standalone", "--max-restarts", "3"),
    )

    def agent() -> int:
        return job.until(lambda: agent_below(job.process.pid))

    job.until(lambda: trains(job, 0) and counted(job, 20))
    managers = {event["rank"]: event["pid"] for event in job.events("manager_started")}
    first = agent()
    children = {pid for pid in job.pids() if pid not in managers.values()}
    os.kill(first, signal.SIGKILL)
    job.until(lambda: trains(job, 1))
    assert agent() != first
    adopted = {event["rank"]: event["pid"] for event in job.events("manager_adopted")}
    assert adopted == managers, "the same processes, with the same memory"
    assert not children & set(job.pids()), "I-7: also what the trainers had started"
    # Again, while the recovery is under way: before the next generation trains, if this process is in time.
    generation = job_state(job)["generation"]
    os.kill(agent(), signal.SIGKILL)

    def under_way() -> bool:
        state = job_state(job)
        return state.get("phase") not in (None, "joining", "training") or trains(job, generation + 1)

    job.until(under_way)
    recovering = job_state(job).get("generation", -1)
    killed = agent()
    os.kill(killed, signal.SIGKILL)
    job.until(lambda: agent_below(job.process.pid) not in (None, killed) and trains(job, recovering))
    stop.touch()
    assert job.wait() == ExitCode.FINISHED, job.text()
    recovered = job.events("recovered")
    assert {event["source"] for event in recovered} == {"in-place"}
    assert recovered[0]["iteration"] >= 20
    iterations = [event["iteration"] for event in recovered]
    assert iterations == sorted(iterations)
    assert {event["rank"]: event["pid"] for event in job.events("manager_adopted")} == managers
    assert job.events("manager_started") == job.events("manager_started")[:2]
    job.assert_nothing_left()


def counted_since(job: Any, name: str) -> bool:
    """Both ranks have counted since the last event of that name."""
    events = job.events()
    last = max(number for number, event in enumerate(events) if event["event"] == name)
    return {event["rank"] for event in events[last:] if event["event"] == "metrics"} == {0, 1}


@pytest.mark.nightly
def test_a_spare_takes_the_place_of_a_lost_node_which_comes_back_as_the_spare(
    start_job: Start, tmp_path: Path
) -> None:
    """The node ends all at once, and says nothing. (CI has its torchrun's end, its agent's silence, and how
    it comes back: `test_several_nodes`.)"""
    stop = tmp_path / "stop"
    jobs, another = nodes_of(start_job, stop, 3, ("--deadline-agent-s", "15"))
    first = jobs[0]
    first.until(lambda: trains(first, 0) and counted(first, 20))
    assert first.events("job_started")[-1]["spares"] == 1
    node, agent = first.until(lambda: (found := holder(jobs, 1))[0] > 0 and found)
    lost = torchrun_of(jobs, agent)
    tree = linux.descendants(lost.process.pid)
    victims = [lost.process.pid, *(pid for pid in tree if pid != lost.process.pid)]
    for number, order in ((signal.SIGSTOP, victims), (signal.SIGKILL, victims[::-1])):
        for pid in order:  # all are stopped first, so that none acts on the end of another one
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)
    lost.wait()
    jobs.remove(lost)
    alive = jobs[0]
    alive.until(lambda: alive.events("node_replaced"))
    (replaced,) = alive.events("node_replaced")
    assert (replaced["lost"], replaced["first_rank"], replaced["ranks"]) == (node, 1, 1)
    alive.until(lambda: alive.events("recovered") and trains(alive, 1) and counted_since(alive, "recovered"))
    (recovered,) = alive.events("recovered")
    assert (recovered["fatal"], recovered["source"]) == (True, "fresh")
    assert len(alive.events("job_started")) == 1, "the others were not started again"

    done = max(event["iteration"] for event in alive.events("metrics"))
    another()  # the node is back: torchrun starts all agents again, and nothing is lost
    alive.until(lambda: len(alive.events("job_started")) == 2)
    alive.until(lambda: trains(alive, recovered["generation"] + 1))
    assert alive.events("job_started")[-1]["spares"] == 1
    last = alive.events("recovered")[-1]
    assert last["source"] == "in-place"
    assert last["iteration"] >= 1
    assert done >= 1
    ranks = {tuple(alive.status(index)["ranks"]) for index in range(3)}
    assert ranks == {(0,), (1,), ()}
    stop.touch()
    assert [job.wait() for job in jobs] == [ExitCode.FINISHED] * 3, alive.text()
    alive.assert_nothing_left()
