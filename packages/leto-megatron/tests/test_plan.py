"""The demo's failures: any seed gives a possible plan, and the seed moves every injection point."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leto_megatron.plan import Pool, make_drills
from leto_shadow.drills import dump_drills, parse_drills

NUMEL = 330_000


@given(seed=st.integers(0, 2**31 - 1), iterations=st.integers(10, 1000), numel=st.integers(1, 2_000_000))
def test_any_seed_gives_a_plan_that_can_be_carried_out(seed: int, iterations: int, numel: int) -> None:
    pool = Pool()
    drills = make_drills(seed, iterations, 2, numel, pool)
    assert list(drills) == ["kill-forward", "kill-update", "hang", "manager"]
    moments = [drill.iteration for drill in drills.values()]
    assert moments == sorted(set(moments)), "failures coincide or change places"
    assert moments[0] >= 1
    assert moments[-1] < iterations - 1, "nothing is trained after the last failure"
    update = drills["kill-update"]
    chunks = pool.chunks(numel)
    assert update.group is not None
    assert update.chunk is not None
    assert update.lose is not None
    assert 0 <= update.chunk < chunks[update.group]
    assert update.chunk > 0 or chunks[update.group] == 1, "no chunk was committed before the half-written one"
    assert 0 <= update.lose.group < len(chunks)
    assert (update.lose.pages, update.lose.tier1) == (pool.tier1_pages, 1)
    assert parse_drills(dump_drills(list(drills.values())), world_size=2) == tuple(drills.values())


def test_the_seed_moves_every_injection_point() -> None:
    plans = [make_drills(seed, 200, 2, NUMEL, Pool()) for seed in range(40)]
    for name in plans[0]:
        assert len({plan[name].iteration for plan in plans}) > 4
        assert {plan[name].rank for plan in plans} == {0, 1}
    updates = [plan["kill-update"] for plan in plans]
    assert len({(drill.group, drill.chunk) for drill in updates}) > 10
    assert len({drill.seed for drill in updates}) == len(plans)
    assert plans[3] == make_drills(3, 200, 2, NUMEL, Pool())


def test_too_short_a_run_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 10"):
        make_drills(1, 9, 2, NUMEL, Pool())


def test_chunks_agree_with_the_updater() -> None:
    from leto_rmp import PoolConfig
    from leto_rmu import Segment, UpdatePlan

    for pool in (Pool(), Pool(4096, 12, 3, 1), Pool(4096, 20, 16, 2)):
        config = PoolConfig(
            page_bytes=pool.page_bytes,
            data_pages=pool.data_pages,
            tier1_pages=pool.tier1_pages,
            tier2_pages=pool.tier2_pages,
        )
        for numel in (1, 5_000, NUMEL):
            for parts in (1, 2, 7, 100):
                # Uneven ones, in two hyperparameter groups, the last with what is left.
                sizes = [max(1, numel // parts // 2 + k) for k in range(min(parts, numel) - 1)]
                while sum(sizes) >= numel:
                    sizes.pop()
                sizes.append(numel - sum(sizes))
                segments = [Segment(f"w{k}", size, group=k % 2) for k, size in enumerate(sizes)]
                plan = UpdatePlan(segments, config=config, grad_numel=numel)
                assert pool.chunks(numel) == [plan.chunks_in(group) for group in range(plan.groups)]
