"""Checkpoints for fatal failures: torn ones are never seen, damaged ones are refused (case 12, 13, 15)."""

from __future__ import annotations

from pathlib import Path

import pytest
from ranks import RankFailedError, run_ranks


def test_killed_at_every_operation_of_a_save(tmp_path: Path) -> None:
    (result,) = run_ranks(1, "worker_checkpoint:kill_sweep", {}, tmp_path, timeout_s=500)
    assert result["kills"] > 15, result
    assert result["survivors"] >= 1, result  # the sweep reached the end of the save
    assert 1 <= result["complete"] < result["kills"], result


def test_the_sweep_notices_a_marker_that_is_written_first(tmp_path: Path) -> None:
    with pytest.raises(RankFailedError, match="cannot be used"):
        run_ranks(1, "worker_checkpoint:kill_sweep", {"broken": True}, tmp_path, timeout_s=500)


def test_a_save_keeps_what_was_there_when_it_returned(tmp_path: Path) -> None:
    """Case 15: on the host backend the tensors are live memory, and the next update changes them at once."""
    for result in run_ranks(2, "worker_checkpoint:overwrite", {}, tmp_path / "right"):
        assert result == {"changed": [], "job": True}
    for result in run_ranks(2, "worker_checkpoint:overwrite", {"broken": True}, tmp_path / "broken"):
        assert len(result["changed"]) == 3, "a save that reads later was not noticed"


def test_damaged_mixed_and_foreign_checkpoints_are_refused(tmp_path: Path) -> None:
    zero, one = run_ranks(2, "worker_checkpoint:damage", {}, tmp_path)
    for said in (zero, one):
        assert said["whole"] == ""
        assert "another run" in said["foreign"]
        assert said["cut off"], "a file without its end was accepted"
        assert said["after setting aside"] == "(1, 2)"
        assert said["torn marker"] == "(1,)"
        assert said["seen by another run"] == "()"
    assert "digest" in zero["mixed"], "rank 0 read a component of another step"
    assert one["mixed"] == "", "rank 1's part was not touched"
    assert one["flipped"], "changed bytes were accepted"
    assert zero["flipped"] == "", "rank 0's part was not touched"
