"""Stock Megatron, Megatron on memory from outside, and the resumable update: the same bits everywhere."""

from __future__ import annotations

from pathlib import Path
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


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_leto_changes_no_bit(name: str, tmp_path: Path) -> None:
    results = run_ranks(
        2,
        "worker_modes:compare_modes",
        {"modes": ["stock", "external", "resumable"], "changes": CONFIGURATIONS[name]},
        tmp_path,
    )
    for rank, result in enumerate(results):
        for mode in ("external", "resumable"):
            assert result["stock"]["records"] == result[mode]["records"], f"rank {rank}, {mode}"
            assert result["stock"]["final"] == result[mode]["final"], f"rank {rank}, {mode}"
        assert result["resumable"]["chunks"] > 3
        assert any(key.startswith("exp_avg_sq/") for key in result["stock"]["final"])
