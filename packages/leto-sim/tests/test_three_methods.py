"""Closed form, exact chain and simulation: equal where the assumptions hold, apart where they do not."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leto_sim import RecoveryTooSlowError, System, evaluate, exact_ettr, gemini, leto, simulate_poisson
from leto_sim.renewal import restart_ettr

KINDS = [
    gemini(initialize_s=30.0, checkpoint_stall_s=3.0),
    leto(gemini(initialize_s=30.0, checkpoint_stall_s=3.0), initialize_s=14.0, overhead_fraction=0.006),
]


@pytest.mark.parametrize("system", KINDS, ids=lambda s: s.name)
@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
def test_all_three_agree_where_the_assumptions_hold(system: System, ratio: float) -> None:
    # MTTF of 4 hours against less than two minutes of recovery: overlaps are one in a hundred failures.
    interval, mttf_s = 12, 14_400.0
    closed = evaluate(system, 10.0, mttf_s, ratio, interval).ettr
    exact = exact_ettr(system, 10.0, mttf_s, ratio, interval)
    simulated = simulate_poisson(system, 10.0, mttf_s, ratio, interval, failures=2000, replicas=8, seed=3)
    assert closed == pytest.approx(exact, abs=2e-4)
    assert simulated.standard_error < 1e-3
    assert abs(simulated.ettr - exact) < 5 * simulated.standard_error + 1e-5
    assert simulated.during_recovery < 0.02 * simulated.failures


@pytest.mark.parametrize("system", KINDS, ids=lambda s: s.name)
@pytest.mark.parametrize("mttf_s", [100.0, 250.0, 600.0])
@pytest.mark.parametrize("ratio", [0.0, 0.3, 1.0])
def test_simulation_and_exact_chain_agree_at_any_mttf(system: System, mttf_s: float, ratio: float) -> None:
    exact = exact_ettr(system, 10.0, mttf_s, ratio, 6)
    simulated = simulate_poisson(system, 10.0, mttf_s, ratio, 6, failures=3000, replicas=8, seed=5)
    assert abs(simulated.ettr - exact) < 5 * simulated.standard_error + 1e-4


def test_the_closed_form_parts_when_recovery_nears_the_mttf() -> None:
    # It charges every failure a full recovery, although one that starts over has not run to its end.
    system, gaps = KINDS[0], []
    for mttf_s in (3600.0, 900.0, 300.0, 150.0, 110.0):
        closed = evaluate(system, 10.0, mttf_s, 1.0, 4).ettr
        exact = exact_ettr(system, 10.0, mttf_s, 1.0, 4)
        simulated = simulate_poisson(system, 10.0, mttf_s, 1.0, 4, failures=2000, replicas=8, seed=1)
        assert simulated.ettr - closed > (exact - closed) - 5 * simulated.standard_error - 1e-4
        gaps.append(exact - closed)
    assert gaps == sorted(gaps)
    assert gaps[0] < 0.001
    assert gaps[-1] > 0.1
    with pytest.raises(RecoveryTooSlowError):
        evaluate(system, 10.0, 60.0, 1.0, 4)
    assert exact_ettr(system, 10.0, 60.0, 1.0, 4) > 0.1


@given(st.floats(0.5, 30), st.floats(0, 60), st.floats(0, 0.1), st.floats(20, 5000), st.integers(1, 50))
def test_leto_with_hofs_alone_is_the_textbook_restart(t: float, d: float, w: float, m: float, i: int) -> None:
    # Nothing rolls back and checkpoints are free: each iteration is repeated until it passes.
    system = leto(gemini(initialize_s=9.0, checkpoint_stall_s=0.0), initialize_s=d, overhead_fraction=w)
    expected = restart_ettr(t, t * (1 + w), system.detection_s + d, m)
    assert exact_ettr(system, t, m, 1.0, i) == pytest.approx(expected, rel=1e-9)


@settings(max_examples=60)
@given(st.data())
def test_the_exact_ettr_lies_in_0_to_1_and_grows_with_the_mttf(
    any_system: st.SearchStrategy, data: st.DataObject
) -> None:
    system = data.draw(any_system)
    t, m = data.draw(st.floats(0.1, 30)), data.draw(st.floats(5, 1e5))
    h, k = data.draw(st.floats(0, 1)), data.draw(st.floats(1, 5))
    i = system.fixed_interval_iterations or data.draw(st.integers(1, 64))
    low, high = exact_ettr(system, t, m, h, i), exact_ettr(system, t, m * k, h, i)
    assert 0 <= low <= high + 1e-9
    assert high <= 1


@given(st.floats(1, 30), st.floats(0, 20), st.floats(0, 60), st.floats(50, 5000), st.integers(1, 30))
def test_a_hof_ratio_of_0_is_the_fallback_by_every_method(
    t: float, c: float, r: float, m: float, i: int
) -> None:
    base = gemini(initialize_s=r, checkpoint_stall_s=c)
    ours = leto(base, initialize_s=r / 3, overhead_fraction=0.0)
    assert exact_ettr(ours, t, m, 0.0, i) == pytest.approx(exact_ettr(base, t, m, 0.0, i), rel=1e-12)
    one, two = (simulate_poisson(s, t, m, 0.0, i, failures=20, replicas=2) for s in (base, ours))
    assert one == two


def test_the_exact_chain_gives_0_rather_than_overflow() -> None:
    assert exact_ettr(KINDS[0], 1000.0, 1.0, 0.5, 64) == 0.0
    assert exact_ettr(gemini(initialize_s=1e5, checkpoint_stall_s=0.0), 1.0, 1.0, 0.0, 1) == 0.0


def test_seeds_reproduce_and_differ() -> None:
    one, two, other = (
        simulate_poisson(KINDS[1], 10.0, 600.0, 0.5, 8, seed=s, failures=100) for s in (7, 7, 8)
    )
    assert one == two
    assert one.ettr != other.ettr
