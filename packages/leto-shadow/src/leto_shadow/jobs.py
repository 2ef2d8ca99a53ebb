"""Find the jobs of this user on this host, for the subcommands that talk to one.

Upheld here: a run directory is used only if it belongs to this user (case 17: nobody's job but our own).
"""

from __future__ import annotations

import argparse
import os
import tempfile
from pathlib import Path

__all__ = ["EVENTS_FILE", "CommandError", "add_job_arguments", "agent_sockets", "base_dir", "find_run_dir"]

EVENTS_FILE = "events.jsonl"


class CommandError(Exception):
    """A subcommand cannot do its work; one line for the user. status: 2 for wrong usage, 1 otherwise."""

    def __init__(self, message: str, status: int = 1) -> None:
        super().__init__(message)
        self.status = status


def base_dir() -> Path:
    """Folder of all jobs of this user on this host; a job's run directory is `base_dir() / job_id` by
    default."""
    return Path(tempfile.gettempdir()) / f"leto-{os.getuid()}"


def add_job_arguments(parser: argparse.ArgumentParser, job: str = "job") -> None:
    """Add the arguments that name a job; `job`: "job" for a positional argument, "--job" for an option."""
    optional = {"nargs": "?"} if job == "job" else {}
    text = "job id; the newest job of this user if left out"
    parser.add_argument(job, metavar="JOB", help=text, **optional)  # type: ignore[arg-type]
    parser.add_argument("--run-dir", metavar="DIR", help="run directory of the job, if `leto run` had one")


def _changed(path: Path) -> float:
    """When a job last wrote an event; 0 if it never did."""
    try:
        return (path / EVENTS_FILE).stat().st_mtime
    except OSError:
        return 0.0


def find_run_dir(job: str | None, run_dir: str | None, base: Path | None = None) -> Path:
    """Return the run directory of the job that the user means. Raises CommandError."""
    if job is not None and run_dir is not None:
        raise CommandError("give either JOB or --run-dir, not both", 2)
    if "" in (job, run_dir):
        raise CommandError("the name of the job is empty; leave it out for the newest job", 2)
    base = base_dir() if base is None else base
    if run_dir is not None:
        found = Path(run_dir)
    elif job is not None:
        if "/" in job or job.startswith("."):
            raise CommandError(f"{job!r} is no job id; use --run-dir for a directory", 2)
        found = base / job
    else:
        jobs = [path for path in base.iterdir() if path.is_dir()] if base.is_dir() else []
        found = max(jobs, key=_changed, default=base)
        if found == base or not _changed(found):
            raise CommandError(f"no job was found in {base}; start one with `leto run`")
    if not found.is_dir():
        known = sorted(path.name for path in base.iterdir()) if base.is_dir() else []
        hint = f"; known jobs: {', '.join(known)}" if known and run_dir is None else ""
        raise CommandError(f"there is no run directory {found}{hint}")
    if found.stat().st_uid != os.getuid():
        raise CommandError(f"{found} belongs to another user")
    if not ((found / EVENTS_FILE).exists() or agent_sockets(found)):
        raise CommandError(
            f"{found} is no run directory: no {EVENTS_FILE} and no socket of an agent is in it"
        )
    return found


def agent_sockets(run_dir: Path) -> list[Path]:
    """Control sockets of the agents of this host, in node order."""
    return sorted(run_dir.glob("agent-*.sock"))
