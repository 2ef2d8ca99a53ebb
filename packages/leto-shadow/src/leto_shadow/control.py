"""The control socket of an agent: status and drills for an operator on the same host.

A Unix socket of mode 0600 in the job's run directory; the peer's uid is checked as well. One request and one
reply per connection, each a 4-byte little-endian length and a msgpack-encoded tagged struct. A client that is
silent, slow or talks nonsense is cut off and disturbs nobody.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

__all__ = [
    "ControlError",
    "ControlServer",
    "Inject",
    "Reply",
    "Request",
    "RunSchedule",
    "StatusReply",
    "StatusRequest",
    "ask",
    "peer_uid",
]

_HEADER = struct.Struct("<I")
_MAX_REQUEST_BYTES = 64 * 1024
_MAX_REPLY_BYTES = 16 * 1024 * 1024
_CLIENTS = 16
_CLIENT_S = 30.0  # more than a busy machine keeps an agent, or one that asks it, waiting for its turn


class ControlError(RuntimeError):
    """The agent cannot be asked, or refused; the message says why."""


class StatusRequest(msgspec.Struct, frozen=True, tag="status"):
    """Ask for a snapshot."""


class Inject(msgspec.Struct, frozen=True, tag="inject", forbid_unknown_fields=True):
    """Inflict a failure on a local rank now.

    "lose" and "poison" kill the active trainer and lose pages of one protection group before the localization
    that follows ("lose": data pages, "poison": tier-1 parity pages), as a drill with `lose` would. "fatal"
    kills it and has its device report an Xid.
    """

    kind: Literal["kill", "hang", "lose", "poison", "fatal", "kill_manager"]
    rank: int
    allocation: str = "arena"
    group: int = 0
    pages: int | Literal["tolerance"] = 1
    tier1: int = 0
    seed: int = 0
    xid: int = 79
    heals_s: float | None = 0.0
    """fatal: if a spare takes the node's place, its devices stay unfit for so long; None: for ever."""


class RunSchedule(msgspec.Struct, frozen=True, tag="schedule"):
    """Begin a schedule of failures now; ``text``: as in its file (`leto_shadow.schedule`)."""

    text: bytes


class StatusReply(msgspec.Struct, frozen=True, tag="status_reply"):
    """Snapshot of one node; on node rank 0 with the key "job" for the whole job. See `agent_main`."""

    status: dict[str, Any]


class Reply(msgspec.Struct, frozen=True, tag="reply"):
    """Outcome of anything else."""

    ok: bool
    detail: str = ""


Request = StatusRequest | Inject | RunSchedule
_requests = msgspec.msgpack.Decoder(Request)
_replies = msgspec.msgpack.Decoder(StatusReply | Reply)


def ask(path: str | Path, request: Request, timeout_s: float = 30.0) -> StatusReply | Reply:
    """Send one request to the agent that listens at ``path`` and return its reply; `ControlError` if none."""
    deadline = time.monotonic() + timeout_s
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        try:
            sock.settimeout(timeout_s)
            sock.connect(str(path))
            body = msgspec.msgpack.encode(request)
            sock.sendall(_HEADER.pack(len(body)) + body)
            (size,) = _HEADER.unpack(_receive(sock, _HEADER.size, deadline))
            if size > _MAX_REPLY_BYTES:
                raise ControlError(f"the agent at {path} announces a reply of {size} bytes: not an agent?")
            return _replies.decode(_receive(sock, size, deadline))
        except (OSError, msgspec.DecodeError) as error:
            raise ControlError(f"no answer from the agent at {path}: {error}") from error


def _receive(sock: socket.socket, size: int, deadline: float) -> bytes:
    data = bytearray()
    while len(data) < size:
        left = deadline - time.monotonic()
        if left <= 0:
            raise TimeoutError("the deadline passed")
        sock.settimeout(left)
        piece = sock.recv(min(size - len(data), 1 << 16))
        if not piece:
            raise ConnectionError("the connection was closed")
        data += piece
    return bytes(data)


