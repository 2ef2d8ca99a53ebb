"""Muon: bit-equal to torch.optim.Muon, at every crash point too; broken versions are caught (I-1, I-2)."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rmu_lab import (
    MATRICES,
    Point,
    Pool,
    World,
    Wrong,
    examine,
    examine_all,
    loss_patterns,
    record_iteration,
    record_recovery,
)

import leto_rmu.muon
from leto_rmu import SGD, Action, AdamW, Hyper, Muon, PlanError, Segment, UnsupportedOption, UpdatePlan
from leto_rmu.layers import Layers
from leto_rmu.update import ChunkTransactions

if not hasattr(torch.optim, "Muon"):
    pytest.skip("torch has Muon from 2.9 on", allow_module_level=True)
pytestmark = pytest.mark.timeout(900)  # on a busy machine; usually a tenth of that


def mixed(**more: object) -> World:
    """Two matrices of Muon, a vector of AdamW between them, a matrix with other options."""
    return World(optimizer=Muon(AdamW()), segments=MATRICES, grad_numel=450, **more)  # type: ignore[arg-type]


WORLDS: dict[str, Callable[[], World]] = {
    "muon and adamw": mixed,
    "slots": lambda: mixed(scheme="slots", pool=Pool(data_pages=8)),
    "muon alone, no tier 2": lambda: World(
        pool=Pool(tier1_pages=4, tier2_pages=0, data_pages=8),
        optimizer=Muon(),
        segments=(Segment("x", 300, 0, 0, shape=(15, 20)), Segment("y", 70, 1, 310, shape=(1, 70))),
        chunk_pages=4,
    ),
}


# --- bits ----------------------------------------------------------------------------------------------
@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=4),
    flat=st.lists(st.integers(1, 300), max_size=2),
    others=st.sampled_from(["adamw", "sgd"]),
    runs=st.integers(1, 3),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**32 - 1),
)
def test_iterations_are_those_of_torch_optim(
    shapes: list[tuple[int, int]], flat: list[int], others: str, runs: int, dtype: torch.dtype, seed: int
) -> None:
    """Matrices of every shape, cut anywhere into chunks; gradients are left alone."""
    sizes: list[tuple[int, tuple[int, int] | None]] = [(a * b, (a, b)) for a, b in shapes]
    sizes += [(n, None) for n in flat]
    segments, at = [], 0
    for k in np.random.default_rng(seed).permutation(len(sizes)):
        numel, shape = sizes[k]
        segments.append(Segment(f"s{k}", numel, 2 if shape is None else int(k) % 2, at, shape=shape))
        at += numel + int(k)
    optimizer = Muon(SGD() if others == "sgd" else AdamW())
    planes = 1 + len(optimizer.state_planes)
    world = World(
        seed=seed,
        optimizer=optimizer,
        segments=segments,
        grad_numel=at,
        grad_dtype=dtype,
        pool=Pool(data_pages=4 * runs * planes),
        chunk_pages=runs * planes,
        no_ops=frozenset({2}),
    )
    memory, up = world.start()
    for t in range(5):
        world.iterate(up)
        assert torch.equal(up.grads, world.gradient(t))
        world.check(memory, up)


@settings(max_examples=40, deadline=None)
@given(
    hyper=st.builds(
        Hyper.muon,
        lr=st.floats(0.0, 1.0),
        weight_decay=st.floats(0.0, 0.5),
        momentum=st.sampled_from([0.0, 0.3, 0.5, 0.95, 1.0, 1.5]),
        nesterov=st.booleans(),
        ns_coefficients=st.sampled_from([(3.4445, -4.775, 2.0315), (2.0, -1.5, 0.5)]),
        eps=st.sampled_from([1e-7, 1e-3]),
        ns_steps=st.integers(0, 6),
        adjust_lr_fn=st.sampled_from([None, "original", "match_rms_adamw"]),
    ),
    seed=st.integers(0, 2**32),
)
def test_every_option_of_torch(hyper: Hyper, seed: int) -> None:
    """Options as torch.optim.Muon has them, momentum of zero and zeros of both signs included."""
    generator = torch.Generator().manual_seed(seed)
    plan = UpdatePlan(
        [Segment("w", 35 * 11, shape=(35, 11))],
        Muon(),
        config=Pool(),  # type: ignore[arg-type]
        grad_numel=35 * 11,
    )
    up = leto_rmu.ResumableUpdater(leto_rmu.ArrayMemory(plan.config), plan, lambda: None)
    parameter = torch.nn.Parameter(torch.randn(35, 11, generator=generator))
    up.write("w", "master", parameter)
    up.initialize()
    names = ("weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps", "adjust_lr_fn")
    reference = torch.optim.Muon([parameter], hyper.lr, **{name: getattr(hyper, name) for name in names})
    assert Hyper.from_param_group(reference.param_groups[0]) == hyper
    for _ in range(3):
        gradient = torch.randn(35, 11, generator=generator)
        gradient[torch.rand(35, 11, generator=generator) < 0.1] = -0.0
        parameter.grad = gradient
        reference.step()
        up.compute_begins()
        up.grads.copy_(gradient.view(-1))
        up.step([hyper], b"", leto_rmu.SyncResult)
        assert bits(up.read("w")) == bits(parameter)
        assert bits(up.read("w", "momentum_buffer")) == bits(reference.state[parameter]["momentum_buffer"])


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().view(torch.uint8).numpy().tobytes()


# --- refusals ------------------------------------------------------------------------------------------
def test_defaults_are_those_of_torch() -> None:
    group = torch.optim.Muon([torch.nn.Parameter(torch.zeros(2, 2))]).param_groups[0]
    assert Hyper.from_param_group(group) == Hyper.muon()


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"adjust_lr_fn": "spectral"}, "adjust_lr_fn"),
        ({"ns_steps": 100}, "ns_steps"),
        ({"momentum": -0.1}, "momentum"),
        ({"lr": -1.0}, "lr >= 0"),
        ({"weight_decay": -1.0}, "weight_decay"),
    ],
)
def test_options_that_torch_refuses_are_refused_by_name(options: dict, words: str) -> None:
    with pytest.raises(UnsupportedOption, match=words):
        Muon().check(Hyper.muon(**options))


def test_options_of_others_are_refused_by_name() -> None:
    with pytest.raises(UnsupportedOption, match="dampening"):
        Muon().check(Hyper(0.1, momentum=0.9, dampening=0.1))
    with pytest.raises(UnsupportedOption, match="ns_steps"):
        Hyper.muon(ns_steps=2.5)  # type: ignore[arg-type]
    with pytest.raises(UnsupportedOption, match="three floats"):
        Hyper.muon(ns_coefficients=(1.0, 2.0))  # type: ignore[arg-type]


def test_plans_that_cannot_be_laid_out_are_refused() -> None:
    def plan(optimizer: Muon, *segments: Segment) -> UpdatePlan:
        return UpdatePlan(segments, optimizer, config=Pool(), grad_numel=100)  # type: ignore[arg-type]

    with pytest.raises(PlanError, match="no matrix of 10"):
        plan(Muon(), Segment("w", 10, shape=(3, 3)))
    with pytest.raises(PlanError, match="no shape"):
        plan(Muon(), Segment("w", 9, shape=(3, 3)), Segment("b", 3))
    with pytest.raises(PlanError, match="one kind"):
        plan(Muon(AdamW()), Segment("w", 9, shape=(3, 3)), Segment("b", 3))
    both = plan(Muon(AdamW()), Segment("w", 9, shape=(3, 3)), Segment("b", 3, 1))
    with pytest.raises(UnsupportedOption, match="momentum"):
        both.check_hypers([Hyper.muon(), Hyper.muon()])
    assert both.check_hypers([Hyper.muon(), Hyper(0.1)])
    assert both.layout_hash != plan(AdamW(), *both.segments).layout_hash  # type: ignore[arg-type]
    assert [both.plane_of("w", "momentum_buffer"), both.plane_of("b", "exp_avg")] == ["exp_avg"] * 2
    for name, state in (("w", "exp_avg"), ("w", "exp_avg_sq"), ("b", "momentum_buffer")):
        with pytest.raises(PlanError, match=f"no state '{state}'"):
            both.plane_of(name, state)


def test_a_torch_whose_muon_is_another_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts that are put together here must give the step that torch takes."""
    real = torch.optim._muon._zeropower_via_newtonschulz
    try:
        for broken in (lambda *a: real(*a) * 0.5, lambda grad: grad):
            leto_rmu.muon._torch_muon.cache_clear()
            calls: list[int] = []

            def changed(*args: object, broken: Callable[..., object] = broken, calls: list = calls) -> object:
                calls.append(1)
                return real(*args) if len(calls) == 1 else broken(*args)

            monkeypatch.setattr(torch.optim._muon, "_zeropower_via_newtonschulz", changed)
            with pytest.raises(UnsupportedOption, match="in another way"):
                Muon()
    finally:
        monkeypatch.undo()
        leto_rmu.muon._torch_muon.cache_clear()
    Muon()


