"""The verdict: is a run, bit for bit, the run that it should be?

Role in the whole: the demo and the tests hold a Leto run, with its failures, against a fault-free stock run
of the same seed. Compared are, for every rank, each iteration's loss, learning rate, gradient norm, consumed
samples (their tokens and labels, and how many) and random streams, and at the end every parameter, master,
moment, step count, hyperparameter group, random stream, the schedule and the data position. Records that were
written twice (before a rollback and after it) must both agree. Two missing values are not equal values: only
ranks without the last pipeline stage may have no loss.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from leto_megatron.records import read_records

__all__ = ["Comparison", "compare_records", "compare_runs"]

_SHOWN = 20

_RECORD_KINDS = {
    "loss_bits": "loss values",
    "lr_bits": "learning rates",
    "grad_norm_bits": "gradient norms",
    "batch": "consumed samples",
    "consumed_samples": "sample counts",
    "scheduler_steps": "schedule positions",
    "rng": "RNG states",
}

_FINAL_KINDS = {
    "parameter": "parameters",
    "master": "fp32 masters",
    "exp_avg": "moments",
    "exp_avg_sq": "moments",
    "step": "step counts",
    "group": "hyperparameter groups",
    "rng": "final RNG states",
    "consumed_samples": "data position",
    "scheduler_steps": "schedule positions",
}


@dataclass
class Comparison:
    """How many values of each kind were compared and how many were equal; the first differences in words."""

    kinds: dict[str, list[int]] = field(default_factory=dict)
    differences: list[str] = field(default_factory=list)

    @property
    def exact(self) -> bool:
        """Whether everything that had to be there was there and equal; false if nothing was compared."""
        return bool(self.kinds) and all(same == total and total for same, total in self.kinds.values())

    def count(self, kind: str, same: bool, what: str) -> None:
        """Add one compared value."""
        entry = self.kinds.setdefault(kind, [0, 0])
        entry[0] += same
        entry[1] += 1
        if not same and len(self.differences) < _SHOWN:
            self.differences.append(f"{kind}: {what}")


def compare_runs(
    reference: Path, other: Path, world_size: int, iterations: int, pipeline_parallel: int = 1
) -> Comparison:
    """Compare the folders of two finished runs. What is missing counts as different, also in both.

    `pipeline_parallel`: pipeline stages; Megatron puts the last stage on the last ranks, and only those
    know the loss.
    """
    result = Comparison()
    first_with_loss = world_size - world_size // pipeline_parallel
    for rank in range(world_size):
        silent = {"loss_bits"} if rank < first_with_loss else set()
        _compare_records(result, reference, other, rank, iterations, silent)
        _compare_final(result, reference, other, rank, iterations)
    return result


def compare_records(reference: Path, other: Path, world_size: int) -> dict[str, Any]:
    """Compare what two runs without pipeline stages recorded while both were under way; neither has to be
    finished.

    Returns the number of `iterations` that all ranks of both have recorded, how many values of each kind are
    equal of how many (`kinds`), and the first `differences` in words. Iterations in the middle that one of
    them has not recorded count as different.
    """
    ends = [
        1 + max((record["iteration"] for record in read_records(path)), default=-1)
        for folder in (reference, other)
        for path in (folder / f"records-rank{rank}.jsonl" for rank in range(world_size))
    ]
    result = Comparison()
    for rank in range(world_size):
        _compare_records(result, reference, other, rank, min(ends), set())
    return {"iterations": min(ends), "kinds": result.kinds, "differences": result.differences}


def _compare_records(
    result: Comparison, reference: Path, other: Path, rank: int, iterations: int, silent: set[str]
) -> None:
    """`silent`: keys that have no value on this rank; they must be there all the same, as null."""
    name = f"records-rank{rank}.jsonl"
    wanted = {record["iteration"]: record for record in read_records(reference / name)}
    found: dict[int, list[dict[str, Any]]] = {}
    for record in read_records(other / name):
        found.setdefault(record["iteration"], []).append(record)
    for iteration in range(iterations):
        expected, lines = wanted.get(iteration), found.get(iteration, [])
        for key, kind in _RECORD_KINDS.items():
            where = f"rank {rank}, iteration {iteration}"
            if expected is None or not lines:
                missing = "the reference" if expected is None else "the run"
                result.count(kind, False, f"{where}: no record in {missing}")
                continue
            value = expected.get(key)
            for line in lines:
                same = key in line and key in expected and line[key] == value
                proper = (value is None) is (key in silent)
                result.count(kind, same and proper, f"{where}: {line.get(key)} instead of {value}")


def _compare_final(result: Comparison, reference: Path, other: Path, rank: int, iterations: int) -> None:
    wanted, found = (_final(folder / f"final-rank{rank}.json", iterations) for folder in (reference, other))
    there = {name.split("/", 1)[0] for name in wanted}
    for prefix, kind in _FINAL_KINDS.items():
        if prefix not in there:
            result.count(kind, False, f"rank {rank}: the reference has no {prefix} in its final state")
    for name in sorted(wanted.keys() | found.keys()):
        kind = _FINAL_KINDS.get(name.split("/", 1)[0], "other state")
        same = name in wanted and wanted[name] == found.get(name)
        result.count(kind, same, f"rank {rank}: {name} differs or is missing")


def _final(path: Path, iterations: int) -> dict[str, str]:
    """The digests of a final state, empty if it is missing or of another iteration."""
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    if content.get("iteration") != iterations or not isinstance(content.get("digests"), dict):
        return {}
    digests: dict[str, str] = content["digests"]
    return digests
