"""The demo's failures: any seed gives a possible plan, and the seed moves every injection point."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leto_megatron.config import Config
from leto_megatron.plan import Pool, make_drills
from leto_rmu.geometry import Rotation
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
    geometry = pool.geometry(numel, 2)
    chunks = [geometry.chunks_in(group) for group in range(geometry.groups)]
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


@given(seed=st.integers(0, 2**31 - 1), iterations=st.integers(10, 1000), numel=st.integers(40_000, 2_000_000))
def test_every_lost_page_matters_where_chunks_move(seed: int, iterations: int, numel: int) -> None:
    """No page of the slot that is free at the moment of the failure is among those that are lost."""
    pool, config = Pool(4096, 48, 16, 1), Config(scheme="slots")
    update = make_drills(seed, iterations, 2, numel, pool, config)["kill-update"]
    assert update.group is not None
    assert update.chunk is not None
    assert update.lose is not None
    geometry = pool.geometry(numel, 2, config)
    chunk = update.group * geometry.chunks_per_group + update.chunk
    moved = Rotation(update.iteration % geometry.slots, chunk)
    held = {geometry.slot(c, moved) for c in range(geometry.chunks)}
    [free] = set(range(geometry.slots)) - held
    assert free == geometry.slot(chunk, Rotation(geometry.turned(moved.turn)))
    first = update.lose.group * geometry.chunks_per_group
    lost = range(first, min(first + geometry.chunks_per_group, geometry.slots))
    assert free not in lost
    assert len(lost) * geometry.pages_per_chunk >= pool.tier1_pages
