"""Frames over a transport that loses, repeats and reorders: everything arrives once and in order.

Case 7 (messages of an old round): frames of another session, an agent's predecessor, are rejected and
counted.
"""

from __future__ import annotations

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leto_shadow.link import Frame, Link, decode_frame, encode_frame


@given(seed=st.integers(0, 2**32), count=st.integers(1, 40), loss=st.floats(0, 0.6))
def test_exactly_once_and_in_order_over_a_bad_network(seed: int, count: int, loss: float) -> None:
    rng = random.Random(seed)
    ends = {"a": Link("s", retry_s=1.0), "b": Link("s", retry_s=1.0)}
    sent: dict[str, list[bytes]] = {"a": [], "b": []}
    got: dict[str, list[bytes]] = {"a": [], "b": []}
    wires: list[tuple[str, Frame]] = []
    now = 0.0

    def put(to: str, frame: Frame) -> None:
        copies = range(rng.choice([1, 1, 2]))
        wires.extend((to, decode_frame(encode_frame(frame))) for _ in copies if rng.random() >= loss)

    for _ in range(count):
        here, there = rng.choice([("a", "b"), ("b", "a")])
        sent[here].append(rng.randbytes(3))
        put(there, ends[here].send(sent[here][-1], now))
        while wires and rng.random() < 0.7:
            to, frame = wires.pop(rng.randrange(len(wires)))
            got[to] += ends[to].receive(frame)
    for _ in range(400):
        now += 1.0
        for here, there in (("a", "b"), ("b", "a")):
            for frame in ends[here].poll(now):
                put(there, frame)
        rng.shuffle(wires)
        while wires:
            to, frame = wires.pop()
            got[to] += ends[to].receive(frame)
        if ends["a"].idle and ends["b"].idle:
            break
    assert got == {"a": sent["b"], "b": sent["a"]}
    assert ends["a"].idle
    assert ends["b"].idle


def test_frames_of_another_session_are_rejected_and_counted() -> None:
    """Case 7."""
    link = Link("new")
    assert link.receive(Frame("old", 1, 0, b"late")) == []
    assert link.stale_frames == 1
    assert link.receive(Frame("new", 1, 0, b"first")) == [b"first"]


def test_a_flood_of_early_frames_is_not_kept() -> None:
    link = Link("s")
    assert link.receive(Frame("s", 1_000_000, 0, b"far ahead")) == []
    assert link.repeated_frames == 1


def test_bare_frames_are_neither_numbered_nor_repeated() -> None:
    a, b = Link("s", retry_s=1.0), Link("s", retry_s=1.0)
    assert b.receive(a.bare(b"beat")) == [b"beat"]
    assert a.poll(100.0) == []
    assert b.receive(a.bare()) == []


@pytest.mark.parametrize("data", [b"", b"\xc1", b"\x93\x01\x02\x03"])
def test_garbage_is_no_frame(data: bytes) -> None:
    with pytest.raises(msgspec.DecodeError):
        decode_frame(data)
