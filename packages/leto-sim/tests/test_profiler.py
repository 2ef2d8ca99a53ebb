"""The profiler: a real Megatron-Core stage on CPU where megatron is installed, clear refusals where not."""

from __future__ import annotations

import importlib
import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

from leto_sim import MissingDependencyError, SimError, iteration_time, load_profile
from leto_sim.measured import Measured, StageConfig, profile_toml
from leto_sim.profile import parse_profile
from leto_sim.profiler import profile_stage

MEGATRON = importlib.util.find_spec("torch") is not None and importlib.util.find_spec("megatron") is not None
TINY = [
    "--layers",
    "1",
    "--hidden-size",
    "64",
    "--heads",
    "4",
    "--ffn-hidden-size",
    "128",
    "--sequence-length",
    "32",
]
TINY += ["--vocabulary", "256", "--repeats", "3"]


def measure(out: Path, *options: str, gpu: bool = False) -> subprocess.CompletedProcess[str]:
    # In a process of its own: megatron-core warns at import, and a process group is global state.
    command = [sys.executable, "-m", "leto_sim", "profile", "--out", str(out), *TINY, *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    if not gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    return subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment, check=False)


@pytest.mark.skipif(not MEGATRON, reason="needs torch and megatron-core")
@pytest.mark.parametrize("experts", [0, 4])
def test_a_tiny_stage_is_measured_on_cpu(tmp_path: Path, experts: int) -> None:
    out = tmp_path / "p.toml"
    done = measure(
        out, "--experts", str(experts), "--data", "4", "--pipeline", "2", "--virtual-pipeline", "2"
    )
    assert done.returncode == 0, done.stderr
    profile = load_profile(out)
    assert profile.gpus == 8
    assert "CPU" in profile.data["source"]
    assert "network figures given, not measured" in profile.data["source"]
    assert len(profile.data["bracket"]) == 2
    bracket = profile.data["bracket"][0]
    assert bracket["forward_ms"] > 0
    assert bracket["backward_ms"] > 0
    # Attention 4 h^2 + 4 h, two norms 4 h; dense MLP 2 h f + f + h; an expert 2 h f; router h * experts.
    attention = 4 * 64**2 + 4 * 64 * (0 if experts else 1) + 4 * 64
    dense = 2 * 64 * 128 + 128 + 64
    assert bracket["parameters"] == (attention + 64 * experts if experts else attention + dense)
    assert bracket["expert_parameters"] == experts * 2 * 64 * 128
    assert iteration_time(profile).total_s > 0
    assert iteration_time(profile.scaled(64)).total_s > 0


@pytest.mark.gpu
@pytest.mark.parametrize("experts", [0, 4])
def test_a_stage_is_measured_on_a_gpu(tmp_path: Path, experts: int) -> None:
    if not (MEGATRON and Path("/dev/nvidiactl").exists()):
        pytest.skip("needs a CUDA device, torch and megatron-core")
    out = tmp_path / "p.toml"
    done = measure(out, "--experts", str(experts), gpu=True)
    assert done.returncode == 0, done.stderr
    profile = load_profile(out)
    assert "bf16" in profile.data["source"]
    assert 0 < profile.data["bracket"][0]["forward_ms"] < 1000


@pytest.mark.parametrize("name", ["h200-dense", "h200-moe"])
def test_the_stages_measured_on_an_h200_scale(name: str) -> None:
    profile = load_profile(Path(__file__).parents[1] / "examples" / "profiles" / f"{name}.toml")
    assert "NVIDIA H200" in profile.data["source"]
    here, large = iteration_time(profile), iteration_time(profile.scaled(32_768))
    assert profile.scaled(32_768).gpus == 131_072
    assert here.total_s < large.total_s < 2 * here.total_s


@pytest.mark.parametrize(
    ("missing", "how"), [("torch", "pip install torch"), ("megatron.core", "megatron-core==0.16.1")]
)
def test_missing_packages_are_named_with_their_remedy(
    monkeypatch: pytest.MonkeyPatch, missing: str, how: str
) -> None:
    class Torch:
        pass

    def absent(name: str) -> object:
        if name == missing:
            raise ImportError(name)
        return Torch()

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(MissingDependencyError, match=f"needs {missing}, which cannot be imported: .*{how}"):
        profile_stage(StageConfig())


def test_leto_sim_imports_neither_torch_nor_matplotlib() -> None:
    code = "import sys, leto_sim, leto_sim.cli; print(sorted({m.split('.')[0] for m in sys.modules}))"
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    ).stdout
    assert "'numpy'" in found
    for name in ("torch", "megatron", "matplotlib", "leto_shadow", "leto_rmu", "leto_rmp", "leto_ec"):
        assert f"'{name}'" not in found


def test_a_measurement_becomes_a_profile() -> None:
    m = Measured(3.0, 6.0, 1000, 0, 0.1, 0.2, 0.01, 15.0, 90.0, True, 'GPU "X"', "bf16")
    import tomllib

    text = profile_toml(StageConfig(name="a \\ b", data=2, pipeline=4), m)
    profile = parse_profile(tomllib.loads(text))
    assert profile.name == "a \\ b"
    assert profile.data["source"] == 'leto-sim profile on GPU "X", bf16, median of 10'
    assert profile.data["gradients"]["bandwidth_gb_per_s"] == 90.0


def test_impossible_stages_are_refused() -> None:
    with pytest.raises(SimError, match=r"profile.layers: expected at least 1, found 0"):
        StageConfig(layers=0)
    with pytest.raises(SimError, match="multiple of 5 heads, found 64"):
        StageConfig(hidden_size=64, heads=5)
