"""Exactly-once, in-order delivery between coordinator and agent over a transport that may lose, repeat
or reorder frames, without I/O (paper section 3.4; case 7).

ZeroMQ over TCP rarely loses anything, but a reconnect does, silently. Each side numbers its frames,
repeats them until acknowledged and drops what it has seen. A frame of another session (an agent of an
earlier attempt) is rejected and counted. The machine is driven by `Link.receive` and `Link.poll`; time is
an argument. Waiting for ever is not its business: the heartbeat deadline of both ends is.
"""

from __future__ import annotations

from collections import deque

import msgspec

__all__ = ["Frame", "Link", "decode_frame", "encode_frame"]

_WINDOW = 4096  # frames kept for reordering; far more than a recovery sends to one agent


class Frame(msgspec.Struct, frozen=True, array_like=True):
    """One transport frame. ``seq`` is 0 for bare frames: pure acknowledgements and beats."""

    session: str
    seq: int
    ack: int
    payload: bytes = b""


_decoder = msgspec.msgpack.Decoder(Frame)


def encode_frame(frame: Frame) -> bytes:
    return msgspec.msgpack.encode(frame)


def decode_frame(data: bytes) -> Frame:
    """Decode one frame; `msgspec.ValidationError` or `msgspec.DecodeError` if it is none."""
    return _decoder.decode(data)


class Link:
    """One end of a session. ``retry_s`` is the time after which an unacknowledged frame is repeated."""

    def __init__(self, session: str, retry_s: float = 0.5) -> None:
        self.session = session
        self.retry_s = retry_s
        self.stale_frames = 0
        self.repeated_frames = 0
        self._next_seq = 1
        self._expected = 1
        self._unacked: deque[tuple[int, bytes, float]] = deque()  # seq, payload, last sent at
        self._early: dict[int, bytes] = {}
        self._ack_due = False

    @property
    def idle(self) -> bool:
        """True when everything sent has been acknowledged."""
        return not self._unacked

    @property
    def quiet(self) -> bool:
        """True when `poll` will have nothing before the next `send` or `receive`."""
        return not self._unacked and not self._ack_due

    def send(self, payload: bytes, now: float) -> Frame:
        """Number ``payload``, keep it until acknowledged and return the frame to put on the wire now."""
        seq = self._next_seq
        self._next_seq += 1
        self._unacked.append((seq, payload, now))
        self._ack_due = False
        return Frame(self.session, seq, self._expected - 1, payload)

    def bare(self, payload: bytes = b"") -> Frame:
        """Return a frame that is not repeated: a beat, or an acknowledgement when empty."""
        self._ack_due = False
        return Frame(self.session, 0, self._expected - 1, payload)

    def receive(self, frame: Frame) -> list[bytes]:
        """Take one frame in; return the payloads that became deliverable, bare ones included."""
        if frame.session != self.session:
            self.stale_frames += 1
            return []
        while self._unacked and self._unacked[0][0] <= frame.ack:
            self._unacked.popleft()
        if frame.seq == 0:
            return [frame.payload] if frame.payload else []
        self._ack_due = True
        if frame.seq < self._expected or frame.seq in self._early or frame.seq >= self._expected + _WINDOW:
            self.repeated_frames += 1
            return []
        self._early[frame.seq] = frame.payload
        delivered = []
        while self._expected in self._early:
            delivered.append(self._early.pop(self._expected))
            self._expected += 1
        return delivered

    def poll(self, now: float) -> list[Frame]:
        """Return the frames that are due: repeats, or a bare acknowledgement if nothing carried it."""
        frames = []
        for position, (seq, payload, sent) in enumerate(self._unacked):
            if now - sent >= self.retry_s:
                self._unacked[position] = (seq, payload, now)
                frames.append(Frame(self.session, seq, self._expected - 1, payload))
        if frames:
            self._ack_due = False
        elif self._ack_due:
            frames.append(self.bare())
        return frames
