"""Real GPUs: the demo with its four failures on two of them, ranks killed in mid-update, and the
death of the agent."""

from __future__ import annotations

import dataclasses
import importlib.util
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from jobs import reused
from rich.console import Console

from leto_megatron import demo
from leto_megatron.compare import compare_runs
from leto_megatron.config import PRESETS, Config, to_arguments
from leto_megatron.plan import Pool
from leto_megatron.promises import PROMISES
from leto_shadow import linux
from leto_shadow.drills import Drill, Lose, dump_drills
from leto_shadow.events import Event, EventReader, read_events
from leto_shadow.gpu import WatchError, usable_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(600)]

POOL = Pool(2 << 20, 32, 16, 1, "cuda")
SMALL = dataclasses.replace(
    PRESETS["demo-cuda"],
    layers=4,
    hidden=512,
    heads=8,
    ffn=2048,
    sequence=128,
    micro_batch=4,
    iterations=60,
    checkpoint_interval=20,
    corpus_bytes=1 << 20,
)


def need_gpus(count: int) -> None:
    try:
        usable_gpus(count)
    except WatchError as error:
        pytest.skip(str(error))
    for module, extra in (("cuda", "leto-rmp[cuda]"), ("cupy", "leto-ec[cuda]")):
        if importlib.util.find_spec(module) is None:
            pytest.skip(f"needs pip install '{extra}'")


@pytest.mark.parametrize("scheme", ["slots", "undo"])
def test_four_failures_on_two_gpus(scheme: str, tmp_path: Path) -> None:
    need_gpus(2)
    output = io.StringIO()
    config = dataclasses.replace(SMALL, seed=3, scheme=scheme, lend_bytes=1 << 16)
    exact = demo.run_demo(config, tmp_path, Console(file=output, width=120), POOL)
    assert exact, output.getvalue()
    report = json.loads((tmp_path / "report.json").read_text())
    assert [row["source"] for row in report["failures"]] == ["in-place"] * 3 + ["checkpoint"]
    assert report["compared"][PROMISES]["equal"] == report["compared"][PROMISES]["of"]
    events = list(read_events(tmp_path / "leto" / "events.jsonl"))
    levels = {event["level"] for event in events if event["event"] == "shadow_memory"}
    assert levels == {1, 2, 3}
    freed = [event for event in events if event["event"] == "memory_free"]
    assert len(freed) >= 2 * 3, "free memory was not measured before each takeover"
    assert {event["rank"] for event in events if event.get("lent_bytes")} == {0, 1}, "nothing was lent"
    how = "one kernel each" if scheme == "slots" else "separate operations"
    for rank in (0, 1):
        assert f"chunks are updated by {how}" in (tmp_path / "leto" / "logs" / f"rank{rank}.log").read_text()


