"""The cuda backend as a whole: real managers, clients and helpers, with the fake driver and with a GPU.

Every test that takes `cuda` runs with the fake, over handles of one page and of sixteen (the default), and on
a GPU with the latter. The fake shows the protocol, the bookkeeping and the processes; what only hardware can
show is in test_gpu.py.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from leto_rmp import (
    Allocation,
    AllocationSpec,
    Client,
    ConfigError,
    IllegalMark,
    Interleave,
    Kind,
    LocalizationFailed,
    ManagerProcess,
    NotEnoughMemory,
    PageMark,
    PageRef,
    PoolConfig,
    Role,
    WriterAlive,
)
from leto_rmp import protocol as p
from leto_rmp.backend import open_backend
from leto_rmp.cuda import CudaBackend
from leto_rmp.driver import Driver
from leto_rmp.errors import CudaError, CudaUnavailable
from leto_rmp.gpu_memory import wait_free
from leto_rmp.localize import find_unreadable
from leto_rmp.pinning import pieces
from leto_rmp.pool import Pool
from leto_rmp.prober import Helper

PAGE = 2 << 20
CONFIG = PoolConfig(PAGE, 12, 3, 1, backend="cuda")
ARENA = AllocationSpec("arena", 24 * PAGE, Kind.RETAINED, Interleave(3, 2))
MARKER = AllocationSpec("marker", 3 * PAGE, Kind.TRANSACTION, placement="host")
LOST, REMAPPED = PageMark.LOST, PageMark.REMAPPED
DATA, TIER1 = PageRef("arena", "data", 5), PageRef("arena", "tier1", 4)
WRITER = f"""
import sys, numpy as np
from leto_rmp import *
client = Client.connect(sys.argv[1])
client.attach(Role.WRITER, int(sys.argv[2]))
arena = AllocationSpec("arena", 24 * {PAGE}, Kind.RETAINED, Interleave(3, 2))
marker = AllocationSpec("marker", 3 * {PAGE}, Kind.TRANSACTION, placement="host")
found = client.allocate([arena, marker])
a = found["arena"]
a.pages.write(0, np.random.default_rng(7).integers(0, 256, 24 * {PAGE}, dtype=np.uint8).tobytes())
a.tier1[:], a.tier2[:], found["marker"].pages[:] = 9, 8, 7
print("written", flush=True)
sys.stdin.readline()
"""
Attach = Callable[..., Client]
Start = Callable[..., ManagerProcess]


@pytest.fixture(
    params=[("fake", 1), ("fake", 16), pytest.param(("gpu", 16), marks=pytest.mark.gpu)],
    ids=["fake-1", "fake-16", "gpu"],
)
def setting(request: pytest.FixtureRequest, use_cuda: Callable[[str], str]) -> tuple[str, PoolConfig]:
    """A driver, and a pool whose handles hold so many pages."""
    kind, per_handle = request.param
    return use_cuda(kind), dataclasses.replace(CONFIG, gpu_pages_per_handle=per_handle)


@pytest.fixture
def cuda(setting: tuple[str, PoolConfig]) -> str:
    """Override: the driver."""
    return setting[0]


@pytest.fixture
def config(setting: tuple[str, PoolConfig]) -> PoolConfig:
    """Override: the pool."""
    return setting[1]


@pytest.fixture
def manager(config: PoolConfig, spawn: Start) -> ManagerProcess:
    """Override: a manager of GPU pages."""
    return spawn(config, timeout_s=60.0)


def handles(config: PoolConfig, pages: int = 24) -> int:
    return -(-pages // config.gpu_pages_per_handle)


def beside(config: PoolConfig, page: int, pages: int = 24) -> range:
    """Return the pages of the handle that holds this one."""
    per = config.gpu_pages_per_handle
    return range(page // per * per, min(pages, (page // per + 1) * per))


def expected() -> np.ndarray:
    return np.random.default_rng(7).integers(0, 256, (24, PAGE), dtype=np.uint8)


def contents(a: Allocation) -> np.ndarray:
    return np.frombuffer(a.pages.read(), np.uint8).reshape(-1, PAGE)


def fill(client: Client) -> Allocation:
    a = client.allocate([ARENA, MARKER])["arena"]
    a.pages.write(0, expected().tobytes())
    a.tier1[:], a.tier2[:] = 9, 8  # type: ignore[index]
    return a


@pytest.fixture
def count_maps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Addresses of all pages that this process maps from now on."""
    seen: list[int] = []
    real = Driver.map_fd

    def counting(self: Driver, address: int, nbytes: int, fd: int) -> None:
        seen.append(address)
        real(self, address, nbytes, fd)

    monkeypatch.setattr(Driver, "map_fd", counting)
    return seen


