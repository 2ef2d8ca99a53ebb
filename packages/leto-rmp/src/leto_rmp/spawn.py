"""Start, watch and end a state manager process.

The child is bound to its owner through an inherited pidfd, reports through a pipe, and runs in a
session of its own so that a Ctrl-C at the terminal does not take the memory away before the agent
has decided what to do.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Literal

import msgspec

from leto_rmp.config import PoolConfig
from leto_rmp.endpoint import remove_leftovers
from leto_rmp.errors import ManagerStartFailed, RmpError, error_from_wire
from leto_rmp.linux import pidfd_gone
from leto_rmp.manager_ready import Readiness

__all__ = ["ManagerProcess", "spawn_manager", "wait_readable"]

_STDERR_BYTES = 8 << 10


class ManagerProcess:
    """A manager that this process started. A context manager: `stop` at the end.

    `pidfd` becomes readable when the manager ends; it is closed by `stop` and `kill`.
    """

    def __init__(self, process: subprocess.Popen[bytes], directory: Path, made: bool, stderr_fd: int) -> None:
        self._process = process
        self._directory = directory
        self._made_directory = made
        self._stderr_fd = stderr_fd
        self.pid = process.pid
        self.pidfd = os.pidfd_open(process.pid)
        self.socket_path = Path()

    def __enter__(self) -> ManagerProcess:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def alive(self) -> bool:
        """Return whether the manager still runs."""
        return self.pidfd >= 0 and not pidfd_gone(self.pidfd)

    def stderr(self) -> str:
        """Return the last lines that the manager wrote to its standard error."""
        if self._stderr_fd < 0:
            return ""
        size = os.fstat(self._stderr_fd).st_size
        tail = os.pread(self._stderr_fd, _STDERR_BYTES, max(0, size - _STDERR_BYTES))
        return tail.decode(errors="replace").strip()

    def stop(self, timeout_s: float = 30.0) -> int:
        """Ask the manager to end (SIGTERM), kill it after `timeout_s`; return its exit status.

        Retained memory lives on only in processes that still map it. Stopping twice is harmless.
        """
        return self._end(signal.SIGTERM, timeout_s)

    def kill(self) -> int:
        """SIGKILL the manager and remove the files that it could not remove; return its exit status."""
        return self._end(signal.SIGKILL, 0.0)

    def leave(self) -> None:
        """Forget the manager without ending it: its grace period begins when its owner ends."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            os.close(self._stderr_fd)
            self.pidfd = self._stderr_fd = -1
            self._process.returncode = 0  # it is not ours to wait for any more; subprocess would complain

    def _end(self, number: Literal[signal.Signals.SIGTERM, signal.Signals.SIGKILL], timeout_s: float) -> int:
        if self.pidfd >= 0:
            if not pidfd_gone(self.pidfd):
                signal.pidfd_send_signal(self.pidfd, number)
                if not wait_readable(self.pidfd, timeout_s):
                    signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            self._process.wait()
            os.close(self.pidfd)
            os.close(self._stderr_fd)
            self.pidfd = self._stderr_fd = -1
            remove_leftovers(self._directory, self.pid, folder_too=self._made_directory)
        return self._process.wait()


def wait_readable(fd: int, timeout_s: float) -> bool:
    """Wait for a pidfd or pipe; return whether it became readable in time."""
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(max(0, round(timeout_s * 1000))))


def spawn_manager(
    directory: str | os.PathLike[str],
    job_id: str,
    rank: int,
    config: PoolConfig,
    owner_pid: int | None = None,
    grace_s: float = 0.0,
    timeout_s: float = 60.0,
    poison: Literal["auto", "simulated"] = "auto",
    guardian_pid: int | None = None,
    job_epoch: int = 0,
) -> ManagerProcess:
    """Start a manager and wait until it listens.

    `directory` is the manager's own folder (made with mode 0700 if need be). The manager ends
    `grace_s` after its owner, by default the calling process, unless somebody else takes it over
    (`adopt_manager`), and at once with its guardian. `job_epoch` is told in its status. Raises what kept
    it from starting (ManagerAlive, UnsafeDirectory, ...) or ManagerStartFailed with its standard error.
    """
    folder = Path(directory).absolute()
    made = not folder.exists()
    try:
        owner_fd = os.pidfd_open(os.getpid() if owner_pid is None else owner_pid)
    except ProcessLookupError:
        raise ManagerStartFailed(f"the owner, process {owner_pid}, has ended already") from None
    try:
        guardian_fd = -1 if guardian_pid is None else os.pidfd_open(guardian_pid)
    except ProcessLookupError:
        os.close(owner_fd)
        raise ManagerStartFailed(f"the guardian, process {guardian_pid}, has ended already") from None
    ready_read, ready_write = os.pipe()
    stderr_fd = os.memfd_create("leto:manager-stderr", os.MFD_CLOEXEC)
    command = [sys.executable, "-P", "-m", "leto_rmp.manager", "--directory", str(folder), "--job-id", job_id]
    command += ["--rank", str(rank), "--config", msgspec.json.encode(config).decode(), "--poison", poison]
    command += ["--owner-fd", str(owner_fd), "--ready-fd", str(ready_write), "--grace-s", str(grace_s)]
    command += ["--job-epoch", str(job_epoch)]
    passed = [owner_fd, ready_write]
    if guardian_fd >= 0:
        command += ["--guardian-fd", str(guardian_fd)]
        passed.append(guardian_fd)
    manager: ManagerProcess | None = None
    try:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=stderr_fd,
            pass_fds=passed,
            start_new_session=True,
        )
        manager = ManagerProcess(process, folder, made, stderr_fd)
        os.close(ready_write)
        ready_write = -1
        manager.socket_path = _await_ready(manager, ready_read, timeout_s)
    except BaseException:
        if manager is not None:
            manager.kill()
        else:
            os.close(stderr_fd)
        raise
    finally:
        for fd in (owner_fd, guardian_fd, ready_read, ready_write):
            if fd >= 0:
                os.close(fd)
    return manager


def _await_ready(manager: ManagerProcess, ready_fd: int, timeout_s: float) -> Path:
    deadline_s = time.monotonic() + timeout_s
    line = b""
    while not line.endswith(b"\n"):
        if not wait_readable(ready_fd, deadline_s - time.monotonic()):
            raise ManagerStartFailed(
                f"the manager (process {manager.pid}) was not ready within {timeout_s} s. Its standard "
                f"error: {manager.stderr() or '(empty)'}"
            )
        data = os.read(ready_fd, 64 << 10)
        if not data:
            raise ManagerStartFailed(
                f"the manager (process {manager.pid}) ended before it was ready. Its standard error: "
                f"{manager.stderr() or '(empty)'}"
            )
        line += data
    readiness = msgspec.json.decode(line, type=Readiness)
    if readiness.error:
        raise _start_error(readiness)
    return Path(readiness.socket_path)


def _start_error(readiness: Readiness) -> RmpError:
    return error_from_wire(readiness.error, readiness.message, readiness.details)
