"""File descriptors: batches, low limits, silent truncation, leaks (cases 1 and 2)."""

from __future__ import annotations

import array
import os
import re
import resource
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from leto_rmp import AllocationSpec, Client, Kind, LimitTooLow, ManagerProcess, PoolConfig, Role
from leto_rmp import limits as limits_module
from leto_rmp.transport import receive

PAGE = 4096
ONE_PER_PAGE = PoolConfig(PAGE, 1024, 16, 1, pages_per_handle=1)
MANY = AllocationSpec("many", 600 * PAGE, Kind.RETAINED)
SPEC = "AllocationSpec('many', 600 * 4096, Kind.RETAINED)"
CONFIG = "PoolConfig(4096, 1024, 16, 1, pages_per_handle=1)"


def test_600_handles_in_one_allocation(
    spawn: Callable[..., ManagerProcess], worker: Callable[..., object], count_fds: Callable[..., int]
) -> None:
    manager = spawn(ONE_PER_PAGE)
    before = count_fds()
    with Client.connect(manager.socket_path) as client:
        client.attach(Role.WRITER, 0)
        many = client.allocate([MANY])["many"]
        assert client.status().handles == 617
        for index in range(600):
            many.pages[index] = index % 251
        assert count_fds() == before + 1, "descriptors are closed after mapping"
        code = """
        import sys
        from leto_rmp import *
        client = Client.connect(sys.argv[1]); client.attach(Role.OBSERVER, 1)
        pages = client.allocations()["many"].pages
        print(all((pages[i] == i % 251).all() for i in range(600)))
        """
        assert worker(code, manager.socket_path).line() == "True"


def test_a_manager_under_a_low_hard_limit_says_so(worker: Callable[..., object], tmp_path: Path) -> None:
    """`ulimit -n 256`, hard: the error names the limit and the need, and nothing is left behind."""
    code = f"""
    import resource, sys
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
    from leto_rmp import *
    with spawn_manager(sys.argv[1], "job", 0, {CONFIG}) as manager:
        with Client.connect(manager.socket_path) as client:
            client.attach(Role.WRITER, 0)
            try:
                client.allocate([{SPEC}])
            except LimitTooLow as error:
                print(error.details["limit"], error.details["need"], error.details["have"], error, flush=True)
            print(client.status().handles, flush=True)
            print(client.allocate([AllocationSpec("few", 100 * 4096, Kind.TRANSACTION)])["few"].created)
    """
    one = worker(code, tmp_path / "m")
    told = one.line()
    assert re.match(r"RLIMIT_NOFILE \d+ 256 .*ulimit -Hn \d+", told), told
    assert 617 < int(told.split()[1]) < 700
    assert (one.line(), one.line()) == ("0", "True")
    assert one.finish()[0] == 0


def test_a_limit_of_the_size_of_files_is_named(worker: Callable[..., object], tmp_path: Path) -> None:
    """`ulimit -f` counts memory in memfds as well."""
    code = """
    import resource, sys
    from leto_rmp import *
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, resource.RLIM_INFINITY))
    with spawn_manager(sys.argv[1], "job", 0, PoolConfig(4096, 12, 3, 1)) as manager:
        with Client.connect(manager.socket_path) as client:
            client.attach(Role.WRITER, 0)
            try:
                client.allocate([AllocationSpec("a", 5 * 4096, Kind.RETAINED)])
            except LimitTooLow as error:
                print(error, flush=True)
    """
    one = worker(code, tmp_path / "m")
    assert re.match(r"leto:a:\S+ needs 20480 bytes in one memfd, .* RLIMIT_FSIZE is 8192\. Raise", one.line())
    assert one.finish()[0] == 0
    assert list(tmp_path.iterdir()) == []


def test_a_low_soft_limit_is_raised(worker: Callable[..., object], tmp_path: Path) -> None:
    code = f"""
    import resource, sys
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
    from leto_rmp import *
    with spawn_manager(sys.argv[1], "job", 0, {CONFIG}) as manager:
        with Client.connect(manager.socket_path) as client:
            client.attach(Role.WRITER, 0)
            print(client.allocate([{SPEC}])["many"].pages.shape)
    """
    assert worker(code, tmp_path / "m").line() == "(600, 4096)"