# -- life and death ------------------------------------------------------------------------------


def test_pages_survive_the_kill_and_the_takeover_maps_nothing(
    manager: ManagerProcess,
    attach: Attach,
    worker: Callable[..., object],
    count_maps: list[int],
    config: PoolConfig,
) -> None:
    writer = worker(WRITER, manager.socket_path, 0)
    assert writer.line() == "written"
    shadow = attach(Role.OBSERVER, 1)
    ahead = shadow.allocations()["arena"]
    assert len(count_maps) == handles(config)
    assert not ahead.writable
    with pytest.raises(WriterAlive):
        shadow.become_writer(1)
    writer.kill()
    shadow.become_writer(1)
    found = shadow.allocate([ARENA, MARKER])
    assert len(count_maps) == handles(config), "the takeover maps nothing"
    a = found["arena"]
    assert not a.created
    assert a.writable
    assert a.address == ahead.address
    assert np.array_equal(contents(a), expected())
    assert (a.tier1 == 9).all()
    assert (a.tier2 == 8).all()
    assert (found["marker"].pages == 7).all()
    a.pages.write(PAGE, b"second")
    assert ahead.pages.read(PAGE, 6) == b"second"


def test_a_third_generation_attaches_afresh(
    manager: ManagerProcess, attach: Attach, worker: Callable[..., object]
) -> None:
    for generation in (0, 1):
        writer = worker(WRITER, manager.socket_path, generation)
        assert writer.line() == "written"
        writer.kill()
    a = attach(Role.WRITER, 2).allocate([ARENA])["arena"]
    assert np.array_equal(contents(a), expected())


def test_fresh_pages_are_zero_also_when_their_maker_was_killed_first(
    manager: ManagerProcess, attach: Attach, worker: Callable[..., object]
) -> None:
    """The fake fills new memory with junk, as a driver may."""
    code = WRITER.split("found =")[0] + (
        "from leto_rmp import protocol as p\n"
        "client._request(p.Allocate(specs=(arena, marker)), p.Described)\n"
        "print('made', flush=True); sys.stdin.readline()\n"
    )
    maker = worker(code, manager.socket_path, 0)
    assert maker.line() == "made"
    shadow = attach(Role.OBSERVER, 1)
    shadow.allocations()
    assert shadow.status().uncleared_pages == 24
    maker.kill()
    shadow.become_writer(1)
    assert shadow.status().uncleared_pages == 0
    assert not contents(shadow.allocations()["arena"]).any()


def test_control_clients_touch_no_gpu(
    manager: ManagerProcess, attach: Attach, worker: Callable[..., object]
) -> None:
    fill(attach(Role.WRITER, 0))
    code = """
    import sys
    from leto_rmp import *
    client = Client.connect(sys.argv[1]); client.attach(Role.CONTROL, 0)
    a = client.allocations()["arena"]
    print(len(a.groups), a.tier1.shape[0], "cuda" in sys.modules, flush=True)
    try:
        a.pages
    except ConfigError as error:
        print(error, flush=True)
    """
    agent = worker(code, manager.socket_path)
    assert agent.line() == "2 2 False"
    assert "control clients map none" in agent.line()


