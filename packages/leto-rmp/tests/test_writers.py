"""I-4 with real processes: the memory outlives its writer, and a second writer never comes too early."""

from __future__ import annotations

import gc
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from leto_rmp import (
    AllocationSpec,
    Client,
    ManagerProcess,
    NotWriter,
    RmpError,
    Role,
    StaleGeneration,
    WriterAlive,
    mapped_bytes,
)

PAGE = 4096
Attach = Callable[..., Client]
WRITER = """
import sys, numpy as np, leto_rmp as r
from leto_rmp import *
client = Client.connect(sys.argv[1])
client.attach(Role.WRITER, int(sys.argv[2]))
spec = AllocationSpec("arena", 24 * 4096, Kind.RETAINED, Interleave(3, 2))
a = client.allocate([spec])["arena"]
a.pages[:] = np.random.default_rng(7).integers(0, 256, a.pages.shape, dtype=np.uint8)
a.tier1[:] = 9
print("written", flush=True)
"""
STAYS = WRITER + "sys.stdin.readline()\n"


def expected() -> np.ndarray:
    return np.random.default_rng(7).integers(0, 256, (24, PAGE), dtype=np.uint8)


def test_memory_survives_the_kill_of_its_writer(
    manager: ManagerProcess, attach: Attach, worker: Callable[..., object], arena: AllocationSpec
) -> None:
    writer = worker(STAYS, manager.socket_path, 0)
    assert writer.line() == "written"
    shadow = attach(Role.OBSERVER, 1)
    ahead = shadow.allocations()["arena"]
    with pytest.raises(WriterAlive, match=f"process {writer.pid}") as caught:
        shadow.become_writer(1)
    assert caught.value.details == {"pid": writer.pid, "generation": 0}
    assert not ahead.pages.flags.writeable
    writer.kill()
    shadow.become_writer(1)
    a = shadow.allocate([arena])["arena"]
    assert not a.created
    assert np.array_equal(a.pages, expected())
    assert a.tier1 is not None
    assert (a.tier1 == 9).all()
    ahead.pages[0] = 1  # what was mapped ahead is writable now, in place
    assert (a.pages[0] == 1).all()
    status = shadow.status()
    assert (status.generation, status.writer and status.writer.state) == (1, "alive")


def test_a_closed_connection_is_no_proof_of_death(
    manager: ManagerProcess, attach: Attach, worker: Callable[..., object]
) -> None:
    """The process lives on with its mappings although its socket is gone."""
    writer = worker(
        WRITER + "client._transport._sock.close()\nprint('closed', flush=True)\nsys.stdin.readline()",
        manager.socket_path,
        0,
    )
    assert (writer.line(), writer.line()) == ("written", "closed")
    with pytest.raises(WriterAlive):
        attach(Role.WRITER, 1)
    writer.kill()
    attach(Role.WRITER, 1)


def test_release_hands_over_and_makes_old_views_read_only(
    manager: ManagerProcess, attach: Attach, worker: Callable[..., object]
) -> None:
    code = WRITER + "view = a.pages\nclient.release()\nprint('released', flush=True)\nsys.stdin.readline()\n"
    old = worker(code + "assert not a.pages.flags.writeable\nview[0, 0] = 1\n", manager.socket_path, 0)
    assert (old.line(), old.line()) == ("written", "released")
    new = attach(Role.WRITER, 1)
    pages = new.allocations()["arena"].pages
    old.say()
    status, _, errors = old.finish()
    assert status == -signal.SIGSEGV, errors
    assert np.array_equal(pages, expected())


def test_an_observer_cannot_write(
    manager: ManagerProcess, attach: Attach, worker: Callable[..., object], arena: AllocationSpec
) -> None:
    pages = attach(Role.WRITER).allocate([arena])["arena"].pages
    code = """
    import sys, ctypes
    from leto_rmp import *
    client = Client.connect(sys.argv[1]); client.attach(Role.OBSERVER, 1)
    pages = client.allocations()["arena"].pages
    try:
        pages[0, 0] = 1
    except ValueError as error:
        print(error, flush=True)
    ctypes.memset(pages.ctypes.data, 1, 1)
    """
    observer = worker(code, manager.socket_path)
    assert "read-only" in observer.line()
    assert observer.finish()[0] == -signal.SIGSEGV
    assert not pages.any()


