"""The page of `leto report --html`: one file, no scripts, no network; in light and dark.

Role in the whole: markup only. What it says comes from `leto_shadow.report`, pictures from
`leto_shadow.charts`; the style sheet is shared with the report of leto-megatron's demo.
"""

from __future__ import annotations

import html
from collections.abc import Sequence
from importlib import resources
from string import Template
from typing import Any

from leto_shadow.charts import PART_NAMES, PARTS, breakdown_chart, run_chart
from leto_shadow.timeline import FailureRow, Sample, Timeline

__all__ = ["failure_cells", "legend", "render_page", "style", "tiles_markup"]


_POINTS_MAX = 1500


def style() -> str:
    """The style sheet of the pages."""
    return resources.files("leto_shadow").joinpath("report.css").read_text(encoding="utf-8")


def legend(failures: Sequence[FailureRow]) -> str:
    """What the colours of the bars mean, for parts that occur."""
    return "".join(
        f'<span><i class="part {part}"></i>{html.escape(PART_NAMES[part])}</span>'
        for part in PARTS
        if any(part == "detect" or row.breakdown.get(part) for row in failures)
    )


def tiles_markup(tiles: Sequence[tuple[str, str]]) -> str:
    """Numbers with their names: (name, value)."""
    return "".join(f"<div><b>{html.escape(v)}</b><span>{html.escape(k)}</span></div>" for k, v in tiles)


def failure_cells(number: int, row: FailureRow) -> str:
    """A row of the table: number, failure, rank, iteration, detected, recovered, lost, source."""
    missing = f"{row.lost_pages} pages found missing" if row.lost_pages else ""
    notes = [row.lost, missing, *(repair.text for repair in row.repairs)]
    extra = "".join(f"<small>{html.escape(note)}</small>" for note in notes if note)
    recovered = "-" if row.recovered_s is None else f"{row.recovered_s:.2f} s"
    lost = "-" if row.iterations_lost is None else str(row.iterations_lost)
    return (
        f'<td class="num">{number}</td><td>{html.escape(row.title)}{extra}</td>'
        f'<td class="num">{row.rank}</td><td class="num">{row.iteration}</td>'
        f'<td class="num">{row.detected_s:.2f} s</td><td class="num">{recovered}</td>'
        f'<td class="num">{lost}</td><td>{html.escape(row.source or "-")}</td>'
    )


def _thinned(samples: Sequence[Sample]) -> list[Sample]:
    """Some of many: a picture has no room for more. First and last of each generation stay."""
    step = 1 + len(samples) // _POINTS_MAX
    ends = {0, len(samples) - 1}
    for index in range(1, len(samples)):
        if samples[index].generation != samples[index - 1].generation:
            ends |= {index - 1, index}
    return [one for index, one in enumerate(samples) if index % step == 0 or index in ends]


def render_page(data: dict[str, Any], timeline: Timeline, sentence: str, parts: Sequence[str]) -> str:
    """The page. ``data``: `leto_shadow.report.Report.data`; ``sentence``: what is said of the ETTR;
    ``parts``: what is said of the ranks in each recovery."""
    failures = timeline.failures
    recovered = [row for row in failures if row.recovered_s is not None]
    tiles = [
        ("effective training time", "-" if data["ettr"] is None else f"{data['ettr']:.2%}"),
        ("failures survived", f"{len(recovered)} of {len(failures)}"),
        ("time without training", f"{data['interruption_s']:.2f} s"),
        ("iterations lost", str(sum(row.iterations_lost or 0 for row in recovered))),
    ]
    rows = []
    for number, row in enumerate(failures, 1):
        again = data["failures"][number - 1]["recompute_s"]
        cell = "-" if again is None else f"{again:.3f} s"
        said = "".join(
            f"<small>{html.escape(one)}</small>"
            for one in (row.detail, row.verdict_text, parts[number - 1])
            if one
        )
        detail = f"<td>{said}</td>"
        rows.append(f'<tr>{failure_cells(number, row)}<td class="num">{cell}</td>{detail}</tr>')
    page = Template(resources.files("leto_shadow").joinpath("report.html").read_text(encoding="utf-8"))
    reason = f" {data['reason']}" if data["reason"] else ""
    return page.substitute(
        style=style(),
        job=html.escape(data["job"]),
        state="bad" if data["reason"] else "good",
        word=html.escape(data["state"]),
        summary=html.escape(
            f"{data['state'].capitalize()}.{reason} {data['generations']} generations, "
            f"{data['world_size'] or '?'} ranks."
        ),
        sentence=html.escape(sentence),
        tiles=tiles_markup(tiles),
        run=run_chart(_thinned(timeline.samples), failures),
        parts=breakdown_chart(failures),
        legend=legend(failures),
        failures="".join(rows),
        lines=html.escape("\n".join(data["lines"])),
    )
