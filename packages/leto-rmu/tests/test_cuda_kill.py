"""Real GPU trainers, real SIGKILL, real state manager, pages lost in between: bit-equal (I-1, I-2)."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from leto_rmp import Client, PageRef, Role, spawn_manager

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(300)]

LAB = Path(__file__).with_name("cuda_kill_lab.py")
SEED = 20
DEADLINE_S = 90.0


class Trainer:
    def __init__(self, socket: Path, generation: int, until: int, tear_at: int | None = None) -> None:
        command = [sys.executable, str(LAB), "--socket", str(socket), "--generation", str(generation)]
        command += ["--until", str(until)]
        if tear_at is not None:
            command += ["--tear-at", str(tear_at), "--seed", str(SEED)]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)

    def found(self) -> dict[str, object]:
        """What it found and recovered; it has compared every byte."""
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], DEADLINE_S)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            self.process.kill()
            pytest.fail(f"the trainer said nothing; status {self.process.wait()}", pytrace=False)
        print(line.strip())
        found: dict[str, object] = json.loads(line)
        return found

    def ends(self, status: int, kill_after_s: float | None = None) -> None:
        pidfd = os.pidfd_open(self.process.pid)
        try:
            if kill_after_s is not None:
                select.select([pidfd], [], [], kill_after_s)
                self.process.send_signal(signal.SIGKILL)
            select.select([pidfd], [], [], DEADLINE_S)
        finally:
            os.close(pidfd)
            if self.process.poll() is None:
                self.process.kill()
        assert self.process.stdout is not None
        self.process.stdout.close()
        assert self.process.wait() == status


def test_a_killed_gpu_trainer_is_resumed_by_a_fresh_one(tmp_path: Path) -> None:
    """Torn in the middle of an update, then killed at a random instant, each with pages lost."""
    sys.path.insert(0, str(LAB.parent))
    from cuda_kill_lab import CONFIG

    rng = np.random.default_rng(SEED)
    print(f"seed {SEED}")
    with (
        spawn_manager(tmp_path / "rank0", "gpu-kill", 0, CONFIG, timeout_s=60.0) as manager,
        Client.connect(manager.socket_path, timeout_s=60.0) as control,
    ):
        control.attach(Role.CONTROL, 0)

        def lose() -> int:
            """Two pages of every group, a page of U, a parity page; within tolerance wherever it died."""
            pages = [0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]  # of masters and exp_avg
            refs = [PageRef("arena", "data", int(k)) for g in pages for k in rng.choice(g, 2, replace=False)]
            refs += [PageRef("undo", "data", int(rng.integers(6)))]
            refs += [PageRef("arena", "tier1", int(rng.integers(12)))]
            refs += [PageRef("grads", "data", 1)]
            control.inject_lose(refs, seed=int(rng.integers(2**31)))
            control.localize(read=False)
            control.remap()
            return len(refs)

        # Ops of an iteration: 5 before the groups, 14 in each of two groups. The torn one: an update.
        first = Trainer(manager.socket_path, 1, 100, tear_at=2 * 35 + 5 + 9)
        assert first.found()["action"] == "fresh"
        first.ends(-signal.SIGKILL)
        lose()

        second = Trainer(manager.socket_path, 2, 100)
        found = second.found()
        assert found["action"] in ("finish", "restart")
        assert found["verified"]
        assert int(str(found["pages"])) >= 4
        second.ends(-signal.SIGKILL, kill_after_s=float(rng.uniform(0.2, 1.0)))
        lose()

        third = Trainer(manager.socket_path, 3, 100)
        again = third.found()
        assert again["action"] in ("finish", "restart")
        assert int(str(again["iteration"])) >= int(str(found["iteration"]))
        third.ends(-signal.SIGKILL, kill_after_s=float(rng.uniform(0.2, 1.0)))

        fourth = Trainer(manager.socket_path, 4, int(str(again["iteration"])) + 2)
        assert fourth.found()["action"] in ("finish", "restart")
        fourth.ends(0)
