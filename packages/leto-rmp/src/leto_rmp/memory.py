"""How much memory can still be had, before any of it is taken.

memfds are charged to the memory cgroup, and a fallocate in a full one may be answered by the OOM
killer instead of an error. So the manager compares with every cgroup on the way up (v2 and v1) and
with MemAvailable first. Clean file cache that the kernel would drop first (`inactive_file`) counts
as free, as it does for Kubernetes; otherwise a container that has read its data set would look full.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from leto_rmp.errors import NotEnoughMemory

__all__ = ["MemoryBudget", "available", "require_memory"]

RESERVE_BYTES = 32 << 20
"""Left for page tables and for everybody else."""
_UNLIMITED = 1 << 60  # v1 writes a huge number for "no limit"


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes that can still be allocated, and what sets the bound."""

    available_bytes: int
    source: str


def _number(path: Path) -> int | None:
    try:
        text = path.read_text().strip()
    except OSError:
        return None
    return int(text) if text.isdigit() else None


def _inactive_file(path: Path, key: str) -> int:
    try:
        lines = path.read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) for line in lines if line.startswith(f"{key} ")), 0)


def _cgroup_folders(root: Path) -> Iterator[tuple[int, Path]]:
    """Yield (version, folder) of our memory cgroup and of each of its parents up to the mount."""
    try:
        memberships = (root / "proc/self/cgroup").read_text().splitlines()
        mounts = (root / "proc/self/mountinfo").read_text().splitlines()
    except OSError:
        return
    paths: dict[int, str] = {}
    for line in memberships:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            paths[2] = path
        elif "memory" in controllers.split(","):
            paths[1] = path
    for line in mounts:
        before, _, after = line.partition(" - ")
        fields, kind = before.split(), after.split()
        version = {"cgroup2": 2, "cgroup": 1}.get(kind[0])
        if version is None or version not in paths:
            continue
        if version == 1 and "memory" not in kind[-1].split(","):
            continue
        mount_root, mount = fields[3], root / fields[4].lstrip("/")
        path = paths[version]
        if mount_root != "/" and (path == mount_root or path.startswith(mount_root + "/")):
            path = path[len(mount_root) :]  # a container that sees the host's path of its own cgroup
        parts = [part for part in path.split("/") if part]
        if ".." in parts:
            parts = []  # outside our cgroup namespace: only the mount itself can be read
        for depth in range(len(parts), -1, -1):
            yield version, mount.joinpath(*parts[:depth])


def _budgets(root: Path) -> Iterator[MemoryBudget]:
    for line in (root / "proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            yield MemoryBudget(int(line.split()[1]) << 10, "MemAvailable of /proc/meminfo")
    names = {
        2: ("memory.max", "memory.current", "inactive_file"),
        1: ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    }
    for version, folder in _cgroup_folders(root):
        limit_name, usage_name, cache_key = names[version]
        limit, usage = _number(folder / limit_name), _number(folder / usage_name)
        if limit is None or usage is None or limit >= _UNLIMITED:
            continue
        cache = _inactive_file(folder / "memory.stat", cache_key)
        source = f"{limit_name} - {usage_name} of cgroup /{folder.relative_to(root)}"
        yield MemoryBudget(max(0, limit - usage + min(cache, usage)), source)


def available(root: Path = Path("/")) -> MemoryBudget:
    """Return the tightest bound; `root` is where /proc and /sys are looked for (tests)."""
    return min(_budgets(root), key=lambda budget: budget.available_bytes)


def require_memory(need_bytes: int, budget: MemoryBudget) -> None:
    """Raise NotEnoughMemory unless the bytes fit with a reserve."""
    if need_bytes + RESERVE_BYTES > budget.available_bytes:
        raise NotEnoughMemory(
            f"{need_bytes} bytes were asked for; {budget.source} leaves {budget.available_bytes}, of "
            f"which {RESERVE_BYTES} are kept in reserve. Raise the limit, or make the pool smaller",
            need=need_bytes,
            have=budget.available_bytes,
            source=budget.source,
        )
