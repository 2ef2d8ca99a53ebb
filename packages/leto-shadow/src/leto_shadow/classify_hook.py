"""The operator's hook: whoever runs the cluster may overrule the verdict on a failure (paper section 2.2).

`leto run --classify-hook MODULE:FUNCTION` or `--classify-hook PATH` (an executable). Each question is a
process of its own on node rank 0, with the question as JSON on its standard input
(`leto_shadow.hook_question`) and the answer, one word, on its standard output; a function's process is
started ahead, so that its imports cost nothing. A hook that is late, fails or answers nonsense changes
nothing: it is killed with all that it started, and the built-in verdict stands. The agent's loop never waits
for it.

    python -m leto_shadow.classify_hook MODULE:FUNCTION SCRIPT_DIRECTORY    # one question from standard input
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from leto_shadow import linux
from leto_shadow.hook_question import ANSWERS, Question
from leto_shadow.reactor import Reactor

__all__ = ["ClassifyHook", "is_function", "main"]

_ANSWER_BYTES = 4096


def is_function(hook: str) -> bool:
    """Whether a hook is named as ``module:function``, and not as a file."""
    module, _, function = hook.partition(":")
    names = [*module.split("."), function]
    return all(name.isidentifier() for name in names)


@dataclass
class _Run:
    process: subprocess.Popen[bytes]
    pidfd: int
    number: int | None = None
    """The question that it was given; None while it waits for one."""


class ClassifyHook:
    """Starts hooks and hears them in the agent's event loop. ``answered(number, answer, error)`` is called at
    most once for each question. ``children``: pids of its processes are kept in this set, whose owner
    collects all other children."""

    def __init__(
        self,
        hook: str,
        script_directory: Path,
        log: Path,
        reactor: Reactor,
        answered: Callable[[int, str, str], None],
        children: set[int],
    ) -> None:
        ahead = is_function(hook)
        module = [sys.executable, "-m", "leto_shadow.classify_hook", hook, str(script_directory)]
        self._command = module if ahead else [hook]
        self._ahead = ahead
        self._log = log
        self._reactor = reactor
        self._answered = answered
        self._children = children
        self._runs: dict[int, _Run] = {}
        self._waiting: _Run | None = self._start() if ahead else None

    def _start(self) -> _Run:
        with open(self._log, "ab") as log:
            process = subprocess.Popen(
                linux.dying_with_us(self._command),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                start_new_session=True,
            )
        assert process.stdout is not None
        os.set_blocking(process.stdout.fileno(), False)
        self._children.add(process.pid)
        return _Run(process, os.pidfd_open(process.pid))

    def ask(self, number: int, question: Question) -> None:
        """Put one question; the answer comes through the event loop."""
        try:
            run, self._waiting = self._waiting or self._start(), None
            self._runs[number] = run
            run.number = number
            self._reactor.watch(run.pidfd, lambda _events: self._ended(number))
            stdin = run.process.stdin
            assert stdin is not None
            with suppress(BrokenPipeError), stdin:  # it is dead; its end says how
                stdin.write(msgspec.json.encode(question) + b"\n")
            if self._ahead:
                self._waiting = self._start()
        except OSError as error:
            if number not in self._runs:
                self._answered(number, "", f"it cannot be started: {error}")

    def keep(self, numbers: Collection[int]) -> None:
        """Kill those whose answer nobody waits for any more."""
        for number in [number for number in self._runs if number not in numbers]:
            self._end(self._runs.pop(number))

    def _ended(self, number: int) -> None:
        run = self._runs.pop(number)
        assert run.process.stdout is not None
        try:
            said = os.read(run.process.stdout.fileno(), _ANSWER_BYTES)
        except BlockingIOError:  # something that it has started holds the pipe, and it said nothing
            said = b""
        status = self._end(run)
        words = said.decode(errors="replace").split()
        if status != 0:
            how = (
                f"it was killed by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"
            )
            self._answered(number, "", f"{how}; its messages are in {self._log}")
        elif len(words) != 1 or words[0].lower() not in ANSWERS:
            found = " ".join(words)[:200]
            self._answered(number, "", f"it must answer hof, ff or default, found {found!r}")
        else:
            self._answered(number, words[0].lower(), "")

    def _end(self, run: _Run) -> int:
        """Kill the process, if it lives, and what it started; return its exit status."""
        if run.number is not None:
            self._reactor.forget(run.pidfd)
        with suppress(ProcessLookupError):
            os.killpg(run.process.pid, signal.SIGKILL)
        status = run.process.wait(timeout=10.0)
        self._children.discard(run.process.pid)
        os.close(run.pidfd)
        for pipe in (run.process.stdin, run.process.stdout):
            if pipe is not None:
                with suppress(BrokenPipeError):
                    pipe.close()
        return status

    def close(self) -> None:
        """Leave no process behind (I-7)."""
        self.keep(())
        if self._waiting is not None:
            self._end(self._waiting)
            self._waiting = None


def main(argv: Sequence[str]) -> int:
    """Answer one question by a function: its JSON as a dict; it returns the word."""
    hook, script_directory = argv
    module, _, name = hook.partition(":")
    sys.path.append(script_directory)  # as for --decide
    function = getattr(importlib.import_module(module), name)
    asked = sys.stdin.buffer.readline()
    if not asked:
        return 1  # the agent has ended
    out = os.dup(1)
    os.dup2(2, 1)  # what it prints is not the answer
    answer = function(msgspec.json.decode(asked))
    os.write(out, f"{answer}\n".encode()[:_ANSWER_BYTES])
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