def test_release_stops_our_own_writes(
    manager: ManagerProcess, attach: Attach, worker: Callable[..., object], cuda: str
) -> None:
    """Views of a former writer are read-only, or gone where the driver has no read-only pages."""
    code = WRITER.replace("sys.stdin.readline()", "") + (
        "from leto_rmp.errors import CudaError\n"
        "view = a.pages\n"
        "client.release()\n"
        "print('released', flush=True)\n"
        "sys.stdin.readline()\n"
        "try:\n    view.write(0, b'late')\nexcept CudaError as error:\n    print('refused', flush=True)\n"
        "sys.stdin.readline()\n"
    )
    old = worker(code, manager.socket_path, 0)
    assert (old.line(), old.line()) == ("written", "released")
    a = attach(Role.WRITER, 1).allocations()["arena"]
    old.say()
    assert old.line() == "refused"
    assert np.array_equal(contents(a), expected())


@pytest.mark.parametrize("read_only", [True, False])
def test_a_writer_that_released_can_write_again(
    use_cuda: Callable[[str], str], spawn: Start, monkeypatch: pytest.MonkeyPatch, read_only: bool
) -> None:
    use_cuda("fake")
    if not read_only:
        monkeypatch.setenv("FAKE_CUDA_NO_READ_ONLY", "1")
    with Client.connect(spawn(CONFIG).socket_path) as client:
        client.attach(Role.WRITER, 0)
        a = fill(client)
        view = a.pages
        client.release()
        with pytest.raises(CudaError):
            view.write(0, b"late")
        client.become_writer(1)
        view.write(0, b"again")
        assert view.read(0, 5) == b"again"
        assert view.read(PAGE, PAGE) == expected()[1].tobytes()


# -- lost pages ----------------------------------------------------------------------------------


def test_from_loss_to_health(
    manager: ManagerProcess,
    attach: Attach,
    worker: Callable[..., object],
    count_maps: list[int],
    config: PoolConfig,
) -> None:
    writer = worker(WRITER, manager.socket_path, 0)
    assert writer.line() == "written"
    shadow, agent = attach(Role.OBSERVER, 1), attach(Role.CONTROL, 1)
    ahead = shadow.allocations()["arena"]
    calls: list[tuple[str, list[PageRef]]] = []
    shadow.before_remap.append(lambda refs: calls.append(("before", list(refs))))
    shadow.after_remap.append(lambda refs: calls.append(("after", list(refs))))
    writer.kill()
    method = agent.inject_lose([DATA, TIER1], seed=3)
    assert method == "+".join(sorted({"unmapped", agent.status().poison}))
    assert agent.marks() == {}, "a loss has to be found"
    stale = contents(ahead)[5]
    assert not np.array_equal(stale, expected()[5]), "gone where it is still mapped, too"
    assert len(np.unique(stale)) > 100
    assert agent.localize(read=False) == {DATA: LOST, TIER1: LOST}

    late = attach(Role.OBSERVER, 1)  # attaches while the page has no handle
    assert len(late.allocations()["arena"].pages) == 24
    assert agent.remap() == {DATA: REMAPPED, TIER1: REMAPPED}
    count_maps.clear()
    moved = [PageRef("arena", "data", page) for page in beside(config, 5)]
    assert late.refresh() == shadow.refresh() == tuple(moved)
    assert calls == [("before", moved), ("after", moved)]
    assert count_maps[1:] == [ahead.address + moved[0].index * PAGE], "one handle, at its address"
    assert shadow.refresh() == ()

    assert agent.status().uncleared_pages == 1
    shadow.become_writer(1)
    assert agent.status().uncleared_pages == 0
    kept = expected()
    kept[5] = 0
    assert np.array_equal(contents(ahead), kept), "zero, and nothing else changed"
    assert ahead.tier1 is not None
    assert not ahead.tier1[1, 1].any()
    assert agent.localize() == shadow.marks() == {DATA: REMAPPED, TIER1: REMAPPED}
    ahead.pages.write(5 * PAGE, expected()[5].tobytes())
    shadow.acknowledge([DATA, TIER1])
    assert shadow.localize() == {}
    assert np.array_equal(contents(ahead), expected())


