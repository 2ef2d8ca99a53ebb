"""Frames: split anywhere, garbage, oversize, deadlines, a peer that goes away."""

from __future__ import annotations

import itertools
import socket
import struct
import threading
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leto_shadow import wire
from leto_shadow.drills import Drill, Lose

names = st.text(max_size=20)
numbers = st.integers(min_value=0, max_value=2**40)
drills = st.builds(
    Drill,
    id=names,
    kind=st.sampled_from(["kill", "hang", "kill_manager"]),
    rank=numbers,
    iteration=numbers,
    group=st.none() | numbers,
    lose=st.none() | st.builds(Lose, allocation=names, pages=st.just("tolerance") | numbers),
)
from_agent = st.one_of(
    st.builds(wire.Advance, level=numbers, world_id=numbers, store_host=names, store_port=numbers),
    st.builds(wire.Promote, numbers, names, numbers, st.lists(drills, max_size=3).map(tuple)),
    st.builds(wire.Decision, st.binary(max_size=200), numbers),
    st.builds(wire.Stop, names),
    st.just(wire.Inject("hang")),
)
from_trainer = st.one_of(
    st.builds(wire.Hello, numbers, numbers),
    st.builds(wire.LevelReached, numbers, numbers),
    st.builds(wire.Summary, st.binary(max_size=200), numbers),
    st.builds(
        wire.Resumed,
        numbers,
        st.sampled_from(["fresh", "in-place", "checkpoint"]),
        st.just({"attach": 0.5}),
        numbers,
    ),
    st.builds(wire.Metrics, numbers, st.dictionaries(names, st.floats(allow_nan=False), max_size=4), numbers),
    st.builds(wire.Hint, st.dictionaries(names, st.floats(allow_nan=False), max_size=4), numbers),
    st.builds(wire.DrillFired, names, numbers),
    st.builds(wire.Finished, numbers),
    st.builds(wire.Failed, names, names, st.booleans()),
)


def pieces(data: bytes, cuts: list[int]) -> list[bytes]:
    borders = [0, *sorted(cut % (len(data) + 1) for cut in cuts), len(data)]
    return [data[a:b] for a, b in itertools.pairwise(borders)]


@given(st.lists(from_agent, max_size=5), st.lists(numbers, max_size=12))
def test_messages_of_the_agent_survive_any_split(messages: list[wire.AgentMessage], cuts: list[int]) -> None:
    decoder = wire.TrainerDecoder()
    stream = b"".join(map(wire.encode, messages))
    assert [m for piece in pieces(stream, cuts) for m in decoder.feed(piece)] == messages
    assert decoder.pending_bytes == 0


@given(st.lists(from_trainer, max_size=5), st.lists(numbers, max_size=12))
def test_messages_of_the_trainer_survive_any_split(
    messages: list[wire.TrainerMessage], cuts: list[int]
) -> None:
    decoder = wire.AgentDecoder()
    stream = b"".join(map(wire.encode, messages))
    assert [m for piece in pieces(stream, cuts) for m in decoder.feed(piece)] == messages
    assert decoder.pending_bytes == 0


@given(st.lists(from_trainer, max_size=3), st.binary(min_size=1, max_size=64), st.lists(numbers, max_size=6))
def test_garbage_never_becomes_a_message(
    before: list[wire.TrainerMessage], junk: bytes, cuts: list[int]
) -> None:
    """What precedes a broken frame is delivered, the frame itself is refused, and so is everything after
    it."""
    broken = struct.pack("<I", len(junk)) + b"\xc1" + junk[1:]  # 0xc1 is never used in msgpack
    decoder = wire.AgentDecoder()
    seen: list[wire.TrainerMessage] = []
    stream = [*pieces(b"".join(map(wire.encode, before)) + broken, cuts), b""]
    with pytest.raises(wire.FrameError):
        seen.extend(message for piece in stream for message in decoder.feed(piece))
    assert seen == before
    with pytest.raises(wire.FrameError):
        decoder.feed(wire.encode(wire.Finished(1)))


@given(st.binary(max_size=300))
def test_random_bytes_raise_nothing_but_frame_error(junk: bytes) -> None:
    decoder = wire.TrainerDecoder()
    try:
        decoder.feed(junk)
        decoder.feed(junk)
    except wire.FrameError:
        assert decoder.pending_bytes == 0


def test_a_message_of_the_other_direction_is_refused() -> None:
    with pytest.raises(wire.FrameError, match="no message of this protocol"):
        wire.TrainerDecoder().feed(wire.encode(wire.Hello(1, 0)))


def test_an_oversize_length_is_refused_before_its_bytes_arrive() -> None:
    decoder = wire.AgentDecoder()
    with pytest.raises(wire.FrameError, match="above the limit"):
        decoder.feed(struct.pack("<I", wire.MAX_FRAME_BYTES + 1))
    assert decoder.pending_bytes == 0


def test_an_oversize_message_is_refused_at_the_sender() -> None:
    wire.encode(wire.Summary(bytes(wire.MAX_FRAME_BYTES - 64)))
    with pytest.raises(wire.FrameError, match="Summary"):
        wire.encode(wire.Summary(bytes(wire.MAX_FRAME_BYTES)))


Ends = tuple[wire.Channel[wire.TrainerMessage], wire.Channel[wire.AgentMessage]]


@pytest.fixture
def ends() -> Iterator[Ends]:
    a, b = socket.socketpair()
    with a, b:
        yield wire.Channel(a, wire.AgentDecoder()), wire.Channel(b, wire.TrainerDecoder())


def test_a_large_message_passes_a_small_socket_buffer(ends: Ends) -> None:
    agent, trainer = ends
    payload = (
        bytes(range(256)) * 20_000
    )  # far above the buffer of a socketpair, so that send must wait and go on
    sender = threading.Thread(target=trainer.send, args=(wire.Summary(payload, 3),))
    sender.start()
    assert agent.recv(150.0) == wire.Summary(payload, 3)
    sender.join(150.0)
    agent.close()
    trainer.close()


def test_deadlines_in_both_directions(ends: Ends) -> None:
    agent, trainer = ends
    with pytest.raises(wire.WireTimeoutError, match="no message"):
        agent.recv(0.01)
    with pytest.raises(wire.WireTimeoutError, match="Summary"):
        trainer.send(wire.Summary(bytes(8 << 20)), timeout_s=0.01)
    agent.close()
    trainer.close()


def test_what_was_sent_before_death_is_still_read_and_then_the_end_is_seen(ends: Ends) -> None:
    agent, trainer = ends
    trainer.send(wire.DrillFired("d", 4))
    trainer.close()
    assert agent.recv(5.0) == wire.DrillFired("d", 4)
    with pytest.raises(wire.PeerGoneError):
        agent.recv(5.0)
    with pytest.raises(wire.PeerGoneError):
        agent.send(wire.Stop("late"))
    agent.close()


def test_death_inside_a_frame_is_named(ends: Ends) -> None:
    agent, trainer = ends
    raw = socket.socket(fileno=trainer.fileno())
    raw.send(wire.encode(wire.Finished(7))[:-1])
    raw.detach()
    trainer.close()
    with pytest.raises(wire.PeerGoneError, match="inside a frame"):
        agent.recv(5.0)
    agent.close()
