"""The client's side of the socket: one request, one reply, file descriptors, always a deadline.

A reply that comes after its deadline is recognised by its id and dropped with its descriptors, so
the connection stays usable after DeadlineExceeded; a request that could only be half sent breaks it.
"""

from __future__ import annotations

import array
import errno
import os
import select
import socket
import time
from collections import deque
from pathlib import Path

import msgspec

from leto_rmp import protocol as p
from leto_rmp.endpoint import socket_address
from leto_rmp.errors import (
    DeadlineExceeded,
    LimitTooLow,
    ManagerGone,
    PeerRefused,
    ProtocolError,
    StaleSocket,
    error_from_wire,
)
from leto_rmp.limits import require_fds
from leto_rmp.linux import peer_uid

__all__ = ["Transport", "receive"]

_READ_BYTES = 256 << 10
_CONTROL_BYTES = socket.CMSG_SPACE(p.FDS_PER_MESSAGE_MAX * array.array("i").itemsize)


def receive(sock: socket.socket, size: int) -> tuple[bytes, list[int], bool]:
    """Read once; return (data, close-on-exec fds, whether the kernel dropped some of the fds)."""
    data, ancillary, flags, _ = sock.recvmsg(size, _CONTROL_BYTES, socket.MSG_CMSG_CLOEXEC)
    fds = array.array("i")
    for level, kind, raw in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(raw[: len(raw) - len(raw) % fds.itemsize])
    return data, list(fds), bool(flags & socket.MSG_CTRUNC)


class Transport:
    """A connected socket. Not thread-safe: the client serialises."""

    def __init__(self, socket_path: str | os.PathLike[str], timeout_s: float) -> None:
        self.path = Path(socket_path)
        self._sock = _connect(self.path, timeout_s)
        self._reader = p.FrameReader()
        self._frames: deque[bytes] = deque()
        self._fds: list[int] = []
        self._truncated = False
        self._sent = 0
        self._broken: str | None = None

    def fileno(self) -> int:
        """Return the socket's fd."""
        return self._sock.fileno()

    def request(self, message: p.Message, timeout_s: float) -> p.Reply:
        """Send a request and return its reply; raise the manager's error if it is one.

        Descriptors of the reply are left for `take_fds`.
        """
        if self._broken is not None:
            raise ManagerGone(f"the connection to {self.path} is closed: {self._broken}")
        deadline_s = time.monotonic() + timeout_s
        self._sent += 1
        payload = p.frame(msgspec.structs.replace(message, id=self._sent))
        what = type(message).__name__
        self._send(memoryview(payload), deadline_s, what, timeout_s)
        while True:
            reply = self._next(deadline_s, what, timeout_s)
            if reply.id == self._sent or (isinstance(reply, p.Failure) and reply.id == 0):
                break
            self._drop_late(reply)
        if isinstance(reply, p.Failure):
            raise error_from_wire(reply.error, reply.message, reply.details)
        return reply

    def take_fds(self, announced: int) -> list[int]:
        """Return the fds of the last reply; the caller closes them.

        Raises LimitTooLow when the kernel dropped some of them (none is kept then).
        """
        fds, self._fds = self._fds, []
        truncated, self._truncated = self._truncated, False
        if len(fds) == announced and not truncated:
            return fds
        for fd in fds:
            os.close(fd)
        require_fds(announced, "receiving memory handles")  # names the limit when it is still the cause
        raise LimitTooLow(
            f"{announced} file descriptors were sent and {len(fds)} arrived: the kernel drops what exceeds "
            "RLIMIT_NOFILE. Raise it, or use more pages per handle",
            limit="RLIMIT_NOFILE",
            need=announced,
            have=len(fds),
        )

    def close(self, reason: str = "it was closed by this process") -> None:
        """Close the socket; closing twice is harmless."""
        self._broken = self._broken or reason
        self._drop_fds()
        self._sock.close()

    def _drop_late(self, reply: p.Reply) -> None:
        """Forget the late reply of a request that was given up, with the fds that came with it."""
        count = reply.count if isinstance(reply, p.Handles) else 0
        for fd in self._fds[:count]:
            os.close(fd)
        del self._fds[:count]

    def _drop_fds(self) -> None:
        for fd in self._fds:
            os.close(fd)
        self._fds, self._truncated = [], False

    def _wait(self, events: int, deadline_s: float) -> bool:
        poll = select.poll()
        poll.register(self._sock, events)
        return bool(poll.poll(max(0, round((deadline_s - time.monotonic()) * 1000))))

    def _send(self, data: memoryview, deadline_s: float, what: str, timeout_s: float) -> None:
        whole = len(data)
        while data:
            if not self._wait(select.POLLOUT, deadline_s):
                if len(data) < whole:
                    self.close(f"{what} could only be sent in part")
                raise _late(what, timeout_s, self.path)
            try:
                data = data[self._sock.send(data, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                continue
            except OSError as error:
                if error.errno not in (errno.EPIPE, errno.ECONNRESET):
                    raise
                # The manager hung up. It may have said why before that: the reading side will tell.
                return

    def _next(self, deadline_s: float, what: str, timeout_s: float) -> p.Reply:
        while not self._frames:
            if not self._wait(select.POLLIN, deadline_s):
                raise _late(what, timeout_s, self.path)
            try:
                data, fds, truncated = receive(self._sock, _READ_BYTES)
            except BlockingIOError:
                continue
            except ConnectionResetError:
                data, fds, truncated = b"", [], False
            self._fds += fds
            self._truncated |= truncated
            if not data:
                self.close("the manager has ended or hung up")
                raise ManagerGone(
                    f"the manager behind {self.path} has ended or hung up while {what} was waiting for its "
                    "answer: its memory is gone unless it is still mapped"
                )
            self._frames.extend(self._reader.feed(data))
        try:
            return p.decode_reply(self._frames.popleft())
        except ProtocolError as error:
            self.close(error.message)
            raise


def _late(what: str, timeout_s: float, path: Path) -> DeadlineExceeded:
    return DeadlineExceeded(
        f"{what} got no answer from the manager behind {path} within {timeout_s} s. It may still be carried "
        "out: ask status() before repeating it"
    )


def _connect(path: Path, timeout_s: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        with socket_address(path) as address:
            sock.connect(address)
        uid = peer_uid(sock)
        if uid != os.geteuid():
            raise PeerRefused(f"the manager behind {path} belongs to user {uid}, not to {os.geteuid()}")
        sock.setblocking(False)
    except FileNotFoundError:
        sock.close()
        raise ManagerGone(f"no manager at {path}: start one with spawn_manager()") from None
    except ConnectionRefusedError:
        sock.close()
        raise StaleSocket(f"the manager that made {path} is dead: start a new one in this folder") from None
    except TimeoutError:
        sock.close()
        raise DeadlineExceeded(f"the manager behind {path} did not accept within {timeout_s} s") from None
    except PermissionError as error:
        sock.close()
        if isinstance(error, PeerRefused):
            raise
        raise PeerRefused(f"{path} is not open to user {os.geteuid()}: {error.strerror}") from error
    except BaseException:
        sock.close()
        raise
    return sock
