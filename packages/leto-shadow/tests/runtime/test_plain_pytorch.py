"""The plain-PyTorch example under `leto run`: killed at random, and still equal, bit for bit, to torch's own
AdamW."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from plain_jobs import HELD_AT, ITERATIONS, Job

from leto_shadow import cli, control
from leto_shadow.events import EventReader

pytest.importorskip("torch")
pytest.importorskip("leto_rmu")


def trainer_pid(run_dir: Path, rank: int) -> int:
    reply = control.ask(run_dir / "agent-0.sock", control.StatusRequest(), timeout_s=60.0)
    assert isinstance(reply, control.StatusReply)
    (pid,) = [t["pid"] for t in reply.status["trainers"] if t["rank"] == rank and t["role"] == "active"]
    return int(pid)


def check_report(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`leto report` of what `--keep` kept."""
    assert cli.main(["report", str(kept / "twice"), "--json", "--trace", str(kept / "trace.json")]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["state"], data["generations"]) == ("finished", 3)
    assert data["run"]["iterations"] == ITERATIONS
    assert data["ettr"] > 0.0
    events = EventReader(kept / "twice" / "node0" / "events.jsonl").poll()
    at = {name: [e["mono"] for e in events if e["event"] == name] for name in ("failure", "recovered")}
    for row, failed, recovered in zip(data["failures"], at["failure"], at["recovered"], strict=True):
        parts = sum(row["breakdown"][name] for name in row["breakdown"] if name != "total")
        assert parts == pytest.approx(row["breakdown"]["total"])
        assert row["interruption_s"] >= recovered - failed - 1e-3  # events are written after what they tell
        assert row["recompute_s"] is not None
    spans = [one for one in json.loads((kept / "trace.json").read_text())["traceEvents"] if one["ph"] == "X"]
    assert [one["name"] for one in spans].count("recovery: in-place") == 2
    assert (kept / "twice" / "node0" / "logs" / "rank1.log").exists()


def check_survivor(job: Job) -> None:
    """The trainer that survived generation 0 is promoted again: in generation 1 if the shadows were not ready
    when the failure came, otherwise in generation 2. It trains on, and the bits are compared at the end."""
    pids = {(event["generation"], event["rank"]): event["pid"] for event in job.events("resumed")}
    killed = [event["rank"] for event in job.events("failure")]
    [survivor] = job.events("survived", 0)
    assert (survivor["rank"], survivor["pid"], survivor["level"]) == (
        1 - killed[0],
        pids[0, 1 - killed[0]],
        2,
    )
    assert survivor["pid"] in (pids[1, 1 - killed[0]], pids[2, 1 - killed[0]])
    assert not job.events("survivor_lost", 0)


def random_seed() -> int:
    seed = int(os.environ.get("LETO_TEST_SEED", "0")) or random.randrange(1, 1 << 31)
    print(f"repeat with: LETO_TEST_SEED={seed} python -m pytest {__file__}")
    return seed


@pytest.mark.job
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_that_is_killed_twice_ends_with_the_bits_of_plain_torch(
    spawn: Callable[..., subprocess.Popen[bytes]],
    tmp_path: Path,
    short_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    seed = random_seed()
    rng = random.Random(seed)
    run_dir = short_path / "job"
    kept = tmp_path / "kept"
    job = Job(spawn, tmp_path, run_dir, "--job-id", "twice", "--keep", str(kept), "--retire-s", "300")
    for generation, low in ((0, 10), (1, 110)):
        rank, iteration = rng.randrange(2), low + rng.randrange(60)
        job.until(
            lambda i=iteration, g=generation: (
                job.events("metrics", g)[-1:] and (job.events("metrics", g)[-1]["iteration"] >= i)
            )
        )
        if generation == 0:  # an accident from outside
            os.kill(trainer_pid(run_dir, rank), signal.SIGKILL)
        else:  # and one through the command line
            assert cli.main(["inject", "kill", "--rank", str(rank), "--run-dir", str(run_dir)]) == 0
            assert f"kill of rank {rank}" in capsys.readouterr().out
        job.until(lambda g=generation: job.events("recovered", g + 1))
        if generation == 0:
            assert cli.main(["status", "--once", "--run-dir", str(run_dir)]) == 0
            assert "generation 1" in capsys.readouterr().out
    job.finish()
    assert [event["kind"] for event in job.events("failure")] == ["exit", "exit"]
    recoveries = [(event["source"], event["iterations_lost"]) for event in job.events("recovered")]
    assert recoveries == [("in-place", 0)] * 2
    for rank in range(2):  # every one was reported; that which a kill cut off may be missing, none is twice
        done = [event["iteration"] for event in job.events("metrics") if event["rank"] == rank]
        assert sorted(set(done)) == done
        assert len(done) >= ITERATIONS - 2
    check_survivor(job)
    assert not list(run_dir.glob("*.sock"))
    check_report(kept, capsys)
    job.assert_exact(seed)


@pytest.mark.job
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_agents_killed_at_random_instants_cost_no_bit(
    spawn: Callable[..., subprocess.Popen[bytes]],
    agent_below: Callable[[int], int | None],
    tmp_path: Path,
    short_path: Path,
) -> None:
    """SIGKILL of the agent, coordinator and all, at any moment of training, start or recovery."""
    seed = random_seed()
    rng = random.Random(seed)
    run_dir = short_path / "job"
    job = Job(spawn, tmp_path, run_dir, "--max-restarts", "20", "--standalone")

    def done() -> int:
        return max((event["iteration"] for event in job.events("metrics")), default=-1)

    job.until(lambda: done() >= 20)
    for _ in range(3):
        adoptions = len(job.events("adopted"))
        os.kill(job.until(lambda: agent_below(job.process.pid)), signal.SIGKILL)
        job.until(lambda n=adoptions: len(job.events("adopted")) > n)
        # Somewhere in the recovery, or in training after it: counted in events, of which the recovery has
        # some forty and each iteration two; no number of seconds is within the run on every machine.
        more = len(job.seen) + rng.randrange(100)
        job.until(lambda n=more: len(job.seen) >= n or done() >= HELD_AT - 1)
    job.finish()
    assert {event["source"] for event in job.events("recovered")} == {"in-place"}
    managers = [{event["pid"] for event in job.events(f"manager_{how}")} for how in ("started", "adopted")]
    assert managers[0] == managers[1]
    assert len(managers[0]) == 2
    assert not list(run_dir.glob("*.sock"))
    job.assert_exact(seed)