def test_a_forked_child_holds_no_retained_memory(
    manager: ManagerProcess, worker: Callable[..., object]
) -> None:
    code = (
        WRITER
        + """
import os
pid = os.fork()
if pid == 0:
    try:
        client.status()
    except RmpError as error:
        print(error, flush=True)
    a.pages[0, 0] = 1
    os._exit(0)
print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
print(client.status().writer.state, a.pages.flags.writeable, flush=True)
"""
    )
    forked = worker(code, manager.socket_path, 0)
    assert forked.line() == "written"
    assert "forked child connects for itself" in forked.line()
    assert forked.line() == str(-signal.SIGSEGV)
    assert forked.line() == "alive True"


def test_generations_only_grow(attach: Attach) -> None:
    first = attach(Role.WRITER, 5)
    first.become_writer(5)  # asking again is harmless
    first.release()
    first.release()
    second = attach(Role.OBSERVER, 5)
    for stale in (0, 5):
        with pytest.raises(StaleGeneration, match="expected 6") as caught:
            second.become_writer(stale)
        assert caught.value.details == {"expected": 6, "found": stale}
    second.become_writer(6)
    with pytest.raises(StaleGeneration):
        first.acknowledge([])
    with pytest.raises(StaleGeneration):
        first.free([])
    assert second.status().refused == {"StaleGeneration": 4}


def test_a_released_writer_may_not_acknowledge(attach: Attach) -> None:
    client = attach(Role.WRITER)
    client.release()
    with pytest.raises(NotWriter):
        client.acknowledge([])


def test_fence_refuses_the_past_and_the_living_writer(attach: Attach, arena: AllocationSpec) -> None:
    writer, control = attach(Role.WRITER, 0), attach(Role.CONTROL)
    with pytest.raises(WriterAlive, match="neither ended nor released in time"):
        control.fence(2)
    with pytest.raises(StaleGeneration):
        writer.allocate([arena])
    writer.release()
    control.fence(2)
    with pytest.raises(StaleGeneration, match="expected 2"):
        attach(Role.WRITER, 1)
    with pytest.raises(StaleGeneration):
        control.fence(1)
    attach(Role.WRITER, 2)
    control.fence(2)  # its own generation is not the past


def test_fence_waits_for_the_death(
    manager: ManagerProcess,
    attach: Attach,
    worker: Callable[..., object],
    eventually: Callable[[Callable[[], bool], str], None],
) -> None:
    writer = worker(STAYS, manager.socket_path, 0)
    assert writer.line() == "written"
    control, outcome = attach(Role.CONTROL), []

    def fence() -> None:
        try:
            control.fence(1, wait_s=120.0)
            outcome.append("gone")
        except RmpError as error:
            outcome.append(repr(error))

    thread = threading.Thread(target=fence)
    thread.start()
    observer = attach(Role.OBSERVER)
    eventually(lambda: observer.status().generation_min == 1, "the fence is up")
    assert outcome == []
    writer.kill()
    thread.join(120)
    assert outcome == ["gone"]


def test_only_control_fences(attach: Attach) -> None:
    with pytest.raises(NotWriter):
        attach(Role.OBSERVER).fence(1)
    with pytest.raises(NotWriter, match="control connection"):
        attach(Role.CONTROL).become_writer(1)


def test_close_releases(manager: ManagerProcess, attach: Attach) -> None:
    with Client.connect(manager.socket_path) as client:
        client.attach(Role.WRITER, 0)
    attach(Role.WRITER, 1)


def test_close_of_a_writer_whose_manager_is_gone(manager: ManagerProcess, arena: AllocationSpec) -> None:
    client = Client.connect(manager.socket_path)
    client.attach(Role.WRITER, 0)
    a = client.allocate([arena])["arena"]
    manager.kill()
    client.close()
    client.close()
    assert not a.writable


