"""Messages between the agent of node rank 0 and its helper process (`leto_shadow.helper`).

Frames are those of `leto_shadow.wire`: a 4-byte little-endian length and a msgpack-encoded tagged struct.
"""

from __future__ import annotations

import struct

import msgspec

__all__ = [
    "MAX_REQUEST_BYTES",
    "CloseWorldStore",
    "DecideOn",
    "Decided",
    "HelperMessage",
    "HelperRequest",
    "OpenWorldStore",
    "Ready",
    "StoreOpened",
    "Unusable",
    "pack",
]

MAX_REQUEST_BYTES = 512 * 1024 * 1024
"""Largest request: the summaries of all ranks in one, so 4 KiB for each of 131,072."""

_HEADER = struct.Struct("<I")


class OpenWorldStore(msgspec.Struct, frozen=True, tag="open"):
    world: int
    host: str


class CloseWorldStore(msgspec.Struct, frozen=True, tag="close"):
    world: int


class DecideOn(msgspec.Struct, frozen=True, tag="decide"):
    """Ask for the decision on the summaries of all ranks, in rank order."""

    generation: int
    summaries: tuple[bytes, ...]


HelperRequest = OpenWorldStore | CloseWorldStore | DecideOn


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """torch and the decision function are loaded."""


class Unusable(msgspec.Struct, frozen=True, tag="unusable"):
    """The helper cannot do its work; it exits after this."""

    error: str


class StoreOpened(msgspec.Struct, frozen=True, tag="opened"):
    world: int
    port: int
    error: str = ""


class Decided(msgspec.Struct, frozen=True, tag="decided"):
    generation: int
    payload: bytes
    error: str = ""


HelperMessage = Ready | Unusable | StoreOpened | Decided


def pack(message: HelperRequest | HelperMessage) -> bytes:
    """Return one frame."""
    body = msgspec.msgpack.encode(message)
    return _HEADER.pack(len(body)) + body
