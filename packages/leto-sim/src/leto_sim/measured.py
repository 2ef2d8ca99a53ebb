"""What the profiler is asked to measure, what it found, and the profile file made of both.

Role: the half of ``leto-sim profile`` that needs no torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from leto_sim.errors import SimError

__all__ = ["Measured", "StageConfig", "profile_toml"]


@dataclass(frozen=True)
class StageConfig:
    """What to measure: shape of one bracket, microbatch, and how the job is to be laid out.

    ``experts`` 0 is a dense model. The layout (data, pipeline) is what the profile describes, not what runs
    now; ``tensor`` must be what runs now (1, or the ranks of torchrun).
    """

    name: str = "profiled stage"
    layers: int = 2
    hidden_size: int = 1024
    heads: int = 16
    ffn_hidden_size: int = 4096
    sequence_length: int = 1024
    micro_sequences: int = 1
    vocabulary: int = 32768
    experts: int = 0
    router_top_k: int = 2
    data: int = 1
    tensor: int = 1
    pipeline: int = 1
    virtual_pipeline: int = 1
    microbatches: int = 8
    gpus_per_node: int = 8
    repeats: int = 10
    warmup: int = 3
    bandwidth_gb_per_s: float = 25.0
    latency_us: float = 20.0

    def __post_init__(self) -> None:
        for field, least in (
            ("layers", 1),
            ("hidden_size", 8),
            ("heads", 1),
            ("sequence_length", 1),
            ("repeats", 1),
        ):
            if getattr(self, field) < least:
                raise SimError(f"profile.{field}: expected at least {least}, found {getattr(self, field)}")
        if self.hidden_size % self.heads:
            raise SimError(
                f"profile.hidden_size: expected a multiple of {self.heads} heads, found {self.hidden_size}"
            )


@dataclass(frozen=True)
class Measured:
    """Medians of the measurement: milliseconds, parameter counts of one rank, and where it ran."""

    forward_ms: float
    backward_ms: float
    parameters: int
    expert_parameters: int
    embedding_ms: float
    head_ms: float
    optimizer_ns_per_parameter: float
    latency_us: float
    bandwidth_gb_per_s: float
    collectives_measured: bool
    device: str
    dtype: Literal["bf16", "fp32"]


def profile_toml(config: StageConfig, m: Measured) -> str:
    """Return the profile file for a measurement; `parse_profile` accepts it."""
    sequences = config.microbatches * config.micro_sequences * config.data
    activation = (
        config.sequence_length * config.micro_sequences * config.hidden_size * (2 if m.dtype == "bf16" else 4)
    )
    given = "" if m.collectives_measured else "; network figures given, not measured"
    bracket = f"""
[[bracket]]
name = "{config.layers} layers"
forward_ms = {m.forward_ms:.6g}
backward_ms = {m.backward_ms:.6g}
parameters = {m.parameters}
expert_parameters = {m.expert_parameters}
"""
    return f"""schema = 1
name = {_quote(config.name)}
source = {_quote(f"leto-sim profile on {m.device}, {m.dtype}, median of {config.repeats}{given}")}

[job]
gpus = {config.data * config.tensor * config.pipeline}

[parallelism]
data = {config.data}
tensor = {config.tensor}
pipeline = {config.pipeline}
gpus_per_node = {config.gpus_per_node}

[batch]
global_sequences = {sequences}
micro_sequences = {config.micro_sequences}
{bracket * config.virtual_pipeline}
[pipeline]
embedding_ms = {m.embedding_ms:.6g}
head_ms = {m.head_ms:.6g}
activation_bytes = {activation}
p2p_latency_us = {m.latency_us:.6g}
p2p_bandwidth_gb_per_s = {m.bandwidth_gb_per_s:.6g}

[gradients]
latency_us = {m.latency_us:.6g}
bandwidth_gb_per_s = {m.bandwidth_gb_per_s:.6g}
algorithm = "tree"

[optimizer]
ns_per_parameter = {m.optimizer_ns_per_parameter:.6g}
"""


def _quote(text: str) -> str:
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'
