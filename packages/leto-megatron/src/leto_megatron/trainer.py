"""The Leto trainer for Megatron-Core: shadow first, active after promotion, exact after every failure.

Role in the whole: ties the other modules to leto_shadow's life cycle. `prepare` imports and reads the text
(L1), `build` settles configuration and device (L2), `connect` forms the groups and shapes the model on the
meta device (L3), `train` attaches to the retained memory, recovers as all ranks agreed (I-5), and loops.

Nothing that belongs to the job is kept in this process alone: whatever dies with it is either in retained
memory, in the marker's job state, or a pure function of both.
"""

from __future__ import annotations

import contextlib
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch

from leto_megatron import device, model, process, records, warm
from leto_megatron.checkpoint import CheckpointError, Checkpoints
from leto_megatron.config import Config, ConfigError
from leto_megatron.drill import DrillExecutor
from leto_megatron.jobstate import JobState
from leto_megatron.laps import Laps
from leto_megatron.optimizer import ResumableStep, UpdaterStorage, make_plan, rebuild_parameters
from leto_megatron.pretrain import group_lr
from leto_megatron.shards import owned_shards
from leto_megatron.stopwatch import stopwatch_for
from leto_megatron.storage import Skeleton
from leto_rmp import Client, PoolConfig
from leto_rmu import Action, Decision, ResumableUpdater, UpdatePlan
from leto_shadow import CannotDisconnectError, Context, Trainer

__all__ = ["MegatronTrainer"]

_STATES = ("master", "exp_avg", "exp_avg_sq")


class MegatronTrainer(Trainer):
    """One rank of a Megatron-Core pretraining run under Leto.

    Parameters
    ----------
    config
        The run; the same on every rank and in every generation.
    out
        Folder for records, final state and checkpoints; seen by all ranks.
    dump
        Also write the bytes of the final state.
    laps
        Report the phases of every iteration (`leto_megatron.laps`).
    """

    spare_level = 2  # neither reading the text nor the device depends on the rank

    def __init__(self, config: Config, out: Path, dump: bool = False, laps: bool = False) -> None:
        self.config = config
        self.out = out
        self.dump = dump
        self.laps = laps
        self._skeleton: Skeleton | None = None
        self._ahead: Client | None = None
        self._plan: UpdatePlan | None = None

    # --- shadow ---------------------------------------------------------------------------------------

    def prepare(self, ctx: Context) -> None:
        """L1: import Megatron-Core, read the training text. Nothing touches a GPU yet."""
        _check_backend(ctx.backend)
        if ctx.backend == "cuda":
            warm.cache_bytes()  # a wrong setting shows here, not in a takeover
            warm.import_kernels()
        else:
            # Before the import: Megatron-Core keeps some collectives under names of its own.
            ctx.watch_collectives()
        process.prepare_process()
        self._corpus = model.corpus(self.config)

    def build(self, ctx: Context) -> None:
        """L2: check that the configuration can be built at all; a GPU gets context, libraries, kernels."""
        model.transformer_config(self.config)
        process.settle_device(ctx.local_rank)
        if ctx.backend == "cuda":
            warm.load_kernels(self.config)

    def connect(self, ctx: Context) -> None:
        """L3: form and warm the groups, shape the model on the meta device (a shard depends on the rank)."""
        warm.unpark()
        if ctx.local_world_size == ctx.world_size:
            process.stay_on_loopback()
        process.form_groups(self.config, ctx.store, ctx.rank, ctx.world_size)
        process.warm_groups(sharded=self.config.distributed_optimizer)
        if ctx.backend == "cuda":
            warm.iterate_once(self.config)
            self._ahead = device.map_ahead(ctx)
        self._skeleton = Skeleton(self.config)
        if self._ahead is not None:
            self._plan_for(self._skeleton, self._ahead.config, ctx.world_size)
        if self._parks(ctx):
            ctx.parked(warm.park())
        gc.freeze()  # until training: a collection in the takeover would walk all that was ever imported

    def _parks(self, ctx: Context) -> bool:
        """Only who will wait gives memory back: it may be gone when it is needed, and a trainer that a
        recovery waits for would be refused what its predecessor was refused."""
        return ctx.backend == "cuda" and ctx.waits and os.environ.get(warm.PARK_VARIABLE) != "0"

    def _plan_for(self, skeleton: Skeleton, pool: PoolConfig, world_size: int) -> UpdatePlan:
        """The rank's update plan, with what it works out once: made when the pool is first known."""
        if self._plan is None or self._plan.config != pool:
            scheme, pages = self.config.scheme_on(pool), self.config.chunk_pages_on(pool, world_size)
            self._plan = make_plan(skeleton.layout, pool, scheme, pages)
            self._plan.specs()
            self._plan.layout_hash  # noqa: B018
        return self._plan

    def disconnect(self, ctx: Context) -> None:
        """Leave the world: Megatron's groups, then torch's. NCCL may block there when a peer is dead: the
        process ends instead, and another shadow takes its place."""
        if ctx.backend == "cuda":
            raise CannotDisconnectError("groups of NCCL may not be left while a peer may be dead")
        gc.unfreeze()
        self._skeleton = self._plan = None
        process.leave_groups()

    # --- active ---------------------------------------------------------------------------------------

    def train(self, ctx: Context) -> None:
        """Attach, recover as agreed, train to the end."""
        assert self._skeleton is not None, "train follows connect"
        started = time.monotonic()
        warm.unpark()
        if ctx.backend == "cuda":
            warm.grow_cache(warm.CacheHint.left(ctx))
        with contextlib.ExitStack() as end:
            end.callback(gc.unfreeze)
            client = end.enter_context(device.attach(ctx, self._ahead))
            writer_s = time.monotonic() - started
            run = _Run(self, ctx, client, self._skeleton, end, writer_s)
            run.recover()
            gc.unfreeze()
            run.loop()

    def retire(self, ctx: Context) -> int:
        """After the failure of another rank: keep what L2 has, imports, text, device and kernels.

        All of the model is made again by the next `connect`. Random streams, schedule and data position come
        from the job state, as in a new process; Megatron's groups and buffers are in its parallel state.
        """
        self._skeleton = self._plan = None
        if self._ahead is not None:
            self._ahead.close()
            self._ahead = None
        process.leave_groups()
        if ctx.backend == "cuda":
            torch.cuda.empty_cache()
        return 2


