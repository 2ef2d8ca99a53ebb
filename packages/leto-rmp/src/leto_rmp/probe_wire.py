"""What the state manager and its helper process say to each other. Frames as in protocol.py; no I/O here.

The manager asks, the helper answers each request once: `Ok`, or `Bad` and then it ends. Descriptors of a
`Load` travel as SCM_RIGHTS with its first byte.
"""

from __future__ import annotations

import msgspec

from leto_rmp.errors import ProtocolError
from leto_rmp.protocol import Message

__all__ = [
    "Answer",
    "Bad",
    "Begin",
    "Copy",
    "Load",
    "Ok",
    "Query",
    "Task",
    "Touch",
    "Write",
    "Xor",
    "decode_answer",
    "decode_task",
]


class Begin(Message, frozen=True, tag="begin"):
    """Reserve addresses for so many pages."""

    pages: int
    page_bytes: int


class Load(Message, frozen=True, tag="load"):
    """Map `count` handles of `pages` pages each, whose descriptors come along, from page `first` on."""

    first: int
    count: int
    pages: int = 1


class Query(Message, frozen=True, tag="query"):
    """Ask the driver about every page; answered with those that it does not know."""


class Touch(Message, frozen=True, tag="touch"):
    """Read these pages on the device."""

    first: int
    count: int


class Write(Message, frozen=True, tag="write"):
    """Write bytes of a page."""

    index: int
    offset: int
    data: bytes


class Xor(Message, frozen=True, tag="xor"):
    """XOR bytes of a page."""

    index: int
    offset: int
    mask: bytes


class Copy(Message, frozen=True, tag="copy"):
    """Copy `count` pages from page `source` on to page `target` and those that follow it, on the device."""

    source: int
    target: int
    count: int


class Ok(Message, frozen=True, tag="ok"):
    """It was done. `pages`: unknown to the driver (Query), or not importable (Load)."""

    pages: tuple[int, ...] = ()


class Bad(Message, frozen=True, tag="bad"):
    """A driver call failed; `code` is the driver's, 0 if it was none of its."""

    code: int
    message: str


Task = Begin | Load | Query | Touch | Write | Xor | Copy
Answer = Ok | Bad

_tasks: msgspec.msgpack.Decoder[Task] = msgspec.msgpack.Decoder(Task)
_answers: msgspec.msgpack.Decoder[Answer] = msgspec.msgpack.Decoder(Answer)


def decode_task(payload: bytes) -> Task:
    """Return the task; raise ProtocolError when it is none."""
    try:
        return _tasks.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"not a task for a probe: {error}") from error


def decode_answer(payload: bytes) -> Answer:
    """Return the answer; raise ProtocolError when it is none."""
    try:
        return _answers.decode(payload)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"not an answer of a probe: {error}") from error
