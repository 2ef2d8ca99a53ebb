"""Shared settings: one thread per test process, laboratory modules beside the tests, and who needs a GPU."""

from __future__ import annotations

import sys
from pathlib import Path

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
