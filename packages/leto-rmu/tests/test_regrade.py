"""Gradients that are computed again instead of being protected: exact at every crash point, or refused."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cuda_lab import DeviceWorld
from cuda_lab import record as record_on_device
from rmu_lab import (
    SEGMENTS,
    LabMemory,
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
from sim_lanes import OneLaunch, OneLaunchUpdater
from test_ranks import ORDER, farthest, position, possible, record, recover_together

import leto_rmu.recovery
from leto_rmu import SGD, Action, Decision, Executor, PlanError, ProtocolError, ResumableUpdater, Segment
from leto_rmu.marker import Phase
from leto_rmu.update import ChunkTransactions

pytestmark = pytest.mark.timeout(900)  # on a busy machine; usually a tenth of that


class DerivedWorld(World):
    """Gradients come from derived parameters, as in training: what is overwritten too early shows."""

    def __init__(self, **more: Any) -> None:
        numel = sum(s.numel for s in more.get("segments", SEGMENTS))
        more["model_bytes"] = more.get("model_bytes") or 2 * numel
        super().__init__(gradients="recompute", **more)

    def _from(self, half: torch.Tensor, t: int) -> torch.Tensor:
        gradient = super().gradient(t).float()
        for at, s in self.plan.offsets.values():
            place = gradient[s.grad_offset : s.grad_offset + s.numel]
            place += 0.5 * half[at : at + s.numel].float() * gradient.abs().max()
        return gradient.to(self.plan.grad_dtype)

    def gradient(self, t: int) -> torch.Tensor:
        masters = torch.from_numpy(self.arena(t).reshape(-1).view(np.float32)[: self.plan.numel].copy())
        return self._from(masters.to(torch.bfloat16), t)

    def compute(self, up: ResumableUpdater, t: int, job_state: bytes) -> None:
        if job_state != self.job(t):
            raise Wrong(f"gradients of iteration {t} from {job_state!r}")
        half = up.model[: 2 * self.plan.numel].view(torch.bfloat16)
        up.grads.copy_(self._from(half.cpu(), t))

    def begin(self, up: ResumableUpdater) -> None:
        if up.job_state != self.job(up.iteration):
            raise Wrong(f"job state of iteration {up.iteration} is {up.job_state!r}")
        up.compute_begins()
        self.compute(up, up.iteration, up.job_state)

    def updater(
        self, memory: LabMemory, executor: Executor | None = None, barrier: Callable[[], None] | None = None
    ) -> ResumableUpdater:
        return self.updater_class(
            memory, self.plan, barrier or (lambda: None), self.derive, executor, self.compute
        )


WORLDS: dict[str, Callable[[], DerivedWorld]] = {
    "adamw": DerivedWorld,
    "slots": lambda: DerivedWorld(scheme="slots", pool=Pool(data_pages=8)),
    "sgd, bf16 gradients, no tier 2": lambda: DerivedWorld(
        pool=Pool(tier1_pages=4, tier2_pages=0, data_pages=8),
        optimizer=SGD(),
        chunk_pages=4,
        grad_dtype=torch.bfloat16,
    ),
}


@pytest.mark.parametrize("name", WORLDS)
def test_iterations_without_gradient_parity(name: str) -> None:
    world = WORLDS[name]()
    memory, up = world.start()
    assert "grad_parity" not in memory.regions
    for _ in range(6):
        world.iterate(up)
        world.check(memory, up)


@pytest.mark.slow
@pytest.mark.parametrize("share", [3, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", WORLDS)
def test_every_crash_point_with_every_loss(name: str, share: int) -> None:
    """Lost gradients, any number of them, are survived wherever derived state is left."""
    world = WORLDS[name]()
    memory, tally = world.start()[0], Counter()

    def losses_of(_point: Point, i: int) -> dict[str, list]:
        return loss_patterns(world, np.random.default_rng([7, i]))

    points = record_iteration(world, seed=7, tears=1)
    for kind, outcome in examine_all(world, memory, points, losses_of, share=share):
        tally[kind, outcome.action] += 1
        tally["computed again"] += "computed again" in outcome.reason
    assert tally["computed again"] > 100 // share
    assert tally["gradients and derived", None] > 0
    for kind in ("none", "gradients", "gradients beyond", "derived", "one of U"):
        assert not tally[kind, None]
        assert tally[kind, Action.FINISH] > tally[kind, Action.RESTART] > 0


@pytest.mark.slow
@pytest.mark.parametrize("share", [4, pytest.param(1, marks=pytest.mark.nightly)])
def test_every_crash_point_of_recoveries_that_compute_again(share: int) -> None:
    """The second trainer is stopped in each of its ops, the computation too; losses come on top.

    Of the points at which the first one is stopped each ``share``-th is taken.
    """
    world = DerivedWorld()
    memory, seen = world.start()[0], Counter()
    for i, point in enumerate(record_iteration(world, seed=11, tears=1)):
        if i % share:
            continue
        rng = np.random.default_rng([11, i])
        kinds = loss_patterns(world, rng)
        losses = kinds[("gradients", "gradients beyond", "1 of anything")[i % 3]]
        for k, again in enumerate(record_recovery(world, memory, point, losses, seed=i)):
            more = loss_patterns(world, rng)[("gradients", "derived")[k % 2]] if k % 3 == 0 else []
            outcome = examine(world, memory, again, more, seed=k, go_on=int(k % 11 == 0))
            seen[outcome.action] += 1
            seen["in the computation"] += "recompute" in again.label
            seen["torn gradients"] += any(t.regrading for t in again.truths)
    assert seen[Action.FINISH] > 1000 // share
    assert seen["in the computation"] > 40 // share
    assert seen["torn gradients"] > 40 // share


# --- ranks ---------------------------------------------------------------------------------------------
def together(a: Point, b: Point) -> bool:
    """What the barriers allow: derived state of t + 1 is begun when everybody is UPDATED(t)."""
    updated = ORDER.index("UPDATED")
    for one, other in ((a, b), (b, a)):
        t, phase = farthest(one)
        rebuilt = position(one) if position(one)[1] == updated else (t - 1, updated)
        if rebuilt[0] >= 0 and position(other) < rebuilt:
            return False
        if phase == updated and position(one)[1] == updated and position(other) < (t, updated):
            return False
    return possible(a, b)


@pytest.mark.slow
def test_two_ranks_one_of_which_needs_gradients_again() -> None:
    """All compute again, or nobody; a rank that was only protected does so as well."""
    ranks = [DerivedWorld(seed=200), DerivedWorld(seed=201)]
    histories = [record(rank, 3, 5 + k) for k, rank in enumerate(ranks)]
    memories = [rank.start()[0] for rank in ranks]
    rng, seen = np.random.default_rng(5), Counter()
    pairs = [(a, b) for a in histories[0] for b in histories[1] if together(a, b) and position(a)[1] >= 2]
    for k in range(300):
        points = list(pairs[int(rng.integers(len(pairs)))])
        which = int(rng.integers(2))
        patterns = loss_patterns(ranks[which], rng)
        losses: list[list] = [[], []]
        losses[which] = patterns[("gradients beyond", "gradients", "gradients and derived")[k % 3]]
        if k % 5 == 0:  # the other rank's parameters are gone
            losses[1 - which] = loss_patterns(ranks[1 - which], rng)["derived"]
        try:
            action, _ = recover_together(ranks, memories, points, losses, seed=k)
        except Wrong as wrong:
            if k % 5 or "refused within tolerance" not in str(wrong):
                raise
            action = Action.FRESH  # each rank alone could go on, but not both together
        seen[action] += 1
    assert min(seen[Action.FINISH], seen[Action.FRESH]) > 10


class WithoutAFunction(DerivedWorld):
    def updater(
        self, memory: LabMemory, executor: Executor | None = None, barrier: Callable[[], None] | None = None
    ) -> ResumableUpdater:
        return ResumableUpdater(memory, self.plan, barrier or (lambda: None), self.derive, executor)


@pytest.mark.parametrize("phase", ["SYNCED", "ITERATION"])
def test_gradients_of_a_skipped_iteration_are_not_asked_for(phase: str) -> None:
    """A peer has found infinite gradients: that ours are lost, and cannot be computed, is no harm."""
    ranks = [kind(seed=9, no_ops=frozenset({1})) for kind in (DerivedWorld, WithoutAFunction)]
    points = []
    for rank, wanted in zip(ranks, (phase, "PROTECTED"), strict=True):
        history = record_iteration(rank, seed=3, tears=0)
        t = 1 + (wanted == "ITERATION")
        points.append(next(p for p in history if {(x.phase, x.iteration) for x in p.truths} == {(wanted, t)}))
    losses = loss_patterns(ranks[1], np.random.default_rng(3))
    for name in ("gradients", "gradients and derived"):
        memories = [rank.start()[0] for rank in ranks]
        action, _ = recover_together(list(ranks), memories, points, [[], losses[name]], seed=3)
        assert action is Action.FINISH


class Watch(Executor):
    def __init__(self, log: list[str]) -> None:
        self.log = log

    def run(self, op: Any) -> None:
        self.log.append(op.name)
        op.apply()


def test_derived_state_waits_for_the_world() -> None:
    """Between UPDATED and the first byte of derived state is a barrier, in a recovery too."""
    world, log = DerivedWorld(), []
    memory, _ = world.start()
    world.derive = lambda up: log.append("derive")  # type: ignore[method-assign,assignment]
    up = world.updater(memory, Watch(log), lambda: log.append("barrier"))
    up.recover(leto_rmu.decide([up.summary()]))
    assert log[-2:] == ["barrier", "derive"]
    log.clear()
    world.iterate(up)
    assert log[-4:] == ["mark", "barrier", "derive", "mark"]
    assert log.count("barrier") == 2
    assert "protect" not in log


class Gone(Exception):  # noqa: N818
    """A rank has left: what a barrier says then."""


def test_what_a_broken_reduction_leaves_is_neither_compared_nor_used() -> None:
    """A rank is gone while all compute again: its world's barrier says so, before anyone looks."""
    world = DerivedWorld()
    points = record_iteration(world, seed=7, tears=0)
    point = next(p for p in points if {t.phase for t in p.truths} == {"SYNCED"})
    memory = world.start()[0]
    memory.restore(point.state)
    memory.lose(loss_patterns(world, np.random.default_rng(7))["gradients"], 7)

    def gone() -> None:
        raise Gone

    up = world.updater(memory, barrier=gone)
    up.recompute_gradients = lambda up, _t, _job: up.grads.fill_(3.0)
    with pytest.raises(Gone):
        up.recover(leto_rmu.decide([up.summary()]))
    again = world.updater(memory)
    assert again.recover(leto_rmu.decide([again.summary()])).action is Action.FINISH
    world.check(memory, again)


