"""The paper's figures 14 and 15 beside ours, and where the three methods part, as one HTML page or as charts.

Role: what ``leto-sim reproduce --html`` and ``examples/reproduce.py`` write.
"""

from __future__ import annotations

import math
from functools import cache

from leto_sim.des import Lane, simulate
from leto_sim.errors import RecoveryTooSlowError
from leto_sim.interval import tuned_interval
from leto_sim.paper import MODELS, reproduce_figures
from leto_sim.plot import html_page
from leto_sim.predict import evaluate, poisson_schedules, summarize
from leto_sim.profile import load_profile
from leto_sim.renewal import exact_ettr
from leto_sim.svg import bar_chart, line_chart

__all__ = ["Parting", "figure_chart", "figures_page", "parting", "parting_chart"]

Parting = tuple[float, float, float, float, float, float]
"""MTTF in s, recovery over MTTF, closed form (NaN: refused), exact, simulated and its standard error."""

PARTING_MTTF_S = (3600.0, 1800.0, 1200.0, 900.0, 600.0, 450.0, 300.0, 225.0, 150.0, 110.0, 80.0)


def figure_chart(mttf_min: int) -> str:
    """Return an SVG of one MTTF: the paper's bars beside ours, by model and HOF ratio."""
    groups: dict[str, dict[str, float]] = {}
    for c in reproduce_figures():
        if c.cell.mttf_min == mttf_min:
            label = f"{c.cell.model.split('-')[1].upper()} {100 * c.cell.hof_ratio:.0f}%"
            row = groups.setdefault(label, {})
            row[f"{c.system}, paper"] = c.printed
            row[f"{c.system}, ours"] = c.predicted
    number = "14" if mttf_min == 10 else "15"
    title = f"Figure {number}: ETTR at an MTTF of {mttf_min} minutes, by model and HOF ratio"
    return bar_chart(groups, title=title, y_label="ETTR (%)", y_from=80.0)


@cache
def parting(
    system_name: str, hof_ratio: float, model: str = MODELS[-1], seed: int = 0
) -> tuple[Parting, ...]:
    """Return the three methods over falling MTTF for one system of a bundled model.

    The interval is Young's at each MTTF, the same for all three. The simulation has 8 runs of 1,000 MTTFs.
    """
    profile = load_profile(model)
    system = profile.systems()[system_name]
    iteration_s = float(profile.data["job"]["iteration_s"])
    intervals = [tuned_interval(system, iteration_s, m, hof_ratio) for m in PARTING_MTTF_S]
    lanes = [
        Lane(system, iteration_s, interval, schedule)
        for mttf_s, interval in zip(PARTING_MTTF_S, intervals, strict=True)
        for schedule in poisson_schedules(mttf_s, hof_ratio, 1000, seed, 8)
    ]
    runs = simulate(lanes)
    out = []
    for k, (mttf_s, interval) in enumerate(zip(PARTING_MTTF_S, intervals, strict=True)):
        try:
            estimate = evaluate(system, iteration_s, mttf_s, hof_ratio, interval)
            closed, share = estimate.ettr, estimate.recovery_s / mttf_s
        except RecoveryTooSlowError as error:
            closed, share = math.nan, error.recovery_s / mttf_s
        simulated = summarize(runs[8 * k : 8 * k + 8])
        exact = exact_ettr(system, iteration_s, mttf_s, hof_ratio, interval)
        out.append((mttf_s, share, closed, exact, simulated.ettr, simulated.standard_error))
    return tuple(out)


def parting_chart(hof_ratio: float = 0.5) -> str:
    """Return an SVG: ETTR over MTTF by closed form, exact chain and simulation, DeepSeek-V4."""
    series: dict[str, list[tuple[float, float]]] = {}
    for name in ("leto", "gemini+"):
        rows = sorted(parting(name, hof_ratio))
        series[f"{name} (closed)"] = [(r[0] / 60, 100 * r[2]) for r in rows]
        series[f"{name} (exact)"] = [(r[0] / 60, 100 * r[3]) for r in rows]
        series[f"{name} (simulated)"] = [(r[0] / 60, 100 * r[4]) for r in rows]
    return line_chart(
        series,
        title=f"Where the methods part (DeepSeek-V4, {100 * hof_ratio:.0f} % HOFs)",
        x_label="Mean time to failure (minutes)",
        y_label="ETTR (%)",
        log_x=True,
        dashed=[n for n in series if n.endswith("(exact)")],
        dots=[n for n in series if n.endswith("(simulated)")],
    )


def figures_page() -> str:
    """Return the page with all reproduced figures."""
    body = "\n".join([*(figure_chart(m) for m in (10, 30, 60)), parting_chart()])
    return html_page("leto-sim: the paper's figures and ours", body)
