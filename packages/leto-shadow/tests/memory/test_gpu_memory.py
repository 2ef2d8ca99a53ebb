"""The hook under PyTorch itself on a GPU: unmodified allocator, real contexts, shadows that are really
killed."""

from __future__ import annotations

import json
import os
import select
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from leto_shadow import oom_hook, oom_protocol

HERE = Path(__file__).parent
GIB = 1 << 30
SHADOWS, SHADOW_BYTES, LEFT = 5, 3 * GIB, 2 * GIB

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not Path("/dev/nvidiactl").exists(), reason="no NVIDIA GPU"),
]


class Trainer:
    """A process with PyTorch and the hook; this test is its agent and owns the shadows."""

    def __init__(self, hook: Path) -> None:
        self.agent, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        environment = {**os.environ, oom_hook.FD_VARIABLE: str(theirs.fileno())}
        oom_hook.preload(environment, hook)
        command = [sys.executable, str(HERE / "torch_program.py")]
        pipe = subprocess.PIPE
        self.shadows = [
            subprocess.Popen([*command, str(SHADOW_BYTES)], stdout=pipe, text=True) for _ in range(SHADOWS)
        ]
        self.process = subprocess.Popen(
            command, env=environment, stdin=pipe, stdout=pipe, text=True, pass_fds=(theirs.fileno(),)
        )
        theirs.close()
        for shadow in self.shadows:
            assert shadow.stdout is not None
            json.loads(shadow.stdout.readline())
        self.reports: list[oom_protocol.Report] = []
        self.seconds = 0.0

    def do(self, what: str, **more: Any) -> Any:
        """Run one command; ends a shadow whenever the hook asks."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(json.dumps({"do": what, **more}) + "\n")
        self.process.stdin.flush()
        while True:
            ready = select.select([self.process.stdout, self.agent], [], [], 60.0)[0]
            assert ready, "the program does not answer"
            if self.agent not in ready:
                answer = json.loads(self.process.stdout.readline())
                self.seconds = answer["seconds"]
                return answer["result"]
            message = oom_protocol.decode(self.agent.recv(1024))
            if isinstance(message, oom_protocol.Report):
                self.reports.append(message)
                continue
            verdict = oom_protocol.Verdict.NONE
            if self.shadows:
                verdict = oom_protocol.Verdict.GONE
                self.end(self.shadows.pop())
            self.agent.send(oom_protocol.encode_answer(message.sequence, verdict, 0.5))

    def squeeze(self) -> int:
        """Fill the device but for `LEFT`; return how many shadows are alive."""
        assert self.do("clear") == "ok"
        assert self.do("squeeze", leave=LEFT) == "ok"
        return len(self.shadows)

    @staticmethod
    def end(process: subprocess.Popen[str]) -> None:
        process.kill()
        process.wait(60.0)
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                pipe.close()

    def close(self) -> None:
        for process in (*self.shadows, self.process):
            self.end(process)
        self.agent.close()


@pytest.fixture(scope="module")
def trainer(hook: Path) -> Iterator[Trainer]:
    started = Trainer(hook)
    yield started
    started.close()


def test_the_allocations_of_pytorch_pass_through_the_hook(trainer: Trainer) -> None:
    assert trainer.do("allocate", size=64 << 20) == "ok"
    assert trainer.do("check") == "ok"
    free, total, spare = trainer.do("measure")
    assert 0 < free < total
    assert spare == trainer.do("measure")[2]


def test_a_flush_comes_before_a_reclaim(trainer: Trainer) -> None:
    alive = trainer.squeeze()
    assert trainer.do("cache", size=LEFT - GIB // 2) == "ok"
    assert trainer.do("allocate", size=LEFT - GIB // 4) == "ok"
    assert len(trainer.shadows) == alive


@pytest.mark.parametrize("where", ["allocate", "backward", "capture"])
def test_a_shadow_makes_room(trainer: Trainer, where: str) -> None:
    """On the main thread, on a backward thread, inside the capture of a CUDA graph."""
    alive = trainer.squeeze()
    assert trainer.do(where, size=LEFT + SHADOW_BYTES // 2) == "ok"
    assert len(trainer.shadows) == alive - 1
    report = trainer.reports[-1]
    assert report.satisfied
    assert report.freed_bytes > SHADOW_BYTES
    print(f"{where}: {report.freed_bytes >> 20} MiB in {report.waited_s * 1000:.0f} ms", file=sys.stderr)


def test_a_memory_fraction_is_the_trainers_own_limit(trainer: Trainer) -> None:
    alive = trainer.squeeze()
    assert trainer.do("fraction", fraction=0.01) == "ok"
    assert trainer.do("allocate", size=GIB).startswith("OutOfMemoryError: CUDA out of memory")
    assert trainer.do("fraction", fraction=1.0) == "ok"
    assert len(trainer.shadows) == alive


def test_what_no_device_could_hold_costs_no_shadow(trainer: Trainer) -> None:
    alive = trainer.squeeze()
    assert trainer.do("allocate", size=1 << 42).startswith("OutOfMemoryError: CUDA out of memory")
    assert len(trainer.shadows) == alive


def test_a_real_oom_surfaces_with_pytorchs_own_words(trainer: Trainer) -> None:
    trainer.squeeze()
    while trainer.shadows:
        trainer.end(trainer.shadows.pop())
    trainer.squeeze()
    asked = len(trainer.reports)
    result = trainer.do("allocate", size=2 * LEFT)
    assert result.startswith("OutOfMemoryError: CUDA out of memory. Tried to allocate 4.00 GiB")
    assert trainer.do("allocate", size=GIB) == "ok"  # and training may go on
    report = trainer.reports[asked]
    assert not report.satisfied
    print(f"real OOM: after {report.waited_s * 1000:.1f} ms", file=sys.stderr)


def test_expandable_segments_are_refused_at_run_time(trainer: Trainer) -> None:
    assert trainer.do("clear") == "ok"
    assert trainer.do("expandable") == "ok"
    assert trainer.do("check").startswith("OomHookError: expandable segments were turned on")
