"""Charts as inline SVG: the run over time, the parts of each recovery.

Role in the whole: pictures of `leto report`, and of the report of leto-megatron's demo, which adds a chart of
its own on the same `Plot`. Without a library and without a network. Colours are CSS variables of the page,
so that one SVG works in light and dark. Pure functions from numbers to markup.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from leto_shadow.timeline import FailureRow, Sample

__all__ = ["PARTS", "PART_NAMES", "Plot", "breakdown_chart", "nice_ticks", "parts_of", "run_chart"]

WIDTH = 920
_LEFT, _RIGHT, _TOP, _BOTTOM = 52, 16, 42, 38

PARTS = ("detect", "fence", "managers", "repair", "prepare", "attach", "resume")
PART_NAMES = {
    "detect": "detect",
    "fence": "fence",
    "managers": "new managers",
    "repair": "find and remap lost pages",
    "prepare": "wait for shadows",
    "attach": "attach and agree",
    "resume": "reconstruct and resume",
}


def nice_ticks(low: float, high: float, count: int = 6) -> list[float]:
    """Round numbers that divide [low, high] into about `count` parts."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low]
    raw = (high - low) / max(1, count)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * m for m in (1, 2, 2.5, 5, 10) if power * m >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    ticks = []
    while first * step <= high + step * 1e-9:
        ticks.append(round(first * step, 12))
        first += 1
    return ticks


