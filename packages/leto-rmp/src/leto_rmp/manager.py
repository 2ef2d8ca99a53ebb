"""The state manager process: `python -m leto_rmp.manager` (paper section 4.2).

Owns the retained memory of one rank: whoever maps it may die, the memory stays as long as this
process lives. It is bound to an owner by pidfd (`--owner-fd` or `--owner-pid`) and ends `--grace-s`
after the owner unless another takes it over, at once with its guardian (`--guardian-fd`), on SIGTERM and on
SIGINT, removing only its own files (I-7). PR_SET_PDEATHSIG is not
used: it follows the *thread* that started us, and would end the manager when an agent's helper
thread returns.

It imports neither numpy nor torch: it starts in the time that Python needs.
"""

from __future__ import annotations

import argparse
import os
import signal
import socket
import sys
from pathlib import Path

import msgspec

from leto_rmp.backend import open_backend
from leto_rmp.config import PoolConfig
from leto_rmp.endpoint import Endpoint
from leto_rmp.errors import RmpError
from leto_rmp.limits import raise_fd_limit
from leto_rmp.linux import pidfd_gone, pidfd_pid
from leto_rmp.manager_ready import Readiness
from leto_rmp.ownership import Ownership, Party
from leto_rmp.pool import Pool
from leto_rmp.server import Server
from leto_rmp.service import Identity, Service

__all__ = ["main"]


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m leto_rmp.manager", description="State manager: owns one rank's retained memory."
    )
    parser.add_argument(
        "--directory", type=Path, required=True, help="folder of its own, made with mode 0700"
    )
    parser.add_argument("--job-id", required=True)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--config", default="{}", help="PoolConfig as JSON; what is left out has its default")
    owner = parser.add_mutually_exclusive_group(required=True)
    owner.add_argument("--owner-pid", type=int, help="end after this process")
    owner.add_argument("--owner-fd", type=int, help="the same, as an inherited pidfd (free of races)")
    parser.add_argument("--grace-s", type=float, default=0.0, help="seconds to outlive the owner")
    parser.add_argument("--guardian-fd", type=int, help="inherited pidfd: end at once with this process")
    parser.add_argument("--job-epoch", type=int, default=0, help="number of this set of managers in the job")
    parser.add_argument("--ready-fd", type=int, help="pipe that gets one JSON line: ready, or why not")
    parser.add_argument(
        "--poison", choices=["auto", "simulated"], default="auto", help="how pages are poisoned"
    )
    return parser.parse_args(argv)


def _ownership(arguments: argparse.Namespace) -> Ownership:
    owner, guardian = _owner_pidfd(arguments), None
    if arguments.guardian_fd is not None:
        os.set_inheritable(arguments.guardian_fd, False)
        guardian = Party(pidfd_pid(arguments.guardian_fd), arguments.guardian_fd)
    return Ownership(Party(pidfd_pid(owner), owner), guardian, arguments.grace_s, pidfd_gone)


def _owner_pidfd(arguments: argparse.Namespace) -> int:
    if arguments.owner_fd is not None:
        pidfd = int(arguments.owner_fd)
        os.set_inheritable(pidfd, False)
    else:
        try:
            pidfd = os.pidfd_open(arguments.owner_pid)
        except ProcessLookupError:
            raise RmpError(f"the owner, process {arguments.owner_pid}, has ended already") from None
    if pidfd_gone(pidfd):
        raise RmpError("the owner has ended already: a manager without an owner would never end")
    return pidfd


def _tell(ready_fd: int | None, readiness: Readiness) -> None:
    if ready_fd is not None:
        os.write(ready_fd, msgspec.json.encode(readiness) + b"\n")
        os.close(ready_fd)


def _wake_on_signals() -> socket.socket:
    """Return the socket that becomes readable on SIGTERM and SIGINT."""
    receiver, sender = socket.socketpair()
    receiver.setblocking(False)
    sender.setblocking(False)
    signal.set_wakeup_fd(sender.detach(), warn_on_full_buffer=False)
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: None)
    return receiver


def _serve(arguments: argparse.Namespace) -> None:
    try:
        ownership = _ownership(arguments)
    except OSError as error:
        raise RmpError(
            "--owner-pid, --owner-fd, --guardian-fd: expected a living process or an inherited pidfd of one, "
            f"found {error.strerror}"
        ) from error
    raise_fd_limit()
    config = msgspec.json.decode(arguments.config, type=PoolConfig)
    backend = open_backend(config.backend, arguments.poison, config.device)
    wake = _wake_on_signals()
    endpoint = Endpoint(arguments.directory)
    try:
        os.umask(0o077)
        identity = Identity(arguments.job_id, arguments.rank, arguments.job_epoch)
        service = Service(identity, Pool(config, backend), ownership, pidfd_gone)
        server = Server(service, endpoint, wake)
        try:
            _tell(arguments.ready_fd, Readiness(pid=os.getpid(), socket_path=str(endpoint.socket_path)))
            server.run()
        finally:
            server.close()
    finally:
        endpoint.close()
        backend.close()


def main(argv: list[str] | None = None) -> int:
    """Run a manager until it has to end; return the exit status."""
    arguments = _arguments(argv)
    try:
        _serve(arguments)
    except (RmpError, msgspec.ValidationError, msgspec.DecodeError) as error:
        found = error if isinstance(error, RmpError) else RmpError(f"--config: {error}")
        _tell(
            arguments.ready_fd,
            Readiness(
                pid=os.getpid(), error=type(found).__name__, message=found.message, details=found.details
            ),
        )
        print(f"leto_rmp.manager: {type(found).__name__}: {found.message}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
