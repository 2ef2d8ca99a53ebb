"""Limits of the process: open files and mappings. Raise the soft one first, else name the need.

File descriptors above RLIMIT_NOFILE are closed *silently* by the kernel when they arrive in a
message, so the room is made before they are asked for, and counted again when they have arrived.
"""

from __future__ import annotations

import os
import resource
from pathlib import Path

from leto_rmp.errors import LimitTooLow

__all__ = ["check_map_count", "fd_room", "map_count_error", "open_fds", "raise_fd_limit", "require_fds"]

_MAPS_SLACK = 1024
_MAPS_FEW = 64


def open_fds() -> int:
    """Return how many file descriptors this process holds."""
    return len(os.listdir("/proc/self/fd")) - 1  # less the one that reads the folder


def raise_fd_limit() -> None:
    """Raise the soft limit as far as the hard one allows: a manager holds a fd per handle."""
    _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


def fd_room(wanted: int) -> int:
    """Return how many more fds can be opened, raising the soft limit as far as `wanted` needs."""
    used = open_fds()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    ceiling = hard if hard != resource.RLIM_INFINITY else max(soft, used + wanted)
    if soft != resource.RLIM_INFINITY and soft < used + wanted and soft < ceiling:
        soft = min(used + wanted, ceiling)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return wanted if soft == resource.RLIM_INFINITY else max(0, soft - used)


def require_fds(wanted: int, purpose: str, otherwise: str = " or use more pages per handle") -> None:
    """Raise LimitTooLow unless `wanted` more fds can be opened; ``otherwise``: what else would help."""
    room = fd_room(wanted)
    if room < wanted:
        used = open_fds()
        _soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise LimitTooLow(
            f"{purpose} needs {wanted} more file descriptors: RLIMIT_NOFILE must be at least "
            f"{used + wanted}, the hard limit of process {os.getpid()} is {hard}. Raise it "
            f"(`ulimit -Hn {used + wanted}`, LimitNOFILE=, --ulimit nofile=){otherwise}",
            limit="RLIMIT_NOFILE",
            need=used + wanted,
            have=hard,
        )


def _map_count_max() -> int:
    try:
        return int(Path("/proc/sys/vm/max_map_count").read_text())
    except (OSError, ValueError):
        return 65530  # the kernel's default, where /proc/sys is hidden


def _maps() -> int:
    return Path("/proc/self/maps").read_bytes().count(b"\n")


def check_map_count(handles: int) -> None:
    """Raise LimitTooLow when mapping so many more handles would exceed vm.max_map_count.

    A few handles are not worth counting for: mmap itself fails then, with the same error.
    """
    if handles <= _MAPS_FEW:
        return
    have, need = _map_count_max(), _maps() + handles + _MAPS_SLACK
    if need > have:
        raise LimitTooLow(
            f"mapping {handles} handles needs vm.max_map_count of at least {need}, found {have}: "
            f"`sysctl vm.max_map_count={need}`, or use more pages per handle",
            limit="vm.max_map_count",
            need=need,
            have=have,
        )


def map_count_error() -> LimitTooLow:
    """Return the error for an ENOMEM of mmap, which is about addresses or the number of mappings."""
    have = _map_count_max()
    return LimitTooLow(
        f"the kernel refused a mapping: this process has {_maps()} mappings of at most {have} "
        "(vm.max_map_count), or RLIMIT_AS is too low",
        limit="vm.max_map_count",
        need=_maps() + 1,
        have=have,
    )
