"""The Megatron-Core model of a run: GPT, DDP, optimizer, scheduler, and one iteration's compute.

Role in the whole: both modes (stock Megatron, and Leto) build their parts here and run the same forward
and backward here, so that nothing but storage and the optimizer's inner step differs between them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from leto_megatron.config import Config, ConfigError
from leto_megatron.data import VOCABULARY, Batch, BatchDigest, Corpus, load_stdlib
from leto_megatron.process import quiet

__all__ = ["Compute", "Parts", "build_gpt", "corpus", "transformer_config", "wrap"]


def transformer_config(config: Config) -> Any:
    """Megatron's TransformerConfig for this run: no fused kernels, deterministic, paper's numerics."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    sigma = config.init_sigma
    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    recompute: dict[str, Any] = {}
    if config.recompute:  # activations are kept at the input of every layer only
        recompute = {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    with quiet():
        return TransformerConfig(
            num_layers=config.layers,
            hidden_size=config.hidden,
            num_attention_heads=config.heads,
            ffn_hidden_size=config.ffn,
            tensor_model_parallel_size=config.tensor_parallel,
            pipeline_model_parallel_size=config.pipeline_parallel,
            pipeline_dtype=dtype,
            params_dtype=dtype,
            bf16=config.precision == "bf16",
            hidden_dropout=config.dropout,
            attention_dropout=config.dropout,
            init_method_std=sigma,
            use_cpu_initialization=True,  # the values are drawn alike everywhere; a skeleton draws none
            attention_softmax_in_fp32=True,
            deterministic_mode=True,
            gradient_accumulation_fusion=False,
            masked_softmax_fusion=False,
            bias_activation_fusion=False,
            bias_dropout_fusion=False,
            persist_layer_norm=False,
            apply_rope_fusion=False,
            batch_p2p_sync=False,
            **recompute,
        )


def build_gpt(config: Config, transformer: Any, device: str | None = None) -> torch.nn.Module:
    """The rank's part of the GPT. `device="meta"`: shapes without memory and without initial values."""
    from megatron.core import parallel_state as ps
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.module import Float16Module

    if config.vocabulary < VOCABULARY:
        raise ConfigError(f"vocabulary {config.vocabulary} is below the {VOCABULARY} values of a byte")
    place = torch.device(device) if device is not None else contextlib.nullcontext()
    with quiet(), place:
        model: torch.nn.Module = GPTModel(
            config=transformer,
            transformer_layer_spec=get_gpt_layer_local_spec(normalization="LayerNorm"),
            vocab_size=config.vocabulary,
            max_sequence_length=config.sequence,
            pre_process=ps.is_pipeline_first_stage(),
            post_process=ps.is_pipeline_last_stage(),
            share_embeddings_and_output_weights=False,
            position_embedding_type="rope",
            parallel_output=True,
        )
        if torch.cuda.is_available() and device is None:
            model = model.cuda()
        return Float16Module(transformer, model) if config.precision == "bf16" else model


@dataclass
class Parts:
    """A rank's Megatron objects: DDP around the model, its optimizer, its scheduler."""

    transformer: Any
    ddp: Any
    optimizer: Any
    scheduler: Any


def wrap(config: Config, transformer: Any, model: torch.nn.Module) -> Parts:
    """Put Megatron's DDP, optimizer and learning-rate schedule around a model. Collective over the world."""
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
    settings = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=False,
        use_distributed_optimizer=config.distributed_optimizer,
        check_for_nan_in_grad=True,
    )
    optimizer_config = OptimizerConfig(
        optimizer="adam",
        lr=config.peak_lr,
        min_lr=config.peak_lr * config.min_lr_ratio,
        weight_decay=config.weight_decay,
        adam_beta1=config.beta1,
        adam_beta2=config.beta2,
        adam_eps=config.eps,
        clip_grad=config.clip,
        bf16=config.precision == "bf16",
        params_dtype=dtype,
        use_distributed_optimizer=config.distributed_optimizer,
    )
    with quiet():
        ddp = DistributedDataParallel(transformer, settings, model)
        optimizer = get_megatron_optimizer(optimizer_config, [ddp])
    scheduler = OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.peak_lr,
        min_lr=config.peak_lr * config.min_lr_ratio,
        lr_warmup_steps=config.warmup_iterations,
        lr_decay_steps=config.iterations,
        lr_decay_style="cosine",
        start_wd=config.weight_decay,
        end_wd=config.weight_decay,
        wd_incr_steps=config.iterations,
        wd_incr_style="constant",
    )
    transformer.grad_scale_func = optimizer.scale_loss
    transformer.finalize_model_grads_func = finalize_model_grads
    return Parts(transformer, ddp, optimizer, scheduler)


