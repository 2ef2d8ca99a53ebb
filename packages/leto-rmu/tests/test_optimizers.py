"""Bit equality with torch.optim, whole or in slices, and refusals by name."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rmu_lab import Pool, World

from leto_rmu import (
    SGD,
    AdamW,
    ArrayMemory,
    Hyper,
    ResumableUpdater,
    Segment,
    SyncResult,
    UnsupportedOption,
    UpdatePlan,
)

adam_hypers = st.builds(
    Hyper,
    lr=st.floats(1e-6, 1.0),
    betas=st.tuples(st.floats(0.01, 0.999), st.floats(0.0, 0.9999)),
    eps=st.sampled_from([1e-8, 1e-5, 1e-15]),
    weight_decay=st.sampled_from([0.0, 0.1, 0.01]),
)
sgd_hypers = st.builds(
    Hyper,
    lr=st.floats(1e-6, 1.0),
    momentum=st.sampled_from([0.0, 0.5, 0.9]),
    dampening=st.just(0.0),
    nesterov=st.booleans(),
    weight_decay=st.sampled_from([0.0, 0.1]),
).filter(lambda h: h.momentum > 0 or not h.nesterov)


def slices(numel: int, cuts: list[float]) -> list[slice]:
    edges = sorted({0, numel, *(int(c * numel) for c in cuts)})
    return [slice(a, b) for a, b in pairwise(edges)]


@settings(max_examples=60, deadline=None)
@given(
    numel=st.integers(1, 1000),
    cuts=st.lists(st.floats(0, 1), max_size=6),
    data=st.data(),
    sgd=st.booleans(),
    seed=st.integers(0, 2**32),
)
def test_slices_are_bit_equal_to_torch(
    numel: int, cuts: list[float], data: st.DataObject, sgd: bool, seed: int
) -> None:
    """Vector tails fall elsewhere in slices; the bits must not."""
    generator = torch.Generator().manual_seed(seed)
    optimizer = SGD() if sgd else AdamW()
    parameter = torch.nn.Parameter(torch.randn(numel, generator=generator))
    master = parameter.detach().clone()
    states = [torch.zeros(numel) for _ in optimizer.state_planes]
    reference = (torch.optim.SGD if sgd else torch.optim.AdamW)([parameter], lr=1.0, foreach=False)
    with_momentum = data.draw(st.booleans())
    for step in range(1, 7):
        hyper = data.draw(
            sgd_hypers.filter(lambda h: (h.momentum > 0) == with_momentum) if sgd else adam_hypers
        )
        optimizer.check(hyper)
        gradient = torch.randn(numel, generator=generator) * 10.0 ** (step - 4)
        gradient[torch.rand(numel, generator=generator) < 0.1] = -0.0
        parameter.grad = gradient.clone()
        names = (
            ("lr", "momentum", "nesterov", "weight_decay") if sgd else ("lr", "betas", "eps", "weight_decay")
        )
        reference.param_groups[0].update({n: getattr(hyper, n) for n in names})
        reference.step()
        kept = gradient.clone()
        parts = slices(numel, cuts)
        optimizer.apply(
            [master[s] for s in parts],
            [[p[s] for s in parts] for p in states],
            [gradient[s] for s in parts],
            hyper,
            step,
        )
        assert torch.equal(gradient, kept), "gradients are read only"
        assert bits(master) == bits(parameter.detach())
        for plane, name in zip(states, optimizer.state_planes, strict=True):
            found = reference.state[parameter].get(name)
            if found is not None:
                assert bits(plane) == bits(found)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize(
    "world",
    [
        World(seed=1),
        World(seed=2, optimizer=SGD()),
        World(seed=3, grad_dtype=torch.bfloat16),
        World(seed=4, grad_dtype=torch.float16, no_ops=frozenset({0, 3})),
        World(seed=5, optimizer=SGD(), no_ops=frozenset({0, 1, 5}), pool=Pool(tier1_pages=2)),
        World(
            seed=6,
            pool=Pool(page_bytes=512, data_pages=12, tier1_pages=6),
            segments=tuple(Segment(f"s{k}", 7 + 13 * k % 29, k % 3, 40 * (11 - k)) for k in range(12)),
            grad_numel=500,
        ),
    ],
)
def test_many_iterations_are_bit_equal_to_torch(world: World) -> None:
    """Clipping, unscaling, skipped iterations, several groups, warm-up; segments split anywhere."""
    memory, up = world.start()
    for _ in range(40):
        world.iterate(up)
        world.check(memory, up)
    assert up.steps == 40 - len(world.no_ops)


def test_two_roundings_not_one() -> None:
    """(g * inv_scale) * clip differs from g * (inv_scale * clip) in the last bit; torch makes the former."""
    pool = Pool()
    plan = UpdatePlan([Segment("w", 64)], SGD(), config=pool, grad_numel=64)  # type: ignore[arg-type]
    up = ResumableUpdater(ArrayMemory(pool), plan, lambda: None)  # type: ignore[arg-type]
    up.initialize()
    up.grads.copy_(torch.randn(64, generator=torch.Generator().manual_seed(0)))
    up.compute_begins()
    up.step([Hyper(1.0)], b"", lambda: SyncResult(clip=0.3, inv_scale=1 / 3))
    twice = (up.grads * (1 / 3)) * 0.3
    assert not torch.equal(twice, up.grads * (1 / 3 * 0.3)), "a poor example"
    assert bits(up.master("w")) == bits(0 - twice)


@pytest.mark.parametrize("name", ["amsgrad", "maximize", "capturable", "differentiable"])
def test_unsupported_options_are_refused_by_name(name: str) -> None:
    parameter = torch.nn.Parameter(torch.zeros(1))
    group = torch.optim.AdamW([parameter]).param_groups[0]
    assert Hyper.from_param_group(group) == Hyper(1e-3, weight_decay=0.01)
    with pytest.raises(UnsupportedOption, match=name):
        Hyper.from_param_group({**group, name: True})


def test_hypers_are_checked() -> None:
    assert Hyper.from_param_group(
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.5, momentum=0.9).param_groups[0]
    ) == Hyper(0.5, momentum=0.9)
    with pytest.raises(UnsupportedOption, match="lr must be a Python float"):
        Hyper(torch.tensor(0.1))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedOption, match="betas"):
        AdamW().check(Hyper(0.1, betas=(1.0, 0.9)))
    with pytest.raises(UnsupportedOption, match="momentum"):
        AdamW().check(Hyper(0.1, momentum=0.9))
    with pytest.raises(UnsupportedOption, match="Nesterov"):
        SGD().check(Hyper(0.1, nesterov=True))
    with pytest.raises(UnsupportedOption, match="two floats"):
        Hyper(0.1, betas=(0.1,))  # type: ignore[arg-type]