def test_a_client_under_a_low_hard_limit_takes_smaller_batches(
    spawn: Callable[..., ManagerProcess], worker: Callable[..., object]
) -> None:
    manager = spawn(ONE_PER_PAGE)
    code = f"""
    import os, resource, sys
    resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
    from leto_rmp import *
    client = Client.connect(sys.argv[1]); client.attach(Role.WRITER, 0)
    print(client.allocate([{SPEC}])["many"].pages.shape, flush=True)
    fill = [os.open("/dev/null", os.O_RDONLY) for _ in range(64 - len(os.listdir("/proc/self/fd")))]
    try:
        client.allocate([AllocationSpec("more", 4096, Kind.TRANSACTION)])
    except LimitTooLow as error:
        print(error, flush=True)
    for fd in fill:
        os.close(fd)
    print(client.allocate([AllocationSpec("more", 4096, Kind.TRANSACTION)])["more"].pages.shape)
    """
    one = worker(code, manager.socket_path)
    assert one.line() == "(600, 4096)"
    assert re.search(r"RLIMIT_NOFILE must be at least \d+", one.line())
    assert one.line() == "(1, 4096)"


def test_silent_truncation_is_noticed(
    spawn: Callable[..., ManagerProcess], worker: Callable[..., object]
) -> None:
    """A client that believes it has room (mutant): the kernel drops fds, and none of the rest leaks."""
    manager = spawn(ONE_PER_PAGE)
    code = f"""
    import os, resource, sys
    import leto_rmp.client_memory
    from leto_rmp import *
    client = Client.connect(sys.argv[1]); client.attach(Role.WRITER, 0)
    leto_rmp.client_memory.fd_room = lambda wanted: wanted
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, 100))
    before = len(os.listdir("/proc/self/fd"))
    try:
        client.allocate([{SPEC}])
    except LimitTooLow as error:
        print(error, flush=True)
    print(len(os.listdir("/proc/self/fd")) - before, client.marks(), flush=True)
    """
    one = worker(code, manager.socket_path)
    assert "RLIMIT_NOFILE" in one.line()
    assert one.line() == "0 {}"


def test_received_descriptors_are_close_on_exec() -> None:
    left, right = socket.socketpair()
    with left, right:
        fds = array.array("i", [left.fileno()] * 3)
        left.sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)])
        data, received, truncated = receive(right, 10)
        assert (data, len(received), truncated) == (b"x", 3, False)
        assert not any(os.get_inheritable(fd) for fd in received)
        for fd in received:
            os.close(fd)


def test_1000_attach_detach_cycles_leak_nothing(
    spawn: Callable[..., ManagerProcess],
    count_fds: Callable[..., int],
    eventually: Callable[[Callable[[], bool], str], None],
) -> None:
    manager = spawn(PoolConfig(PAGE, 12, 3, 1, pages_per_handle=1))
    with Client.connect(manager.socket_path) as writer:
        writer.attach(Role.WRITER, 0)
        writer.allocate([AllocationSpec("arena", 12 * PAGE, Kind.RETAINED)])["arena"].pages[:] = 4
        ours, theirs = count_fds(), count_fds(manager.pid)
        maps = len(Path("/proc/self/maps").read_text().splitlines())
        for _ in range(1000):
            with Client.connect(manager.socket_path) as client:
                client.attach(Role.OBSERVER, 1)
                assert client.allocations()["arena"].pages[5, 5] == 4
        assert count_fds() == ours
        eventually(lambda: count_fds(manager.pid) == theirs, "the manager closes what clients closed")
        assert len(writer.status().clients) == 1
        assert len(Path("/proc/self/maps").read_text().splitlines()) <= maps + 5