def test_becoming_the_writer_follows_what_was_replaced(
    manager: ManagerProcess, attach: Attach, worker: Callable[..., object]
) -> None:
    writer = worker(WRITER, manager.socket_path, 0)
    assert writer.line() == "written"
    shadow, agent = attach(Role.OBSERVER, 1), attach(Role.CONTROL, 1)
    a = shadow.allocations()["arena"]
    writer.kill()
    agent.inject_lose([DATA], seed=3)
    agent.localize(read=False)
    agent.remap()
    shadow.become_writer(1)
    kept = expected()
    kept[5] = 0
    assert np.array_equal(contents(a), kept)


def test_a_living_writer_remaps_for_itself(
    manager: ManagerProcess, attach: Attach, config: PoolConfig
) -> None:
    """Case 14: it has pinned pages, and perhaps registered them elsewhere; nobody else may replace them."""
    writer, agent = attach(Role.WRITER, 0), attach(Role.CONTROL, 0)
    a = fill(writer)
    order: list[str] = []
    writer.before_remap.append(
        lambda refs: order.append(f"before {len(refs)} {writer.pinning.pinned_bytes > 0}")
    )
    writer.after_remap.append(
        lambda refs: order.append(f"after {len(refs)} {writer.pinning.pinned_bytes > 0}")
    )
    pinned = writer.pinning
    agent.inject_lose([DATA, TIER1], seed=3)
    with pytest.raises(WriterAlive, match="may have pinned"):
        agent.remap()
    assert writer.localize(read=False) == {DATA: LOST, TIER1: LOST}
    order.clear()
    assert writer.remap() == {DATA: REMAPPED, TIER1: REMAPPED}
    moved = len(beside(config, 5)) + 1
    assert order == [f"before {moved} True", f"after {moved} True"]
    assert writer.pinning == pinned
    assert not contents(a)[5].any()
    assert a.tier1 is not None
    assert not a.tier1[1, 1].any()
    writer.acknowledge([DATA, TIER1])


@pytest.mark.parametrize("per_handle", [1, 16])
def test_a_page_that_the_writer_never_mapped_cannot_be_acknowledged(
    use_cuda: Callable[[str], str], per_handle: int
) -> None:
    use_cuda("fake")
    backend = open_backend("cuda")
    config = dataclasses.replace(CONFIG, gpu_pages_per_handle=per_handle)
    pool = Pool(config, backend)
    pool.create([ARENA])
    pool.cleared(pool.uncleared(), pool.epoch)
    pool.inject_lose([DATA], 1, poison=False)
    pool.localize(read=False)
    before = pool.epoch
    pool.remap()
    moved = beside(config, 5)
    assert pool.replaced_since(before) == (p.PageRun("arena", "data", moved.start, len(moved)),)
    with pytest.raises(IllegalMark, match="refresh"):
        pool.acknowledge([DATA])
    pool.cleared(pool.uncleared(), before)  # zeroed the old page: it knew nothing of the new one
    with pytest.raises(IllegalMark, match="refresh"):
        pool.acknowledge([DATA])
    pool.cleared(pool.uncleared(), pool.epoch)
    pool.acknowledge([DATA])
    assert pool.marks() == {}
    backend.close()


def test_what_the_driver_does_not_know_is_lost(
    manager: ManagerProcess, attach: Attach, config: PoolConfig
) -> None:
    """The driver query: pages of ours, a handle's, are gone without anybody's saying so."""
    writer = attach(Role.WRITER, 0)
    a = fill(writer)
    (mapped,) = [found for _name, _section, found in writer._memory._device_ranges()]
    pages = beside(config, 20)
    mapped._pages.driver.unmap(a.address + pages.start * PAGE, len(pages) * PAGE)
    gone = [PageRef("arena", "data", page) for page in pages]
    assert writer.localize(read=False) == dict.fromkeys(gone, LOST)
    mapped._pages.mapped[pages.start : pages.stop] = bytes(len(pages))
    assert writer.remap() == dict.fromkeys(gone, REMAPPED)
    kept = expected()
    kept[list(pages)] = 0
    assert np.array_equal(contents(a), kept)


# -- the sacrificial reader ----------------------------------------------------------------------


