"""A real agent that is stopped (SIGSTOP) while no spare can take its place, and goes on too late.

Its trainer runs on without it, and writes the memory of its rank: it must be dead before a newer generation
has that memory.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torchruns import job_state, nodes_of

from leto_shadow.exit_codes import ExitCode

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # on a busy machine


def test_the_trainer_of_a_stopped_agent_is_dead_before_a_newer_generation_has_its_memory(
    start_job: Callable[..., Any], alive: Callable[[int], bool], tmp_path: Path
) -> None:
    """Two nodes of one rank each, under a torchrun each: a trainer is killed and replaced in place, by what
    one node tells the other; then the agent of node 1 is stopped and given up."""
    stop = tmp_path / "stop"
    jobs, _ = nodes_of(start_job, stop, 2, ("--deadline-agent-s", "20"), name="stopped")
    log = jobs[0]

    def counted(generation: int) -> bool:
        done = [one["rank"] for one in log.events("metrics") if one["generation"] == generation]
        return set(done) == {0, 1}

    def promoted() -> bool:
        return any(one["generation"] > 1 for one in log.events("promoted"))

    def trainer_of_node_1() -> int:
        (found,) = (one for one in log.status(1)["trainers"] if one["role"] == "active")
        assert found["rank"] == 1
        return int(found["pid"])

    log.until(lambda: counted(0) and list(job_state(log).get("shadow_levels", {}).values()) == [3, 3])
    os.kill(trainer_of_node_1(), signal.SIGKILL)
    log.until(lambda: counted(1))
    assert [one["source"] for one in log.events("recovered")] == ["in-place"]
    agent, trainer = int(log.status(1)["pid"]), trainer_of_node_1()
    os.kill(agent, signal.SIGSTOP)
    log.until(lambda: log.events("job_failed"))
    (end,) = log.events("job_failed")
    assert (end["node"], end["exit_code"]) == (0, ExitCode.AGENT_LOST)
    assert end["reason"].startswith("the agent of node 1 has been silent for"), end
    assert alive(trainer), "nobody else may end it"
    assert not promoted()

    os.kill(agent, signal.SIGCONT)  # torchrun, which wants to start it anew, would kill it in half a minute
    log.until(promoted)
    assert not alive(trainer), "I-4: it was proven dead before the promotion"
    assert not alive(agent)

    def newest() -> int:
        return int(job_state(log).get("generation", 0))

    log.until(lambda: (found := newest()) > 1 and counted(found))
    (before, first, *_) = log.events("recovered")
    assert first["source"] == "in-place", "both memories were kept, and are one"
    assert first["iteration"] >= before["iteration"] > 0
    adopted = {one["rank"]: one["pid"] for one in log.events("manager_adopted")}
    assert adopted == {one["rank"]: one["pid"] for one in log.events("manager_started")}
    stop.touch()
    assert [job.wait() for job in jobs] == [ExitCode.FINISHED] * 2, log.text()
    log.assert_nothing_left()
