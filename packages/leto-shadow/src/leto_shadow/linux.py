"""The few kernel interfaces that Python lacks: dying with a parent, adopting orphans, and finding all
processes of one trainer.

A trainer's process tree includes data-loader children that may outlive it and hold memory. The agent makes
itself their subreaper, so that orphans become its children, and recognises them by a variable that every
process started by the trainer inherits (I-7).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

__all__ = [
    "TRAINER_TAG",
    "become_subreaper",
    "descendants",
    "dying_with_us",
    "environment",
    "environments",
    "reap",
    "started_at",
    "started_unix",
    "tagged",
    "why_it_may_write",
]

TRAINER_TAG = "LETO_TRAINER_TAG"
"""Environment variable that marks all processes of one trainer."""

_PR_SET_CHILD_SUBREAPER = 36
_PROC = Path("/proc")
_NO_MEMORY = 0x4 | 0x200000  # PF_EXITING, PF_KTHREAD
_RETAINED = b"memfd:leto:"  # how leto_rmp names its memory
_CHILD = str(Path(__file__).with_name("_child.py"))


def dying_with_us(command: Sequence[str]) -> list[str]:
    """Return a command line that becomes ``command``, SIGKILLed when this process dies, from the start on.

    ``command`` begins with the path of a program. Start it from a thread that lives as long as the process:
    the kernel sends the signal when the *thread* that forked is gone.
    """
    return [sys.executable, "-I", "-S", _CHILD, str(os.getpid()), *command]


def become_subreaper() -> None:
    """Have orphaned descendants reparented to this process instead of init."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        error = ctypes.get_errno()
        raise OSError(error, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(error)}")


def descendants(pid: int, skip: Collection[int] = ()) -> list[int]:
    """Return the pids of all living descendants of ``pid``, parents first, without ``skip`` and those below.

    Racy by nature: call again. Where the kernel lists children (CONFIG_PROC_CHILDREN) only the subtree is
    visited, which matters on a host with thousands of processes; otherwise all of /proc is.
    """
    listed = (_PROC / f"{pid}/task/{pid}/children").exists()
    find = _listed_children if listed else _scan_all().get
    found = [child for child in find(pid, []) if child not in skip]
    for child in found:
        found.extend(grandchild for grandchild in find(child, []) if grandchild not in skip)
    return found


def _listed_children(pid: int, default: list[int]) -> list[int]:
    found = list(default)
    try:
        with os.scandir(_PROC / f"{pid}/task") as threads:
            for thread in threads:
                found += map(int, Path(thread.path, "children").read_bytes().split())
    except (FileNotFoundError, ProcessLookupError):
        return found  # it, or one of its threads, has just ended
    return found


def _scan_all() -> dict[int, list[int]]:
    parents: dict[int, list[int]] = {}
    for pid in _pids():
        try:
            stat = (_PROC / f"{pid}/stat").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        parent = int(stat[stat.rindex(b")") + 2 :].split()[1])
        parents.setdefault(parent, []).append(pid)
    return parents


def _pids() -> list[int]:
    with os.scandir(_PROC) as entries:  # closed also if it is left early: not left to the collector
        return [int(entry.name) for entry in entries if entry.name.isdecimal()]


def environment(pid: int) -> bytes | None:
    """Return the environment of a process, empty where it has none (a zombie, one that has just ended).

    None: it is inside exec, where the old environment is gone and the new one is not there yet. Who started
    it goes on before that is over. Look again.

    Raises `PermissionError` for the processes of others.
    """
    try:
        while not (environ := (_PROC / f"{pid}/environ").read_bytes()):
            stat = (_PROC / f"{pid}/stat").read_bytes()
            fields = stat[stat.rindex(b")") + 2 :].split()
            if fields[0] in (b"Z", b"X") or int(fields[6]) & _NO_MEMORY:
                return b""
            if int(fields[48]) == 0:  # env_end
                return None
            if int(fields[47]) == int(fields[48]):
                return b""  # it was started with none
        return environ
    except (FileNotFoundError, ProcessLookupError):
        return b""


def tagged(pids: Collection[int], tag: str) -> tuple[list[int], list[int]]:
    """Return those of ``pids`` whose environment carries ``tag``, and those of which that cannot be said yet
    (see `environment`). Zombies have no environment and are left out."""
    wanted = f"{TRAINER_TAG}={tag}".encode()
    found, unclear = [], []
    for pid in pids:
        with contextlib.suppress(PermissionError):
            environ = environment(pid)
            if environ is None:
                unclear.append(pid)
            elif wanted in environ.split(b"\0"):
                found.append(pid)
    return found, unclear


def reap(known: set[int]) -> None:
    """Collect the status of adopted orphans; processes in ``known`` have an owner who does that."""
    for pid in descendants(os.getpid(), skip=known):
        try:
            os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            continue  # a grandchild, not ours to collect


def environments() -> Iterator[tuple[int, bytes | None]]:
    """Yield pid and `environment` of every process of ours; those that have none are left out."""
    for pid in _pids():
        with contextlib.suppress(PermissionError):
            environ = environment(pid)
            if environ != b"":
                yield pid, environ


def started_at(pid: int) -> int:
    """Return when a process was started, in clock ticks since boot: with its pid, its identity."""
    stat = Path(f"/proc/{pid}/stat").read_bytes()
    return int(stat[stat.rindex(b")") + 2 :].split()[19])


def started_unix(pid: int) -> float:
    """Return when a process was started, in Unix seconds, to some hundredths."""
    since_boot = started_at(pid) / os.sysconf("SC_CLK_TCK")
    return time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - since_boot)


def why_it_may_write(pid: int) -> str | None:
    """Return how a process can write retained memory of the host, as the kernel sees it; None if it cannot.

    That is a shared, writable mapping of it, or a descriptor that it could write to or map again.
    """
    try:
        for line in Path(f"/proc/{pid}/maps").read_bytes().splitlines():
            access = line.split(maxsplit=2)[1]
            if _RETAINED in line and b"w" in access and b"s" in access:
                return f"it maps {line.split(maxsplit=5)[-1].decode(errors='replace')} writable"
        for name in os.listdir(f"/proc/{pid}/fd"):
            try:
                target = os.readlink(f"/proc/{pid}/fd/{name}")
            except FileNotFoundError:
                continue  # closed since it was listed
            if _RETAINED.decode() in target:
                return f"it has {target} open"
    except OSError as error:
        return f"its memory map cannot be read: {error.strerror}"
    return None
