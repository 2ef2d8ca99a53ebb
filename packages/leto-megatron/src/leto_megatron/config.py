"""What a run trains and how: one flat record, two presets, one command-line form.

Role in the whole: every process of a job (reference, active, shadow, checkpoint reader) builds the same
model from the same :class:`Config`; its digest goes into checkpoints, so that a run never resumes from the
state of another. The method is the paper's (appendix A.1): bf16 with fp32 masters, activation recompute at
every layer, Adam betas 0.9/0.95, weight decay 0.1, 10 % warm-up, cosine to a tenth of the peak, clipping at
1.0, weights from N(0, 0.006^2), attention softmax in fp32. The demo preset scales sizes, not the method.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from leto_rmp import PoolConfig
from leto_rmu import AdamW, PlanError, Segment, UpdatePlan
from leto_rmu.geometry import Scheme, good_chunk_pages

__all__ = ["PRESETS", "Config", "ConfigError", "add_arguments", "from_arguments"]


_COUNTS = (
    *(
        "layers",
        "hidden",
        "heads",
        "ffn",
        "sequence",
        "vocabulary",
        "iterations",
        "micro_batch",
        "microbatches",
    ),
    *("tensor_parallel", "pipeline_parallel", "corpus_bytes", "checkpoint_keep"),
)
_PLANES = 3  # of AdamW: masters and two moments


class ConfigError(ValueError):
    """The requested combination cannot be trained; the message says why and what to change."""


@dataclass(frozen=True)
class Config:
    """Everything that determines the bits of a run, and how often it is checkpointed.

    Batch sizes are per data-parallel rank. Page and group sizes of the retained memory are options of
    `leto run`: they decide how a run survives, not what it computes.
    """

    # model
    layers: int = 24
    hidden: int = 2048
    heads: int = 16
    ffn: int = 8192
    sequence: int = 512
    vocabulary: int = 256
    dropout: float = 0.0
    # method (paper, appendix A.1)
    precision: str = "bf16"
    recompute: bool = True
    distributed_optimizer: bool = True
    peak_lr: float = 2.2e-4
    min_lr_ratio: float = 0.1
    warmup_ratio: float = 0.1
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    clip: float = 1.0
    init_sigma: float = 0.006
    # run
    seed: int = 1234
    iterations: int = 1000
    micro_batch: int = 16
    microbatches: int = 1
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    corpus_bytes: int = 8 * 1024 * 1024
    # checkpoints for fatal failures
    checkpoint_interval: int = 100
    checkpoint_keep: int = 2
    # how an update survives, not what it computes
    scheme: str = "auto"
    chunk_pages: int = 0
    lend_bytes: int = 0

    def __post_init__(self) -> None:
        def need(condition: bool, message: str) -> None:
            if not condition:
                raise ConfigError(message)

        for name in _COUNTS:
            need(getattr(self, name) >= 1, f"{name} must be at least 1, found {getattr(self, name)}")
        need(0 <= self.seed < 2**31, f"seed must be 0 to {2**31 - 1}, found {self.seed}")
        need(
            self.precision in ("bf16", "fp32"),
            f"precision {self.precision!r}: expected bf16 or fp32 (fp16 needs a dynamic loss scale, "
            "which changes the job state after the gradients are known; not supported)",
        )
        need(self.hidden % self.heads == 0, f"hidden {self.hidden} is not a multiple of heads {self.heads}")
        need(
            self.heads % self.tensor_parallel == 0,
            f"{self.heads} heads do not split over tensor_parallel {self.tensor_parallel}",
        )
        need(
            self.layers % self.pipeline_parallel == 0,
            f"{self.layers} layers do not split over pipeline_parallel {self.pipeline_parallel}",
        )
        need(0.0 <= self.dropout < 1.0, f"dropout {self.dropout} is not in [0, 1)")
        need(self.clip >= 0.0, f"clip {self.clip} must not be negative (0 turns clipping off)")
        need(self.checkpoint_interval >= 0, "checkpoint_interval must not be negative (0: no checkpoints)")
        need(
            self.scheme in ("auto", "undo", "slots"),
            f"scheme {self.scheme!r}: expected undo, slots, or auto (slots where one kernel does all of a "
            "chunk, else undo)",
        )
        need(self.chunk_pages >= 0, "chunk_pages must not be negative (0: chosen)")
        need(
            self.lend_bytes >= 0,
            f"lend_bytes must not be negative, found {self.lend_bytes}: it is the size of the smallest saved "
            "tensor that may wait in memory of the update, 1048576 for instance (0: none may)",
        )

    @property
    def warmup_iterations(self) -> int:
        """Iterations of linear warm-up; below the length of the run, as Megatron's scheduler demands."""
        return min(int(self.iterations * self.warmup_ratio), self.iterations - 1)

    def scheme_on(self, pool: PoolConfig) -> Scheme:
        """The scheme of the resumable update over memory of this pool: the same on all ranks."""
        if self.scheme == "auto":
            return "undo" if self.why_undo(pool) else "slots"
        return "slots" if self.scheme == "slots" else "undo"

    def why_undo(self, pool: PoolConfig) -> str:
        """Why the scheme "auto" is "undo" on this pool, in words; "" if it is "slots".

        "slots" is worth its free slot only where one kernel does all of a chunk, so it is asked before
        anything is laid out what that kernel would refuse. What a rank owns is not part of the answer.
        """
        if pool.backend != "cuda":
            return "chunks are updated on the host"
        if self.precision == "fp32" and not self.distributed_optimizer:
            return "fp32 parameters without the distributed optimizer are the masters, which slots would move"
        from leto_rmu.cuda import refusal

        numel = pool.page_bytes // 4
        try:
            plan = UpdatePlan(
                [Segment("all", numel)],
                optimizer=AdamW(),
                config=pool,
                scheme="slots",
                grad_numel=numel,
                chunk_pages=self.chunk_pages or None,
            )
        except PlanError as error:
            return str(error)
        return refusal(plan)

    def owned_numel(self, world_size: int) -> int:
        """Elements that the optimizer of a rank owns, about: its part of the matrices of the layers."""
        matrices = self.layers * self.hidden * (4 * self.hidden + 2 * self.ffn)
        parts = self.tensor_parallel * self.pipeline_parallel
        return matrices // (max(world_size, parts) if self.distributed_optimizer else parts)

    def chunk_pages_on(self, pool: PoolConfig, world_size: int) -> int:
        """Pages of a chunk of the update; 0: the updater's default.

        On GPUs as many as suit the size of the model: the same number on every rank, though one may own a
        little more than another, and in every process of the job.
        """
        chosen = not self.chunk_pages and pool.backend == "cuda" and self.scheme_on(pool) == "slots"
        return good_chunk_pages(pool, _PLANES, self.owned_numel(world_size)) if chosen else self.chunk_pages

    def samples_per_iteration(self, data_parallel: int) -> int:
        """Samples that one iteration consumes over all data-parallel ranks."""
        return self.micro_batch * self.microbatches * data_parallel

    def digest(self, world_size: int) -> str:
        """SHA-256 over what must be equal for two runs to be the same computation on the same layout."""
        neutral = {"checkpoint_interval", "checkpoint_keep", "scheme", "chunk_pages", "lend_bytes"}
        fields = {k: v for k, v in dataclasses.asdict(self).items() if k not in neutral}
        text = json.dumps({"world_size": world_size, **fields}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()


PRESETS: dict[str, Config] = {
    # The method as published, at a size between the paper's workloads and one GPU.
    "paper": Config(),
    # For `python -m leto_megatron.demo`: small enough for two processes that share two cores.
    "demo": Config(
        layers=4,
        hidden=128,
        heads=4,
        ffn=512,
        sequence=64,
        micro_batch=4,
        microbatches=2,
        peak_lr=2.0e-3,
        iterations=200,
        corpus_bytes=2 * 1024 * 1024,
        checkpoint_interval=30,
    ),
    # For `python -m leto_megatron.demo --device cuda`: two GPUs, and iterations long enough that the next
    # shadows usually stand ready when the next failure strikes.
    "demo-cuda": Config(
        layers=4,
        hidden=1024,
        heads=16,
        ffn=4096,
        sequence=256,
        micro_batch=8,
        microbatches=2,
        peak_lr=5.0e-4,
        iterations=500,
        corpus_bytes=4 * 1024 * 1024,
        checkpoint_interval=60,
        checkpoint_keep=1,
    ),
    # For tests: small enough for hundreds of runs.
    "tiny": Config(
        layers=2,
        hidden=32,
        heads=2,
        ffn=64,
        sequence=16,
        micro_batch=2,
        microbatches=2,
        peak_lr=2.0e-3,
        iterations=6,
        corpus_bytes=64 * 1024,
        checkpoint_interval=0,
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add `--preset` and an option for every field of :class:`Config` (`--hidden`, `--no-recompute` ...)."""
    parser.add_argument("--preset", choices=sorted(PRESETS), default="demo", help="start from these settings")
    group = parser.add_argument_group("settings (defaults come from the preset)")
    for field in dataclasses.fields(Config):
        option = "--" + field.name.replace("_", "-")
        kind = type(field.default)
        if kind is bool:
            group.add_argument(option, dest=field.name, action=argparse.BooleanOptionalAction, default=None)
        else:
            group.add_argument(
                option, dest=field.name, type=kind, default=None, metavar=kind.__name__.upper()
            )


def from_arguments(options: argparse.Namespace) -> Config:
    """The preset with the given options on top. Raises ConfigError where they do not fit together."""
    changes: dict[str, Any] = {
        field.name: value
        for field in dataclasses.fields(Config)
        if (value := getattr(options, field.name)) is not None
    }
    return dataclasses.replace(PRESETS[options.preset], **changes)


def to_arguments(config: Config) -> Sequence[str]:
    """The command-line form of a configuration; the inverse of :func:`from_arguments`."""
    words: list[str] = ["--preset", "demo"]
    for field in dataclasses.fields(Config):
        value = getattr(config, field.name)
        option = "--" + field.name.replace("_", "-")
        if isinstance(value, bool):
            words.append(option if value else "--no-" + option[2:])
        else:
            words.append(f"{option}={value!r}" if not isinstance(value, str) else f"{option}={value}")
    return words
