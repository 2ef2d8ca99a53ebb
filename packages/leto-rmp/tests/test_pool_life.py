"""A trainer's use of the pool: allocate, attach again, views, free."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from leto_rmp import (
    AllocationSpec,
    Client,
    ConfigError,
    Interleave,
    Kind,
    ManagerProcess,
    NotWriter,
    PoolConfig,
    ProtocolError,
    Role,
    SpecMismatch,
    UnknownName,
    layout_hash,
    protection_groups,
)
from leto_rmp import protocol as p

PAGE = 4096
GRADS = AllocationSpec("grads", 5 * PAGE - 100, Kind.TRANSACTION)
Attach = Callable[..., Client]


def leto_maps() -> int:
    return Path("/proc/self/maps").read_text().count("memfd:leto:")


def test_shapes_kinds_and_groups(attach: Attach, arena: AllocationSpec, config: PoolConfig) -> None:
    made = attach(Role.WRITER).allocate([arena, GRADS])
    a, g = made["arena"], made["grads"]
    assert a.pages.shape == (24, PAGE)
    assert a.tier1 is not None
    assert a.tier2 is not None
    assert a.tier1.shape == (2, 3, PAGE)
    assert a.tier2.shape == (2, 1, PAGE)
    assert a.groups == protection_groups(arena, config)
    assert g.pages.shape == (5, PAGE)
    assert (g.tier1, g.tier2, g.groups) == (None, None, ())
    assert (a.name, a.kind, a.created, a.writable) == ("arena", Kind.RETAINED, True, True)
    assert g.nbytes == 5 * PAGE - 100
    assert not a.pages.any()
    assert not a.tier1.any()


@pytest.mark.parametrize("per_handle", [0, 1, 5])
def test_another_process_sees_the_same_bytes(
    spawn: Callable[..., ManagerProcess],
    worker: Callable[..., object],
    per_handle: int,
    arena: AllocationSpec,
) -> None:
    config = PoolConfig(PAGE, 12, 3, 1, pages_per_handle=per_handle)
    manager = spawn(config)
    with Client.connect(manager.socket_path) as client:
        client.attach(Role.WRITER, 0)
        a = client.allocate([arena])["arena"]
        a.pages[:] = np.arange(24, dtype=np.uint8)[:, None]
        assert a.tier1 is not None
        a.tier1[1, 2] = 77
        other = worker(
            """
            import sys, leto_rmp
            client = leto_rmp.Client.connect(sys.argv[1])
            client.attach(leto_rmp.Role.OBSERVER, 1)
            a = client.allocations()["arena"]
            print(a.pages[:, 0].tolist() == list(range(24)), (a.tier1[1, 2] == 77).all(), a.created)
            """,
            manager.socket_path,
        )
        assert other.line() == "True True False"  # type: ignore[attr-defined]


def test_the_same_name_attaches_again(attach: Attach, arena: AllocationSpec, config: PoolConfig) -> None:
    client = attach(Role.WRITER)
    client.allocate([arena])["arena"].pages[3] = 5
    again = client.allocate([arena, GRADS])
    assert (again["arena"].created, again["grads"].created) == (False, True)
    assert (again["arena"].pages[3] == 5).all()
    assert client.layout_hash == layout_hash(config, [arena, GRADS])
    assert list(client.allocations()) == ["arena", "grads"]


@pytest.mark.parametrize(
    "other",
    [
        AllocationSpec("arena", 18 * PAGE, Kind.RETAINED, Interleave(3, 2)),
        AllocationSpec("arena", 24 * PAGE, Kind.DERIVED, Interleave(3, 2)),
        AllocationSpec("arena", 24 * PAGE, Kind.RETAINED, Interleave(2, 2)),
        AllocationSpec("arena", 24 * PAGE, Kind.RETAINED, Interleave(3, 2), 6),
    ],
)
def test_a_mismatch_is_refused_and_creates_nothing(
    attach: Attach, arena: AllocationSpec, other: AllocationSpec
) -> None:
    client = attach(Role.WRITER)
    client.allocate([arena])
    with pytest.raises(SpecMismatch, match="exists as"):
        client.allocate([GRADS, other])
    assert list(client.allocations()) == ["arena"]


def test_a_request_that_contradicts_itself_is_refused(attach: Attach, arena: AllocationSpec) -> None:
    client = attach(Role.WRITER)
    with pytest.raises(SpecMismatch):
        client.allocate([arena, AllocationSpec("arena", PAGE, Kind.DERIVED)])
    with pytest.raises(ConfigError, match="planes"):
        client.allocate([AllocationSpec("odd", 25 * PAGE, Kind.RETAINED, Interleave(3, 2))])
    assert client.allocations() == {}


def test_only_the_writer_creates_and_frees(attach: Attach, arena: AllocationSpec) -> None:
    observer = attach(Role.OBSERVER)
    for client in (observer, attach(Role.CONTROL)):
        with pytest.raises(NotWriter):
            client.allocate([arena])
        with pytest.raises(NotWriter):
            client.free(["arena"])
    attach(Role.WRITER).allocate([arena])
    assert not observer.allocate([arena])["arena"].created


def test_unknown_names(attach: Attach, arena: AllocationSpec) -> None:
    client = attach(Role.WRITER)
    client.allocate([arena, GRADS])
    with pytest.raises(UnknownName, match="there are: arena, grads"):
        client.free(["arena", "nothing"])
    assert list(client.allocations()) == ["arena", "grads"], "free is all or nothing"
    for request in (
        p.Export(allocation="nothing", section="data", first=0, count=1),
        p.Export(allocation="grads", section="tier1", first=0, count=1),
        p.Export(allocation="grads", section="data", first=1, count=1),
        p.Export(allocation="grads", section="data", first=-1, count=2),
        p.Export(allocation="grads", section="data", first=0, count=0),
    ):
        with pytest.raises(UnknownName):
            client._request(request, p.Handles)


def test_a_role_comes_first(manager: ManagerProcess) -> None:
    with Client.connect(manager.socket_path) as client:
        assert (client.job_id, client.rank, client.manager_pid) == ("job", 0, manager.pid)
        client.status()
        with pytest.raises(ProtocolError, match="attach first"):
            client.marks()
        client.attach(Role.OBSERVER, 0)
        with pytest.raises(ProtocolError, match="attached as observer"):
            client.attach(Role.CONTROL, 0)


def test_free_gives_memory_back_and_forgets(
    attach: Attach, arena: AllocationSpec, manager: ManagerProcess, count_fds: Callable[..., int]
) -> None:
    client, observer = attach(Role.WRITER), attach(Role.OBSERVER)
    before = count_fds(manager.pid)
    client.allocate([arena])["arena"].pages[:] = 1
    old = observer.allocations()["arena"]
    client.free(["arena"])
    assert count_fds(manager.pid) == before
    assert (old.pages == 1).all(), "a view stays valid"
    fresh = client.allocate([arena])["arena"]
    assert fresh.created
    assert not fresh.pages.any()
    fresh.pages[:] = 2
    assert (observer.allocations()["arena"].pages == 2).all(), "nobody gets the freed memory again"
    assert (old.pages == 1).all()


def test_views_outlive_the_client_and_then_give_the_memory_back(
    manager: ManagerProcess, arena: AllocationSpec
) -> None:
    gc.collect()  # what other tests have left to the collector
    before = leto_maps()
    with Client.connect(manager.socket_path) as client:
        client.attach(Role.WRITER, 0)
        made = client.allocate([arena])
        made["arena"].pages[2] = 3
        view = made["arena"].pages[2:4]
    assert (view[0] == 3).all()
    del made
    gc.collect()
    assert leto_maps() > before, "the view still needs its section"
    assert (view[0] == 3).all()
    del view
    gc.collect()
    assert leto_maps() == before


def test_tensors_share_the_pages(attach: Attach) -> None:
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    g = attach(Role.WRITER).allocate([GRADS])["grads"]
    whole = g.tensor(torch.float32)
    assert whole.numel() == (5 * PAGE - 100) // 4
    part = g.tensor(torch.bfloat16, offset_bytes=PAGE, numel=8)
    assert part.data_ptr() == g.pages[1].ctypes.data
    part.fill_(1.0)
    assert g.pages[1, :16].tobytes() == part.view(torch.uint8).numpy().tobytes()
    whole[0] = 2.0
    assert g.pages[0, :4].tobytes() == np.float32(2.0).tobytes()
    assert g.tensor().dtype is torch.uint8
    for bad in (
        {"offset_bytes": 2},
        {"offset_bytes": 5 * PAGE, "numel": 1},
        {"offset_bytes": -4},
        {"numel": -1},
    ):
        with pytest.raises(ConfigError, match="elements"):
            g.tensor(torch.float32, **bad)


def test_views_are_dlpack(attach: Attach) -> None:
    g = attach(Role.WRITER).allocate([GRADS])["grads"]
    shared = np.from_dlpack(g.pages)
    assert shared.ctypes.data == g.pages.ctypes.data


def test_status_tells_all(attach: Attach, arena: AllocationSpec, manager: ManagerProcess) -> None:
    client, control = attach(Role.WRITER), attach(Role.CONTROL, 3)
    client.allocate([arena, GRADS])
    status = control.status()
    assert (status.job_id, status.rank, status.pid) == ("job", 0, manager.pid)
    assert [(a.name, a.data_pages, a.parity_pages, a.groups) for a in status.allocations] == [
        ("arena", 24, 8, 2),
        ("grads", 5, 0, 0),
    ]
    assert status.allocated_bytes == 37 * PAGE
    assert status.handles == 4
    assert [(c.role, c.generation) for c in status.clients] == [("writer", 0), ("control", 3)]
    assert status.writer is not None
    assert status.writer.state == "alive"
    assert status.layout_hash == client.layout_hash
