"""Messages between the allocator hook in a trainer and its agent: fixed structs on a socketpair (paper
section 6).

The hook is C (``native/oom_hook.c``, which holds the same layout) and asks from inside a failing allocation,
so the messages are small, need no allocation and fit in one datagram of a SOCK_SEQPACKET socketpair of their
own, beside the trainer's channel (`leto_shadow.wire`), whose reader needs the GIL.

hook -> agent: `Ask`, then `Report` when the allocation has its result. agent -> hook: one answer per `Ask`.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum

__all__ = ["ASK_BYTES", "VERSION", "Ask", "Report", "Verdict", "decode", "encode_answer"]

VERSION = 1
_MAGIC = 0x4D4F4F4C
_ASK, _REPORT = 1, 2
_REQUEST = struct.Struct(
    "<IHHIi5Qi4x"
)  # magic version kind sequence device size free total freed waited result
_ANSWER = struct.Struct("<IHHII")  # magic version verdict sequence settle_ms
ASK_BYTES = _REQUEST.size


class Verdict(IntEnum):
    """What the agent answers."""

    NONE = 1
    """No shadow holds memory of this device: the error is real."""
    GONE = 2
    """The shadow and its whole process tree have ended; its memory is free now or within the settling
    time."""


@dataclass(frozen=True)
class Ask:
    """An allocation of ``size_bytes`` has failed for good unless the shadow's memory comes back."""

    sequence: int
    device: int
    size_bytes: int
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True)
class Report:
    """How it ended. ``free_bytes``: now, after the allocation; ``freed_bytes``: what came back meanwhile."""

    sequence: int
    device: int
    size_bytes: int
    free_bytes: int
    total_bytes: int
    freed_bytes: int
    waited_s: float
    satisfied: bool


def decode(data: bytes) -> Ask | Report:
    """Decode one datagram of a hook. Raises ValueError if it is none of this version."""
    if len(data) != _REQUEST.size:
        raise ValueError(f"a message of the allocator hook has {_REQUEST.size} bytes, found {len(data)}")
    magic, version, kind, sequence, device, size, free, total, freed, waited_us, result = _REQUEST.unpack(
        data
    )
    if magic != _MAGIC or version != VERSION or kind not in (_ASK, _REPORT):
        raise ValueError(
            f"expected a message of the allocator hook, version {VERSION}; found magic {magic:#x}, version "
            f"{version}, kind {kind}"
        )
    if kind == _ASK:
        return Ask(sequence, device, size, free, total)
    return Report(sequence, device, size, free, total, freed, waited_us / 1e6, result == 0)


def encode_answer(sequence: int, verdict: Verdict, settle_s: float = 0.0) -> bytes:
    """Return the answer to the `Ask` of ``sequence``."""
    return _ANSWER.pack(_MAGIC, VERSION, verdict, sequence, round(settle_s * 1000))