# --- on a device -------------------------------------------------------------------------------------
class DeviceDerivedWorld(DerivedWorld, DeviceWorld):
    """The same over device memory."""


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["undo", "slots", "one kernel", "one kernel that copies"])
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_on_a_device(device: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every crash point, with lost gradients and without; the CPU stands in for a GPU.

    The kernel must leave the bf16 copies, which are the parameters, to the end: the last kind is a mutant.
    """
    more: dict[str, Any] = {"scheme": "undo" if kind == "undo" else "slots", "pool": Pool(data_pages=8)}
    if kind.startswith("one kernel"):
        if device == "cuda":
            pytest.skip("sixteen parity pages are needed")
        copied = [
            dataclasses.replace(s, model_offset=at) for s, at in zip(SEGMENTS, (0, 100, 177), strict=True)
        ]
        more["segments"] = copied
    world = DeviceDerivedWorld(device=device, **more)
    if kind.startswith("one kernel"):
        world.updater_class = OneLaunchUpdater
    memory, seen = world.start()[0], Counter()
    if kind == "one kernel that copies":
        monkeypatch.setattr(OneLaunch, "__init__", copies_too)
        with pytest.raises((Wrong, ProtocolError)):
            crash_everywhere(world, memory, seen)
        return
    crash_everywhere(world, memory, seen)
    assert not seen[None]
    assert seen["computed again"] > 5


def copies_too(self: Any, memory: Any) -> None:
    self.memory, self.plan, self.copies = memory, memory.plan, True


def crash_everywhere(world: DeviceDerivedWorld, memory: Any, seen: Counter[Any]) -> None:
    for i, point in enumerate(record_on_device(world, seed=7)):
        patterns = loss_patterns(world, np.random.default_rng([7, i]))
        outcome = examine(
            world,
            memory,
            point,
            patterns[("gradients", "none", "derived")[i % 3]],
            seed=i,
            go_on=int(i % 5 == 0),
        )
        seen[outcome.action] += 1
        seen["computed again"] += "computed again" in outcome.reason


# --- refusals ------------------------------------------------------------------------------------------
def test_plans_that_cannot_hold_it_are_refused() -> None:
    def plan(**more: Any) -> leto_rmu.UpdatePlan:
        segment = Segment("w", 64, model_offset=0 if more.pop("copy", False) else None)
        return leto_rmu.UpdatePlan([segment], config=Pool(), grad_numel=64, **more)  # type: ignore[arg-type]

    with pytest.raises(PlanError, match="parity"):
        plan(gradients="none")
    with pytest.raises(PlanError, match="model_bytes"):
        plan(gradients="recompute")
    assert plan(model_bytes=128).layout_hash != plan(model_bytes=128, gradients="recompute").layout_hash
    copies = plan(model_bytes=128, gradients="recompute", copy=True)
    memory = leto_rmu.ArrayMemory(copies.config)
    leto_rmu.ResumableUpdater(memory, copies, lambda: None)  # copies that are made after UPDATED are no harm
    kernel = type("Kernel", (ChunkTransactions,), {"copies": True})
    with pytest.raises(PlanError, match="chunk by chunk"):
        type("Up", (ResumableUpdater,), {"transactions": kernel})(memory, copies, lambda: None)


def crashed(world: DerivedWorld, gone: int) -> tuple[LabMemory, Point]:
    """In the middle of an update, with the first ``gone`` gradient pages lost."""
    points = record_iteration(world, seed=1, tears=0)
    point = next(p for p in points if "undo group=1" in p.label)
    memory = world.start()[0]
    memory.restore(point.state)
    grads = loss_patterns(world, np.random.default_rng(0))["gradients and derived"]
    memory.lose([ref for ref in grads if ref.allocation == "grads"][-gone:], 1)
    return memory, point


def test_without_a_function_the_vote_is_no() -> None:
    world = DerivedWorld()
    memory, _ = crashed(world, 1)
    up = ResumableUpdater(memory, world.plan, lambda: None, world.derive)
    decision = Decision.decode(leto_rmu.decide([up.summary()]))
    assert decision.action is Action.FRESH
    assert "no function to compute" in decision.reason


def test_other_bits_than_before_are_not_trained_on() -> None:
    """A computation that is not deterministic shows in the pages that survived; the state is given up."""
    world = DerivedWorld()
    memory, _ = crashed(world, 1)
    up = world.updater(memory)
    decision = leto_rmu.decide([up.summary()])
    assert Decision.decode(decision).regrade

    def noisy(up: ResumableUpdater, t: int, job_state: bytes) -> None:
        world.compute(up, t, job_state)
        up.grads[250] += 1e-3

    up.recompute_gradients = noisy
    with pytest.raises(ProtocolError, match="other bits"):
        up.recover(decision)
    assert world.updater(memory).position().phase is None


# --- mutants -------------------------------------------------------------------------------------------
class DerivedInTheUpdate(ResumableUpdater):
    """A chunk's parameters are overwritten with the chunk."""

    class transactions(ChunkTransactions):  # noqa: N801
        def update(self, group: int, chunk: int) -> Any:
            op = super().update(group, chunk)
            model, plane = self.memory.model, self.memory.planes["master"]

            def apply() -> None:
                op.apply()
                for p in self.plan.pieces(group, chunk):
                    model[2 * p.lo : 2 * p.hi].copy_(plane[p.lo : p.hi].to(torch.bfloat16).view(torch.uint8))

            writes = (*op.writes, model.numpy())
            return type(op)(op.name, op.group, op.chunk, writes, apply, op.iteration)


def hunt(kind: type[ResumableUpdater], losses: str) -> str | None:
    world = DerivedWorld(updater=kind)
    memory = world.start()[0]
    for i, point in enumerate(record_iteration(world, seed=3, tears=1)):
        patterns = loss_patterns(world, np.random.default_rng([3, i]))
        try:
            examine(world, memory, point, patterns[losses], seed=i, go_on=0)
            for again in record_recovery(world, memory, point, patterns[losses], seed=i):
                if "recompute" in again.label:
                    examine(world, memory, again, seed=i, go_on=0)
        except (Wrong, ProtocolError) as wrong:
            return str(wrong)
    return None


def test_parameters_overwritten_too_early_are_caught() -> None:
    assert hunt(ResumableUpdater, "gradients") is None
    assert hunt(DerivedInTheUpdate, "gradients") is not None


def test_torn_gradients_without_a_mark_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: nothing says that gradients are being computed again when that is interrupted."""
    real = leto_rmu.recovery.Recovery._role

    def role(cell: Any, decision: Any, finish: bool) -> Any:
        return dataclasses.replace(real(cell, decision, finish), regrading=False)

    monkeypatch.setattr(leto_rmu.recovery.Recovery, "_role", staticmethod(role))
    assert hunt(ResumableUpdater, "gradients") is not None


def test_the_mark_is_cleared_only_when_all_is_computed() -> None:
    world = DerivedWorld()
    memory, _ = crashed(world, 2)
    log: list[str] = []
    up = world.updater(memory, Watch(log))
    up.recover(leto_rmu.decide([up.summary()]))
    at = log.index("recompute")
    assert log[at + 1] == "mark"
    assert "update" in log[at:]
    assert "update" not in log[:at]
    assert up.cell.phase is Phase.ITERATION
    assert not up.cell.regrading
    world.check(memory, up)
