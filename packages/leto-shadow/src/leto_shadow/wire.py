"""Messages between a node agent and the trainers it owns.

Role: the only language that agent and trainer share. Both ends are processes of one user on one host, joined
by a Unix stream socketpair that the trainer inherits (`LETO_AGENT_FD`). A frame is a 4-byte little-endian
length and one msgpack-encoded tagged struct. Paper: section 3.4.

Upheld here: sizes are checked before anything is allocated; what does not decode to a known struct is refused
(never pickle); every message that a later generation could confuse carries its generation or world id (I-5).

agent -> trainer: `TakeRank`, `Advance`, `Promote`, `Decision`, `Retire`, `Stop`, `Inject`
trainer -> agent: `Hello`, `LevelReached`, `Summary`, `Resumed`, `Metrics`, `Hint`, `Memory`, `DrillFired`,
    `PeerLost`, `Released`, `Retired`, `Finished`, `Failed`
"""

from __future__ import annotations

import select
import socket
import struct
import time
from typing import Any, Generic, Literal, TypeVar

import msgspec

from leto_shadow.drills import Drill

__all__ = [
    "HINTS_MAX",
    "MAX_FRAME_BYTES",
    "PROTOCOL",
    "Advance",
    "AgentDecoder",
    "AgentMessage",
    "Channel",
    "Decision",
    "DrillFired",
    "Failed",
    "Finished",
    "FrameDecoder",
    "FrameError",
    "Hello",
    "Hint",
    "Inject",
    "LevelReached",
    "Memory",
    "Metrics",
    "PeerGoneError",
    "PeerLost",
    "Promote",
    "Released",
    "Resumed",
    "Retire",
    "Retired",
    "Stop",
    "Summary",
    "TakeRank",
    "TrainerDecoder",
    "TrainerMessage",
    "WireTimeoutError",
    "encode",
]

PROTOCOL = 5
"""Version of this protocol; a trainer names it in `Hello`, an agent refuses another one."""

HINTS_MAX = 32
"""So many names of hints (`Hint`) are kept of a rank; more would be a mistake of the script."""

MAX_FRAME_BYTES = 16 * 1024 * 1024
"""Largest payload of a frame; a length above it means garbage and ends the connection."""

_HEADER = struct.Struct("<I")
_READ_BYTES = 64 * 1024


class FrameError(ValueError):
    """Bytes that are no frame of this protocol. The connection must be closed: the stream has lost its frame
    borders."""


class PeerGoneError(ConnectionError):
    """The other end closed the connection or died."""


class WireTimeoutError(TimeoutError):
    """The other end neither sent nor took bytes before the deadline."""


# --- agent -> trainer ---------------------------------------------------------------------------------------


class TakeRank(msgspec.Struct, frozen=True, tag="take_rank"):
    """A trainer that was started on a spare node has `rank` now; its output goes to the file `log`."""

    rank: int
    log: str


class Advance(msgspec.Struct, frozen=True, tag="advance"):
    """Stand at `level` (1, 2 or 3) of world `world_id`; answer `LevelReached` for each level reached.

    store_host, store_port: the TCPStore of that world, hosted by the agent of node rank 0; used at level 3,
    "" and 0 below it. A trainer at level 3 that is sent lower, or to another world, leaves its world first.
    waits: it will stand there until something fails; False: it is promoted as soon as all have come.
    """

    level: int
    world_id: int
    store_host: str = ""
    store_port: int = 0
    waits: bool = False


class Promote(msgspec.Struct, frozen=True, tag="promote"):
    """Become the active trainer of `generation`, in the world that was formed at level 3.

    manager_socket: path of the socket of this rank's state manager. drills: the drills of this rank that did
    not fire yet. hints: what earlier trainers of the rank have left for it (`Hint`).
    """

    generation: int
    manager_socket: str
    world_id: int
    drills: tuple[Drill, ...] = ()
    hints: dict[str, float] = msgspec.field(default_factory=dict)


class Decision(msgspec.Struct, frozen=True, tag="decision"):
    """The decision on all summaries of `generation`; opaque to agent and coordinator."""

    payload: bytes
    generation: int = 0


class Retire(msgspec.Struct, frozen=True, tag="retire"):
    """`generation`, which this trainer belongs to, is over: stop training, give up writing, answer
    `Released`, become a shadow again, answer `Retired`."""

    generation: int


class Stop(msgspec.Struct, frozen=True, tag="stop"):
    """End now, without finishing the training; `reason` is for the log."""

    reason: str