def test_a_torch_without_muon_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch.optim._muon", None)
    monkeypatch.delattr(torch.optim, "_muon")
    leto_rmu.muon._torch_muon.cache_clear()
    with pytest.raises(UnsupportedOption, match=r"torch >= 2\.9"):
        Muon()
    leto_rmu.muon._torch_muon.cache_clear()


# --- crashes -------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.parametrize("share", [5, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", WORLDS)
def test_every_crash_point_with_every_loss(name: str, share: int) -> None:
    """Stopped before and torn in the middle of every op, with every pattern of losses (or one in `share`)."""
    world = WORLDS[name]()
    memory, tally = world.start()[0], Counter()

    def losses_of(_point: Point, i: int) -> dict[str, list]:
        return loss_patterns(world, np.random.default_rng([7, i]))

    points = record_iteration(world, seed=7, tears=1)
    for kind, outcome in examine_all(world, memory, points, losses_of, share=share):
        tally[kind, outcome.action] += 1
    refused = {kind for kind, action in tally if action is None}
    assert {"data beyond", "gradients beyond", "the marker"} <= refused
    for kind in ("none", "one of U", "one Q buffer", "all of R", "two marker replicas"):
        assert kind not in refused
        assert tally[kind, Action.FINISH] > tally[kind, Action.RESTART] > 0


