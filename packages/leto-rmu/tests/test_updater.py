"""The updater as a trainer sees it: order of calls, errors, derived state, silent corruption, fallbacks."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from rmu_lab import LabMemory, Pool, World

from leto_rmp import AllocationSpec, Kind, PageRef
from leto_rmu import (
    Action,
    ArrayMemory,
    Decision,
    DecisionError,
    Hyper,
    JobStateTooLarge,
    LayoutMismatch,
    PlanError,
    ProtocolError,
    ResumableUpdater,
    Segment,
    Summary,
    SyncResult,
    UpdatePlan,
    cast_masters,
    decide,
)
from leto_rmu.faults import StopAt, Stopped, at
from leto_rmu.geometry import Rotation
from leto_rmu.views import RankMemory


def reopen(world: World, memory: LabMemory, **more: object) -> ResumableUpdater:
    return ResumableUpdater(memory, world.plan, lambda: None, **more)  # type: ignore[arg-type]


def test_fresh_memory_asks_for_a_fresh_start() -> None:
    world = World()
    memory = LabMemory(world.pool)  # type: ignore[arg-type]
    up = world.updater(memory)
    for call in (lambda: up.iteration, lambda: up.job_state, lambda: up.steps, up.compute_begins):
        with pytest.raises(ProtocolError, match=r"recover\(decision\), or initialize"):
            call()
    recovered = up.recover(decide([up.summary()]))
    assert (recovered.action, recovered.iteration, recovered.job_state) == (Action.FRESH, 0, b"")
    with pytest.raises(ProtocolError):
        up.step([], b"", SyncResult)
    up.initialize(0, b"first")
    assert (up.iteration, up.job_state, up.steps, up.last_sync) == (0, b"first", 0, None)


def test_a_vote_looks_at_pages_only_where_some_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU a view of every page takes milliseconds of each takeover."""
    world = World()
    memory, up = world.start()
    world.train(up, 2)
    looked: list[int] = []
    original = RankMemory.group_pages

    def group_pages(self: RankMemory, group: int, rotation: Rotation) -> object:
        looked.append(group)
        return original(self, group, rotation)

    monkeypatch.setattr(RankMemory, "group_pages", group_pages)
    reopen(world, memory).summary()
    assert looked == []
    memory.lose([PageRef("arena", "data", 0)], seed=1)
    assert Summary.decode(reopen(world, memory).summary()).restart.ok
    assert looked, "one was lost"


def test_checkpoint_steps_and_moments_are_taken_over() -> None:
    """A checkpoint brings moments, step count and job state; going on is bit-equal."""
    world = World(no_ops=frozenset({2}))
    _memory, up = world.start()
    world.train(up, 5)
    saved = {p: up.memory.planes[p].clone() for p in up.memory.planes}
    other = LabMemory(world.pool)  # type: ignore[arg-type]
    fresh = world.updater(other)
    decision = decide([fresh.summary(checkpoints=[5, 3])])
    recovered = fresh.recover(decision)
    assert (recovered.action, recovered.iteration) == (Action.CHECKPOINT, 5)
    for s in world.plan.segments:
        lo, hi = world.plan.offsets[s.name][0], world.plan.offsets[s.name][0] + s.numel
        for plane, whole in saved.items():
            fresh.state(s.name, plane).copy_(whole[lo:hi])
    fresh.initialize(5, world.job(5), steps=4, keep_state=True)
    world.check(other, fresh)
    world.train(fresh, 8)
    world.check(other, fresh)


def test_memory_in_use_cannot_be_mistaken_after_a_fallback_began() -> None:
    """Ranks that fell back and ranks that did not never meet at the same iteration number (I-5)."""
    world = World()
    _memory, up = world.start()
    world.train(up, 3)
    stale = up.summary()
    up.recover(Decision(Action.CHECKPOINT, 3, epoch=1, step=3).encode())
    assert Decision.decode(decide([up.summary([3]), stale, up.summary([3])])).action is Action.FRESH
    up.initialize(3, world.job(3), keep_state=True)
    mixed = Decision.decode(decide([up.summary(), stale]))
    assert mixed.action is Action.FRESH
    assert "different sources" in mixed.reason


