"""Kill a real trainer at random instants, over memory that a real state manager holds; see test_kill.py.

    python packages/leto-rmu/tests/kill_lab.py --seed 1 --kills 200 --losses

A warm parent forks one trainer after the other. Each attaches as the writer of a new generation, recovers,
is compared bit for bit with an uninterrupted torch.optim run, trains on, and is SIGKILLed: by the parent
at a random instant, or by itself in the middle of a random operation, torn. In between, pages may be lost.
Prints one JSON object; exit status 0 only if every comparison was exact.
"""

from __future__ import annotations

import argparse
import json
import os
import select
import signal
import struct
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import NoReturn

import numpy as np
import torch
from rmu_lab import World

from leto_rmp import Client, PageRef, PoolConfig, Role, spawn_manager
from leto_rmu import Action, Executor, Op, ResumableUpdater, Segment, decide
from leto_rmu.faults import TearAndKill

DEADLINE_S = 60.0
REPORT = struct.Struct("<qq16s16s")  # iteration found, pages reconstructed, phase, action


class SlowWorld(World):
    """Gradients arrive in many small writes, so that kills hit the compute phase too."""

    def begin(self, up: ResumableUpdater) -> None:
        super().begin(up)
        for _ in range(30):
            for part, new in zip(up.grads.chunk(16), self.gradient(up.iteration).chunk(16), strict=True):
                part.copy_(new)


def world_of(scheme: str) -> SlowWorld:
    return SlowWorld(
        pool=PoolConfig(  # type: ignore[arg-type]
            page_bytes=4096, data_pages=12 if scheme == "undo" else 16, tier1_pages=6, tier2_pages=1
        ),
        segments=(Segment("a", 5000, 0, 0), Segment("b", 3333, 1, 5120), Segment("c", 6001, 0, 8500)),
        grad_numel=15000,
        grad_dtype=torch.bfloat16,
        model_bytes=20000,
        no_ops=frozenset(range(5, 100000, 17)),
        scheme=scheme,
    )


WORLD = world_of("undo")


class KillAtCount(TearAndKill):
    """Tear op number ``count`` (from 0) and die."""

    def __init__(self, count: int, seed: int) -> None:
        super().__init__(Executor(), match=self._counted, seed=seed)
        self._left = count

    def _counted(self, op: Op) -> bool:
        self._left -= 1
        return self._left < 0


def trainer(socket: Path, generation: int, pipe: int, until: int, tear_at: int | None, seed: int) -> None:
    """One trainer's life, in the forked child."""
    client = Client.connect(socket)
    client.attach(Role.WRITER, generation)
    executor = Executor() if tear_at is None else KillAtCount(tear_at, seed)
    up = ResumableUpdater(client, WORLD.plan, lambda: None, WORLD.derive, executor)
    summary = up.summary()
    phase = up.position().phase or "none"
    recovered = up.recover(decide([summary]))
    if recovered.action is Action.FRESH:
        assert phase == "none", f"state at {phase} was given up: {recovered.reason}"
        for s in WORLD.plan.segments:
            up.write(s.name, "master", WORLD.initial(s.name))
        up.initialize(0, WORLD.job(0))
    memory = SimpleNamespace(regions=up.memory.regions, marks=client.marks())
    WORLD.check(memory, up)  # type: ignore[arg-type]
    os.write(
        pipe,
        REPORT.pack(up.iteration, recovered.pages_reconstructed, phase.encode(), recovered.action.encode()),
    )
    WORLD.train(up, until)
    WORLD.check(memory, up)  # type: ignore[arg-type]


def fork_trainer(*args: object) -> tuple[int, int]:
    """Fork; return (pidfd, read end of the report pipe)."""
    reading, writing = os.pipe2(os.O_CLOEXEC)
    pid = os.fork()
    if pid == 0:
        _child(reading, writing, args)
    os.close(writing)
    return pid, reading


def _child(reading: int, writing: int, args: tuple[object, ...]) -> NoReturn:
    code = 1
    try:
        os.close(reading)
        socket, generation, *rest = args
        trainer(socket, generation, writing, *rest)  # type: ignore[arg-type]
        code = 0
    except BaseException:  # noqa: BLE001 - the parent sees the status, the log has the reason
        traceback.print_exc()
    os._exit(code)


