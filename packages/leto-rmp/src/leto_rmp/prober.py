"""The manager's end of the helper process: start it, give it pages, notice how it dies, end it.

A helper is owned by the errand that started it (`with`), has a deadline for every answer, and is killed
and reaped at the end. What it dies of is told apart: an error of the device while it *read* is a finding
about the page; anything else (no memory for a context, a missing driver, killed from outside) is a
failure of the errand, and says nothing about any page.
"""

from __future__ import annotations

import array
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Sequence
from types import TracebackType

from leto_rmp import probe_wire as w
from leto_rmp.backend import Handle
from leto_rmp.driver import UNREADABLE
from leto_rmp.errors import CudaError, LocalizationFailed
from leto_rmp.protocol import FDS_PER_MESSAGE_MAX, FrameReader, Message, frame

__all__ = ["ANSWER_TIMEOUT_S", "Helper"]

ANSWER_TIMEOUT_S = 60.0
COMMAND = (sys.executable, "-P", "-m", "leto_rmp.probe")
_WRITE_BYTES = 4 << 20  # half a frame
_STDERR_BYTES = 4 << 10


class Helper:
    """A running helper. Pages are numbered in the order in which they are loaded."""

    def __init__(self, device_uuid: str, pages: int, page_bytes: int) -> None:
        self.pages_max = pages
        self.loaded = 0
        self._page_bytes = page_bytes
        ours, theirs = socket.socketpair()
        self._sock = ours
        self._reader = FrameReader()
        self._stderr_fd = os.memfd_create("leto:probe-stderr", os.MFD_CLOEXEC)
        try:
            with theirs:
                self._process = subprocess.Popen(
                    [*COMMAND, "--fd", str(theirs.fileno()), "--device", device_uuid],
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    stderr=self._stderr_fd,
                    pass_fds=(theirs.fileno(),),
                )
        except BaseException:
            ours.close()
            os.close(self._stderr_fd)
            raise
        try:
            ours.settimeout(ANSWER_TIMEOUT_S)
            self._expect(self._answer())
            self._ask(w.Begin(pages=pages, page_bytes=page_bytes))
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Helper:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def load(self, handles: Sequence[Handle], pages: int = 1) -> list[int]:
        """Map more handles of `pages` pages each; return the numbers of pages that the driver refuses."""
        assert self.loaded + len(handles) * pages <= self.pages_max, "more pages than were announced"
        refused: list[int] = []
        for start in range(0, len(handles), FDS_PER_MESSAGE_MAX):
            some = handles[start : start + FDS_PER_MESSAGE_MAX]
            fds = array.array("i", [handle.fileno() for handle in some])
            refused += self._ask(w.Load(first=self.loaded, count=len(some), pages=pages), fds).pages
            self.loaded += len(some) * pages
        return refused

    def skip(self, count: int) -> None:
        """Leave a hole of `count` pages."""
        self.loaded += count

    def query(self) -> list[int]:
        """Return the loaded pages that the driver does not know."""
        return list(self._ask(w.Query()).pages)

    def read(self, first: int, count: int) -> bool:
        """Return whether the device could read these pages; after False the helper is dead."""
        answer = self._exchange(w.Touch(first=first, count=count), array.array("i"))
        if isinstance(answer, w.Ok):
            return True
        if isinstance(answer, w.Bad) and answer.code in UNREADABLE:
            return False
        self._expect(answer)
        raise AssertionError("an answer that is not Ok raises")

    def write(self, index: int, data: bytes) -> None:
        """Overwrite a page from its start."""
        for offset in range(0, len(data), _WRITE_BYTES):
            self._ask(w.Write(index=index, offset=offset, data=data[offset : offset + _WRITE_BYTES]))

    def flip(self, index: int, offset: int, mask: bytes) -> None:
        """XOR `mask` into a page."""
        self._ask(w.Xor(index=index, offset=offset, mask=mask))

    def copy(self, source: int, target: int, count: int) -> None:
        """Copy pages; raise CudaError where one cannot be read: the helper is dead then."""
        self._ask(w.Copy(source=source, target=target, count=count))

    def close(self) -> None:
        """End the process and reap it: what it mapped is free when this returns."""
        self._sock.close()
        try:
            self._process.wait(1.0)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGKILL)
            self._process.wait()
        if self._stderr_fd >= 0:
            os.close(self._stderr_fd)
            self._stderr_fd = -1

    # -- talking -------------------------------------------------------------------------------

    def _ask(self, task: Message, fds: array.array[int] | None = None) -> w.Ok:
        return self._expect(self._exchange(task, array.array("i") if fds is None else fds))

    def _exchange(self, task: Message, fds: array.array[int]) -> w.Answer | None:
        data = frame(task)
        control = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, fds)] if fds else []
        try:
            sent = self._sock.sendmsg([data], control)
            self._sock.sendall(data[sent:])
        except (BrokenPipeError, ConnectionResetError):
            pass  # it died; what it said before that, if anything, is still to be read
        except TimeoutError:
            raise self._late(type(task).__name__) from None
        return self._answer(type(task).__name__)

    def _answer(self, what: str = "start") -> w.Answer | None:
        """Return the next answer, None when the process ended without one."""
        while True:
            try:
                data = self._sock.recv(64 << 10)
            except TimeoutError:
                raise self._late(what) from None
            except ConnectionResetError:
                return None
            if not data:
                return None
            for payload in self._reader.feed(data):
                return w.decode_answer(payload)

    def _late(self, what: str) -> LocalizationFailed:
        self._process.send_signal(signal.SIGKILL)
        return LocalizationFailed(
            f"the helper process (pid {self._process.pid}) did not answer {what} within {ANSWER_TIMEOUT_S} s "
            f"and was killed. Its standard error: {self._stderr()}"
        )

    def _expect(self, answer: w.Answer | None) -> w.Ok:
        if isinstance(answer, w.Ok):
            return answer
        if isinstance(answer, w.Bad):
            raise CudaError(f"helper process: {answer.message}", code=answer.code)
        self._sock.close()
        status = self._process.wait(ANSWER_TIMEOUT_S)
        raise LocalizationFailed(
            f"the helper process (pid {self._process.pid}) ended with status {status} and without an answer: "
            f"this says nothing about any page. Its standard error: {self._stderr()}",
            status=status,
        )

    def _stderr(self) -> str:
        size = os.fstat(self._stderr_fd).st_size
        tail = os.pread(self._stderr_fd, _STDERR_BYTES, max(0, size - _STDERR_BYTES))
        return tail.decode(errors="replace").strip() or "(empty)"