class Compute:
    """Forward, backward and gradient reduction of one iteration, by Megatron's own schedule.

    Parameters
    ----------
    config, parts
        The run and its Megatron objects.
    at_microbatch
        Called with (iteration, microbatch) in every forward step before it computes: drills stop here.
    at_loss
        Called with the microbatch when its loss is computed, on the last stage: the backward pass follows.
    lending
        Makes what surrounds every forward pass where the run lends memory (`ResumableUpdater.lending`).
    text
        The training text, if it was read already.
    """

    def __init__(
        self,
        config: Config,
        parts: Parts,
        at_microbatch: Callable[[int, int], None] | None = None,
        text: Corpus | None = None,
        at_loss: Callable[[int], None] | None = None,
        lending: Callable[[int], contextlib.AbstractContextManager[Any]] | None = None,
    ) -> None:
        from megatron.core import parallel_state as ps
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.config = config
        self.parts = parts
        self.at_microbatch = at_microbatch
        self.at_loss = at_loss
        lend = config.lend_bytes
        self._lending = partial(lending, lend) if lending is not None and lend else contextlib.nullcontext
        self.data_parallel: int = ps.get_data_parallel_world_size()
        self._data_rank: int = ps.get_data_parallel_rank()
        # With context parallelism: the group that gradients are reduced in, so no further communicator.
        self._data_group = ps.get_data_parallel_group(with_context_parallel=True)
        self._schedule = get_forward_backward_func()
        self._device = torch.cuda.current_device()
        shape = (config.micro_batch, config.sequence)
        self._positions = torch.arange(config.sequence, device=self._device).unsqueeze(0).expand(shape)
        full = torch.ones(1, 1, config.sequence, config.sequence, dtype=torch.bool, device=self._device)
        self._mask = torch.triu(full, 1)
        self._corpus = text if text is not None else corpus(config)
        self._consumed = BatchDigest()

    @property
    def batch_digest(self) -> str:
        """Digest of the tokens and labels that the newest iteration fed to the model on this rank."""
        return self._consumed.hexdigest()

    def __call__(self, iteration: int) -> torch.Tensor | None:
        """Leave the reduced gradients in the buffers; return the mean loss (fp32, 1 element).

        The loss is known on the last pipeline stage; elsewhere None.
        """
        self._consumed = BatchDigest()
        self.parts.ddp.zero_grad_buffer()
        self.parts.optimizer.zero_grad()
        reports = self._schedule(
            forward_step_func=self._forward,
            data_iterator=self._batches(iteration),
            model=self.parts.ddp,
            num_microbatches=self.config.microbatches,
            seq_length=self.config.sequence,
            micro_batch_size=self.config.micro_batch,
            forward_only=False,
        )
        if not reports:
            return None
        return torch.stack([r["loss"] for r in reports]).mean()

    def _batches(self, iteration: int) -> Iterator[tuple[int, int, Batch]]:
        for microbatch in range(self.config.microbatches):
            yield (
                iteration,
                microbatch,
                self._corpus.batch(iteration, microbatch, self._data_rank, self.config.micro_batch),
            )

    def _forward(self, batches: Iterator[tuple[int, int, Batch]], model: Any) -> tuple[torch.Tensor, Any]:
        iteration, microbatch, batch = next(batches)
        if self.at_microbatch is not None:
            self.at_microbatch(iteration, microbatch)
        self._consumed.add(batch)
        tokens, labels = batch.tokens.to(self._device), batch.labels.to(self._device)
        loss = partial(self._loss, microbatch)
        with self._lending():
            return model(tokens, self._positions, self._mask, labels=labels), loss

    def _loss(self, microbatch: int, output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        loss = output.float().mean()
        report = loss.detach().clone()
        dist.all_reduce(report, group=self._data_group)
        if self.at_loss is not None:
            self.at_loss(microbatch)
        return loss, {"loss": report / self.data_parallel}


def corpus(config: Config) -> Corpus:
    """The training text of a run."""
    return Corpus(load_stdlib(config.corpus_bytes), config.sequence, config.seed)
