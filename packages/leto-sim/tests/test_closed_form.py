"""Properties of equations 1 to 8: range, monotony, refusal, and Leto at a HOF ratio of 0."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from leto_sim import RecoveryTooSlowError, SimError, evaluate, gemini, jit_ckpt, leto
from leto_sim.ettr import effective_iteration_s, ettr, evaluate_at, lost_iterations, recovery_s

iterations = st.floats(0.05, 60)
mttfs = st.floats(30, 1e6)
ratios = st.floats(0, 1)
intervals = st.integers(1, 64)
stalls = st.floats(0, 20)
starts = st.floats(0, 120)


def value(
    iteration_s: float,
    mttf_s: float,
    ratio: float,
    interval: int,
    stall_s: float,
    init_s: float,
    omega: float,
) -> float:
    base = gemini(initialize_s=init_s, checkpoint_stall_s=stall_s)
    ours = leto(base, initialize_s=init_s / 2, overhead_fraction=omega)
    try:
        return evaluate(ours, iteration_s, mttf_s, ratio, interval).ettr
    except RecoveryTooSlowError:
        assume(False)
        raise


@given(iterations, mttfs, ratios, intervals, stalls, starts, st.floats(0, 0.5))
def test_ettr_lies_in_0_to_1(t: float, m: float, h: float, i: int, c: float, r: float, w: float) -> None:
    assert 0 < value(t, m, h, i, c, r, w) <= 1


@given(iterations, mttfs, st.floats(1, 10), ratios, intervals, stalls, starts)
def test_ettr_does_not_fall_when_failures_are_rarer(
    t: float, m: float, k: float, h: float, i: int, c: float, r: float
) -> None:
    assert value(t, m * k, h, i, c, r, 0.01) >= value(t, m, h, i, c, r, 0.01) - 1e-12


@given(iterations, mttfs, ratios, intervals, stalls, starts, st.floats(0, 30))
def test_ettr_does_not_rise_when_recovery_is_slower(
    t: float, m: float, h: float, i: int, c: float, r: float, more: float
) -> None:
    slower = value(t, m, h, i, c, r + more, 0.01)
    assert slower <= value(t, m, h, i, c, r, 0.01) + 1e-12


@given(iterations, mttfs, ratios, intervals, stalls, starts, st.floats(0, 0.3), st.floats(0, 0.3))
def test_ettr_does_not_rise_with_overhead(
    t: float, m: float, h: float, i: int, c: float, r: float, w: float, more: float
) -> None:
    assert value(t, m, h, i, c, r, w + more) <= value(t, m, h, i, c, r, w) + 1e-12


@given(iterations, mttfs, intervals, stalls, starts, st.floats(0, 0.3))
def test_a_hof_ratio_of_0_is_the_fallback_plus_overhead(
    t: float, m: float, i: int, c: float, r: float, w: float
) -> None:
    base = gemini(initialize_s=r, checkpoint_stall_s=c)
    ours = leto(base, initialize_s=1.0, overhead_fraction=w)
    try:
        got = evaluate(ours, t, m, 0.0, i)
    except RecoveryTooSlowError:
        assume(False)
        raise
    # The fallback at an iteration that is longer by omega, against the reference that is not.
    same = evaluate(base, t * (1 + w), m, 0.0, i)
    assert got.ettr == pytest.approx(same.ettr / (1 + w), rel=1e-12)
    if w == 0:
        assert got.ettr == evaluate(base, t, m, 0.0, i).ettr


@given(iterations, ratios, intervals, stalls, starts, st.floats(0, 1))
def test_recovery_that_is_not_below_the_mttf_is_refused(
    t: float, h: float, i: int, c: float, r: float, share: float
) -> None:
    base = gemini(initialize_s=r, checkpoint_stall_s=c)
    needed = evaluate(base, t, 1e12, h, i).recovery_s
    with pytest.raises(RecoveryTooSlowError, match="below the mean time to failure") as caught:
        evaluate(base, t, needed * share if share else needed, h, i)
    assert caught.value.recovery_s == pytest.approx(needed)


def test_refusal_names_the_first_offender_of_an_array() -> None:
    with pytest.raises(RecoveryTooSlowError, match=r"found 9 s against 5 s"):
        ettr(1.0, 1.0, np.array([1.0, 9.0]), 5.0)


def test_lost_iterations_are_i_over_2_plus_1() -> None:
    # Between 1 and I completed iterations are lost, evenly, and half of the one in flight.
    for interval in range(1, 40):
        mean = sum(range(1, interval + 1)) / interval + 0.5
        assert lost_iterations(interval) == pytest.approx(mean) == pytest.approx(interval / 2 + 1)
    assert lost_iterations(1, lag=0) == 0.5  # JIT-Ckpt: a replica has the last completed iteration


def test_each_equation_by_hand() -> None:
    effective = effective_iteration_s(10.0, 5, 2.0, 0.01)
    assert effective == pytest.approx(10.5)
    recovery = recovery_s(1.0, 30.0, 3.5, effective)
    assert recovery == pytest.approx(67.75)
    assert ettr(10.0, effective, recovery, 600.0) == pytest.approx(10 / 10.5 * (1 - 67.75 / 600))


def test_the_losses_add_up(pair: tuple) -> None:
    for system in pair:
        e = evaluate(system, 10.0, 600.0, 0.4)
        assert 1 - e.ettr == pytest.approx(e.overhead_loss + e.recovery_loss)
        assert e.recovery_s == pytest.approx(0.4 * e.recovery_hof_s + 0.6 * e.recovery_ff_s)


def test_more_hofs_help_leto_and_leave_gemini_plus_alone(pair: tuple) -> None:
    base, ours = pair
    values = [evaluate(ours, 10.0, 600.0, h, 8).ettr for h in (0, 0.25, 0.5, 0.75, 1)]
    assert values == sorted(values)
    assert values[0] < values[-1]
    assert len({evaluate(base, 10.0, 600.0, h).ettr for h in (0.0, 0.5, 1.0)}) == 1


def test_jit_ckpt_loses_half_an_iteration_and_has_no_steady_cost() -> None:
    e = evaluate(jit_ckpt(initialize_s=50.0), 6.0, 600.0, 1.0)
    assert (e.interval, e.effective_s, e.recovery_s) == (1, 6.0, pytest.approx(54.0))


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("iteration_s", (0.0, 600.0, 0.5, 4)),
        ("iteration_s", (math.nan, 600.0, 0.5, 4)),
        ("mttf_s", (1.0, -1.0, 0.5, 4)),
        ("mttf_s", (1.0, math.inf, 0.5, 4)),
        ("hof_ratio", (1.0, 600.0, 1.5, 4)),
        ("interval", (1.0, 600.0, 0.5, 0)),
    ],
)
def test_settings_out_of_range_are_named(pair: tuple, name: str, arguments: tuple) -> None:
    with pytest.raises(SimError, match=name):
        evaluate_at(pair[0], *arguments)


@pytest.mark.parametrize(
    "change",
    [{"detection_s": -1.0}, {"checkpoint_stall_s": math.inf}, {"initialize_s": math.nan}],
)
def test_systems_out_of_range_are_refused(change: dict) -> None:
    with pytest.raises(SimError, match="expected a finite number"):
        gemini(**{"initialize_s": 1.0, "checkpoint_stall_s": 1.0, **change})
