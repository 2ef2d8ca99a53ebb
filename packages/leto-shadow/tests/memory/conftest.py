"""A simulated device, real processes on it, and the agent's end of the hook's socket.

What is simulated is the GPU alone (`fake_cudart.c`). The hook is the real library, compiled from its
source; processes, sockets and signals are real.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from leto_shadow import oom_hook, oom_protocol

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))  # pressure_case, imported by the tests by that name
HOOK_SOURCE = HERE.parents[1] / "native" / "oom_hook.c"
MIB = 1 << 20
DEADLINE_S = 150.0

compiler = shutil.which("cc")


def compile_library(source: str, target: Path) -> Path:
    """Compile C text into a shared library, warnings as errors."""
    if compiler is None:
        pytest.skip("no C compiler")
    flags = [
        "-std=c11",
        "-O1",
        "-g",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-fvisibility=default",
        "-shared",
        "-fPIC",
    ]
    command = [compiler, *flags, "-x", "c", "-", "-o", str(target), "-ldl", "-lpthread"]
    subprocess.run(command, input=source, text=True, check=True, timeout=120)
    return target


@pytest.fixture(scope="session")
def fake_cudart(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("cudart")
    return compile_library((HERE / "fake_cudart.c").read_text(), folder / "libcudart.so.13")


@pytest.fixture(scope="session")
def hook(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("hook") / oom_hook.LIBRARY.name
    return compile_library(HOOK_SOURCE.read_text(), target)


@pytest.fixture(scope="session")
def broken_hook(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Compile the hook with one piece of its text replaced."""

    def build(old: str, new: str) -> Path:
        source = HOOK_SOURCE.read_text()
        assert source.count(old) == 1, f"the hook has changed: {old!r} occurs {source.count(old)} times"
        target = tmp_path_factory.mktemp("broken") / oom_hook.LIBRARY.name
        return compile_library(source.replace(old, new), target)

    return build


class Gpu:
    """A simulated device of ``total`` bytes."""

    def __init__(self, path: Path, fake: Path, total: int, delay_ms: int = 0) -> None:
        self.path, self.fake, self.total = path, fake, total
        path.write_bytes(struct.pack("<QQ", total, delay_ms) + bytes(64 * 24))

    @property
    def environment(self) -> dict[str, str]:
        return {**os.environ, "FAKE_GPU": str(self.path)}


class Program:
    """A process on the device; with ``hook``, the agent's end of its socket is `agent`."""

    def __init__(
        self,
        gpu: Gpu,
        hook: Path | None = None,
        *,
        wait_ms: int = 100_000,
        eager: bool = False,
        patience_s: float = DEADLINE_S,
    ) -> None:
        environment = gpu.environment
        self.patience_s = DEADLINE_S
        self._unread = b""
        self.agent, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        if hook is not None:
            oom_hook.preload(environment, hook)
        self.process = subprocess.Popen(
            [sys.executable, "-S", str(HERE / "program.py"), str(gpu.fake)],
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
            pass_fds=(theirs.fileno(),),
        )
        if hook is not None:
            assert self.do("attach", fd=theirs.fileno(), wait_ms=wait_ms, eager=eager)
        theirs.close()
        self.patience_s = patience_s  # of a program that has started
        self.agent.settimeout(patience_s)

    def say(self, do: str, **more: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"do": do, **more}) + "\n")

    def hear(self) -> Any:
        assert self.process.stdout is not None
        fd = self.process.stdout.fileno()
        while b"\n" not in self._unread:
            if not select.select([fd], [], [], self.patience_s)[0]:
                raise TimeoutError("the program does not answer")
            data = os.read(fd, 65536)
            if not data:
                raise EOFError("the program has ended")
            self._unread += data
        line, _, self._unread = self._unread.partition(b"\n")
        return json.loads(line)

    def do(self, do: str, **more: Any) -> Any:
        self.say(do, **more)
        return self.hear()

    def asked(self) -> oom_protocol.Ask | oom_protocol.Report:
        """The next message of the hook."""
        return oom_protocol.decode(self.agent.recv(1024))

    def silent(self) -> bool:
        """Whether the hook has said nothing that is still unread."""
        return not select.select([self.agent], [], [], 0)[0]

    def answer(self, ask: Any, verdict: oom_protocol.Verdict, settle_s: float = 5.0) -> None:
        self.agent.send(oom_protocol.encode_answer(ask.sequence, verdict, settle_s))

    def die(self) -> None:
        self.process.kill()
        self.process.wait(DEADLINE_S)

    def close(self) -> None:
        self.die()
        self.agent.close()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@pytest.fixture
def programs() -> Iterator[Callable[..., Program]]:
    started: list[Program] = []

    def start(*args: Any, **more: Any) -> Program:
        started.append(Program(*args, **more))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture
def gpu(tmp_path: Path, fake_cudart: Path) -> Callable[..., Gpu]:
    def make(total: int = 1000 * MIB, delay_ms: int = 0) -> Gpu:
        return Gpu(tmp_path / "gpu", fake_cudart, total, delay_ms)

    return make
