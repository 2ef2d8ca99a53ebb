"""One client's connection, as the manager sees it: buffers with caps, and who is at the other end."""

from __future__ import annotations

import array
import errno
import os
import socket
from collections import deque
from collections.abc import Sequence

from leto_rmp.backend import Handle
from leto_rmp.protocol import FrameReader, Message, Role, frame

__all__ = ["Connection"]

_READ_BYTES = 64 << 10


class Connection:
    """A non-blocking socket. Requests are read only while nothing waits to be sent (backpressure)."""

    def __init__(self, sock: socket.socket, pid: int, pidfd: int, deadline_s: float) -> None:
        self.sock = sock
        self.pid = pid
        self.pidfd = pidfd
        self.welcomed = False
        self.role: Role | None = None
        self.generation = -1
        self.written_generation: int | None = None
        """Newest generation under which this connection was the writer."""
        self.hello_deadline_s = deadline_s
        self.closing = False
        self.inbox: deque[bytes] = deque()
        self.stalled = False
        """Too many fds in flight: the socket is writable, yet sending has to wait for the peer."""
        self._reader = FrameReader()
        self._outbox: deque[tuple[memoryview, Sequence[Handle]]] = deque()

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return self.pidfd < 0

    @property
    def sending(self) -> bool:
        """Whether something still waits to be sent."""
        return bool(self._outbox)

    def read(self) -> bool:
        """Read once into the inbox; return False at the end of the stream. Raises ProtocolError.

        Plain recv carries no control buffer: file descriptors that a client sends are dropped by
        the kernel.
        """
        try:
            data = self.sock.recv(_READ_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        if not data:
            return False
        self.inbox.extend(self._reader.feed(data))
        return True

    def send(self, message: Message, handles: Sequence[Handle] = ()) -> None:
        """Queue a reply; the handles stay open until they are on their way."""
        self._outbox.append((memoryview(frame(message)), handles))

    def flush(self) -> bool:
        """Send what the socket takes; return False when the connection is broken.

        ETOOMANYREFS (too many fds in flight for this user) is no error: the peers make room by
        reading, so the frame stays queued and the connection is `stalled`.
        """
        self.stalled = False
        while self._outbox:
            data, handles = self._outbox[0]
            fds = array.array("i", [handle.fileno() for handle in handles])
            control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)] if handles else []
            try:
                sent = self.sock.sendmsg([data], control)
            except BlockingIOError:
                return True
            except OSError as error:
                self.stalled = error.errno == errno.ETOOMANYREFS
                return self.stalled
            if sent < len(data):
                self._outbox[0] = (data[sent:], ())
            else:
                self._outbox.popleft()
        return True

    def close(self) -> None:
        """Close the socket and the pidfd."""
        self._outbox.clear()
        self.sock.close()
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1