def run(command: list[str], log: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    with open(log, "wb") as output:
        done = subprocess.run(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment, timeout=240, check=False
        )
    assert done.returncode == 0, log.read_text(errors="replace")[-4000:]


def run_stock(folder: Path, config: Config, world: int) -> tuple[Path, Path, list[str]]:
    """Train with Megatron-Core under torchrun alone; its output, the folder for Leto's, and what to start."""
    trainer = ["-m", "leto_megatron.pretrain", *to_arguments(config)]
    stock, leto = folder / "stock", folder / "leto"
    for place in (stock, leto):
        place.mkdir()
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={world}"]
    rendezvous = ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"]
    run([*torchrun, *rendezvous, *trainer, "--out", str(stock)], folder / "stock.log")
    return stock, leto, trainer


def check_killed_in_mid_update(folder: Path, config: Config, world: int) -> None:
    """A kill inside an update with the loss of all that parity bears, and one in a drain; bits as without."""
    lose = Lose("arena", 0, POOL.tier1_pages, 1)
    drills = [
        Drill("update", "kill", 0, 4, "update", group=0, chunk=1, op="update", seed=1, lose=lose),
        Drill("drain", "kill", world - 1, 7, "update", group=1, op="drain", seed=2),
    ]
    check_drills(folder, config, world, drills)


def check_drills(
    folder: Path, config: Config, world: int, drills: Sequence[Drill], *options: str
) -> list[Event]:
    """Every drill strikes and is recovered from in place, and the bits are those of torchrun alone."""
    stock, leto, trainer = run_stock(folder, config, world)
    plan = folder / "drills.json"
    plan.write_bytes(dump_drills(drills))
    job = [sys.executable, "-m", "leto_shadow.cli", "run", f"--nproc-per-node={world}", *POOL.options()]
    run_dir = folder / "run"
    job += ["--drills", str(plan), "--run-dir", str(run_dir), "--job-id", "gpu-kill", *options]
    run([*job, *trainer, "--out", str(leto)], folder / "leto.log")
    comparison = compare_runs(stock, leto, world, config.iterations, config.pipeline_parallel)
    assert comparison.exact, comparison.differences
    events = list(read_events(run_dir / "events.jsonl"))
    assert [e["source"] for e in events if e["event"] == "recovered"] == ["in-place"] * len(drills)
    assert {e["id"] for e in events if e["event"] == "drill_fired"} == {drill.id for drill in drills}
    return events


def test_one_rank_killed_in_mid_update(tmp_path: Path) -> None:
    """Without a second GPU there is no collective to get right, but all the rest."""
    need_gpus(1)
    config: Config = dataclasses.replace(SMALL, iterations=12, checkpoint_interval=0, seed=5)
    check_killed_in_mid_update(tmp_path, config, 1)


def test_a_rank_without_the_distributed_optimizer_killed_in_mid_update(tmp_path: Path) -> None:
    """Both ranks own all of the state: what was lost is rebuilt from the rank's own parity all the same."""
    need_gpus(2)
    config: Config = dataclasses.replace(
        SMALL, iterations=12, checkpoint_interval=0, seed=8, distributed_optimizer=False
    )
    check_killed_in_mid_update(tmp_path, config, 2)


@pytest.mark.parametrize(
    "parallel",
    [{"tensor_parallel": 2, "dropout": 0.1}, {"pipeline_parallel": 2, "microbatches": 2}],
    ids=["tensor", "pipeline"],
)
def test_a_rank_of_a_divided_model_killed_in_mid_update(parallel: dict[str, Any], tmp_path: Path) -> None:
    """The groups of NCCL that divide the model are formed and warmed ahead, and used after the failure."""
    need_gpus(2)
    config: Config = dataclasses.replace(SMALL, iterations=12, checkpoint_interval=0, seed=6, **parallel)
    check_killed_in_mid_update(tmp_path, config, 2)


def test_survivors_on_gpus_become_the_next_shadows(tmp_path: Path) -> None:
    """With `--retire-s` the rank that a failure left alive aborts its communicators and keeps its process,
    with context and modules: it is promoted again, and trains the same bits."""
    need_gpus(2)
    config: Config = dataclasses.replace(
        SMALL, iterations=40, checkpoint_interval=0, seed=8, lend_bytes=1 << 16
    )
    drills = [
        Drill("forward", "kill", 1, 4, "forward", seed=1),
        Drill("update", "kill", 0, 20, "update", group=0, chunk=0, op="commit", seed=2),
    ]
    events = check_drills(tmp_path, config, 2, drills, "--retire-s=20")
    assert reused(events), "nobody trained twice"


class Job:
    """A running `leto run`, and the events that it has written."""

    def __init__(self, command: list[str], run_dir: Path, log: Path) -> None:
        self.log, self.events = log, list[Event]()
        self._reader = EventReader(run_dir / "events.jsonl")
        with open(log, "wb") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"},
            )

    def of(self, name: str) -> list[Event]:
        self.events += self._reader.poll()
        return [event for event in self.events if event["event"] == name]

    def until(self, what: Callable[[], Any], timeout_s: float = 240.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not what():
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise AssertionError(f"never came to pass: {self.log.read_text(errors='replace')[-4000:]}")
            time.sleep(0.02)

    @property
    def agent(self) -> int:
        """Pid of the living agent below torchrun."""
        (found,) = (
            pid
            for pid in linux.descendants(self.process.pid)
            if b"leto_shadow.agent_main" in Path(f"/proc/{pid}/cmdline").read_bytes()
            and os.readlink(f"/proc/{pid}/exe")
        )
        return found

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            self.process.wait(60)


def test_an_agent_that_is_killed_is_succeeded_and_the_run_is_exact(tmp_path: Path) -> None:
    """torchrun starts another agent, which takes over the managers, and with them the GPUs' pages."""
    need_gpus(1)
    try:
        world = len(usable_gpus(2)[:2])
    except WatchError:
        world = 1
    config: Config = dataclasses.replace(SMALL, iterations=300, checkpoint_interval=0, seed=9)
    stock, leto, trainer = run_stock(tmp_path, config, world)
    run_dir = tmp_path / "run"
    command = [sys.executable, "-m", "leto_shadow.cli", "run", f"--nproc-per-node={world}", *POOL.options()]
    command += ["--max-restarts=3", "--run-dir", str(run_dir), "--job-id", "gpu-agent"]
    job = Job([*command, *trainer, "--out", str(leto)], run_dir, tmp_path / "leto.log")
    try:
        job.until(lambda: any(event["iteration"] >= 20 for event in job.of("metrics")))
        first = job.agent
        os.kill(first, signal.SIGKILL)
        job.until(lambda: job.of("recovered"))
        assert job.agent != first
        assert job.process.wait(240) == 0, job.log.read_text(errors="replace")[-4000:]
    finally:
        job.end()
    (recovered,) = job.of("recovered")
    assert recovered["source"] == "in-place"
    assert recovered["iteration"] >= 20
    managers = {event["rank"]: event["pid"] for event in job.of("manager_started")}
    assert {event["rank"]: event["pid"] for event in job.of("manager_adopted")} == managers
    assert sorted(managers) == list(range(world))
    comparison = compare_runs(stock, leto, world, config.iterations)
    assert comparison.exact, comparison.differences
