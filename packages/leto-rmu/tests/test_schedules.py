"""Hyperparameters that change with every step and differ between groups: the bits of torch.optim."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rmu_lab import LabMemory, Pool, World, Wrong

import leto_rmu.updater
from leto_rmu import SGD, AdamW, Executor, Hyper, SyncResult, UnsupportedOption, decide
from leto_rmu.cuda.rules import sgd as constants
from leto_rmu.faults import StopAt, Stopped
from leto_rmu.optimizers import with_beginnings

# Not zero for beta1: the sign of a moment that is zero is torch's own affair then (leto_rmu.optimizers).
ADAMW = st.builds(
    Hyper,
    lr=st.sampled_from([0.0, 1e-3, 0.5, 3.0, -0.1]),
    betas=st.tuples(st.sampled_from([0.3, 0.5, 0.9, 0.999]), st.sampled_from([0.0, 0.5, 0.95, 0.9999])),
    eps=st.sampled_from([0.0, 1e-15, 1e-8, 0.1]),
    weight_decay=st.sampled_from([0.0, 0.1, 1.5, -0.1]),
)
SGDS = st.builds(
    Hyper,
    lr=st.sampled_from([0.0, 1e-3, 0.5, -0.1]),
    momentum=st.sampled_from([0.0, 0.0, 0.5, 0.9, 1.0]),
    dampening=st.sampled_from([0.0, 0.4, 1.0]),
    weight_decay=st.sampled_from([0.0, 0.1]),
)
NESTEROV = st.builds(
    Hyper,
    lr=st.sampled_from([1e-3, 0.5]),
    momentum=st.sampled_from([0.5, 0.9]),
    weight_decay=st.sampled_from([0.0, 0.1]),
    nesterov=st.just(True),
)


@dataclass(frozen=True)
class Moment:
    """One iteration: hyperparameters of both groups, found-inf, and where it is stopped (operation, tear)."""

    hypers: tuple[Hyper, Hyper]
    found_inf: bool = False
    stop: tuple[int, int | None] | None = None


def moments(hypers: st.SearchStrategy[Hyper]) -> st.SearchStrategy[list[Moment]]:
    stops = st.none() | st.tuples(st.integers(0, 60), st.none() | st.integers(0, 1000))
    one = st.builds(Moment, st.tuples(hypers, hypers), st.sampled_from([False, False, True]), stops)
    return st.lists(one, min_size=2, max_size=9)


class Scheduled(World):
    def __init__(self, schedule: list[Moment], sgd: bool, scheme: str) -> None:
        self.schedule = schedule
        super().__init__(
            seed=3,
            optimizer=SGD() if sgd else AdamW(),
            scheme=scheme,
            pool=Pool(data_pages=8) if scheme == "slots" else Pool(),
            no_ops=frozenset(t for t, moment in enumerate(schedule) if moment.found_inf),
        )

    def hypers(self, t: int) -> list[Hyper]:
        return list(self.schedule[t].hypers)

    def gradient(self, t: int) -> torch.Tensor:
        gradient = super().gradient(t)
        gradient[t % 3 :: 5] = -0.0
        return gradient


def play(world: Scheduled) -> None:
    """Every iteration, stopped and resumed where the schedule has it so; compared after each."""
    memory, up = world.start()
    for t, moment in enumerate(world.schedule):
        if moment.stop is not None:
            up.executor = StopAt(moment.stop[0], seed=moment.stop[1])
            try:
                world.iterate(up)
            except Stopped:
                up = world.updater(memory)
                up.recover(decide([up.summary()]))
        up.executor = Executor()
        world.train(up, t + 1)
        world.check(memory, up)


@settings(max_examples=30, deadline=None)
@given(schedule=moments(ADAMW), scheme=st.sampled_from(["undo", "slots"]))
def test_schedules_of_adamw(schedule: list[Moment], scheme: str) -> None:
    play(Scheduled(schedule, False, scheme))


@settings(max_examples=60, deadline=None)
@given(schedule=moments(SGDS | NESTEROV), scheme=st.sampled_from(["undo", "slots"]))
def test_schedules_of_sgd(schedule: list[Moment], scheme: str) -> None:
    play(Scheduled(schedule, True, scheme))


PLAIN, HEAVY = Hyper(0.1), Hyper(0.1, momentum=0.9, dampening=0.4)


@pytest.mark.parametrize(
    "schedule",
    [
        [Moment((PLAIN, HEAVY)), Moment((HEAVY, HEAVY)), Moment((HEAVY, PLAIN)), Moment((PLAIN, HEAVY))],
        # A skipped iteration makes no buffer; nor does one that a crash sends back to its start.
        [Moment((PLAIN, PLAIN)), Moment((HEAVY, HEAVY), found_inf=True), Moment((HEAVY, HEAVY))],
        [Moment((HEAVY, HEAVY), found_inf=True), Moment((PLAIN, PLAIN)), Moment((HEAVY, HEAVY))],
        [Moment((PLAIN, PLAIN)), Moment((HEAVY, HEAVY), stop=(2, None)), Moment((HEAVY, HEAVY))],
        # Stopped in the update in which the buffer begins: its chunks are begun alike before and after.
        [Moment((PLAIN, PLAIN)), Moment((HEAVY, HEAVY), stop=(25, 1)), Moment((HEAVY, HEAVY))],
    ],
)
def test_momentum_that_begins_later(schedule: list[Moment]) -> None:
    """torch's buffer is a copy of the first gradient that meets a momentum, undampened, in any step."""
    for scheme in ("undo", "slots"):
        play(Scheduled(schedule, True, scheme))