@pytest.mark.slow
def test_crash_points_of_recoveries() -> None:
    """A second trainer that finishes a half-updated matrix is stopped too, at each of its ops."""
    world = mixed()
    memory, second = world.start()[0], 0
    for i, point in enumerate(record_iteration(world, seed=11, tears=1)):
        rng = np.random.default_rng([11, i])
        kinds = loss_patterns(world, rng)
        losses = kinds[list(kinds)[i % len(kinds)]]
        for k, again in enumerate(record_recovery(world, memory, point, losses, seed=i)):
            if k % 3 == i % 3:
                examine(world, memory, again, seed=k, go_on=0)
                second += 1
    assert second > 1000


def hunt(world: World, losses: str = "none") -> str | None:
    """The first wrong recovery of all crash points, or None."""
    points = record_iteration(world, seed=3, tears=0)  # right as long as nothing crashes
    memory = world.start()[0]
    for i, point in enumerate(points):
        patterns = loss_patterns(world, np.random.default_rng([3, i]))
        try:
            examine(world, memory, point, patterns[losses], seed=i, go_on=0)
        except Wrong as wrong:
            return str(wrong)
    return None


@pytest.mark.parametrize("name", ["muon and adamw", "slots"])
def test_a_direction_from_half_updated_momentum_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: momentum of committed chunks is taken for old momentum."""
    assert hunt(WORLDS[name]()) is None
    monkeypatch.setattr(Layers, "take_new", lambda self, name, momentum: None)
    assert hunt(WORLDS[name]()) is not None


def test_a_direction_from_the_open_chunk_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: of a resumed update the open chunk counts as new as well."""

    def ahead(self: ChunkTransactions, chunk: int) -> bool:
        group, local = divmod(chunk, self.plan.chunks_per_group)
        first = self.resumed[group].chunk if group in self.resumed else -1
        return real(self, chunk) or local == first

    real = ChunkTransactions.is_new
    monkeypatch.setattr(ChunkTransactions, "is_new", ahead)
    assert hunt(mixed()) is not None


def test_gradients_of_committed_chunks_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: lost gradients of the committed part of a half-updated matrix count for nothing."""
    assert hunt(mixed(), "gradients") is None

    def needed(self: UpdatePlan, items: list) -> set[int]:
        return real(self, [dataclasses.replace(piece, matrix=None) for piece in items])

    real = UpdatePlan.grad_pages_of
    monkeypatch.setattr(UpdatePlan, "grad_pages_of", needed)
    assert hunt(mixed(), "gradients") is not None
