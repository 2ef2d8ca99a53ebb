"""Real poison on host memory through userfaultfd (UFFDIO_POISON, Linux 6.6).

The page's entry in the page table of *this* mapping becomes a poison marker: a read faults as for a
memory error and MADV_POPULATE_READ fails with EHWPOISON, without CONFIG_MEMORY_FAILURE. The bytes
stay readable through other mappings, so whoever injects a loss overwrites them first.

A range is registered only for the two calls around the poison and unregistered at once: the marker
outlives the registration, and the manager can never wait for a fault that only it could resolve
(seen with holes punched in a registered range). The file descriptor is opened with
UFFD_USER_MODE_ONLY, which needs no privilege on a default kernel and turns a fault inside the kernel
into an error instead of a wait.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import struct

from leto_rmp import linux

__all__ = ["PoisonUnavailable", "Poisoner"]

_SYSCALL = {"x86_64": 323, "aarch64": 282, "riscv64": 282}
_USER_MODE_ONLY = 1
_API = 0xAA
_FEATURE_POISON = 1 << 14
_REGISTER_MODE_MISSING = 1
_UFFDIO_API = 0xC018AA3F
_UFFDIO_REGISTER = 0xC020AA00
_UFFDIO_UNREGISTER = 0x8010AA01
_UFFDIO_POISON = 0xC020AA08

_libc = ctypes.CDLL(None, use_errno=True)


class PoisonUnavailable(Exception):  # noqa: N818
    """The kernel (or the container) does not let us poison pages; the text says why."""


class Poisoner:
    """An open userfaultfd with the poison feature."""

    def __init__(self) -> None:
        number = _SYSCALL.get(platform.machine())
        if number is None:
            raise PoisonUnavailable(f"no userfaultfd call number known for {platform.machine()}")
        fd = _libc.syscall(number, os.O_CLOEXEC | os.O_NONBLOCK | _USER_MODE_ONLY)
        if fd < 0:
            reason = os.strerror(ctypes.get_errno())
            raise PoisonUnavailable(f"userfaultfd is refused: {reason}")
        self._fd = fd
        try:
            fcntl.ioctl(fd, _UFFDIO_API, bytearray(struct.pack("QQQ", _API, _FEATURE_POISON, 0)))
        except OSError as error:
            self.close()
            raise PoisonUnavailable(f"UFFDIO_POISON needs Linux 6.6 or newer: {error.strerror}") from error

    def poison(self, address: int, length: int) -> None:
        """Poison a range of a shared mapping, leaving nothing registered; raise OSError on refusal."""
        linux.madvise(address, length, linux.MADV_DONTNEED)  # a marker needs an empty entry
        where = struct.pack("QQ", address, length)
        register = bytearray(where + struct.pack("QQ", _REGISTER_MODE_MISSING, 0))
        fcntl.ioctl(self._fd, _UFFDIO_REGISTER, register)
        try:
            done = 0
            while done < length:
                request = bytearray(struct.pack("QQQq", address + done, length - done, 0, 0))
                fcntl.ioctl(self._fd, _UFFDIO_POISON, request)
                (moved,) = struct.unpack_from("q", request, 24)
                assert moved > 0, "UFFDIO_POISON reports success without progress"
                done += moved
        finally:
            fcntl.ioctl(self._fd, _UFFDIO_UNREGISTER, bytearray(where))

    def close(self) -> None:
        """Close the userfaultfd; poison markers stay with their mappings."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1
