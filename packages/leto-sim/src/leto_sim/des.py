"""Discrete-event simulation of many runs at once: failures are the events, numpy lanes are the runs.

Role: what the closed form (C.3) leaves out: failures during recovery, checkpoints as single long iterations,
irregular traces, spares that run out, a shadow that is not ready yet. Between two failures nothing random
happens, so a run's progress is arithmetic and the loop is over failures only; every step works on all lanes.
`leto_sim.reference` is the naive twin (one iteration at a time, one run) that it must equal.

Rules. A checkpoint is taken at the boundary of every I-th iteration since the last restored one and is usable
``lag`` iterations later; the iteration that commits takes T_ckpt longer. A failure at t starts a downtime of
detection + initialisation (+ conversion), then work goes on. A HOF of a retaining system keeps the completed
iterations; every other failure goes back to the newest usable checkpoint. A failure during a downtime starts
it again; once fatal, a recovery stays fatal, because nothing is retained yet. Each FF takes the earliest free
spare, whose successor is the failed node after its repair; with none free the job waits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from leto_sim.errors import SimError
from leto_sim.ettr import check_setting
from leto_sim.failures import Schedule
from leto_sim.systems import System

__all__ = ["Lane", "Result", "simulate"]

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Lane:
    """One run: a system, its iteration time and interval, a schedule of failures and a pool of spares.

    ``spares`` None: always one at hand. ``repair_s``: failure of a node until it is a spare again.
    ``shadow_rebuild_s``: time after a recovery until Leto's next shadow is ready; a HOF before that is a cold
    one (``initialize_hof_cold_s`` of the system).
    """

    system: System
    iteration_s: float
    interval: int
    schedule: Schedule
    spares: int | None = None
    repair_s: float = 0.0
    shadow_rebuild_s: float = 0.0

    def __post_init__(self) -> None:
        check_setting(self.iteration_s, 1.0, 0.0)
        if self.interval < 1:
            raise SimError(f"expected an interval of at least one iteration, found {self.interval}")
        if self.spares is not None and self.spares < 1:
            raise SimError(f"expected at least one spare (or None for always one), found {self.spares}")
        if self.repair_s < 0 or self.shadow_rebuild_s < 0:
            raise SimError(
                f"expected times >= 0 s, found repair {self.repair_s}, rebuild {self.shadow_rebuild_s}"
            )


@dataclass(frozen=True)
class Result:
    """Outcome of one run.

    ``ettr`` = iterations * T_iter / T_eval with T_eval the end of the last completed iteration (0 if there is
    none). ``downtime_s`` is all time not working, ``lost_s`` the work thrown away, ``wait_s`` the wait for
    spares.
    """

    ettr: float
    iterations: int
    elapsed_s: float
    failures: int
    fatal: int
    during_recovery: int
    downtime_s: float
    lost_s: float
    wait_s: float


def simulate(lanes: Sequence[Lane]) -> list[Result]:
    """Run all lanes; linear in the largest number of failures, with numpy steps over the lanes."""
    if not lanes:
        return []
    return _Batch(lanes).run()


class _Batch:
    """State of all lanes as vectors of length L; see `simulate`."""

    def __init__(self, lanes: Sequence[Lane]) -> None:
        def column(values: list[float]) -> Floats:
            return np.array(values, dtype=np.float64)

        systems = [lane.system for lane in lanes]
        count = len(lanes)
        self.iteration = column([lane.iteration_s for lane in lanes])
        self.plain = self.iteration * (1 + column([s.overhead_fraction for s in systems]))
        self.stall = column([s.checkpoint_stall_s for s in systems])
        self.interval = column([lane.interval for lane in lanes])
        self.lag = column([s.commit_lag_iterations for s in systems])
        self.period = self.interval * self.plain + self.stall
        self.retains = np.array([s.retains_on_hof for s in systems])
        convert = column([s.conversion_iterations for s in systems]) * self.period
        detection = column([s.detection_s for s in systems])
        self.down_hof = (
            detection + column([s.initialize_hof_s for s in systems]) + np.where(self.retains, 0, convert)
        )
        self.down_ff = detection + column([s.initialize_ff_s for s in systems]) + convert
        cold = [
            s.initialize_hof_s if s.initialize_hof_cold_s is None else s.initialize_hof_cold_s
            for s in systems
        ]
        self.down_cold = detection + column(cold) + np.where(self.retains, 0, convert)
        self.waits_for_spare = np.array([s.spare_on_hof and s.initialize_hof_cold_s is None for s in systems])
        self.spare_on_hof = np.array([s.spare_on_hof for s in systems])
        self.rebuild = column([lane.shadow_rebuild_s for lane in lanes])
        self.repair = column([lane.repair_s for lane in lanes])
        self.horizon = column([lane.schedule.horizon_s for lane in lanes])

        longest = max((lane.schedule.times_s.size for lane in lanes), default=0)
        self.times = np.full((longest, count), np.inf)
        self.fatal_marks = np.zeros((longest, count), dtype=bool)
        for i, lane in enumerate(lanes):
            size = lane.schedule.times_s.size
            self.times[:size, i] = lane.schedule.times_s
            self.fatal_marks[:size, i] = lane.schedule.fatal
        # free[k, s]: when spare s of lane k is free. A lane without a limit owns one that is always free, and
        # a lane with fewer spares than the widest is padded with ones that never are.
        widest = max(lane.spares or 1 for lane in lanes)
        self.limited = np.array([lane.spares is not None for lane in lanes])
        owned = np.array([lane.spares or 1 for lane in lanes])
        self.free = np.where(np.arange(widest)[None, :] < owned[:, None], 0.0, np.inf)

        self.base = np.zeros(count)  # iterations behind the restored checkpoint
        self.done = np.zeros(count)  # completed iterations since it
        self.worked = np.zeros(count)  # work seconds that those take
        self.resume = np.zeros(count)  # when work goes on
        self.hardware = np.zeros(count)  # when the hardware of the current recovery is at hand
        self.in_fatal = np.zeros(count, dtype=bool)
        self.failures = np.zeros(count)
        self.fatal = np.zeros(count)
        self.during = np.zeros(count)
        self.down = np.zeros(count)
        self.lost = np.zeros(count)
        self.wait = np.zeros(count)
        self.rows = np.arange(count)

    def cost(self, n: Floats) -> Floats:
        """Seconds of work of the first n iterations after a restore (stalls included)."""
        return n * self.plain + self.stall * np.maximum(0.0, np.floor((n - self.lag) / self.interval))

    def completed(self, work: Floats) -> Floats:
        """Largest n with cost(n) <= work, up to rounding at the boundary."""
        first = np.floor(work / self.plain)
        rest = work - self.lag * self.plain
        periods = np.floor(rest / self.period)
        within = np.minimum(np.floor((rest - periods * self.period) / self.plain), self.interval - 1)
        return np.where(rest < 0, np.minimum(first, self.lag), self.lag + periods * self.interval + within)

    def run(self) -> list[Result]:
        for times, fatal in zip(self.times, self.fatal_marks, strict=True):
            live = times < self.horizon
            if not live.any():
                break
            self.fail(np.where(live, times, self.horizon), fatal & live, live)
        return self.results()

    def fail(self, t: Floats, fatal: NDArray[np.bool_], live: NDArray[np.bool_]) -> None:
        """Advance every live lane to its failure at ``t`` and start its recovery."""
        up = live & (t >= self.resume)
        work = np.where(up, self.worked + t - self.resume, self.worked)
        work = np.where(live, work, 0.0)
        n = np.where(up, np.maximum(self.done, self.completed(work)), self.done)
        was_fatal = self.in_fatal & ~up & live
        treat_fatal = fatal | was_fatal
        rollback = live & (treat_fatal | ~self.retains)

        kept = np.where(
            rollback, np.maximum(0.0, np.floor((n - self.lag) / self.interval)) * self.interval, n
        )
        kept = np.where(live, kept, self.done)
        after = np.where(rollback, 0.0, kept)
        kept_work = self.cost(kept)
        self.lost += np.where(live, np.maximum(0.0, work - kept_work), 0.0)
        # A downtime that is cut short by this failure ends here; its remainder was charged in advance.
        self.down -= np.where(live & ~up, self.resume - t, 0.0)
        cold = live & self.retains & ~treat_fatal & (self.rebuild > 0) & (t - self.resume < self.rebuild)
        last_resume = self.resume
        self.base += np.where(rollback, kept, 0.0)
        self.done = np.where(live, after, self.done)
        self.worked = np.where(live, self.cost(self.done), self.worked)

        ready, without = self.take_spares(t, fatal & live, treat_fatal, was_fatal, live)
        down = np.where(treat_fatal, self.down_ff, np.where(cold | without, self.down_cold, self.down_hof))
        resume = ready + down
        self.down += np.where(live, resume - t, 0.0)
        self.wait += np.where(live, ready - t, 0.0)
        self.hardware = np.where(live, ready, self.hardware)
        self.resume = np.where(live, resume, last_resume)
        self.in_fatal = np.where(live, treat_fatal, self.in_fatal)
        self.failures += live
        self.fatal += fatal
        self.during += live & ~up

    def take_spares(
        self,
        t: Floats,
        fatal: NDArray[np.bool_],
        treat_fatal: NDArray[np.bool_],
        was_fatal: NDArray[np.bool_],
        live: NDArray[np.bool_],
    ) -> tuple[Floats, NDArray[np.bool_]]:
        """Return (when hardware is at hand, HOFs of a "+" system that found no spare and start in place)."""
        ready = np.where(was_fatal, np.maximum(t, self.hardware), t)
        pick = np.argmin(self.free, axis=1)
        earliest = self.free[self.rows, pick]
        takes = fatal & self.limited
        at_hand = np.where(takes, np.maximum(ready, earliest), ready)
        back = np.maximum(at_hand, t + self.repair)
        self.free[self.rows, pick] = np.where(takes, back, earliest)
        # A HOF of a "+" system moves to a spare and leaves a usable node behind: the pool stays as it is.
        asks = live & ~treat_fatal & self.spare_on_hof & self.limited
        none_free = asks & (earliest > t)
        at_hand = np.where(none_free & self.waits_for_spare, earliest, at_hand)
        return np.where(live, at_hand, t), none_free & ~self.waits_for_spare

    def results(self) -> list[Result]:
        up = self.horizon > self.resume
        work = np.where(up, self.worked + self.horizon - self.resume, self.worked)
        n = np.where(up, np.maximum(self.done, self.completed(work)), self.done)
        self.down -= np.where(up, 0.0, self.resume - self.horizon)
        end = np.where(n > self.done, self.resume + self.cost(n) - self.worked, self.horizon)
        total = self.base + n
        value = np.where(total > 0, total * self.iteration / end, 0.0)
        columns = (value, total, end, self.failures, self.fatal, self.during, self.down, self.lost, self.wait)
        return [
            Result(float(v), int(i), float(e), int(f), int(ff), int(d), float(dn), float(lo), float(w))
            for v, i, e, f, ff, d, dn, lo, w in zip(*(c.tolist() for c in columns), strict=True)
        ]