class _Run:
    """The life of an active trainer. What is undone when it ends, however it does, is left to `end`."""

    def __init__(
        self,
        trainer: MegatronTrainer,
        ctx: Context,
        client: Client,
        skeleton: Skeleton,
        end: contextlib.ExitStack,
        writer_s: float,
    ) -> None:
        self.config = trainer.config
        self.out = trainer.out
        self.dump = trainer.dump
        self.ctx = ctx
        self.skeleton = skeleton
        self.seconds: dict[str, float] = {"writer": writer_s}
        self.iteration = 0
        started = time.monotonic()
        self.drills = DrillExecutor(ctx)
        self.updater = device.make_updater(
            client,
            trainer._plan_for(skeleton, client.config, ctx.world_size),
            barrier=self._barrier,
            rebuild_derived=self._rebuild,
            executor=self.drills,
        )
        self.usual = self.updater.executor
        self.seconds["attach"] = time.monotonic() - started
        started = time.monotonic()
        self.storage = UpdaterStorage(self.updater)
        self.parts = skeleton.bind(self.storage)
        self._wrap_reduction()
        if self.config.pipeline_parallel > 1:
            self._wrap_pipeline(end)
        self.laps = Laps.on(ctx.backend) if trainer.laps else None
        if self.laps is not None:
            end.callback(self.laps.close)
        self.compute = model.Compute(
            self.config, self.parts, self._forward, trainer._corpus, self._loss, self.updater.lending
        )
        self.step = ResumableStep(self.config, self.parts, self.updater, self._phase)
        self.stopwatch = stopwatch_for(ctx.backend)
        self.writer = records.RecordWriter(self.out / f"records-rank{ctx.rank}.jsonl")
        end.callback(self.writer.close)
        self.checkpoints = Checkpoints(
            self.out / "checkpoints", self.config.digest(ctx.world_size), self.config.checkpoint_keep
        )
        self.cache_hint = warm.CacheHint(ctx)
        self.state: JobState  # recover() says which
        self.seconds["bind"] = time.monotonic() - started

    # --- recovery -------------------------------------------------------------------------------------

    def recover(self) -> None:
        """Agree with the other ranks where to go on, and get there. The random streams come last."""
        started = time.monotonic()
        summary = self.updater.summary(checkpoints=self.checkpoints.steps())
        decision = Decision.decode(self.ctx.exchange(summary))
        self.seconds["exchange"] = time.monotonic() - started
        started = time.monotonic()
        source: Literal["fresh", "in-place", "checkpoint"]
        repaired: dict[str, float] = {}  # the report carries numbers only: a truth is 0 or 1
        if decision.action is Action.FRESH:
            source = "fresh"
            self._start_fresh(decision)
        elif decision.action is Action.CHECKPOINT:
            source = "checkpoint"
            self._load_checkpoint(decision)
        else:
            source = "in-place"
            recovered = self.updater.recover(decision.encode())
            self.state = JobState.decode(recovered.job_state)
            repaired["pages_reconstructed"] = recovered.pages_reconstructed
            repaired["verified"] = float(recovered.verified)
        self.iteration = self.state.iteration
        if source != "fresh":
            self.state.restore(self.parts.scheduler)
        if source == "in-place" and (norm := self._committed_norm()) is not None:
            # The record of the last iteration may have died with its writer; marker and job state have it.
            # Without a norm nothing was committed since initialize(): before iteration 0 there is no record,
            # and a checkpoint is written after the record of the iteration before it.
            self.writer.write(self.state.record(norm))
        self.seconds["reconstruct"] = time.monotonic() - started
        self.ctx.resumed(self.iteration, source, **self.seconds, **repaired)
        where = f"rank {self.ctx.rank}, generation {self.ctx.generation}"
        pool = self.updater.plan.config
        why = self.config.why_undo(pool) if self.config.scheme == "auto" else ""
        print(f"leto: {where}: {device.describe(self.updater, why)}", flush=True)

    def _start_fresh(self, decision: Decision) -> None:
        """Iteration 0: initial values as stock Megatron draws them, then protect them."""
        self.updater.recover(decision.encode())
        self.skeleton.initialize(self.parts, self.storage)
        self.state = JobState.first(self.config)
        self.updater.initialize(0, self.state.encode())
        self.state.restore_rng()

    def _load_checkpoint(self, decision: Decision) -> None:
        """Fill masters and moments from the agreed step, then protect them; parameters follow from them."""
        assert decision.step is not None
        self.updater.recover(decision.encode())
        try:
            tensors = self._tensors()
            job_state = self.checkpoints.load(decision.step, tensors)
        except CheckpointError:
            # This attempt ends here; the next decision must not choose the same step again.
            self.checkpoints.set_aside(decision.step)
            raise
        self._put(tensors)
        self.state = JobState.decode(job_state)
        self.updater.initialize(decision.step, job_state, steps=self.state.scheduler_steps, keep_state=True)

    @property
    def _in_place(self) -> bool:
        """Whether masters and moments are views of host memory, which a checkpoint can use as they are."""
        return self.ctx.backend == "host" and not self.storage.moves

    def _tensors(self) -> dict[str, torch.Tensor]:
        """What a checkpoint holds of this rank besides its job state, in host memory: views, or copies."""
        get = self.updater.state if self._in_place else self.updater.read
        return {
            f"{key}/{shard.name}": get(shard.name, key).cpu()
            for shard in self.skeleton.layout.shards
            for key in _STATES
        }

    def _put(self, tensors: dict[str, torch.Tensor]) -> None:
        """Copy what a checkpoint had to where it belongs, unless it is there already."""
        if self._in_place:
            return
        for shard in self.skeleton.layout.shards:
            for key in _STATES:
                self.updater.write(shard.name, key, tensors[f"{key}/{shard.name}"])

    def _committed_norm(self) -> float | None:
        sync = self.updater.last_sync
        return None if sync is None else sync.grad_norm

    # --- training -------------------------------------------------------------------------------------

    def loop(self) -> None:
        """Iterations until the configured end; then the final state."""
        while self.iteration < self.config.iterations:
            self._checkpoint_if_due()
            self._iterate()
        self._finish()

    def _iterate(self) -> None:
        ctx, iteration, started = self.ctx, self.iteration, time.monotonic()
        ctx.progress("data", iteration)
        if self.laps is not None:
            self.laps.begin()
        struck = self.drills.arm(iteration)
        executor = self.drills if struck else self.usual
        if self.updater.executor is not executor:
            self.updater.executor = executor
        self.updater.compute_begins()
        lr = group_lr(self.parts.optimizer)
        loss = self.compute(iteration)
        after = JobState.capture(
            self.config, self.compute.data_parallel, self.state, loss, lr, self.compute.batch_digest
        )
        self._point("protect")
        self._mark("protect")
        self.stopwatch.begin()
        norm = self.step(after.encode())
        update_s = self.stopwatch.end()
        self.state, self.iteration = after, after.iteration
        self._point("commit")
        self._mark("report")
        self.writer.write(after.record(norm))
        seconds = time.monotonic() - started
        values = {"lr": lr, "grad_norm": norm, "seconds": seconds}
        if update_s is not None:  # on a GPU that of the iteration before
            values["update_s"] = update_s
        if after.loss is not None:
            values["loss"] = after.loss
        if self.config.lend_bytes:
            values["lent_bytes"] = self.updater.lender.held
        if self.laps is not None:
            values |= self.laps.end()
        tokens = self.config.samples_per_iteration(self.compute.data_parallel) * self.config.sequence
        ctx.metrics(iteration, tokens=tokens, **values)
        self.cache_hint.after_iteration()

    def _checkpoint_if_due(self) -> None:
        every = self.config.checkpoint_interval
        if every and self.iteration and self.iteration % every == 0:
            self._point("checkpoint")
            self.checkpoints.save(self.iteration, self._tensors(), self.state.encode())

    def _finish(self) -> None:
        # Digests of a large model take longer than any phase of an iteration may.
        self.ctx.progress("done", self.iteration)
        for shard in owned_shards(self.parts.ddp, self.parts.optimizer):  # Megatron's own are not counted up
            shard.moments()["step"] = torch.tensor(float(self.updater.steps))
        device.settle(self.updater)
        read = self.updater.read if self.storage.moves else None
        state = records.final_state(self.parts, self.state.entries(), read)
        records.write_final(self.out / f"final-rank{self.ctx.rank}.json", state, self.iteration, self.dump)
        process.host_barrier()

    # --- seams ----------------------------------------------------------------------------------------

    def _phase(self, name: str) -> None:
        self.ctx.progress(name, self.iteration)

    def _point(self, name: str) -> None:
        self.ctx.progress(name, self.iteration)
        self.ctx.point(name, self.iteration)

    def _mark(self, phase: str) -> None:
        if self.laps is not None:
            self.laps.mark(phase)

    def _forward(self, iteration: int, microbatch: int) -> None:
        if not microbatch:
            self._mark("first")
        self.ctx.progress("forward", iteration)
        self.ctx.point("forward", iteration)

    def _loss(self, microbatch: int) -> None:
        self._mark("backward" if microbatch == self.config.microbatches - 1 else "others")

    def _barrier(self) -> None:
        self.ctx.barrier(process.host_group())
        self._mark("update")

    def _rebuild(self, _updater: ResumableUpdater) -> None:
        self._phase("derive")
        rebuild_parameters(self.parts, self.updater)

    def _wrap_reduction(self) -> None:
        """Name the phase in which gradients are reduced: there a rank may wait for others."""
        reduce = self.parts.transformer.finalize_model_grads_func

        def finalize(*args: Any, **kwargs: Any) -> Any:
            self._point("reduce")
            self._mark("reduce")
            return reduce(*args, **kwargs)

        self.parts.transformer.finalize_model_grads_func = finalize

    def _wrap_pipeline(self, end: contextlib.ExitStack) -> None:
        """Let drills strike inside a pipeline exchange, when it was started and before it has ended (case 6).

        The points are called `send`, `recv` and `send-recv`, by what this rank has started.
        """
        from megatron.core.pipeline_parallel import p2p_communication

        def between(start: Callable[..., Any]) -> Callable[..., Any]:
            def exchange(**given: Any) -> Any:
                requests = start(**given)
                going = [way for way in ("send", "recv") if _any_tensor(given, way)]
                if going:
                    self.ctx.point("-".join(going), self.iteration)
                return requests

            return exchange

        for name in ("_batched_p2p_ops", "_p2p_ops"):  # Megatron takes one of them for every exchange
            original = getattr(p2p_communication, name)
            setattr(p2p_communication, name, between(original))
            end.callback(setattr, p2p_communication, name, original)


def _check_backend(backend: str) -> None:
    """Raise ConfigError unless model and retained memory will be in one place."""
    if (backend == "cuda") == torch.cuda.is_available():
        return
    if backend == "cuda":
        raise ConfigError("the pool keeps pages on GPUs, and torch finds none: is it a CPU build?")
    raise ConfigError(
        "torch trains on the GPU here, and the pool keeps pages on the host: start with `leto run --backend "
        "cuda`, or hide the GPUs (CUDA_VISIBLE_DEVICES=)"
    )


def _any_tensor(given: dict[str, Any], way: str) -> bool:
    return any(value is not None for name, value in given.items() if name.startswith(f"tensor_{way}_"))
