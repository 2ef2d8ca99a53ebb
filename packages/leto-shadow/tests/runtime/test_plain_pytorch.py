"""The plain-PyTorch example under `leto run`: killed at random, and still equal, bit for bit, to torch's own
AdamW."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leto_shadow import cli, control, linux
from leto_shadow.events import Event, EventReader

pytest.importorskip("leto_rmu")

EXAMPLE = Path(__file__).parents[2] / "examples" / "plain_pytorch.py"
ITERATIONS = 260
DEADLINE_S = 150.0


def reference(iterations: int = ITERATIONS) -> dict[str, Any]:
    """Both ranks of the example in one process, in plain torch: nothing of Leto, nothing distributed."""
    import torch
    from torch import nn

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 1))
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, foreach=False)
    states = []
    for rank in range(2):
        torch.manual_seed(1000 + rank)
        states.append(torch.get_rng_state())
    for _ in range(iterations):
        grads = []
        for rank in range(2):
            torch.set_rng_state(states[rank])
            optimizer.zero_grad()
            x = torch.randn(32, 64)
            nn.functional.mse_loss(model(x), x.square().mean(1, keepdim=True)).backward()
            grads.append([parameter.grad for parameter in model.parameters()])
            states[rank] = torch.get_rng_state()
        for parameter, first, second in zip(model.parameters(), *grads, strict=True):
            parameter.grad = (first + second) / 2
        optimizer.step()
    return dict(model.state_dict())


def wait_for(
    reader: EventReader, seen: list[Event], what: Callable[[Event], bool], job: subprocess.Popen[str]
) -> Event:
    """The first event, old or new, for which `what` holds."""
    deadline = time.monotonic() + DEADLINE_S
    position = 0
    while time.monotonic() < deadline:
        seen += reader.poll()
        for event in seen[position:]:
            if what(event):
                return event
        position = len(seen)
        if job.poll() is not None and not reader.poll():
            pytest.fail(f"the job ended with {job.returncode}: {job.communicate()}; {seen[-5:]}")
        time.sleep(0.005)  # another process appends to a file: there is no event to wait for
    pytest.fail(f"nothing within {DEADLINE_S:g} s; last events: {seen[-5:]}")


def trainer_pid(run_dir: Path, rank: int) -> int:
    reply = control.ask(run_dir / "agent-0.sock", control.StatusRequest())
    assert isinstance(reply, control.StatusReply)
    (pid,) = [t["pid"] for t in reply.status["trainers"] if t["rank"] == rank and t["role"] == "active"]
    return int(pid)


def check_report(kept: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`leto report` of what `--keep` kept."""
    assert cli.main(["report", str(kept / "twice"), "--json", "--trace", str(kept / "trace.json")]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["state"], data["generations"]) == ("finished", 3)
    assert data["run"]["iterations"] == ITERATIONS
    assert 0.0 < data["ettr"] < 1.0
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


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_run_that_is_killed_twice_ends_with_the_bits_of_plain_torch(
    tmp_path: Path, short_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    seed = int(os.environ.get("LETO_TEST_SEED", "0")) or random.randrange(1, 1 << 31)
    print(f"repeat with: LETO_TEST_SEED={seed} python -m pytest {__file__}")
    rng = random.Random(seed)
    run_dir = short_path / "job"
    options = ["--nproc-per-node", "2", "--page-bytes", "16384", "--data-pages", "48", "--tier1", "6"]
    script = [str(EXAMPLE), "--iterations", str(ITERATIONS), "--save", str(tmp_path / "final")]
    kept = tmp_path / "kept"
    options += ["--run-dir", str(run_dir), "--job-id", "twice", "--keep", str(kept)]
    job = subprocess.Popen(
        [sys.executable, "-m", "leto_shadow.cli", "run", *options, *script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    try:
        reader, seen = EventReader(run_dir / "events.jsonl"), []
        for generation, low in ((0, 10), (1, 110)):
            rank, iteration = rng.randrange(2), low + rng.randrange(60)
            wait_for(
                reader,
                seen,
                lambda event, i=iteration, g=generation: (
                    event["event"] == "metrics" and event["iteration"] >= i and event["generation"] == g
                ),
                job,
            )
            if generation == 0:  # an accident from outside
                os.kill(trainer_pid(run_dir, rank), signal.SIGKILL)
            else:  # and one through the command line
                assert cli.main(["inject", "kill", "--rank", str(rank), "--run-dir", str(run_dir)]) == 0
                assert f"kill of rank {rank}" in capsys.readouterr().out
            wait_for(
                reader,
                seen,
                lambda event, g=generation: event["event"] == "recovered" and event["generation"] == g + 1,
                job,
            )
            if generation == 0:
                assert cli.main(["status", "--once", "--run-dir", str(run_dir)]) == 0
                assert "generation 1" in capsys.readouterr().out
        output, _ = job.communicate(timeout=DEADLINE_S)
        assert job.returncode == 0, output
    finally:
        if job.poll() is None:
            job.terminate()
            job.wait(60)
    seen += reader.poll()
    failures = [event for event in seen if event["event"] == "failure"]
    assert [event["kind"] for event in failures] == ["exit", "exit"]
    recoveries = [event for event in seen if event["event"] == "recovered"]
    assert [(event["source"], event["iterations_lost"]) for event in recoveries] == [("in-place", 0)] * 2
    for rank in range(
        2
    ):  # every iteration was reported; one whose report a kill cut off may be missing, none is twice
        done = [event["iteration"] for event in seen if event["event"] == "metrics" and event["rank"] == rank]
        assert sorted(set(done)) == done
        assert len(done) >= ITERATIONS - 2
    assert not list(run_dir.glob("*.sock"))
    check_report(kept, capsys)
    torch.set_num_threads(1)
    expected = reference()
    for rank in range(2):
        final = torch.load(tmp_path / f"final.{rank}")
        assert final.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(final[name], value), f"{name} of rank {rank} differs (seed {seed})"


def agent_below(torchrun: int) -> int | None:
    """The node's agent, or None where torchrun has none: it has ended, or the job has."""
    for pid in linux.descendants(torchrun):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue  # ended since it was listed
        if b"leto_shadow.agent_main" in command:
            return pid
    return None


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_agents_killed_at_random_instants_cost_no_bit(tmp_path: Path, short_path: Path) -> None:
    """SIGKILL of the agent, coordinator and all, at any moment of training, start or recovery."""
    import torch

    seed = int(os.environ.get("LETO_TEST_SEED", "0")) or random.randrange(1, 1 << 31)
    print(f"repeat with: LETO_TEST_SEED={seed} python -m pytest {__file__}")
    rng = random.Random(seed)
    run_dir = short_path / "job"
    options = ["--nproc-per-node", "2", "--page-bytes", "16384", "--data-pages", "48", "--tier1", "6"]
    options += ["--max-restarts", "20", "--standalone"]
    script = [str(EXAMPLE), "--iterations", str(ITERATIONS), "--save", str(tmp_path / "final")]
    job = subprocess.Popen(
        [sys.executable, "-m", "leto_shadow.cli", "run", *options, "--run-dir", str(run_dir), *script],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    reader, seen = EventReader(run_dir / "events.jsonl"), []
    try:
        wait_for(reader, seen, lambda event: event["event"] == "metrics" and event["iteration"] >= 20, job)
        for kill in range(3):
            agent = agent_below(job.pid)
            assert agent is not None, f"no agent below torchrun before kill {kill}; last events: {seen[-5:]}"
            os.kill(agent, signal.SIGKILL)
            adoptions = sum(event["event"] == "adopted" for event in seen)
            wait_for(
                reader,
                seen,
                lambda event, n=adoptions: (
                    event["event"] == "adopted" and sum(e["event"] == "adopted" for e in seen) > n
                ),
                job,
            )
            # Somewhere in the recovery, or in training after it: counted in events, of which the recovery
            # has some forty and each iteration two. No number of seconds is within the run on every machine.
            more = len(seen) + rng.randrange(100)
            wait_for(reader, seen, lambda _, more=more: len(seen) >= more, job)
        output, _ = job.communicate(timeout=DEADLINE_S)
        assert job.returncode == 0, output
    finally:
        if job.poll() is None:
            job.terminate()
            job.wait(60)
    seen += reader.poll()
    recoveries = [event for event in seen if event["event"] == "recovered"]
    assert {event["source"] for event in recoveries} == {"in-place"}
    managers = [{e["pid"] for e in seen if e["event"] == f"manager_{how}"} for how in ("started", "adopted")]
    assert managers[0] == managers[1]
    assert len(managers[0]) == 2
    assert not list(run_dir.glob("*.sock"))
    torch.set_num_threads(1)
    expected = reference()
    for rank in range(2):
        final = torch.load(tmp_path / f"final.{rank}")
        for name, value in expected.items():
            assert torch.equal(final[name], value), f"{name} of rank {rank} differs (seed {seed})"
