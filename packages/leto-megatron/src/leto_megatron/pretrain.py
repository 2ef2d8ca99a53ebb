"""Pretrain a GPT on Megatron-Core: under plain torchrun (stock), or under `leto run` (recovers in place).

    torchrun --nproc-per-node 2 -m leto_megatron.pretrain --preset demo --out run
    leto run --nproc-per-node 2 -m leto_megatron.pretrain --preset demo --out run

The same command line, the same bits: under `leto run` the storage comes from the retained memory pool and
the optimizer's inner step is the resumable update; nothing else differs.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from leto_megatron import model, process, records
from leto_megatron.config import Config, ConfigError, add_arguments, from_arguments
from leto_megatron.jobstate import JobState

__all__ = ["main", "parse", "train_stock"]


def parse(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, Config]:
    """Read the command line; `--out` is where records, final state and checkpoints go.

    Exits with status 2 and what is wrong: in the settings, with the folder, or with how it was started.
    """
    parser = argparse.ArgumentParser(
        prog="python -m leto_megatron.pretrain",
        usage="%(prog)s --out OUT [--preset NAME] [settings], under torchrun or `leto run`",
        description=__doc__.split("\n\n")[0] if __doc__ else None,
    )
    parser.add_argument(
        "--out", type=Path, required=True, help="folder for records, final state, checkpoints"
    )
    parser.add_argument("--dump", action="store_true", help="also write the bytes of the final state (.npz)")
    parser.add_argument(
        "--laps",
        action="store_true",
        help="under `leto run`: report the phases of every iteration with its numbers",
    )
    add_arguments(parser)
    options = parser.parse_args(argv)
    try:
        config = from_arguments(options)
        options.out.mkdir(parents=True, exist_ok=True)
    except ConfigError as error:
        parser.error(str(error))
    except OSError as error:
        parser.error(f"--out {options.out}: {error.strerror}; give another folder")
    if not os.environ.keys() & {"LETO_AGENT_FD", "RANK"}:
        parser.error("expected to be started by torchrun or `leto run`, found no rank in the environment")
    return options, config


def train_stock(config: Config, out: Path, dump: bool = False) -> None:
    """Train with Megatron-Core as it is, under torchrun: the reference that a Leto run is compared with."""
    process.prepare_process()
    if os.environ.get("LOCAL_WORLD_SIZE") == os.environ.get("WORLD_SIZE"):
        process.stay_on_loopback()
    process.settle_device(int(os.environ.get("LOCAL_RANK", "0")))
    try:
        process.form_groups(config)
        train_joined(config, out, dump)
    finally:
        process.leave_groups()


def train_joined(config: Config, out: Path, dump: bool = False) -> None:
    """The stock loop, for a process whose groups are formed."""
    rank = dist.get_rank()
    process.seed_everything(config)
    transformer = model.transformer_config(config)
    parts = model.wrap(config, transformer, model.build_gpt(config, transformer))
    compute = model.Compute(config, parts)
    writer = records.RecordWriter(out / f"records-rank{rank}.jsonl")
    state = JobState.first(config)
    started = time.monotonic()
    for iteration in range(config.iterations):
        lr = group_lr(parts.optimizer)
        loss = compute(iteration)
        _successful, grad_norm, _zeros = parts.optimizer.step()
        parts.scheduler.step(increment=1)
        state = JobState.capture(config, compute.data_parallel, state, loss, lr, compute.batch_digest)
        writer.write(state.record(grad_norm))
    elapsed_s = time.monotonic() - started
    writer.close()
    assert parts.scheduler.num_steps == state.scheduler_steps
    final = records.final_state(parts, state.entries())
    records.write_final(out / f"final-rank{rank}.json", final, config.iterations, dump, elapsed_s)
    process.host_barrier()


def group_lr(optimizer: Any) -> float:
    """The learning rate of the update that comes next, as Megatron logs it."""
    from megatron.core.optimizer_param_scheduler import get_canonical_lr_for_logging

    lr = get_canonical_lr_for_logging(optimizer.param_groups)
    if lr is None:
        raise RuntimeError("the optimizer has no parameter group on the default learning-rate schedule")
    return float(lr)


def main(argv: Sequence[str] | None = None) -> int:
    """Train as the environment says: as a Leto trainer under an agent, else stock under torchrun."""
    options, config = parse(argv)
    torch.set_num_threads(1)
    if "LETO_AGENT_FD" in os.environ:
        from leto_megatron.trainer import MegatronTrainer
        from leto_shadow import run

        run(MegatronTrainer(config, options.out, options.dump, options.laps))
        return 0
    train_stock(config, options.out, options.dump)
    return 0


if __name__ == "__main__":
    sys.exit(main())
