"""Who may speak to the coordinator, and what strangers, silence and garbage cost: nothing but a counter."""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import zmq

from leto_shadow import messages as m
from leto_shadow import transport
from leto_shadow.config import JobPolicy
from leto_shadow.coordinator import Coordinator
from leto_shadow.hub import Hub
from leto_shadow.link import Link, encode_frame
from leto_shadow.transport import AgentKeys, AgentSocket, CoordinatorSocket, make_keys


class Network:
    """A coordinator's socket for two nodes, and whoever connects to it."""

    def __init__(self, context: zmq.Context[Any]) -> None:
        self.context = context
        self.keys = make_keys(2)
        self.server = CoordinatorSocket(context, self.keys)
        self.address = f"tcp://127.0.0.1:{self.server.port}"
        self.heard: list[tuple[int, bytes]] = []
        self._open: list[Any] = [self.server]

    def agent(self, node: int, name: int | None = None, **other: bytes) -> AgentSocket:
        """The agent of ``node``; it may call itself another one's name or have other keys."""
        public, secret = self.keys.clients[node]
        keys = AgentKeys(
            self.address,
            other.get("server_public", self.keys.public),
            other.get("client_public", public),
            other.get("client_secret", secret),
        )
        agent = AgentSocket(self.context, node if name is None else name, keys)
        agent.dealer.linger = 0
        self._open.append(agent)
        return agent

    def serve(self) -> None:
        self.server.serve_zap()
        self.heard += self.server.receive()

    def until(self, what: Callable[[], Any]) -> Any:
        deadline = time.monotonic() + 100.0
        while not (found := what()):
            assert time.monotonic() < deadline, "never came to pass"
            self.serve()
            time.sleep(0.002)
        return found

    def close(self) -> None:
        for one in self._open:
            one.close()


@pytest.fixture
def network() -> Iterator[Network]:
    with zmq.Context() as context:
        found = Network(context)
        yield found
        found.close()


def test_a_wrong_key_gets_no_byte_in(network: Network) -> None:
    foreign, secret = zmq.curve_keypair()
    strangers = [
        network.agent(0, client_public=foreign, client_secret=secret),  # not on the list
        network.agent(0, client_secret=secret),  # on the list, and not its own
        network.agent(0, server_public=foreign),  # meant for another coordinator
    ]
    for stranger in strangers:
        stranger.send(b"let me in")
    agent = network.agent(0)
    agent.send(b"hello")
    network.until(lambda: network.heard and network.server.denied)
    assert network.heard == [(0, b"hello")]
    network.server.send(0, b"welcome")
    assert network.until(agent.receive) == [b"welcome"]
    assert [stranger.receive() for stranger in strangers] == [[], [], []]


def test_a_node_speaks_only_for_itself(network: Network) -> None:
    impostor = network.agent(1, name=0)
    impostor.send(b"I am node 0")
    network.until(lambda: network.server.impostors)
    assert network.heard == []
    nameless = network.agent(1, name=7)
    nameless.send(b"I am node 7")
    network.until(lambda: network.server.impostors == 2)
    agent = network.agent(1)
    agent.send(b"I am node 1")
    network.until(lambda: network.heard)
    assert network.heard == [(1, b"I am node 1")]


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "_HANDSHAKE_MS", 300)


@pytest.mark.usefixtures("hasty")
def test_a_silent_peer_is_dropped_and_disturbs_nobody(network: Network) -> None:
    """Connections that never speak, or stop in the middle of the greeting."""
    silent = [socket.create_connection(("127.0.0.1", network.server.port)) for _ in range(50)]
    try:
        for one in silent[25:]:
            with contextlib.suppress(ConnectionError):  # a slow machine, which has dropped it already
                one.sendall(b"\xff\0\0\0\0\0\0\0\x01\x7f\x03")
        agent = network.agent(0)
        agent.send(b"hello")
        network.until(lambda: network.heard)
        for one in silent:
            one.settimeout(100.0)
            with contextlib.suppress(ConnectionResetError):  # dropped before it had said its word
                while one.recv(4096):  # its own greeting, then the end
                    pass
    finally:
        for one in silent:
            one.close()
    assert network.heard == [(0, b"hello")]


def test_a_flood_of_garbage_from_outside_does_not_reach_the_protocol(network: Network) -> None:
    agent = network.agent(0)
    agent.send(b"before")
    network.until(lambda: network.heard)
    for _ in range(200):
        stranger = socket.create_connection(("127.0.0.1", network.server.port))
        with stranger, contextlib.suppress(ConnectionError):  # hung up on at the first byte
            stranger.sendall(os.urandom(4096))
    agent.send(b"after")
    network.until(lambda: len(network.heard) == 2)
    assert network.heard == [(0, b"before"), (0, b"after")]


def test_a_flood_from_inside_takes_a_bounded_share_of_a_turn(network: Network) -> None:
    """An agent gone mad: the others are heard, and time (deadlines, beats) goes on between the turns."""
    mad, good = network.agent(0), network.agent(1)
    for _ in range(900):
        mad.send(b"x" * 64)
    network.until(lambda: network.heard)
    for _ in range(20):
        for _ in range(900):
            mad.send(b"x" * 64)
        good.send(b"hello")
        network.server.serve_zap()
        taken = network.server.receive()
        assert len(taken) <= transport._FRAMES_PER_TURN
        network.heard += taken
    network.until(lambda: (1, b"hello") in network.heard)


def test_garbage_of_a_known_agent_is_counted_and_dropped() -> None:
    """Frames that are none, messages that are none, and messages that only the coordinator may send."""
    hub = Hub(Coordinator(1, JobPolicy(), 0.0))
    link = Link("session")
    assert hub.receive(0, b"\xc1garbage", 0.0).frames == []
    assert hub.receive(0, os.urandom(4096), 0.0).frames == []
    for payload in (b"\xc1", os.urandom(64), m.encode(m.Shutdown(0, "by your leave"))):
        hub.receive(0, encode_frame(link.send(payload, 0.0)), 0.0)
    assert hub.malformed == 5
    hub.receive(0, encode_frame(link.send(m.encode(m.Join(0, 1, "host")), 0.0)), 0.0)
    assert hub.coordinator.phase.value == "starting", "it goes on"
