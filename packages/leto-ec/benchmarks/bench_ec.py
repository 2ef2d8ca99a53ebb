"""Throughput of every kernel at the paper's code (1024 + 16): run `python3 -m nox -s bench -- ec`.

One thread. `extra_info` holds GiB of data a second (encode, reconstruct) or milliseconds (update). Fewer
than 1024 pages are encoded where memory or a slow kernel asks for it: time grows in proportion.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import leto_ec

DATA, PARITY = 1024, 16
MEMORY_BYTES = 256 << 20
PAGE_BYTES = (64 << 10, 2 << 20)
PAGES_AT_MOST = {"reference": 2, "portable": 64}


@pytest.fixture(params=leto_ec.info()["kernels"])
def code(request: pytest.FixtureRequest) -> leto_ec.ReedSolomon:
    return leto_ec.ReedSolomon(DATA, PARITY, kernel=request.param)


@pytest.fixture(params=PAGE_BYTES, ids=lambda size: f"{size >> 10}KiB")
def pages(request: pytest.FixtureRequest, code: leto_ec.ReedSolomon) -> np.ndarray:
    count = min(DATA, MEMORY_BYTES // request.param, PAGES_AT_MOST.get(code.kernel, DATA))
    return np.random.default_rng(0).integers(0, 256, (count, request.param), dtype=np.uint8)


def note_rate(benchmark: Any, size: int) -> None:
    benchmark.extra_info["GiB/s"] = round(size / benchmark.stats.stats.min / 2**30, 3)


def test_encode(benchmark: Any, code: leto_ec.ReedSolomon, pages: np.ndarray) -> None:
    out = np.zeros((PARITY, pages.shape[1]), np.uint8)
    benchmark.pedantic(code.encode, args=(pages, out), rounds=3, warmup_rounds=1)
    note_rate(benchmark, pages.nbytes)


def test_update_one_page(benchmark: Any, code: leto_ec.ReedSolomon, pages: np.ndarray) -> None:
    parity = np.zeros((PARITY, pages.shape[1]), np.uint8)
    benchmark.pedantic(
        code.update, args=(parity,), kwargs={"index": 7, "delta": pages[0]}, rounds=5, warmup_rounds=1
    )
    benchmark.extra_info["ms"] = round(benchmark.stats.stats.min * 1e3, 3)


@pytest.mark.parametrize("lost", [1, 16])
def test_reconstruct(benchmark: Any, code: leto_ec.ReedSolomon, pages: np.ndarray, lost: int) -> None:
    parity = code.encode(pages)
    lost = min(lost, len(pages))
    original = pages[:lost].copy()
    benchmark.pedantic(
        code.reconstruct, args=(pages, parity), kwargs={"lost_data": range(lost)}, rounds=3, warmup_rounds=1
    )
    assert np.array_equal(pages[:lost], original)
    note_rate(benchmark, pages.nbytes)


def test_small_update(benchmark: Any, code: leto_ec.ReedSolomon) -> None:
    """The fixed cost of a call: one page of 4 KiB into six rows."""
    small = leto_ec.ReedSolomon(48, 6, kernel=code.kernel)
    parity, delta = np.zeros((6, 4096), np.uint8), np.ones(4096, np.uint8)
    benchmark(small.update, parity, index=3, delta=delta)
    benchmark.extra_info["ms"] = round(benchmark.stats.stats.median * 1e3, 4)
