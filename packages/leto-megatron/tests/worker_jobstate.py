"""Rank function: every random stream, the schedule and the position come back, bit for bit (cases 9, 11)."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
import torch
from worker_modes import join, settings

from leto_megatron import model, process, records
from leto_megatron.config import Config
from leto_megatron.data import Batch, Corpus
from leto_megatron.jobstate import JobState, JobStateError
from leto_megatron.pretrain import group_lr


def draws() -> list[Any]:
    """Numbers from every stream; drawing them moves it."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    numbers: list[Any] = [
        random.random(),
        random.gauss(0, 1),
        float(np.random.normal()),
        torch.rand(3).tolist(),
    ]
    for name in sorted(get_cuda_rng_tracker().get_states()):
        with get_cuda_rng_tracker().fork(name):
            numbers.append([name, torch.rand(2).tolist()])
    return numbers


class Shuffled(Corpus):
    """A data set that hands out the right samples of a microbatch in another order."""

    def batch(self, iteration: int, microbatch: int, data_rank: int, samples: int) -> Batch:
        right = super().batch(iteration, microbatch, data_rank, samples)
        return Batch(right.tokens.flip(0), right.labels.flip(0))


def consumed(config: Config, parts: model.Parts) -> list[list[Any]]:
    """(loss, digest) of an iteration: as it should be, again, shuffled, and of another iteration."""
    text = model.corpus(config)
    out = []
    for corpus, iteration in (
        (text, 3),
        (text, 3),
        (Shuffled(text.text, text.sequence, text.seed), 3),
        (text, 4),
    ):
        compute = model.Compute(config, parts, text=corpus)
        compute(0)  # what came before is not in the digest
        loss = compute(iteration)
        assert loss is not None
        out.append([float(loss), compute.batch_digest])
    return out


def roundtrip(rank: int, world: int, folder: str) -> dict[str, Any]:
    config = settings({"iterations": 20, "warmup_ratio": 0.4})
    join(config, rank, world, folder, "jobstate")
    process.seed_everything(config)
    transformer = model.transformer_config(config)
    parts = model.wrap(config, transformer, model.build_gpt(config, transformer))
    state = JobState.first(config)
    for _ in range(11):  # past the warm-up, into the decay; odd numbers of draws leave cached halves
        random.gauss(0, 1)
        np.random.normal()
        parts.scheduler.step(increment=1)
        loss, lr = torch.tensor(1.0 / 3.0), group_lr(parts.optimizer)
        state = JobState.capture(config, 1, state, loss, lr, "ab" * 32)
    encoded = state.encode()
    after = draws()
    groups = [{k: v for k, v in g.items() if k != "params"} for g in parts.optimizer.param_groups]

    fresh = model.wrap(config, transformer, model.build_gpt(config, transformer))  # draws for its weights
    process.seed_everything(config)  # and a late initialisation overwrites every stream
    back = JobState.decode(encoded)
    back.restore(fresh.scheduler)
    result = {
        "draws": draws() == after,
        "groups": [{k: v for k, v in g.items() if k != "params"} for g in fresh.optimizer.param_groups]
        == groups,
        "same": back == state,
        "batch": back.record()["batch"] == "ab" * 32,
        "consumed": consumed(config, parts),
        "loss": back.loss == float(torch.tensor(1.0 / 3.0)),
        "bytes": len(encoded),
        "samples": back.consumed_samples,
        "digests": records.rng_digest(back.rng) == state.record()["rng"],
        "errors": [],
    }
    other = msgspec.structs.replace(state, version=99)
    for data in (b"", b"\x93\x01\x02\x03", encoded[:-5], other.encode()):
        try:
            JobState.decode(data)
        except JobStateError as error:
            result["errors"].append(str(error))
    parts.scheduler.step(increment=5)
    try:
        back.restore(parts.scheduler)
    except JobStateError as error:
        result["errors"].append(str(error))
    process.leave_groups()
    return result
