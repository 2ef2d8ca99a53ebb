"""`python3 -m nox -s bench -- ec`: one table of all kernels and peers, and a JSON file of it.

The table is made by cpu_bench.py. LETO_EC_BENCH_JSON says where the JSON goes (default: ec-bench.json in
the current folder); LETO_EC_BENCH_SHARE=4 takes a quarter of the pages, and so a quarter of the time.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import leto_ec


def test_table(benchmark: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    path = Path(__file__).with_name("cpu_bench.py")
    monkeypatch.syspath_prepend(str(path.parent))  # its peers.py
    spec = importlib.util.spec_from_file_location("cpu_bench", path)
    assert spec is not None
    assert spec.loader is not None
    bench = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "cpu_bench", bench)  # its dataclasses look themselves up
    spec.loader.exec_module(bench)
    share = int(os.environ.get("LETO_EC_BENCH_SHARE", "1"))
    target = Path(os.environ.get("LETO_EC_BENCH_JSON", "ec-bench.json"))
    with capfd.disabled():
        print()
        found = benchmark.pedantic(bench.run, args=(11, share), rounds=1)
        bench.write(found, target, None)
        print(f"written to {target.resolve()}")


def test_small_update(benchmark: Any) -> None:
    """The fixed cost of a call: one page of 4 KiB into six rows."""
    small = leto_ec.ReedSolomon(48, 6)
    parity, delta = np.zeros((6, 4096), np.uint8), np.ones(4096, np.uint8)
    benchmark(small.update, parity, index=3, delta=delta)
