"""The job state comes back bit for bit, whatever an initialisation did in between (cases 9 and 11)."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import run_ranks

from leto_megatron.optimizer import JOB_STATE_BYTES


def test_restored_last_and_complete(tmp_path: Path) -> None:
    (result,) = run_ranks(1, "worker_jobstate:roundtrip", {}, tmp_path)
    for key in ("draws", "groups", "same", "loss", "batch", "digests"):
        assert result[key], key
    (_, right), (_, again), (_, shuffled), (_, other) = result["consumed"]
    assert right == again
    assert len({right, shuffled, other}) == 3, "a shuffled batch was not told from the right one"
    assert result["consumed"][2][0] == pytest.approx(result["consumed"][0][0]), "the loss cannot tell"
    assert result["samples"] == 11 * 4
    assert 4096 < result["bytes"] < JOB_STATE_BYTES
    assert len(result["errors"]) == 5
    assert "version 99" in result["errors"][3]
    assert "new scheduler" in result["errors"][4]
