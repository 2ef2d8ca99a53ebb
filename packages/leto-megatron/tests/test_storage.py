"""Stock Megatron, Megatron on memory from outside, and the resumable update: the same bits everywhere."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import run_ranks

CONFIGURATIONS: dict[str, dict[str, Any]] = {
    "dp2-bf16-distributed": {},
    "dp2-bf16": {"distributed_optimizer": False},
    "dp2-fp32-distributed": {"precision": "fp32"},
    "dp2-fp32": {"precision": "fp32", "distributed_optimizer": False},
    "tp2-dropout": {"tensor_parallel": 2, "dropout": 0.1},
    "pp2": {"pipeline_parallel": 2},
}


MODES = ["stock", "external", "resumable", "slots"]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """All configurations, all modes, in one pair of processes: importing Megatron is the slow part."""
    folder = tmp_path_factory.mktemp("modes")
    arguments = {"modes": MODES, "configurations": CONFIGURATIONS}
    return run_ranks(2, "worker_modes:compare_modes", arguments, folder, timeout_s=500)


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_leto_changes_no_bit(name: str, results: list[dict[str, Any]]) -> None:
    for rank, by_name in enumerate(results):
        result = by_name[name]
        if name == "dp2-fp32":
            assert "use --scheme undo" in result["slots"]["refused"]
        for mode in MODES[1:] if name != "dp2-fp32" else MODES[1:-1]:
            assert result["stock"]["records"] == result[mode]["records"], f"rank {rank}, {mode}"
            assert result["stock"]["final"] == result[mode]["final"], f"rank {rank}, {mode}"
        assert result["resumable"]["chunks"] > 3
        assert any(key.startswith("exp_avg_sq/") for key in result["stock"]["final"])


def test_the_configurations_really_differ(results: list[dict[str, Any]]) -> None:
    """Otherwise one of them would only look tested."""
    losses = [str(results[1][name]["stock"]["records"]) for name in CONFIGURATIONS]
    assert len(set(losses)) == len(losses)
