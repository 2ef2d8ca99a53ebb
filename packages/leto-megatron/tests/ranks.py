"""Run a function in N fresh processes, one a rank, and collect what each returns (JSON).

    results = run_ranks(2, "worker_modes:compare", {"preset": "tiny"})

The processes are real: they form gloo groups, share nothing but a folder, and are killed after the deadline.
They are forked from a process that has imported Megatron, and has done nothing else: importing it takes
longer than most of what ranks do. That process forks for all tests of a session, and ends with it.
"""

from __future__ import annotations

import atexit
import contextlib
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

TESTS = Path(__file__).resolve().parent


class RankFailedError(AssertionError):
    """A rank ended badly; the message carries the end of its output."""


def run_ranks(
    world: int, function: str, arguments: dict[str, Any], folder: Path, timeout_s: float = 400.0
) -> list[Any]:
    """Call `module:function(rank, world, **arguments)` in `world` processes; results in rank order."""
    folder.mkdir(parents=True, exist_ok=True)
    codes = _Warm.one().run(
        {
            "world": world,
            "function": function,
            "arguments": {"folder": str(folder), **arguments},
            "folder": str(folder),
            "environment": {**_environment(), "WORLD_SIZE": str(world)},
            "timeout_s": timeout_s,
        }
    )
    if any(codes):
        logs = "\n".join(
            f"--- rank {r} (exit {code})\n" + (folder / f"rank{r}.log").read_text(errors="replace")[-3000:]
            for r, code in enumerate(codes)
        )
        raise RankFailedError(f"exit codes {codes}\n{logs}")
    return [json.loads((folder / f"result{rank}.json").read_text()) for rank in range(world)]


def store_path(folder: str, name: str) -> str:
    """A file for torch's FileStore, one for each world that the processes form."""
    return os.path.join(folder, f"store-{name}")


def _environment() -> dict[str, str]:
    path = [str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(path)}


class _Warm:
    """The process that forks ranks, seen from the tests."""

    _the_one: _Warm | None = None

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-W", "ignore", str(TESTS / "ranks.py"), str(theirs.fileno())],
                env=_environment(),
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )

    @classmethod
    def one(cls) -> _Warm:
        if cls._the_one is None:
            cls._the_one = cls()
            atexit.register(cls._the_one.end)
        return cls._the_one

    def run(self, request: dict[str, Any]) -> list[int | str]:
        """Exit codes by rank. If anything comes in between, ranks are killed; the next run starts anew."""
        try:
            with self._socket.makefile("rw", encoding="utf-8") as stream:
                print(json.dumps(request), file=stream, flush=True)
                line = stream.readline()
            if not line:
                raise RankFailedError("the process that forks ranks has died: see what it wrote")
            codes: list[int | str] = json.loads(line)
        except BaseException:
            self.end()
            raise
        return codes

    def end(self) -> None:
        """Close the connection, at which it kills its ranks and ends."""
        type(self)._the_one = None
        atexit.unregister(self.end)
        self._socket.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


# --- in the process that forks ---------------------------------------------------------------------------
def _serve(connection: socket.socket) -> None:
    """Run worlds, one after the other, until the tests close the connection."""
    import torch

    torch.set_num_threads(1)
    if not torch.version.cuda or not os.path.exists("/dev/nvidiactl"):  # what has met CUDA cannot be forked
        importlib.import_module("leto_megatron.cpu").import_megatron()
        for name in ("pretrain", "checkpoint", "trainer", "compare"):
            importlib.import_module(f"leto_megatron.{name}")
    with connection.makefile("rw", encoding="utf-8") as stream:
        for line in stream:
            print(json.dumps(_run_world(connection, json.loads(line))), file=stream, flush=True)


def _run_world(connection: socket.socket, request: dict[str, Any]) -> list[int | str]:
    """Fork the ranks and wait until all have ended, or one has failed, or it took too long; kill the others.

    Exits if the tests go away.
    """
    codes: list[int | str] = ["killed by this test"] * request["world"]
    running: dict[int, tuple[int, int]] = {}  # by pidfd: rank and pid
    watch = select.poll()
    watch.register(connection, select.POLLIN)
    deadline = time.monotonic() + request["timeout_s"]
    try:
        for rank in range(request["world"]):
            pid = os.fork()
            if pid == 0:
                os.close(connection.fileno())  # or the tests would not see this process die
                _rank(rank, request)
            pidfd = os.pidfd_open(pid)
            running[pidfd] = rank, pid
            watch.register(pidfd, select.POLLIN)
        while running and (left := deadline - time.monotonic()) > 0:
            for fd, _event in watch.poll(1000 * left):
                if fd == connection.fileno():
                    sys.exit("the tests are gone")
                rank, pid = running.pop(fd)
                watch.unregister(fd)
                os.close(fd)
                codes[rank] = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            if any(code != 0 for code in codes if isinstance(code, int)):
                break  # the others may wait for it for long
    finally:
        for pidfd, (_rank_number, pid) in running.items():
            with contextlib.suppress(ProcessLookupError):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            os.close(pidfd)
            os.waitpid(pid, 0)
    return codes


def _rank(rank: int, request: dict[str, Any]) -> NoReturn:
    """One rank's life, in the forked child."""
    code = 1
    try:
        folder = Path(request["folder"])
        log = os.open(folder / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.clear()
        os.environ.update(request["environment"], RANK=str(rank), LOCAL_RANK=str(rank))
        module, function = request["function"].split(":")
        world, arguments = request["world"], request["arguments"]
        result = getattr(importlib.import_module(module), function)(rank, world, **arguments)
        (folder / f"result{rank}.json").write_text(json.dumps(result))
        code = 0
    except BaseException:  # noqa: BLE001 - the tests see the exit code, the log has the reason
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve(socket.socket(fileno=int(sys.argv[1])))
