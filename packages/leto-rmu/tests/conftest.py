"""Shared settings: one thread per test process, and the laboratory module beside the tests."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent))  # rmu_lab, imported by the tests by that name
torch.set_num_threads(1)
