"""The CPU shim keeps its promises, and none of them leaks further than stated."""

from __future__ import annotations

from pathlib import Path

from ranks import run_ranks


def test_promises(tmp_path: Path) -> None:
    (result,) = run_ranks(1, "worker_cpu:promises", {}, tmp_path)
    assert [name for name, kept in result.items() if not kept] == []
    assert len(result) > 10
