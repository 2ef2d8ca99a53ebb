"""The control socket: permissions, garbage, slow clients, a name in use."""

from __future__ import annotations

import os
import select
import socket
import stat
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from leto_shadow import control
from leto_shadow.control import ControlError, ControlServer, Inject, Reply, StatusReply, StatusRequest, ask


def handle(request: control.Request) -> StatusReply | Reply:
    if isinstance(request, StatusRequest):
        return StatusReply({"answer": "x" * 300_000})
    return Reply(True, request.kind)


class Served:
    """A server with the poll loop that an agent would run."""

    def __init__(self, path: Path) -> None:
        self.server = ControlServer(path, handle)
        self.stop = threading.Event()
        self.thread = threading.Thread(target=self.loop)
        self.thread.start()

    def loop(self) -> None:
        clients: set[int] = set()
        while not self.stop.is_set():
            poll = select.poll()
            poll.register(self.server.fileno(), select.POLLIN)
            for fd in clients:
                poll.register(fd, select.POLLOUT if self.server.wants_to_write(fd) else select.POLLIN)
            for fd, _ in poll.poll(20):
                if fd == self.server.fileno():
                    accepted = self.server.accept()
                    clients |= {accepted} if accepted is not None else set()
                elif not self.server.serve(fd):
                    clients.discard(fd)
            clients -= set(self.server.expire())

    def close(self) -> None:
        self.stop.set()
        self.thread.join(60)
        assert not self.thread.is_alive()
        self.server.close()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    server = Served(tmp_path / "agent-0.sock")
    yield server
    server.close()


def test_request_and_reply(served: Served) -> None:
    reply = ask(served.server.path, StatusRequest())
    assert isinstance(reply, StatusReply)
    assert len(reply.status["answer"]) == 300_000
    assert ask(served.server.path, Inject("hang", 1)) == Reply(True, "hang")


def test_only_the_owner_may_connect(tmp_path: Path) -> None:
    old = os.umask(0)
    try:
        server = ControlServer(tmp_path / "agent-0.sock", handle)
    finally:
        os.umask(old)
    assert stat.S_IMODE(server.path.stat().st_mode) == 0o600
    server.close()
    assert not server.path.exists()


def test_the_socket_is_never_open_to_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case 3: its mode is right when it gets its name, whatever the umask, and is never changed."""
    modes = []
    bind = socket.socket.bind

    class Watched(socket.socket):
        def bind(self, address: Any) -> None:
            bind(self, address)
            modes.append(stat.S_IMODE(os.stat(address).st_mode))

    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("the mode is changed after the fact")

    monkeypatch.setattr(socket, "socket", Watched)
    monkeypatch.setattr(os, "chmod", refuse)
    monkeypatch.setattr(os, "fchmod", refuse)
    old = os.umask(0o022)
    try:
        ControlServer(tmp_path / "agent-0.sock", handle).close()
        assert os.umask(0o022) == 0o022, "the umask of the process is as it was"
    finally:
        os.umask(old)
    assert modes == [0o600]


def test_an_agent_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    """Case 3: every request has a deadline, also for the one who asks."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as deaf:
        deaf.bind(str(tmp_path / "agent-0.sock"))
        deaf.listen(1)
        with pytest.raises(ControlError, match="no answer"):
            ask(tmp_path / "agent-0.sock", StatusRequest(), timeout_s=0.1)


def test_another_uid_is_refused(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "peer_uid", lambda sock: os.getuid() + 1)
    with pytest.raises(ControlError, match="no answer"):
        ask(served.server.path, StatusRequest())
    assert served.server.refused == 1


@pytest.mark.parametrize(
    "data", [b"\xff\xff\xff\xff", struct.pack("<I", 3) + b"\xc1\xc1\xc1", struct.pack("<I", 1) + b"\x80"]
)
def test_garbage_is_cut_off_and_disturbs_nobody(served: Served, data: bytes) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(60)
        sock.connect(str(served.server.path))
        sock.sendall(data)
        assert sock.recv(1) == b""
    assert isinstance(ask(served.server.path, StatusRequest()), StatusReply)


def test_a_silent_client_is_cut_off(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "_CLIENT_S", 0.05)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(60)
        sock.connect(str(served.server.path))
        assert sock.recv(1) == b""


def test_a_living_agents_name_is_not_taken_but_a_dead_ones_is(tmp_path: Path) -> None:
    path = tmp_path / "agent-0.sock"
    first = ControlServer(path, handle)
    with pytest.raises(ControlError, match="in use"):
        ControlServer(path, handle)
    first._socket.close()  # as a SIGKILL would leave it: the name without the socket
    second = ControlServer(path, handle)
    second.close()


def test_a_path_that_no_unix_socket_can_have(tmp_path: Path) -> None:
    with pytest.raises(ControlError, match="107 bytes"):
        ControlServer(tmp_path / ("x" * 120), handle)


def test_nobody_listens(tmp_path: Path) -> None:
    with pytest.raises(ControlError, match="no answer"):
        ask(tmp_path / "missing.sock", StatusRequest(), timeout_s=1.0)
