"""The verdict finds every kind of difference, and missing things are differences."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leto_megatron.compare import compare_runs
from leto_megatron.records import RecordWriter, read_records, write_final

ITERATIONS = 3


def record(iteration: int, rank: int) -> dict[str, Any]:
    return {
        "iteration": iteration,
        "loss": 2.0,
        "loss_bits": f"{iteration:08x}",
        "lr_bits": "aa",
        "grad_norm_bits": "bb",
        "consumed_samples": 8 * (iteration + 1),
        "scheduler_steps": iteration + 1,
        "rng": f"{iteration}-{rank}",
    }


def make_run(folder: Path) -> Path:
    for rank in (0, 1):
        writer = RecordWriter(folder / f"records-rank{rank}.jsonl")
        for iteration in range(ITERATIONS):
            writer.write(record(iteration, rank))
        writer.close()
        state = {
            f"{kind}/w": bytes([rank]) for kind in ("parameter", "master", "exp_avg", "exp_avg_sq", "step")
        }
        state |= {"rng/torch": b"r", "consumed_samples": b"c", "scheduler_steps": b"s", "group/0": b"g"}
        write_final(folder / f"final-rank{rank}.json", state, ITERATIONS)
    return folder


def verdict(tmp_path: Path, change: Callable[[Path], None]) -> tuple[bool, list[str]]:
    reference, run = make_run(tmp_path / "reference"), make_run(tmp_path / "run")
    change(run)
    result = compare_runs(reference, run, 2, ITERATIONS)
    return result.exact, result.differences


def test_equal_runs_are_exact(tmp_path: Path) -> None:
    assert verdict(tmp_path, lambda run: None) == (True, [])


def test_an_iteration_recorded_twice_must_be_equal_twice(tmp_path: Path) -> None:
    def again(run: Path, changes: dict[str, Any]) -> None:
        writer = RecordWriter(run / "records-rank0.jsonl")
        writer.write({**record(1, 0), **changes})
        writer.close()

    assert verdict(tmp_path / "a", lambda run: again(run, {}))[0]
    exact, differences = verdict(tmp_path / "b", lambda run: again(run, {"rng": "other"}))
    assert not exact
    assert "RNG states: rank 0, iteration 1" in differences[0]


@pytest.mark.parametrize("key", ["loss_bits", "lr_bits", "grad_norm_bits", "consumed_samples", "rng"])
def test_one_changed_value_is_found(tmp_path: Path, key: str) -> None:
    def change(run: Path) -> None:
        path = run / "records-rank1.jsonl"
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        lines[2][key] = "changed"
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    exact, differences = verdict(tmp_path, change)
    assert not exact
    assert len(differences) == 1
    assert "rank 1, iteration 2" in differences[0]


@pytest.mark.parametrize("name", ["parameter/w", "exp_avg_sq/w", "step/w", "rng/torch", "consumed_samples"])
def test_one_changed_or_missing_state_is_found(tmp_path: Path, name: str) -> None:
    def change(run: Path, value: str | None) -> None:
        path = run / "final-rank0.json"
        content = json.loads(path.read_text())
        content["digests"].pop(name)
        if value is not None:
            content["digests"][name] = value
        path.write_text(json.dumps(content))

    for value in ("0" * 64, None):
        exact, differences = verdict(tmp_path / str(value), lambda run, value=value: change(run, value))
        assert not exact
        assert name in differences[0]


def test_unfinished_runs_are_not_exact(tmp_path: Path) -> None:
    assert not verdict(tmp_path / "a", lambda run: (run / "final-rank1.json").unlink())[0]
    assert not verdict(tmp_path / "b", lambda run: (run / "records-rank0.jsonl").unlink())[0]
    empty = tmp_path / "empty"
    assert not compare_runs(empty, empty, 2, ITERATIONS).exact, "nothing compared is not exact"


def test_a_record_cut_off_by_a_kill_is_skipped_and_the_next_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "records-rank0.jsonl"
    path.write_text(json.dumps(record(0, 0)) + "\n" + '{"iteration": 1, "lo')
    writer = RecordWriter(path)
    writer.write(record(1, 0))
    writer.close()
    assert [line["iteration"] for line in read_records(path)] == [0, 1]
