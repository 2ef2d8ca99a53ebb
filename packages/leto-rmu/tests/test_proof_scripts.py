"""The scripts that prove the updater on a GPU, at their smallest and over the host backend."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run(script: str, *options: str) -> str:
    command = [sys.executable, str(BENCHMARKS / script), "--device", "cpu", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_a_run_killed_inside_its_update_ends_with_the_bits_of_the_reference() -> None:
    """Figure 12, up to its first kill; the script compares losses and state, and RMP alone goes wrong."""
    found = run("gpu_figure12.py", "--iterations", "12")
    assert "| RMP and RMU | 12 of 12 | none |" in found
    assert "| RMP alone | 12 of 12" not in found


def test_trainers_are_killed_and_aborted() -> None:
    found = run("gpu_kills.py", "--kills", "2", "--others", "0", "--pool", "2", "--losses", "2")
    assert "comparisons, all exact" in found
    assert "comparisons, all exact" in run("gpu_aborts.py", "--rounds", "1", "--schemes", "slots")
