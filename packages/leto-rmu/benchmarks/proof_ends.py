"""How a process ends that was to be interrupted: killed, or by what CUDA calls the trap of a kernel.

A kernel that traps takes its process's CUDA context with it. From then on whatever calls CUDA fails, and
the process ends in one of two ways. Where the call is one of Python's, it raises: the process says what CUDA
calls the error, and kills itself. Where it is in a destructor of C++, which may not raise, the runtime of C++
ends the process by SIGABRT: PyTorch asks for an event when pinned memory is freed, and Python's collector of
cycles frees whatever it finds at instants of its own, as it did once on an H200 between the trap and the
error that Python would have raised. The words that the runtime leaves on stderr tell such an end from every
other SIGABRT.
"""

from __future__ import annotations

import os
import re
import signal
import sys
from typing import Any

# What CUDA calls a kernel that ended in a trap, by driver and chip (errors 719, 715).
TRAPS = ("launch failure", "illegal instruction")
# What the runtime of C++ says of an exception that nobody may catch, and why it was thrown.
UNCAUGHT = re.compile(r"terminate called after throwing an instance of '[^'\n]+'\n +what\(\): +([^\n]+)")


class LastWords:
    """What a process says on stderr from a moment on, kept in memory that its parent has too."""

    def __init__(self) -> None:
        self._file = os.memfd_create("last words")

    def keep(self) -> None:
        """In the process: from now on stderr goes here."""
        sys.stderr.flush()
        os.dup2(self._file, 2)

    def end(self) -> str:
        """In the parent, when the process is gone: what it said. It goes to the parent's stderr as well."""
        words = os.pread(self._file, os.fstat(self._file).st_size, 0).decode(errors="replace")
        os.close(self._file)
        if words:
            print(words, end="" if words.endswith("\n") else "\n", file=sys.stderr, flush=True)
        return words


def is_trap(error: str) -> bool:
    return any(name in error for name in TRAPS)


def interruption(what: str, told: dict[str, Any] | None, status: int, words: str, trapping: bool) -> str:
    """What is known of the trap that interrupted a process, "" of one that was just killed.

    ``told``: its last message, if any; ``status``: as waitpid has it; ``words``: the last ones on stderr;
    ``trapping``: it ran a kernel that traps. Raises AssertionError for every other end: ``what`` was to be
    interrupted then, and something else has happened.
    """
    found = "" if told is None else str(told.get("trapped", ""))
    if told is not None and not is_trap(found):
        raise AssertionError(f"{what}: it was to be interrupted, but says {str(told)[:1000]}")
    number = os.WTERMSIG(status) if os.WIFSIGNALED(status) else None
    if number == signal.SIGKILL:
        return found
    if number == signal.SIGABRT and trapping:
        uncaught = UNCAUGHT.search(words)
        if uncaught is not None and "CUDA error" in uncaught[1] and is_trap(uncaught[1]):
            return f"SIGABRT: {uncaught[1]}"
        why = f"its last words: {words[-1000:]!r}"
        raise AssertionError(f"{what}: it ended by SIGABRT, which no trap of a kernel caused; {why}")
    raise AssertionError(f"{what}: it was to end by SIGKILL, but its status is {status}")