class Inject(msgspec.Struct, frozen=True, tag="inject"):
    """Fail now, as if by accident (`leto inject`). "hang": keep the GIL for ever. (A kill needs no
    message.)"""

    kind: Literal["hang"]


# --- trainer -> agent ---------------------------------------------------------------------------------------


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """First message of a trainer; rank -1: it was started on a spare node."""

    pid: int
    rank: int
    protocol: int = PROTOCOL
    retires: bool = False
    """After a failure of another rank this trainer can become a shadow again (`Trainer.retire`)."""


class LevelReached(msgspec.Struct, frozen=True, tag="level"):
    """The trainer stands at `level` for world `world_id`; parked_bytes: what it will need of its device for
    its promotion beyond what it holds (`Context.parked`)."""

    level: int
    world_id: int
    parked_bytes: int = 0


class Summary(msgspec.Struct, frozen=True, tag="summary"):
    """What this rank can recover from, opaque; the agent answers with `Decision`. One per promotion."""

    payload: bytes
    generation: int = 0


class Resumed(msgspec.Struct, frozen=True, tag="resumed"):
    """Training goes on at `iteration` from `source`; `breakdown` holds seconds by part of the recovery."""

    iteration: int
    source: Literal["fresh", "in-place", "checkpoint"]
    breakdown: dict[str, float] = {}
    generation: int = 0


class Metrics(msgspec.Struct, frozen=True, tag="metrics"):
    """Numbers of one finished iteration (loss, lr, tokens, ...), passed on to the event log."""

    iteration: int
    values: dict[str, float]
    generation: int = 0


class Hint(msgspec.Struct, frozen=True, tag="hint"):
    """What later trainers of the rank may find useful: kept by the agent, newer values in the place of older
    ones, and passed on with `Promote`. No part of the job's state: it may be lost."""

    values: dict[str, float]
    generation: int = 0


class Memory(msgspec.Struct, frozen=True, tag="memory"):
    """The device's memory as the active trainer sees it: `leto_shadow.preinit.MemoryView`."""

    free_bytes: int
    total_bytes: int
    spare_bytes: int
    generation: int = 0


class DrillFired(msgspec.Struct, frozen=True, tag="drill_fired"):
    """The drill `id` is about to fire in this trainer: never hand it out again; carry out the agent's part of
    it."""

    id: str
    iteration: int = 0


class PeerLost(msgspec.Struct, frozen=True, tag="peer_lost"):
    """A collective broke because a peer is gone. `Trainer.train` is left, and `Retire` is waited for; `error`
    is the end of the traceback."""

    error: str
    generation: int


class Released(msgspec.Struct, frozen=True, tag="released"):
    """Nothing of `Trainer.train` runs any more in this process, which cannot write retained memory."""

    generation: int


class Retired(msgspec.Struct, frozen=True, tag="retired"):
    """The trainer that was active in `generation` is a shadow now, at `level`, in no world."""

    level: int
    generation: int


class Finished(msgspec.Struct, frozen=True, tag="finished"):
    """`Trainer.train` returned; the process exits with status 0 after this."""

    iteration: int


class Failed(msgspec.Struct, frozen=True, tag="failed"):
    """The trainer raised; it exits with a status other than 0 after this.

    phase: prepare, build, connect, disconnect, train, retire or protocol. error: the end of the traceback.
    secondary: the error looks like the consequence of another rank's death or hang (a broken connection in a
    collective), so that this rank should not be blamed if another one is found dead as well. python: the
    error is one of Python itself, which no failed call of a device raises (`leto_shadow.localization`).
    """

    phase: str
    error: str
    secondary: bool = False
    python: bool = False
    memory: bool = False
    """The device had no memory left for it."""


AgentMessage = TakeRank | Advance | Promote | Decision | Retire | Stop | Inject
TrainerMessage = (
    Hello
    | LevelReached
    | Summary
    | Resumed
    | Metrics
    | Hint
    | Memory
    | DrillFired
    | PeerLost
    | Released
    | Retired
    | Finished
    | Failed
)

M = TypeVar("M")
_encoder = msgspec.msgpack.Encoder()


def encode(message: AgentMessage | TrainerMessage) -> bytes:
    """Return the frame (header and payload) of a message. Raises FrameError if it is above
    MAX_FRAME_BYTES."""
    payload = _encoder.encode(message)
    if len(payload) > MAX_FRAME_BYTES:
        kind = type(message).__name__
        raise FrameError(f"{kind} of {len(payload)} bytes does not fit in a frame of {MAX_FRAME_BYTES} bytes")
    return _HEADER.pack(len(payload)) + payload


