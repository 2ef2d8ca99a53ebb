"""Iteration time from a stage profile: T_iter = T_pipeline + T_sync + T_update (appendix C.1).

Role: puts `pipeline`, `overlap` and `collectives` together for a checked profile. Choices that the paper
leaves open, made here:

* the window W is the backward of one microbatch through the stage, i.e. that of the last one, in which
  gradients become final;
* dense and expert parameters live in separate buffers (as in Megatron), reduced over dp and over
  dp * tp / (ep * etp) ranks; both share the one channel;
* sharded optimizers reduce-scatter gradients and all-gather parameters, others all-reduce gradients;
* expert groups span nodes if ep * etp exceeds the GPUs of a node; only then the MoE constant applies;
* T_update = fixed + ns/parameter of the local shard + a scalar reduction over the world (tree) + all-gather.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from leto_sim.collectives import Collective, PointToPoint
from leto_sim.overlap import Bucket, buckets_of, sync_with_overlap_s
from leto_sim.pipeline import Bracket, pipeline_s, stages_of
from leto_sim.profile import Profile

__all__ = ["IterationTime", "iteration_time"]


@dataclass(frozen=True)
class IterationTime:
    """Predicted seconds of one iteration, by term; ``sync_serial_s`` is T_sync without overlap."""

    total_s: float
    pipeline_s: float
    sync_s: float
    update_s: float
    sync_serial_s: float
    bubble_fraction: float
    microbatches: int


def iteration_time(profile: Profile) -> IterationTime:
    """Predict T_iter of a profile; a stated ``job.iteration_s`` is returned as it is when there is no
    stage.
    """
    if not profile.has_stage:
        stated = float(profile.data["job"]["iteration_s"])
        return IterationTime(stated, stated, 0.0, 0.0, 0.0, 0.0, 1)
    data = profile.data
    chunks = [Bracket(**row) for row in data["bracket"]]
    p, batch = data["parallelism"], data["batch"]
    pipe = data["pipeline"] or {}
    transfer_s = 0.0
    if pipe and p["pipeline"] > 1:
        link = PointToPoint(pipe["p2p_latency_us"], pipe["p2p_bandwidth_gb_per_s"])
        transfer_s = link.time_s(pipe["activation_bytes"])
    embedding_s, head_s = pipe.get("embedding_ms", 0.0) * 1e-3, pipe.get("head_ms", 0.0) * 1e-3
    stages = stages_of(chunks, p["pipeline"], embedding_s, head_s)
    microbatches = batch["global_sequences"] // (p["data"] * batch["micro_sequences"])
    piped_s = pipeline_s(stages, microbatches, transfer_s)
    bubbles = (p["pipeline"] - 1) / len(chunks)

    sync_s, serial_s = _synchronisation(chunks, data, stages[0].backward_s)
    update_s = _update(chunks, data, profile.gpus)
    return IterationTime(
        total_s=piped_s + sync_s + update_s,
        pipeline_s=piped_s,
        sync_s=sync_s,
        update_s=update_s,
        sync_serial_s=serial_s,
        bubble_fraction=bubbles / (microbatches + bubbles),
        microbatches=microbatches,
    )


def _buffers(chunks: list[Bracket], p: dict[str, Any]) -> list[tuple[float, int]]:
    """(parameters of one rank, ranks that share them) of the dense and the expert buffer."""
    experts = p["data"] * p["tensor"] // (p["expert"] * p["expert_tensor"])
    return [
        (sum(c.parameters for c in chunks), p["data"]),
        (sum(c.expert_parameters for c in chunks), experts),
    ]


def _synchronisation(chunks: list[Bracket], data: Any, window_s: float) -> tuple[float, float]:
    """(T_sync as it counts, T_sync without overlap)."""
    g, p = data["gradients"], data["parallelism"]
    fabric = Collective(g["latency_us"], g["bandwidth_gb_per_s"], g["algorithm"])
    one = fabric.one_pass_s if g["sharded"] else fabric.all_reduce_s
    width = g["bytes_per_parameter"]
    queue: list[Bucket] = []
    serial_s = 0.0
    for parameters, ranks in _buffers(chunks, p):
        ready = 0.0
        for size in buckets_of(parameters, p["data"]).tolist():
            ready += size
            alone_s = one(size * width, ranks)
            serial_s += alone_s
            queue.append(Bucket(size, ready / parameters, alone_s * g["concurrency_penalty"]))
    if not g["overlap"]:
        return serial_s, serial_s
    spans_nodes = p["expert"] * p["expert_tensor"] > p["gpus_per_node"]
    counted_s = sync_with_overlap_s(
        queue,
        window_s,
        serial_s,
        dense_constant=g["dense_interference"],
        moe_constant=g["moe_interference"] if spans_nodes else 0.0,
        alltoall_s=sum(c.alltoall_backward_ms for c in chunks) * 1e-3,
    )
    return counted_s, serial_s


def _update(chunks: list[Bracket], data: Any, gpus: int) -> float:
    """T_update in seconds."""
    o, g, p = data["optimizer"], data["gradients"], data["parallelism"]
    fabric = Collective(g["latency_us"], g["bandwidth_gb_per_s"], g["algorithm"])
    total_s = float(o["fixed_ms"]) * 1e-3
    total_s += o["reduction_latency_us"] * 1e-6 * (math.ceil(math.log2(gpus)) if gpus > 1 else 0)
    for parameters, ranks in _buffers(chunks, p):
        share = parameters / ranks if g["sharded"] else parameters
        total_s += share * o["ns_per_parameter"] * 1e-9
        if g["sharded"]:
            total_s += fabric.one_pass_s(parameters * o["gather_bytes_per_parameter"], ranks)
    return float(total_s)
