"""Schedules: Poisson statistics, common random numbers, traces and their errors."""

from __future__ import annotations

import runpy
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leto_sim import Schedule, SimError, TraceError, poisson_schedule, read_trace
from leto_sim.failures import (
    assign_classes,
    bundled_trace,
    repeat_trace,
    spot_like_trace,
    unit_arrivals,
    write_trace,
)

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_poisson_gaps_have_the_mttf_as_mean_and_deviation() -> None:
    s = poisson_schedule(600.0, 600.0 * 20_000, 0.3, seed=11)
    gaps = np.diff(s.times_s)
    assert gaps.mean() == pytest.approx(600.0, rel=0.03)
    assert gaps.std() == pytest.approx(600.0, rel=0.04)
    assert s.fatal.mean() == pytest.approx(0.7, abs=0.015)
    assert s.mttf_s == pytest.approx(600.0, rel=0.03)


def test_a_schedule_reaches_its_horizon() -> None:
    for seed in range(50):
        s = poisson_schedule(10.0, 300.0, 0.5, seed)
        more = poisson_schedule(10.0, 3000.0, 0.5, seed)
        assert np.array_equal(s.times_s, more.times_s[more.times_s < 300.0])


def test_one_seed_gives_the_same_luck_at_every_mttf_and_ratio() -> None:
    slow, fast = poisson_schedule(600.0, 60_000.0, 0.2, 4), poisson_schedule(60.0, 6_000.0, 0.8, 4)
    assert np.allclose(slow.times_s, fast.times_s * 10)
    assert not np.any(fast.fatal & ~slow.fatal)  # what is fatal among many HOFs is fatal among few
    assert not np.array_equal(unit_arrivals(9, 4, 0)[0], unit_arrivals(9, 4, 1)[0])


@given(st.integers(0, 40), st.floats(0, 1), st.integers(0, 99))
def test_classes_are_assigned_by_count(count: int, ratio: float, seed: int) -> None:
    fatal = assign_classes(np.arange(count, dtype=float), ratio, seed)
    assert abs((~fatal).sum() - ratio * count) <= 0.5 + 1e-9


def test_the_bundled_trace_is_what_its_script_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["make_trace.py", str(tmp_path / "t.csv")])
    names = runpy.run_path(str(EXAMPLES / "make_trace.py"), run_name="__main__")
    assert (tmp_path / "t.csv").read_bytes() == names["TARGET"].read_bytes()
    trace = bundled_trace()
    assert (trace.times_s.size, int(trace.fatal.sum()), trace.horizon_s) == (8, 4, 4800.0)
    assert trace.mttf_s == 600.0


def test_traces_are_written_and_read_back(tmp_path: Path) -> None:
    trace = spot_like_trace(3, horizon_s=9000.0, events=15, hof_ratio=0.4)
    write_trace(tmp_path / "t.csv", trace, ["a comment"])
    back = read_trace(tmp_path / "t.csv")
    assert np.array_equal(back.times_s, trace.times_s)
    assert np.array_equal(back.fatal, trace.fatal)
    assert back.horizon_s == 9000.0
    thrice = repeat_trace(back, 3)
    assert thrice.times_s.size == 45
    assert thrice.mttf_s == back.mttf_s


def test_a_trace_without_classes_takes_a_ratio(tmp_path: Path) -> None:
    file = tmp_path / "t.csv"
    file.write_text("time_s\n30\n10\n\n20\n")
    s = read_trace(file, hof_ratio=1.0)
    assert s.times_s.tolist() == [10.0, 20.0, 30.0]
    assert not s.fatal.any()
    assert s.horizon_s == 30.0


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "expected a header line"),
        ("when\n1\n", r"t\.csv:1: expected the columns time_s"),
        ("time_s,class\n1,hof\nx,ff\n", r"t\.csv:3: expected a time in seconds, found 'x'"),
        ("time_s,class\n-1,hof\n", r"t\.csv:2: expected a finite time of at least 0 s, found -1.0"),
        ("time_s,class\nnan,hof\n", r"t\.csv:2: expected a finite time"),
        ("time_s,class\n1,oops\n", r"t\.csv:2: expected class hof or ff .*found 'oops'"),
        ("time_s\n1\n", r"t\.csv:2: expected class hof or ff \(or a HOF ratio\), found ''"),
        ("time_s,class\n1\n", r"t\.csv:2: expected 2 values"),
        ("# horizon_s = 5\ntime_s,class\n9,ff\n", "expected a horizon at or after the last failure, found 5"),
        ("# horizon_s = 0\ntime_s,class\n", "expected a finite time of at least 0 s, found 0.0"),
    ],
)
def test_bad_traces_name_the_line_and_the_value(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "t.csv"
    file.write_text(text)
    with pytest.raises(TraceError, match=message):
        read_trace(file)


def test_a_missing_trace_is_named(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"none\.csv: cannot be read"):
        read_trace(tmp_path / "none.csv")


@pytest.mark.parametrize(
    ("times", "fatal", "horizon_s"),
    [
        ([2.0, 1.0], [True, True], 5.0),
        ([1.0], [True, False], 5.0),
        ([-1.0], [True], 5.0),
        ([1.0], [True], 0.0),
    ],
)
def test_bad_schedules_are_refused(times: list, fatal: list, horizon_s: float) -> None:
    with pytest.raises(SimError):
        Schedule(np.array(times), np.array(fatal), horizon_s)
