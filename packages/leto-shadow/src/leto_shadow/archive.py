"""Find the event logs of a job, wherever they are by now, and keep them where they outlast the node.

A run directory stays after its job, but it lies in a folder for temporary files, and each node has its own.
``leto run --keep DIR`` copies what a node wrote to ``DIR/<job id>/node<n>/`` when its agent ends; `read_job`
reads that, run directories, or single files, and puts the events of all nodes in one order.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Sequence
from pathlib import Path

from leto_shadow.events import Event, EventReader
from leto_shadow.jobs import EVENTS_FILE, CommandError

__all__ = ["event_files", "keep", "keep_or_say", "read_job"]


_log = logging.getLogger("leto_shadow.archive")


def keep(run_dir: Path, into: Path, job_id: str, node: int) -> Path:
    """Copy events and logs of this node to ``into/<job_id>/node<node>``; return that folder.

    Raises OSError. A file appears under its name only when it is complete.
    """
    folder = into / job_id / f"node{node}"
    (folder / "logs").mkdir(parents=True, exist_ok=True)
    logs = sorted((run_dir / "logs").glob("*")) if (run_dir / "logs").is_dir() else []
    for source in (run_dir / EVENTS_FILE, *logs):
        if source.is_file():
            target = folder / source.relative_to(run_dir)
            half = target.with_name(target.name + ".part")
            shutil.copyfile(source, half)
            os.replace(half, target)
    return folder


def keep_or_say(run_dir: Path, into: Path, job_id: str, node: int) -> None:
    """`keep`; what cannot be kept costs a line on standard error, not the job's exit code."""
    try:
        keep(run_dir, into, job_id, node)
    except OSError as error:
        _log.error("node %d: %s could not be kept in %s: %s", node, run_dir, into, error)


def event_files(path: Path) -> list[Path]:
    """The event logs that ``path`` names: a log, a run directory, or a folder of nodes. `CommandError` if
    none."""
    if path.is_file():
        return [path]
    found = [path / EVENTS_FILE, *sorted(path.glob(f"*/{EVENTS_FILE}"))]
    files = [one for one in found if one.is_file()]
    if not files:
        raise CommandError(f"there is no {EVENTS_FILE} in {path} or in the folders in it")
    return files


def read_job(paths: Sequence[Path]) -> tuple[list[Event], int]:
    """Return all events in order of time, and the number of lines that were none. `CommandError` if there is
    nothing to read."""
    files = [file for path in paths for file in event_files(path)]
    events: list[Event] = []
    skipped = 0
    for file in files:
        reader = EventReader(file)
        try:
            found = reader.poll()
        except OSError as error:
            raise CommandError(f"{file} cannot be read: {error.strerror}") from error
        whole = [event for event in found if _has_time(event)]
        skipped += reader.skipped + len(found) - len(whole)
        events += whole
    if not events:
        raise CommandError(f"there are no events in {', '.join(map(str, files))}")
    if len(files) > 1:
        # Nodes that share a run directory keep the same log, each under its own name.
        once = {(event["t"], event["mono"], event["event"], repr(event)): event for event in events}
        events = sorted(once.values(), key=lambda event: float(event["t"]))
    return events, skipped


def _has_time(event: Event) -> bool:
    return all(isinstance(event.get(name), (int, float)) for name in ("t", "mono"))
