"""A stand-in for the node agent: owns one real trainer process and speaks the wire with it."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from leto_shadow import wire
from leto_shadow.progress import Progress, ProgressReader, create_progress_fd

sys.path.insert(0, str(Path(__file__).resolve().parent))  # plain_jobs, imported by the tests by that name
_DEADLINE_S = 150.0


class FakeAgent:
    """One trainer as an agent sees it: socket, progress counter, process."""

    def __init__(self, script: Path, run_dir: Path, *, rank: int = 0, world_size: int = 1) -> None:
        ours, theirs = socket.socketpair()
        self.progress_fd = create_progress_fd()
        environment = {
            **os.environ,
            "LETO_AGENT_FD": str(theirs.fileno()),
            "LETO_PROGRESS_FD": str(self.progress_fd),
            "LETO_RANK": str(rank),
            "LETO_WORLD_SIZE": str(world_size),
            "LETO_LOCAL_RANK": str(rank),
            "LETO_LOCAL_WORLD_SIZE": str(world_size),
            "LETO_NODE_RANK": "0",
            "LETO_RUN_DIR": str(run_dir),
            "LETO_JOB_ID": "job",
            "OMP_NUM_THREADS": "1",
        }
        if rank < 0:  # on a spare node
            environment.update(LETO_LOCAL_RANK=str(-1 - rank), LETO_LOCAL_WORLD_SIZE=str(world_size))
            del environment["LETO_RANK"]
        self.process = subprocess.Popen(
            [sys.executable, str(script), "--flag", "value"],
            env=environment,
            pass_fds=(theirs.fileno(), self.progress_fd),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        theirs.close()
        self.socket = ours
        self.channel: wire.Channel[wire.TrainerMessage] = wire.Channel(ours, wire.AgentDecoder())
        self.reader = ProgressReader(self.progress_fd)

    def send(self, message: wire.AgentMessage) -> None:
        self.channel.send(message)

    def expect(self, kind: type[Any]) -> Any:
        """The next message, which must be of `kind`."""
        message = self.channel.recv(_DEADLINE_S)
        assert isinstance(message, kind), f"expected {kind.__name__}, got {message}"
        return message

    def climb(self, world: int = 1, port: int = 0, level: int = 3, host: str = "127.0.0.1") -> None:
        self.send(wire.Advance(level, world, host, port))
        for reached in range(1, level + 1):
            assert self.expect(wire.LevelReached) == wire.LevelReached(reached, world)

    def promote(
        self,
        generation: int = 1,
        world: int = 1,
        drills: tuple[Any, ...] = (),
        hints: dict[str, float] | None = None,
    ) -> None:
        self.send(wire.Promote(generation, "/run/manager.sock", world, drills, hints or {}))

    def progress(self) -> Progress | None:
        return self.reader.read()

    def wait(self) -> tuple[int, str, str]:
        """Exit status, stdout, stderr."""
        out, err = self.process.communicate(timeout=_DEADLINE_S)
        return self.process.returncode, out, err

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGKILL)
            self.process.wait(_DEADLINE_S)
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()
        self.channel.close()
        self.reader.close()
        os.close(self.progress_fd)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder whose path leaves room for the name of a socket (107 bytes), wherever pytest keeps its
    folders."""
    with tempfile.TemporaryDirectory(prefix="leto-", dir="/tmp") as folder:
        yield Path(folder)


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., FakeAgent]]:
    """Start trainers from source text; they are killed at the end of the test."""
    agents: list[FakeAgent] = []

    def start_trainer(source: str, **place: int) -> FakeAgent:
        script = tmp_path / f"trainer{len(agents)}.py"
        script.write_text(textwrap.dedent(source))
        agent = FakeAgent(script, tmp_path, **place)
        agents.append(agent)
        return agent

    yield start_trainer
    for agent in agents:
        agent.close()
