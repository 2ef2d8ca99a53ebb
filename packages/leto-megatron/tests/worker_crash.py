"""Rank function: stop one Megatron iteration at many places of its update, recover each time, compare.

One process and plain memory instead of a manager, so that a crash costs milliseconds: the updater object and
all of Megatron's objects are dropped, the arrays stay.
"""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from worker_modes import digest, join, settings

from leto_megatron import model, process, records
from leto_megatron.config import Config
from leto_megatron.jobstate import JobState
from leto_megatron.optimizer import ResumableStep, UpdaterStorage, make_plan, rebuild_parameters
from leto_megatron.pretrain import group_lr
from leto_megatron.shards import owned_shards
from leto_megatron.storage import Skeleton
from leto_rmp import PageRef, PoolConfig
from leto_rmu import Action, ArrayMemory, Executor, ResumableUpdater, decide
from leto_rmu.faults import StopAt, Stopped

POOL = PoolConfig(page_bytes=4096, data_pages=12, tier1_pages=3, tier2_pages=1)


class Life:
    """One trainer process as far as the job can tell: built, bound, recovered, then stopped or finished."""

    def __init__(self, config: Config, memory: ArrayMemory, executor: Executor) -> None:
        self.config = config
        skeleton = Skeleton(config)
        self.updater = ResumableUpdater(
            memory,
            make_plan(skeleton.layout, POOL, config.scheme_on(POOL)),
            dist.barrier,
            rebuild_derived=lambda up: rebuild_parameters(self.parts, up),
            executor=executor,
        )
        self.storage = UpdaterStorage(self.updater)
        self.parts = skeleton.bind(self.storage)
        self.compute = model.Compute(config, self.parts, lending=self.updater.lending)
        self.step = ResumableStep(config, self.parts, self.updater, lambda _phase: None)
        decision = decide([self.updater.summary()])
        recovered = self.updater.recover(decision)
        self.action = recovered.action
        if recovered.action is Action.FRESH:
            skeleton.initialize(self.parts, self.storage)
            self.state = JobState.first(config)
            self.updater.initialize(0, self.state.encode())
            self.state.restore_rng()
        else:
            assert recovered.action in (Action.RESTART, Action.FINISH), recovered
            self.state = JobState.decode(recovered.job_state)
            # A shadow was initialised long before and has drawn numbers of its own since (case 11).
            random.random()
            np.random.random()
            torch.rand(3)
            self.state.restore(self.parts.scheduler)

    def iterate(self) -> dict[str, Any]:
        self.updater.compute_begins()
        lr = group_lr(self.parts.optimizer)
        loss = self.compute(self.state.iteration)
        after = JobState.capture(
            self.config, self.compute.data_parallel, self.state, loss, lr, self.compute.batch_digest
        )
        norm = self.step(after.encode())
        self.state = after
        return after.record(norm)

    def final(self) -> dict[str, str]:
        for shard in owned_shards(self.parts.ddp, self.parts.optimizer):
            shard.moments()["step"] = torch.tensor(float(self.updater.steps))
        read = self.updater.read if self.storage.moves else None
        return digest(dict(records.final_state(self.parts, self.state.entries(), read)))


def crash_points(rank: int, world: int, folder: str, changes: dict[str, Any], seed: int, points: int) -> Any:
    """Crash in the second iteration at `points` operations, with losses; return what differed."""
    config = settings({"iterations": 3, "warmup_ratio": 0.4, **changes})
    join(config, rank, world, folder, "crash")
    # The truth is that of a run in which nothing is lent.
    life = Life(dataclasses.replace(config, lend_bytes=0), ArrayMemory(POOL), Executor())
    lines = [life.iterate() for _ in range(config.iterations)]
    truth = life.final()

    counter = StopAt()
    life = Life(config, ArrayMemory(POOL), counter)
    life.iterate()
    first = counter.count
    life.iterate()
    last = counter.count
    rng = np.random.default_rng(seed)
    chosen = sorted({first, last - 1, *rng.integers(first, last, points).tolist()})
    wrong, actions, lent = [], [], 0
    for stop in chosen:
        torn = int(rng.integers(1 << 30))
        memory = ArrayMemory(POOL)
        try:
            life = Life(config, memory, StopAt(stop, seed=torn))
            life.iterate()
            life.iterate()
            raise AssertionError(f"operation {stop} was not reached")
        except Stopped:
            pass
        del life
        arena = memory.regions["arena"]
        group = int(rng.integers(len(arena.groups)))
        pages = rng.choice(
            arena.groups[group].pages, size=min(POOL.tier1_pages, len(arena.groups[group].pages))
        )
        memory.lose([PageRef("arena", "data", int(k)) for k in set(pages.tolist())], seed=torn)
        life = Life(config, memory, Executor())
        actions.append(str(life.action))
        got = {life.state.iteration - 1: life.state.record(life.updater.last_sync.grad_norm)}
        while life.state.iteration < config.iterations:
            line = life.iterate()
            got[line["iteration"]] = line
        lent = max(lent, life.updater.lender.held)
        if any(lines[k] != line for k, line in got.items()) or life.final() != truth:
            wrong.append({"stop": stop, "torn": torn, "group": group})
    process.leave_groups()
    return {
        "points": len(chosen),
        "operations": last - first,
        "wrong": wrong,
        "lent": lent,
        "actions": sorted(set(actions)),
    }
