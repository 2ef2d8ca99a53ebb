"""The manager's protocol: frames and messages. No I/O here.

A frame is a 4-byte little-endian length and a msgpack map of one of the structs below, named by its
`type`. The client sends one request at a time and gets one reply with the request's `id`; file
descriptors of a `Handles` reply travel as SCM_RIGHTS with its first byte. A change of any struct
raises PROTOCOL_VERSION; `Hello` and `Failure` never change, so that a mismatch can be told.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from enum import StrEnum

import msgspec

from leto_rmp.config import AllocationSpec, PoolConfig
from leto_rmp.errors import Detail, ProtocolError
from leto_rmp.layout import PageRef, PageRun, SectionName
from leto_rmp.marks import PageMark
from leto_rmp.status import ManagerStatus

__all__ = ["FDS_PER_MESSAGE_MAX", "FRAME_BYTES_MAX", "PROTOCOL_VERSION", "FrameReader", "Role", "frame"]

PROTOCOL_VERSION = 4
FRAME_BYTES_MAX = 8 << 20
FDS_PER_MESSAGE_MAX = 253
"""SCM_MAX_FD of the kernel."""

_LENGTH = struct.Struct("<I")


class Role(StrEnum):
    """What a connection may do."""

    WRITER = "writer"
    """Writes retained memory; one at a time (I-4)."""
    OBSERVER = "observer"
    """A shadow: maps ahead, reads, may become the writer."""
    CONTROL = "control"
    """An agent or the command line: localizes, remaps, injects faults; reads."""


class Message(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="type"):
    """Any message; `id` pairs a reply with its request."""

    id: int = 0


class Hello(Message, frozen=True, tag="hello"):
    """First request of every connection."""

    protocol: int


class Attach(Message, frozen=True, tag="attach"):
    """Take a role; WRITER is subject to fencing."""

    role: Role
    generation: int


class BecomeWriter(Message, frozen=True, tag="become-writer"):
    """An observer is promoted."""

    generation: int


class Release(Message, frozen=True, tag="release"):
    """The writer will not write any more: its mappings are read-only or gone."""


class Fence(Message, frozen=True, tag="fence"):
    """Refuse generations below this one from now on; answer when no older writer is left."""

    generation: int
    wait_ms: int


class Own(Message, frozen=True, tag="own"):
    """The asking process takes the place of the owner, who is dead."""

    grace_ms: int


class Allocate(Message, frozen=True, tag="allocate"):
    """Create or re-attach, all or nothing."""

    specs: tuple[AllocationSpec, ...]


class Free(Message, frozen=True, tag="free"):
    """Forget allocations; memory lives on only while someone maps it."""

    names: tuple[str, ...]


class Describe(Message, frozen=True, tag="describe"):
    """List all allocations."""


class Export(Message, frozen=True, tag="export"):
    """Ask for `count` handles of a section from handle `first` on."""

    allocation: str
    section: SectionName
    first: int
    count: int


class Marks(Message, frozen=True, tag="marks"):
    """Ask for the marks as they are."""


class Localize(Message, frozen=True, tag="localize"):
    """Scan, mark what is lost, answer with all marks.

    `read`: device pages are read too, by processes that may die of it. `unmapped`: pages that the client
    mapped and its driver does not know.
    """

    read: bool
    unmapped: tuple[PageRef, ...] = ()


class Remap(Message, frozen=True, tag="remap"):
    """Replace all lost pages by empty ones, answer with all marks."""


class Refresh(Message, frozen=True, tag="refresh"):
    """Ask which pages got another handle after `epoch`."""

    epoch: int


class Cleared(Message, frozen=True, tag="cleared"):
    """The writer, who knows the handles as of `epoch`, has zeroed these fresh pages."""

    runs: tuple[PageRun, ...]
    epoch: int


class Acknowledge(Message, frozen=True, tag="acknowledge"):
    """The writer has reconstructed and verified these pages."""

    refs: tuple[PageRef, ...]


class InjectLose(Message, frozen=True, tag="inject-lose"):
    """Lose or (host pages) poison pages; bytes are overwritten first."""

    refs: tuple[PageRef, ...]
    seed: int
    poison: bool


class InjectFlip(Message, frozen=True, tag="inject-flip"):
    """XOR bytes of a page."""

    ref: PageRef
    offset: int
    mask: bytes


class Status(Message, frozen=True, tag="status"):
    """Ask for the manager's status."""


