"""Who may talk to a manager, and what happens to those who talk nonsense (case 3)."""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import stat
import struct
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import pytest

from leto_rmp import (
    AllocationSpec,
    Client,
    DeadlineExceeded,
    Kind,
    ManagerAlive,
    ManagerGone,
    ManagerProcess,
    PoolConfig,
    ProtocolMismatch,
    Role,
    StaleSocket,
    UnsafeDirectory,
    spawn_manager,
)
from leto_rmp import protocol as p

PAGE = 4096
IN_ATTRIB, IN_CREATE = 0x4, 0x100


class Inotify:
    """Sees every creation and every change of mode in a folder, in order."""

    def __init__(self, folder: Path) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self.fd = libc.inotify_init1(os.O_CLOEXEC | os.O_NONBLOCK)
        assert libc.inotify_add_watch(self.fd, os.fsencode(folder), IN_ATTRIB | IN_CREATE) >= 0

    def events(self) -> list[tuple[str, str]]:
        data, found = os.read(self.fd, 1 << 16), []
        while data:
            _, mask, _, size = struct.unpack_from("iIII", data)
            name = data[16 : 16 + size].rstrip(b"\0").decode()
            found.append((name, "create" if mask & IN_CREATE else "attrib"))
            data = data[16 + size :]
        os.close(self.fd)
        return found


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o277])
def test_modes_are_right_from_the_first_moment(
    umask: int, tmp_path: Path, spawn: Callable[..., ManagerProcess], config: PoolConfig
) -> None:
    """The final mode, and no change of mode since the creation: so it was right from bind on."""
    folder = tmp_path / "own"
    parent = Inotify(tmp_path)
    previous = os.umask(umask)
    try:
        manager = spawn(config, folder)
    finally:
        os.umask(previous)
    assert parent.events() == [("own", "create")]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE(manager.socket_path.stat().st_mode) == 0o600
    assert stat.S_ISSOCK(manager.socket_path.stat().st_mode)


@pytest.mark.parametrize("umask", [0o000, 0o022])
def test_the_socket_is_never_open_to_others(
    umask: int, tmp_path: Path, spawn: Callable[..., ManagerProcess], config: PoolConfig
) -> None:
    folder = tmp_path / "own"
    folder.mkdir(mode=0o700)
    watch = Inotify(folder)
    previous = os.umask(umask)
    try:
        manager = spawn(config, folder)
    finally:
        os.umask(previous)
    events = watch.events()
    assert ("manager.sock.new", "create") in events, "bound under this name, renamed when it listens"
    assert not [name for name, what in events if what == "attrib" and name.startswith("manager.sock")]
    assert stat.S_IMODE(manager.socket_path.stat().st_mode) == 0o600
    assert stat.S_IMODE((folder / "manager.lock").stat().st_mode) == 0o600


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o702])
def test_a_folder_open_to_others_is_refused_and_left_alone(
    mode: int, tmp_path: Path, config: PoolConfig
) -> None:
    folder = tmp_path / "open"
    folder.mkdir()
    folder.chmod(mode)
    with pytest.raises(UnsafeDirectory, match=f"found mode {mode:04o}"):
        spawn_manager(folder, "job", 0, config)
    assert list(folder.iterdir()) == []
    assert stat.S_IMODE(folder.stat().st_mode) == mode


def test_a_link_or_a_file_in_the_way_is_refused(tmp_path: Path, config: PoolConfig) -> None:
    (tmp_path / "link").symlink_to(tmp_path)
    with pytest.raises(UnsafeDirectory):
        spawn_manager(tmp_path / "link", "job", 0, config)
    (tmp_path / "own").mkdir(mode=0o700)
    (tmp_path / "own/manager.sock").write_text("mine")
    with pytest.raises(UnsafeDirectory, match="not a socket"):
        spawn_manager(tmp_path / "own", "job", 0, config)
    assert (tmp_path / "own/manager.sock").read_text() == "mine"
    assert os.listdir(tmp_path / "own") == ["manager.sock"]


