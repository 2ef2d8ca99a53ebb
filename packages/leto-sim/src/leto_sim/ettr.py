"""ETTR in closed form: equations 1 to 8 of appendix C.3, with HOF and FF mixed.

    T_ref(i)  = i T_iter                                              (1)
    T_eval(i) = i T_eff + T_eval(i) T_rec / MTTF                      (2)
    T_eval(i) - T_eval(i) T_rec / MTTF = i T_eff                      (3)
    T_eval(i) (1 - T_rec / MTTF) = i T_eff                            (4)
    T_eval(i) = i T_eff / (1 - T_rec / MTTF)                          (5)
    ETTR      = T_iter / T_eff * (1 - T_rec / MTTF)                   (6)
    Gemini+:  T_eff = T_iter + T_ckpt / I,      L = I/2 + 1           (7)
    Leto:     T_eff = (1 + omega) T_iter,       L = 1/2               (8)
    T_rec     = T_det + T_init + L T_eff

The text extraction prints (7)'s L as "2I + 1", (8)'s as "21", and (6) over three lines. The prose fixes all
three: between 1 and I completed iterations are lost, (I + 1)/2 on average, plus half of the one in flight.
Equation (8) as printed omits the checkpoints that Leto keeps for fatal failures, while the sentence after it
counts them; we follow the sentence: T_eff = (1 + omega) T_iter + T_ckpt / I. With a HOF ratio h,

    T_rec = h T_rec_HOF + (1 - h) T_rec_FF.

Four assumptions (C.3): T_rec < MTTF; failures do not overlap; arrivals uniform in time; a long run.
All functions broadcast over numpy arrays unless they say otherwise. Seconds and iterations throughout.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from leto_sim.errors import RecoveryTooSlowError, SimError
from leto_sim.systems import System

__all__ = [
    "check_setting",
    "effective_iteration_s",
    "ettr",
    "evaluate_at",
    "lost_iterations",
    "recovery_s",
]

Array = Any  # a float or a numpy array of floats


def lost_iterations(interval: Array, lag: Array = 1, conversion: Array = 0.0) -> Array:
    """Return L of a rollback: (I - 1)/2 completed iterations on average, the lag, half of the one in flight.

    With the lag of 1 of equation (7) this is I/2 + 1. ``conversion`` adds that many intervals (MoEvement).
    """
    return (interval - 1) / 2 + lag + 0.5 + conversion * interval


def effective_iteration_s(
    iteration_s: Array, interval: Array, stall_s: Array, overhead: Array = 0.0
) -> Array:
    """Return T_eff = (1 + omega) T_iter + T_ckpt / I."""
    return (1 + overhead) * iteration_s + stall_s / interval


def recovery_s(detection_s: Array, initialize_s: Array, lost: Array, effective_s: Array) -> Array:
    """Return T_rec = T_det + T_init + L T_eff."""
    return detection_s + initialize_s + lost * effective_s


def ettr(iteration_s: Array, effective_s: Array, recovery: Array, mttf_s: Array) -> Array:
    """Return equation (6). Raises RecoveryTooSlowError wherever the recovery time is not below the MTTF."""
    late = np.broadcast_arrays(np.asarray(recovery, float), np.asarray(mttf_s, float))
    bad = ~(late[0] < late[1])
    if bad.any():
        where = int(np.argmax(bad.ravel()))
        raise RecoveryTooSlowError(float(late[0].ravel()[where]), float(late[1].ravel()[where]))
    return iteration_s / effective_s * (1 - recovery / mttf_s)


def evaluate_at(
    system: System, iteration_s: float, mttf_s: float, hof_ratio: float, interval: Array
) -> tuple[Array, Array, Array, Array, Array]:
    """Return (T_eff, T_rec of a HOF, T_rec of an FF, mixed T_rec, ETTR) at the given interval or array of
    them.

    Raises SimError for values outside their range and RecoveryTooSlowError where T_rec >= MTTF.
    """
    check_setting(iteration_s, mttf_s, hof_ratio)
    if np.any(np.asarray(interval) < 1):
        raise SimError(f"expected a checkpoint interval of at least one iteration, found {interval}")
    effective = effective_iteration_s(
        iteration_s, interval, system.checkpoint_stall_s, system.overhead_fraction
    )
    rollback = lost_iterations(interval, system.commit_lag_iterations, system.conversion_iterations)
    lost_hof = 0.5 if system.retains_on_hof else rollback
    hof = recovery_s(system.detection_s, system.initialize_hof_s, lost_hof, effective)
    ff = recovery_s(system.detection_s, system.initialize_ff_s, rollback, effective)
    mixed = hof_ratio * hof + (1 - hof_ratio) * ff
    return effective, hof, ff, mixed, ettr(iteration_s, effective, mixed, mttf_s)


def check_setting(iteration_s: float, mttf_s: float, hof_ratio: float) -> None:
    """Raise SimError unless iteration time and MTTF are positive and finite and the HOF ratio is in [0,
    1].
    """
    for name, value in (("iteration_s", iteration_s), ("mttf_s", mttf_s)):
        if not 0 < value < float("inf"):
            raise SimError(f"{name}: expected a finite number above 0 s, found {value}")
    if not 0 <= hof_ratio <= 1:
        raise SimError(f"hof_ratio: expected a number in [0, 1], found {hof_ratio}")