def test_a_tensor_made_ahead_becomes_writable_in_place(attach: Attach, arena: AllocationSpec) -> None:
    torch = pytest.importorskip("torch")
    torch.set_num_threads(1)
    first = attach(Role.WRITER, 0)
    pages = first.allocate([arena])["arena"].pages
    shadow = attach(Role.OBSERVER, 1)
    ahead = shadow.allocations()["arena"].tensor(torch.float32)
    first.release()
    shadow.become_writer(1)
    ahead.fill_(1.0)
    assert pages[3, :4].tolist() == [0, 0, 128, 63]


GIVES_UP = (
    WRITER
    + """
other = Client.connect(sys.argv[1])
other.attach(Role.OBSERVER, 0)
other.allocations()
pages = a.pages
a = client = other = None
give_up_writing()
print("gave up", mapped_bytes() > 0, flush=True)
sys.stdin.readline()
{after}
print("unreached", flush=True)
"""
)


@pytest.mark.parametrize("after", ["pages[0] = 1", "print(pages[0])"], ids=["write", "read"])
def test_a_process_that_gave_up_writing_lives_on_and_reaches_nothing(
    manager: ManagerProcess, attach: Attach, worker: Callable[..., object], after: str
) -> None:
    """Also through a client that nobody holds any more, and one that only looked."""
    writer = worker(GIVES_UP.format(after=after), manager.socket_path, 0)
    assert (writer.line(), writer.line()) == ("written", "gave up True")
    maps = Path(f"/proc/{writer.pid}/maps").read_text().splitlines()
    assert {line.split()[1] for line in maps if "memfd:leto:" in line} == {"---s"}
    successor = attach(Role.WRITER, 1)
    assert np.array_equal(successor.allocations()["arena"].pages, expected())
    writer.say()
    status, out, _ = writer.finish()
    assert (status, "unreached" in out) == (-signal.SIGSEGV, False)


UNHEARD = (
    WRITER
    + """
client._transport.close("broken")
client.close()
try:
    give_up_writing()
except ManagerGone:
    print("refused", flush=True)
"""
)


def test_a_writer_whose_release_was_not_heard_has_not_given_up(
    manager: ManagerProcess, attach: Attach, worker: Callable[..., object]
) -> None:
    """Its manager knows it as the writer still: to count it as fenced would keep every successor out."""
    writer = worker(UNHEARD, manager.socket_path, 0)
    assert (writer.line(), writer.line()) == ("written", "refused")
    writer.finish()
    attach(Role.WRITER, 1)


DROPPED = (
    WRITER
    + """
del a, client
import gc
gc.collect()
assert mapped_bytes() == 0
try:
    give_up_writing()
except RmpError as error:
    print(error, flush=True)
"""
)


def test_a_writer_that_was_dropped_has_not_given_up(
    manager: ManagerProcess, worker: Callable[..., Any]
) -> None:
    writer = worker(DROPPED, manager.socket_path, 0)
    assert writer.line() == "written"
    assert f"found one of {manager.socket_path} that was dropped" in writer.line()
    writer.finish()


def test_views_tell_how_much_is_mapped(
    manager: ManagerProcess, attach: Attach, arena: AllocationSpec
) -> None:
    gc.collect()  # what other tests have left to the collector
    before = mapped_bytes()
    client = attach(Role.WRITER, 0)
    pages = client.allocate([arena])["arena"].pages
    assert mapped_bytes() > before + pages.nbytes
    client.close()
    assert before < mapped_bytes() <= before + 2 * pages.nbytes, "a view is left"
    del pages
    gc.collect()
    assert mapped_bytes() == before


def test_a_process_without_retained_memory_has_nothing_to_give_up(worker: Callable[..., object]) -> None:
    nothing = worker("from leto_rmp import *; give_up_writing(); print(mapped_bytes(), flush=True)")
    assert nothing.line() == "0"
