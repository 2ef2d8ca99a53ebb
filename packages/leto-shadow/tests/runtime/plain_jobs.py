"""The plain PyTorch examples as jobs of tests, held until the test goes on; and the bits to end with."""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from leto_shadow.events import Event, EventReader

torch = pytest.importorskip("torch")

HELD = Path(__file__).with_name("held.py")
POOL = ("--page-bytes", "16384", "--data-pages", "48", "--tier1", "6")
ITERATIONS = 260
HELD_AT = 240
"""Nobody goes further before the test has done what it does."""
DEADLINE_S = 200.0


@functools.cache
def reference(iterations: int) -> dict[str, Any]:
    """Both ranks of the example in one process, in plain torch: nothing of Leto, nothing distributed.

    It is the same for all tests of a session, and is not to be written to.
    """
    from torch import nn

    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Dropout(0.1), nn.Linear(256, 1))
    torch.manual_seed(1)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.05)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0, foreach=False)
    states = []
    for rank in range(2):
        torch.manual_seed(1000 + rank)
        states.append(torch.get_rng_state())
    for _ in range(iterations):
        grads = []
        for rank in range(2):
            torch.set_rng_state(states[rank])
            optimizer.zero_grad()
            x = torch.randn(32, 64)
            nn.functional.mse_loss(model(x), x.square().mean(1, keepdim=True)).backward()
            grads.append([parameter.grad for parameter in model.parameters()])
            states[rank] = torch.get_rng_state()
        for parameter, first, second in zip(model.parameters(), *grads, strict=True):
            parameter.grad = (first + second) / 2
        optimizer.step()
    return dict(model.state_dict())


def assert_plain_bits(finals: Sequence[Path], iterations: int, note: str = "") -> None:
    """Each rank's final state has the bits of plain PyTorch in one process."""
    torch.set_num_threads(1)
    expected = reference(iterations)
    for rank, path in enumerate(finals):
        final = torch.load(path)
        assert final.keys() == expected.keys()
        for name, value in expected.items():
            assert torch.equal(final[name], value), f"{name} of rank {rank} differs{note}"


class Job:
    """The example under `leto run`, held before iteration HELD_AT; and what it has told so far."""

    def __init__(
        self, spawn: Callable[..., subprocess.Popen[bytes]], folder: Path, run_dir: Path, *options: str
    ) -> None:
        self.run_dir, self.folder, self.output = run_dir, folder, folder / "job.out"
        self.seen: list[Event] = []
        self._reader = EventReader(run_dir / "events.jsonl")
        command = [sys.executable, "-m", "leto_shadow.cli", "run", "--nproc-per-node", "2", *POOL]
        command += ["--hang-initial-s", "300", "--hang-min-s", "300", "--run-dir", str(run_dir), *options]
        command += [str(HELD), "--iterations", str(ITERATIONS), "--save", str(folder / "final")]
        held = {"HOLD_AT": str(HELD_AT), "HOLD_S": "3600", "HOLD_UNTIL": str(folder / "go-on")}
        with open(self.output, "wb") as output:
            self.process = spawn(command, stdout=output, stderr=subprocess.STDOUT, env={**os.environ, **held})

    def read(self) -> None:
        self.seen += self._reader.poll()

    def until(self, what: Callable[[], Any]) -> Any:
        """Read events until ``what`` returns something true; fail with what the job said."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            over = self.process.poll() is not None  # before the look: what it told last is seen
            self.read()
            if found := what():
                return found
            if over or time.monotonic() > deadline:
                pytest.fail(
                    f"never came to pass; exit {self.process.poll()}: {self.output.read_text()[-4000:]}; "
                    f"last events: {self.seen[-5:]}"
                )
            time.sleep(0.005)  # another process appends to a file: there is no event to wait for

    def events(self, name: str, generation: int | None = None) -> list[Event]:
        return [
            event
            for event in self.seen
            if event["event"] == name and generation in (None, event.get("generation"))
        ]

    def finish(self) -> None:
        """Let it go on to its end."""
        (self.folder / "go-on").touch()
        code = self.process.wait(DEADLINE_S)
        assert code == 0, self.output.read_text()
        self.read()

    def assert_exact(self, seed: int) -> None:
        assert_plain_bits([self.folder / f"final.{rank}" for rank in range(2)], ITERATIONS, f" (seed {seed})")
