"""One prediction for one setting, by any of the three methods.

Role: the front door for callers: the closed form of appendix C.3 (``closed``), the exact chain for Poisson
failures (``exact``) and the discrete-event simulation (``des``) behind one function and one result.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from leto_sim.des import Lane, Result, simulate
from leto_sim.errors import SimError
from leto_sim.ettr import evaluate_at
from leto_sim.failures import Schedule, unit_arrivals
from leto_sim.interval import best_interval, best_interval_exact, tuned_interval
from leto_sim.systems import System

__all__ = [
    "Estimate",
    "Method",
    "Simulated",
    "choose_interval",
    "evaluate",
    "poisson_schedules",
    "simulate_poisson",
    "summarize",
]

Method = Literal["closed", "exact", "des"]


@dataclass(frozen=True)
class Estimate:
    """Closed-form prediction for one system; times in seconds, ``ettr`` and the losses in [0, 1].

    1 - ettr = overhead_loss + recovery_loss, with overhead_loss = 1 - T_iter / T_eff.
    """

    system: str
    interval: int
    iteration_s: float
    effective_s: float
    recovery_hof_s: float
    recovery_ff_s: float
    recovery_s: float
    ettr: float

    @property
    def overhead_loss(self) -> float:
        return 1 - self.iteration_s / self.effective_s

    @property
    def recovery_loss(self) -> float:
        return 1 - self.ettr - self.overhead_loss


def evaluate(
    system: System, iteration_s: float, mttf_s: float, hof_ratio: float, interval: int | None = None
) -> Estimate:
    """Predict one setting.

    ``interval`` None: the system's fixed one, else Young's formula rounded (section 8.1).
    """
    chosen = interval if interval is not None else tuned_interval(system, iteration_s, mttf_s, hof_ratio)
    effective, hof, ff, mixed, value = evaluate_at(system, iteration_s, mttf_s, hof_ratio, chosen)
    return Estimate(
        system=system.name,
        interval=int(chosen),
        iteration_s=iteration_s,
        effective_s=float(effective),
        recovery_hof_s=float(hof),
        recovery_ff_s=float(ff),
        recovery_s=float(mixed),
        ettr=float(value),
    )


def choose_interval(
    system: System, iteration_s: float, mttf_s: float, hof_ratio: float, rule: int | str = "young"
) -> int:
    """Return the interval by rule: ``young`` (the paper's), ``best``, ``best-exact``, or the number given."""
    if isinstance(rule, int):
        if rule < 1:
            raise SimError(f"expected an interval of at least one iteration, found {rule}")
        return rule if system.fixed_interval_iterations is None else system.fixed_interval_iterations
    rules = {"young": tuned_interval, "best": best_interval, "best-exact": best_interval_exact}
    if rule not in rules:
        raise SimError(f"expected an interval rule among {', '.join(rules)} or a number, found {rule!r}")
    return rules[rule](system, iteration_s, mttf_s, hof_ratio)


@dataclass(frozen=True)
class Simulated:
    """Mean and standard error of the ETTR over replicas, and their sums of failures by kind."""

    ettr: float
    standard_error: float
    failures: int
    fatal: int
    during_recovery: int
    wait_s: float


def poisson_schedules(
    mttf_s: float, hof_ratio: float, failures: int, seed: int, replicas: int
) -> list[Schedule]:
    """Return ``replicas`` Poisson schedules with a horizon of ``failures`` MTTFs each (mean number of
    failures).
    """
    if failures < 1 or replicas < 1:
        raise SimError(f"expected failures and replicas >= 1, found {failures} and {replicas}")
    out = []
    for replica in range(replicas):
        arrivals, marks = unit_arrivals(int(failures + 10 * math.sqrt(failures) + 20), seed, replica)
        kept = arrivals < failures
        out.append(Schedule(arrivals[kept] * mttf_s, marks[kept] >= hof_ratio, failures * mttf_s))
    return out


def simulate_poisson(
    system: System,
    iteration_s: float,
    mttf_s: float,
    hof_ratio: float,
    interval: int,
    *,
    failures: int = 500,
    replicas: int = 8,
    seed: int = 0,
    spares: int | None = None,
    repair_s: float = 0.0,
    shadow_rebuild_s: float = 0.0,
) -> Simulated:
    """Simulate one setting under Poisson failures; reproducible by ``seed``."""
    lanes = [
        Lane(system, iteration_s, interval, schedule, spares, repair_s, shadow_rebuild_s)
        for schedule in poisson_schedules(mttf_s, hof_ratio, failures, seed, replicas)
    ]
    return summarize(simulate(lanes))


def summarize(results: Sequence[Result]) -> Simulated:
    """Return mean, standard error (0 for a single run) and totals of replicas of one setting."""
    values = np.array([r.ettr for r in results])
    error = float(values.std(ddof=1) / math.sqrt(values.size)) if values.size > 1 else 0.0
    return Simulated(
        ettr=float(values.mean()),
        standard_error=error,
        failures=sum(r.failures for r in results),
        fatal=sum(r.fatal for r in results),
        during_recovery=sum(r.during_recovery for r in results),
        wait_s=sum(r.wait_s for r in results),
    )
