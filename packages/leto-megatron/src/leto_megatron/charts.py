"""The demo's chart of both loss curves, as inline SVG on `leto_shadow.charts`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from leto_shadow.charts import Plot
from leto_shadow.timeline import FailureRow

__all__ = ["Curve", "loss_chart"]


@dataclass(frozen=True)
class Curve:
    """A named series: (iteration, value) in the order in which they happened."""

    name: str
    points: Sequence[tuple[int, float]]


def loss_chart(reference: Curve, run: Curve, failures: Sequence[FailureRow]) -> str:
    """Both loss curves over the iterations, with the failures numbered."""
    values = [v for curve in (reference, run) for _i, v in curve.points]
    last = max((i for curve in (reference, run) for i, _v in curve.points), default=1)
    low, high = (min(values), max(values)) if values else (0.0, 1.0)
    margin = (high - low) * 0.05 or 0.5
    plot = Plot(320, (0, last), (low - margin, high + margin), "Loss over iterations, both runs")
    plot.axes("iteration", "training loss (nats per byte)")
    plot.line(reference.points, "curve ref")
    for part in _rising(run.points):
        plot.line(part, "curve leto")
    for number, row in enumerate(failures, 1):
        plot.badge(row.iteration, number, f"{number}: {row.title}, iteration {row.iteration}")
    for iteration, value in run.points:
        plot.dot(iteration, value, f"iteration {iteration}: loss {value:.4f}", 5)
    return plot.svg()


def _rising(points: Sequence[tuple[int, float]]) -> list[list[tuple[int, float]]]:
    """Split where the iteration goes back: iterations that were computed again start a new line."""
    parts: list[list[tuple[int, float]]] = []
    for point in points:
        if parts and point[0] > parts[-1][-1][0]:
            parts[-1].append(point)
        else:
            parts.append([point])
    return parts