def test_a_long_path_works(tmp_path: Path, spawn: Callable[..., ManagerProcess], config: PoolConfig) -> None:
    manager = spawn(config, tmp_path / ("x" * 120) / ("y" * 60))
    with Client.connect(manager.socket_path) as client:
        assert client.status().pid == manager.pid


@pytest.fixture
def open_manager(config: PoolConfig) -> Iterator[ManagerProcess]:
    """A manager whose folder and socket somebody opened to the world by mistake."""
    if os.geteuid() != 0:
        pytest.skip("another user is needed: only root can become one")
    with tempfile.TemporaryDirectory() as base, spawn_manager(f"{base}/own", "job", 0, config) as manager:
        os.chmod(base, 0o755)
        yield manager


NOBODY = """
import os, socket, struct, sys
import leto_rmp, leto_rmp.client, leto_rmp.protocol as p
os.setgroups([]); os.setgid(65534); os.setuid(65534)
try:
    leto_rmp.Client.connect(sys.argv[1])
except leto_rmp.PeerRefused as error:
    print(error, flush=True)
sys.stdin.readline()
try:
    leto_rmp.Client.connect(sys.argv[1])
except leto_rmp.PeerRefused as error:
    print(error, flush=True)
sock = socket.socket(socket.AF_UNIX); sock.connect(sys.argv[1])
# The refusal comes unasked; whoever writes first may meet a socket that is closed by then.
print(p.decode_reply(sock.recv(10000)[4:]).message, flush=True)
"""


def test_another_user_is_refused_by_mode_and_by_uid(
    open_manager: ManagerProcess, worker: Callable[..., object]
) -> None:
    nobody = worker(NOBODY, open_manager.socket_path)
    assert "is not open to user 65534" in nobody.line()
    open_manager.socket_path.parent.chmod(0o755)
    open_manager.socket_path.chmod(0o666)
    nobody.say()
    assert "belongs to user 0, not to 65534" in nobody.line()
    assert "serves user 0 only" in nobody.line()
    with Client.connect(open_manager.socket_path) as client:
        assert client.status().refused == {"PeerRefused": 2}
    open_manager.socket_path.parent.chmod(0o700)


def test_a_living_manager_is_not_replaced(manager: ManagerProcess, config: PoolConfig) -> None:
    with pytest.raises(ManagerAlive, match=f"process {manager.pid}"):
        spawn_manager(manager.socket_path.parent, "job", 0, config)
    with Client.connect(manager.socket_path) as client:
        assert client.status().pid == manager.pid


def test_a_dead_managers_socket_is_replaced(
    tmp_path: Path, spawn: Callable[..., ManagerProcess], config: PoolConfig
) -> None:
    folder = tmp_path / "own"
    folder.mkdir(mode=0o700)
    first = spawn(config, folder)
    os.kill(first.pid, signal.SIGKILL)
    first._process.wait()
    assert sorted(os.listdir(folder)) == ["manager.lock", "manager.sock"]
    with pytest.raises(StaleSocket, match="is dead"):
        Client.connect(first.socket_path)
    second = spawn(config, folder)
    first.stop()  # must not take away what belongs to the second by now
    with Client.connect(second.socket_path) as client:
        assert client.manager_pid == second.pid


def test_no_manager_at_all(tmp_path: Path) -> None:
    with pytest.raises(ManagerGone, match="spawn_manager"):
        Client.connect(tmp_path / "nothing" / "manager.sock")


def test_a_manager_that_dies_in_between(manager: ManagerProcess) -> None:
    with Client.connect(manager.socket_path) as client:
        manager.kill()
        with pytest.raises(ManagerGone):
            client.status()
        with pytest.raises(ManagerGone):
            client.status()


# -- nonsense ----------------------------------------------------------------------------------


def raw(manager: ManagerProcess) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.settimeout(120)
    sock.connect(str(manager.socket_path))
    return sock


