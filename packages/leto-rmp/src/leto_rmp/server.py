"""The manager's event loop: one thread, one selector, nothing that waits without a deadline.

Watched: the listener, the connections, the pidfds of the owner, the guardian and the writer, and the signal
pipe. Work that touches memory (allocate, localize) blocks the loop for as long as it lasts; clients
scale their deadlines with the bytes involved.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from leto_rmp import linux
from leto_rmp.connection import Connection
from leto_rmp.endpoint import Endpoint
from leto_rmp.errors import LimitTooLow, PeerRefused, ProtocolError, RmpError
from leto_rmp.protocol import Fence, decode_request, frame
from leto_rmp.service import Outcome, Service

__all__ = ["Server"]

HELLO_TIMEOUT_S = 60.0
CONNECTIONS_MAX = 256
_RETRY_S = 0.01  # after ETOOMANYREFS the socket is writable all along


@dataclass
class _PendingFence:
    connection: Connection
    request_id: int
    generation: int
    deadline_s: float


class Server:
    """Serves until its `Ownership` says that it is over, or until it is told to stop."""

    def __init__(self, service: Service, endpoint: Endpoint, wake: socket.socket) -> None:
        self._service = service
        self._ownership = service.ownership
        self._endpoint = endpoint
        self._connections: dict[int, Connection] = {}
        self._fences: list[_PendingFence] = []
        self._writer_pidfd = -1
        self._selector = selectors.DefaultSelector()
        self._selector.register(endpoint.listener, selectors.EVENT_READ, self._accept)
        self._watch_owner(None, self._ownership.owner.pidfd)
        if self._ownership.guardian is not None:
            self._selector.register(self._ownership.guardian.pidfd, selectors.EVENT_READ, self._guardian_died)
        self._selector.register(wake, selectors.EVENT_READ, self._woken)
        self._wake = wake
        self._spare_fd = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)
        service.connections = self._connections.values()
        service.on_writer = self._watch_writer
        service.on_owner = self._watch_owner

    def run(self) -> None:
        """Serve."""
        while not self._over():
            ready = self._selector.select(self._timeout_s())
            for key, events in ready:
                if isinstance(key.data, Connection):
                    self._serve(key.data, events)
                else:
                    key.data()
            self._check_deadlines(quiet=not ready)

    def _over(self) -> bool:
        stop_at_s = self._ownership.stop_at_s
        return stop_at_s is not None and time.monotonic() >= stop_at_s

    def close(self) -> None:
        """Close every connection and the selector."""
        for connection in list(self._connections.values()):
            self._drop(connection)
        self._selector.close()
        os.close(self._spare_fd)
        if self._writer_pidfd >= 0:
            os.close(self._writer_pidfd)
            self._writer_pidfd = -1

    # -- time ----------------------------------------------------------------------------------

    def _timeout_s(self) -> float | None:
        now_s = time.monotonic()
        moments = [fence.deadline_s for fence in self._fences]
        moments += [now_s + _RETRY_S for c in self._connections.values() if c.stalled]
        moments += [c.hello_deadline_s for c in self._connections.values() if not c.welcomed]
        if self._ownership.stop_at_s is not None:
            moments.append(self._ownership.stop_at_s)
        return max(0.0, min(moments) - now_s) if moments else None

    def _check_deadlines(self, quiet: bool) -> None:
        """`quiet`: nothing was waiting to be read. After a long allocation a Hello may just be unread."""
        now_s = time.monotonic()
        for connection in list(self._connections.values()):
            if connection.stalled:
                self._flush(connection)
            if quiet and not connection.welcomed and now_s >= connection.hello_deadline_s:
                self._drop(connection)
        for fence in list(self._fences):
            outcome = self._service.fence_outcome(fence.request_id, fence.generation)
            if outcome is None and now_s >= fence.deadline_s:
                outcome = Outcome(self._service.fence_late(fence.request_id, fence.generation))
            if outcome is not None:
                self._fences.remove(fence)
                self._reply(fence.connection, outcome)

    # -- the processes we watch ----------------------------------------------------------------

    def _watch_owner(self, old: int | None, new: int) -> None:
        if old is not None:
            if old in self._selector.get_map():
                self._selector.unregister(old)
            os.close(old)
        self._selector.register(new, selectors.EVENT_READ, partial(self._owner_died, new))

    def _owner_died(self, pidfd: int) -> None:
        if pidfd == self._ownership.owner.pidfd:  # it may have been replaced by an event of the same round
            self._selector.unregister(pidfd)
            self._ownership.owner_died(time.monotonic())

    def _guardian_died(self) -> None:
        assert self._ownership.guardian is not None
        self._selector.unregister(self._ownership.guardian.pidfd)
        self._ownership.guardian_died(time.monotonic())

    def _woken(self) -> None:
        self._wake.recv(64)
        self._ownership.stop_at_s = time.monotonic()

    def _watch_writer(self, old: int | None, new: int) -> None:
        if old is not None:
            if old in self._selector.get_map():
                self._selector.unregister(old)
            os.close(old)
        self._writer_pidfd = new
        self._selector.register(new, selectors.EVENT_READ, partial(self._writer_died, new))

    def _writer_died(self, pidfd: int) -> None:
        # Its memory stays. Fences that wait for this are answered by _check_deadlines.
        if pidfd == self._writer_pidfd:  # it may have been replaced by an event of the same round
            self._selector.unregister(pidfd)

    # -- connections ---------------------------------------------------------------------------

    def _accept(self) -> None:
        try:
            sock, _ = self._endpoint.listener.accept()
        except BlockingIOError:
            return
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._hang_up()
            return  # else the peer is gone again
        sock.setblocking(False)
        try:
            pid, uid, pidfd = linux.peer_pidfd(sock)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):
                self._say_full(sock)
            sock.close()  # else the peer ended before we could name it
            return
        connection = Connection(sock, pid, pidfd, time.monotonic() + HELLO_TIMEOUT_S)
        refusal: RmpError | None = None
        if uid != os.geteuid():
            refusal = PeerRefused(
                f"this manager serves user {os.geteuid()} only; process {pid} belongs to user {uid}", uid=uid
            )
        elif len(self._connections) >= CONNECTIONS_MAX:
            refusal = LimitTooLow(
                f"this manager has its maximum of {CONNECTIONS_MAX} connections already",
                limit="connections",
                have=CONNECTIONS_MAX,
            )
        if refusal is not None:
            connection.send(self._service.failure(refusal))
            connection.flush()
            connection.close()
            return
        self._connections[sock.fileno()] = connection
        self._selector.register(sock, selectors.EVENT_READ, connection)

    def _hang_up(self) -> None:
        """Out of fds: take the connection with the spare one and say so, or the loop would spin."""
        os.close(self._spare_fd)
        try:
            sock, _ = self._endpoint.listener.accept()
            sock.setblocking(False)
            with sock:
                self._say_full(sock)
        except OSError:
            pass  # nobody waits any more
        finally:
            self._spare_fd = os.open("/dev/null", os.O_RDONLY | os.O_CLOEXEC)

    def _say_full(self, sock: socket.socket) -> None:
        error = LimitTooLow(
            "the manager is out of file descriptors: raise RLIMIT_NOFILE", limit="RLIMIT_NOFILE"
        )
        with suppress(OSError):
            sock.send(frame(self._service.failure(error)))

    def _serve(self, connection: Connection, events: int) -> None:
        if events & selectors.EVENT_WRITE:
            self._flush(connection)
        elif events & selectors.EVENT_READ:
            try:
                alive = connection.read()
            except ProtocolError as error:
                self._refuse(connection, error)
                return
            if not alive:
                self._drop(connection)
                return
        self._answer(connection)

    def _answer(self, connection: Connection) -> None:
        """Carry out what was read, one request after another, while replies can be sent."""
        while connection.inbox and not (connection.sending or connection.closing or connection.closed):
            try:
                request = decode_request(connection.inbox.popleft())
            except ProtocolError as error:
                self._refuse(connection, error)
                return
            outcome = self._service.handle(connection, request)
            if outcome.waits_for is not None and isinstance(request, Fence):
                deadline_s = time.monotonic() + max(0, request.wait_ms) / 1000
                self._fences.append(_PendingFence(connection, request.id, outcome.waits_for, deadline_s))
            else:
                self._reply(connection, outcome)

    def _refuse(self, connection: Connection, error: ProtocolError) -> None:
        """Say why, then hang up: after an undecodable frame nothing on this stream can be trusted."""
        connection.closing = True
        self._reply(connection, Outcome(self._service.failure(error)))

    def _reply(self, connection: Connection, outcome: Outcome) -> None:
        if outcome.reply is None or connection.closed:
            return
        try:
            connection.send(outcome.reply, outcome.handles)
        except ProtocolError as error:  # the reply does not fit a frame
            connection.send(self._service.failure(error, outcome.reply.id))
        self._flush(connection)

    def _flush(self, connection: Connection) -> None:
        if not connection.flush() or (connection.closing and not connection.sending):
            self._drop(connection)
            return
        waiting = connection.sending and not connection.stalled
        wanted = selectors.EVENT_WRITE if waiting else selectors.EVENT_READ
        self._selector.modify(connection.sock, wanted, connection)

    def _drop(self, connection: Connection) -> None:
        """Forget a connection. A writer's record stays: only its death or its word frees the memory."""
        self._fences = [fence for fence in self._fences if fence.connection is not connection]
        if self._connections.pop(connection.sock.fileno(), None) is not None:
            self._selector.unregister(connection.sock)
        connection.close()
