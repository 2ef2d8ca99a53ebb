"""The page of `benchmarks/gpu_footprint.py`; what it measures needs two GPUs."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "gpu_footprint.py"


@pytest.fixture
def footprint(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_footprint", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_footprint", module)
    spec.loader.exec_module(module)
    return module


def test_the_page_shows_each_variant_and_what_failed(footprint: ModuleType) -> None:
    names = [variant.name for variant in footprint.VARIANTS]
    assert len(set(names)) == len(names)
    assert names[0] == "as shipped", "the others are compared with it"
    rank = {
        "held_mib": {stage: 100.0 + number for number, stage in enumerate(footprint.STAGES)},
        "seconds": {"context": 0.25},
        "rates": {"all-reduce, GB/s": 12.5},
        "iteration_s": [0.25, 0.5, 0.125],
    }
    without = {"held_mib": {"context": 7.0}, "seconds": {}, "rates": {}, "iteration_s": []}
    data: dict[str, Any] = {
        "machine": {"torch": "2.11"},
        "bare": [{"what": "context", "process_mib": 500.0, "device_mib": 510.0, "limits": {}}],
        "variants": [
            {**dataclasses.asdict(footprint.VARIANTS[0]), "ranks": [rank, rank]},
            {**dataclasses.asdict(footprint.VARIANTS[1]), "ranks": [without, without]},
        ],
        "failed": {"one": "it hung"},
        "left_out": ["another"],
    }
    page = footprint.page(data, "found")
    assert "| as shipped | 100 | 101 | 102 | 103 | 104 | 105 | 106 | 107 | 12.5 | 250.0 |" in page
    assert f"| {names[1]} | 7 | - |" in page
    assert "`NCCL_CUMEM_ENABLE=0`" in page
    for text in ("| context | 500 | 510 |", "Failed: one: it hung", "Left out for want of time: another"):
        assert text in page
