"""The death of real agents under a real torchrun: all agents start again and go on from the memory."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leto_shadow import control, linux
from leto_shadow.exit_codes import ExitCode

TCPStore = pytest.importorskip("torch.distributed").TCPStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

Start = Callable[..., Any]


def agent_of(job: Any) -> int:
    """Pid of the agent below the job's torchrun."""
    (agent,) = (
        pid
        for pid in linux.descendants(job.process.pid)
        if b"leto_shadow.agent_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
        and os.readlink(f"/proc/{pid}/exe")
    )
    return agent


def job_state(job: Any) -> dict[str, Any]:
    """The coordinator's state, empty while nobody answers."""
    try:
        return dict(job.status()["job"] or {})
    except control.ControlError:
        return {}


def trains(job: Any, generation: int, node: int = 0) -> bool:
    state = job_state(job)
    return state.get("phase") == "training" and state.get("generation") == generation


def counted(job: Any, at_least: int) -> bool:
    return any(event["iteration"] >= at_least for event in job.events("metrics"))


def test_a_killed_agent_is_started_again_and_goes_on_from_the_memory(
    start_job: Start, tmp_path: Path
) -> None:
    stop = tmp_path / "stop"
    job = start_job(
        "adopt",
        *("--", "100000", "--until", str(stop), "--child"),
        torchrun=("--standalone", "--max-restarts", "3"),
    )
    job.until(lambda: trains(job, 0) and counted(job, 20))
    managers = {event["rank"]: event["pid"] for event in job.events("manager_started")}
    first = agent_of(job)
    children = {pid for pid in job.pids() if pid not in managers.values()}
    os.kill(first, signal.SIGKILL)
    job.until(lambda: trains(job, 1))
    assert agent_of(job) != first
    adopted = {event["rank"]: event["pid"] for event in job.events("manager_adopted")}
    assert adopted == managers, "the same processes, with the same memory"
    assert not children & set(job.pids()), "I-7: also what the trainers had started"
    # Again, while the recovery is under way: before the next generation trains.
    os.kill(agent_of(job), signal.SIGKILL)
    job.until(lambda: job_state(job).get("phase") not in (None, "joining", "training"))
    os.kill(agent_of(job), signal.SIGKILL)
    job.until(lambda: trains(job, job_state(job).get("generation", -1)))
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
