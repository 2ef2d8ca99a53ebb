"""The scheme "slots": chunks move, and every step is bit-equal to torch.optim wherever they are."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rmu_lab import MATRICES, LabMemory, Pool, World, Wrong

from leto_rmp import PageRef, PoolConfig
from leto_rmu import SGD, Action, AdamW, LayoutMismatch, Muon, PlanError, Segment, UpdatePlan, decide
from leto_rmu.geometry import Geometry, Rotation, good_chunk_pages

WORLDS: dict[str, dict[str, Any]] = {
    "adamw": {"pool": Pool(data_pages=8)},
    "two sub-blocks": {"pool": Pool(data_pages=17), "chunk_pages": 6},
    "sgd": {"pool": Pool(data_pages=8, tier1_pages=4, tier2_pages=0), "optimizer": SGD()},
    "not aligned": {"pool": Pool(data_pages=7), "align": False},
    "one chunk": {"segments": (Segment("a", 60, 0, 3),), "pool": Pool(data_pages=4)},
    **(
        {
            "muon": {
                "pool": Pool(data_pages=8),
                "optimizer": Muon(AdamW()),
                "segments": MATRICES,
                "grad_numel": 450,
            }
        }
        if hasattr(torch.optim, "Muon")
        else {}
    ),
    "aligned in place": {"pool": Pool(data_pages=17), "chunk_pages": 6, "scheme": "undo", "align": True},
}


def world_of(name: str, **more: Any) -> World:
    return World(**{"scheme": "slots", **WORLDS[name], **more})


def test_the_papers_sizes() -> None:
    """H1 = 16: sub-blocks begin at multiples of 16, and a group has 64 of them, absent positions included."""
    config = PoolConfig(page_bytes=4096, data_pages=1024, tier1_pages=16, tier2_pages=1)
    for optimizer, pages in ((AdamW(), 15), (SGD(), 16)):
        plan = UpdatePlan(
            (Segment("a", 10_000_000),),
            optimizer,
            config=config,
            grad_numel=10_000_000,
            scheme="slots",
            chunk_pages=16 * pages,
        )
        geometry = plan.geometry
        assert (geometry.stride, geometry.subblocks, plan.chunks_per_group) == (16, 16, 4)
        assert plan.group_pages == 64 * pages
        assert [plan.position_of(2, "master", k) for k in (0, geometry.subrun)] == [512, 528]
        last = plan.plane_names[-1]
        assert plan.position_of(3, last, plan.run - 1) == 1023 - (16 - pages)
        present = [page for page in geometry.slot_pages(0) if page is not None]
        assert len(present) == len(set(present)) == plan.pages_per_chunk
        assert "undo" not in {spec.name for spec in plan.specs()}


def sized(numel: int, pool: PoolConfig, optimizer: Any = None, **more: Any) -> UpdatePlan:
    options = {"scheme": "slots", "config": pool, "grad_numel": numel, **more}
    return UpdatePlan((Segment("a", numel),), optimizer or AdamW(), **options)


@pytest.mark.parametrize(
    ("numel", "data_pages", "pages"),
    [
        (1_006_632_960, 1024, 240),
        (3_020_000_000, 1024, 240),
        (600_000_000, 960, 225),  # four chunks in a group, all of its 60 sub-blocks
        (400_000_000, 1024, 180),  # five chunks in a group, 60 of its 64 sub-blocks
        (3_020_000_000, 64, 60),  # what a group holds
        (25_000_000, 1024, 15),  # the state has 150 pages
        (1, 1024, 15),
    ],
)
def test_chunks_on_a_gpu_are_as_large_as_the_state_allows(numel: int, data_pages: int, pages: int) -> None:
    pool = PoolConfig(data_pages=data_pages, backend="cuda")
    plan = sized(numel, pool)
    assert plan.pages_per_chunk == pages
    assert plan.layout_hash == sized(numel, pool, chunk_pages=pages).layout_hash
    assert sized(numel, pool, chunk_pages=30).pages_per_chunk == 30
    # Wherever a chunk's size costs no time, or tolerance depends on it, chunks are small.
    assert sized(numel, dataclasses.replace(pool, backend="host")).pages_per_chunk == 15
    assert sized(numel, pool, scheme="undo").pages_per_chunk == 15
    assert sized(numel, pool, align=False).pages_per_chunk == 15


@settings(max_examples=300, deadline=None)
@given(
    numel=st.integers(1, 40_000_000_000),
    data_pages=st.integers(16, 4096),
    tier1_pages=st.integers(1, 16),
    page_mib=st.sampled_from([2, 4, 64, 2048]),
    optimizer=st.sampled_from([AdamW(), SGD()]),
)
def test_every_chunk_that_is_chosen_fits(
    numel: int, data_pages: int, tier1_pages: int, page_mib: int, optimizer: Any
) -> None:
    pool = PoolConfig(page_mib << 20, data_pages, tier1_pages, backend="cuda")
    plan = sized(numel, pool, optimizer)
    shape = plan.geometry
    assert plan.pages_per_chunk == good_chunk_pages(pool, plan.planes, numel)
    if shape.subblocks > 1:
        assert shape.positions_per_chunk * pool.page_bytes <= 1 << 29
        needed = -(-numel * 4 // (pool.page_bytes * shape.subrun)) * shape.subrun
        assert 8 * (shape.plane_pages - needed) <= needed, "free slot and padding"
        assert (shape.chunks_per_group + 1) * shape.positions_per_chunk > data_pages - shape.stride


@settings(max_examples=300, deadline=None)
@given(
    geometry=st.builds(
        Geometry,
        scheme=st.just("slots"),
        planes=st.integers(1, 3),
        subrun=st.integers(1, 4),
        subblocks=st.integers(1, 4),
        stride=st.integers(12, 16),
        chunks=st.integers(1, 20),
        chunks_per_group=st.integers(1, 7),
    ),
    steps=st.integers(0, 60),
    data=st.data(),
)
def test_rotations_are_what_moving_chunk_by_chunk_gives(
    geometry: Geometry, steps: int, data: st.DataObject
) -> None:
    """The slot of every chunk in every state, played through; positions and pages correspond one to one."""
    places, free = list(range(geometry.chunks)), geometry.chunks
    turn = 0
    for _ in range(steps):
        for c in range(geometry.chunks):
            places[c], free = free, places[c]
        turn = geometry.turned(turn)
    moved = data.draw(st.integers(0, geometry.chunks))
    for c in range(moved):
        places[c], free = free, places[c]
    at = Rotation(turn, moved)
    assert [geometry.slot(c, at) for c in range(geometry.chunks)] == places
    pages = [page for g in range(geometry.groups) for page in geometry.group_pages(g, at) if page is not None]
    every = {
        p * geometry.plane_pages + s * geometry.run + k
        for p in range(geometry.planes)
        for s in places
        for k in range(geometry.run)
    }
    assert len(pages) == len(set(pages))
    assert set(pages) == every
    group = geometry.group_pages(0, at)
    for c in range(geometry.chunks_in(0)):
        for p in range(geometry.planes):
            for k in range(geometry.run):
                page = p * geometry.plane_pages + places[c] * geometry.run + k
                assert group[geometry.position_of(c, p, k)] == page
    assert Geometry.decode(geometry.encode()) == geometry


def test_a_segment_is_in_few_pieces() -> None:
    world = world_of("adamw")
    _, up = world.start()
    seen = set()
    for _ in range(8):
        world.iterate(up)
        for s in world.plan.segments:
            pieces = up.pieces(s.name, "exp_avg")
            seen.add(len(pieces))
            ends = [at + piece.numel() for at, piece in pieces]
            assert [at for at, _ in pieces] == [0, *ends[:-1]]
            assert ends[-1] == s.numel
    assert seen == {1, 2}
    for call in (lambda: up.master("a"), lambda: up.state("a", "exp_avg")):
        with pytest.raises(PlanError, match="use read"):
            call()


def test_a_checkpoint_is_taken_over_with_any_number_of_steps() -> None:
    """Where chunks are does not depend on the steps behind them; going on is bit-equal."""
    world = world_of("two sub-blocks", no_ops=frozenset({2}))
    _, up = world.start()
    world.train(up, 5)
    other = LabMemory(world.pool)  # type: ignore[arg-type]
    fresh = world.updater(other)
    recovered = fresh.recover(decide([fresh.summary(checkpoints=[5])]))
    assert (recovered.action, recovered.iteration) == (Action.CHECKPOINT, 5)
    for s in world.plan.segments:
        for plane in world.plan.plane_names:
            fresh.write(s.name, plane, up.read(s.name, plane))
    fresh.initialize(5, world.job(5), steps=4, keep_state=True)
    world.origin = 4
    for _ in range(6):
        world.check(other, fresh)
        world.iterate(fresh)
    again = world.updater(other)
    again.recover(decide([again.summary()]))
    world.check(other, again)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"scheme": "log"}, "scheme must be"),
        ({"chunk_pages": 4}, "multiple of the 3 pages of an aligned sub-block"),
        ({"chunk_pages": 9}, "12 in the parity, does not fit a group"),
        ({"config": Pool(data_pages=3)}, "does not fit a group"),
    ],
)
def test_plans_that_cannot_be_laid_out_are_refused(change: dict[str, Any], why: str) -> None:
    with pytest.raises(PlanError, match=why):
        dataclasses.replace(world_of("adamw").plan, **change)


# --- mutants -------------------------------------------------------------------------------------------
def check_wraps() -> None:
    test_many_iterations_wrap_around_the_slots("adamw")


def check_layouts() -> None:
    """Memory of the same sizes whose positions are others is refused."""
    world, other = world_of("adamw"), world_of("adamw", align=False)
    memory, up = world.start()
    world.train(up, 2)
    try:
        found = other.updater(memory)
    except LayoutMismatch:
        return
    memory.lose([PageRef("arena", "data", 0)], seed=1)
    raise Wrong(f"opened memory of another geometry: {found.summary()!r}")


def wrong_slot(geometry: Geometry, chunk: int, rotation: Rotation) -> int:
    return (chunk - rotation.turn - (chunk < rotation.moved)) % geometry.chunks


def wrong_turn(geometry: Geometry, turn: int) -> int:
    return (turn + 1) % geometry.chunks


def no_geometry(plan: UpdatePlan) -> bytes:
    text = repr((plan.segments, plan.config, plan.optimizer.name, plan.pages_per_chunk))
    return hashlib.sha256(text.encode()).digest()


def test_the_product_passes_the_checks_of_the_mutants() -> None:
    check_wraps()
    check_layouts()


@pytest.mark.parametrize(
    ("owner", "name", "mutant", "check"),
    [
        (Geometry, "slot", wrong_slot, check_wraps),
        (Geometry, "turned", wrong_turn, check_wraps),
        (Geometry, "turned", lambda geometry, turn: turn + 2, check_wraps),
        (UpdatePlan, "layout_hash", property(no_geometry), check_layouts),
    ],
    ids=[
        "slots wrap one too early",
        "turns wrap one too early",
        "two slots a step",
        "rotation not in the layout",
    ],
)
def test_wrong_rotations_are_caught(
    owner: type, name: str, mutant: Any, check: Callable[[], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, name, mutant)
    with pytest.raises(Wrong):
        check()


@pytest.mark.parametrize("name", WORLDS)
def test_many_iterations_wrap_around_the_slots(name: str) -> None:
    world = world_of(name, no_ops=frozenset({3, 4}))
    memory, up = world.start()
    for _ in range(2 * world.chunks + 5):
        world.check(memory, up)
        world.iterate(up)
    world.check(memory, up)
