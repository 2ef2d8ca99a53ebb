"""What an agent finds that was started in the place of a dead one, and what it does before it reports in.

torchrun starts the agents again after the death of one. The dead agent's trainers died with it
(PR_SET_PDEATHSIG), but what they had started may live on: it is found by the mark that it inherited, and
ended, because reporting in means that it is gone (I-4, I-7). State managers outlive their agent, for a grace
period and as long as torchrun lives; those of this torchrun are taken over with the memory in them. Drills
that have fired under this torchrun do not fire again.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from leto_rmp import AdoptedManager, ManagerGone, OtherManager, OwnerAlive, RmpError, adopt_manager
from leto_shadow import linux
from leto_shadow.events import Event
from leto_shadow.progress import read_progress

__all__ = [
    "LeftoversError",
    "end_leftovers",
    "find_managers",
    "find_progress",
    "progress_file",
    "retired_before",
    "trainer_tag",
]

_RANK_FOLDER = re.compile(r"rank(\d+)")
_PROGRESS = re.compile(r"progress-(\d+\.\d+)-(-?\d+)-(-?\d+)")


class LeftoversError(RuntimeError):
    """Processes of a dead agent's trainers cannot be ended; they might write the memory (I-4)."""


def trainer_tag(run_dir: Path, sid: int) -> str:
    """Return the mark of this agent's trainer ``sid`` and of all that it starts."""
    return f"{run_dir}/{_incarnation(os.getpid())}/{sid}"


def _incarnation(pid: int) -> str:
    """Pid and start time: no other process ever has both."""
    return f"{pid}.{linux.started_at(pid)}"


def _alive(incarnation: str) -> bool:
    pid = int(incarnation.partition(".")[0])
    try:
        return _incarnation(pid) == incarnation
    except (FileNotFoundError, ProcessLookupError):
        return False


def _leftovers(run_dir: Path) -> tuple[list[int], list[int]]:
    """Processes that trainers of dead agents of this run directory left behind; and those that may be such,
    for nobody can tell whose a process inside exec is."""
    wanted = f"{linux.TRAINER_TAG}={run_dir}/".encode()
    found, unclear = [], []
    for pid, environ in linux.environments():
        if environ is None:
            unclear.append(pid)
            continue
        for value in environ.split(b"\0"):
            if value.startswith(wanted):
                agent = value[len(wanted) :].decode(errors="replace").partition("/")[0]
                if not _alive(agent):
                    found.append(pid)
    return found, unclear


def end_leftovers(run_dir: Path, timeout_s: float) -> int:
    """SIGKILL what dead agents' trainers left, and wait for its end; return how many processes that were.

    Raises `LeftoversError`.
    """
    deadline = time.monotonic() + timeout_s
    ended: set[int] = set()
    while any(found := _leftovers(run_dir)):
        left, _ = found
        if time.monotonic() > deadline:
            if not left:
                break  # some stranger stays inside exec, which has taken its memory: it writes none (I-4)
            raise LeftoversError(
                f"processes {left} of a dead agent's trainers are alive {timeout_s:.0f} s after SIGKILL"
            )
        for pid in left:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        ended.update(left)
        time.sleep(0.01)  # the kernel offers no event for the end of processes that we did not start
    return len(ended)


def progress_file(run_dir: Path, rank: int, sid: int) -> Path:
    """Return where this agent's trainer ``sid`` of ``rank`` notes how far it is."""
    return run_dir / f"progress-{_incarnation(os.getpid())}-{rank}-{sid}"


def find_progress(run_dir: Path) -> tuple[dict[int, int], list[Path]]:
    """Return how far the trainers of dead agents had come (the highest iteration by rank), and the files that
    say so: whoever goes on from there removes them."""
    reached: dict[int, int] = {}
    files = []
    for path in sorted(run_dir.glob("progress-*")):
        match = _PROGRESS.fullmatch(path.name)
        if match is None or _alive(match[1]):
            continue
        files.append(path)
        with contextlib.suppress(OSError, ValueError):  # it ended before it noted anything
            progress = read_progress(path)
            rank = int(match[2])
            if progress is not None and rank >= 0:
                reached[rank] = max(reached.get(rank, 0), progress.iteration)
    return reached, files


def find_managers(
    run_dir: Path, job_id: str, launcher: int, grace_s: float, timeout_s: float
) -> tuple[dict[int, AdoptedManager], list[str]]:
    """Take over the managers of dead agents that ``launcher`` (torchrun) had started; return them by rank.

    And one line for each manager of ours that should have been there and cannot be used.
    """
    found: dict[int, AdoptedManager] = {}
    problems = []
    for folder in sorted(run_dir.iterdir()):
        match = _RANK_FOLDER.fullmatch(folder.name)
        if match is None:
            continue
        rank = int(match[1])
        try:
            found[rank] = adopt_manager(folder, job_id, rank, grace_s, timeout_s, guardian_pid=launcher)
        except (ManagerGone, OtherManager, OwnerAlive):
            continue  # dead, or another node's on this host
        except (RmpError, OSError) as error:
            problems.append(f"the manager of rank {rank} cannot be taken over: {error}")
    return found, problems


def retired_before(events: Iterable[Event], launcher: int, since: float) -> str | None:
    """Return why an agent that ``launcher`` started had to give up its ranks, if one did since ``since``
    (Unix seconds) and the node's devices have not been found operable again; None otherwise."""
    reason: str | None = None
    for event in events:
        if event.get("launcher") == launcher and float(event.get("t", 0.0)) >= since:
            reason = str(event.get("reason")) if event["event"] == "retired" else None
    return reason
