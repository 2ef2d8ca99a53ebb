"""The report: stable keys for programs, one self-contained page for people, honest when something differs."""

from __future__ import annotations

import dataclasses
import html.parser
import io
import json
import re
from pathlib import Path

import pytest
from rich.console import Console
from stories import KINDS, four_failures

from leto_megatron.charts import Curve, loss_chart
from leto_megatron.compare import Comparison
from leto_megatron.config import PRESETS
from leto_megatron.display import Display, failure_table, sparkline, verdict_table
from leto_megatron.plan import TITLES
from leto_megatron.promises import PROMISES
from leto_megatron.report import headline, write_report
from leto_shadow.charts import breakdown_chart, nice_ticks, run_chart
from leto_shadow.timeline import Timeline

FAILURE_KEYS = {"kind", "rank", "iteration", "detected_s", "recovered_s", "iterations_lost", "source"}


def timeline() -> Timeline:
    story = Timeline(KINDS, TITLES)
    for event in four_failures():
        story.feed(event)
    return story


def comparison(exact: bool) -> Comparison:
    result = Comparison()
    for number in range(5):
        result.count("parameters", exact or number != 3, f"rank 0: <weight {number}>")
    return result


class Checker(html.parser.HTMLParser):
    """Well-formed enough: every element that is opened is closed in its turn; nothing is fetched."""

    EMPTY = frozenset({"meta", "line", "circle", "path", "rect", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)
        assert not {"src", "href"} & {name for name, _value in attrs}, "the page fetches something"
        if tag not in self.EMPTY or self.get_starttag_text() is None:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.seen.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.EMPTY:
            return
        assert self.open, f"{tag} is closed but not open"
        assert self.open.pop() == tag


def write(folder: Path, exact: bool) -> tuple[dict[str, object], str]:
    for name in ("reference", "run"):
        (folder / name).mkdir(parents=True)
        lines = [{"iteration": i, "loss": 5.0 - 0.01 * i} for i in range(40)]
        (folder / name / "records-rank1.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (folder / "reference" / "final-rank0.json").write_text('{"elapsed_s": 12.5}')
    config = dataclasses.replace(PRESETS["demo"], seed=3)
    write_report(folder, config, timeline(), comparison(exact), folder / "reference", folder / "run", 123.0)
    return json.loads((folder / "report.json").read_text()), (folder / "report.html").read_text()


@pytest.mark.parametrize("exact", [True, False])
def test_report_files(exact: bool, tmp_path: Path) -> None:
    data, page = write(tmp_path, exact)
    assert data["exact"] is exact
    failures = data["failures"]
    assert isinstance(failures, list)
    assert len(failures) == 4
    for row in failures:
        assert row.keys() >= FAILURE_KEYS
    assert [row["iterations_lost"] for row in failures] == [0, 0, 0, 12]
    assert data["reference"] == {"iterations": 200, "elapsed_s": 12.5}
    assert data["run"] == {"iterations": 200, "elapsed_s": pytest.approx(timeline().training_s)}
    assert failures[1]["lost_pages"] == 7
    assert failures[1]["repairs"] == [{"rank": 0, "pages_reconstructed": 6, "verified": False}]
    for words in ("7 pages found missing", "6 pages reconstructed, no spare parity was left to verify with"):
        assert words in page
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert checker.seen.count("svg") == 3
    assert not re.search(r"\$\w", page), "a placeholder was left"
    assert "prefers-color-scheme: dark" in page
    assert ("Exact. Every" in page) is exact
    assert ("Not exact." in page) is not exact
    if not exact:
        assert "&lt;weight 3&gt;" in page, "differences are shown, and escaped"


def test_the_simulator_reads_the_report(tmp_path: Path) -> None:
    """`leto-sim validate report.json`."""
    validate = pytest.importorskip("leto_sim.validate")
    write(tmp_path, True)
    measured = validate.read_report(tmp_path / "report.json")
    assert measured.reference_iteration_s == 12.5 / 200
    assert measured.elapsed_s == pytest.approx(timeline().training_s)
    assert (len(measured.hof_recoveries_s), len(measured.ff_recoveries_s)) == (3, 1)


@pytest.mark.parametrize(
    ("kinds", "word"),
    [
        ({}, "Not exact"),
        ({"parameters": [3, 3], PROMISES: [9, 9]}, "Exact"),
        ({"parameters": [2, 3], PROMISES: [9, 9]}, "Not exact"),
        ({"parameters": [3, 3], PROMISES: [8, 9]}, "Not as promised"),
        ({"parameters": [2, 3], PROMISES: [8, 9]}, "Not exact"),
        ({"parameters": [0, 0]}, "Not exact"),
    ],
)
def test_the_verdict_in_two_words(kinds: dict[str, list[int]], word: str) -> None:
    assert headline(kinds) == word


def test_charts_of_an_empty_run() -> None:
    """A run that failed early still gets a report."""
    nothing = Curve("none", [])
    for svg in (loss_chart(nothing, nothing, []), run_chart([], []), breakdown_chart([])):
        assert svg.startswith("<svg")
        assert "nan" not in svg


def test_every_part_of_a_recovery_is_drawn() -> None:
    svg = breakdown_chart(timeline().failures)
    assert svg.count('class="part detect"') == 3  # the manager's death was noticed at once
    assert svg.count('class="part prepare"') == 4
    assert "total" not in svg


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (2.03, 5.57), (0.0, 199.0), (-3.0, 1e-3), (5.0, 5.0)])
def test_ticks_are_round_and_inside(low: float, high: float) -> None:
    ticks = nice_ticks(low, high)
    assert 1 <= len(ticks) <= 12
    assert ticks == sorted(set(ticks))
    assert all(low - 1e-9 <= tick <= high + (high - low) for tick in ticks)


def test_tables_fit_eighty_columns() -> None:
    output = io.StringIO()
    console = Console(file=output, width=80)
    console.print(failure_table(timeline().failures))
    console.print(verdict_table(comparison(False)))
    text = output.getvalue()
    assert "…" not in text
    for words in ("SIGKILL in the forward pass", "in-place", "checkpoint", "12", "parameters"):
        assert words in text


def test_display_prints_plain_lines_where_there_is_no_terminal() -> None:
    output = io.StringIO()
    with Display(Console(file=output, width=100), "demo", 40) as display:
        display.enter_stage("reference")
        display.update((0, 5.5))
        display.timeline = Timeline(KINDS, TITLES)
        for event in four_failures():
            display.say(*display.timeline.feed(event))
            display.update()
    text = output.getvalue()
    assert "SIGKILL in the forward pass: rank 1, iteration 10" in text
    assert "generation 4 goes on at iteration 25 (checkpoint)" in text
    assert "\x1b" not in text


def test_display_draws_a_panel_on_a_terminal() -> None:
    output = io.StringIO()
    with Display(Console(file=output, width=100, force_terminal=True), "demo", 40) as display:
        display.timeline = Timeline(KINDS, TITLES)
        for event in four_failures():
            display.say(*display.timeline.feed(event))
            display.update()
    text = output.getvalue()
    assert "generation" in text
    assert "tokens/s" in text
    assert "40/40" in text


def test_sparkline() -> None:
    assert sparkline([]) == ""
    assert sparkline([1.0, 1.0]) == "▁▁"
    assert sparkline([float(k) for k in range(8)]) == "▁▂▃▄▅▆▇█"
    assert len(sparkline([float(k) for k in range(1000)])) <= 49
