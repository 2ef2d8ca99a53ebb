"""Parametric model of a collective: a latency per step and a bandwidth, fitted to isolated measurements.

Role: appendix C.1.2 ("collective operations that we profile in isolation and fit to a parametric model").
The paper names no form; ours is the usual alpha-beta one, stated here because every scaled-up figure rests
on it:

    reduce-scatter or all-gather of B bytes over n ranks:  steps(n) * alpha + (n - 1) / n * B / beta
    all-reduce:                                            twice that

with steps(n) = n - 1 for a ring and ceil(log2 n) for a tree.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from leto_sim.errors import SimError

__all__ = ["Collective", "PointToPoint", "fit_point_to_point"]


@dataclass(frozen=True)
class PointToPoint:
    """A send and its receive: ``latency_us`` + bytes / ``bandwidth_gb_per_s`` (1 GB = 1e9 bytes)."""

    latency_us: float
    bandwidth_gb_per_s: float

    def time_s(self, nbytes: float) -> float:
        """Seconds to move ``nbytes`` bytes to a neighbour."""
        return self.latency_us * 1e-6 + nbytes / (self.bandwidth_gb_per_s * 1e9)


@dataclass(frozen=True)
class Collective:
    """A collective over n ranks with a latency per step (us) and a bus bandwidth (GB/s, 1e9 bytes)."""

    latency_us: float
    bandwidth_gb_per_s: float
    algorithm: Literal["ring", "tree"] = "tree"

    def steps(self, ranks: int) -> int:
        """Latency-bound steps of one pass over ``ranks`` ranks."""
        return ranks - 1 if self.algorithm == "ring" else math.ceil(math.log2(ranks)) if ranks > 1 else 0

    def one_pass_s(self, nbytes: float, ranks: int) -> float:
        """Seconds of a reduce-scatter or an all-gather of ``nbytes`` (the unsharded size); 0 for one rank."""
        if ranks <= 1 or nbytes <= 0:
            return 0.0
        return self.steps(ranks) * self.latency_us * 1e-6 + (ranks - 1) / ranks * nbytes / (
            self.bandwidth_gb_per_s * 1e9
        )

    def all_reduce_s(self, nbytes: float, ranks: int) -> float:
        """Seconds of an all-reduce: a reduce-scatter and an all-gather."""
        return 2 * self.one_pass_s(nbytes, ranks)


def fit_point_to_point(nbytes: Sequence[float], seconds: Sequence[float]) -> PointToPoint:
    """Fit latency and bandwidth to measured (bytes, seconds) pairs, weighting relative errors equally.

    Raises SimError for fewer than two sizes or a fit without a positive bandwidth.
    """
    x, y = np.asarray(nbytes, dtype=float), np.asarray(seconds, dtype=float)
    if x.shape != y.shape or len(set(x.tolist())) < 2 or not np.all(y > 0):
        raise SimError("a curve fit needs at least two different sizes with positive times")
    a = np.stack([np.ones_like(x), x], axis=1) / y[:, None]
    (alpha, beta), *_ = np.linalg.lstsq(a, np.ones_like(y), rcond=None)
    if beta <= 0:
        raise SimError(
            f"the measured times do not grow with size (slope {beta:.3g} s/byte): measure larger messages"
        )
    return PointToPoint(latency_us=max(0.0, float(alpha)) * 1e6, bandwidth_gb_per_s=1e-9 / float(beta))