@pytest.mark.parametrize("per_handle", [1, 16])
def test_reading_finds_what_no_query_shows(
    use_cuda: Callable[[str], str], spawn: Start, per_handle: int
) -> None:
    """The fake's contained ECC error kills the reader; the manager finds the pages and lives."""
    use_cuda("fake")
    config = dataclasses.replace(CONFIG, gpu_pages_per_handle=per_handle)
    with Client.connect(spawn(config).socket_path) as client:
        client.attach(Role.WRITER, 0)
        a = fill(client)
        assert client.localize() == {}
        for index in (0, 11, 12, 23):
            a.pages.write(index * PAGE, b"FAKE-ECC")
        refs = [PageRef("arena", "data", index) for index in (0, 11, 12, 23)]
        assert client.localize(read=False) == {}
        assert client.localize() == dict.fromkeys(refs, LOST)
        client.remap()
        assert client.localize() == dict.fromkeys(refs, REMAPPED)
        client.acknowledge(refs)
        assert client.localize() == {}


def test_a_reader_killed_from_outside_says_nothing_about_pages(
    use_cuda: Callable[[str], str], spawn: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cuda("fake")
    monkeypatch.setenv("FAKE_CUDA_DIES", "signal")
    with Client.connect(spawn(CONFIG).socket_path) as client:
        client.attach(Role.WRITER, 0)
        fill(client).pages.write(3 * PAGE, b"FAKE-ECC")
        with pytest.raises(LocalizationFailed, match="status -9"):
            client.localize()
        assert client.marks() == {}


def test_a_dead_context_is_a_finding_and_the_next_reader_goes_on(cuda: str) -> None:
    """A hole faults like a bad page, also on a GPU: its reader's context is dead, and is replaced."""
    backend = open_backend("cuda")
    assert isinstance(backend, CudaBackend)
    pool = Pool(dataclasses.replace(CONFIG, gpu_pages_per_handle=1), backend)  # for holes of one page
    pool.create([ARENA])
    section = pool.section("arena", "data")
    started = 0

    def open_reader() -> Helper:
        nonlocal started
        started += 1
        helper = Helper(backend.device_uuid, 24, PAGE)
        for index, handle in enumerate(section.export(0, 24)):
            if index in (4, 17):
                helper.skip(1)
            else:
                assert helper.load([handle]) == []  # type: ignore[list-item]
        return helper

    assert find_unreadable(24, open_reader, region_pages=8) == [4, 17]
    assert started == 5
    assert backend.read_through([section]) == []
    backend.close()


def test_a_device_that_cannot_be_read_at_all_is_an_error() -> None:
    class Dead:
        def __enter__(self) -> Dead:
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def read(self, first: int, count: int) -> bool:
            return False

    with pytest.raises(LocalizationFailed, match="10 readers died"):
        find_unreadable(1000, Dead, 8, readers_max=10)


# -- pinning -------------------------------------------------------------------------------------


def test_a_writer_pins_host_pages_and_an_observer_does_not(manager: ManagerProcess, attach: Attach) -> None:
    host_bytes = (2 * 3 + 2 * 1 + 3) * PAGE
    writer, observer = attach(Role.WRITER, 0), attach(Role.OBSERVER, 1)
    fill(writer)
    observer.allocations()
    assert (writer.pinning.pinned_bytes, writer.pinning.pageable_bytes) == (host_bytes, 0)
    assert observer.pinning.pinned_bytes == 0
    writer.release()
    assert writer.pinning.pinned_bytes == 0
    observer.become_writer(1)
    assert observer.pinning.pinned_bytes == host_bytes


def test_pieces_never_cut_a_group() -> None:
    assert pieces(20 * PAGE, 3 * PAGE, 7 * PAGE) == [
        (i * PAGE, min(6, 20 - i) * PAGE) for i in (0, 6, 12, 18)
    ]
    assert pieces(5 * PAGE, 3 * PAGE, 1) == [(0, 3 * PAGE), (3 * PAGE, 2 * PAGE)]
    assert pieces(PAGE, PAGE, 1 << 40) == [(0, PAGE)]


def test_what_cannot_be_pinned_stays_pageable(
    use_cuda: Callable[[str], str],
    spawn: Start,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Case 5: a registrar that refuses above a threshold, and smaller pieces that it takes."""
    use_cuda("fake")
    monkeypatch.setenv("FAKE_CUDA_PIN_MAX", str(3 * PAGE))
    manager = spawn(CONFIG)
    with caplog.at_level(logging.WARNING, "leto_rmp"), Client.connect(manager.socket_path) as client:
        client.attach(Role.WRITER, 0)
        a = fill(client)
        assert client.pinning.pageable_bytes == 6 * PAGE, "tier 1 in one piece"
        assert client.pinning.failures == ("CUDA_ERROR_OUT_OF_MEMORY",)
        assert re.search(
            r"12582912 of 12582912 bytes .* stay pageable.*CUDA_ERROR_OUT_OF_MEMORY", caplog.text
        )
        assert (a.tier1 == 9).all(), "slower, and just as right"
    caplog.clear()
    with Client.connect(manager.socket_path, pin_piece_bytes=3 * PAGE) as client:
        client.attach(Role.WRITER, 1)
        client.allocations()
        assert client.pinning.pageable_bytes == 0
        assert not caplog.text
    with Client.connect(manager.socket_path, pin_piece_bytes=0) as client:
        client.attach(Role.WRITER, 2)
        client.allocations()
        assert client.pinning.pinned_bytes == 0


def test_pins_are_undone_before_the_range_is_unmapped(manager: ManagerProcess, attach: Attach) -> None:
    """Also by the garbage collector, for a client that nobody closed."""
    client = Client.connect(manager.socket_path)
    client.attach(Role.WRITER, 0)
    fill(client)
    order: list[str] = []
    from leto_rmp import linux

    real_unmap, real_unregister = linux.unmap, Driver.host_unregister
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(linux, "unmap", lambda *a: (order.append("unmap"), real_unmap(*a))[1])
        patch.setattr(
            Driver, "host_unregister", lambda *a: (order.append("unregister"), real_unregister(*a))[1]
        )
        client._transport.close()
        del client
        import gc

        gc.collect()
    assert order == ["unregister", "unmap"] * 3


# -- limits --------------------------------------------------------------------------------------


@pytest.mark.timeout(600)
def test_1000_attach_detach_cycles_leak_nothing(
    manager: ManagerProcess,
    attach: Attach,
    cuda: str,
    count_fds: Callable[..., int],
    eventually: Callable[[Callable[[], bool], str], None],
) -> None:
    writer = attach(Role.WRITER, 0)
    fill(writer)
    theirs = count_fds(manager.pid)
    driver = Driver()

    def free() -> int:
        with driver.context(0):
            return driver.memory()[0]

    def cycle() -> None:
        with Client.connect(manager.socket_path) as client:
            client.attach(Role.OBSERVER, 1)
            assert len(client.allocations()["arena"].pages) == 24

    cycle()
    ours, memory = count_fds(), free()
    maps = len(Path("/proc/self/maps").read_text().splitlines())
    for _ in range(1000 if cuda == "gpu" else 150):
        cycle()
    assert count_fds() == ours
    eventually(lambda: count_fds(manager.pid) == theirs, "the manager closes what clients closed")
    assert abs(free() - memory) <= PAGE
    assert len(Path("/proc/self/maps").read_text().splitlines()) <= maps + 5


def test_a_low_limit_makes_the_manager_export_on_demand(
    config: PoolConfig, worker: Callable[..., object], tmp_path: Path
) -> None:
    """Handles of sixteen pages need a sixteenth of the descriptors: the same limit has room for them."""
    count = handles(config, 300)
    code = f"""
    import resource, sys
    resource.setrlimit(resource.RLIMIT_NOFILE, (600, 600))
    from leto_rmp import *
    config = PoolConfig({PAGE}, 12, 3, 1, backend="cuda", gpu_pages_per_handle={config.gpu_pages_per_handle})
    with spawn_manager(sys.argv[1], "job", 0, config, timeout_s=60) as manager:
        with Client.connect(manager.socket_path) as client:
            client.attach(Role.WRITER, 0)
            a = client.allocate([AllocationSpec("arena", 300 * {PAGE}, Kind.TRANSACTION)])["arena"]
            a.pages.write(299 * {PAGE}, b"last")
            status = client.status()
            print(status.handles, status.kept_fds, flush=True)
            with Client.connect(manager.socket_path) as other:
                other.attach(Role.OBSERVER, 1)
                print(other.allocations()["arena"].pages.read(299 * {PAGE}, 4), flush=True)
            print("exported on demand" in manager.stderr(), flush=True)
    """
    one = worker(code, tmp_path / "m")
    kept = count if count < 80 else 0
    assert (one.line(), one.line(), one.line()) == (f"{count} {kept}", "b'last'", str(not kept))
    assert one.finish()[0] == 0


def test_descriptors_are_kept_where_there_is_room(
    manager: ManagerProcess, attach: Attach, config: PoolConfig
) -> None:
    client = attach(Role.WRITER, 0)
    fill(client)
    status = client.status()
    assert status.kept_fds == handles(config)
    assert status.handles == handles(config) + 2 + 1
    assert "GPU-" in status.device


def test_too_much_gpu_memory_is_refused_and_nothing_stays(
    cuda: str,
    config: PoolConfig,
    spawn: Start,
    monkeypatch: pytest.MonkeyPatch,
    count_fds: Callable[..., int],
) -> None:
    if cuda == "fake":
        monkeypatch.setenv("FAKE_CUDA_PAGES", "30")
    manager = spawn(config, timeout_s=60.0)
    with Client.connect(manager.socket_path) as client:
        client.attach(Role.WRITER, 0)
        too_much = AllocationSpec("much", 1 << 42 if cuda == "gpu" else 64 * PAGE, Kind.TRANSACTION)
        found = []
        for _ in range(2):  # the first time, NVML opens what it needs
            with pytest.raises(NotEnoughMemory, match="GPU"):
                client.allocate([MARKER, too_much])
            assert client.status().allocations == ()
            found.append(count_fds(manager.pid))
        assert found[0] == found[1]
        fill(client)


def test_no_device_is_said_at_the_start(
    use_cuda: Callable[[str], str], spawn: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cuda("fake")
    monkeypatch.setenv("FAKE_CUDA_NO_DEVICE", "1")
    with pytest.raises(CudaUnavailable, match="CUDA_ERROR_NO_DEVICE"):
        spawn(CONFIG)
    monkeypatch.delenv("FAKE_CUDA_NO_DEVICE")
    with pytest.raises(CudaUnavailable, match="no device 3"):
        spawn(PoolConfig(PAGE, 12, 3, 1, backend="cuda", device=3))


def test_pages_have_the_size_that_the_driver_can_replace() -> None:
    with pytest.raises(ConfigError, match="multiple of 2097152"):
        PoolConfig(1 << 20, 12, 3, 1, backend="cuda")
    with pytest.raises(ConfigError, match="placement"):
        AllocationSpec("a", 1, Kind.DERIVED, placement="elsewhere")  # type: ignore[arg-type]


# -- free memory ---------------------------------------------------------------------------------


def readings(*values: int | None) -> Iterator[int | None]:
    yield from values
    while True:
        yield values[-1]


def test_waiting_ends_when_the_memory_is_measured_free() -> None:
    seen = readings(10, 10, 99, 100)
    assert wait_free("GPU-x", 100, 10.0, lambda _uuid: next(seen)) < 10
    assert next(seen) == 100


def test_waiting_is_bounded_and_says_what_is_missing() -> None:
    """Case 4: the error names both numbers."""
    with pytest.raises(NotEnoughMemory, match=r"100 bytes .* 0\.05 s: 10 are on GPU-x") as caught:
        wait_free("GPU-x", 100, 0.05, lambda _uuid: 10)
    assert (caught.value.details["need"], caught.value.details["have"]) == (100, 10)
    with pytest.raises(CudaUnavailable, match="cannot be measured"):
        wait_free("", 100, 0.05)
