"""The few Linux calls that Python's standard library lacks, each with its error raised as OSError.

Used on both sides: mappings by the client and the host backend, userfaultfd and hole punching by
the host backend only. Callers pass addresses and lengths that they reserved themselves.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import select
import socket
import struct

__all__ = [
    "EHWPOISON",
    "MADV_DONTFORK",
    "MADV_DONTNEED",
    "MADV_POPULATE_READ",
    "MADV_POPULATE_WRITE",
    "forbid",
    "madvise",
    "map_fixed",
    "memfd",
    "peer_pidfd",
    "peer_uid",
    "pidfd_gone",
    "pidfd_pid",
    "protect",
    "punch_hole",
    "reserve",
    "unmap",
]

EHWPOISON = 133
MADV_DONTNEED = 4
MADV_DONTFORK = 10
MADV_POPULATE_READ = 22
MADV_POPULATE_WRITE = 23
_MAP_FIXED = 0x10
_MAP_NORESERVE = 0x4000
_MAP_FAILED = ctypes.c_void_p(-1).value
_FALLOC_PUNCH = 0x1 | 0x2  # KEEP_SIZE | PUNCH_HOLE
_MFD_NOEXEC_SEAL = 0x8
_F_ADD_SEALS = 1033
_SEALS = 0x1 | 0x2 | 0x4  # SEAL | SHRINK | GROW
_SO_PEERPIDFD = 77

_libc = ctypes.CDLL(None, use_errno=True)
_size, _pointer, _int, _long = ctypes.c_size_t, ctypes.c_void_p, ctypes.c_int, ctypes.c_long
_libc.mmap.restype = _pointer
_libc.mmap.argtypes = [_pointer, _size, _int, _int, _int, _long]
_libc.munmap.argtypes = [_pointer, _size]
_libc.mprotect.argtypes = [_pointer, _size, _int]
_libc.madvise.argtypes = [_pointer, _size, _int]
_libc.fallocate.argtypes = [_int, _int, _long, _long]


def _check(result: int, call: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{call}: {os.strerror(number)}")


def _protection(writable: bool) -> int:
    return mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)


def reserve(length: int) -> int:
    """Reserve addresses that hold nothing yet; return the first."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
    address = _libc.mmap(None, length, 0, flags, -1, 0)
    if address == _MAP_FAILED:
        _check(-1, f"mmap of {length} reserved bytes")
    return int(address)


def map_fixed(address: int, length: int, fd: int, writable: bool) -> None:
    """Map the start of `fd`, shared, over a part of a reserved range."""
    flags = mmap.MAP_SHARED | _MAP_FIXED
    if _libc.mmap(address, length, _protection(writable), flags, fd, 0) == _MAP_FAILED:
        _check(-1, f"mmap of {length} bytes of fd {fd}")


def unmap(address: int, length: int) -> None:
    """Give a range back."""
    _check(_libc.munmap(address, length), "munmap")


def protect(address: int, length: int, writable: bool) -> None:
    """Make mapped pages read-only or writable."""
    _check(_libc.mprotect(address, length, _protection(writable)), "mprotect")


def forbid(address: int, length: int) -> None:
    """Make pages inaccessible: whoever touches one gets SIGSEGV."""
    _check(_libc.mprotect(address, length, 0), "mprotect")


def madvise(address: int, length: int, advice: int) -> None:
    """Advise the kernel; MADV_POPULATE_READ fails with EHWPOISON where a page is unreadable."""
    _check(_libc.madvise(address, length, advice), f"madvise({advice})")


def memfd(name: str, length: int) -> int:
    """Create memory of a fixed size that nobody can truncate (a later access cannot end in SIGBUS)."""
    try:
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING | _MFD_NOEXEC_SEAL)
    except OSError:  # before Linux 6.3 the flag is unknown
        fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, length)
        fcntl.fcntl(fd, _F_ADD_SEALS, _SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def punch_hole(fd: int, offset: int, length: int) -> None:
    """Drop pages of a file from every mapping in every process."""
    _check(_libc.fallocate(fd, _FALLOC_PUNCH, offset, length), "fallocate(PUNCH_HOLE)")


def _peer(connection: socket.socket) -> tuple[int, int]:
    raw = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("iII"))
    pid, uid, _gid = struct.unpack("iII", raw)
    return pid, uid


def peer_uid(connection: socket.socket) -> int:
    """Return the user at the other end."""
    return _peer(connection)[1]


def peer_pidfd(connection: socket.socket) -> tuple[int, int, int]:
    """Return (pid, uid, pidfd) of the process that connected.

    SO_PEERPIDFD (Linux 6.5) names the very process. Before that the pid is opened at once; a peer
    that died in between could have been replaced, which is why this is called right at accept.
    """
    pid, uid = _peer(connection)
    try:
        pidfd = connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD)
    except OSError:
        pidfd = os.pidfd_open(pid)
    os.set_inheritable(pidfd, False)
    return pid, uid, pidfd


def pidfd_gone(pidfd: int) -> bool:
    """Return whether the process has ended (all of its threads: it cannot write any more)."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))


def pidfd_pid(pidfd: int) -> int:
    """Return the pid that a pidfd stands for; -1 once the process has been collected."""
    with open(f"/proc/self/fdinfo/{pidfd}") as file:
        return next(int(line.split()[1]) for line in file if line.startswith("Pid:"))
