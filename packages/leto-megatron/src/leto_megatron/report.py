"""The demo's report: `report.json` for programs, `report.html` for people.

Role in the whole: one self-contained page (no scripts, no network) that shows the verdict, both loss curves,
the run over time, what each recovery spent its time on, and the tables. Works in light and dark.
"""

from __future__ import annotations

import contextlib
import dataclasses
import html
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

import torch

from leto_megatron.charts import Curve, loss_chart
from leto_megatron.compare import Comparison
from leto_megatron.config import Config
from leto_megatron.promises import PROMISES
from leto_megatron.records import read_records
from leto_shadow.charts import breakdown_chart, run_chart
from leto_shadow.gpu import WatchError, list_gpus
from leto_shadow.report_page import failure_cells, legend, style, tiles_markup
from leto_shadow.timeline import Timeline

__all__ = ["REPORT_FILES", "headline", "render_page", "report_data", "write_report"]

REPORT_FILES = ("report.json", "report.html")
_DRIVER = Path("/proc/driver/nvidia/version")


def headline(kinds: Mapping[str, Sequence[int]]) -> str:
    """The verdict in two words. `kinds`: (equal, of) by kind, as :attr:`Comparison.kinds` holds them."""
    wrong = {kind for kind, (same, total) in kinds.items() if same != total or not total}
    if not kinds or wrong - {PROMISES}:
        return "Not exact"
    return "Not as promised" if wrong else "Exact"


def report_data(
    config: Config,
    timeline: Timeline,
    comparison: Comparison,
    curves: tuple[Curve, Curve],
    reference_s: float,
    seconds: float,
) -> dict[str, Any]:
    """Everything in the report, as JSON values. `exact` and `failures` are its stable part.

    `reference` and `run` hold pure training time, from the start of the first iteration to the end of the
    last one: what `leto-sim validate` computes the effective training time ratio from.
    """
    return {
        "exact": comparison.exact,
        "failures": [row.as_dict() for row in timeline.failures],
        "compared": {k: {"equal": same, "of": total} for k, (same, total) in comparison.kinds.items()},
        "differences": comparison.differences,
        "reference": {"iterations": config.iterations, "elapsed_s": reference_s},
        "run": {"iterations": config.iterations, "elapsed_s": timeline.training_s},
        "seed": config.seed,
        "iterations": config.iterations,
        "generations": timeline.generation + 1,
        "seconds": seconds,
        "config": dataclasses.asdict(config),
        "machine": _machine(),
        "loss": {curve.name: [[i, v] for i, v in curve.points] for curve in curves},
    }


def _machine() -> dict[str, str]:
    """What the runs ran on; the GPUs are asked for by another process, so that this one starts no driver."""
    found = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cores": str(os.cpu_count()),
    }
    with contextlib.suppress(WatchError):
        found["gpus"] = ", ".join(gpu.name for gpu in list_gpus())
        version = re.search(r"Kernel Module.*?(\d+\.\d+(\.\d+)?)", _DRIVER.read_text())
        found["driver"] = version.group(1) if version else "unknown"
    return found


def write_report(
    out: Path,
    config: Config,
    timeline: Timeline,
    comparison: Comparison,
    reference: Path,
    run: Path,
    seconds: float,
) -> None:
    """Write `report.json` and `report.html` into `out`."""
    curves = (_curve("reference", reference), _curve("leto", run))
    reference_s = float(json.loads((reference / "final-rank0.json").read_text())["elapsed_s"])
    data = report_data(config, timeline, comparison, curves, reference_s, seconds)
    texts = (json.dumps(data, indent=1) + "\n", render_page(data, timeline, curves))
    for name, text in zip(REPORT_FILES, texts, strict=True):
        (out / name).write_text(text)


def _curve(name: str, folder: Path) -> Curve:
    """The loss curve of a run, from the rank that has it (the last pipeline stage)."""
    for path in sorted(folder.glob("records-rank*.jsonl")):
        points = [(r["iteration"], r["loss"]) for r in read_records(path) if r.get("loss") is not None]
        if points:
            return Curve(name, _without_repeats(points))
    return Curve(name, [])


def _without_repeats(points: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Drop a record that a resumed trainer wrote again for the iteration just before."""
    kept: list[tuple[int, float]] = []
    for point in points:
        if not kept or kept[-1] != point:
            kept.append(point)
    return kept


def render_page(data: dict[str, Any], timeline: Timeline, curves: tuple[Curve, Curve]) -> str:
    """The page. `data`: of :func:`report_data`."""
    failures = timeline.failures
    exact = bool(data["exact"])
    word = headline({kind: (entry["equal"], entry["of"]) for kind, entry in data["compared"].items()})
    verdict = f"{word}. " + (
        "Every compared bit equals the fault-free run of stock Megatron-Core, every recovery was as promised."
        if exact
        else " ".join(html.escape(line) for line in data["differences"][:3])
    )
    in_place = [row for row in failures if row.source == "in-place"]
    lost = sum(row.iterations_lost or 0 for row in in_place)
    tiles = [
        ("failures survived", f"{sum(row.recovered_s is not None for row in failures)} of {len(failures)}"),
        ("iterations lost in place", str(lost)),
        (
            "median time to training",
            _median([row.recovered_s for row in in_place if row.recovered_s is not None]),
        ),
        ("values compared", f"{sum(total['of'] for total in data['compared'].values()):,}"),
    ]
    settings = "".join(
        f"<tr><td>{html.escape(key)}</td><td>{html.escape(str(value))}</td></tr>"
        for key, value in data["config"].items()
    )
    machine = data["machine"]
    page = Template(resources.files("leto_megatron").joinpath("page.html").read_text(encoding="utf-8"))
    return page.substitute(
        style=style(),
        state="good" if exact else "bad",
        word=word,
        verdict=verdict,
        seed=data["seed"],
        iterations=data["iterations"],
        tiles=tiles_markup(tiles),
        loss=loss_chart(*curves, failures),
        run=run_chart(timeline.samples, failures),
        parts=breakdown_chart(failures),
        legend=legend(failures),
        failures="".join(f"<tr>{failure_cells(n, row)}</tr>" for n, row in enumerate(failures, 1)),
        compared=_compared_rows(data["compared"]),
        settings=settings,
        machine=html.escape(f"{machine['system']}, Python {machine['python']}, torch {machine['torch']}"),
        seconds=f"{data['seconds']:.0f}",
    )


def _median(values: list[float]) -> str:
    if not values:
        return "-"
    ordered = sorted(values)
    middle = len(ordered) // 2
    value = ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2
    return f"{value:.2f} s"


def _compared_rows(compared: dict[str, dict[str, int]]) -> str:
    return "".join(
        f'<tr class="{"" if entry["equal"] == entry["of"] else "bad"}"><td>{html.escape(kind)}</td>'
        f'<td class="num">{entry["equal"]:,}</td><td class="num">{entry["of"]:,}</td></tr>'
        for kind, entry in compared.items()
    )
