"""Sweeps as pictures: a PNG through matplotlib (optional) and one HTML page that needs nothing else.

Role: ``leto-sim plot``. The page holds its style, its charts (inline SVG) and the rows as a table; it loads
nothing, so that it can be mailed and archived.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from leto_sim.errors import MissingDependencyError, SimError
from leto_sim.svg import STYLE, line_chart
from leto_sim.sweep import Row

__all__ = ["Axis", "Panel", "html_page", "panels", "write_html", "write_png"]

_AXES = {  # the first of equals is the default axis
    "gpus": ("GPUs", 1.0),
    "mttf_s": ("Mean time to failure (minutes)", 1 / 60),
    "hof_ratio": ("Share of hardware-operable failures (%)", 100.0),
}


class Axis(NamedTuple):
    """The varied column, its label and the factor to the label's unit."""

    column: str
    label: str
    factor: float


class Panel(NamedTuple):
    """One chart: lines of (x, ETTR in percent) by name."""

    title: str
    axis: Axis
    lines: dict[str, list[tuple[float, float]]]


def panels(rows: Sequence[Row], x: str | None = None) -> list[Panel]:
    """Split rows into charts: ``x`` (default: the column with most values) on the axis, one chart for each
    combination of the other columns, one line for each system and method.
    """
    if not rows:
        raise SimError("expected at least one row to plot, found none")
    counts = {column: len({getattr(r, column) for r in rows}) for column in _AXES}
    column = x or max(_AXES, key=lambda c: counts[c])
    if column not in _AXES:
        raise SimError(f"expected an axis among {', '.join(_AXES)}, found {column!r}")
    label, factor = _AXES[column]
    # A column that follows from x (the MTTF of a cluster follows from its GPUs) does not split the charts.
    pairs = {c: {(getattr(r, column), getattr(r, c)) for r in rows} for c in _AXES}
    others = [c for c in _AXES if c != column and len(pairs[c]) > counts[column]]
    several_methods = len({r.method for r in rows}) > 1
    charts: dict[tuple[float, ...], Panel] = {}
    for row in rows:
        key = tuple(float(getattr(row, c)) for c in others)
        if key not in charts:
            fixed = ", ".join(f"{_short(c)} {v * _AXES[c][1]:g}" for c, v in zip(others, key, strict=True))
            charts[key] = Panel(f"ETTR{': ' if fixed else ''}{fixed}", Axis(column, label, factor), {})
        name = f"{row.system} ({row.method})" if several_methods else row.system
        point = (getattr(row, column) * factor, row.ettr * 100)
        charts[key].lines.setdefault(name, []).append(point)
    for panel in charts.values():
        for line in panel.lines.values():
            line.sort()
    return list(charts.values())


def _short(column: str) -> str:
    return {"mttf_s": "MTTF (min)", "hof_ratio": "HOF %", "gpus": "GPUs"}[column]


def html_page(title: str, body: str) -> str:
    """Return a complete page around ``body``, with the charts' style and nothing to load."""
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8">
<meta name="viewport" content="width=device-width,initial-scale=1">
<title>{escape(title)}</title><style>
body{{font:15px/1.5 system-ui,sans-serif;max-width:980px;margin:2rem auto;padding:0 1rem;color:#223}}
table{{border-collapse:collapse;font-size:13px}}
td,th{{border:1px solid #ccd;padding:2px 8px;text-align:right}}
td:first-child,th:first-child{{text-align:left}}h1{{font-size:1.5rem}}h2{{font-size:1.15rem}}
@media (prefers-color-scheme:dark){{body{{background:#15181e;color:#dde}}td,th{{border-color:#445}}}}
{STYLE}</style></head><body>
<h1>{escape(title)}</h1>
{body}
</body></html>
"""


def write_html(path: str | Path, rows: Sequence[Row], title: str = "leto-sim", x: str | None = None) -> None:
    """Write the charts and the rows as one page."""
    parts = [
        line_chart(
            p.lines,
            title=p.title,
            x_label=p.axis.label,
            y_label="ETTR (%)",
            log_x=p.axis.column == "gpus",
            dashed=[n for n in p.lines if n.endswith("(exact)")],
            dots=[n for n in p.lines if n.endswith("(des)")],
        )
        for p in panels(rows, x)
    ]
    titles = ("system", "method", "GPUs", "MTTF (s)", "HOF", "interval", "ETTR (%)")
    head = "".join(f"<th>{title}</th>" for title in titles)
    lines = [
        f"<tr><td>{escape(r.system)}</td><td>{r.method}</td><td>{r.gpus}</td><td>{r.mttf_s:g}</td>"
        f"<td>{r.hof_ratio:g}</td><td>{r.interval}</td>"
        f"<td>{'refused' if math.isnan(r.ettr) else format(100 * r.ettr, '.2f')}</td></tr>"
        for r in rows
    ]
    body = f"<table><tr>{head}</tr>{''.join(lines)}</table>"
    table = f"<details><summary>{len(rows)} rows</summary>{body}</details>"
    Path(path).write_text(html_page(title, "\n".join([*parts, table])), encoding="utf-8")


def write_png(path: str | Path, rows: Sequence[Row], title: str = "leto-sim", x: str | None = None) -> None:
    """Write the charts as one PNG. Raises MissingDependencyError without matplotlib."""
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError as error:
        raise MissingDependencyError(
            "PNG needs matplotlib: pip install 'leto-sim[plot]', or use --html"
        ) from error
    charts = panels(rows, x)
    figure = Figure(figsize=(7.5, 3.6 * len(charts)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    for i, panel in enumerate(charts):
        axes = figure.add_subplot(len(charts), 1, i + 1)
        colours: dict[str, str] = {}
        for name, line in panel.lines.items():
            colour = colours.setdefault(name.split(" (")[0], f"C{len(colours)}")
            style = "--" if name.endswith("(exact)") else "" if name.endswith("(des)") else "-"
            xs, ys = [p[0] for p in line], [p[1] for p in line]
            axes.plot(xs, ys, linestyle=style, color=colour, marker="o", markersize=3, label=name)
        if panel.axis.column == "gpus":
            axes.set_xscale("log", base=2)
        axes.set_title(panel.title, fontsize=10)
        axes.set_xlabel(panel.axis.label)
        axes.set_ylabel("ETTR (%)")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    figure.savefig(Path(path), format="png", dpi=110)
