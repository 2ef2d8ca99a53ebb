"""Predicted against measured ETTR, from the report of a run that had failures (section 8.6's check).

Role: ``leto-sim validate``. The report is JSON:

    {"reference": {"iterations": 200, "elapsed_s": 96.0},
     "run":       {"iterations": 200, "elapsed_s": 131.5},
     "failures":  [{"class": "hof", "initialize_s": 0.8, "recompute_s": 0.3}, ...]}

``elapsed_s`` spans the first iteration's start to the last one's end; ``recovery_s`` may replace the two
parts of a failure; ``effective_iteration_s`` in ``run`` (time of an iteration without a failure, overheads
included) is optional. The failures of a leto-megatron report are read as they are: ``recovered_s`` (failure
to training resumed) stands for the initialisation, ``source`` "checkpoint" for an FF, and where no
``recompute_s`` is given, recomputation is taken as ``iterations_lost`` + 1/2 iterations, as in equation (8).
Other fields are ignored.

Measured: ETTR = T_ref(i) / T_eval(i) (section 8.1). Predicted: equation (6) with the run's own mean recovery
time and MTTF = elapsed / failures. With both from one run this tests the *form*, not the inputs; given a
profile, its systems are predicted too, which tests both.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from leto_sim.errors import ProfileError, ReportError
from leto_sim.ettr import ettr
from leto_sim.predict import evaluate
from leto_sim.profile import Profile
from leto_sim.schema import Choice, Number, Spec, Table, Tables, check_table

__all__ = ["Comparison", "MeasuredRun", "compare_run", "read_report"]

_TIME = Number(0, 1e9, above=True)
_ITERATIONS = Number(1, 1e9, integer=True)
_RUN: dict[str, Spec] = {
    "iterations": _ITERATIONS,
    "elapsed_s": _TIME,
    "effective_iteration_s": Number(0, 1e9, default=None, above=True),
}
_FIELDS: dict[str, Spec] = {
    "reference": Table({"iterations": _ITERATIONS, "elapsed_s": _TIME}),
    "run": Table(_RUN),
    "failures": Tables(
        {
            "class": Choice(("hof", "ff"), default=None),
            "source": Choice(("in-place", "checkpoint", "fresh"), default=None),
            "recovered_s": Number(0, 1e9, default=None),
            "iterations_lost": Number(0, 1e9, default=None),
            "initialize_s": Number(0, 1e9, default=None),
            "recompute_s": Number(-1e9, 1e9, default=None),
            "recovery_s": Number(0, 1e9, default=None),
        }
    ),
}


@dataclass(frozen=True)
class MeasuredRun:
    """What a report says: seconds, counts, and the recovery time of every failure by class."""

    reference_iteration_s: float
    iterations: int
    elapsed_s: float
    effective_iteration_s: float | None
    hof_recoveries_s: tuple[float, ...]
    ff_recoveries_s: tuple[float, ...]

    @property
    def ettr(self) -> float:
        """Measured: time that the reference needs for these iterations over the time that they took."""
        return self.iterations * self.reference_iteration_s / self.elapsed_s

    @property
    def failures(self) -> int:
        return len(self.hof_recoveries_s) + len(self.ff_recoveries_s)

    @property
    def mttf_s(self) -> float:
        return self.elapsed_s / self.failures if self.failures else math.inf

    @property
    def hof_ratio(self) -> float:
        return len(self.hof_recoveries_s) / self.failures if self.failures else 1.0

    @property
    def mean_recovery_s(self) -> float:
        return (
            (sum(self.hof_recoveries_s) + sum(self.ff_recoveries_s)) / self.failures if self.failures else 0.0
        )


@dataclass(frozen=True)
class Comparison:
    """A prediction beside the measurement; ``error`` = (predicted - measured) / measured."""

    name: str
    predicted: float
    measured: float

    @property
    def error(self) -> float:
        return (self.predicted - self.measured) / self.measured


def read_report(path: str | Path) -> MeasuredRun:
    """Read a report. Raises ReportError naming the field, the value and the range."""
    try:
        raw = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
        raise ReportError(f"{path}: expected a readable JSON report: {error}") from error
    try:
        data = check_table(_FIELDS, _known(raw, _FIELDS), "", str(path))
        return _measured(data, str(path))
    except ProfileError as error:
        raise ReportError(str(error)) from error


def _known(raw: Any, fields: Mapping[str, Any]) -> Any:
    """Drop fields that this comparison does not read: reports carry much more."""
    if not isinstance(raw, dict):
        return raw
    out: dict[str, Any] = {}
    for name, spec in fields.items():
        value = raw.get(name)
        if value is None:
            continue
        if isinstance(spec, Table):
            out[name] = _known(value, spec.fields)
        elif isinstance(spec, Tables) and isinstance(value, list):
            out[name] = [_known(row, spec.fields) for row in value]
        else:
            out[name] = value
    return out


def _measured(data: Mapping[str, Any], where: str) -> MeasuredRun:
    reference, run = data["reference"], data["run"]
    reference_s = reference["elapsed_s"] / reference["iterations"]
    iteration_s = run["effective_iteration_s"] or reference_s
    recoveries: dict[str, list[float]] = {"hof": [], "ff": []}
    for i, row in enumerate(data["failures"]):
        total = row["recovery_s"]
        if total is None:
            start = row["initialize_s"] if row["initialize_s"] is not None else row["recovered_s"]
            again = row["recompute_s"]
            if again is None and row["recovered_s"] is not None:
                again = ((row["iterations_lost"] or 0) + 0.5) * iteration_s
            if start is None or again is None:
                wanted = "recovery_s, or initialize_s and recompute_s, or recovered_s"
                raise ProfileError(f"failures[{i}].recovery_s", None, wanted, where)
            total = start + again
        recoveries[row["class"] or ("ff" if row["source"] == "checkpoint" else "hof")].append(total)
    return MeasuredRun(
        reference_iteration_s=reference_s,
        iterations=run["iterations"],
        elapsed_s=run["elapsed_s"],
        effective_iteration_s=run["effective_iteration_s"],
        hof_recoveries_s=tuple(recoveries["hof"]),
        ff_recoveries_s=tuple(recoveries["ff"]),
    )


def compare_run(run: MeasuredRun, profile: Profile | None = None) -> list[Comparison]:
    """Return predictions beside the measured ETTR: from the run's own figures, then for each system of a
    profile.

    Without ``effective_iteration_s`` the first one takes T_eff = T_iter: the overhead is then part of its
    error. Raises RecoveryTooSlowError where the mean recovery is not below the run's MTTF.
    """
    effective_s = run.effective_iteration_s or run.reference_iteration_s
    mttf_s = run.mttf_s if math.isfinite(run.mttf_s) else 1e300
    own = float(ettr(run.reference_iteration_s, effective_s, run.mean_recovery_s, mttf_s))
    out = [Comparison("equation 6, the run's own figures", own, run.ettr)]
    if profile is not None:
        for name, system in profile.systems().items():
            value = evaluate(system, run.reference_iteration_s, mttf_s, run.hof_ratio).ettr
            out.append(Comparison(f"profile {profile.name}: {name}", value, run.ettr))
    return out
