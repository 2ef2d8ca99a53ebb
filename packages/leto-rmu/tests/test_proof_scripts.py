"""The scripts that prove the updater on a GPU, at their smallest and over the host backend."""

from __future__ import annotations

import importlib
import subprocess
import sys
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


@pytest.mark.slow
def test_a_run_killed_inside_its_update_ends_with_the_bits_of_the_reference() -> None:
    """Figure 12, up to its first kill; the script compares losses and state, and RMP alone goes wrong."""
    found = run("gpu_figure12.py", "--iterations", "12")
    assert "| RMP and RMU | 12 of 12 | none |" in found
    assert "| RMP alone | 12 of 12" not in found


@pytest.mark.slow
def test_trainers_are_killed_and_aborted() -> None:
    found = run("gpu_kills.py", "--kills", "2", "--others", "0", "--pool", "2", "--losses", "2")
    assert "comparisons, all exact" in found
    assert "comparisons, all exact" in run("gpu_aborts.py", "--rounds", "1", "--schemes", "slots")
