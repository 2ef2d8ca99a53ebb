"""Encrypted sockets between coordinator and agents: pyzmq ROUTER and DEALER with CURVE keys.

Node rank 0 makes all key pairs and hands them out through torchrun's own store, which only the job's nodes
can reach; a peer whose key is not on the list is refused by ZeroMQ's authentication protocol before a byte of
it is read. A message counts as its node's only if it came with the key of that node. The port is chosen by
the kernel at bind and published afterwards (case 8).

Nothing here waits for a peer: one that does not finish the handshake in time is dropped, a connection on
which nothing comes back (a cut cable: TCP alone would notice in minutes) is given up and made anew, and one
turn of the loop takes a bounded number of frames, whoever sends how many. That a peer is silent for too long
is for coordinator and agent to say, by their beats.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import zmq
from zmq.utils import z85

__all__ = ["AgentKeys", "AgentSocket", "CoordinatorSocket", "make_keys"]

_ZAP_ENDPOINT = "inproc://zeromq.zap.01"
_MAX_FRAME_BYTES = 64 << 20
_LINGER_MS = 1000
_HANDSHAKE_MS = 5000
_CONNECT_MS = 3000
_PING_MS, _PONG_MS = 1000, 4000
_FRAMES_PER_TURN = 1024


def _deadlines(socket: zmq.Socket[bytes]) -> None:
    socket.linger = _LINGER_MS
    socket.maxmsgsize = _MAX_FRAME_BYTES
    socket.setsockopt(zmq.HANDSHAKE_IVL, _HANDSHAKE_MS)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_MS)
    socket.setsockopt(zmq.HEARTBEAT_IVL, _PING_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _PONG_MS)
    socket.setsockopt(zmq.HEARTBEAT_TTL, _PONG_MS)


class AgentKeys(msgspec.Struct, frozen=True):
    """What an agent needs to reach the coordinator; secret, so never logged."""

    address: str
    server_public: bytes
    client_public: bytes
    client_secret: bytes


@dataclass(frozen=True)
class ServerKeys:
    public: bytes
    secret: bytes
    clients: tuple[tuple[bytes, bytes], ...]


def _name(node: int) -> bytes:
    return b"node-%d" % node


def make_keys(nodes: int) -> ServerKeys:
    """Make a key pair for the coordinator and one for each node's agent."""
    public, secret = zmq.curve_keypair()
    return ServerKeys(public, secret, tuple(zmq.curve_keypair() for _ in range(nodes)))


class CoordinatorSocket:
    """The ROUTER on node rank 0 and the handler that admits known keys only."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: ServerKeys) -> None:
        self._allowed = {z85.decode(public): node for node, (public, _) in enumerate(keys.clients)}
        self.denied = 0
        self.impostors = 0
        """Frames under the name of another node than the key's, or under none."""
        self.zap = context.socket(zmq.REP)
        self.zap.bind(_ZAP_ENDPOINT)
        self.router = context.socket(zmq.ROUTER)
        self.router.curve_server = True
        self.router.curve_publickey = keys.public
        self.router.curve_secretkey = keys.secret
        self.router.zap_domain = b"leto"
        _deadlines(self.router)
        self.router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.port = self.router.bind_to_random_port("tcp://*")

    def serve_zap(self) -> None:
        """Answer the authentication requests that wait (RFC 27)."""
        while self.zap.poll(0):
            version, request, _domain, _address, _identity, mechanism, *credentials = (
                self.zap.recv_multipart()
            )
            node = self._allowed.get(credentials[0]) if mechanism == b"CURVE" and credentials else None
            self.denied += node is None
            answer = (b"400", b"unknown key", b"") if node is None else (b"200", b"OK", _name(node))
            self.zap.send_multipart([version, request, *answer, b""])

    def receive(self) -> list[tuple[int, bytes]]:
        """Return (node, frame) for those that wait, up to a bound; what goes by another name is dropped."""
        found: list[tuple[int, bytes]] = []
        for _ in range(_FRAMES_PER_TURN):
            if not self.router.poll(0):
                break
            identity, *rest = self.router.recv_multipart(copy=False)
            name = identity.bytes
            if len(rest) != 1 or rest[0].get("User-Id") != name.decode(errors="replace"):
                self.impostors += 1
                continue
            found.append((int(name[5:]), rest[0].bytes))
        return found

    def send(self, node: int, frame: bytes) -> None:
        """Send without waiting; what cannot be sent is repeated by the link."""
        try:
            self.router.send_multipart([_name(node), frame], zmq.NOBLOCK)
        except zmq.Again:
            return

    def close(self) -> None:
        self.router.close()
        self.zap.close()


class AgentSocket:
    """The DEALER of one agent."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], node: int, keys: AgentKeys) -> None:
        self.dealer = context.socket(zmq.DEALER)
        self.dealer.setsockopt(zmq.IDENTITY, _name(node))
        self.dealer.curve_serverkey = keys.server_public
        self.dealer.curve_publickey = keys.client_public
        self.dealer.curve_secretkey = keys.client_secret
        _deadlines(self.dealer)
        self.dealer.connect(keys.address)

    def receive(self) -> list[bytes]:
        """Return the frames that wait, up to a bound."""
        found: list[bytes] = []
        while len(found) < _FRAMES_PER_TURN and self.dealer.poll(0):
            found.append(self.dealer.recv())
        return found

    def send(self, frame: bytes) -> None:
        """Send without waiting; what cannot be sent is repeated by the link."""
        try:
            self.dealer.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            return

    def close(self) -> None:
        self.dealer.close()
