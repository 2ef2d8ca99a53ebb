"""Checkpoint intervals: Young's formula, the numerically best one, and the paper's tuned ones."""

from __future__ import annotations

import math

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from leto_sim import (
    RecoveryTooSlowError,
    SimError,
    best_interval,
    best_interval_exact,
    evaluate,
    exact_ettr,
    gemini,
    jit_ckpt,
    leto,
    load_profile,
    tuned_interval,
    young_interval,
)
from leto_sim.paper import TABLE_4_INTERVALS, TABLE_6, table_4_stall_range_s


def test_young_by_hand() -> None:
    assert young_interval(3.0, 600.0, 12.0) == pytest.approx(5.0)
    assert young_interval(0.0, 600.0, 12.0) == 0.0
    assert young_interval(3.0, math.inf, 12.0) == math.inf
    with pytest.raises(SimError, match="expected iteration_s > 0"):
        young_interval(3.0, 600.0, 0.0)


@pytest.mark.parametrize(("ratio", "interval"), [(0.0, 5), (1 / 3, 6), (2 / 3, 9), (1.0, 16)])
def test_the_ff_rate_gives_the_intervals_of_section_8_2(ratio: float, interval: int) -> None:
    # OLMoE: 5, 6 and 9 iterations at 0, 33.3 and 66.7 % HOFs; at 100 % the largest tested, 16.
    profile = load_profile("olmoe-4")
    assert tuned_interval(profile.systems()["leto"], 12.002, 600.0, ratio) == interval
    assert tuned_interval(profile.systems()["gemini+"], 12.002, 600.0, ratio) == 5


@pytest.mark.parametrize("model", TABLE_4_INTERVALS)
def test_one_stall_explains_the_three_intervals_of_table_4(model: str) -> None:
    low, high = table_4_stall_range_s(model)
    assert low < high
    system = gemini(initialize_s=1.0, checkpoint_stall_s=(low + high) / 2)
    found = tuple(tuned_interval(system, TABLE_6[model][1], m, 0.5) for m in (600.0, 1800.0, 3600.0))
    assert found == TABLE_4_INTERVALS[model]


@settings(max_examples=50)
@given(st.floats(1, 30), st.floats(0.05, 10), st.floats(0, 60), st.floats(600, 20000), st.floats(0, 0.95))
def test_the_best_interval_is_the_best_of_all(t: float, c: float, r: float, m: float, h: float) -> None:
    base = gemini(initialize_s=r, checkpoint_stall_s=c, interval_max_iterations=48)
    for system in (base, leto(base, initialize_s=r / 2, overhead_fraction=0.005)):
        values = {}
        for i in range(1, 49):
            try:
                values[i] = evaluate(system, t, m, h, i).ettr
            except RecoveryTooSlowError:
                continue
        assume(values)
        assert values[best_interval(system, t, m, h)] == max(values.values())
        exact = best_interval_exact(system, t, m, h)
        best = max(exact_ettr(system, t, m, h, i) for i in range(1, 49))
        assert exact_ettr(system, t, m, h, exact) == pytest.approx(best, abs=1e-9)


def test_young_is_close_to_the_best(pair: tuple) -> None:
    for system in pair:
        for mttf_s in (600.0, 1800.0, 7200.0):
            best = evaluate(system, 10.0, mttf_s, 0.5, best_interval(system, 10.0, mttf_s, 0.5)).ettr
            assert evaluate(system, 10.0, mttf_s, 0.5).ettr == pytest.approx(best, abs=3e-4)


def test_intervals_without_a_choice() -> None:
    jit = jit_ckpt(initialize_s=1.0)
    assert tuned_interval(jit, 1.0, 600.0, 0.5) == best_interval(jit, 1.0, 600.0, 0.5) == 1
    free = gemini(initialize_s=1.0, checkpoint_stall_s=0.0)
    assert tuned_interval(free, 1.0, 600.0, 0.5) == 1
    with pytest.raises(RecoveryTooSlowError):
        best_interval(gemini(initialize_s=700.0, checkpoint_stall_s=1.0), 1.0, 600.0, 0.5)
