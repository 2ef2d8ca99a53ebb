"""The verdict finds every kind of difference, and missing things are differences."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leto_megatron.compare import compare_records, compare_runs
from leto_megatron.records import RecordWriter, read_records, write_final

ITERATIONS = 3


def record(iteration: int, rank: int) -> dict[str, Any]:
    return {
        "iteration": iteration,
        "loss": 2.0,
        "loss_bits": f"{iteration:08x}",
        "lr_bits": "aa",
        "grad_norm_bits": "bb",
        "batch": f"batch-{iteration}-{rank}",
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
        write_final(folder / f"final-rank{rank}.json", state.items(), ITERATIONS)
    return folder


def verdict(
    tmp_path: Path, change: Callable[[Path], None], both: bool = False, pipeline: int = 1
) -> tuple[bool, list[str]]:
    """Compare two equal runs after a change to one of them, or the same change to both."""
    reference, run = make_run(tmp_path / "reference"), make_run(tmp_path / "run")
    change(run)
    if both:
        change(reference)
    result = compare_runs(reference, run, 2, ITERATIONS, pipeline)
    return result.exact, result.differences


def set_record(run: Path, rank: int, iteration: int, **values: Any) -> None:
    path = run / f"records-rank{rank}.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    lines[iteration].update(values)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def set_final(run: Path, rank: int, name: str, value: str | None) -> None:
    path = run / f"final-rank{rank}.json"
    content = json.loads(path.read_text())
    content["digests"].pop(name, None)
    if value is not None:
        content["digests"][name] = value
    path.write_text(json.dumps(content))


KEYS = ["loss_bits", "lr_bits", "grad_norm_bits", "batch", "consumed_samples", "scheduler_steps", "rng"]


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


@pytest.mark.parametrize("key", KEYS)
def test_one_changed_value_is_found(tmp_path: Path, key: str) -> None:
    for value in ("changed", None):
        exact, differences = verdict(
            tmp_path / str(value), lambda run, value=value: set_record(run, 1, 2, **{key: value})
        )
        assert not exact
        assert len(differences) == 1
        assert "rank 1, iteration 2" in differences[0]


@pytest.mark.parametrize("key", KEYS)
def test_null_in_both_runs_is_no_agreement(tmp_path: Path, key: str) -> None:
    """A value that neither run has proves nothing."""
    exact, differences = verdict(tmp_path, lambda run: set_record(run, 1, 2, **{key: None}), both=True)
    assert not exact
    assert len(differences) == 1
    assert "rank 1, iteration 2: None instead of None" in differences[0]


def test_only_ranks_without_the_last_stage_have_no_loss(tmp_path: Path) -> None:
    def drop(run: Path, *ranks: int) -> None:
        for rank in ranks:
            for iteration in range(ITERATIONS):
                set_record(run, rank, iteration, loss_bits=None)

    assert verdict(tmp_path / "first", lambda run: drop(run, 0), both=True, pipeline=2)[0]
    exact, differences = verdict(tmp_path / "both", lambda run: drop(run, 0, 1), both=True, pipeline=2)
    assert not exact
    assert all("rank 1" in line for line in differences)
    assert len(differences) == ITERATIONS
    assert not verdict(tmp_path / "none", lambda run: None, pipeline=2)[0], "rank 0 cannot know a loss"


def test_a_shuffled_batch_is_named(tmp_path: Path) -> None:
    _exact, differences = verdict(tmp_path, lambda run: set_record(run, 0, 1, batch="shuffled"))
    assert differences == ["consumed samples: rank 0, iteration 1: shuffled instead of batch-1-0"]


NAMES = [
    *("parameter/w", "master/w", "exp_avg/w", "exp_avg_sq/w", "step/w", "group/0"),
    *("rng/torch", "consumed_samples", "scheduler_steps"),
]


@pytest.mark.parametrize("name", NAMES)
def test_one_changed_or_missing_state_is_found(tmp_path: Path, name: str) -> None:
    for value in ("0" * 64, None):
        exact, differences = verdict(
            tmp_path / str(value), lambda run, value=value: set_final(run, 0, name, value)
        )
        assert not exact
        assert len(differences) == 1
        assert name in differences[0]


@pytest.mark.parametrize("name", NAMES)
def test_a_kind_of_state_that_both_runs_lack_is_found(tmp_path: Path, name: str) -> None:
    exact, differences = verdict(tmp_path, lambda run: set_final(run, 0, name, None), both=True)
    assert not exact
    assert f"no {name.split('/')[0]} in its final state" in differences[0]


@pytest.mark.parametrize("name", ["parameter/extra", "exp_avg/extra", "something/new"])
def test_an_entry_of_the_run_only_is_found(tmp_path: Path, name: str) -> None:
    exact, differences = verdict(tmp_path, lambda run: set_final(run, 1, name, "0" * 64))
    assert not exact
    assert len(differences) == 1
    assert name in differences[0]


def test_unfinished_runs_are_not_exact(tmp_path: Path) -> None:
    assert not verdict(tmp_path / "a", lambda run: (run / "final-rank1.json").unlink())[0]
    assert not verdict(tmp_path / "b", lambda run: (run / "records-rank0.jsonl").unlink())[0]
    empty = tmp_path / "empty"
    assert not compare_runs(empty, empty, 2, ITERATIONS).exact, "nothing compared is not exact"


def test_runs_under_way_are_compared_as_far_as_both_have_come(tmp_path: Path) -> None:
    reference, run = make_run(tmp_path / "reference"), make_run(tmp_path / "run")
    path = run / "records-rank1.jsonl"
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))
    found = compare_records(reference, run, 2)
    assert found["iterations"] == 2
    assert found["kinds"] == {kind: [4, 4] for kind in found["kinds"]}
    assert len(found["kinds"]) == len(KEYS)
    assert found["differences"] == []
    set_record(run, 0, 1, loss_bits="other")
    set_record(run, 0, 2, rng="beyond what both have")
    found = compare_records(reference, run, 2)
    assert found["kinds"]["loss values"] == [3, 4]
    assert len(found["differences"]) == 1
    assert "rank 0, iteration 1" in found["differences"][0]
    assert compare_records(tmp_path / "none", run, 2)["iterations"] == 0


def test_a_record_cut_off_by_a_kill_is_skipped_and_the_next_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "records-rank0.jsonl"
    path.write_text(json.dumps(record(0, 0)) + "\n" + '{"iteration": 1, "lo')
    writer = RecordWriter(path)
    writer.write(record(1, 0))
    writer.close()
    assert [line["iteration"] for line in read_records(path)] == [0, 1]