@pytest.mark.parametrize("mutant", ["never", "though skipped"])
def test_buffers_that_begin_wrongly_are_caught(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(hypers: Any, before: Any, steps: int, applied: bool) -> Any:
        found = with_beginnings(hypers, before, steps, True)
        return hypers if mutant == "never" else found

    monkeypatch.setattr(leto_rmu.updater, "with_beginnings", wrong)
    schedule = [Moment((PLAIN, PLAIN)), Moment((HEAVY, HEAVY), found_inf=True), Moment((HEAVY, HEAVY))]
    with pytest.raises(Wrong, match="chunks"):
        play(Scheduled(schedule, True, "undo"))


def test_beginnings_of_momentum() -> None:
    def begins(*args: object) -> list[bool]:
        return [h.begins for h in with_beginnings([HEAVY, PLAIN], *args)]  # type: ignore[arg-type]

    assert begins((), 0, True) == [True, True]
    before = with_beginnings([HEAVY, PLAIN], (), 0, True)
    assert begins(before, 1, True) == [False, True]
    assert begins(before, 1, False) == [True, True]
    assert begins((), 7, True) == [False, False], "buffers of a checkpoint are taken as they are"
    flags = [constants(h, step)[1] & 4 for h, step in ((before[1], 5), (HEAVY, 5), (HEAVY, 1))]
    assert [bool(flag) for flag in flags] == [True, False, True], "the kernel is told as well"


def test_state_from_a_checkpoint_keeps_its_buffers() -> None:
    world = Scheduled([Moment((HEAVY, HEAVY))] * 4, True, "undo")
    _, up = world.start()
    world.train(up, 2)
    kept = {(s.name, k): up.read(s.name, k) for s in world.plan.segments for k in world.plan.plane_names}
    memory = LabMemory(world.pool)  # type: ignore[arg-type]
    again = world.updater(memory)
    for (name, plane), value in kept.items():
        again.write(name, plane, value)
    again.initialize(2, world.job(2), steps=2, keep_state=True)
    world.train(again, 4)
    world.check(memory, again)


def test_what_torch_would_compute_in_another_precision_is_refused() -> None:
    """lr and betas may be tensors in torch, which then multiplies in single precision."""
    parameter = torch.nn.Parameter(torch.zeros(1))
    group = torch.optim.AdamW([parameter], lr=torch.tensor(0.1)).param_groups[0]
    with pytest.raises(UnsupportedOption, match=r"lr must be a Python float.*float\(lr\)"):
        Hyper.from_param_group(group)
    with pytest.raises(UnsupportedOption, match="betas must be a Python float"):
        Hyper(0.1, betas=(torch.tensor(0.9), 0.99))  # type: ignore[arg-type]


def test_weight_decay_of_adam_is_not_that_of_adamw() -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    group = torch.optim.Adam([parameter], lr=0.1, weight_decay=0.01).param_groups[0]
    group.setdefault("decoupled_weight_decay", False)
    with pytest.raises(UnsupportedOption, match="not decoupled"):
        Hyper.from_param_group(group)
    assert Hyper.from_param_group({**group, "weight_decay": 0.0}) == Hyper(0.1)
    assert Hyper.from_param_group({**group, "decoupled_weight_decay": True}).weight_decay == 0.01


def test_a_skipped_iteration_has_the_sync_of_its_own() -> None:
    world = Scheduled([Moment((PLAIN, HEAVY), found_inf=True), Moment((HEAVY, HEAVY))], True, "undo")
    memory, up = world.start()
    world.train(up, 1)
    assert isinstance(up.last_sync, SyncResult)
    assert up.last_sync.found_inf
    world.train(up, 2)
    world.check(memory, up)