def replies(sock: socket.socket) -> list[p.Reply]:
    """Read until the manager hangs up."""
    reader, found = p.FrameReader(), []
    try:
        while data := sock.recv(1 << 16):
            found += [p.decode_reply(payload) for payload in reader.feed(data)]
    except ConnectionResetError:
        pass
    return found


def test_protocol_mismatch(manager: ManagerProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leto_rmp.client.PROTOCOL_VERSION", 99)
    with pytest.raises(ProtocolMismatch, match="speaks protocol 4, the client 99") as caught:
        Client.connect(manager.socket_path)
    assert caught.value.details == {"expected": 4, "found": 99}


HELLO = p.frame(p.Hello(id=1, protocol=p.PROTOCOL_VERSION))


@pytest.mark.parametrize(
    ("sent", "error"),
    [
        (struct.pack("<I", p.FRAME_BYTES_MAX + 1), "ProtocolError"),
        (b"\xff" * 4, "ProtocolError"),
        (b"GET / HTTP/1.1\r\n\r\n", "ProtocolError"),
        (struct.pack("<I", 3) + b"\xc1\xc1\xc1", "ProtocolError"),
        (struct.pack("<I", 0), "ProtocolError"),
        (HELLO + struct.pack("<I", 1) + b"\x01", "ProtocolError"),
        (p.frame(p.Hello(protocol=p.PROTOCOL_VERSION + 1)), "ProtocolMismatch"),
        (p.frame(p.Hello(protocol=-1)), "ProtocolMismatch"),
    ],
)
def test_nonsense_is_told_and_hung_up_on(manager: ManagerProcess, sent: bytes, error: str) -> None:
    with Client.connect(manager.socket_path) as bystander, raw(manager) as sock:
        sock.sendall(sent)
        told = replies(sock)[-1]
        assert isinstance(told, p.Failure)
        assert told.error == error
        status = bystander.status()
        assert status.refused == {error: 1}
        assert len(status.clients) == 1


def test_requests_out_of_turn_are_refused(manager: ManagerProcess) -> None:
    with raw(manager) as sock:
        sock.sendall(p.frame(p.Status(id=7)))
        told = p.decode_reply(sock.recv(1 << 16)[4:])
        assert isinstance(told, p.Failure)
        assert (told.id, told.error) == (7, "ProtocolError")
        assert "must be Hello" in told.message


def test_pipelined_and_dribbled_requests_are_answered_in_order(manager: ManagerProcess) -> None:
    requests = HELLO + b"".join(p.frame(p.Status(id=i)) for i in range(2, 400))
    with raw(manager) as sock:
        for first in range(60):
            sock.sendall(requests[first : first + 1])
        sock.sendall(requests[60:])
        sock.shutdown(socket.SHUT_WR)
        assert [reply.id for reply in replies(sock)] == list(range(1, 400))


def test_descriptors_sent_by_a_client_are_dropped(
    manager: ManagerProcess,
    count_fds: Callable[..., int],
    eventually: Callable[[Callable[[], bool], str], None],
) -> None:
    with Client.connect(manager.socket_path) as client, raw(manager) as sock:
        client.status()
        sock.sendall(HELLO)
        sock.recv(1000)
        before = count_fds(manager.pid)
        socket.send_fds(sock, [p.frame(p.Status(id=2))], [0] * 200)
        sock.recv(10000)
        eventually(lambda: count_fds(manager.pid) == before, "the kernel closes them")


def test_a_client_that_never_reads_blocks_only_itself(manager: ManagerProcess) -> None:
    with Client.connect(manager.socket_path) as client, raw(manager) as sock:
        sock.sendall(HELLO)
        sock.settimeout(1)
        flood = p.frame(p.Status(id=2)) * 100
        with pytest.raises(TimeoutError):  # backpressure: the manager stops reading
            sock.sendall(flood * 10000)
        assert len(client.status().clients) == 2


def test_a_defect_in_a_request_does_not_end_the_manager(config: PoolConfig) -> None:
    from leto_rmp.connection import Connection
    from leto_rmp.host import HostBackend
    from leto_rmp.ownership import Ownership, Party
    from leto_rmp.pool import Pool
    from leto_rmp.service import Identity, Service

    backend = HostBackend()
    owner = Ownership(Party(0, -1), None, 0.0, lambda pidfd: False)
    service = Service(Identity("job", 0), Pool(config, backend), owner, lambda pidfd: False)
    left, right = socket.socketpair()
    connection = Connection(left, 1, os.open("/dev/null", os.O_RDONLY), 0.0)
    connection.welcomed, connection.role = True, Role.OBSERVER
    service.pool.marks = lambda: 1 / 0  # type: ignore[assignment,method-assign,return-value]
    outcome = service.handle(connection, p.Marks(id=3))
    assert isinstance(outcome.reply, p.Failure)
    assert (outcome.reply.id, outcome.reply.error) == (3, "InternalError")
    connection.close()
    right.close()
    backend.close()


def test_a_stopped_manager_meets_the_deadline(
    manager: ManagerProcess, count_fds: Callable[..., int], config: PoolConfig
) -> None:
    spec = AllocationSpec("a", PAGE, Kind.TRANSACTION)
    with Client.connect(manager.socket_path) as client:
        client.attach(Role.WRITER, 0)
        client.allocate([spec])
        before = count_fds()
        client._timeout_s = 0.2
        os.kill(manager.pid, signal.SIGSTOP)
        try:
            with pytest.raises(DeadlineExceeded, match=r"Status got no answer .* within 0\.2 s"):
                client.status()
            with pytest.raises(DeadlineExceeded):
                client._request(p.Export(allocation="a", section="data", first=0, count=1), p.Handles)
            with pytest.raises(DeadlineExceeded):
                Client.connect(manager.socket_path, timeout_s=0.2)
        finally:
            os.kill(manager.pid, signal.SIGCONT)
        client._timeout_s = 120.0
        # Late answers, and the descriptors that came with one, are recognised and dropped.
        assert client.status().allocations[0].name == "a"
        assert not client.allocate([spec])["a"].created
        assert count_fds() == before


def test_a_silent_connection_is_dropped(
    manager: ManagerProcess, monkeypatch: pytest.MonkeyPatch, config: PoolConfig
) -> None:
    """A connection that never says Hello ends at its deadline; run in this process to shorten it."""
    import threading

    from leto_rmp import server as server_module
    from leto_rmp.endpoint import Endpoint
    from leto_rmp.host import HostBackend
    from leto_rmp.linux import pidfd_gone
    from leto_rmp.ownership import Ownership, Party
    from leto_rmp.pool import Pool
    from leto_rmp.service import Identity, Service

    monkeypatch.setattr(server_module, "HELLO_TIMEOUT_S", 0.05)
    endpoint, backend = Endpoint(manager.socket_path.parent / "second"), HostBackend()
    wake, waker = socket.socketpair()
    owner = Ownership(Party(manager.pid, manager.pidfd), None, 0.0, pidfd_gone)
    service = Service(Identity("job", 1), Pool(config, backend), owner, pidfd_gone)
    server = server_module.Server(service, endpoint, wake)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        with socket.socket(socket.AF_UNIX) as sock:
            sock.settimeout(120)
            sock.connect(str(endpoint.socket_path))
            assert sock.recv(1) == b""
    finally:
        waker.send(b"x")
        thread.join(120)
        assert not thread.is_alive()
        server.close()
        endpoint.close()
        backend.close()
        wake.close()
        waker.close()


def test_mutant_wire_types_stay_closed() -> None:
    """No request may carry unknown fields: they would be silently dropped by an older manager."""
    for request in (p.Hello, p.Attach, p.Allocate, p.Fence, p.Acknowledge, p.InjectLose):
        assert msgspec.inspect.type_info(request).forbid_unknown_fields  # type: ignore[union-attr]
