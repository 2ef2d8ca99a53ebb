"""Will the pools of a node's ranks fit? Asked before anything starts (`leto run`, `leto doctor`).

Role: how much a trainer will keep is known when it allocates, minutes later, and there the state manager
refuses what does not fit. What is known before is the least that any pool takes: one protection group a rank
(paper section 4.1), or more if the user says what each rank will keep (``--retained-bytes``). A node that has
not even that is refused at once. Memory is measured as the manager measures it (`leto_rmp.memory`:
MemAvailable and the memory cgroups, v1 and v2), so nothing is refused here that it would have given. Its
memfds are bounded by neither /dev/shm nor a locked-memory limit, but by RLIMIT_FSIZE. Pure
but for `look` and `file_limit`.
"""

from __future__ import annotations

import argparse
import re
import resource
from collections.abc import Sequence
from dataclasses import dataclass

from leto_rmp import PoolConfig
from leto_rmp.memory import RESERVE_BYTES, MemoryBudget, available
from leto_shadow.nvml import Gpu

__all__ = ["Lack", "Need", "Room", "add_option", "file_limit", "least", "look", "size", "why_not"]

_UNITS = ("bytes", "KiB", "MiB", "GiB", "TiB", "PiB")
_SIZE = re.compile(r"(\d{1,15})\s*(KiB|MiB|GiB|TiB)?", re.ASCII)


def _bytes(text: str) -> int:
    found = _SIZE.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text[:24]!r} must be a size: bytes, or KiB, MiB, GiB or TiB")
    return int(found[1]) << 10 * _UNITS.index(found[2] or "bytes")


def add_option(parser: argparse._ActionsContainer) -> None:
    """Declare what a user may know of the pools beforehand."""
    parser.add_argument(
        "--retained-bytes",
        type=_bytes,
        default=0,
        metavar="SIZE",
        help="what each rank will retain under parity (say 14GiB): refused at the start if it cannot fit",
    )


@dataclass(frozen=True)
class Need:
    """Bytes: ``data`` and ``parity`` of each rank's pool, and the ``largest`` single memfd."""

    ranks: int
    data: int
    parity: int
    largest: int
    on_gpu: bool
    """Data pages are on the rank's GPU; parity pages are in host memory always."""

    @property
    def told(self) -> str:
        """Whose they are."""
        return f"this node's {self.ranks} ranks" if self.ranks > 1 else "this node's rank"

    @property
    def host(self) -> int:
        """Bytes of host memory that all ranks of the node take together."""
        return self.ranks * (self.parity if self.on_gpu else self.data + self.parity)


@dataclass(frozen=True)
class Room:
    """What a node has. ``gpus``: empty where there are none, or nobody knows."""

    memory: MemoryBudget
    file_bytes: int | None = None
    """RLIMIT_FSIZE; None: no limit."""
    gpus: Sequence[Gpu] = ()


@dataclass(frozen=True)
class Lack:
    """Something does not fit: what was expected and found, and what to do."""

    found: str
    fix: str

    def __str__(self) -> str:
        return f"{self.found}: {self.fix}"


def file_limit() -> int | None:
    """RLIMIT_FSIZE, which bounds memfds as well; None if there is no limit."""
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return None if limit == resource.RLIM_INFINITY else limit


def look(gpus: Sequence[Gpu] = ()) -> Room:
    """Measure this node."""
    return Room(available(), file_limit(), gpus)


def least(pool: PoolConfig, ranks: int, retained_bytes: int = 0) -> Need:
    """Return the least that pools of ``ranks`` ranks take if each retains so many bytes (0: not known)."""
    pages = max(1, -(-retained_bytes // pool.page_bytes))
    groups = -(-pages // pool.data_pages)
    data, tier1, tier2 = (
        number * pool.page_bytes for number in (pages, groups * pool.tier1_pages, groups * pool.tier2_pages)
    )
    on_gpu = pool.backend != "host"
    largest = max(tier1, tier2, 0 if on_gpu else data)
    return Need(ranks, data, tier1 + tier2, largest, on_gpu)


def size(number: int) -> str:
    """Return a number of bytes for people: rounded down, so that less never reads like enough."""
    power = 0
    while power + 1 < len(_UNITS) and number >> 10 * (power + 1):
        power += 1
    if power == 0:
        return f"{number} bytes"
    tenths = (number * 10) >> 10 * power
    return f"{tenths // 10}.{tenths % 10} {_UNITS[power]}"


def why_not(need: Need, room: Room) -> Lack | None:
    """Return what does not fit; None if all of it may fit."""
    each = f"{size(need.parity)} of parity pages"
    if not need.on_gpu:
        each = f"{size(need.data)} of data pages and {each}"
    have = max(0, room.memory.available_bytes - RESERVE_BYTES)
    if need.host > have:
        return Lack(
            f"the pools of {need.told} need at least {size(need.host)} of host memory "
            f"({each} each), {size(have)} can be had ({room.memory.source})",
            "give it more memory, or lower --nproc-per-node, --page-bytes or --tier1-pages, or "
            "--retained-bytes if that says too much",
        )
    gpu = max((one.total_bytes for one in room.gpus), default=None)
    if need.on_gpu and gpu is not None and need.data > gpu:
        return Lack(
            f"the pool of each rank needs at least {size(need.data)} of GPU memory, the largest GPU here has "
            f"{size(gpu)}",
            "use more ranks or larger GPUs, or lower --page-bytes, or --retained-bytes if that says too much",
        )
    if room.file_bytes is not None and need.largest > room.file_bytes:
        return Lack(
            f"the pool of each rank needs a memfd of at least {size(need.largest)}, the limit on the size of "
            f"files is {size(room.file_bytes)}",
            "raise it (ulimit -f unlimited, LimitFSIZE= in systemd)",
        )
    return None
