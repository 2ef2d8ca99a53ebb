"""The scripts that prove the updater on a GPU, at their smallest and over the host backend."""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import select
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from cuda_lab import DeviceWorld
from rmu_lab import Pool
from sim_lanes import OneLaunchWorld

from leto_rmu import Executor, Op, Segment

pytestmark = pytest.mark.timeout(600)

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run(script: str, *options: str) -> str:
    command = [sys.executable, str(BENCHMARKS / script), "--device", "cpu", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports scripts, which then run on the CPU."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    monkeypatch.setattr(importlib.import_module("proof_lab").Place, "device", "cpu")
    return importlib.import_module


WORLD: dict[str, Any] = {
    "scheme": "slots",
    "pool": Pool(data_pages=8),
    "segments": (Segment("a", 900, 0, 3, 0),),
    "grad_numel": 910,
    "model_bytes": 1800,
}


def test_aborts_reach_the_kernel_that_updates_chunks(scripts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one kernel updates a chunk and its parity; its stand-in on the CPU is not interrupted."""
    aborts, armed = scripts("gpu_aborts"), []
    monkeypatch.setattr(aborts, "arm", lambda kernel, seed: armed.append((kernel, seed)))
    world = OneLaunchWorld("cpu", **WORLD)
    for count in (0, world.plan.chunks - 1):
        _, up = world.start()
        kernel = aborts.faulty_kernel(up)
        up.executor = aborts.Trap(kernel, count, 5)
        world.iterate(up)
        assert armed == [(kernel, 5)] * (world.plan.chunks - count), "the kernel would not have trapped"
        armed.clear()


class Names(Executor):
    def __init__(self) -> None:
        self.seen = Counter[str]()

    def run(self, op: Op) -> None:
        self.seen[op.name] += 1
        op.apply()


@pytest.mark.parametrize("kind", [OneLaunchWorld, DeviceWorld])
def test_kills_of_figure_12_have_an_operation_to_fall_into(scripts: Any, kind: type[DeviceWorld]) -> None:
    figure, names, world = scripts("gpu_figure12"), Names(), kind("cpu", **WORLD)
    _, up = world.start()
    up.executor = names
    world.iterate(up)
    plan, one_kernel = world.plan, kind is OneLaunchWorld
    assert (getattr(up.memory, "fused", None) is not None) == one_kernel
    for t in range(figure.EVERY - 1, 4 * figure.EVERY, figure.EVERY):
        wanted = figure.targets(t, one_kernel)
        expected = plan.groups if wanted == ("drain",) else plan.chunks
        assert sum(names.seen[name] for name in wanted) >= expected, f"{wanted} of {names.seen}"


def test_the_trapping_kernel_is_compiled_alone(scripts: Any) -> None:
    """Others would take the compiler seconds each."""
    source = (BENCHMARKS.parent / "src" / "leto_rmu" / "cuda" / "kernels.cu").read_text()
    alone = scripts("gpu_aborts").alone(source, "leto_rmu_sgd_bf16")
    assert [line for line in alone.splitlines() if line.startswith("TRANSACTION(")] == [
        "TRANSACTION(leto_rmu_sgd_bf16, SGD, BF16, false)"
    ]
    assert alone.count("\n") == source.count("\n") - 8
    with pytest.raises(AssertionError, match="no single kernel"):
        scripts("gpu_aborts").alone(source, "leto_rmu_lion_f32")


ENDS = """
import os, signal, sys
sys.path.insert(0, sys.argv[1])
import proof_lab
proof_lab.Place.device = "cpu"

def task(command, channel):
    for values in command["says"]:
        channel.say(**values)
    if command["dies"]:
        os.kill(os.getpid(), signal.SIGKILL)

trap = {"trapped": "AcceleratorError: CUDA error: unspecified launch failure"}
other = {"trapped": "AcceleratorError: CUDA error: an illegal memory access was encountered"}
with proof_lab.Warm({"task": task}, 1) as warm:
    bug = {"error": "a bug"}
    for says, dies in (([], True), ([trap], True), ([], False), ([other], True), ([bug], False)):
        child = warm.take()
        child.begin("task", says=says, dies=dies)
        try:
            print("told", repr(child.interrupted("it")))
        except AssertionError as error:
            print("refused", error)
"""


def test_only_a_kill_or_a_trap_counts_as_an_interruption() -> None:
    """An error of another kind must not pass for the abort that was to be tested."""
    command = [sys.executable, "-c", ENDS, str(BENCHMARKS)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    killed, trapped, survived, illegal, failed = done.stdout.splitlines()
    assert killed == "told ''"
    assert "told" in trapped
    assert "launch failure" in trapped
    assert "its status is 0" in survived
    for line in (illegal, failed):
        assert line.startswith("refused it: it was to be interrupted, but says")


def of_the_driver(steps: list[Any], tmp_path: Path, driver: Any, limit_s: float = 600.0) -> Any:
    return driver.Run(steps, tmp_path / "logs", limit_s, tmp_path / "out" / "all.tar.gz")


def test_a_failed_or_stopped_step_keeps_nobody_from_running(scripts: Any, tmp_path: Path) -> None:
    driver, page = scripts("gpu_all"), tmp_path / "rmu-x-y"

    def step(name: str, stage: str, code: str, limit_s: float = 300.0, page: Path | None = None) -> Any:
        return driver.Step(name, stage, ("sh", "-c", code), limit_s, "exact", page)

    steps = [
        step("fails, early", "smoke", "sleep 600 & echo $!; exit 3"),
        step("hangs", "smoke", "sleep 600", limit_s=0.5),
        step("works", "full", f"echo '#' > {page}.md; echo fine", page=page),
    ]
    outcomes = {o.step.name: o for o in of_the_driver(steps, tmp_path, driver).all()}
    assert {name: o.word for name, o in outcomes.items()} == {
        "fails, early": "failed, status 3",
        "hangs": "stopped at its limit",
        "works": "ok",
    }
    pid = outcomes["fails, early"].last
    with contextlib.suppress(ProcessLookupError), os.fdopen(os.pidfd_open(int(pid))) as left_behind:
        assert select.select([left_behind], [], [], 60.0)[0], "the step left a process behind"
    with tarfile.open(tmp_path / "out" / "all.tar.gz") as tar:
        assert set(tar.getnames()) == {
            *("logs/fails-early.log", "logs/hangs.log", "logs/works.log"),
            *("logs/summary.json", "logs/summary.md", "pages/rmu-x-y.md"),
        }
        summary = tar.extractfile("logs/summary.json")
        assert summary is not None
        found = {row["name"]: row["last"] for row in json.load(summary)}
        assert found == {"fails, early": pid, "hangs": "", "works": "fine"}


def test_what_has_no_time_left_is_said_not_to_have_run(scripts: Any, tmp_path: Path) -> None:
    driver = scripts("gpu_all")
    steps = [driver.Step("late", "full", ("false",), 300.0, "exact")]
    (outcome,) = of_the_driver(steps, tmp_path, driver, limit_s=1.0).all()
    assert "not begun" in outcome.word


def test_nothing_runs_in_a_place_that_is_not_fit(scripts: Any, tmp_path: Path) -> None:
    driver = scripts("gpu_all")
    steps = [driver.Step(name, name, ("false",), 300.0, "exact") for name in ("place", "full")]
    assert [o.status for o in of_the_driver(steps, tmp_path, driver).all()] == [1, None]


def test_the_driver_has_a_step_for_every_script_and_every_test_of_a_gpu(scripts: Any, tmp_path: Path) -> None:
    steps = scripts("gpu_all").all_steps("h200", tmp_path, "cuda")
    commands = [" ".join(step.command) for step in steps]
    for path in sorted(BENCHMARKS.glob("gpu_*.py")):
        apart = path.name in ("gpu_table1.py", "gpu_fused_adamw.py")  # studies that take minutes
        assert apart or any(path.name in command for command in commands), path.name
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        gpu = "mark.gpu" in path.read_text() and path != Path(__file__)
        assert not gpu or any(path.name in command for command in commands), path.name
    assert sum(step.predicted != "" for step in steps) == len(steps)


@pytest.mark.slow
def test_a_run_killed_inside_its_update_ends_with_the_bits_of_the_reference() -> None:
    """Figure 12, up to its first kill; the script compares losses and state, and RMP alone goes wrong."""
    found = run("gpu_figure12.py", "--iterations", "12")
    assert "| RMP and RMU | 12 of 12 | none |" in found
    assert "| RMP alone | 12 of 12" not in found


def test_fewer_kills_than_planned_are_said(scripts: Any) -> None:
    def run_of(optimizer: str, kills: int) -> dict[str, Any]:
        return {"optimizer": optimizer, "scheme": "slots", "kills": 5, "kills inside the update": kills}

    enough, text = scripts("gpu_kills").total([run_of("adamw", 5), run_of("adamw", 4), run_of("sgd", 5)])
    assert not enough
    assert text.startswith("Kills inside an update: 9 of 10 with adamw (slots), 5 of 5 with sgd (slots).")
    assert "Fewer than planned" in text
    assert scripts("gpu_kills").total([run_of("adamw", 5), run_of("sgd", 6)])[0]


@pytest.mark.slow
def test_trainers_are_killed_and_aborted() -> None:
    options = ("--kills", "2", "--others", "0", "--pool", "2", "--losses", "2", "--seconds", "500")
    found = run("gpu_kills.py", *options)
    assert "comparisons, all exact" in found
    assert "Kills inside an update: " in found  # more than wanted if the last life found another
    assert "Fewer than planned" not in found
    assert "comparisons, all exact" in run("gpu_aborts.py", "--rounds", "1", "--schemes", "slots")
    assert "Pages reconstructed in a round: 45, 48" in run("gpu_repair.py", "--smoke")
