"""What an agent checks before it makes anything: where it stands, its folder, its limits.

Role: the first steps of `leto_shadow.agent_main`; `UsageError` ends the start with one line and exit code 2.

Upheld here: a run directory is this user's alone before anything is put into it (cases 3 and 17), and an
agent that cannot open enough files does not begin (case 2).
"""

from __future__ import annotations

import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from leto_rmp import ConfigError, PoolConfig
from leto_rmp.limits import require_fds
from leto_shadow.agent_options import AgentOptions

__all__ = [
    "Place",
    "UsageError",
    "check_folder",
    "check_run_dir",
    "default_run_dir",
    "pool_config",
    "prepare_run_dir",
    "require_descriptors",
    "require_nodes",
]

_FDS, _FDS_PER_RANK, _FDS_PER_NODE = 40, 16, 2  # open files of an agent, generously
_ROOM_BYTES = 64 << 10
"""What must be free for sockets, logs and the first events."""
_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")


_REMEDY = "give another --run-dir"
_NEW = f"{_REMEDY}; one that is not there yet is made like that"
"""Of a folder that the user has named, nobody is told to remove it: more may be in it than a run."""


class UsageError(ValueError):
    """The command line, the environment or the run directory does not allow a start."""


@dataclass(frozen=True)
class Place:
    """Where this agent stands, as torchrun says."""

    node: int
    nodes: int
    master: str
    job_id: str
    parent: int
    """The process that started this one: torchrun, if there is one."""

    @classmethod
    def read(cls, environ: Mapping[str, str], job_id: str) -> Place:
        """Read torchrun's variables; a job id given on the command line wins."""
        node, nodes = int(environ.get("RANK", "0")), int(environ.get("WORLD_SIZE", "1"))
        run_id = job_id or environ.get("LETO_JOB_ID") or environ.get("TORCHELASTIC_RUN_ID", "")
        if run_id in ("", "none"):
            run_id = f"job-{os.getpid()}"
        if not _JOB_ID.fullmatch(run_id):
            raise UsageError(f"job id {run_id!r}: use up to 64 letters, digits, '.', '_' or '-'")
        return cls(node, nodes, environ.get("MASTER_ADDR", "127.0.0.1"), run_id, os.getppid())


def default_run_dir(job_id: str) -> Path:
    """Return ``<tmp>/leto-<uid>/<job_id>``."""
    return Path(tempfile.gettempdir()) / f"leto-{os.getuid()}" / job_id


def prepare_run_dir(given: Path | None, job_id: str) -> Path:
    """Make the run directory, or check one that is there, before anything is put into it."""
    default = default_run_dir(job_id)
    path = default if given is None else given.absolute()
    # One that is there has all that takes room: an agent that is started again in it goes on without a log.
    check_run_dir(path, room=not path.exists())
    try:
        _make_run_dir(path, default)
    except OSError as error:
        raise UsageError(f"{error.filename or path}: {error.strerror}: {_REMEDY}") from error
    return path


def check_run_dir(path: Path, *, room: bool = True) -> None:
    """Raise UsageError where the run directory could not be made, or with ``room`` not be filled; change
    nothing."""
    try:
        str(path).encode()
    except UnicodeEncodeError as error:  # events and sockets of managers have paths as text
        raise UsageError(f"{str(path)!a} cannot be a run directory, it is no UTF-8: {_REMEDY}") from error
    folder = check_folder(path, "a run directory", _REMEDY)
    disk = os.statvfs(folder)
    free = disk.f_bavail * disk.f_frsize
    if room and disk.f_blocks and free < _ROOM_BYTES:  # some file systems do not count
        raise UsageError(
            f"{path} cannot be a run directory, the disk is full: {free} bytes are free, {_ROOM_BYTES} are "
            f"needed: make room, or {_REMEDY}"
        )
    if folder == path:
        _require_private(path, _NEW)


def check_folder(path: Path, what: str, remedy: str) -> Path:
    """Return the part of ``path`` that is there; UsageError where the rest could surely not be made in it."""
    folder = path
    while not os.path.lexists(folder):
        folder = folder.parent
    if not folder.is_dir():
        raise UsageError(f"{path} cannot be {what}, {folder} is no folder: {remedy}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise UsageError(f"{path} cannot be {what}, {folder} cannot be written: {remedy}")
    return folder


def _make_run_dir(path: Path, default: Path) -> None:
    if path.parent == default.parent:  # anybody can make this one first, in a folder for everybody
        path.parent.parent.mkdir(parents=True, exist_ok=True)
        _make_private(path.parent, "remove it, or set TMPDIR or give --run-dir")
    else:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    _make_private(path, _NEW)
    (path / "logs").mkdir(mode=0o700, exist_ok=True)


def _make_private(folder: Path, remedy: str) -> None:
    folder.mkdir(mode=0o700, exist_ok=True)
    _require_private(folder, remedy)


def _require_private(folder: Path, remedy: str) -> None:
    found = folder.lstat()
    if found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise UsageError(
            f"{folder} must belong to uid {os.getuid()} with mode 0700, found uid {found.st_uid} and mode "
            f"{found.st_mode & 0o777:o}: {remedy}"
        )


def pool_config(options: AgentOptions) -> PoolConfig:
    """Return the sizes of the memory pool; UsageError if they make none."""
    try:
        return PoolConfig(
            page_bytes=options.page_bytes,
            data_pages=options.data_pages,
            tier1_pages=options.tier1_pages,
            tier2_pages=options.tier2_pages,
            backend=options.backend,
            gpu_pages_per_handle=options.gpu_pages_per_handle,
        )
    except ConfigError as error:
        raise UsageError(str(error)) from error


def require_nodes(active_nodes: int, place: Place) -> None:
    """Raise UsageError where fewer nodes have met than are to train: `leto run` refuses that before anything
    starts, but a torchrun that is started by hand may have been told something else."""
    if active_nodes > place.nodes:
        raise UsageError(
            f"--active-nodes {active_nodes}: expected at least so many nodes, found {place.nodes} "
            f"(WORLD_SIZE): start torchrun with --nnodes {active_nodes}, or {active_nodes}:MAX with spares "
            "and --nproc-per-node 1; or lower --active-nodes"
        )


def require_descriptors(local_ranks: int, place: Place) -> None:
    """Raise the soft limit of open files, or LimitTooLow: half a job would start and then fail (case 2)."""
    wanted = _FDS + _FDS_PER_RANK * local_ranks
    if place.node == 0:
        wanted += _FDS_PER_NODE * place.nodes  # the coordinator's connections
    require_fds(wanted, f"the agent of node {place.node}", "")