def peer_uid(sock: socket.socket) -> int:
    """Return the uid of the process at the other end of a Unix socket, as the kernel attests it."""
    packed = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    _, uid, _ = struct.unpack("3i", packed)
    return int(uid)


class _Client:
    def __init__(self, sock: socket.socket, deadline: float) -> None:
        self.sock = sock
        self.deadline = deadline
        self.incoming = bytearray()
        self.outgoing = b""


class ControlServer:
    """Non-blocking server; the event loop calls `accept`, `serve` and `expire`.

    The folder of ``path`` must exist with mode 0700. A dead predecessor's socket is replaced; a living one
    means that a job runs in this folder, and `ControlError` says so.
    """

    def __init__(self, path: Path, handle: Callable[[Request], StatusReply | Reply]) -> None:
        self.path = path
        self.refused = 0
        self._handle = handle
        self._clients: dict[int, _Client] = {}
        unborn = path.with_name(path.name + ".new")
        if len(os.fsencode(unborn)) > 107:
            raise ControlError(
                f"{unborn} is longer than the 107 bytes of a Unix socket: use a shorter --run-dir"
            )
        if path.exists():
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.settimeout(1.0)
                try:
                    probe.connect(str(path))
                except ConnectionRefusedError:
                    path.unlink()
                else:
                    raise ControlError(
                        f"{path} is in use by a running job: choose another --job-id or --run-dir"
                    )
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
        # Renamed only once it listens: a socket that can be seen can be connected to.
        unborn.unlink(missing_ok=True)
        umask = os.umask(0o177)
        try:
            self._socket.bind(str(unborn))
        finally:
            os.umask(umask)
        self._socket.listen(_CLIENTS)
        unborn.rename(path)

    def fileno(self) -> int:
        return self._socket.fileno()

    def accept(self) -> int | None:
        """Take one connection; return its descriptor for the poll set, or None if it was refused."""
        try:
            sock, _ = self._socket.accept()
        except BlockingIOError:
            return None
        if peer_uid(sock) not in (os.getuid(), 0) or len(self._clients) >= _CLIENTS:
            self.refused += 1
            sock.close()
            return None
        sock.setblocking(False)
        self._clients[sock.fileno()] = _Client(sock, time.monotonic() + _CLIENT_S)
        return sock.fileno()

    def serve(self, fd: int) -> bool:
        """Read from or write to one client; return False when the connection is over."""
        client = self._clients[fd]
        try:
            if not client.outgoing and not self._read(client):
                return True
            client.outgoing = client.outgoing[client.sock.send(client.outgoing, socket.MSG_NOSIGNAL) :]
        except BlockingIOError:
            return True
        except (OSError, msgspec.DecodeError, ControlError):
            client.outgoing = b""
        if client.outgoing:
            return True
        self._drop(fd)
        return False

    def _read(self, client: _Client) -> bool:
        data = client.sock.recv(_MAX_REQUEST_BYTES)
        if not data:
            raise ControlError("the client left")
        client.incoming += data
        if len(client.incoming) < _HEADER.size:
            return False
        (size,) = _HEADER.unpack_from(client.incoming)
        if size > _MAX_REQUEST_BYTES:
            raise ControlError(f"a request of {size} bytes")
        if len(client.incoming) < _HEADER.size + size:
            return False
        request = _requests.decode(bytes(client.incoming[_HEADER.size : _HEADER.size + size]))
        body = msgspec.msgpack.encode(self._handle(request))
        client.outgoing = _HEADER.pack(len(body)) + body
        return True

    def wants_to_write(self, fd: int) -> bool:
        """True when the reply to this client is not out yet."""
        return bool(self._clients[fd].outgoing)

    def expire(self) -> list[int]:
        """Close connections that are past their deadline; return their descriptors."""
        now = time.monotonic()
        late = [fd for fd, client in self._clients.items() if now > client.deadline]
        for fd in late:
            self._drop(fd)
        return late

    def _drop(self, fd: int) -> None:
        self._clients.pop(fd).sock.close()

    def close(self) -> None:
        """Stop listening and remove the socket."""
        for fd in list(self._clients):
            self._drop(fd)
        self._socket.close()
        self.path.unlink(missing_ok=True)
