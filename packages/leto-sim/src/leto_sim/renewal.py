"""ETTR under Poisson failures, exactly: the third opinion between closed form and simulation.

The closed form (appendix C.3) needs recovery to be short against the MTTF and failures not to overlap. For
Poisson arrivals neither is needed: the job is a Markov chain over j, the iterations completed since the
newest usable checkpoint, and the expected time of one checkpoint period follows from linear equations in one
unknown. Not in the paper; it exists because a closed form and a simulation by the same author can share a
mistake.

With failure rate r = 1/MTTF, d_j the length of the iteration begun in state j, s_j = exp(-r d_j), E_j the
expected time from there to the end of the period, D_H and D_F the two downtimes (detection, initialisation,
conversion), e = exp(-r D):

    E_j = (1 - s_j)/r + s_j E_(j+1) + (1 - s_j) (h H_j + (1 - h) F)
    F   = (exp(r D_F) - 1)/r + E_0                              every failure during it starts it again
    H_j = (1 - e)/r + e X + (1 - e)(h H_j + (1 - h) F)          X = E_j if the HOF retains state, else E_0

A period ends when the next checkpoint becomes usable; ETTR = I T_iter / (time of a period). The rules for a
failure during recovery are those of `leto_sim.des`: a recovery that was fatal stays fatal.
"""

from __future__ import annotations

import math

from leto_sim.ettr import check_setting
from leto_sim.systems import System

__all__ = ["exact_ettr", "restart_ettr"]


def exact_ettr(system: System, iteration_s: float, mttf_s: float, hof_ratio: float, interval: int) -> float:
    """Return the long-run ETTR under Poisson failures, failures during recovery included.

    Unlimited spares. 0.0 where a period would take longer than a float can say.
    """
    check_setting(iteration_s, mttf_s, hof_ratio)
    rate = 1 / mttf_s
    plain_s = iteration_s * (1 + system.overhead_fraction)
    average_s = plain_s + system.checkpoint_stall_s / interval
    convert_s = system.conversion_iterations * interval * average_s
    down_ff_s = system.detection_s + system.initialize_ff_s + convert_s
    down_hof_s = system.detection_s + system.initialize_hof_s + (0.0 if system.retains_on_hof else convert_s)
    try:
        ff_wait = math.expm1(rate * down_ff_s) / rate
    except OverflowError:
        return 0.0
    e = math.exp(-rate * down_hof_s)
    h, lag = hof_ratio, system.commit_lag_iterations
    share = 1 - h * (1 - e)  # H_j = c0 + ex X + (1 - ex) E_0
    c0 = ((1 - e) / rate + (1 - e) * (1 - h) * ff_wait) / share
    ex = e / share

    # E_j = a + (1 - c) E_0, from the end of the period backwards. Keeping c = 1 - b avoids the cancellation
    # in 1 - b when success is rare; that c obeys c_j = s c_(j+1) / own follows from the probabilities summing
    # to 1.
    a, c = 0.0, 1.0
    at_lag = (0.0, 1.0)
    for j in range(interval + lag - 1, -1, -1):
        stalled = j + 1 - lag > 0 and (j + 1 - lag) % interval == 0
        s = math.exp(-rate * (plain_s + (system.checkpoint_stall_s if stalled else 0.0)))
        fail = 1 - s
        own = 1 - fail * h * ex if system.retains_on_hof else 1.0
        a = (fail / rate + s * a + fail * (h * c0 + (1 - h) * ff_wait)) / own
        c = s * c / own
        if j == lag:
            at_lag = (a, c)
    if c <= 0:
        return 0.0
    start_s = a / c
    period_s = at_lag[0] + (1 - at_lag[1]) * start_s
    return interval * iteration_s / period_s if math.isfinite(period_s) else 0.0


def restart_ettr(iteration_s: float, effective_s: float, down_s: float, mttf_s: float) -> float:
    """Return the ETTR of a job that repeats one iteration after each failure (Leto with HOFs only, no stall).

    exp(-r D) r T_iter / (exp(r T_eff) - 1): the textbook restart formula, a check on `exact_ettr`.
    """
    rate = 1 / mttf_s
    return math.exp(-rate * down_s) * rate * iteration_s / math.expm1(rate * effective_s)
