"""Figure 13 as a test: a real job with the real agent, coordinator, hook, signals and processes; only the
GPU is simulated.

The benchmark of `benchmarks/memory_pressure.py` runs through its five phases and checks what it claims: no
allocation fails, five failures are recovered in place, from L3, L2, L1, L1 and L3 again, with one reclaim
at L3 and one at L2.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from pressure_case import BENCHMARKS, both_shadows_give_way_and_return, load_pressure

from leto_shadow import oom_hook

pytest.importorskip("torch.distributed")

MIB = 1 << 20


@pytest.mark.job
@pytest.mark.slow
def test_shadows_give_way_and_come_back(fake_cudart: Path, tmp_path: Path) -> None:
    if oom_hook.unavailable() is not None:
        pytest.skip("leto-shadow is installed without its allocator hook")
    out = tmp_path / "out"
    command = [sys.executable, str(BENCHMARKS / "memory_pressure.py"), "run", "--out", str(out)]
    command += ["--simulated", str(fake_cudart), "--hold-s", "0.3"]
    done = subprocess.run(command, timeout=240, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "checked: everything holds" in done.stdout
    result = json.loads((out / "oom-free.json").read_text())
    assert [one["level"] for one in result["recoveries"]] == [3, 2, 1, 1, 3]
    assert [one["level"] for one in result["reclaims"]] == [3, 2]
    assert result["iterations_lost"] == 0
    render = [sys.executable, str(BENCHMARKS / "memory_pressure.py"), "render"]
    render += [str(out / "oom-free.json"), "--out", str(out), "--name", "page"]
    subprocess.run(render, timeout=60, check=True)
    assert "no allocation failed" in (out / "page.md").read_text()
    assert (out / "page.svg").read_text().startswith("<svg")


@pytest.mark.job
@pytest.mark.slow
def test_one_rank_under_pressure_takes_the_world_to_l2(
    fake_cudart: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """L3 belongs to the world: rank 0's reclaim takes rank 1's shadow to L2 too, and L3 returns for both at
    once."""
    if oom_hook.unavailable() is not None:
        pytest.skip("leto-shadow is installed without its allocator hook")
    pressure = load_pressure()
    with tempfile.TemporaryDirectory(prefix="leto-pressure-") as name:
        folder = Path(name)
        meter = pressure.FakeGpu(folder / "gpu.0", 20480 * MIB)
        pressure.FakeGpu(folder / "gpu.1", 20480 * MIB)
        monkeypatch.setenv("LETO_OOM_HOOK", "always")
        monkeypatch.setenv("FAKE_GPU", str(folder / "gpu"))
        options = ["--page-bytes", "4096", "--preinit-l2-mib", "950", "--preinit-l3-mib", "1450"]
        options += pressure.CALM
        load = ["--simulated", str(fake_cudart)]
        job = pressure.Job(folder, meter, options, load, 8192, ranks=2)
        both_shadows_give_way_and_return(job, lambda: 1264 * MIB)
