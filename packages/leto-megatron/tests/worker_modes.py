"""Rank functions: train the same run in several ways and digest the end of each."""

from __future__ import annotations

import dataclasses
import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from ranks import store_path

from leto_megatron import model, process, records
from leto_megatron.config import PRESETS, Config, ConfigError
from leto_megatron.jobstate import JobState
from leto_megatron.optimizer import ResumableStep, UpdaterStorage, make_plan, rebuild_parameters
from leto_megatron.pretrain import group_lr, train_joined
from leto_megatron.shards import owned_shards
from leto_megatron.storage import Layout, Skeleton
from leto_rmp import PoolConfig
from leto_rmu import ArrayMemory, ResumableUpdater


def settings(changes: dict[str, Any]) -> Config:
    return dataclasses.replace(PRESETS["tiny"], **changes)


class ArrayStorage:
    """Plain numpy arrays behind the Storage protocol, filled with garbage first: nobody may rely on zeros."""

    moves = False

    def __init__(self, layout: Layout) -> None:
        generator = np.random.default_rng(7)
        self.grads = torch.from_numpy(generator.random(layout.grad_numel, dtype=np.float32))
        self.model = torch.from_numpy(generator.integers(0, 255, max(1, layout.model_bytes), dtype=np.uint8))
        self.arrays = {
            (shard.name, key): torch.from_numpy(generator.random(shard.numel, dtype=np.float32))
            for shard in layout.shards
            for key in ("master", "exp_avg", "exp_avg_sq")
        }

    def master(self, name: str) -> torch.Tensor:
        return self.arrays[name, "master"]

    def state(self, name: str, key: str) -> torch.Tensor:
        return self.arrays[name, key]

    def write(self, name: str, key: str, values: torch.Tensor) -> None:
        raise AssertionError("nothing moves here")


def join(config: Config, rank: int, world: int, folder: str, name: str) -> None:
    process.prepare_process()
    process.form_groups(config, dist.FileStore(store_path(folder, name), world), rank, world, timeout_s=300)


def loop(config: Config, parts: model.Parts) -> dict[str, Any]:
    """Megatron's own step, whatever lies under it."""
    compute = model.Compute(config, parts)
    state = JobState.first(config)
    lines = []
    for iteration in range(config.iterations):
        lr = group_lr(parts.optimizer)
        loss = compute(iteration)
        successful, grad_norm, _zeros = parts.optimizer.step()
        assert successful
        parts.scheduler.step(increment=1)
        state = JobState.capture(config, compute.data_parallel, state, loss, lr, compute.batch_digest)
        lines.append(state.record(grad_norm))
    return {"records": lines, "final": digest(dict(records.final_state(parts, state.entries())))}


def digest(state: dict[str, bytes]) -> dict[str, str]:
    return {name: hashlib.sha256(value).hexdigest() for name, value in state.items()}


def stock(rank: int, world: int, folder: str, changes: dict[str, Any]) -> dict[str, Any]:
    config = settings(changes)
    join(config, rank, world, folder, "stock")
    process.seed_everything(config)
    transformer = model.transformer_config(config)
    result = loop(config, model.wrap(config, transformer, model.build_gpt(config, transformer)))
    process.leave_groups()
    return result


def external(rank: int, world: int, folder: str, changes: dict[str, Any]) -> dict[str, Any]:
    config = settings(changes)
    join(config, rank, world, folder, "external")
    skeleton = Skeleton(config)
    storage = ArrayStorage(skeleton.layout)
    parts = skeleton.bind(storage)
    skeleton.initialize(parts, storage)
    result = loop(config, parts)
    inside = {
        t.untyped_storage().data_ptr() for t in (storage.grads, storage.model, *storage.arrays.values())
    }
    for parameter in parts.ddp.module.parameters():
        assert parameter.untyped_storage().data_ptr() in inside
        assert parameter.main_grad.untyped_storage().data_ptr() in inside
    process.leave_groups()
    return result


def slots(rank: int, world: int, folder: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Leto's step where masters and moments move; refused where fp32 parameters are the masters."""
    try:
        return resumable(rank, world, folder, {**changes, "scheme": "slots"})
    except ConfigError as error:
        process.leave_groups()
        return {"refused": str(error)}


def resumable(rank: int, world: int, folder: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Leto's step on plain memory, without managers: the update in chunks, clip in the chunk."""
    config = settings(changes)
    join(config, rank, world, folder, f"resumable-{config.scheme}")
    skeleton = Skeleton(config)
    pool = PoolConfig(page_bytes=4096, data_pages=12, tier1_pages=3, tier2_pages=1)
    plan = make_plan(skeleton.layout, pool, config.scheme_on(pool))
    box: list[model.Parts] = []
    updater = ResumableUpdater(
        ArrayMemory(pool), plan, dist.barrier, rebuild_derived=lambda up: rebuild_parameters(box[0], up)
    )
    storage = UpdaterStorage(updater)
    parts = skeleton.bind(storage)
    box.append(parts)
    skeleton.initialize(parts, storage)
    state = JobState.first(config)
    updater.initialize(0, state.encode())
    compute = model.Compute(config, parts)
    step = ResumableStep(config, parts, updater, lambda _phase: None)
    lines = []
    for iteration in range(config.iterations):
        updater.compute_begins()
        lr = group_lr(parts.optimizer)
        loss = compute(iteration)
        state = JobState.capture(config, compute.data_parallel, state, loss, lr, compute.batch_digest)
        lines.append(state.record(step(state.encode())))
    for shard in owned_shards(parts.ddp, parts.optimizer):
        shard.moments()["step"] = torch.tensor(float(updater.steps))
    read = updater.read if storage.moves else None
    result = {"records": lines, "final": digest(dict(records.final_state(parts, state.entries(), read)))}
    result["chunks"] = plan.chunks
    process.leave_groups()
    return result


def compare_modes(
    rank: int, world: int, folder: str, modes: list[str], configurations: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Every configuration in every mode, one after the other: groups are formed and left each time."""
    result: dict[str, Any] = {}
    for name, changes in configurations.items():
        place = os.path.join(folder, name)
        os.makedirs(place, exist_ok=True)
        result[name] = {mode: globals()[mode](rank, world, place, changes) for mode in modes}
    return result


def reference(rank: int, world: int, folder: str, out: str, settings_: dict[str, Any]) -> None:
    """A stock run that leaves the files of a user's run."""
    config = Config(**settings_)
    join(config, rank, world, folder, "reference")
    train_joined(config, Path(out))
    process.leave_groups()
