"""Take over a manager whose owner is dead, with the memory in it.

Role: an agent that is started again finds the managers of its predecessor alive, within their grace
period. It becomes their owner before anything else; who may *write* is another question, which the
manager's fence answers with the pidfds that it took itself (I-4).
"""

from __future__ import annotations

import os
import signal
from pathlib import Path

from leto_rmp.client import Client
from leto_rmp.endpoint import SOCKET_NAME, remove_leftovers
from leto_rmp.errors import ManagerGone, OtherManager
from leto_rmp.linux import pidfd_gone
from leto_rmp.protocol import Role
from leto_rmp.spawn import wait_readable
from leto_rmp.status import ManagerStatus

__all__ = ["AdoptedManager", "adopt_manager"]


class AdoptedManager:
    """A manager that another process started and we own now; its end as `ManagerProcess` has it."""

    def __init__(self, folder: Path, pidfd: int, status: ManagerStatus) -> None:
        self.pid = status.pid
        self.pidfd = pidfd
        self.socket_path = folder / SOCKET_NAME
        self.status = status
        """What it said when it was taken over."""
        self._folder = folder

    def stderr(self) -> str:
        """Return "": what the manager writes went with the process that started it."""
        return ""

    def alive(self) -> bool:
        """Return whether the manager still runs."""
        return self.pidfd >= 0 and not pidfd_gone(self.pidfd)

    def kill(self, timeout_s: float = 60.0) -> int | None:
        """SIGKILL the manager, wait for its end, remove its files; None: its status is its parent's to know.

        Raises TimeoutError if the kernel does not end it in time. Killing twice is harmless.
        """
        if self.pidfd >= 0:
            if not pidfd_gone(self.pidfd):
                signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
                if not wait_readable(self.pidfd, timeout_s):
                    raise TimeoutError(f"manager {self.pid} has not ended {timeout_s} s after SIGKILL")
            self.leave()
            remove_leftovers(self._folder, self.pid, folder_too=True)
        return None

    def leave(self) -> None:
        """Forget the manager without ending it: its grace period begins when its owner ends."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def adopt_manager(
    directory: str | os.PathLike[str],
    job_id: str,
    rank: int,
    grace_s: float = 0.0,
    timeout_s: float = 60.0,
    guardian_pid: int | None = None,
) -> AdoptedManager:
    """Become the owner of the manager in `directory`, which outlives us by `grace_s`.

    Raises ManagerGone or StaleSocket if there is none, OtherManager if it is of another job, rank or
    guardian, OwnerAlive while its owner lives, DeadlineExceeded if it does not answer.
    """
    folder = Path(directory).absolute()
    with Client.connect(folder / SOCKET_NAME, timeout_s=timeout_s) as client:
        status = client.status()
        wanted = (job_id, rank, guardian_pid or 0)
        found = (status.job_id, status.rank, status.guardian_pid)
        if found != wanted:
            raise OtherManager(
                f"the manager in {folder} is that of (job, rank, guardian) {found}, expected {wanted}: it is "
                "not ours to take"
            )
        try:
            pidfd = os.pidfd_open(status.pid)
        except ProcessLookupError:
            raise ManagerGone(f"the manager in {folder} has just ended") from None
        try:
            client.attach(Role.CONTROL, max(0, status.generation))
            client.own(grace_s)  # it answers, so it lives, and the pidfd is the right one
        except BaseException:
            os.close(pidfd)
            raise
    return AdoptedManager(folder, pidfd, status)
