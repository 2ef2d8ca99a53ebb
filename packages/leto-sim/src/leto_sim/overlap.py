"""Overlap of gradient synchronisation with backward, as a queue (appendix C.1.3).

Gradients fill buckets of max(40M, 1M * dp) parameters while backward walks the stage's layers in reverse over
a window W. Bucket i is ready at r_i = rho_i * W, rho_i being the share of the parameters in buckets 1..i, and
takes w_i. One collective is in flight, so f_i = max(r_i, f_(i-1)) + w_i with f_0 = 0, and what is left after
backward is the exposed time E = max(0, f_n - W).

Interference R is the rest of T_sync = saving + E + R. Dense: R = c * (T_sync - E), so that

    T_sync_on = E + c * (T_sync - E)

MoE whose expert groups span nodes: R = f * min(G, A), with G the gradient collective and A the all-to-all;
the window is stretched by R, and T_sync_on = E' + f * min(G, A). MoE within a node: no constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from leto_sim.errors import SimError

__all__ = [
    "Bucket",
    "bucket_parameters",
    "buckets_of",
    "calibrate_dense",
    "calibrate_moe",
    "exposed_s",
    "sync_with_overlap_s",
]


@dataclass(frozen=True)
class Bucket:
    """Parameters of one bucket, the share of its buffer that is ready with it, and its transfer in
    seconds.
    """

    parameters: float
    ready_fraction: float
    transfer_s: float


def bucket_parameters(data_parallel: int) -> float:
    """Megatron's bucket size in parameters: max(40M, 1M * dp)."""
    return max(40e6, 1e6 * data_parallel)


def buckets_of(parameters: float, data_parallel: int) -> np.ndarray:
    """Split a buffer into buckets; float array of sizes in launch order, the last one possibly smaller."""
    size = bucket_parameters(data_parallel)
    if parameters <= 0:
        return np.empty(0)
    full = int(parameters // size)
    rest = parameters - full * size
    return np.array([size] * full + ([rest] if rest > 0 else []))


def exposed_s(buckets: Sequence[Bucket], window_s: float) -> float:
    """Return E: seconds of communication left when backward has ended.

    Buckets of several buffers (dense and expert parameters) share the one channel in order of readiness.
    """
    if window_s < 0:
        raise SimError(f"expected a backward window of at least 0 s, found {window_s}")
    finish = 0.0
    for b in sorted(buckets, key=lambda b: b.ready_fraction):
        finish = max(b.ready_fraction * window_s, finish) + b.transfer_s
    return max(0.0, finish - window_s)


def sync_with_overlap_s(
    buckets: Sequence[Bucket],
    window_s: float,
    serial_s: float,
    *,
    dense_constant: float = 0.0,
    moe_constant: float = 0.0,
    alltoall_s: float = 0.0,
) -> float:
    """Return T_sync_on in seconds.

    Parameters: ``serial_s`` is T_sync without overlap (G for MoE); ``dense_constant`` c and ``moe_constant``
    f in [0, 1], of which at most one may be set; ``alltoall_s`` A, the all-to-all within the window.
    """
    for name, value in (("dense_constant", dense_constant), ("moe_constant", moe_constant)):
        if not 0 <= value <= 1:
            raise SimError(f"expected {name} in [0, 1], found {value}")
    if dense_constant and moe_constant:
        raise SimError("expected one interference constant, found both: a deployment is dense or MoE")
    if moe_constant:
        shared = moe_constant * min(serial_s, alltoall_s)
        return exposed_s(buckets, window_s + shared) + shared
    exposed = exposed_s(buckets, window_s)
    return exposed + dense_constant * max(0.0, serial_s - exposed)


def calibrate_dense(sync_s: float, exposed: float, iteration_off_s: float, iteration_on_s: float) -> float:
    """Return c = R / (T_sync - E) from one configuration measured with overlap off and on.

    The residual is R = T_sync - (T_off - T_on) - E. Raises SimError if nothing was hidden or c is not in [0,
    1].
    """
    hidden = sync_s - exposed
    if hidden <= 0:
        raise SimError(f"expected some hidden communication, found T_sync {sync_s} s and E {exposed} s")
    return _fraction((sync_s - (iteration_off_s - iteration_on_s) - exposed) / hidden, "c")


def calibrate_moe(
    gradient_s: float, alltoall_s: float, exposed: float, iteration_off_s: float, iteration_on_s: float
) -> float:
    """Return f = R / min(G, A) from one configuration measured with overlap off and on."""
    shared = min(gradient_s, alltoall_s)
    if shared <= 0:
        raise SimError(f"expected both flows to take time, found G {gradient_s} s and A {alltoall_s} s")
    return _fraction((gradient_s - (iteration_off_s - iteration_on_s) - exposed) / shared, "f")


def _fraction(value: float, name: str) -> float:
    if not -1e-9 <= value <= 1 + 1e-9:
        raise SimError(
            f"expected {name} in [0, 1], found {value:.4g}: the two runs differ in more than overlap"
        )
    return min(1.0, max(0.0, value))
