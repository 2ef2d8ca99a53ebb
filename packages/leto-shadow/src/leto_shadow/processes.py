"""Trainer processes: start, talk to, kill with everything they started, and prove dead.

Each trainer has an owner (the agent), a pidfd and an end; it dies with the agent. It runs in a session of its
own, so that a terminal's Ctrl-C reaches the agent alone and its group can be killed at once. Its end is
reported only when its whole tree is gone (I-4, I-7).
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from leto_shadow import linux, oom_hook, oom_protocol, wire
from leto_shadow.progress import Progress, ProgressReader, create_progress_fd

__all__ = ["TrainerProcess", "trainer_environment"]

_TAIL_BYTES = 1500
_log = logging.getLogger("leto_shadow.agent")
_FOREIGN = ("TORCHELASTIC_", "GROUP_", "ROLE_")
_ON_ERROR, _ABORTS = "TORCH_NCCL_ASYNC_ERROR_HANDLING", ("1", "2")
"""What torch's watchdog does when a communicator fails. torchrun sets 1, and 2 is like it here: communicators
are aborted behind the trainer's back, which lets collectives return any bits to it and to its peers before
the process ends. 3, torch's own default, ends it without that (I-6)."""


def trainer_environment(base: Mapping[str, str], values: Mapping[str, str]) -> dict[str, str]:
    """Return the environment of a trainer: torchrun's variables describe the *agent* and are replaced."""
    env = {name: value for name, value in base.items() if not name.startswith(_FOREIGN)}
    for name in ("MASTER_ADDR", "MASTER_PORT"):
        env.pop(name, None)
    env.setdefault("OMP_NUM_THREADS", "1")
    if env.get(_ON_ERROR) in _ABORTS:
        env[_ON_ERROR] = "3"
    env.update(values)
    for theirs, ours in (
        ("RANK", "LETO_RANK"),
        ("WORLD_SIZE", "LETO_WORLD_SIZE"),
        ("LOCAL_RANK", "LETO_LOCAL_RANK"),
        ("LOCAL_WORLD_SIZE", "LETO_LOCAL_WORLD_SIZE"),
    ):
        env.pop(theirs, None)
        if ours in values:
            env[theirs] = values[ours]
    return env


