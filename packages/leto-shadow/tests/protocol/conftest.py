"""Run real jobs: an agent, its managers and trainers, in a run directory of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from leto_shadow import control
from leto_shadow.events import Event, read_events

SCRIPTS = Path(__file__).parent / "scripts"
SMALL_POOL = ("--page-bytes", "4096", "--data-pages", "8", "--tier1-pages", "2")


class Job:
    """One agent, or torchrun with agents below it, and what it leaves behind."""

    def __init__(self, job_id: str, run_dir: Path, command: list[str], env: dict[str, str]) -> None:
        self.job_id = job_id
        self.run_dir = run_dir
        self.output = run_dir.with_suffix(".out")
        with open(self.output, "wb") as output:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )

    def wait(self, timeout_s: float = 90.0) -> int:
        """Wait for the end and return the exit code."""
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not ended after {timeout_s} s:\n{self.text()}") from None

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def events(self, name: str | None = None) -> list[Event]:
        path = self.run_dir / "events.jsonl"
        found = read_events(path) if path.exists() else []
        return [event for event in found if name in (None, event["event"])]

    def until(self, what: Callable[[], Any], timeout_s: float = 60.0) -> Any:
        """Poll until ``what`` returns something true; fail with the job's output after the deadline."""
        deadline = time.monotonic() + timeout_s
        while not (found := what()):
            if time.monotonic() > deadline or self.process.poll() is not None:
                raise AssertionError(f"never came to pass; exit {self.process.poll()}\n{self.text()}")
            time.sleep(0.02)
        return found

    def status(self, node: int = 0) -> dict[str, Any]:
        reply = control.ask(self.run_dir / f"agent-{node}.sock", control.StatusRequest(), timeout_s=20.0)
        assert isinstance(reply, control.StatusReply)
        return reply.status

    def ask(self, request: control.Request, node: int = 0) -> control.Reply:
        reply = control.ask(self.run_dir / f"agent-{node}.sock", request, timeout_s=20.0)
        assert isinstance(reply, control.Reply)
        return reply

    def trainers(self, role: str) -> dict[int, dict[str, Any]]:
        """Trainers of node 0 in a role, by rank."""
        return {one["rank"]: one for one in self.status()["trainers"] if one["role"] == role}

    def pids(self) -> list[int]:
        """All living processes of the job's trainers, with what they started, and of its managers."""
        wanted = f"LETO_JOB_ID={self.job_id}".encode()
        manager = f"--job-id\0{self.job_id}\0".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal():
                continue
            try:
                ours = wanted in (entry / "environ").read_bytes().split(b"\0")
                command = (entry / "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            if ours or (b"leto_rmp.manager" in command and manager in command):
                found.append(int(entry.name))
        return found

    def assert_nothing_left(self, timeout_s: float = 10.0) -> None:
        """I-7: no process, no socket, no file but logs and events."""
        deadline = time.monotonic() + timeout_s

        def left() -> list[Any]:
            names = {path.name for path in self.run_dir.iterdir()} - {"events.jsonl", "logs"}
            return [*self.pids(), *names]

        while left() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert left() == []

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pid in self.pids():
            os.kill(pid, signal.SIGKILL)


@pytest.fixture
def start_job(tmp_path: Path) -> Iterator[Callable[..., Job]]:
    """Start jobs: ``start_job("name", *options_and_script, ranks=2, torchrun=())``."""
    jobs: list[Job] = []

    def start(
        name: str,
        *arguments: str,
        ranks: int = 2,
        torchrun: tuple[str, ...] | None = None,
        launcher: tuple[str, ...] = (),
        run_dir: Path | None = None,
        script: tuple[str, ...] = (str(SCRIPTS / "counter.py"),),
    ) -> Job:
        run_dir = run_dir or tmp_path / name
        job_id = f"test-{os.getpid()}-{name}"
        env = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("TORCHELASTIC", "LETO_"))
        }
        env["PYTHONPATH"] = os.pathsep.join([str(SCRIPTS), env.get("PYTHONPATH", "")]).rstrip(os.pathsep)
        split = list(arguments).index("--")
        options, rest = list(arguments[:split]), list(arguments[split + 1 :])
        agent = ["-m", "leto_shadow.agent_main", "--local-ranks", str(ranks), "--job-id", job_id]
        agent += ["--run-dir", str(run_dir), "--decide", "counter:decide", *SMALL_POOL, *options]
        agent += [*script, *rest]
        command = [sys.executable, *launcher, *agent]
        if torchrun is not None:
            command = [sys.executable, "-m", "leto_shadow.launcher", "--nproc-per-node", "1", *torchrun]
            command += ["--no-python", sys.executable, *agent]
        job = Job(job_id, run_dir, command, env)
        jobs.append(job)
        return job

    yield start
    for job in jobs:
        job.end()
