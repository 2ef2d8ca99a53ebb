"""The memory border: plain arrays, and a real state manager through leto_rmp."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from rmu_lab import Pool, World

from leto_rmp import (
    AllocationSpec,
    Client,
    Kind,
    PageMark,
    PageRef,
    PoolConfig,
    Role,
    SpecMismatch,
    spawn_manager,
)
from leto_rmu import (
    Action,
    ArrayMemory,
    ClientMemory,
    PlanError,
    ProtocolError,
    ResumableUpdater,
    decide,
    protected_groups,
)

CONFIG = PoolConfig(page_bytes=4096, data_pages=12, tier1_pages=6, tier2_pages=1)
WORLD = World(pool=CONFIG, segments=World().plan.segments, model_bytes=6000)  # type: ignore[arg-type]


@pytest.fixture
def socket(tmp_path: Path) -> Iterator[Path]:
    with spawn_manager(tmp_path / "rank0", "rmu-test", 0, CONFIG) as manager:
        yield manager.socket_path


def updater(client: Client) -> ResumableUpdater:
    return ResumableUpdater(client, WORLD.plan, lambda: None, WORLD.derive)


def check(up: ResumableUpdater, client: Client) -> None:
    WORLD.check(SimpleNamespace(regions=up.memory.regions, marks=client.marks()), up)  # type: ignore[arg-type]


def test_pages_found_lost_are_remapped_by_the_updater_itself(socket: Path) -> None:
    with Client.connect(socket) as client:
        client.attach(Role.WRITER, 1)
        up = updater(client)
        assert up.recover(decide([up.summary()])).action is Action.FRESH
        for s in WORLD.plan.segments:
            up.master(s.name).copy_(WORLD.initial(s.name))
        up.initialize(0, WORLD.job(0))
        WORLD.train(up, 3)
        check(up, client)
        del up
    with Client.connect(socket) as client:
        client.attach(Role.WRITER, 2)
        lost = [PageRef("arena", "data", k) for k in (0, 2, 4)] + [PageRef("arena", "tier1", 1)]
        lost += [PageRef("marker", "data", 0), PageRef("undo", "data", 1), PageRef("model", "data", 1)]
        client.inject_lose(lost, seed=3)
        client.localize()
        assert set(client.marks().values()) == {PageMark.LOST}
        up = updater(client)
        recovered = up.recover(decide([up.summary()]))
        assert (recovered.action, recovered.iteration, recovered.verified) == (Action.RESTART, 3, True)
        assert recovered.pages_reconstructed >= 3
        check(up, client)
        WORLD.train(up, 5)
        check(up, client)


def test_groups_are_resolved_by_a_control_client(socket: Path) -> None:
    """What drills need: the pages of a logical group, without the plan, while no trainer lives."""
    world = World(pool=CONFIG, scheme="slots", chunk_pages=3, align=False, model_bytes=6000)  # type: ignore[arg-type]
    with Client.connect(socket) as client:
        client.attach(Role.WRITER, 1)
        up = ResumableUpdater(client, world.plan, lambda: None, world.derive)
        for s in world.plan.segments:
            up.write(s.name, "master", world.initial(s.name))
        up.initialize(0, world.job(0))
        world.train(up, 3)
        del up
    with Client.connect(socket) as control:
        control.attach(Role.CONTROL, 2)
        found = protected_groups(control)
        assert found == tuple(tuple(p for p in order if p is not None) for order in world.group_orders(3))
        lost = [PageRef("arena", "data", page) for page in found[0][: CONFIG.tier1_pages]]
        control.inject_lose(lost, seed=1)
        control.localize()
        control.remap()
    with Client.connect(socket) as client:
        client.attach(Role.WRITER, 2)
        up = ResumableUpdater(client, world.plan, lambda: None, world.derive)
        recovered = up.recover(decide([up.summary()]))
        assert (recovered.iteration, recovered.pages_reconstructed) == (3, len(lost))
        world.check(SimpleNamespace(regions=up.memory.regions, marks=client.marks()), up)  # type: ignore[arg-type]


def test_another_plan_over_the_same_memory_is_refused(socket: Path) -> None:
    with Client.connect(socket) as client:
        client.attach(Role.WRITER, 1)
        updater(client)
        other = dataclasses.replace(WORLD.plan, job_state_bytes=100_000)
        with pytest.raises(SpecMismatch):
            ResumableUpdater(client, other, lambda: None)


def test_a_client_is_wrapped() -> None:
    class Fake:
        def __init__(self) -> None:
            self.calls: list[str] = []
            ref = PageRef("undo", "data", 0)
            self.found = {ref: PageMark.LOST}

        def marks(self) -> dict[PageRef, PageMark]:
            return dict(self.found)

        def localize(self) -> None:
            self.calls.append("localize")

        def remap(self) -> None:
            self.calls.append("remap")
            self.found = dict.fromkeys(self.found, PageMark.REMAPPED)

        def acknowledge(self, refs: list[PageRef]) -> None:
            self.calls.append(f"acknowledge {len(refs)}")
            for ref in refs:
                del self.found[ref]

    fake = Fake()
    memory = ClientMemory(fake)
    lost = memory.lost()
    assert lost == memory.lost() == {PageRef("undo", "data", 0)}
    memory.acknowledge(tuple(lost))
    assert memory.lost() == frozenset()
    assert fake.calls == ["localize", "remap", "acknowledge 1"]


def test_array_memory_reattaches_and_refuses_other_sizes() -> None:
    memory = ArrayMemory(Pool())  # type: ignore[arg-type]
    spec = AllocationSpec("x", 1000, Kind.RETAINED, group_pages=3)
    first = memory.allocate([spec])["x"]
    first.pages[:] = 7
    assert memory.allocate([spec])["x"].pages is first.pages
    assert first.tier1 is not None
    assert first.tier2 is not None
    assert (first.pages.shape, first.tier1.shape, first.tier2.shape) == ((4, 256), (2, 3, 256), (2, 1, 256))
    with pytest.raises(PlanError, match="exists as"):
        memory.allocate([dataclasses.replace(spec, nbytes=2000)])
    with pytest.raises(PlanError, match="no section"):
        memory.allocate([AllocationSpec("y", 10, Kind.DERIVED)])["y"].section("tier1")


def test_array_memory_keeps_marks_until_acknowledged() -> None:
    memory = ArrayMemory(Pool())  # type: ignore[arg-type]
    page = memory.allocate([AllocationSpec("x", 256, Kind.TRANSACTION)])["x"].pages[0]
    ref = PageRef("x", "data", 0)
    with pytest.raises(ProtocolError, match="not lost"):
        memory.acknowledge([ref])
    memory.lose([ref], seed=1)
    assert page.any()
    kept = page.copy()
    assert memory.lost() == {ref}
    memory.acknowledge([ref])
    assert memory.lost() == frozenset()
    assert np.array_equal(page, kept)
