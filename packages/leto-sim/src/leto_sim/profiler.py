"""Measure one pipeline stage of a Megatron-Core model on the GPUs at hand, and write a profile of it.

Role: ``leto-sim profile``: the brackets, embedding, head, optimizer and collectives that `leto_sim.iteration`
extrapolates from (appendix C.1.1 and C.1.2). torch and megatron-core are imported here only, and lazily: the
simulator needs neither. On one GPU (or CPU) the collectives cannot be measured and are given as arguments;
under torchrun they are measured over all ranks and fitted. What a single process cannot see, it does not
invent: the profile's ``source`` says which figures were measured and which were given.

A bracket here is a GPTModel without embedding and head (``pre_process`` and ``post_process`` false), local
layer spec, whose tensor-parallel communication lies inside the timed interval.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from leto_sim.collectives import fit_point_to_point
from leto_sim.errors import MissingDependencyError, SimError
from leto_sim.measured import Measured, StageConfig

__all__ = ["profile_stage"]


def profile_stage(config: StageConfig) -> Measured:
    """Measure the stage. Raises MissingDependencyError without torch or megatron-core.

    Uses the process group that torchrun set up, or one of its own with a single rank, which it destroys.
    """
    torch = _need("torch", "pip install torch")
    _need("megatron.core", "pip install --no-deps megatron-core==0.16.1")
    dist: Any = importlib.import_module("torch.distributed")
    on_gpu = bool(torch.cuda.is_available())
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world != config.tensor:
        raise SimError(f"profile.tensor: expected the {world} running ranks, found {config.tensor}")
    if on_gpu:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
    backend = "nccl" if on_gpu else "gloo"
    if world > 1:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    states: Any = importlib.import_module("megatron.core.parallel_state")
    try:
        states.initialize_model_parallel(tensor_model_parallel_size=config.tensor)
        with contextlib.nullcontext() if on_gpu else _megatron_on_cpu(torch):
            return _measure(torch, dist, config, on_gpu, world)
    finally:
        states.destroy_model_parallel()
        dist.destroy_process_group()


def _need(module: str, how: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise MissingDependencyError(
            f"leto-sim profile needs {module}, which cannot be imported: {how}"
        ) from error


@contextlib.contextmanager
def _megatron_on_cpu(torch: Any) -> Iterator[None]:
    """Let Megatron-Core build and run on CPU: its device and its RNG tracker point at the CPU for a while."""
    rng: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    saved = (torch.cuda.current_device, rng._get_cuda_rng_state, rng._set_cuda_rng_state)
    torch.cuda.current_device = lambda: torch.device("cpu")
    rng._get_cuda_rng_state = lambda *a, **k: torch.get_rng_state()
    rng._set_cuda_rng_state = lambda state, *a, **k: torch.set_rng_state(state)
    try:
        yield
    finally:
        torch.cuda.current_device, rng._get_cuda_rng_state, rng._set_cuda_rng_state = saved


def _measure(torch: Any, dist: Any, config: StageConfig, on_gpu: bool, world: int) -> Measured:
    device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
    dtype = torch.bfloat16 if on_gpu else torch.float32
    model = _model(torch, config, on_gpu, dtype).to(
        device=device, dtype=dtype
    )  # norms, too, as Float16Module does
    counts = [0, 0]
    for name, parameter in model.named_parameters():
        counts[".experts." in name] += parameter.numel()

    clock = _Clock(torch, on_gpu, config)
    shape = (config.sequence_length, config.micro_sequences, config.hidden_size)
    hidden = torch.randn(shape, device=device, dtype=dtype, requires_grad=True)
    gradient = torch.randn(shape, device=device, dtype=dtype)
    positions = torch.arange(config.sequence_length, device=device).expand(config.micro_sequences, -1)
    size = (1, 1, config.sequence_length, config.sequence_length)
    mask = torch.triu(torch.ones(size, dtype=torch.bool, device=device), 1)

    def forward() -> Any:
        model.set_input_tensor(hidden)
        return model(None, positions, mask)

    forward_ms, backward_ms = clock.forward_backward(forward, lambda out: out.backward(gradient))
    embedding_ms, head_ms = _ends(torch, config, clock, hidden, gradient, device, dtype)
    step_ns = _optimizer_ns(torch, clock, device, on_gpu)
    latency_us, bandwidth = config.latency_us, config.bandwidth_gb_per_s
    if world > 1:
        latency_us, bandwidth = _collectives(torch, dist, clock, device, world)
    return Measured(
        forward_ms=forward_ms,
        backward_ms=backward_ms,
        parameters=counts[0],
        expert_parameters=counts[1],
        embedding_ms=embedding_ms,
        head_ms=head_ms,
        optimizer_ns_per_parameter=step_ns,
        latency_us=latency_us,
        bandwidth_gb_per_s=bandwidth,
        collectives_measured=world > 1,
        device=str(torch.cuda.get_device_name()) if on_gpu else "CPU",
        dtype="bf16" if on_gpu else "fp32",
    )


def _model(torch: Any, config: StageConfig, on_gpu: bool, dtype: Any) -> Any:
    """A GPTModel with only the layers of one bracket."""
    gpt: Any = importlib.import_module("megatron.core.models.gpt")
    specs: Any = importlib.import_module("megatron.core.models.gpt.gpt_layer_specs")
    transformer: Any = importlib.import_module("megatron.core.transformer.transformer_config")
    parallel: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    moe = {}
    if config.experts:
        utilities: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
        if not hasattr(utilities, "te_general_gemm"):  # 0.16.1 names it without TransformerEngine installed
            utilities.te_general_gemm = None
        moe = {
            "num_moe_experts": config.experts,
            "moe_router_topk": config.router_top_k,
            "moe_ffn_hidden_size": config.ffn_hidden_size,
            "moe_router_load_balancing_type": "none",
            "moe_token_dispatcher_type": "allgather",
            "add_bias_linear": False,
        }
    if on_gpu:
        parallel.model_parallel_cuda_manual_seed(1234)
    else:
        parallel.get_cuda_rng_tracker().set_states({"model-parallel-rng": torch.get_rng_state()})
    settings = transformer.TransformerConfig(
        num_layers=config.layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.heads,
        ffn_hidden_size=config.ffn_hidden_size,
        tensor_model_parallel_size=config.tensor,
        params_dtype=dtype,
        bf16=on_gpu,
        use_cpu_initialization=not on_gpu,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        persist_layer_norm=False,
        apply_rope_fusion=False,
        **moe,
    )
    spec = specs.get_gpt_layer_local_spec(num_experts=config.experts or None, normalization="LayerNorm")
    return gpt.GPTModel(
        config=settings,
        transformer_layer_spec=spec,
        vocab_size=config.vocabulary,
        max_sequence_length=config.sequence_length,
        pre_process=False,
        post_process=False,
        share_embeddings_and_output_weights=False,
        position_embedding_type="rope",
    )


class _Clock:
    """Median milliseconds over repeats after a warm-up: CUDA events on a GPU, the host's clock otherwise."""

    def __init__(self, torch: Any, on_gpu: bool, config: StageConfig) -> None:
        self.torch, self.on_gpu, self.config = torch, on_gpu, config

    def now(self) -> Any:
        if not self.on_gpu:
            return time.perf_counter()
        event = self.torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def ms(self, begin: Any, end: Any) -> float:
        if not self.on_gpu:
            return float((end - begin) * 1e3)
        end.synchronize()
        return float(begin.elapsed_time(end))

    def forward_backward(
        self, forward: Callable[[], Any], backward: Callable[[Any], Any]
    ) -> tuple[float, float]:
        rows = []
        for i in range(self.config.warmup + self.config.repeats):
            a = self.now()
            out = forward()
            b = self.now()
            backward(out)
            c = self.now()
            if i >= self.config.warmup:
                rows.append((self.ms(a, b), self.ms(b, c)))
        return statistics.median(r[0] for r in rows), statistics.median(r[1] for r in rows)

    def run(self, work: Callable[[], Any]) -> float:
        return self.forward_backward(work, lambda out: None)[0]


