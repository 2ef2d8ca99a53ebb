"""The coordinator behind its links: frames in, frames and local actions out, still without I/O.

One `Link` per node makes delivery exactly-once and in order; the session in a frame tells a restarted agent
from the one that joined. The shell (and the simulation) only moves bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from leto_shadow import messages as m
from leto_shadow.actions import Action, AskDecision, AskHook, CloseStore, Done, HostStore, Record, Send
from leto_shadow.config import BEAT_S
from leto_shadow.coordinator import Coordinator
from leto_shadow.link import Link, decode_frame, encode_frame
from leto_shadow.phases import Phase

__all__ = ["Hub", "HubOutput"]


@dataclass(frozen=True)
class HubOutput:
    """Frames to send, as (node, bytes), and what the shell has to do itself."""

    frames: list[tuple[int, bytes]]
    local: list[HostStore | CloseStore | AskDecision | AskHook | Record | Done]


class Hub:
    """Feed it bytes of agents and time; send what it returns."""

    def __init__(self, coordinator: Coordinator, beat_s: float = BEAT_S) -> None:
        self.coordinator = coordinator
        self.malformed = 0
        self._links: dict[int, Link] = {}
        self._open: set[int] = set()  # nodes whose link may have something to repeat or to acknowledge
        self._beat_s = beat_s
        self._next_beat = 0.0

    @property
    def stale_frames(self) -> int:
        """Frames of sessions that are over."""
        return sum(link.stale_frames for link in self._links.values())

    def receive(self, node: int, data: bytes, now: float) -> HubOutput:
        """Take the bytes of one frame from ``node``; garbage is counted and dropped."""
        out = HubOutput([], [])
        try:
            frame = decode_frame(data)
        except msgspec.DecodeError:
            self.malformed += 1
            return out
        link = self._links.get(node)
        if link is None:
            link = self._links[node] = Link(frame.session)
        elif link.session != frame.session and frame.seq == 1:
            link.stale_frames += 1
            self._carry(self.coordinator.rejoined(node, now), now, out)
            return out
        self._open.add(node)
        for payload in link.receive(frame):
            try:
                message = m.decode_from_agent(payload)
            except msgspec.DecodeError:
                self.malformed += 1
                continue
            if isinstance(message, m.Beat):
                self._carry(self.coordinator.beat(node, message, now), now, out)
            else:
                self._carry(self.coordinator.receive(node, message, now), now, out)
        return out

    def tick(self, now: float) -> HubOutput:
        """Let time pass: deadlines, repeats, beats."""
        out = HubOutput([], [])
        self._carry(self.coordinator.tick(now), now, out)
        nodes, self._open = self._open, set()
        for node in sorted(nodes):
            link = self._links[node]
            out.frames.extend((node, encode_frame(frame)) for frame in link.poll(now))
            if not link.quiet:
                self._open.add(node)
        if now >= self._next_beat and self.coordinator.phase is not Phase.DONE:
            self._next_beat = now + self._beat_s
            beat = m.encode(m.Beat(-1, self.coordinator.generation))
            out.frames.extend((node, encode_frame(link.bare(beat))) for node, link in self._links.items())
        return out

    def store_ready(self, world: int, host: str, port: int, now: float) -> HubOutput:
        return self._only(self.coordinator.store_ready(world, host, port, now), now)

    def decided(self, generation: int, payload: bytes, error: str, now: float) -> HubOutput:
        return self._only(self.coordinator.decided(generation, payload, error, now), now)

    def hook_answered(self, number: int, answer: str, error: str, now: float) -> HubOutput:
        return self._only(self.coordinator.hook_answered(number, answer, error, now), now)

    def stop(self, exit_code: int, reason: str, now: float) -> HubOutput:
        return self._only(self.coordinator.stop(exit_code, reason, now), now)

    def _only(self, actions: list[Action], now: float) -> HubOutput:
        out = HubOutput([], [])
        self._carry(actions, now, out)
        return out

    def _carry(self, actions: list[Action], now: float, out: HubOutput) -> None:
        for action in actions:
            if isinstance(action, Send):
                link = self._links.get(action.node)
                if link is not None:  # an agent that never joined is told nothing
                    frame = link.send(m.encode(action.message), now)
                    self._open.add(action.node)
                    out.frames.append((action.node, encode_frame(frame)))
            else:
                out.local.append(action)