Request = (
    Hello
    | Attach
    | BecomeWriter
    | Release
    | Fence
    | Own
    | Allocate
    | Free
    | Describe
    | Export
    | Marks
    | Localize
    | Remap
    | Refresh
    | Cleared
    | Acknowledge
    | InjectLose
    | InjectFlip
    | Status
)


class Welcome(Message, frozen=True, tag="welcome"):
    """Answer to Hello."""

    protocol: int
    job_id: str
    rank: int
    pid: int
    config: PoolConfig
    device_uuid: str = ""


class Done(Message, frozen=True, tag="done"):
    """It was done; nothing else to tell."""


class Described(Message, frozen=True, tag="described"):
    """All allocations; `created` lists those that this request created.

    `incarnations` (one per spec) differ between an allocation and one of the same name that was freed.
    """

    specs: tuple[AllocationSpec, ...]
    incarnations: tuple[int, ...]
    created: tuple[str, ...]
    layout_hash: str


class Handles(Message, frozen=True, tag="handles"):
    """`count` file descriptors come with this message; `absent` handles were asked for and do not exist."""

    count: int
    absent: tuple[int, ...] = ()


class MarkList(Message, frozen=True, tag="mark-list"):
    """Pages that are not healthy."""

    marks: tuple[tuple[PageRef, PageMark], ...]


class Changes(Message, frozen=True, tag="changes"):
    """Pages with other handles than the client knows, and fresh pages that nobody has zeroed yet."""

    epoch: int
    replaced: tuple[PageRun, ...]
    uncleared: tuple[PageRun, ...]


class Injected(Message, frozen=True, tag="injected"):
    """How pages were made unreadable: userfaultfd, unmapped, simulated; several joined by +."""

    method: str


class StatusReply(Message, frozen=True, tag="status-reply"):
    """The status."""

    status: ManagerStatus


class Failure(Message, frozen=True, tag="failure"):
    """The request failed; `error` is the name of a class in leto_rmp.errors."""

    error: str
    message: str
    details: dict[str, Detail] = {}


Reply = Welcome | Done | Described | Handles | MarkList | Changes | Injected | StatusReply | Failure

_encoder = msgspec.msgpack.Encoder()
_requests: msgspec.msgpack.Decoder[Request] = msgspec.msgpack.Decoder(Request)
_replies: msgspec.msgpack.Decoder[Reply] = msgspec.msgpack.Decoder(Reply)


def frame(message: Message) -> bytes:
    """Return the message as one frame; raise ProtocolError when it is too large for the other side."""
    payload = _encoder.encode(message)
    if len(payload) > FRAME_BYTES_MAX:
        raise ProtocolError(
            f"a message of {len(payload)} bytes exceeds the {FRAME_BYTES_MAX} bytes of a frame: "
            "ask for less at a time"
        )
    return _LENGTH.pack(len(payload)) + payload


def decode_request(payload: bytes) -> Request:
    """Return the request; raise ProtocolError when it is none."""
    try:
        return _requests.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"not a request of protocol {PROTOCOL_VERSION}: {error}") from error


def decode_reply(payload: bytes) -> Reply:
    """Return the reply; raise ProtocolError when it is none."""
    try:
        return _replies.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"not a reply of protocol {PROTOCOL_VERSION}: {error}") from error


class FrameReader:
    """Cuts a byte stream into frames; a length above the cap is refused before anything is kept."""

    def __init__(self, frame_bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._frame_bytes_max = frame_bytes_max
        self._buffer = bytearray()

    def feed(self, data: bytes) -> Sequence[bytes]:
        """Return the frames that `data` completes; raise ProtocolError on an oversize one."""
        self._buffer += data
        frames: list[bytes] = []
        start = 0
        while len(self._buffer) - start >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._buffer, start)
            if length > self._frame_bytes_max:
                raise ProtocolError(
                    f"a frame announces {length} bytes, at most {self._frame_bytes_max} are accepted"
                )
            end = start + _LENGTH.size + length
            if len(self._buffer) < end:
                break
            frames.append(bytes(self._buffer[start + _LENGTH.size : end]))
            start = end
        del self._buffer[:start]
        return frames