class TrainerProcess:
    """One trainer. The event loop watches `pidfd` and `channel_fd` and calls the methods below."""

    def __init__(
        self,
        sid: int,
        rank: int,
        command: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        tag: str,
        hook: Path | None = None,
        progress: Path | None = None,
    ) -> None:
        self._progress_file = progress
        self.sid = sid
        self.rank = rank
        self.log = log
        self.tag = tag
        self.status: int | None = None
        self._decoder = wire.AgentDecoder()
        self._unsent = bytearray()
        self._log_start = log.stat().st_size if log.exists() else 0
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        progress_fd = self._make_progress(progress)
        hook_ours, hook_theirs = _hook_sockets(hook)
        extra = {}
        try:
            ours.setblocking(False)
            passed = [theirs.fileno(), progress_fd]
            if hook is not None and hook_theirs is not None:
                passed.append(hook_theirs.fileno())
                extra = {"LD_PRELOAD": env.get("LD_PRELOAD", ""), oom_hook.FD_VARIABLE: str(passed[2])}
                oom_hook.preload(extra, hook)
            with open(log, "ab") as output:
                self._popen = subprocess.Popen(
                    linux.dying_with_us([sys.executable, *command]),
                    env={
                        **env,
                        **extra,
                        "LETO_AGENT_FD": str(passed[0]),
                        "LETO_PROGRESS_FD": str(passed[1]),
                        linux.TRAINER_TAG: tag,
                    },
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=tuple(passed),
                    start_new_session=True,
                )
            self.pid = self._popen.pid
            self.pidfd = os.pidfd_open(self.pid)
            self._progress = ProgressReader(progress_fd)
        except BaseException:
            ours.close()
            if hook_ours is not None:
                hook_ours.close()
            raise
        finally:
            theirs.close()
            os.close(progress_fd)
            if hook_theirs is not None:
                hook_theirs.close()
        self._socket: socket.socket | None = ours
        self._hook = hook_ours

    def _make_progress(self, path: Path | None) -> int:
        """A trainer has a page also where the run directory is full: only the next agent misses it."""
        try:
            return create_progress_fd(path)
        except OSError as error:
            if path is None:
                raise
            _log.warning("%s cannot be made (%s): the next agent will not know how far it came", path, error)
            self._progress_file = None
            return create_progress_fd()

    def take_rank(self, sid: int, rank: int, log: Path, progress: Path | None = None) -> None:
        """A spare's trainer has its name and its rank, and writes to the log of that rank."""
        if self._progress_file is not None and progress is not None:
            self._progress_file = self._progress_file.rename(progress)
        self.sid, self.rank, self.log = sid, rank, log
        self._log_start = log.stat().st_size if log.exists() else 0

    @property
    def channel_fd(self) -> int | None:
        """Descriptor to watch for messages; None once the trainer has hung up."""
        return None if self._socket is None else self._socket.fileno()

    @property
    def hook_fd(self) -> int | None:
        """Descriptor to watch for requests of the allocator hook; None without one."""
        return None if self._hook is None else self._hook.fileno()

    def read_hook(self) -> list[oom_protocol.Ask | oom_protocol.Report]:
        """Return the hook's messages that arrived; closes its socket at the end, and on garbage
        (ValueError)."""
        found: list[oom_protocol.Ask | oom_protocol.Report] = []
        while self._hook is not None:
            try:
                data = self._hook.recv(2 * oom_protocol.ASK_BYTES)
                if data:
                    found.append(oom_protocol.decode(data))
                    continue
            except BlockingIOError:
                break
            except OSError:
                pass  # it is gone; so is the trainer
            except ValueError:
                self._hang_up_hook()
                raise
            self._hang_up_hook()
        return found

    def answer_hook(self, answer: bytes) -> None:
        """Send an answer to the hook. One that cannot be sent is not waited for: the hook has its
        deadline."""
        if self._hook is not None:
            with contextlib.suppress(OSError):
                self._hook.send(answer, socket.MSG_NOSIGNAL)

    def _hang_up_hook(self) -> None:
        if self._hook is not None:
            self._hook.close()
            self._hook = None

    @property
    def wants_to_write(self) -> bool:
        return self._socket is not None and bool(self._unsent)

    def send(self, message: wire.AgentMessage) -> None:
        """Queue a message and write what the socket takes; the rest goes when it is writable."""
        self._unsent += wire.encode(message)
        self.flush()

    def flush(self) -> None:
        """Write queued bytes; a trainer that is gone takes none, and its pidfd will tell."""
        while self._socket is not None and self._unsent:
            try:
                sent = self._socket.send(self._unsent, socket.MSG_NOSIGNAL)
            except BlockingIOError:
                return
            except OSError:
                self._unsent.clear()
                return
            del self._unsent[:sent]

    def read(self) -> list[wire.TrainerMessage]:
        """Return the messages that arrived; closes the channel at its end. `wire.FrameError` on garbage."""
        if self._socket is None:
            return []
        try:
            data = self._socket.recv(1 << 16)
        except BlockingIOError:
            return []
        except OSError:
            data = b""
        if not data:
            self.hang_up()
            return []
        return self._decoder.feed(data)

    def hang_up(self) -> None:
        """Close our end of the channel."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def progress(self) -> Progress | None:
        """Return how far the trainer's main thread says it is."""
        return self._progress.read()

    def kill(self) -> None:
        """SIGKILL the process, its group and every descendant that is found now."""
        tree = linux.descendants(self.pid) if self.status is None else []
        if self.status is None:
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            with contextlib.suppress(ProcessLookupError, PermissionError):  # the group is empty already
                os.killpg(self.pid, signal.SIGKILL)
        _kill_all(tree)

    def collect(self) -> None:
        """Reap the process after its pidfd became readable."""
        self.status = self._popen.wait(timeout=10.0)

    def orphans(self, known: set[int]) -> list[int]:
        """Return what the living trainer has started and does not see any more: the parent in between ended.
        And what may be of that kind: which trainer's it is cannot be said of a process inside exec.

        ``known``: children of ours that have an owner, this trainer among them.
        """
        found, unclear = linux.tagged(linux.descendants(os.getpid(), skip=known), self.tag)
        return found + unclear

    def leftovers_gone(self, known: set[int]) -> bool:
        """After `collect`: kill what the trainer left behind; True when nothing of it is alive."""
        assert self.status is not None
        left, unclear = linux.tagged(linux.descendants(os.getpid(), skip=known), self.tag)
        _kill_all(left)
        linux.reap(known)
        return not left and not unclear

    def how(self, *, with_output: bool = True) -> str:
        """Say how the process ended; if with an error, also what it wrote last, or where that is."""
        assert self.status is not None
        if self.status < 0:
            return f"killed by {signal.Signals(-self.status).name}"
        if self.status == 0:
            return "exit status 0 (did the script call leto_shadow.run?)"
        if not with_output:
            return f"exit status {self.status}, log {self.log}"
        with open(self.log, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(self._log_start, size - _TAIL_BYTES))
            tail = file.read().decode(errors="replace").strip()
        return f"exit status {self.status}; end of {self.log}:\n{tail}"

    def close(self, *, keep_progress: bool = False) -> Path | None:
        """Release descriptors; the process must be collected. Return its progress file if it is kept."""
        self.hang_up()
        self._hang_up_hook()
        os.close(self.pidfd)
        self._progress.close()
        if self._progress_file is not None and not keep_progress:
            self._progress_file.unlink(missing_ok=True)
            return None
        return self._progress_file


def _hook_sockets(hook: Path | None) -> tuple[socket.socket, socket.socket] | tuple[None, None]:
    if hook is None:
        return None, None
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return ours, theirs


def _kill_all(pids: list[int]) -> None:
    for pid in pids:
        try:
            os.kill(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue  # gone by itself
