"""Frames: any cut of the stream gives the same frames, caps hold, nothing else is decoded."""

from __future__ import annotations

import struct
from contextlib import suppress

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leto_rmp import AllocationSpec, Interleave, Kind, PageMark, PageRef, PoolConfig, ProtocolError, Role
from leto_rmp import protocol as p
from leto_rmp.errors import RmpError, WriterAlive, error_from_wire


@given(st.lists(st.binary(max_size=50), max_size=8), st.lists(st.integers(1, 9), min_size=1))
def test_any_cut_gives_the_same_frames(payloads: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(struct.pack("<I", len(payload)) + payload for payload in payloads)
    reader, found, step = p.FrameReader(), [], 0
    while stream:
        size = cuts[step % len(cuts)]
        found += reader.feed(stream[:size])
        stream, step = stream[size:], step + 1
    assert found == payloads


@given(st.integers(17, 2**32 - 1))
def test_an_oversize_frame_is_refused_by_its_header(length: int) -> None:
    reader = p.FrameReader(frame_bytes_max=16)
    assert reader.feed(struct.pack("<I", 16) + bytes(15)) == []
    reader = p.FrameReader(frame_bytes_max=16)
    with pytest.raises(ProtocolError, match=str(length)):
        reader.feed(struct.pack("<I", length))


REF = PageRef("a", "tier1", 3)
SPEC = AllocationSpec("a", 5000, Kind.RETAINED, Interleave(1, 2), 7)


@pytest.mark.parametrize(
    "request_",
    [
        p.Hello(id=1, protocol=1),
        p.Attach(role=Role.WRITER, generation=2),
        p.Allocate(specs=(SPEC,)),
        p.Acknowledge(refs=(REF,)),
        p.InjectFlip(ref=REF, offset=1, mask=b"\1"),
        p.Fence(generation=1, wait_ms=5),
    ],
)
def test_requests_survive_the_wire(request_: p.Message) -> None:
    (payload,) = p.FrameReader().feed(p.frame(request_))
    assert p.decode_request(payload) == request_


def test_replies_survive_the_wire() -> None:
    reply = p.MarkList(id=4, marks=((REF, PageMark.LOST),))
    assert p.decode_reply(p.frame(reply)[4:]) == reply
    welcome = p.Welcome(protocol=1, job_id="j", rank=0, pid=1, config=PoolConfig())
    assert p.decode_reply(p.frame(welcome)[4:]) == welcome


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\x80",
        msgspec.msgpack.encode({"type": "no-such-request"}),
        msgspec.msgpack.encode({"type": "hello"}),
        msgspec.msgpack.encode({"type": "hello", "protocol": "one"}),
        msgspec.msgpack.encode({"type": "hello", "protocol": 1, "more": 1}),
        msgspec.msgpack.encode({"type": "attach", "role": "emperor", "generation": 1}),
        msgspec.msgpack.encode({"type": "allocate", "specs": [{"name": "", "nbytes": 1, "kind": "derived"}]}),
        msgspec.msgpack.encode({"type": "welcome"}),
        b"\xdf\xff\xff\xff\xff" + bytes(10),
    ],
)
def test_garbage_is_no_request(payload: bytes) -> None:
    with pytest.raises(ProtocolError, match="not a request"):
        p.decode_request(payload)


@given(st.binary(max_size=200))
def test_random_bytes_are_decoded_or_refused(payload: bytes) -> None:
    for decode in (p.decode_request, p.decode_reply):
        with suppress(ProtocolError):
            assert isinstance(decode(payload), p.Message)


def test_a_message_too_large_for_a_frame_is_not_sent() -> None:
    with pytest.raises(ProtocolError, match="exceeds"):
        p.frame(p.InjectFlip(ref=REF, offset=0, mask=bytes(p.FRAME_BYTES_MAX + 1)))


def test_errors_keep_their_class_and_numbers() -> None:
    error = error_from_wire("WriterAlive", "text", {"pid": 3})
    assert type(error) is WriterAlive
    assert error.details == {"pid": 3}
    assert type(error_from_wire("FromTheFuture", "text", {})) is RmpError
