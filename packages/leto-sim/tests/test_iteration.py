"""Iteration time: pipeline, queue and collectives by hand, by brute force and by their properties."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leto_sim import ProfileError, SimError, iteration_time, load_profile
from leto_sim.collectives import Collective, PointToPoint, fit_point_to_point
from leto_sim.overlap import (
    Bucket,
    bucket_parameters,
    buckets_of,
    calibrate_dense,
    calibrate_moe,
    exposed_s,
    sync_with_overlap_s,
)
from leto_sim.pipeline import Bracket, Stage, pipeline_s, stage_transfers, stages_of

BODY = Bracket("body", forward_ms=20.0, backward_ms=40.0, parameters=1e6)


def test_pipeline_by_hand() -> None:
    # (M + (S - 1)/v) * (v brackets of 60 ms): 8 microbatches, 4 stages, 2 chunks.
    stages = stages_of([BODY, BODY], 4)
    assert pipeline_s(stages, 8) == pytest.approx((8 + 3 / 2) * 0.120)
    # The head makes the last stage the bottleneck; it sends one gradient less than the inner stages send.
    stages = stages_of([BODY, BODY], 4, embedding_s=0.001, head_s=0.010)
    assert pipeline_s(stages, 8, transfer_s=0.002) == pytest.approx(9.5 * (0.120 + 0.010 + 3 * 0.002))


def one_f_one_b_s(microbatches: int, stages: int, forward_s: float, backward_s: float) -> float:
    """Brute force: the end of a 1F1B schedule of equal stages without transfers, event by event."""
    order = []
    for s in range(stages):
        warm = min(stages - 1 - s, microbatches)
        mine = [("F", i) for i in range(warm)]
        for i in range(microbatches - warm):
            mine += [("F", warm + i), ("B", i)]
        order.append(mine + [("B", i) for i in range(microbatches - warm, microbatches)])
    end: dict[tuple[str, int, int], float] = {}
    free, position = [0.0] * stages, [0] * stages
    while any(position[s] < len(order[s]) for s in range(stages)):
        for s in range(stages):
            while position[s] < len(order[s]):
                kind, i = order[s][position[s]]
                source = (kind, i, s - 1 if kind == "F" else s + 1)
                first = (kind == "F" and s == 0) or (kind == "B" and s == stages - 1)
                if not first and source not in end:
                    break
                ready = 0.0 if kind == "F" and first else end[("F", i, s) if first else source]
                free[s] = max(free[s], ready) + (forward_s if kind == "F" else backward_s)
                end[kind, i, s] = free[s]
                position[s] += 1
    return max(free)


@given(st.integers(1, 12), st.integers(1, 6), st.floats(0.01, 1), st.floats(0.01, 2))
def test_pipeline_equals_a_1f1b_schedule_played_out(m: int, s: int, f: float, b: float) -> None:
    bracket = Bracket("x", f * 1e3, b * 1e3, 1.0)
    formula = pipeline_s(stages_of([bracket], s), m)
    played = one_f_one_b_s(m, s, f, b)
    assert formula == pytest.approx(played) if m >= s else played <= formula + 1e-9


def test_transfers_of_a_microbatch() -> None:
    assert stage_transfers(0, 1, 3) == 0
    assert [stage_transfers(i, 3, 1) for i in range(3)] == [1, 2, 1]
    assert [stage_transfers(i, 4, 2) for i in range(4)] == [3, 4, 4, 3]


def test_pipelines_that_cannot_be_scheduled_are_refused() -> None:
    with pytest.raises(SimError, match="multiple of 4 stages, found 6"):
        pipeline_s(stages_of([BODY, BODY], 4), 6)
    with pytest.raises(SimError, match="at least one stage"):
        pipeline_s([], 1)
    with pytest.raises(SimError, match=r"expected 1 brackets in every stage, found \[1, 2\]"):
        pipeline_s([Stage((BODY,)), Stage((BODY, BODY))], 2)


def test_bucket_sizes_are_megatrons() -> None:
    assert bucket_parameters(8) == 40e6
    assert bucket_parameters(40) == 40e6
    assert bucket_parameters(1024) == 1024e6
    assert buckets_of(100e6, 8).tolist() == [40e6, 40e6, 20e6]
    assert buckets_of(80e6, 8).tolist() == [40e6, 40e6]
    assert buckets_of(0, 8).size == 0


def test_the_queue_by_hand() -> None:
    buckets = [Bucket(1, 0.25, 3.0), Bucket(1, 0.5, 5.0), Bucket(2, 1.0, 4.0)]
    # r = 2, 4, 8 in a window of 8: f = 5, 10, 14.
    assert exposed_s(buckets, 8.0) == pytest.approx(6.0)
    assert exposed_s(buckets, 0.0) == pytest.approx(12.0)
    assert exposed_s([], 5.0) == 0.0


@given(st.lists(st.tuples(st.floats(0.01, 1), st.floats(0, 5)), min_size=1, max_size=20), st.floats(0, 50))
def test_the_queue_equals_its_longest_path(rows: list, window: float) -> None:
    buckets = [Bucket(1.0, share, transfer) for share, transfer in rows]
    # Max-plus form: some bucket finds the channel idle, and from it on the channel never rests.
    order = sorted(buckets, key=lambda b: b.ready_fraction)
    paths = [b.ready_fraction * window + sum(c.transfer_s for c in order[i:]) for i, b in enumerate(order)]
    assert exposed_s(buckets, window) == pytest.approx(max(0.0, max(paths) - window))
    total = sum(b.transfer_s for b in buckets)
    assert 0 <= exposed_s(buckets, window) <= total + 1e-9
    assert exposed_s(buckets, window) <= exposed_s(buckets, window / 2) + 1e-9 + window / 2


@given(st.floats(0.1, 20), st.floats(0.1, 20), st.floats(0, 1), st.floats(0.1, 10))
def test_interference_lies_between_nothing_and_everything(
    w: float, serial: float, c: float, a: float
) -> None:
    buckets = [Bucket(1, 0.5, serial / 2), Bucket(1, 1.0, serial / 2)]
    exposed = exposed_s(buckets, w)
    dense = sync_with_overlap_s(buckets, w, serial, dense_constant=c)
    assert exposed - 1e-12 <= dense <= serial + 1e-9
    moe = sync_with_overlap_s(buckets, w, serial, moe_constant=c, alltoall_s=a)
    assert c * min(serial, a) - 1e-9 <= moe <= exposed + c * min(serial, a) + 1e-9


@given(st.floats(1, 10), st.floats(0, 0.9), st.floats(0.01, 1), st.floats(0.1, 5))
def test_calibration_returns_the_constant_that_made_the_measurement(
    sync: float, part: float, c: float, a: float
) -> None:
    exposed = sync * part
    on = exposed + c * (sync - exposed)
    assert calibrate_dense(sync, exposed, 100.0 + sync, 100.0 + on) == pytest.approx(c, abs=1e-6)
    on = exposed + c * min(sync, a)
    assert calibrate_moe(sync, a, exposed, 100.0 + sync, 100.0 + on) == pytest.approx(c, abs=1e-6)


def test_calibration_refuses_what_overlap_cannot_explain() -> None:
    with pytest.raises(SimError, match=r"expected c in \[0, 1\], found"):
        calibrate_dense(2.0, 1.0, 10.0, 15.0)
    with pytest.raises(SimError, match="some hidden communication"):
        calibrate_dense(2.0, 2.0, 10.0, 10.0)
    with pytest.raises(SimError, match="one interference constant, found both"):
        sync_with_overlap_s([], 1.0, 1.0, dense_constant=0.1, moe_constant=0.1)
    with pytest.raises(SimError, match=r"dense_constant in \[0, 1\], found 2"):
        sync_with_overlap_s([], 1.0, 1.0, dense_constant=2)


def test_collectives_by_hand_and_by_fit() -> None:
    ring = Collective(latency_us=10, bandwidth_gb_per_s=100, algorithm="ring")
    tree = dataclasses.replace(ring, algorithm="tree")
    assert ring.one_pass_s(1e9, 5) == pytest.approx(4 * 10e-6 + 0.8 * 1e9 / 100e9)
    assert tree.one_pass_s(1e9, 5) == pytest.approx(3 * 10e-6 + 0.8 * 1e9 / 100e9)
    assert ring.all_reduce_s(1e9, 5) == 2 * ring.one_pass_s(1e9, 5)
    assert ring.one_pass_s(1e9, 1) == tree.one_pass_s(1e9, 1) == 0.0
    link = PointToPoint(12.0, 40.0)
    sizes = [1e4, 1e6, 1e8]
    fitted = fit_point_to_point(sizes, [link.time_s(n) for n in sizes])
    assert fitted.latency_us == pytest.approx(12.0)
    assert fitted.bandwidth_gb_per_s == pytest.approx(40.0)
    with pytest.raises(SimError, match="do not grow with size"):
        fit_point_to_point([1.0, 2.0], [2.0, 1.0])
    with pytest.raises(SimError, match="two different sizes"):
        fit_point_to_point([1.0, 1.0], [2.0, 1.0])


def test_a_stage_profile_scales_to_131072_gpus() -> None:
    profile = load_profile("example-stage")
    results = [iteration_time(profile.scaled(d)) for d in (8, 64, 512, 1024)]
    assert [profile.scaled(d).gpus for d in (8, 1024)] == [1024, 131_072]
    assert results[0] == iteration_time(profile)
    # Weak scaling: compute stays, communication grows.
    assert len({r.pipeline_s for r in results}) == 1
    totals = [r.total_s for r in results]
    assert totals == sorted(totals)
    assert totals[-1] < 1.1 * totals[0]
    for r in results:
        assert r.total_s == pytest.approx(r.pipeline_s + r.sync_s + r.update_s)
        # At worst nothing overlaps: all transfers, slowed by each other, and the interference on top.
        assert 0 <= r.sync_s <= 1.2 * r.sync_serial_s + 0.4 * min(r.sync_serial_s, 0.018) + 1e-9


def test_terms_of_the_example_stage_by_hand() -> None:
    r = iteration_time(load_profile("example-stage"))
    transfer = 12e-6 + 8388608 / 40e9
    last = 2 * 65e-3 + 6e-3 + 3 * transfer
    assert r.microbatches == 64
    assert r.pipeline_s == pytest.approx((64 + 15 / 2) * last)
    # Dense 60M over dp 8 in buckets of 40M and 20M, experts 800M over 8 * 8 / 16 = 4 ranks in 20 of 40M.
    ring = Collective(20, 40, "ring")
    dense = ring.one_pass_s(160e6, 8) + ring.one_pass_s(80e6, 8)
    assert r.sync_serial_s == pytest.approx(dense + 20 * ring.one_pass_s(160e6, 4))
    local = 60e6 / 8 + 800e6 / 4
    gathers = ring.one_pass_s(120e6, 8) + ring.one_pass_s(1600e6, 4)
    assert r.update_s == pytest.approx(2e-3 + 10 * 30e-6 + local * 0.012e-9 + gathers)


def test_a_stated_iteration_time_is_taken_and_cannot_be_scaled() -> None:
    profile = load_profile("kimi-moe-64")
    assert iteration_time(profile).total_s == 9.097
    with pytest.raises(ProfileError, match="bracket: missing, expected a stage profile"):
        profile.scaled(8)
