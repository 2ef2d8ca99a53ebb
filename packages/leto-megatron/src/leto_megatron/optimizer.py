"""Megatron's optimizer step, carried out by the resumable update.

Role in the whole (paper, pseudocode 1): replaces `optimizer.step()`. Megatron's step is prepare, norm, clip
in place, inner step, copy to the model, gather. Here the same bits come from: protect gradients, norm,
barrier (I-3), then chunk transactions that apply the clip coefficient to each chunk's gradients with the very
rounding of Megatron's `multi_tensor_scale`, then copy and gather as the rebuilding of derived state.

What differs is only *where* clipping happens: Megatron scales the gradient buffer in place, which could not
be repeated after a crash; the update reads gradients and leaves them alone (I-2).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from leto_megatron.config import Config, ConfigError
from leto_megatron.model import Parts
from leto_megatron.shards import inner_optimizers, owned_shards
from leto_megatron.storage import Layout, LayoutError
from leto_rmp import PoolConfig
from leto_rmu import AdamW, Hyper, ResumableUpdater, Segment, SyncResult, UpdatePlan
from leto_rmu.geometry import Scheme

__all__ = ["ResumableStep", "UpdaterStorage", "make_plan", "rebuild_parameters"]

JOB_STATE_BYTES = 64 * 1024


def make_plan(layout: Layout, pool: PoolConfig, scheme: Scheme = "undo", chunk_pages: int = 0) -> UpdatePlan:
    """The rank's update plan: one segment for each optimizer parameter, in the optimizer's order.

    `pool`: page and group sizes of the rank's state manager (`Client.config`). Under the scheme "slots" the
    updater itself keeps the bf16 copies of the masters; under "undo" Megatron copies them, as it always does.
    `chunk_pages`: `Config.chunk_pages_on`; 0: the updater's default.
    """
    if scheme == "slots" and layout.masters_are_parameters:
        raise ConfigError(
            "scheme slots moves masters about, but without the distributed optimizer fp32 parameters are the "
            "masters: use --scheme undo, bf16, or the distributed optimizer"
        )
    return UpdatePlan(
        [
            Segment(s.name, s.numel, s.group, s.grad_offset, s.copy_offset if scheme == "slots" else None)
            for s in layout.shards
        ],
        optimizer=AdamW(),
        config=pool,
        scheme=scheme,
        chunk_pages=chunk_pages or None,
        grad_numel=layout.grad_numel,
        model_bytes=layout.model_bytes,
        job_state_bytes=JOB_STATE_BYTES,
    )


class UpdaterStorage:
    """The regions of a :class:`ResumableUpdater` as storage for the model."""

    def __init__(self, updater: ResumableUpdater) -> None:
        self._updater = updater
        self.moves = updater.plan.scheme == "slots"

    @property
    def grads(self) -> torch.Tensor:
        return self._updater.grads

    @property
    def model(self) -> torch.Tensor:
        return self._updater.model

    def master(self, name: str) -> torch.Tensor:
        return self._updater.master(name)

    def state(self, name: str, key: str) -> torch.Tensor:
        return self._updater.state(name, key)

    def write(self, name: str, key: str, values: torch.Tensor) -> None:
        self._updater.write(name, key, values)


def rebuild_parameters(parts: Parts, updater: ResumableUpdater) -> None:
    """Derive the model's parameters from the masters: cast the own shard, gather the others'. Collective.

    Under the scheme "slots" the updater has cast the own shard already where parameters are bf16.
    """
    with torch.no_grad():
        if updater.plan.scheme == "undo":
            for inner in inner_optimizers(parts.optimizer):
                if hasattr(inner, "_copy_main_params_to_model_params"):
                    inner._copy_main_params_to_model_params()
        else:
            _copy_masters(parts, updater)
        if parts.ddp.ddp_config.use_distributed_optimizer:
            parts.ddp.start_param_sync()


def _copy_masters(parts: Parts, updater: ResumableUpdater) -> None:
    """Masters into parameters of which the updater keeps no copy (fp32)."""
    kept = {segment.name for segment in updater.plan.segments if segment.model_offset is not None}
    if len(kept) == len(updater.plan.segments):
        return  # the usual case, in every iteration: the shards are not even listed
    for shard in owned_shards(parts.ddp, parts.optimizer):
        if shard.name not in kept:
            place = shard.parameter.detach().view(-1)[shard.start : shard.start + shard.numel]
            updater.read(shard.name, "master", place)


class ResumableStep:
    """One optimizer step, as a call.

    Parameters
    ----------
    parts
        Megatron's objects, bound to the updater's storage.
    updater
        The rank's resumable update.
    on_phase
        Called with "sync" when the global synchronisation starts.
    """

    def __init__(
        self, config: Config, parts: Parts, updater: ResumableUpdater, on_phase: Callable[[str], None]
    ) -> None:
        self.config = config
        self.parts = parts
        self.updater = updater
        self._on_phase = on_phase

    def __call__(self, job_state: bytes) -> float:
        """Step, commit `job_state` as that of the next iteration; return the gradient norm."""
        groups = self.parts.optimizer.param_groups[: self.updater.plan.hyper_groups]
        hypers = [Hyper.from_param_group(group) for group in groups]
        result = self.updater.step(hypers, job_state, self._sync)
        self.parts.scheduler.step(increment=1)
        return result.grad_norm

    @torch.no_grad()
    def _sync(self) -> SyncResult:
        """Megatron's found-inf check and gradient norm; the clip coefficient is recorded, not applied.

        The norm comes to the host: all work of the device before it has ended.
        """
        self._on_phase("sync")
        optimizer: Any = self.parts.optimizer
        if optimizer.prepare_grads():
            raise LayoutError("found-inf without a gradient scaler: this optimizer scales its loss")
        norm = float(optimizer.get_grad_norm())
        clip: float | None = None
        if self.config.clip > 0.0:
            coefficient = self.config.clip / (norm + 1.0e-6)
            clip = coefficient if coefficient < 1.0 else None
        return SyncResult(clip=clip, inv_scale=None, found_inf=False, grad_norm=norm)
