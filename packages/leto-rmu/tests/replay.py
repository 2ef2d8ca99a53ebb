"""One random experiment: a configuration, an interleaving, up to three crashes with losses.

    python packages/leto-rmu/tests/replay.py '{"seed": 7, ...}'

repeats the experiment that a failing test of test_crash_random.py has printed.
"""

from __future__ import annotations

import sys

import msgspec
import numpy as np
import torch
from rmu_lab import Point, Pool, Recorder, World, Wrong, examine, loss_patterns, record_recovery, truth_of

from leto_rmu import SGD, Executor, Segment
from leto_rmu.faults import Stopped


class Case(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that an experiment depends on. ``crashes``: (op number, torn or not, name of the losses)."""

    seed: int
    tier1: int
    tier2: int
    chunks_per_group: int
    runs: int
    numels: tuple[int, ...]
    sgd: bool
    scheme: str
    align: bool
    grad_dtype: str
    before: int
    no_op: bool
    crashes: tuple[tuple[int, bool, str], ...]

    def world(self) -> World:
        rng = np.random.default_rng([self.seed, 1])
        planes = 2 if self.sgd else 3
        block = stride = planes  # pages and parity positions of what a chunk is made of
        if self.align:
            stride = 1 << (max(self.tier1, planes) - 1).bit_length()
            block = stride // planes * planes
        offsets, at = [0] * len(self.numels), int(rng.integers(50))
        for k in rng.permutation(len(self.numels)):  # gradients lie in another order, with gaps
            offsets[k] = at
            at += self.numels[k] + int(rng.integers(3)) * 30
        return World(
            seed=self.seed,
            pool=Pool(256, self.chunks_per_group * self.runs * stride + 1, self.tier1, self.tier2),
            segments=tuple(
                Segment(f"s{k}", numel, int(rng.integers(3)), offsets[k])
                for k, numel in enumerate(self.numels)
            ),
            optimizer=SGD() if self.sgd else None,
            grad_numel=at,
            grad_dtype=getattr(torch, self.grad_dtype),
            chunk_pages=self.runs * block,
            scheme=self.scheme,
            align=self.align,
            model_bytes=300,
            no_ops=frozenset({self.before if self.no_op else 0}),
        )


def run(case: Case) -> str:
    """Carry the experiment out; raise Wrong with the command that repeats it."""
    try:
        return _run(case)
    except Wrong as wrong:
        text = msgspec.json.encode(case).decode()
        raise Wrong(f"{wrong}\nrepeat with: python packages/leto-rmu/tests/replay.py '{text}'") from None


def _run(case: Case) -> str:
    world = case.world()
    memory, up = world.start()
    world.train(up, case.before)
    first, *later = case.crashes
    recorder = Recorder(
        memory, world, truth_of(world, up), np.random.default_rng(case.seed), 1, True, only=first[0]
    )
    up.executor = recorder
    try:
        world.iterate(up)
        recorder.points.append(Point("after the last op", memory.snapshot(), list(recorder.truth)))
    except Stopped:
        pass
    point = recorder.points[-1 if first[1] else 0]
    losses = _losses(case, world, 0, point)
    for number, (stop, torn, _) in enumerate(later, 1):
        points = record_recovery(
            world, memory, point, losses, seed=case.seed + number, tears=1, shuffle=True, only=stop
        )
        if not points:
            break  # refused: examine below judges whether that was right
        point = points[-1 if torn else 0]
        losses = _losses(case, world, number, point)
    outcome = examine(world, memory, point, losses, seed=case.seed, go_on=2, executor=Executor)
    return str(outcome.action)


def _losses(case: Case, world: World, number: int, point: Point) -> list:
    rng = np.random.default_rng([case.seed, 2, number])
    truth = point.truths[int(rng.integers(len(point.truths)))] if point.truths else None
    patterns = loss_patterns(world, rng, truth)
    return patterns[case.crashes[number][2]]


PATTERNS = tuple(loss_patterns(World(), np.random.default_rng(0)))

if __name__ == "__main__":
    torch.set_num_threads(1)
    print(run(msgspec.json.decode(sys.argv[1], type=Case)))