def test_losses_during_a_fallback_are_healed_by_initialize() -> None:
    world = World()
    memory, up = world.start()
    world.train(up, 2)
    everything = [PageRef(n, "data", k) for n, r in memory.regions.items() for k in range(len(r.pages))]
    everything += [PageRef("arena", "tier1", k) for k in range(9)] + [
        PageRef("arena", "tier2", k) for k in range(3)
    ]
    memory.lose(everything, seed=1)
    up = world.updater(memory)
    decision = Decision.decode(decide([up.summary()]))
    assert decision.action is Action.FRESH
    assert "no replica of the marker is left" in decision.reason
    up.recover(decision.encode())
    for s in world.plan.segments:
        up.master(s.name).copy_(world.initial(s.name))
    up.initialize(0, world.job(0))
    world.check(memory, up)
    world.train(up, 2)
    world.check(memory, up)


def test_calls_out_of_order_are_refused() -> None:
    world = World()
    memory, up = world.start()
    world.begin(up)

    def broken() -> SyncResult:
        raise RuntimeError("network")

    with pytest.raises(RuntimeError, match="network"):
        up.step(world.hypers(0), world.job(1), broken)
    for call in (up.compute_begins, lambda: up.step(world.hypers(0), b"", lambda: world.sync(0))):
        with pytest.raises(ProtocolError, match="recover"):
            call()
    up.recover(decide([up.summary()]))
    world.train(up, 2)
    world.check(memory, up)


def test_arguments_are_checked_before_anything_is_written() -> None:
    world = World()
    memory, up = world.start()
    up.compute_begins()
    before = memory.snapshot()
    with pytest.raises(PlanError, match="2 hyperparameter groups, found 1"):
        up.step([Hyper(0.1)], b"", SyncResult)
    with pytest.raises(JobStateTooLarge, match="job_state_bytes="):
        up.step(world.hypers(0), bytes(1000), SyncResult)
    with pytest.raises(PlanError, match="no state"):
        up.state("a", "momentum_buffer")
    with pytest.raises(PlanError, match="no region"):
        up.region("nothing")
    after = memory.snapshot()
    for name, a, b in zip(("arena", "H"), before.arrays, after.arrays, strict=False):
        assert np.array_equal(a, b), name
    assert up.position().phase == "COMPUTE"


def test_another_layout_is_refused() -> None:
    """I-6: same sizes, other meaning."""
    world = World()
    memory, _up = world.start()
    other = World(
        segments=(Segment("a", 100, 0, 3), Segment("renamed", 77, 1, 103), Segment("c", 190, 0, 190))
    )
    with pytest.raises(LayoutMismatch, match="layout"):
        other.updater(memory)
    memory.regions["marker"].pages[:, :256] ^= 1  # every header and, with small pages, every cell
    assert Summary.decode(other.updater(memory).summary()).phase is None


def test_derived_state_is_rebuilt_after_update_and_after_recovery() -> None:
    world, calls = World(model_bytes=400), []
    memory, _ = world.start()

    def derive(up: ResumableUpdater) -> None:
        calls.append(up.iteration)

    up = reopen(world, memory, rebuild_derived=derive)
    up.recover(decide([up.summary()]))
    assert calls == [0]
    world.iterate(up)
    assert calls == [0, 0]  # before ITERATION(1) is committed
    assert up.iteration == 1
    up = reopen(world, memory, rebuild_derived=derive)
    up.recover(decide([up.summary()]))
    assert calls == [0, 0, 1]


def test_cast_masters_fills_parameters() -> None:
    world = World()
    memory, _ = world.start()
    parameters = {"a": torch.empty(10, 10, dtype=torch.bfloat16), "b": torch.empty(77, dtype=torch.float16)}
    up = reopen(world, memory, rebuild_derived=cast_masters(parameters))
    up.recover(decide([up.summary()]))
    assert torch.equal(parameters["a"].view(-1), up.master("a").to(torch.bfloat16))
    assert torch.equal(parameters["b"], up.master("b").to(torch.float16))


def test_segments_are_read_and_filled_by_name() -> None:
    world = World()
    memory = LabMemory(world.pool)  # type: ignore[arg-type]
    up = world.updater(memory)
    up.recover(decide([up.summary()]))
    for s in world.plan.segments:
        up.write(s.name, "master", world.initial(s.name).view(1, -1).double())
        up.write(s.name, "exp_avg", torch.ones(s.numel))
    up.initialize(0, world.job(0), keep_state=True)
    half = up.read("b", out=torch.empty(7, 11, dtype=torch.bfloat16))
    assert torch.equal(half, world.initial("b").view(7, 11).bfloat16())
    assert up.read("c", "exp_avg").eq(1).all()
    joined = torch.empty(100)
    for first, piece in up.pieces("a"):
        joined[first : first + piece.numel()] = piece
    assert torch.equal(joined, world.initial("a"))
    for one in (up, world.updater(memory)):
        with pytest.raises(ProtocolError, match="only step"):
            one.write("a", "master", joined)
    for wrong in (torch.empty(99), torch.empty(200)[::2]):
        with pytest.raises(PlanError, match="contiguous tensor of 100 elements"):
            up.read("a", out=wrong)
    with pytest.raises(PlanError, match="no state"):
        up.read("a", "momentum_buffer")