class FrameDecoder(Generic[M]):
    """Incremental decoder: feed bytes as they come, in any pieces, and get whole messages.

    It never holds more than one incomplete frame and what was fed on top of it. After a FrameError every
    further call raises it again, because frame borders are lost.
    """

    def __init__(self, message_type: Any, max_frame_bytes: int = MAX_FRAME_BYTES) -> None:
        self._decoder: msgspec.msgpack.Decoder[M] = msgspec.msgpack.Decoder(message_type)
        self._buffer = bytearray()
        self._max_frame_bytes = max_frame_bytes
        self._error: str | None = None

    @property
    def pending_bytes(self) -> int:
        """Bytes of an incomplete frame; at end of stream it must be 0."""
        return len(self._buffer)

    def feed(self, data: bytes | bytearray | memoryview) -> list[M]:
        """Add bytes and return the messages that they complete, in order.

        Messages that precede a broken frame in the same call are returned; the FrameError comes with the next
        call.
        """
        if self._error is not None:
            raise FrameError(self._error)
        self._buffer += data
        messages: list[M] = []
        offset = 0
        while self._error is None and len(self._buffer) - offset >= _HEADER.size:
            (length,) = _HEADER.unpack_from(self._buffer, offset)
            if length > self._max_frame_bytes:
                self._error = f"frame length {length} is above the limit of {self._max_frame_bytes} bytes"
                break
            end = offset + _HEADER.size + length
            if len(self._buffer) < end:
                break
            try:
                messages.append(self._decoder.decode(bytes(self._buffer[offset + _HEADER.size : end])))
            except msgspec.DecodeError as error:  # ValidationError is a DecodeError
                self._error = f"frame of {length} bytes is no message of this protocol: {error}"
            offset = end
        del self._buffer[:offset]
        if self._error is not None:
            self._buffer.clear()
            if not messages:
                raise FrameError(self._error)
        return messages


class AgentDecoder(FrameDecoder[TrainerMessage]):
    """The agent's decoder: reads what trainers send, without blocking."""

    def __init__(self) -> None:
        super().__init__(TrainerMessage)


class TrainerDecoder(FrameDecoder[AgentMessage]):
    """The trainer's decoder: reads what the agent sends."""

    def __init__(self) -> None:
        super().__init__(AgentMessage)


class Channel(Generic[M]):
    """One end of the socketpair, with deadlines on both directions. Owns the socket.

    `send` and `recv` may be called from different threads, but each from one thread at a time.
    """

    def __init__(self, sock: socket.socket, decoder: FrameDecoder[M]) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._decoder = decoder
        self._ready: list[M] = []

    def fileno(self) -> int:
        """Return the socket's descriptor, for poll and select."""
        return self._socket.fileno()

    def send(self, message: AgentMessage | TrainerMessage, timeout_s: float = 10.0) -> None:
        """Hand the whole frame to the kernel; returns when the peer can read it even if this process dies
        next.

        Raises PeerGoneError, WireTimeoutError (the peer did not read in time), FrameError (message too
        large).
        """
        view = memoryview(encode(message))
        deadline = time.monotonic() + timeout_s
        while view:
            try:
                view = view[self._socket.send(view, socket.MSG_NOSIGNAL) :]
            except BlockingIOError:
                self._wait(select.POLLOUT, deadline, f"the peer took no bytes of {type(message).__name__}")
            except OSError as error:
                raise PeerGoneError(f"the peer is gone: {error.strerror}") from error

    def recv(self, timeout_s: float | None) -> M:
        """Return the next message; None waits until a message or the peer's end comes.

        Raises WireTimeoutError, PeerGoneError (end of stream), FrameError (garbage).
        """
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while not self._ready:
            try:
                data = self._socket.recv(_READ_BYTES)
            except BlockingIOError:
                self._wait(select.POLLIN, deadline, "no message came")
                continue
            except OSError as error:
                raise PeerGoneError(f"the peer is gone: {error.strerror}") from error
            if not data:
                rest = self._decoder.pending_bytes
                raise PeerGoneError(
                    "the peer closed the connection" + (f" inside a frame ({rest} bytes)" if rest else "")
                )
            self._ready = self._decoder.feed(data)
        return self._ready.pop(0)

    def _wait(self, events: int, deadline: float | None, what: str) -> None:
        poller = select.poll()
        poller.register(self._socket, events)
        timeout_ms = None if deadline is None else max(0.0, (deadline - time.monotonic()) * 1000)
        if not poller.poll(timeout_ms):
            raise WireTimeoutError(f"{what} before the deadline")

    def close(self) -> None:
        """Close the socket; the peer sees end of stream."""
        self._socket.close()
