"""Shared settings: one thread per test process, laboratory modules beside the tests, and who needs a GPU."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # rmu_lab, imported by the tests by that name
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def gpu(request: pytest.FixtureRequest) -> None:
    """Tests marked `gpu` need one; they do not ask themselves."""
    from gpu_lab import need_gpu

    if request.node.get_closest_marker("gpu"):
        need_gpu()


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Imports proof scripts, which then run on the CPU."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    monkeypatch.setattr(importlib.import_module("proof_place").Place, "device", "cpu")
    return importlib.import_module
