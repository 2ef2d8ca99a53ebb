"""Lose, find, remap, acknowledge, with a crash in between; real poison and its declared simulation."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest

from leto_rmp import (
    AllocationSpec,
    Client,
    ConfigError,
    IllegalMark,
    ManagerProcess,
    NotWriter,
    PageMark,
    PageRef,
    PoolConfig,
    Role,
    UnknownName,
)
from leto_rmp.host import HostBackend
from leto_rmp.pool import Pool

PAGE = 4096
DATA = PageRef("arena", "data", 5)
TIER1 = PageRef("arena", "tier1", 4)
TIER2 = PageRef("arena", "tier2", 1)
LOST, REMAPPED = PageMark.LOST, PageMark.REMAPPED


@pytest.fixture(params=["auto", "simulated"])
def faulty(
    request: pytest.FixtureRequest, spawn: Callable[..., ManagerProcess], config: PoolConfig
) -> ManagerProcess:
    return spawn(config, poison=request.param)


@pytest.fixture
def clients(faulty: ManagerProcess) -> Iterator[Callable[[Role, int], Client]]:
    made: list[Client] = []

    def attach(role: Role, generation: int) -> Client:
        made.append(Client.connect(faulty.socket_path))
        made[-1].attach(role, generation)
        return made[-1]

    yield attach
    for client in made:
        client.close()


Clients = Callable[[Role, int], Client]


def fill(client: Client, arena: AllocationSpec) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    a = client.allocate([arena])["arena"]
    a.pages[:] = np.random.default_rng(0).integers(0, 256, a.pages.shape, dtype=np.uint8)
    assert a.tier1 is not None
    assert a.tier2 is not None
    a.tier1[:], a.tier2[:] = 11, 22
    return a.pages, a.tier1, a.tier2


def test_from_loss_to_health(clients: Clients, arena: AllocationSpec) -> None:
    writer, agent = clients(Role.WRITER, 0), clients(Role.CONTROL, 0)
    pages, tier1, tier2 = fill(writer, arena)
    kept = pages.copy()
    method = agent.inject_lose([DATA, TIER1, TIER2], seed=3)
    status = agent.status()
    assert method == status.poison
    assert status.simulated_pages == (3 if method == "simulated" else 0)
    assert bool(status.poison_reason) == (method == "simulated")
    assert agent.marks() == {}, "a loss has to be found"
    # Gone in the trainer's own mapping, not merely hidden:
    assert not np.array_equal(pages[5], kept[5])
    assert len(np.unique(pages[5])) > 100
    assert not (tier1[1, 1] == 11).all()
    assert not (tier2[1, 0] == 22).all()
    found = agent.localize()
    assert found == {DATA: LOST, TIER1: LOST, TIER2: LOST}
    assert list(found) == sorted(found)
    with pytest.raises(IllegalMark, match="remap it and reconstruct"):
        writer.acknowledge([DATA])
    assert agent.remap() == {DATA: REMAPPED, TIER1: REMAPPED, TIER2: REMAPPED}
    assert not pages[5].any()
    assert not tier1[1, 1].any()
    assert np.array_equal(np.delete(pages, 5, axis=0), np.delete(kept, 5, axis=0))
    assert agent.localize() == agent.marks(), "a remapped page is readable, and still not trusted"
    pages[5] = kept[5]
    tier1[1, 1] = 11
    writer.acknowledge([DATA, TIER1])
    assert writer.marks() == {TIER2: REMAPPED}
    assert agent.status().remapped_pages == 1
    with pytest.raises(IllegalMark, match="is healthy"):
        writer.acknowledge([TIER2, DATA])
    assert writer.marks() == {TIER2: REMAPPED}, "all or none"
    writer.acknowledge([TIER2])
    assert agent.localize() == {}
    assert np.array_equal(pages, kept)


def test_a_second_crash_never_trusts_an_empty_page(clients: Clients, arena: AllocationSpec) -> None:
    first = clients(Role.WRITER, 0)
    fill(first, arena)
    agent = clients(Role.CONTROL, 0)
    agent.inject_lose([DATA], seed=1)
    agent.localize()
    agent.remap()
    first.release()  # the recovering trainer is replaced before it has reconstructed
    second = clients(Role.OBSERVER, 1)
    assert second.marks() == {DATA: REMAPPED}
    with pytest.raises(NotWriter):
        second.acknowledge([DATA])
    second.become_writer(1)
    agent.inject_lose([DATA], seed=2)
    assert agent.localize() == {DATA: LOST}, "lost again"
    with pytest.raises(IllegalMark):
        second.acknowledge([DATA])
    agent.remap()
    second.acknowledge([DATA])
    assert agent.localize() == {}


def test_a_lost_page_without_remap_stays_lost(clients: Clients, arena: AllocationSpec) -> None:
    writer = clients(Role.WRITER, 0)
    fill(writer, arena)
    writer.inject_poison([DATA], seed=1)
    for _ in range(3):
        assert writer.localize() == {DATA: LOST}
    assert writer.remap() == {DATA: REMAPPED}
    assert writer.remap() == {DATA: REMAPPED}, "remapping again empties nothing"


def test_a_remap_touches_only_lost_pages(clients: Clients, arena: AllocationSpec) -> None:
    writer = clients(Role.WRITER, 0)
    pages, _, _ = fill(writer, arena)
    writer.inject_lose([DATA], seed=1)
    writer.localize()
    writer.remap()
    pages[5] = 77  # reconstructed, not yet acknowledged
    other = PageRef("arena", "data", 6)
    writer.inject_lose([other], seed=1)
    assert writer.localize() == {DATA: REMAPPED, other: LOST}
    writer.remap()
    assert (pages[5] == 77).all()


def test_whole_groups_can_go(clients: Clients, arena: AllocationSpec) -> None:
    writer = clients(Role.WRITER, 0)
    pages, _, _ = fill(writer, arena)
    refs = [PageRef("arena", "data", index) for index in range(24)]
    writer.inject_lose(refs, seed=1)
    assert list(writer.localize()) == refs
    writer.remap()
    assert not pages.any()


def test_injection_is_seeded(clients: Clients, arena: AllocationSpec) -> None:
    writer = clients(Role.WRITER, 0)
    pages, _, _ = fill(writer, arena)
    seen = []
    for seed in (1, 1, 2):
        writer.inject_lose([DATA], seed)
        seen.append(pages[5].tobytes())
    assert seen[0] == seen[1] != seen[2]
    writer.inject_lose([PageRef("arena", "data", 6)], 1)
    assert pages[6].tobytes() != seen[0]


def test_flips_are_silent(clients: Clients, arena: AllocationSpec) -> None:
    writer = clients(Role.WRITER, 0)
    pages, tier1, _ = fill(writer, arena)
    kept = pages.copy()
    writer.inject_flip(DATA, 100, 0x81)
    writer.inject_flip(TIER1, PAGE - 1, b"\x01")
    assert writer.localize() == {}
    assert np.argwhere(pages != kept).tolist() == [[5, 100]]
    assert pages[5, 100] == kept[5, 100] ^ 0x81
    assert tier1[1, 1, PAGE - 1] == 11 ^ 1
    for offset, mask in ((PAGE, 1), (-1, 1), (PAGE - 1, b"ab"), (0, b"")):
        with pytest.raises(ConfigError, match="does not lie"):
            writer.inject_flip(DATA, offset, mask)


def test_pages_that_do_not_exist(clients: Clients, arena: AllocationSpec) -> None:
    writer = clients(Role.WRITER, 0)
    pages, _, _ = fill(writer, arena)
    kept = pages.copy()
    bad = [PageRef("arena", "data", 24), PageRef("arena", "data", -1), PageRef("nothing", "data", 0)]
    for ref in bad:
        with pytest.raises(UnknownName):
            writer.inject_lose([DATA, ref], seed=1)
        with pytest.raises(UnknownName):
            writer.acknowledge([ref])
        with pytest.raises(UnknownName):
            writer.inject_flip(ref, 0, 1)
    assert np.array_equal(pages, kept), "all or none"


def test_observers_neither_inject_nor_remap(clients: Clients, arena: AllocationSpec) -> None:
    fill(clients(Role.WRITER, 0), arena)
    observer = clients(Role.OBSERVER, 1)
    for refused in (
        lambda: observer.inject_lose([DATA], 1),
        lambda: observer.inject_flip(DATA, 0, 1),
        observer.localize,
        observer.remap,
    ):
        with pytest.raises(NotWriter):
            refused()
    assert observer.marks() == {}


def test_freed_pages_lose_their_marks(clients: Clients, arena: AllocationSpec) -> None:
    writer = clients(Role.WRITER, 0)
    fill(writer, arena)
    writer.inject_lose([DATA], 1)
    writer.localize()
    writer.free(["arena"])
    assert writer.marks() == {}
    writer.allocate([arena])
    assert writer.localize() == {}
    assert writer.status().simulated_pages == 0


def test_a_remap_that_marks_healthy_is_caught(config: PoolConfig, arena: AllocationSpec) -> None:
    """Mutant: a pool whose remap also acknowledges would let a second crash trust an empty page."""

    class Trusting(Pool):
        def remap(self) -> None:
            super().remap()
            self.acknowledge([ref for ref, mark in self.marks().items() if mark is REMAPPED])

    def scenario(pool: Pool) -> None:
        pool.create([arena])
        pool.inject_lose([DATA], 1, poison=False)
        pool.localize()
        pool.remap()
        assert pool.marks() == {DATA: REMAPPED}
        pool.backend.close()

    scenario(Pool(config, HostBackend()))
    with pytest.raises(AssertionError):
        scenario(Trusting(config, HostBackend()))
