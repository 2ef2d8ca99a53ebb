"""The simulation against its naive twin, and against schedules worked out by hand."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leto_sim import Lane, Schedule, SimError, gemini, leto, poisson_schedule, simulate
from leto_sim.reference import simulate_reference

BASE = gemini(initialize_s=19.0, checkpoint_stall_s=2.0, detection_s=1.0)
PLUS = dataclasses.replace(
    gemini(initialize_s=9.0, checkpoint_stall_s=2.0, plus=True), initialize_hof_cold_s=49.0
)
LETO = leto(BASE, initialize_s=4.0, overhead_fraction=0.0, initialize_cold_s=30.0)


def schedule(*failures: tuple[float, str], horizon_s: float = 1000.0) -> Schedule:
    return Schedule(np.array([f[0] for f in failures]), np.array([f[1] == "ff" for f in failures]), horizon_s)


@settings(max_examples=200)
@given(st.data())
def test_every_run_equals_the_naive_simulator(any_system: st.SearchStrategy, data: st.DataObject) -> None:
    lanes = []
    for _ in range(data.draw(st.integers(1, 4))):
        system = data.draw(any_system)
        mttf_s, seed = data.draw(st.floats(20, 2000)), data.draw(st.integers(0, 10**6))
        # The odd factor keeps the horizon off exact ends of iterations, where rounding alone would decide.
        horizon_s = mttf_s * data.draw(st.integers(1, 25)) * 1.00712389
        failures = poisson_schedule(mttf_s, horizon_s, data.draw(st.floats(0, 1)), seed)
        lanes.append(
            Lane(
                system,
                data.draw(st.floats(0.5, 20)),
                system.fixed_interval_iterations or data.draw(st.integers(1, 12)),
                failures,
                data.draw(st.none() | st.integers(1, 3)),
                data.draw(st.floats(0, 1500)),
                data.draw(st.sampled_from([0.0, 40.0])),
            )
        )
    for lane, got in zip(lanes, simulate(lanes), strict=True):
        expected = simulate_reference(lane)
        for field in dataclasses.fields(expected):
            assert getattr(got, field.name) == pytest.approx(
                getattr(expected, field.name), rel=1e-9, abs=1e-5
            ), field.name


def test_a_run_without_failures_costs_its_checkpoints_only() -> None:
    # Iterations 6, 11, ... (the one after every fifth) take 2 s more: 1 + 5k iterations end at 10 (1 + 5k) +
    # 2k.
    r = simulate([Lane(BASE, 10.0, 5, schedule(horizon_s=530.0))])[0]
    assert (r.iterations, r.elapsed_s, r.failures) == (51, 530.0, 0)
    assert r.ettr == pytest.approx(510 / 530)


def test_a_hof_of_leto_loses_the_iteration_in_flight_only() -> None:
    r = simulate([Lane(LETO, 10.0, 50, schedule((57.0, "hof"), horizon_s=200.0))])[0]
    # 5 done at 50, 7 s lost, back after 5 s at 62; 13 more by 192.
    assert (r.iterations, r.elapsed_s, r.lost_s, r.downtime_s) == (
        18,
        192.0,
        pytest.approx(7.0),
        pytest.approx(5.0),
    )


def test_a_rollback_goes_to_the_newest_usable_checkpoint() -> None:
    # Interval 2: the checkpoint of iteration 4 is usable at the end of iteration 5, at 10 * 5 + 2 * 2 = 54 s.
    early, late = (
        simulate([Lane(BASE, 10.0, 2, schedule((t, "ff"), horizon_s=t + 20.0 + 10.0))])[0]
        for t in (53.9, 54.1)
    )
    assert (early.iterations, late.iterations) == (2 + 1, 4 + 1)


def test_a_failure_during_recovery_starts_it_again() -> None:
    once, twice = (
        simulate([Lane(LETO, 10.0, 50, schedule(*f, horizon_s=200.0))])[0]
        for f in ([(50.0, "hof")], [(50.0, "hof"), (53.0, "hof")])
    )
    assert twice.during_recovery == 1
    assert (once.downtime_s, twice.downtime_s) == (pytest.approx(5.0), pytest.approx(8.0))
    assert twice.lost_s == once.lost_s == 0.0


def test_a_fatal_recovery_stays_fatal() -> None:
    r = simulate([Lane(LETO, 10.0, 50, schedule((55.0, "ff"), (60.0, "hof"), horizon_s=200.0))])[0]
    assert r.downtime_s == pytest.approx(25.0)  # 5 s, then 20 s again: nothing is retained yet
    r = simulate([Lane(LETO, 10.0, 50, schedule((55.0, "hof"), (57.0, "ff"), horizon_s=200.0))])[0]
    assert r.downtime_s == pytest.approx(22.0)
    assert r.iterations == (200 - 77) // 10  # rolled back to the start


def test_spares_run_out_and_come_back() -> None:
    failures = schedule((100.0, "ff"), (200.0, "ff"), horizon_s=1000.0)
    plenty = simulate([Lane(BASE, 10.0, 50, failures, spares=2, repair_s=500.0)])[0]
    one = simulate([Lane(BASE, 10.0, 50, failures, spares=1, repair_s=500.0)])[0]
    assert plenty.wait_s == 0.0
    assert one.wait_s == pytest.approx(400.0)  # the node that failed at 100 is a spare again at 600
    assert one.downtime_s == pytest.approx(plenty.downtime_s + 400.0)
    assert one.ettr < plenty.ettr


def test_a_plus_system_without_a_free_spare_restarts_a_hof_in_place_and_cold() -> None:
    failures = schedule((100.0, "ff"), (200.0, "hof"), horizon_s=1000.0)
    free = simulate([Lane(PLUS, 10.0, 50, failures)])[0]
    bound = simulate([Lane(PLUS, 10.0, 50, failures, spares=1, repair_s=500.0)])[0]
    assert bound.downtime_s == pytest.approx(free.downtime_s + 40.0)
    waits = dataclasses.replace(PLUS, initialize_hof_cold_s=None)
    waiting = simulate([Lane(waits, 10.0, 50, failures, spares=1, repair_s=500.0)])[0]
    assert waiting.wait_s == pytest.approx(400.0)


def test_a_hof_before_the_next_shadow_is_ready_is_a_cold_one() -> None:
    failures = schedule((100.0, "hof"), (120.0, "hof"), (400.0, "hof"), horizon_s=1000.0)
    ready = simulate([Lane(LETO, 10.0, 50, failures)])[0]
    late = simulate([Lane(LETO, 10.0, 50, failures, shadow_rebuild_s=60.0)])[0]
    assert ready.downtime_s == pytest.approx(15.0)
    assert late.downtime_s == pytest.approx(15.0 + 26.0)


def test_a_job_that_never_completes_an_iteration_has_an_ettr_of_0() -> None:
    r = simulate([Lane(BASE, 10.0, 5, schedule((5.0, "ff"), (20.0, "ff"), horizon_s=40.0))])[0]
    assert (r.ettr, r.iterations) == (0.0, 0)


def test_lanes_do_not_touch_each_other() -> None:
    lanes = [
        Lane(s, 7.0, i, poisson_schedule(200.0, 9000.0, 0.5, i), spares=i)
        for i in (1, 2, 3)
        for s in (BASE, LETO)
    ]
    assert simulate(lanes) == [simulate([lane])[0] for lane in lanes]
    assert simulate([]) == []


@pytest.mark.parametrize(
    "change",
    [{"interval": 0}, {"iteration_s": 0.0}, {"spares": 0}, {"repair_s": -1.0}, {"shadow_rebuild_s": -1.0}],
)
def test_bad_lanes_are_refused(change: dict) -> None:
    good = {"system": BASE, "iteration_s": 1.0, "interval": 1, "schedule": schedule()}
    with pytest.raises(SimError, match=r"expected|finite"):
        Lane(**{**good, **change})