def test_copies_of_masters_are_kept_by_the_updater() -> None:
    """bf16 copies where the plan puts them: at the start, after a step, and anew after a loss."""
    world = World()
    places = {"a": 140, "c": None, "b": 10}
    segments = [dataclasses.replace(s, model_offset=places[s.name]) for s in world.plan.segments]
    plan = dataclasses.replace(world.plan, segments=segments)
    memory = LabMemory(world.pool)  # type: ignore[arg-type]
    up = ResumableUpdater(memory, plan, lambda: None)

    def check(up: ResumableUpdater) -> None:
        model = up.model.view(torch.bfloat16)
        for name, first in (("a", 140), ("b", 10)):
            whole = up.read(name)
            assert torch.equal(model[first : first + whole.numel()], whole.bfloat16())

    for s in plan.segments:
        up.write(s.name, "master", world.initial(s.name))
    up.initialize(0, world.job(0))
    check(up)
    world.train(up, 1)
    check(up)
    memory.lose([PageRef("model", "data", 1)], seed=1)
    again = ResumableUpdater(memory, plan, lambda: None)
    again.recover(decide([again.summary()]))
    check(again)
    assert not memory.marks


def test_a_resumed_update_uses_the_staged_hypers() -> None:
    """Cases 9 and 10: the resumed trainer passes none; learning rate and step come with the record."""
    world = World()
    memory, up = world.start()
    world.train(up, 3)
    up.executor = StopAt(20)
    with pytest.raises(Stopped):
        world.iterate(up)
    again = world.updater(memory)
    recovered = again.recover(decide([again.summary()]))
    assert (recovered.action, recovered.iteration) == (Action.FINISH, 4)
    assert recovered.sync == world.sync(3) == again.last_sync
    world.check(memory, again)


def test_sync_result_survives_with_its_iteration() -> None:
    """What depends on found_inf (a loss scale) can be derived after any crash."""
    world = World(no_ops=frozenset({1}))
    memory, up = world.start()
    world.train(up, 2)
    for stop in (0, 1, 2, 3):  # COMPUTE, protect, stage, PROTECTED of iteration 2
        fresh = world.updater(memory)
        fresh.recover(decide([fresh.summary()]))
        assert fresh.last_sync == world.sync(1)
        assert fresh.last_sync is not None
        assert fresh.last_sync.found_inf
        fresh.executor = StopAt(stop)
        with pytest.raises(Stopped):
            world.iterate(fresh)


def test_later_changes_of_the_callers_bytes_change_nothing() -> None:
    """Case 15: what is staged is a copy."""
    world = World()
    memory, up = world.start()
    job = bytearray(world.job(1))
    up.compute_begins()
    up.grads.copy_(world.gradient(0))
    up.step(world.hypers(0), job, lambda: world.sync(0))  # type: ignore[arg-type]
    job[:] = bytes(len(job))
    world.check(memory, up)


# --- case 13: silent corruption ------------------------------------------------------------------------
@pytest.mark.parametrize("where", ["tier1", "data"])
def test_corruption_found_by_spare_parity_is_refused(where: str) -> None:
    """One page lost, a byte flipped elsewhere: two spare rows show it, and all go to the checkpoint."""
    world = World()
    memory, up = world.start()
    world.train(up, 1)
    arena = memory.regions["arena"]
    assert arena.tier1 is not None
    pages = arena.groups[0].pages
    memory.lose([PageRef("arena", "data", pages[0])], seed=1)
    (arena.tier1[0, 1] if where == "tier1" else arena.pages[pages[3]])[17] ^= 4
    before = memory.snapshot()
    up = world.updater(memory)
    decision = Decision.decode(decide([up.summary(checkpoints=[0])]))
    assert (decision.action, decision.step) == (Action.CHECKPOINT, 0)
    assert "group 0" in decision.reason
    after = memory.snapshot()
    assert all(np.array_equal(a, b) for a, b in zip(before.arrays, after.arrays, strict=True)), (
        "a vote writes nothing"
    )
    with pytest.raises(DecisionError, match="voted no"):
        up.recover(Decision(Action.RESTART, 1, 0).encode())