def test_a_thousand_writers_leak_nothing(
    manager: ManagerProcess,
    count_fds: Callable[..., int],
    eventually: Callable[[Callable[[], bool], str], None],
) -> None:
    """The record of a writer outlives its connection; its pidfd must not pile up."""
    with Client.connect(manager.socket_path) as client:
        client.attach(Role.WRITER, 0)
    theirs = count_fds(manager.pid)
    for generation in range(1, 300):
        with Client.connect(manager.socket_path) as client:
            client.attach(Role.WRITER, generation)
            with pytest.raises(Exception, match="from the past"):
                client.become_writer(0)
    eventually(lambda: count_fds(manager.pid) <= theirs, "old records are closed")


def test_too_many_mappings_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits_module, "_map_count_max", lambda: 5000)
    limits_module.check_map_count(100)
    with pytest.raises(LimitTooLow, match=r"vm\.max_map_count") as caught:
        limits_module.check_map_count(5000)
    assert caught.value.details["have"] == 5000
    assert "vm.max_map_count" in str(limits_module.map_count_error())


def test_room_is_measured() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        assert limits_module.fd_room(5) >= 5
        if hard != resource.RLIM_INFINITY:
            assert limits_module.fd_room(hard) < hard
            with pytest.raises(LimitTooLow, match=f"hard limit of process {os.getpid()} is {hard}"):
                limits_module.require_fds(hard, "this test")
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_manager_out_of_descriptors_says_so_and_goes_on(
    worker: Callable[..., object], tmp_path: Path
) -> None:
    code = """
    import resource, sys
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (40, 200))
    from leto_rmp import *
    with spawn_manager(sys.argv[1], "job", 0, PoolConfig(4096, 12, 3, 1)) as manager:
        # The manager raised its own soft limit to the hard one; lower that from outside.
        resource.prlimit(manager.pid, resource.RLIMIT_NOFILE, (40, 40))
        resource.setrlimit(resource.RLIMIT_NOFILE, (200, 200))
        clients, refused = [], 0
        while refused < 3:
            try:
                clients.append(Client.connect(manager.socket_path))
            except LimitTooLow as error:
                refused += 1
        print(5 < len(clients) < 40, clients[0].status().refused, flush=True)
        for client in clients[3:]:
            client.close()
        with Client.connect(manager.socket_path) as client:
            print(client.status().pid == manager.pid, flush=True)
    """
    one = worker(code, tmp_path / "m")
    assert one.line() == "True {'LimitTooLow': 3}"
    assert one.line() == "True"


WITHOUT_CAPABILITIES = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
for capability in range(64):
    libc.prctl(24, capability, 0, 0, 0)  # PR_CAPBSET_DROP: an exec cannot regain any of them
libc.prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
os.execv(sys.executable, [sys.executable, "-c", sys.argv[1], *sys.argv[2:]])
"""


def test_no_capability_is_needed(worker: Callable[..., object], tmp_path: Path) -> None:
    """Case 1: SCM_RIGHTS only; no ptrace rights, no privileged userfaultfd."""
    code = f"""
import sys
from pathlib import Path
print([line.split()[1] for line in Path("/proc/self/status").read_text().splitlines() if "CapEff" in line][0])
from leto_rmp import *
with spawn_manager(sys.argv[1], "job", 0, {CONFIG}) as manager:
    with Client.connect(manager.socket_path) as client:
        client.attach(Role.WRITER, 0)
        pages = client.allocate([{SPEC}])["many"].pages
        pages[:] = 3
        ref = PageRef("many", "data", 300)
        client.inject_lose([ref], seed=1)
        print(client.localize() == {{ref: PageMark.LOST}}, client.remap() == {{ref: PageMark.REMAPPED}})
        print(pages[300].any(), int(pages.sum()) == 599 * 4096 * 3, flush=True)
"""
    one = worker(WITHOUT_CAPABILITIES, code, tmp_path / "m")
    if int(one.line(), 16):
        pytest.skip("capabilities cannot be dropped here")
    assert (one.line(), one.line()) == ("True True", "False True")