class Plot:
    """Axes and scales of one chart; collects markup."""

    def __init__(self, height: int, x: tuple[float, float], y: tuple[float, float], label: str) -> None:
        self.height = height
        self._x, self._y = x, y
        self._body: list[str] = []
        self._label = label

    def x(self, value: float) -> float:
        low, high = self._x
        return _LEFT + (value - low) / ((high - low) or 1.0) * (WIDTH - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self._y
        return self.height - _BOTTOM - (value - low) / ((high - low) or 1.0) * (self.height - _TOP - _BOTTOM)

    def add(self, markup: str) -> None:
        self._body.append(markup)

    def axes(self, x_name: str, y_name: str) -> None:
        bottom = self.height - _BOTTOM
        for tick in nice_ticks(*self._y, count=4):
            at = self.y(tick)
            self.add(f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{at:.1f}" y2="{at:.1f}"/>')
            self.add(f'<text class="tick end" x="{_LEFT - 8}" y="{at + 4:.1f}">{tick:g}</text>')
        for tick in nice_ticks(*self._x, count=8):
            self.add(f'<text class="tick mid" x="{self.x(tick):.1f}" y="{bottom + 17}">{tick:g}</text>')
        self.add(f'<line class="axis" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}"/>')
        self.add(
            f'<text class="name end" x="{WIDTH - _RIGHT}" y="{self.height - 5}">{html.escape(x_name)}</text>'
        )
        self.add(f'<text class="name" x="{_LEFT}" y="12">{html.escape(y_name)}</text>')

    def line(self, points: Sequence[tuple[float, float]], css: str) -> None:
        if points:
            path = "M" + "L".join(f"{self.x(x):.1f} {self.y(y):.1f}" for x, y in points)
            self.add(f'<path class="{css}" d="{path}"/>')

    def dot(self, x: float, y: float, title: str, radius: float = 7.0) -> None:
        self.add(
            f'<circle class="hit" cx="{self.x(x):.1f}" cy="{self.y(y):.1f}" r="{radius}">'
            f"<title>{html.escape(title)}</title></circle>"
        )

    def badge(self, x: float, number: int, title: str) -> None:
        """A numbered mark at the top, with a line down to the axis."""
        at = self.x(x)
        self.add(
            f'<g class="fault"><title>{html.escape(title)}</title>'
            f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{_TOP}" y2="{self.height - _BOTTOM}"/>'
            f'<circle cx="{at:.1f}" cy="{_TOP - 8}" r="9"/>'
            f'<text x="{at:.1f}" y="{_TOP - 4}">{number}</text></g>'
        )

    def svg(self) -> str:
        return (
            f'<svg viewBox="0 0 {WIDTH} {self.height}" role="img" aria-label="{html.escape(self._label)}">'
            + "".join(self._body)
            + "</svg>"
        )


def run_chart(samples: Sequence[Sample], failures: Sequence[FailureRow]) -> str:
    """Iteration over wall-clock time: a flat piece is a recovery, a step down is work done again."""
    ends = [s.seconds for s in samples] + [f.seconds + (f.recovered_s or 0.0) for f in failures]
    high = max((s.iteration for s in samples), default=1)
    plot = Plot(260, (0, max(ends, default=1.0)), (0, high), "Iteration over wall-clock time")
    for row in failures:
        if row.recovered_s is not None:
            left, right = plot.x(row.seconds), plot.x(row.seconds + row.recovered_s)
            title = f"{row.title}: training again after {row.recovered_s:.2f} s"
            plot.add(
                f'<rect class="gap" x="{left:.1f}" y="{_TOP}" width="{max(1.5, right - left):.1f}" '
                f'height="{plot.height - _TOP - _BOTTOM}"><title>{html.escape(title)}</title></rect>'
            )
    plot.axes("seconds since the job started", "iteration")
    for generation in sorted({s.generation for s in samples}):
        points = [(s.seconds, float(s.iteration)) for s in samples if s.generation == generation]
        plot.line(points, "curve leto")
        plot.add(
            f'<text class="tick" x="{plot.x(points[0][0]) + 5:.1f}" y="{_TOP + 14}">gen. {generation}</text>'
        )
    for sample in samples:
        plot.dot(
            sample.seconds, sample.iteration, f"iteration {sample.iteration} at {sample.seconds:.1f} s", 4
        )
    for number, row in enumerate(failures, 1):
        plot.badge(row.seconds, number, f"{number}: {row.title} at {row.seconds:.1f} s")
    return plot.svg()


def breakdown_chart(failures: Sequence[FailureRow]) -> str:
    """One bar for each recovery, from the failure to training, divided into its parts."""
    rows = [row for row in failures if row.recovered_s is not None]
    longest = max((row.recovered_s or 0.0 for row in rows), default=1.0) or 1.0
    bar, gap, left = 22, 20, 250
    height = len(rows) * (bar + gap) + 34
    scale = (WIDTH - left - 80) / longest
    body = []
    for index, row in enumerate(rows):
        top = index * (bar + gap) + 8
        body.append(
            f'<text class="label end" x="{left - 12}" y="{top + 15}">'
            f"{index + 1}. {html.escape(row.title)}</text>"
        )
        at = float(left)
        for part, seconds in parts_of(row):
            width = seconds * scale
            if width < 0.25:
                continue
            title = f"{PART_NAMES[part]}: {seconds:.3f} s"
            body.append(
                f'<rect class="part {part}" x="{at:.2f}" y="{top}" '
                f'width="{max(0.5, width - 1):.2f}" height="{bar}">'
                f"<title>{html.escape(title)}</title></rect>"
            )
            at += width
        body.append(f'<text class="label" x="{at + 8:.1f}" y="{top + 15}">{row.recovered_s:.2f} s</text>')
    bottom = height - 22
    body += [
        f'<text class="tick mid" x="{left + tick * scale:.1f}" y="{bottom + 14}">{tick:g} s</text>'
        for tick in nice_ticks(0.0, longest, 6)
    ]
    return (
        f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="Parts of each recovery">'
        + "".join(body)
        + "</svg>"
    )


def parts_of(row: FailureRow) -> list[tuple[str, float]]:
    """The parts of a recovery that took time, in their order, with their seconds."""
    values = {"detect": row.detected_s, **row.breakdown}
    return [(part, values[part]) for part in PARTS if values.get(part, 0.0) > 0.0]