def test_without_spare_parity_the_result_says_so() -> None:
    world = World()
    memory, up = world.start()
    pages = memory.regions["arena"].groups[1].pages
    memory.lose([PageRef("arena", "data", k) for k in pages[:2]], seed=1)
    assert world.updater(memory).recover(decide([world.updater(memory).summary()])).verified
    memory.lose([PageRef("arena", "data", k) for k in pages[:3]], seed=1)
    up = world.updater(memory)
    recovered = up.recover(decide([up.summary()]))
    assert not recovered.verified
    assert recovered.pages_reconstructed == 3
    world.check(memory, up)


def test_a_page_that_does_not_keep_what_is_written_stays_marked() -> None:
    """Acknowledged only after reading back: a page that is not really mapped stops recovery."""
    world = World()
    memory, up = world.start()
    ref = PageRef("arena", "data", 2)
    memory.lose([ref], seed=1)

    class Bad(StopAt):
        def run(self, op) -> None:  # type: ignore[no-untyped-def]
            super().run(op)
            if at("repair")(op):
                op.writes[0][3] ^= 1

    up = world.updater(memory, Bad())
    raw = decide([up.summary()])
    with pytest.raises(ProtocolError, match="does not hold"):
        up.recover(raw)
    assert ref in memory.marks
    up = world.updater(memory)
    up.recover(raw)
    world.check(memory, up)


# --- plans ---------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"segments": ()}, "at least one segment"),
        ({"segments": (Segment("a", 0),)}, "numel must be positive"),
        ({"segments": (Segment("a", 5), Segment("a", 5))}, "unique"),
        ({"segments": (Segment("a", 5, 0, 380),)}, "grad_numel is 384"),
        ({"chunk_pages": 4}, "multiple of 3 planes"),
        ({"chunk_pages": 9}, "does not fit a group"),
        ({"grad_dtype": torch.int8}, "float32, bfloat16 or float16"),
        ({"model_bytes": -1}, "negative"),
        ({"segments": (Segment("a", 5, model_offset=254),)}, "does not fit model_bytes=512"),
        ({"segments": (Segment("a", 5, 0, 0, 9), Segment("b", 5, 0, 0, 13))}, "overlaps a"),
        ({"config": Pool(page_bytes=300)}, "multiple of 256"),
    ],
)
def test_plans_that_cannot_be_laid_out_are_refused(change: dict, why: str) -> None:
    with pytest.raises(PlanError, match=why):
        dataclasses.replace(World().plan, **change)


def test_layout_hash_covers_what_gives_bytes_a_meaning() -> None:
    plan = World().plan
    changes = [
        {"segments": plan.segments[::-1]},
        {"chunk_pages": 6},
        {"grad_dtype": torch.bfloat16},
        {"grad_numel": 385},
        {"job_state_bytes": 201},
        {"config": Pool(tier2_pages=2)},
    ]
    hashes = {plan.layout_hash, *(dataclasses.replace(plan, **c).layout_hash for c in changes)}  # type: ignore[arg-type]
    assert len(hashes) == 1 + len(changes)
    assert dataclasses.replace(plan).layout_hash == plan.layout_hash


def test_default_chunk_survives_the_loss_of_its_undo() -> None:
    for h1 in range(3, 20):
        plan = UpdatePlan(World().plan.segments, config=Pool(tier1_pages=h1, data_pages=64), grad_numel=384)  # type: ignore[arg-type]
        assert h1 - 3 < plan.pages_per_chunk <= h1
        assert plan.group_pages % plan.pages_per_chunk == 0
        assert plan.group_pages <= 64


def test_extra_regions_are_allocated_and_left_alone() -> None:
    world = World()
    spec = AllocationSpec("mine", 1000, Kind.RETAINED)
    plan = dataclasses.replace(world.plan, extra_specs=(spec,))
    memory = ArrayMemory(world.pool)  # type: ignore[arg-type]
    up = ResumableUpdater(memory, plan, lambda: None)
    up.initialize()
    memory.lose([PageRef("mine", "data", 0)], seed=1)
    up = ResumableUpdater(memory, plan, lambda: None)
    up.recover(decide([up.summary()]))
    assert up.region("mine").pages.shape == (4, 256)
    assert memory.marks == {PageRef("mine", "data", 0)}, "its owner repairs and acknowledges it"


def test_memory_must_be_a_client_or_a_memory() -> None:
    with pytest.raises(PlanError, match="Client or a Memory"):
        ResumableUpdater(object(), World().plan, lambda: None)
