"""What every update uses is there before the first one, which takes no longer than others (paper, 8.1: R)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cuda_lab import DeviceWorld
from rmu_lab import Pool
from sim_lanes import OneLaunchWorld

import leto_rmu
from leto_rmu import AdamW, Segment
from leto_rmu.cuda import CudaUpdater
from leto_rmu.cuda.views import CudaRankMemory

POOL = Pool(page_bytes=512, data_pages=64, tier1_pages=16, tier2_pages=1)


class HostPlan:
    """In the place of leto-ec's plans on a GPU: the same work, done on the host when it is run."""

    kernel = "none"

    def __init__(self, kind: str, code: Any, groups: list[Any], outs: list[Any]) -> None:
        assert kind == "encode"
        self._work = [(code, group, out) for group, out in zip(groups, outs, strict=True)]

    def run(self) -> None:
        for code, group, out in self._work:
            code.encode(group, out=out)


class OnStandIn(CudaRankMemory):
    """Takes the ways of a GPU, with plans and no kernel, over memory of the host."""

    library = None

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.on_gpu = True

    def _plan(self, kind: str, *args: Any, **more: Any) -> Any:
        return HostPlan(kind, *args, **more)

    def update_parity(self, *args: Any) -> None:
        self.on_gpu = False  # plans of single chunks are not what this is about
        super().update_parity(*args)
        self.on_gpu = True


class StandIn(CudaUpdater):
    views = OnStandIn


class Late(OnStandIn):
    """Broken: makes plans when they are first needed, as they once were made."""

    def make_ready(self) -> None:
        pass


class LateUpdater(CudaUpdater):
    views = Late


def slots_world(device: str) -> DeviceWorld:
    segments = (Segment("a", 2600, 0, 3, 0), Segment("b", 377, 1, 4003, 4001), Segment("c", 1300, 0, 4390))
    return OneLaunchWorld(
        device,
        pool=POOL,
        optimizer=AdamW(),
        scheme="slots",
        segments=segments,
        grad_numel=8000,
        model_bytes=9000,
    )


def plans_made(world: DeviceWorld, kind: type[CudaUpdater], monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Plans made: by a takeover, and by each of two iterations after it."""
    made = [0]

    def counted(plan: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            made[-1] += 1
            return plan(*args, **more)

        return call

    memory, _ = world.start()
    up = kind(memory, world.plan, lambda: None, world.derive)
    views: Any = kind.views
    monkeypatch.setattr(views, "_plan", counted(views._plan))
    up.recover(leto_rmu.decide([up.summary()]))
    for _ in range(2):
        made.append(0)
        world.iterate(up)
    world.check(memory, up)
    return made


def test_the_first_update_after_a_takeover_makes_no_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    made = plans_made(slots_world("cpu"), StandIn, monkeypatch)
    assert made[0] > 0
    assert made[1:] == [0, 0]


def test_plans_that_are_made_late_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    made = plans_made(slots_world("cpu"), LateUpdater, monkeypatch)
    assert made[1] > 0


@pytest.mark.gpu
def test_the_first_update_after_a_takeover_makes_no_plan_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    made = plans_made(slots_world("cuda"), CudaUpdater, monkeypatch)
    assert made[0] > 0
    assert made[1:] == [0, 0]


@pytest.mark.parametrize("gap", [0, 2])
def test_gradient_pages_that_are_neighbours_are_encoded_as_one_array(gap: int) -> None:
    """A page that no segment touches ends that; the parity is the same either way."""
    page = POOL.page_bytes // 4
    segments = (Segment("a", 3 * page, 0, 0), Segment("b", 2 * page, 0, (3 + gap) * page))
    world = DeviceWorld("cpu", pool=POOL, segments=segments, grad_numel=(5 + gap) * page)
    _, up = world.start()
    memory = up.memory
    assert world.plan.grad_groups == (tuple(k for k in range(5 + gap) if not 3 <= k < 3 + gap),)
    found = memory.grad_run(0)
    if gap:
        assert isinstance(found, list)
    else:
        assert isinstance(found, torch.Tensor)
        assert found.shape == (5, POOL.page_bytes)
        assert found.data_ptr() == up.grads.data_ptr()
    up.grads.copy_(torch.arange(up.grads.numel()))
    rows = [torch.zeros(POOL.tier1_pages, POOL.page_bytes, dtype=torch.uint8) for _ in range(2)]
    memory.code.encode(found, out=rows[0])
    memory.code.encode(memory.grad_group(0), out=rows[1])
    assert torch.equal(*rows)
    assert np.any(rows[0].numpy())
