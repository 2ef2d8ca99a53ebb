"""Checkpoint intervals: Young's formula with the right failure rate, and the numerically best interval.

Appendix A.2: I* = sqrt(2 p MTTF / t_iter) iterations, p being the per-checkpoint cost in iterations, i.e.
sqrt(2 T_ckpt MTTF) / T_iter. Section 8.1: only fatal failures roll Leto back, so its MTTF is M / (1 - h); at
h = 1 there is no finite answer and the largest interval at hand is used.
"""

from __future__ import annotations

import math

import numpy as np

from leto_sim.errors import RecoveryTooSlowError, SimError
from leto_sim.ettr import check_setting, evaluate_at
from leto_sim.renewal import exact_ettr
from leto_sim.systems import System

__all__ = ["best_interval", "best_interval_exact", "rollback_mttf_s", "tuned_interval", "young_interval"]


def young_interval(stall_s: float, mttf_s: float, iteration_s: float) -> float:
    """Return Young's interval in iterations, unrounded; infinite for an infinite MTTF, 0 for a free
    checkpoint.
    """
    if iteration_s <= 0 or stall_s < 0 or not mttf_s > 0:
        raise SimError(
            f"expected iteration_s > 0, stall_s >= 0, mttf_s > 0, found {iteration_s}, {stall_s}, {mttf_s}"
        )
    return math.sqrt(2 * stall_s * mttf_s) / iteration_s if math.isfinite(mttf_s) else math.inf


def rollback_mttf_s(system: System, mttf_s: float, hof_ratio: float) -> float:
    """Mean time between the failures that roll this system back: M, or M / (1 - h) for Leto."""
    if system.interval_counts_hof:
        return mttf_s
    return mttf_s / (1 - hof_ratio) if hof_ratio < 1 else math.inf


def tuned_interval(system: System, iteration_s: float, mttf_s: float, hof_ratio: float) -> int:
    """Return the interval that the paper's method selects: fixed by design, or Young's, rounded, within
    limits.
    """
    check_setting(iteration_s, mttf_s, hof_ratio)
    if system.fixed_interval_iterations is not None:
        return system.fixed_interval_iterations
    ideal = young_interval(system.checkpoint_stall_s, rollback_mttf_s(system, mttf_s, hof_ratio), iteration_s)
    return int(
        min(
            max(1, math.floor(ideal + 0.5) if math.isfinite(ideal) else math.inf),
            system.interval_max_iterations,
        )
    )


def best_interval(system: System, iteration_s: float, mttf_s: float, hof_ratio: float) -> int:
    """Return the integer interval with the largest closed-form ETTR, by trying all up to the system's
    largest.

    Intervals whose recovery would not be below the MTTF are left out; RecoveryTooSlowError if none is left.
    """
    if system.fixed_interval_iterations is not None:
        return system.fixed_interval_iterations
    # Recovery is convex in the interval: the feasible ones are a run, but a huge stall may exclude the small
    # ones.
    tried = np.arange(1, system.interval_max_iterations + 1)
    best, best_value, refusal = 0, -1.0, None
    try:
        values = evaluate_at(system, iteration_s, mttf_s, hof_ratio, tried)[-1]
        return int(tried[int(np.argmax(values))])
    except RecoveryTooSlowError:
        pass
    for candidate in tried.tolist():
        try:
            value = float(evaluate_at(system, iteration_s, mttf_s, hof_ratio, candidate)[-1])
        except RecoveryTooSlowError as error:
            refusal = error
            continue
        if value > best_value:
            best, best_value = candidate, value
    if best == 0:
        assert refusal is not None
        raise refusal
    return best


def best_interval_exact(system: System, iteration_s: float, mttf_s: float, hof_ratio: float) -> int:
    """Return the integer interval with the largest exact ETTR (`leto_sim.renewal`), valid at any MTTF.

    The exact ETTR is unimodal in the interval, so a ternary search over integers suffices.
    """
    if system.fixed_interval_iterations is not None:
        return system.fixed_interval_iterations

    def value(interval: int) -> float:
        return exact_ettr(system, iteration_s, mttf_s, hof_ratio, interval)

    low, high = 1, system.interval_max_iterations
    while high - low > 2:
        third = (high - low) // 3
        a, b = low + third, high - third
        if value(a) < value(b):
            low = a + 1
        else:
            high = b
    return max(range(low, high + 1), key=value)
