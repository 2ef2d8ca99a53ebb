"""The agent's end of its helper process: start, ask, hear, end."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from leto_shadow import linux, wire
from leto_shadow.helper_messages import HelperMessage, HelperRequest, pack

__all__ = ["HelperProcess"]


class HelperProcess:
    """One helper. The event loop watches `fd` and calls `read`; an end of stream is the helper's death.

    Nothing here waits for it, except for its end once it is killed.
    """

    def __init__(self, decide: str, script_directory: Path, log: Path) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        arguments = [str(theirs.fileno()), decide, str(script_directory)]
        with theirs, open(log, "ab") as output:
            self._popen = subprocess.Popen(
                linux.dying_with_us([sys.executable, "-m", "leto_shadow.helper", *arguments]),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                pass_fds=(theirs.fileno(),),
                start_new_session=True,
            )
        self.pid = self._popen.pid
        self._log = log
        self._socket = ours
        self._socket.setblocking(False)
        self._unsent = bytearray()
        self._decoder: wire.FrameDecoder[HelperMessage] = wire.FrameDecoder(HelperMessage)

    @property
    def fd(self) -> int:
        return self._socket.fileno()

    @property
    def unsent(self) -> bool:
        """Not all that was asked fits into the helper's socket: `flush` when that can be written."""
        return bool(self._unsent)

    def ask(self, request: HelperRequest) -> None:
        """Send a request, or as much of it as the helper takes now: one that is stopped, or still imports,
        holds up nobody. One that is dead shows as the end of the stream."""
        self._unsent += pack(request)
        self.flush()

    def flush(self) -> None:
        """Send what is unsent, as far as that goes."""
        try:
            while self._unsent:
                del self._unsent[: self._socket.send(self._unsent)]
        except BlockingIOError:
            return
        except (BrokenPipeError, ConnectionResetError):
            self._unsent.clear()

    def read(self) -> Sequence[HelperMessage] | None:
        """Return the messages that arrived; None when the helper is gone."""
        try:
            data = self._socket.recv(1 << 16)
        except BlockingIOError:
            return ()
        except ConnectionResetError:
            data = b""
        return self._decoder.feed(data) if data else None

    def how(self) -> str:
        """Say how it ended, with the end of its log."""
        status = self._popen.wait(timeout=10.0)
        tail = self._log.read_bytes()[-1500:].decode(errors="replace").strip()
        return f"exit status {status}" if not tail else f"exit status {status}; end of {self._log}:\n{tail}"

    def end(self) -> None:
        """Kill it, wait for its end, release the descriptor."""
        if self._popen.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
            self._popen.wait(timeout=10.0)
        self._socket.close()
