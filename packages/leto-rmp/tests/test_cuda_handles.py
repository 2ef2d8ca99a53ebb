"""GPU pages that share a handle: each is lost and repaired by itself, its neighbours only move.

With the fake driver and, where the fixture `cuda` says so, on a GPU.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from leto_rmp import (
    Allocation,
    AllocationSpec,
    Client,
    Interleave,
    Kind,
    LocalizationFailed,
    ManagerProcess,
    NotEnoughMemory,
    PageMark,
    PageRef,
    PoolConfig,
    Role,
    client_memory,
)
from leto_rmp.cuda import CudaBackend, CudaSection
from leto_rmp.driver import Driver
from leto_rmp.layout import SectionLayout
from leto_rmp.pool import Pool

PAGE = 2 << 20
CONFIG = PoolConfig(PAGE, 12, 3, 1, backend="cuda", gpu_pages_per_handle=5)
PAGES, HANDLES = 24, 5  # the last handle holds four
ARENA = AllocationSpec("arena", PAGES * PAGE, Kind.RETAINED, Interleave(3, 2))
LOST, REMAPPED = PageMark.LOST, PageMark.REMAPPED
Attach = Callable[..., Client]
Start = Callable[..., ManagerProcess]


def refs(*pages: int) -> list[PageRef]:
    return [PageRef("arena", "data", page) for page in pages]


def expected(*zero: int) -> np.ndarray:
    pages = np.random.default_rng(7).integers(0, 256, (PAGES, PAGE), dtype=np.uint8)
    pages[list(zero)] = 0
    return pages


def contents(a: Allocation) -> np.ndarray:
    return np.frombuffer(a.pages.read(), np.uint8).reshape(-1, PAGE)


def fill(client: Client) -> Allocation:
    a = client.allocate([ARENA])["arena"]
    a.pages.write(0, expected().tobytes())
    return a


@pytest.fixture
def manager(cuda: str, spawn: Start) -> ManagerProcess:
    """Override: a manager of GPU pages, five in a handle."""
    return spawn(CONFIG)


@pytest.fixture
def maps(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(address, bytes) of everything that this process maps from now on."""
    seen: list[tuple[int, int]] = []
    real = Driver.map_fd

    def noting(self: Driver, address: int, nbytes: int, fd: int) -> None:
        seen.append((address, nbytes))
        real(self, address, nbytes, fd)

    monkeypatch.setattr(Driver, "map_fd", noting)
    return seen