def reap(pid: int, reading: int) -> tuple[int, tuple[int, int, str, str] | None]:
    raw = os.read(reading, REPORT.size)
    os.close(reading)
    _, status = os.waitpid(pid, 0)
    if len(raw) != REPORT.size:
        return status, None
    iteration, pages, phase, action = REPORT.unpack(raw)
    return status, (iteration, pages, phase.rstrip(b"\0").decode(), action.rstrip(b"\0").decode())


def losses(rng: np.random.Generator) -> list[PageRef]:
    """Pages of every kind that are within tolerance wherever the trainer was killed."""
    plan = WORLD.plan
    sizes = {
        ("arena", "data"): plan.planes * plan.plane_pages,
        ("arena", "tier1"): plan.groups * 6,
        ("arena", "tier2"): plan.groups,
        **({("undo", "data"): plan.pages_per_chunk} if plan.scheme == "undo" else {}),
        ("grads", "data"): max(max(g) for g in plan.grad_groups),
        ("grad_parity", "data"): 6 * len(plan.grad_groups),
        ("model", "data"): 5,
    }
    found = []
    for (name, section), size in sizes.items():
        chosen = rng.choice(size, size=min(size, int(rng.integers(3))), replace=False)
        found += [PageRef(name, section, int(k)) for k in chosen]  # type: ignore[arg-type]
    found += [PageRef("parity_ring", "data", slot * 6 + int(rng.integers(6))) for slot in range(4)]
    lost_replica = int(rng.integers(3))
    found += [
        PageRef("marker", "data", lost_replica * plan.marker_pages + k) for k in range(plan.marker_pages)
    ]
    found += [
        PageRef("job_state", "data", (slot * 3 + lost_replica) * plan.job_pages + k)
        for slot in (0, 1)
        for k in range(plan.job_pages)
    ]
    return sorted(set(found))


def run(seed: int, kills: int, with_losses: bool, directory: Path) -> dict[str, object]:
    rng, seen = np.random.default_rng(seed), Counter()
    iteration = pages = lost = 0
    config = WORLD.plan.config
    with spawn_manager(directory / "rank0", f"kill-lab-{seed}", 0, config) as manager:
        control = Client.connect(manager.socket_path)
        control.attach(Role.CONTROL, 0)
        for k in range(kills + 1):
            last = k == kills
            WORLD.arena(iteration + 60)  # the children inherit what they will be compared with
            until = iteration + (3 if last else 50)
            tear_at = int(rng.integers(150)) if k % 2 and not last else None
            pid, reading = fork_trainer(manager.socket_path, k + 1, until, tear_at, int(rng.integers(2**31)))
            pidfd = os.pidfd_open(pid)
            try:
                if tear_at is None and not last:
                    if k % 4:  # let it recover first, otherwise kill in connect, attach and recovery as well
                        select.select([reading, pidfd], [], [], DEADLINE_S)
                    select.select([pidfd], [], [], float(rng.exponential(0.012)))
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                if not select.select([pidfd], [], [], DEADLINE_S)[0]:
                    signal.pidfd_send_signal(pidfd, signal.SIGKILL)
                    raise TimeoutError(f"trainer {k} did not end")
            finally:
                os.close(pidfd)
                status, report = reap(pid, reading)
            if os.WIFEXITED(status) and os.WEXITSTATUS(status) != 0:
                raise AssertionError(f"trainer {k} failed (found {report}): see its traceback above")
            seen["killed" if os.WIFSIGNALED(status) else "ended"] += 1
            if report is not None:
                iteration, pages = report[0], pages + report[1]
                seen[report[2]] += 1
                seen[report[3]] += 1
            if with_losses and k % 3 == 0 and k > 3 and not last:
                refs = losses(rng)
                control.inject_lose(refs, seed=int(rng.integers(2**31)))
                control.localize()
                control.remap()
                lost += len(refs)
        control.close()
    return {
        "seed": seed,
        "iteration": iteration,
        "lost": lost,
        "reconstructed": pages,
        **dict(sorted(seen.items())),
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--losses", action="store_true")
    parser.add_argument("--scheme", choices=("undo", "slots"), default="undo")
    options = parser.parse_args()
    global WORLD
    WORLD = world_of(options.scheme)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="leto-kill-") as directory:
        print(json.dumps(run(options.seed, options.kills, options.losses, Path(directory))))
    return 0


if __name__ == "__main__":
    sys.exit(main())
