"""Many settings at once: a grid over systems, MTTF, HOF ratio, scale and method, as rows and as CSV.

Role: what ``leto-sim sweep`` runs and ``leto-sim plot`` draws. A thousand simulated settings take seconds,
because all of them advance together in `leto_sim.des`. The rows depend on the grid and the seed only.
"""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from leto_sim.des import Lane, simulate
from leto_sim.errors import RecoveryTooSlowError, SimError
from leto_sim.ettr import evaluate_at
from leto_sim.iteration import iteration_time
from leto_sim.predict import Method, choose_interval, poisson_schedules, summarize
from leto_sim.profile import Profile
from leto_sim.renewal import exact_ettr
from leto_sim.systems import System

__all__ = ["Grid", "Row", "parse_axis", "read_rows", "run_sweep", "write_rows"]

LANES_AT_ONCE = 1024
"""Lanes simulated together: bounds memory (1024 lanes x 1000 failures are some 10 MB) at full numpy speed."""


@dataclass(frozen=True)
class Row:
    """One setting and its result. ``ettr`` is NaN where the closed form refuses (see ``note``)."""

    system: str
    method: str
    gpus: int
    iteration_s: float
    mttf_s: float
    hof_ratio: float
    interval: int
    ettr: float
    standard_error: float
    note: str = ""


@dataclass(frozen=True)
class Grid:
    """What to vary. ``mttf_s`` None: the profile's own; ``data_parallel`` None: the profile's scale."""

    systems: tuple[str, ...]
    hof_ratios: tuple[float, ...]
    mttf_s: tuple[float, ...] | None = None
    data_parallel: tuple[int, ...] | None = None
    methods: tuple[Method, ...] = ("closed",)
    interval: int | str = "young"
    failures: int = 300
    replicas: int = 4
    seed: int = 0


@dataclass(frozen=True)
class _Setting:
    system: System
    method: Method
    gpus: int
    iteration_s: float
    mttf_s: float
    hof_ratio: float
    interval: int
    shadow_rebuild_s: float

    def row(self, value: float, error: float = 0.0, note: str = "") -> Row:
        return Row(
            self.system.name,
            self.method,
            self.gpus,
            self.iteration_s,
            self.mttf_s,
            self.hof_ratio,
            self.interval,
            value,
            error,
            note,
        )


def run_sweep(profile: Profile, grid: Grid, advance: Callable[[int], None] = lambda n: None) -> list[Row]:
    """Return one Row per setting, in grid order. ``advance`` is told how many settings were finished.

    Spares and repair are the profile's. Raises SimError for an unknown system or an empty axis.
    """
    settings = list(_settings(profile, grid))
    rows: dict[int, Row] = {}
    for index, setting in enumerate(settings):
        if setting.method != "des":
            rows[index] = _analytic(setting)
            advance(1)
    failures = profile.data["failures"] or {}
    spares, repair_s = failures.get("spares"), float(failures.get("repair_s", 0.0))
    simulated = [i for i, s in enumerate(settings) if s.method == "des"]
    step = max(1, LANES_AT_ONCE // grid.replicas)
    for begin in range(0, len(simulated), step):
        part = simulated[begin : begin + step]
        lanes = [
            Lane(s.system, s.iteration_s, s.interval, schedule, spares, repair_s, s.shadow_rebuild_s)
            for s in (settings[i] for i in part)
            for schedule in poisson_schedules(s.mttf_s, s.hof_ratio, grid.failures, grid.seed, grid.replicas)
        ]
        results = simulate(lanes)
        for k, index in enumerate(part):
            total = summarize(results[k * grid.replicas : (k + 1) * grid.replicas])
            rows[index] = settings[index].row(total.ettr, total.standard_error)
        advance(len(part))
    return [rows[i] for i in range(len(settings))]


def _settings(profile: Profile, grid: Grid) -> Iterator[_Setting]:
    if not grid.systems or not grid.hof_ratios or not grid.methods:
        raise SimError("expected at least one system, one HOF ratio and one method")
    scales = [profile] if grid.data_parallel is None else [profile.scaled(d) for d in grid.data_parallel]
    for scaled in scales:
        systems = scaled.systems()
        missing = [name for name in grid.systems if name not in systems]
        if missing:
            raise SimError(f"expected systems among {', '.join(systems)}, found {', '.join(missing)}")
        iteration_s = iteration_time(scaled).total_s
        mttfs = grid.mttf_s if grid.mttf_s is not None else (scaled.mttf_s(),)
        for name, mttf_s, ratio in itertools.product(grid.systems, mttfs, grid.hof_ratios):
            try:
                interval = choose_interval(systems[name], iteration_s, mttf_s, ratio, grid.interval)
            except RecoveryTooSlowError:  # only rule "best": no interval recovers in time; the rows say so
                interval = 1
            rebuild_s = scaled.shadow_rebuild_s() if systems[name].retains_on_hof else 0.0
            for method in grid.methods:
                yield _Setting(
                    systems[name], method, scaled.gpus, iteration_s, mttf_s, ratio, interval, rebuild_s
                )


def _analytic(s: _Setting) -> Row:
    if s.method == "exact":
        return s.row(exact_ettr(s.system, s.iteration_s, s.mttf_s, s.hof_ratio, s.interval))
    try:
        return s.row(float(evaluate_at(s.system, s.iteration_s, s.mttf_s, s.hof_ratio, s.interval)[-1]))
    except RecoveryTooSlowError as error:
        return s.row(math.nan, note=f"refused: recovery {error.recovery_s:.0f} s >= MTTF")


def parse_axis(text: str, name: str) -> tuple[float, ...]:
    """Read ``a,b,c`` or ``first:last:count`` (evenly spaced, both ends in).

    Raises SimError naming the value.
    """
    try:
        if ":" in text:
            first, last, count = text.split(":")
            n = int(count)
            if n < 2:
                raise ValueError
            a, b = float(first), float(last)
            values = tuple(a + (b - a) * i / (n - 1) for i in range(n))
        else:
            values = tuple(float(part) for part in text.split(","))
    except ValueError as error:
        raise SimError(
            f"{name}: expected a,b,c or first:last:count with count >= 2, found {text!r}"
        ) from error
    if not all(math.isfinite(v) for v in values):
        raise SimError(f"{name}: expected finite numbers, found {text!r}")
    return values


def write_rows(path: str | Path, rows: Sequence[Row]) -> None:
    """Write rows as CSV with a header; floats in full precision, so that `read_rows` returns them exactly."""
    with Path(path).open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, [f.name for f in fields(Row)])
        writer.writeheader()
        for row in rows:
            writer.writerow({k: repr(v) if isinstance(v, float) else v for k, v in asdict(row).items()})


def read_rows(path: str | Path) -> list[Row]:
    """Read what `write_rows` wrote. Raises SimError naming the file and the line."""
    kinds = {"gpus": int, "interval": int, "system": str, "method": str, "note": str}
    rows = []
    try:
        with Path(path).open(newline="", encoding="utf-8") as source:
            reader = csv.DictReader(source)
            wanted = [f.name for f in fields(Row)]
            if reader.fieldnames != wanted:
                raise SimError(f"{path}: expected the columns {', '.join(wanted)}, found {reader.fieldnames}")
            for number, record in enumerate(reader, start=2):
                try:
                    rows.append(Row(**{k: kinds.get(k, float)(v) for k, v in record.items()}))
                except (TypeError, ValueError) as error:
                    raise SimError(f"{path}:{number}: expected a row of a sweep, found {record}") from error
    except (OSError, UnicodeDecodeError) as error:
        raise SimError(f"{path}: cannot be read: {error}") from error
    return rows
