"""Encrypted sockets between coordinator and agents: pyzmq ROUTER and DEALER with CURVE keys.

Node rank 0 makes all key pairs and hands them out through torchrun's own store, which only the job's nodes
can reach; a peer whose key is not on the list is refused by ZeroMQ's authentication protocol before a byte of
it is read. The port is chosen by the kernel at bind and published afterwards (case 8).
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


def make_keys(nodes: int) -> ServerKeys:
    """Make a key pair for the coordinator and one for each node's agent."""
    public, secret = zmq.curve_keypair()
    return ServerKeys(public, secret, tuple(zmq.curve_keypair() for _ in range(nodes)))


class CoordinatorSocket:
    """The ROUTER on node rank 0 and the handler that admits known keys only."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: ServerKeys) -> None:
        self._allowed = {z85.decode(public): node for node, (public, _) in enumerate(keys.clients)}
        self.denied = 0
        self.zap = context.socket(zmq.REP)
        self.zap.bind(_ZAP_ENDPOINT)
        self.router = context.socket(zmq.ROUTER)
        self.router.curve_server = True
        self.router.curve_publickey = keys.public
        self.router.curve_secretkey = keys.secret
        self.router.zap_domain = b"leto"
        self.router.linger = _LINGER_MS
        self.router.maxmsgsize = _MAX_FRAME_BYTES
        self.router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.port = self.router.bind_to_random_port("tcp://*")

    def serve_zap(self) -> None:
        """Answer the authentication requests that wait (RFC 27)."""
        while self.zap.poll(0):
            version, request, _domain, _address, _identity, mechanism, *credentials = (
                self.zap.recv_multipart()
            )
            known = mechanism == b"CURVE" and credentials and credentials[0] in self._allowed
            self.denied += not known
            answer = (b"200", b"OK") if known else (b"400", b"unknown key")
            self.zap.send_multipart([version, request, *answer, b"agent", b""])

    def receive(self) -> list[tuple[int, bytes]]:
        """Return (node, frame) for all that wait; malformed identities are dropped."""
        found = []
        while self.router.poll(0):
            identity, *rest = self.router.recv_multipart()
            if len(rest) == 1 and identity.startswith(b"node-") and identity[5:].isdigit():
                found.append((int(identity[5:]), rest[0]))
        return found

    def send(self, node: int, frame: bytes) -> None:
        """Send without waiting; what cannot be sent is repeated by the link."""
        try:
            self.router.send_multipart([b"node-%d" % node, frame], zmq.NOBLOCK)
        except zmq.Again:
            return

    def close(self) -> None:
        self.router.close()
        self.zap.close()


class AgentSocket:
    """The DEALER of one agent."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], node: int, keys: AgentKeys) -> None:
        self.dealer = context.socket(zmq.DEALER)
        self.dealer.setsockopt(zmq.IDENTITY, b"node-%d" % node)
        self.dealer.curve_serverkey = keys.server_public
        self.dealer.curve_publickey = keys.client_public
        self.dealer.curve_secretkey = keys.client_secret
        self.dealer.linger = _LINGER_MS
        self.dealer.maxmsgsize = _MAX_FRAME_BYTES
        self.dealer.connect(keys.address)

    def receive(self) -> list[bytes]:
        """Return all frames that wait."""
        found = []
        while self.dealer.poll(0):
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
