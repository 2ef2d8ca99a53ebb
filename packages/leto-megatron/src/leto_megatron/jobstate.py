"""The small state of a job: what besides parameters and moments decides the next iteration's bits.

Role in the whole (docs/concepts/marker-protocol.md): captured after the backward pass of iteration t, staged
for t+1 before the first chunk is written, valid by the marker ITERATION(t+1). It holds the random streams,
the learning-rate schedule, the data position and the report of iteration t. Restored *last*, after everything
that might draw random numbers (a shadow was initialised long before).

Encoding: msgpack, version first; never pickle.
"""

from __future__ import annotations

import json
import random
import struct
from typing import Any

import msgspec
import numpy as np
import torch

from leto_megatron.config import Config
from leto_megatron.records import float_bits, rng_digest, rng_states

__all__ = ["VERSION", "JobState", "JobStateError"]

VERSION = 2  # 2: digest of the consumed batch


class JobStateError(ValueError):
    """Bytes that are not a job state of this version; the message says what was found."""


class JobState(msgspec.Struct, frozen=True, array_like=True):
    """The job state that is valid *at* `iteration`: everything before that iteration has happened.

    `loss_bits` (fp32), `lr` and `batch` (of :class:`leto_megatron.data.BatchDigest`: the tokens and labels
    that this rank consumed) report iteration - 1; `scheduler_steps` is Megatron's `num_steps`.
    """

    version: int
    iteration: int
    consumed_samples: int
    scheduler_steps: int
    loss_bits: int | None
    lr: float
    batch: str
    rng: dict[str, bytes]

    @classmethod
    def first(cls, config: Config) -> JobState:
        """The state before iteration 0; the random streams are as they are now."""
        del config
        return cls(VERSION, 0, 0, 0, None, 0.0, "", rng_states())

    @classmethod
    def capture(
        cls,
        config: Config,
        data_parallel: int,
        before: JobState,
        loss: torch.Tensor | None,
        lr: float,
        batch: str,
    ) -> JobState:
        """The state for `before.iteration + 1`, taken when the backward pass of `before.iteration` is over.

        Schedules count one step an iteration: without a dynamic loss scale no update is ever skipped.
        """
        bits = None
        if loss is not None:
            bits = struct.unpack("<I", struct.pack("<f", float(loss.float().item())))[0]
        return cls(
            VERSION,
            before.iteration + 1,
            before.consumed_samples + config.samples_per_iteration(data_parallel),
            before.scheduler_steps + 1,
            bits,
            lr,
            batch,
            rng_states(),
        )

    @property
    def loss(self) -> float | None:
        """Mean loss of iteration - 1; None on ranks that do not hold the last pipeline stage."""
        if self.loss_bits is None:
            return None
        return float(struct.unpack("<f", struct.pack("<I", self.loss_bits))[0])

    def encode(self) -> bytes:
        """The bytes that go into the marker's job-state slot."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, data: bytes) -> JobState:
        """The inverse of :meth:`encode`. Raises JobStateError for anything else."""
        try:
            state = msgspec.msgpack.decode(data, type=cls)
        except msgspec.MsgspecError as error:
            raise JobStateError(
                f"expected an encoded job state, found {len(data)} bytes that are not one: {error}"
            ) from error
        if state.version != VERSION:
            raise JobStateError(
                f"job state version {state.version}, this program reads {VERSION}: "
                "resume with the release that wrote it"
            )
        return state

    def restore(self, scheduler: Any) -> None:
        """Put schedule and random streams back. `scheduler` must be fresh: Megatron's steps are relative."""
        if scheduler.num_steps > self.scheduler_steps:
            raise JobStateError(
                f"the scheduler is at step {scheduler.num_steps}, past {self.scheduler_steps} to restore: "
                "restore into a new scheduler"
            )
        scheduler.step(increment=self.scheduler_steps - scheduler.num_steps)
        self.restore_rng()

    def restore_rng(self) -> None:
        """Put every random stream back, Megatron's tracker included."""
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        version, internal, gauss = json.loads(self.rng["python"])
        random.setstate((version, tuple(internal), gauss))
        name, keys, position, has_gauss, cached = json.loads(self.rng["numpy"])
        np.random.set_state((name, np.array(keys, dtype=np.uint32), position, has_gauss, cached))
        torch.set_rng_state(_tensor(self.rng["torch"]))
        if "cuda" in self.rng:
            torch.cuda.set_rng_state(_tensor(self.rng["cuda"]))
        prefix = "tracker/"
        get_cuda_rng_tracker().set_states(
            {k.removeprefix(prefix): _tensor(v) for k, v in self.rng.items() if k.startswith(prefix)}
        )

    def record(self, grad_norm: float | None = None) -> dict[str, Any]:
        """The line that :mod:`leto_megatron.records` keeps of iteration - 1."""
        return {
            "iteration": self.iteration - 1,
            "loss": self.loss,
            "loss_bits": None if self.loss_bits is None else f"{self.loss_bits:08x}",
            "lr": self.lr,
            "lr_bits": float_bits(self.lr),
            "grad_norm_bits": float_bits(grad_norm),
            "batch": self.batch,
            "consumed_samples": self.consumed_samples,
            "scheduler_steps": self.scheduler_steps,
            "rng": rng_digest(self.rng),
        }

    def entries(self) -> dict[str, bytes]:
        """The state by name, for the final comparison."""
        entries = {f"rng/{name}": state for name, state in self.rng.items()}
        entries["consumed_samples"] = struct.pack("<q", self.consumed_samples)
        entries["scheduler_steps"] = struct.pack("<q", self.scheduler_steps)
        return entries


def _tensor(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)
