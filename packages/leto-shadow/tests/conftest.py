"""Processes of tests: whatever happens, they end with all that they started, and their pipes are closed.

Deadlines are for a machine ten times slower than yours: they cost nothing where nothing goes wrong.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from leto_shadow import linux

_ORDERLY_S = 40.0


def _end(process: subprocess.Popen[Any]) -> None:
    """End a process, in order if it can be, and what is below it; close its pipes."""
    below = [] if process.poll() is not None else linux.descendants(process.pid)
    try:
        if process.poll() is None:
            process.terminate()
            process.wait(_ORDERLY_S)
    except subprocess.TimeoutExpired:
        below += linux.descendants(process.pid)
        process.kill()
        process.wait()
    finally:
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pipe in (process.stdin, process.stdout, process.stderr):
            if pipe is not None:
                with contextlib.suppress(OSError):  # what was not flushed has no reader any more
                    pipe.close()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A test that starts a job has the machine to itself."""
    for item in items:
        if {"start_job", "cluster"} & set(getattr(item, "fixturenames", ())):
            item.add_marker("job")


@pytest.fixture
def spawn() -> Iterator[Callable[..., subprocess.Popen[Any]]]:
    """`subprocess.Popen` whose processes do not outlive the test, nor their pipes, nor their children."""
    with contextlib.ExitStack() as ending:

        def start(command: Sequence[Any], **options: Any) -> subprocess.Popen[Any]:
            process = subprocess.Popen(command, **options)
            ending.callback(_end, process)
            return process

        yield start


@pytest.fixture
def agent_below() -> Callable[[int], int | None]:
    """The pid of a node's agent, by that of its torchrun; None where there is none.

    Parents come first, so this is the agent itself and no child of it that has not reached its exec.
    """

    def find(torchrun: int) -> int | None:
        for pid in linux.descendants(torchrun):
            try:
                command = Path(f"/proc/{pid}/cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue  # ended since it was listed
            if b"leto_shadow.agent_main" in command:
                return pid
        return None

    return find


@pytest.fixture
def alive() -> Callable[[int], bool]:
    """Whether a process that is not ours to wait for still runs; a zombie does not."""

    def runs(pid: int) -> bool:
        try:
            stat = Path(f"/proc/{pid}/stat").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            return False
        return stat[stat.rindex(b")") + 2 :][:1] not in b"ZX"

    return runs
