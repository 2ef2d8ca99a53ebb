"""Run real jobs: an agent, its managers and trainers, in a run directory of their own."""

from __future__ import annotations

import contextlib
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
sys.path.insert(0, str(SCRIPTS.parent))  # torchruns, imported by the tests by that name
SMALL_POOL = ("--page-bytes", "4096", "--data-pages", "8", "--tier1-pages", "2")
DEADLINE_S = 150.0
"""Of everything here. A machine under load is not a bug."""
PATIENT = (
    "--hang-initial-s",
    "600",
    "--hang-min-s",
    "600",
    "--hang-max-s",
    "600",
    "--deadline-demote-s",
    "300",
)
PATIENT += ("--deadline-classify-s", "60", "--deadline-exit-s", "100")
"""Nor is it what a job of these tests recovers from; one that is about such a deadline gives its own."""


class Job:
    """One agent, or torchrun with agents below it, and what it leaves behind."""

    def __init__(
        self,
        spawn: Callable[..., subprocess.Popen[bytes]],
        job_id: str,
        run_dir: Path,
        output_to: Path,
        command: list[str],
        env: dict[str, str],
    ) -> None:
        self.job_id = job_id
        self.run_dir = run_dir
        self.output = output_to
        with open(self.output, "wb") as output:
            self.process = spawn(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=env,
                start_new_session=True,
            )

    def wait(self) -> int:
        """Wait for the end and return the exit code."""
        try:
            return self.process.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"not ended after {DEADLINE_S} s:\n{self.text()}") from None

    def text(self) -> str:
        return self.output.read_text(errors="replace")

    def events(self, name: str | None = None) -> list[Event]:
        path = self.run_dir / "events.jsonl"
        found = read_events(path) if path.exists() else []
        return [event for event in found if name in (None, event["event"])]

    def until(self, what: Callable[[], Any]) -> Any:
        """Poll until ``what`` returns something true; fail with what the job said after the deadline."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            over = self.process.poll() is not None  # before the question: what it did last is seen
            if found := what():
                return found
            if over or time.monotonic() > deadline:
                raise AssertionError(
                    f"never came to pass; exit {self.process.poll()}\n{self.text()}\n"
                    f"last events: {self.events()[-12:]}"
                )
            time.sleep(0.02)

    def status(self, node: int = 0) -> dict[str, Any]:
        reply = control.ask(self.run_dir / f"agent-{node}.sock", control.StatusRequest(), timeout_s=60.0)
        assert isinstance(reply, control.StatusReply)
        return reply.status

    def ask(self, request: control.Request, node: int = 0) -> control.Reply:
        reply = control.ask(self.run_dir / f"agent-{node}.sock", request, timeout_s=60.0)
        assert isinstance(reply, control.Reply)
        return reply

    def trainers(self, role: str) -> dict[int, dict[str, Any]]:
        """Trainers of node 0 in a role, by rank."""
        return {one["rank"]: one for one in self.status()["trainers"] if one["role"] == role}

    def pids(self, *, agents: bool = False) -> list[int]:
        """All living processes of the job's trainers, with what they started, and of its managers.

        ``agents``: and of its agents and torchruns.
        """
        wanted = f"LETO_JOB_ID={self.job_id}".encode()
        named = f"--job-id\0{self.job_id}\0".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if not entry.name.isdecimal():
                continue
            try:
                ours = wanted in (entry / "environ").read_bytes().split(b"\0")
                command = (entry / "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            if ours or (named in command and (agents or b"leto_rmp.manager" in command)):
                found.append(int(entry.name))
        return found

    def assert_nothing_left(self) -> None:
        """I-7: no process, no socket, no file but logs and events."""
        deadline = time.monotonic() + DEADLINE_S

        def left() -> list[Any]:
            names = {path.name for path in self.run_dir.iterdir()} - {"events.jsonl", "logs"}
            return [*self.pids(agents=True), *names]

        while left() and time.monotonic() < deadline:
            time.sleep(0.02)
        assert left() == [], self.text()

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        deadline = time.monotonic() + DEADLINE_S
        while (left := self.pids(agents=True)) and time.monotonic() < deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.02)


@pytest.fixture
def start_job(tmp_path: Path, spawn: Callable[..., subprocess.Popen[bytes]]) -> Iterator[Callable[..., Job]]:
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
        agent += ["--run-dir", str(run_dir), "--decide", "counter:decide", *SMALL_POOL, *PATIENT, *options]
        agent += [*script, *rest]
        command = [sys.executable, *launcher, *agent]
        if torchrun is not None:
            command = [sys.executable, "-m", "leto_shadow.launcher", "--nproc-per-node", "1", *torchrun]
            command += ["--no-python", sys.executable, *agent]
        job = Job(spawn, job_id, run_dir, tmp_path / f"{name}-{len(jobs)}.out", command, env)
        jobs.append(job)
        return job

    yield start
    for job in jobs:
        job.end()
