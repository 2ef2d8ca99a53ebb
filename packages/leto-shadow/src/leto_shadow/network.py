"""Which of this host's addresses and interfaces the other nodes are reached through (several nodes only).

torchrun tells every agent where the rendezvous is. The address from which that is reached is the one under
which others reach us, and its interface the one for gloo, which would otherwise take whatever the host name
resolves to: often the loopback interface, where no other node is.
"""

from __future__ import annotations

import fcntl
import ipaddress
import socket
import struct

__all__ = ["interface_of", "own_address", "own_interface"]

_SIOCGIFADDR = 0x8915
_ANY_PORT = 9  # nothing is sent: connecting a datagram socket only asks for the route


def _toward(master: str) -> tuple[str, str] | None:
    """Return (address of the master, our address on the way there); None if it is not known."""
    try:
        found = socket.getaddrinfo(master, _ANY_PORT, type=socket.SOCK_DGRAM)
    except OSError:
        return None
    for family, kind, protocol, _, where in found:
        try:
            with socket.socket(family, kind, protocol) as probe:
                probe.connect(where)
                return str(where[0]), str(probe.getsockname()[0])
        except OSError:
            continue  # no route in this family
    return None


def own_address(master: str) -> str:
    """Return the address under which other nodes reach this one: ``master`` itself if that is us."""
    found = _toward(master)
    if found is None or found[0] == found[1] or ipaddress.ip_address(found[0]).is_loopback:
        return master
    return found[1]


def own_interface(master: str) -> str | None:
    """Return the interface through which other nodes reach this one; None if it cannot be told."""
    found = _toward(master)
    return None if found is None else interface_of(found[1])


def interface_of(address: str) -> str | None:
    """Return the interface that has ``address``; None if none has it as its first."""
    if ipaddress.ip_address(address).version == 6:
        return _interface6(address)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                raw = fcntl.ioctl(probe, _SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:
                continue  # it has no address
            if socket.inet_ntoa(raw[20:24]) == address:
                return name
    return None


def _interface6(address: str) -> str | None:
    wanted = ipaddress.ip_address(address.partition("%")[0]).packed.hex()
    try:
        with open("/proc/net/if_inet6") as file:
            return next((fields[5] for fields in map(str.split, file) if fields[0] == wanted), None)
    except FileNotFoundError:
        return None
