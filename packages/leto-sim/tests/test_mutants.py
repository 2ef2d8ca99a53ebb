"""Models broken on purpose: for each, the checks of this suite must fail, or they check nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from leto_sim import (
    Lane,
    des,
    evaluate,
    exact_ettr,
    gemini,
    leto,
    overlap,
    pipeline,
    poisson_schedule,
    simulate,
)
from leto_sim import ettr as closed_form
from leto_sim import interval as interval_module
from leto_sim.paper import reproduce_figures, reproduce_table_3
from leto_sim.reference import simulate_reference

BASE = gemini(initialize_s=30.0, checkpoint_stall_s=3.0)
LETO = leto(BASE, initialize_s=14.0, overhead_fraction=0.006)


def the_figures_are_reproduced() -> bool:
    return all(abs(c.difference) <= 0.1 for c in reproduce_figures())


def table_3_is_in_order() -> bool:
    rows = list(reproduce_table_3().values())
    return all(a[0] > b[0] and a[3] < b[3] for a, b in itertools.pairwise(rows))


def closed_form_and_chain_agree() -> bool:
    settings = [(s, h) for s in (BASE, LETO) for h in (0.0, 0.5, 1.0)]
    return all(
        abs(evaluate(s, 10.0, 14_400.0, h, 12).ettr - exact_ettr(s, 10.0, 14_400.0, h, 12)) < 2e-4
        for s, h in settings
    )


def simulation_and_chain_agree() -> bool:
    for system in (BASE, LETO):
        lanes = [Lane(system, 10.0, 6, poisson_schedule(100.0, 100.0 * 2000, 0.5, 5, r)) for r in range(8)]
        values = np.array([r.ettr for r in simulate(lanes)])
        error = values.std(ddof=1) / np.sqrt(8)
        if abs(values.mean() - exact_ettr(system, 10.0, 100.0, 0.5, 6)) > 5 * error + 1e-4:
            return False
    return True


def simulation_equals_its_twin() -> bool:
    lanes = [
        Lane(system, 7.0, i, poisson_schedule(150.0, 9000.0, 0.5, i), spares=2, repair_s=400.0)
        for i in (1, 2, 5)
        for system in (BASE, LETO)
    ]
    pairs = zip(simulate(lanes), map(simulate_reference, lanes), strict=True)
    return all(a.iterations == b.iterations and abs(a.ettr - b.ettr) < 1e-9 for a, b in pairs)


def the_queue_is_right() -> bool:
    buckets = [overlap.Bucket(1, 0.25, 3.0), overlap.Bucket(1, 0.5, 5.0), overlap.Bucket(2, 1.0, 4.0)]
    return abs(overlap.exposed_s(buckets, 8.0) - 6.0) < 1e-9


def the_pipeline_is_right() -> bool:
    body = pipeline.Bracket("body", 20.0, 40.0, 1.0)
    return abs(pipeline.pipeline_s(pipeline.stages_of([body, body], 4), 8) - 9.5 * 0.120) < 1e-9


CHECKS: list[Callable[[], bool]] = [
    the_figures_are_reproduced,
    table_3_is_in_order,
    closed_form_and_chain_agree,
    simulation_and_chain_agree,
    simulation_equals_its_twin,
    the_queue_is_right,
    the_pipeline_is_right,
]


@pytest.mark.parametrize("check", CHECKS)
def test_the_checks_pass_on_the_model_itself(check: Callable[[], bool]) -> None:
    assert check()


def no_lag(interval: Any, lag: Any = 1, conversion: Any = 0.0) -> Any:
    return interval / 2


def as_extracted(interval: Any, lag: Any = 1, conversion: Any = 0.0) -> Any:
    return 2 * interval + 1  # what the text extraction of equation 7 reads like


def without_overhead(iteration_s: Any, interval: Any, stall_s: Any, overhead: Any = 0.0) -> Any:
    return iteration_s + stall_s / interval


def without_checkpoints(iteration_s: Any, interval: Any, stall_s: Any, overhead: Any = 0.0) -> Any:
    return (1 + overhead) * iteration_s


def reciprocal(iteration_s: Any, effective_s: Any, recovery: Any, mttf_s: Any) -> Any:
    return iteration_s / effective_s / (1 + recovery / mttf_s)  # failures counted in working time only


def all_failures(system: Any, mttf_s: float, hof_ratio: float) -> float:
    return mttf_s  # Young with the rate of all failures, for Leto too


def oblivious(self: Any, t: Any, fatal: Any, live: Any) -> None:
    """A failure during recovery is ignored."""
    live = live & (t >= self.resume)
    ORIGINAL_FAIL(self, np.where(live, t, self.horizon), fatal & live, live)


def generous(self: Any, n: Any) -> Any:
    return n * self.plain  # checkpoints cost nothing


ORIGINAL_FAIL = des._Batch.fail


def spendthrift(self: Any, t: Any, fatal: Any, treat_fatal: Any, was_fatal: Any, live: Any) -> Any:
    return t, np.zeros_like(live)  # spares never run out


def unqueued(buckets: Any, window_s: float) -> float:
    return max(0.0, max(b.ready_fraction * window_s + b.transfer_s for b in buckets) - window_s)


def no_interleaving(stages: Any, microbatches: int, transfer_s: float = 0.0) -> float:
    slowest = max(pipeline.stage_s(s, i, len(stages), transfer_s) for i, s in enumerate(stages))
    return float((microbatches + len(stages) - 1) * slowest)


@pytest.mark.parametrize(
    ("where", "name", "mutant", "caught_by"),
    [
        (closed_form, "lost_iterations", no_lag, [the_figures_are_reproduced, closed_form_and_chain_agree]),
        (
            closed_form,
            "lost_iterations",
            as_extracted,
            [the_figures_are_reproduced, closed_form_and_chain_agree],
        ),
        (closed_form, "effective_iteration_s", without_overhead, [the_figures_are_reproduced]),
        (
            closed_form,
            "effective_iteration_s",
            without_checkpoints,
            [the_figures_are_reproduced, table_3_is_in_order],
        ),
        (closed_form, "ettr", reciprocal, [the_figures_are_reproduced]),
        (interval_module, "rollback_mttf_s", all_failures, [the_figures_are_reproduced]),
        (des._Batch, "fail", oblivious, [simulation_and_chain_agree, simulation_equals_its_twin]),
        (des._Batch, "cost", generous, [simulation_equals_its_twin]),
        (des._Batch, "take_spares", spendthrift, [simulation_equals_its_twin]),
        (overlap, "exposed_s", unqueued, [the_queue_is_right]),
        (pipeline, "pipeline_s", no_interleaving, [the_pipeline_is_right]),
    ],
    ids=lambda v: v.__name__ if callable(v) else "",
)
def test_broken_models_are_caught(
    monkeypatch: pytest.MonkeyPatch, where: Any, name: str, mutant: Any, caught_by: list[Callable[[], bool]]
) -> None:
    monkeypatch.setattr(where, name, mutant)
    for check in caught_by:
        assert not check(), f"{check.__name__} does not notice {mutant.__name__}"