def test_from_loss_to_health(manager: ManagerProcess, attach: Attach, maps: list[tuple[int, int]]) -> None:
    writer, agent, shadow = attach(Role.WRITER, 0), attach(Role.CONTROL, 0), attach(Role.OBSERVER, 1)
    fill(writer)
    maps.clear()
    ahead = shadow.allocations()["arena"]
    assert [nbytes // PAGE for _address, nbytes in maps] == [5, 5, 5, 5, 4]
    assert shadow.status().kept_fds == HANDLES
    writer.close()

    assert agent.inject_lose(refs(6, 8, 23), seed=3) == "unmapped"
    late = attach(Role.OBSERVER, 1)
    late.allocations()
    assert agent.localize(read=False) == dict.fromkeys(refs(6, 8, 23), LOST), "no neighbour is lost with it"
    assert agent.remap() == dict.fromkeys(refs(6, 8, 23), REMAPPED)
    moved = (*range(5, 10), *range(20, 24))
    maps.clear()
    assert shadow.refresh() == late.refresh() == tuple(refs(*moved))
    assert maps[:2] == [(ahead.address + 5 * PAGE, 5 * PAGE), (ahead.address + 20 * PAGE, 4 * PAGE)]
    assert shadow.status().uncleared_pages == 3
    shadow.become_writer(1)
    assert shadow.status().uncleared_pages == 0
    assert np.array_equal(contents(ahead), expected(6, 8, 23)), "zero, and nothing else changed"
    shadow.acknowledge(refs(6, 8, 23))
    assert shadow.localize() == {}
    ahead.pages.write(6 * PAGE, b"again")
    assert late.allocations()["arena"].pages.read(6 * PAGE, 5) == b"again", "one memory for all"


def test_all_pages_of_a_handle(manager: ManagerProcess, attach: Attach) -> None:
    writer, agent = attach(Role.WRITER, 0), attach(Role.CONTROL, 0)
    a = fill(writer)
    agent.inject_lose(refs(*range(5, 10)), seed=3)
    assert agent.localize() == dict.fromkeys(refs(*range(5, 10)), LOST)
    writer.remap()
    assert np.array_equal(contents(a), expected(*range(5, 10)))


def test_a_living_writer_waits_for_its_device_before_pages_are_copied(
    manager: ManagerProcess, attach: Attach, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = attach(Role.WRITER, 0)
    a = fill(writer)
    order: list[str] = []
    drain, request = client_memory.ClientMemory.drain, writer._request

    def drained(memory: client_memory.ClientMemory) -> None:
        order.append("drain")
        drain(memory)

    def asked(message: object, *rest: object) -> object:
        order.append(type(message).__name__)
        return request(message, *rest)  # type: ignore[arg-type]

    writer.before_remap.append(lambda found: order.append(f"before {[ref.index for ref in found]}"))
    writer.inject_lose(refs(11), seed=3)
    writer.localize(read=False)
    monkeypatch.setattr(client_memory.ClientMemory, "drain", drained)
    monkeypatch.setattr(writer, "_request", asked)
    order.clear()
    writer.remap()
    wanted = ["before [10, 11, 12, 13, 14]", "drain", "Remap"]
    assert [what for what in order if what in wanted] == wanted
    assert np.array_equal(contents(a), expected(11))


def test_what_the_driver_does_not_know_is_lost_as_a_whole(manager: ManagerProcess, attach: Attach) -> None:
    writer = attach(Role.WRITER, 0)
    a = fill(writer)
    (mapped,) = [found for _name, _section, found in writer._memory._device_ranges()]
    mapped._pages.driver.unmap(a.address + 10 * PAGE, 5 * PAGE)
    assert writer.localize(read=False) == dict.fromkeys(refs(*range(10, 15)), LOST)
    mapped._pages.mapped[10:15] = bytes(5)
    writer.remap()
    assert np.array_equal(contents(a), expected(*range(10, 15)))


def test_an_unreadable_neighbour_is_an_error_and_not_a_copy(
    use_cuda: Callable[[str], str], spawn: Start
) -> None:
    """The fake's contained ECC error: pages that nobody has read yet."""
    use_cuda("fake")
    with Client.connect(spawn(CONFIG).socket_path) as client:
        client.attach(Role.WRITER, 0)
        a = fill(client)
        for page in (0, 13, 14, 23):
            a.pages.write(page * PAGE, b"FAKE-ECC")
        client.inject_lose(refs(11), seed=3)
        assert client.localize(read=False) == {refs(11)[0]: LOST}
        with pytest.raises(LocalizationFailed, match=r"localize\(read=True\)"):
            client.remap()
        assert client.marks() == {refs(11)[0]: LOST}, "nothing was replaced"
        assert client.localize() == dict.fromkeys(refs(0, 11, 13, 14, 23), LOST)
        client.remap()
        assert np.array_equal(contents(a), expected(0, 11, 13, 14, 23))
        client.acknowledge(refs(0, 11, 13, 14, 23))
        assert client.localize() == {}


# -- the pool alone, with what is wrong on purpose -----------------------------------------------


@pytest.fixture
def pool(use_cuda: Callable[[str], str]) -> Iterator[Pool]:
    """A pool of pages that begin with their number, counted from 1, on the fake driver."""
    use_cuda("fake")
    backend = CudaBackend()
    one = Pool(CONFIG, backend)
    one.create([ARENA])
    one.cleared(one.uncleared(), one.epoch)
    section = one.section("arena", "data")
    assert isinstance(section, CudaSection)
    with backend.batch():
        for page in range(PAGES):
            with section._page_in_helper(page) as (helper, number):
                helper.write(number, bytes([page + 1]) * 64)
    yield one
    backend.close()


def first_bytes(pool: Pool) -> list[int]:
    """The first byte of every page."""
    found = []
    section = pool.section("arena", "data")
    for number in range(section.handle_count):
        (handle,) = section.export(number, 1)
        assert handle is not None
        with open(f"/proc/self/fd/{handle.fileno()}", "rb") as memory:
            for page, _ in enumerate(section.layout.pages_of(number)):
                memory.seek(page * PAGE)
                found.append(memory.read(1)[0])
    return found


def lose_and_remap(pool: Pool) -> None:
    pool.inject_lose(refs(7, 21), 1, poison=False)
    pool.localize(read=False)
    before = pool.epoch
    pool.remap()
    others = [page for page in range(PAGES) if page not in (7, 21)]
    found = first_bytes(pool)
    assert [found[page] for page in others] == [page + 1 for page in others], "neighbours keep their contents"
    assert [(run.first, run.count) for run in pool.replaced_since(before)] == [(5, 5), (20, 4)]
    assert [(run.first, run.count) for run in pool.uncleared()] == [(7, 1), (21, 1)]


def test_neighbours_keep_their_contents(pool: Pool) -> None:
    lose_and_remap(pool)
    assert first_bytes(pool)[7] != 8, "what was lost is not copied"


def test_a_replacement_that_copies_nothing_is_caught(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: neighbours get fresh memory, and nobody knows that they were lost."""
    monkeypatch.setattr(CudaSection, "_copy_rest", lambda *_: None)
    with pytest.raises(AssertionError, match="neighbours"):
        lose_and_remap(pool)


def test_a_replacement_that_tells_of_one_page_is_caught(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: who zeroed a neighbour's old page would count as having zeroed its new one."""
    monkeypatch.setattr("leto_rmp.pool._beside", lambda _section, ref: [ref])
    with pytest.raises(AssertionError):
        lose_and_remap(pool)


def test_an_uncleared_neighbour_stays_uncleared(pool: Pool) -> None:
    pool.inject_lose(refs(7), 1, poison=False)
    pool.localize(read=False)
    pool.remap()
    before = pool.epoch
    pool.inject_lose(refs(8), 1, poison=False)
    pool.localize(read=False)
    pool.remap()
    pool.cleared(pool.uncleared(), before)  # by a writer that knew the handles of before
    assert [(run.first, run.count) for run in pool.uncleared()] == [(7, 2)]


def test_as_many_descriptors_as_handles(
    use_cuda: Callable[[str], str], count_fds: Callable[..., int]
) -> None:
    use_cuda("fake")
    backend = CudaBackend()
    for per_handle in (1, 5, 24, 512):
        pool = Pool(dataclasses.replace(CONFIG, gpu_pages_per_handle=per_handle), backend)
        before = count_fds()
        pool.create([dataclasses.replace(ARENA, kind=Kind.TRANSACTION)])
        assert count_fds() - before == -(-PAGES // per_handle) == backend.exported_handles()
        pool.free(["arena"])
    backend.close()


def takes_as_many_bytes_as_it_has(backend: CudaBackend, per_handle: int) -> None:
    """The last handle holds what is left, before and after it was replaced: room is computed from pages."""
    pool = Pool(dataclasses.replace(CONFIG, gpu_pages_per_handle=per_handle), backend)
    pool.create([dataclasses.replace(ARENA, kind=Kind.TRANSACTION)])
    section = pool.section("arena", "data")
    for _ in range(2):
        found = [handle for handle in section.export(0, section.handle_count) if handle is not None]
        assert sum(os.fstat(handle.fileno()).st_size for handle in found) == section.layout.nbytes
        del found
        pool.inject_lose(refs(PAGES - 1), 1, poison=False)
        pool.localize(read=False)
        pool.remap()
    pool.free(["arena"])


@pytest.mark.parametrize("per_handle", [1, 5, 16, 512])
def test_the_last_handle_is_no_larger_than_its_pages(use_cuda: Callable[[str], str], per_handle: int) -> None:
    use_cuda("fake")
    backend = CudaBackend()
    takes_as_many_bytes_as_it_has(backend, per_handle)
    backend.close()


def test_a_last_handle_of_full_size_is_caught(
    use_cuda: Callable[[str], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mutant: a small region would take up to fifteen pages more than anybody counted."""
    use_cuda("fake")
    backend = CudaBackend()
    full = property(lambda self: (self.pages_per_handle,) * -(-self.pages // self.pages_per_handle))
    monkeypatch.setattr(SectionLayout, "handle_pages", full)
    with pytest.raises(AssertionError):
        takes_as_many_bytes_as_it_has(backend, 16)
    backend.close()


def test_what_lacks_memory_for_a_fresh_handle_replaces_nothing(
    use_cuda: Callable[[str], str], spawn: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old handle is there until its clients have let go of it, so a lost page needs a handle's room."""
    use_cuda("fake")
    monkeypatch.setenv("FAKE_CUDA_PAGES", str(PAGES + 4))  # a handle has five
    with Client.connect(spawn(CONFIG).socket_path) as client:
        client.attach(Role.WRITER, 0)
        a = fill(client)
        client.inject_lose(refs(3), seed=3)
        client.localize(read=False)
        with pytest.raises(NotEnoughMemory):
            client.remap()
        assert client.marks() == {refs(3)[0]: LOST}, "still lost, and the rest is as it was"
        client.free(["arena"])
        assert not client.allocate([ARENA])["arena"].pages.read(0, 64).strip(b"\0")
        del a
