"""When failures come and of which class: Poisson arrivals, traces, HOF ratio (section 8, appendix C.3).

Role: makes `Schedule`s, the only input about failures that the simulation takes. Everything random comes from
a seed; schedules of one seed and replica use the same unit arrivals whatever the MTTF or the HOF ratio is
(common random numbers), so that two settings or systems are compared under the same luck.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from leto_sim.errors import SimError, TraceError

__all__ = [
    "Schedule",
    "assign_classes",
    "bundled_trace",
    "poisson_schedule",
    "read_trace",
    "repeat_trace",
    "spot_like_trace",
    "unit_arrivals",
    "write_trace",
]

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


@dataclass(frozen=True)
class Schedule:
    """Failures of one run, sorted: float64 ``times_s`` since its start, bool ``fatal`` (True: FF, False:
    HOF).
    """

    times_s: Floats
    fatal: Bools
    horizon_s: float

    def __post_init__(self) -> None:
        t = self.times_s
        if t.shape != self.fatal.shape or t.ndim != 1:
            raise SimError(f"expected two equal vectors, found shapes {t.shape} and {self.fatal.shape}")
        if t.size and (not np.all(np.isfinite(t)) or np.any(np.diff(t) < 0) or t[0] < 0):
            raise SimError("expected finite, sorted failure times of at least 0 s")
        if not 0 < self.horizon_s < math.inf:
            raise SimError(f"expected a finite horizon above 0 s, found {self.horizon_s}")

    @property
    def mttf_s(self) -> float:
        """Horizon over failures: the mean time between them, infinite without any."""
        return self.horizon_s / self.times_s.size if self.times_s.size else math.inf


def unit_arrivals(count: int, seed: int, replica: int = 0) -> tuple[Floats, Floats]:
    """Return (arrival times in units of the MTTF, uniform marks in [0, 1)), each float64 of length ``count``.

    A failure is fatal where its mark is at least the HOF ratio.
    """
    if count < 0 or seed < 0 or replica < 0:
        raise SimError(f"expected count, seed and replica >= 0, found {count}, {seed}, {replica}")
    gaps = np.random.default_rng([seed, replica, 0]).standard_exponential(count)
    marks = np.random.default_rng([seed, replica, 1]).random(count)
    return np.cumsum(gaps), marks


def poisson_schedule(
    mttf_s: float, horizon_s: float, hof_ratio: float, seed: int, replica: int = 0
) -> Schedule:
    """Return Poisson failures of rate 1 / ``mttf_s`` until ``horizon_s``."""
    if not 0 < mttf_s < math.inf or not 0 <= hof_ratio <= 1:
        raise SimError(f"expected mttf_s > 0 and hof_ratio in [0, 1], found {mttf_s} and {hof_ratio}")
    expected = horizon_s / mttf_s
    arrivals, marks = unit_arrivals(int(expected + 10 * math.sqrt(expected) + 20), seed, replica)
    times = arrivals * mttf_s
    kept = times < horizon_s
    return Schedule(times[kept], marks[kept] >= hof_ratio, horizon_s)


def assign_classes(times_s: Sequence[float] | Floats, hof_ratio: float, seed: int) -> Bools:
    """Return which failures are fatal: round(h n) of them, drawn at random, are HOFs (as in section 8.2)."""
    count = len(times_s)
    fatal = np.ones(count, dtype=bool)
    hofs = math.floor(hof_ratio * count + 0.5)
    fatal[np.random.default_rng([seed, 2]).permutation(count)[:hofs]] = False
    return fatal


def read_trace(
    path: str | Path, hof_ratio: float | None = None, seed: int = 0, horizon_s: float | None = None
) -> Schedule:
    """Read a CSV trace with a header ``time_s[,class]`` (class: hof or ff); ``#`` starts a comment.

    The horizon is that of a comment line ``# horizon_s = N``, the argument, or the last failure. Classes come
    from the column unless ``hof_ratio`` is given; without either the trace is refused. Raises TraceError.
    """
    file = Path(path)
    times: list[float] = []
    fatal: list[bool] = []
    header: list[str] | None = None
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise TraceError(f"{file}: cannot be read: {error}") from error
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if text.startswith("#"):
            name, _, value = text[1:].partition("=")
            if name.strip() == "horizon_s" and horizon_s is None:
                horizon_s = _positive(value, file, number)
            continue
        if not text:
            continue
        row = [cell.strip() for cell in next(csv.reader([text]))]
        if header is None:
            header = row
            if "time_s" not in header or set(header) - {"time_s", "class"}:
                raise TraceError(f"{file}:{number}: expected the columns time_s[,class], found {row}")
            continue
        if len(row) != len(header):
            raise TraceError(f"{file}:{number}: expected {len(header)} values, found {row}")
        cells = dict(zip(header, row, strict=True))
        times.append(_positive(cells["time_s"], file, number, zero=True))
        if hof_ratio is None:
            kind = cells.get("class", "").lower()
            if kind not in ("hof", "ff"):
                raise TraceError(
                    f"{file}:{number}: expected class hof or ff (or a HOF ratio), found {kind!r}"
                )
            fatal.append(kind == "ff")
    if header is None:
        raise TraceError(f"{file}: expected a header line with time_s, found no line at all")
    order = np.argsort(np.array(times), kind="stable")
    sorted_s = np.array(times, dtype=np.float64)[order]
    end = horizon_s if horizon_s is not None else (float(sorted_s[-1]) if times else 0.0)
    if end <= 0 or (times and sorted_s[-1] > end):
        raise TraceError(f"{file}: expected a horizon at or after the last failure, found {end} s")
    classes = (
        assign_classes(sorted_s, hof_ratio, seed) if hof_ratio is not None else np.array(fatal, bool)[order]
    )
    return Schedule(sorted_s, classes, end)


def _positive(text: str, file: Path, number: int, zero: bool = False) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise TraceError(f"{file}:{number}: expected a time in seconds, found {text.strip()!r}") from error
    if not math.isfinite(value) or value < 0 or (value == 0 and not zero):
        raise TraceError(f"{file}:{number}: expected a finite time of at least 0 s, found {value}")
    return value


def write_trace(path: str | Path, schedule: Schedule, comments: Sequence[str] = ()) -> None:
    """Write a schedule so that `read_trace` returns it (times to a millisecond)."""
    lines = [f"# {c}" for c in comments] + [f"# horizon_s = {schedule.horizon_s:g}", "time_s,class"]
    kinds = ("ff" if f else "hof" for f in schedule.fatal)
    lines += [f"{t:.3f},{k}" for t, k in zip(schedule.times_s.tolist(), kinds, strict=True)]
    Path(path).write_text("\n".join(lines) + "\n", encoding="utf-8")


def repeat_trace(schedule: Schedule, times: int) -> Schedule:
    """Return the trace played ``times`` times in a row, for a long-run figure from a short trace."""
    if times < 1:
        raise SimError(f"expected at least one repetition, found {times}")
    offsets = np.repeat(np.arange(times) * schedule.horizon_s, schedule.times_s.size)
    return Schedule(
        np.tile(schedule.times_s, times) + offsets, np.tile(schedule.fatal, times), schedule.horizon_s * times
    )


def spot_like_trace(
    seed: int, horizon_s: float = 4800.0, events: int = 8, hof_ratio: float = 0.5, burstiness: float = 0.35
) -> Schedule:
    """Return a trace shaped like evictions of cloud spot instances: irregular, with bursts and quiet
    stretches.

    Made by us, not measured. Gaps are gamma distributed with shape ``burstiness`` (1 would be Poisson; below
    it, more clustered) and scaled so that ``events`` fall within ``horizon_s``. The defaults have the outline
    that section 8.2 gives of its 80-minute GCP segment: eight events, one per ten minutes on average, half of
    them HOFs.
    """
    if events < 1 or burstiness <= 0:
        raise SimError(f"expected events >= 1 and burstiness > 0, found {events} and {burstiness}")
    gaps = np.random.default_rng([seed, 3]).gamma(burstiness, size=events + 1)
    times = np.round(np.cumsum(gaps)[:-1] / gaps.sum() * horizon_s, 3)
    return Schedule(times, assign_classes(times, hof_ratio, seed), horizon_s)


def bundled_trace() -> Schedule:
    """Return the GCP-spot-like trace shipped with the package (``examples/make_trace.py`` writes it)."""
    with resources.as_file(resources.files("leto_sim") / "data" / "gcp_spot_like.csv") as path:
        return read_trace(path)
