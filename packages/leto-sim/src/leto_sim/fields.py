"""The fields of a profile: every name, type, range and default.

Role: the schema that `leto_sim.profile` checks against, apart from the checks that span fields. A test holds
`docs/profiles.md` to this table.
"""

from __future__ import annotations

from typing import Any

from leto_sim.schema import Choice, Flag, Number, Spec, Table, Tables, Text

__all__ = ["SCHEMA", "SCHEMA_VERSION"]

SCHEMA_VERSION = 1

_SECONDS = (0.0, 1e6)
_COUNT = (1, 16_777_216)


def _seconds(default: Any = None) -> Number:
    return Number(*_SECONDS, default=default)


_INIT: dict[str, Spec] = {
    "initialize_s": Number(*_SECONDS),
    "initialize_ff_s": _seconds(),
    "initialize_cold_s": _seconds(),
}

_WINDOW: dict[str, Spec] = {
    **_INIT,
    "window_iterations": Number(1, 10_000, integer=True),
    "window_stall_s": Number(*_SECONDS),
    "conversion_iterations": Number(0, 10, default=1.0),
}

SCHEMA: dict[str, Spec] = {
    "schema": Number(SCHEMA_VERSION, SCHEMA_VERSION, integer=True),
    "name": Text(),
    "source": Text(default=""),
    "job": Table(
        {
            "gpus": Number(*_COUNT, integer=True),
            "iteration_s": Number(0, 1e6, default=None, above=True),
            "parameters": Number(1, 1e15, default=None),
        }
    ),
    "parallelism": Table(
        {
            "data": Number(*_COUNT, integer=True),
            "tensor": Number(1, 4096, default=1, integer=True),
            "pipeline": Number(1, 4096, default=1, integer=True),
            "expert": Number(1, 65536, default=1, integer=True),
            "expert_tensor": Number(1, 4096, default=1, integer=True),
            "gpus_per_node": Number(1, 1024, default=8, integer=True),
        },
        optional=True,
    ),
    "batch": Table(
        {
            "global_sequences": Number(1, 1e9, integer=True),
            "micro_sequences": Number(1, 1e6, integer=True),
        },
        optional=True,
    ),
    "bracket": Tables(
        {
            "name": Text(),
            "forward_ms": Number(0, 1e8, above=True),
            "backward_ms": Number(0, 1e8, above=True),
            "parameters": Number(0, 1e13),
            "expert_parameters": Number(0, 1e13, default=0.0),
            "alltoall_backward_ms": Number(0, 1e8, default=0.0),
        }
    ),
    "pipeline": Table(
        {
            "embedding_ms": Number(0, 1e8, default=0.0),
            "head_ms": Number(0, 1e8, default=0.0),
            "activation_bytes": Number(0, 1e13, default=0.0),
            "p2p_latency_us": Number(0, 1e7, default=0.0),
            "p2p_bandwidth_gb_per_s": Number(0, 1e6, default=1e6, above=True),
        },
        optional=True,
    ),
    "gradients": Table(
        {
            "bytes_per_parameter": Number(1, 8, default=4.0),
            "latency_us": Number(0, 1e7),
            "bandwidth_gb_per_s": Number(0, 1e6, above=True),
            "algorithm": Choice(("ring", "tree"), default="tree"),
            "sharded": Flag(default=True),
            "overlap": Flag(default=True),
            "concurrency_penalty": Number(1, 10, default=1.0),
            "dense_interference": Number(0, 1, default=0.0),
            "moe_interference": Number(0, 1, default=0.0),
        },
        optional=True,
    ),
    "optimizer": Table(
        {
            "fixed_ms": Number(0, 1e7, default=0.0),
            "ns_per_parameter": Number(0, 1e6),
            "reduction_latency_us": Number(0, 1e7, default=0.0),
            "gather_bytes_per_parameter": Number(1, 8, default=2.0),
        },
        optional=True,
    ),
    "failures": Table(
        {
            "mttf_s": Number(0, 1e10, default=None, above=True),
            "gpu_mttf_hours": Number(0, 1e9, default=None, above=True),
            "hof_ratio": Number(0, 1, default=None),
            "spares": Number(1, 65536, default=None, integer=True),
            "repair_s": Number(0, 1e8, default=0.0),
        },
        optional=True,
    ),
    "recovery": Table(
        {
            "detection_s": Number(*_SECONDS, default=1.0),
            "checkpoint_stall_s": Number(*_SECONDS),
            "interval_max_iterations": Number(1, 100_000, default=1024, integer=True),
            "gemini": Table(dict(_INIT), optional=True),
            "gemini+": Table(dict(_INIT), optional=True),
            "jit-ckpt": Table(dict(_INIT), optional=True),
            "jit-ckpt+": Table(dict(_INIT), optional=True),
            "moevement": Table(dict(_WINDOW), optional=True),
            "moevement+": Table(dict(_WINDOW), optional=True),
            "leto": Table(
                {
                    "initialize_s": Number(*_SECONDS),
                    "initialize_cold_s": _seconds(),
                    "overhead_fraction": Number(0, 10),
                    "fallback": Choice(
                        ("gemini+", "gemini", "jit-ckpt+", "jit-ckpt", "moevement+", "moevement")
                    ),
                    "interval_max_iterations": Number(1, 100_000, default=None, integer=True),
                    "shadow_rebuild_s": _seconds(0.0),
                },
                optional=True,
            ),
        },
        optional=True,
    ),
}
"""Every field of a profile, with its type, range and default."""