def _ends(
    torch: Any, config: StageConfig, clock: _Clock, hidden: Any, gradient: Any, device: Any, dtype: Any
) -> tuple[float, float]:
    """(embedding, output head with loss), forward and backward, in milliseconds, on this rank's share."""
    rows = max(1, config.vocabulary // config.tensor)
    tokens = torch.randint(0, rows, (config.sequence_length, config.micro_sequences), device=device)
    table = torch.nn.Embedding(rows, config.hidden_size, device=device, dtype=dtype)
    head = torch.nn.Linear(config.hidden_size, rows, bias=False, device=device, dtype=dtype)

    def loss() -> Any:
        logits = head(hidden.detach().requires_grad_())
        return torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), tokens.flatten())

    first = clock.forward_backward(lambda: table(tokens), lambda out: out.backward(gradient))
    last = clock.forward_backward(loss, lambda out: out.backward())
    return sum(first), sum(last)


def _optimizer_ns(torch: Any, clock: _Clock, device: Any, on_gpu: bool) -> float:
    """Nanoseconds a parameter of AdamW on fp32 masters (fused on a GPU), from the slope of two sizes."""
    times = []
    sizes = (1 << 22, 1 << 24) if on_gpu else (1 << 16, 1 << 18)
    for size in sizes:
        weight = torch.nn.Parameter(torch.zeros(size, device=device))
        weight.grad = torch.ones_like(weight)
        step = torch.optim.AdamW([weight], lr=1e-4, fused=True if on_gpu else None).step
        times.append(clock.run(step))
    return max(1e-6, (times[1] - times[0]) * 1e6 / (sizes[1] - sizes[0]))


def _collectives(torch: Any, dist: Any, clock: _Clock, device: Any, world: int) -> tuple[float, float]:
    """(latency per tree step in us, bus bandwidth in GB/s) of reduce-scatter over all ranks.

    A tree, because a ring's latency extrapolated to thousands of ranks is one that no library would accept.
    """
    sizes, seconds = [], []
    for exponent in (16, 20, 24, 26):
        count = (1 << exponent) // world * world
        source = torch.ones(count, device=device)
        target = torch.empty(count // world, device=device)
        ms = clock.run(lambda a=target, b=source: dist.reduce_scatter_tensor(a, b))  # type: ignore[misc]
        sizes.append((world - 1) / world * count * 4)
        seconds.append(max(ms, 1e-4) * 1e-3)
    curve = fit_point_to_point(sizes, seconds)
    return curve.latency_us / math.ceil(math.log2(world)), curve.bandwidth_gb_per_s
