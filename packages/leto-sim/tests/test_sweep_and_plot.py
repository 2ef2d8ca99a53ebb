"""Sweeps: size, speed of construction, reproducibility, CSV; plots: PNG and a page that loads nothing."""

from __future__ import annotations

import builtins
import io
import math
import re
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from leto_sim import Grid, MissingDependencyError, Row, SimError, load_profile, run_sweep
from leto_sim.plot import panels, write_html, write_png
from leto_sim.progress import Progress
from leto_sim.reproduce import figures_page
from leto_sim.svg import bar_chart, line_chart, standalone
from leto_sim.sweep import parse_axis, read_rows, write_rows

V4 = load_profile("deepseek-v4-128k")
SMALL = Grid(
    ("leto", "gemini+"), (0.0, 0.5, 1.0), (600.0, 1800.0), methods=("closed", "exact", "des"), failures=60
)


def test_a_thousand_simulated_settings_in_one_sweep() -> None:
    counted: list[int] = []
    ratios, mttfs = tuple(i / 9 for i in range(10)), tuple(300.0 + 60 * i for i in range(50))
    grid = Grid(("leto", "gemini+"), ratios, mttfs, methods=("des",), failures=100, replicas=2)
    rows = run_sweep(V4, grid, counted.append)
    assert len(rows) == sum(counted) == 1000
    assert all(0 < r.ettr <= 1 for r in rows)


def test_rows_come_in_grid_order_with_every_method() -> None:
    rows = run_sweep(V4, SMALL)
    assert len(rows) == 2 * 2 * 3 * 3
    assert [(r.system, r.mttf_s, r.hof_ratio, r.method) for r in rows[:4]] == [
        ("leto", 600.0, 0.0, "closed"),
        ("leto", 600.0, 0.0, "exact"),
        ("leto", 600.0, 0.0, "des"),
        ("leto", 600.0, 0.5, "closed"),
    ]
    for closed, exact, simulated in zip(rows[::3], rows[1::3], rows[2::3], strict=True):
        assert closed.ettr == pytest.approx(exact.ettr, abs=0.015)
        assert abs(simulated.ettr - exact.ettr) < 6 * simulated.standard_error + 0.01


def test_a_sweep_is_reproducible_by_its_seed_and_independent_of_its_grid() -> None:
    rows = run_sweep(V4, SMALL)
    assert rows == run_sweep(V4, SMALL)
    part = Grid(("leto",), (0.5,), (1800.0,), methods=("des",), failures=60)
    wanted = [r for r in rows if (r.system, r.hof_ratio, r.mttf_s) == ("leto", 0.5, 1800.0)]
    assert run_sweep(V4, part) == [r for r in wanted if r.method == "des"]
    other = Grid(("leto",), (0.5,), (1800.0,), methods=("des",), failures=60, seed=1)
    assert run_sweep(V4, other) != run_sweep(V4, part)


def test_what_the_closed_form_refuses_is_a_row_with_a_note() -> None:
    row = run_sweep(V4, Grid(("gemini+",), (0.0,), (60.0,)))[0]
    assert math.isnan(row.ettr)
    assert row.note.startswith("refused: recovery")


def test_a_stage_profile_is_swept_over_scale() -> None:
    rows = run_sweep(load_profile("example-stage"), Grid(("leto",), (0.5,), data_parallel=(8, 64, 1024)))
    assert [r.gpus for r in rows] == [1024, 8192, 131_072]
    assert [r.mttf_s for r in rows] == sorted((r.mttf_s for r in rows), reverse=True)
    assert panels(rows)[0].axis.column == "gpus"


def test_unknown_systems_are_named() -> None:
    with pytest.raises(SimError, match=r"expected systems among gemini\+, leto, found gemini"):
        run_sweep(V4, Grid(("gemini",), (0.5,)))
    with pytest.raises(SimError, match="at least one system"):
        run_sweep(V4, Grid((), (0.5,)))


def test_rows_survive_csv(tmp_path: Path) -> None:
    rows = run_sweep(V4, SMALL)
    write_rows(tmp_path / "s.csv", rows)
    assert read_rows(tmp_path / "s.csv") == rows


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a,b\n1,2\n", "expected the columns system"),
        ("HEAD\nleto,closed,x,1,1,1,1,1,0,\n", ":2: expected a row of a sweep"),
    ],
)
def test_bad_csv_is_named(tmp_path: Path, text: str, message: str) -> None:
    head = "system,method,gpus,iteration_s,mttf_s,hof_ratio,interval,ettr,standard_error,note"
    (tmp_path / "s.csv").write_text(text.replace("HEAD", head))
    with pytest.raises(SimError, match=message):
        read_rows(tmp_path / "s.csv")


def test_axes() -> None:
    assert parse_axis("1,2.5", "--x") == (1.0, 2.5)
    assert parse_axis("0:1:5", "--x") == (0.0, 0.25, 0.5, 0.75, 1.0)
    for bad in ("", "1:2", "1:2:1", "a", "1,nan", "0:inf:3"):
        with pytest.raises(SimError, match=r"--x: expected"):
            parse_axis(bad, "--x")


def test_the_page_is_self_contained_and_well_formed(tmp_path: Path) -> None:
    write_html(tmp_path / "p.html", run_sweep(V4, SMALL), "a <title> & more")
    text = (tmp_path / "p.html").read_text(encoding="utf-8")
    loads = re.sub(r'xmlns="[^"]*"', "", text)
    assert not re.search(r"https?://|src=|@import|<link|<script", loads)
    assert "a &lt;title&gt; &amp; more" in text
    charts = re.findall(r"<svg.*?</svg>", text, flags=re.S)
    assert len(charts) == 2  # the HOF ratio has most values: one chart for each MTTF
    for chart in charts:
        root = ET.fromstring(chart)
        assert len(root.findall("{*}circle")) >= 18  # two systems, three methods, three ratios
    assert text.count("<tr>") == 1 + 36


def test_charts_cope_with_gaps_and_nothing() -> None:
    nan = math.nan
    chart = line_chart({"a": [(1, 1.0), (2, nan), (3, 2.0)]}, title="t", x_label="x", y_label="y")
    assert chart.count("<circle") == 2
    assert "nan" not in chart
    ET.fromstring(line_chart({"a": [(1, nan)]}, title="<&>", x_label="x", y_label="y"))
    ET.fromstring(bar_chart({"g": {"a": 1.0, "b": nan}}, title="t", y_label="y"))
    ET.fromstring(standalone(line_chart({"a": [(1, 5.0)]}, title="t", x_label="x", y_label="y", log_x=True)))


def test_the_paper_page_is_well_formed() -> None:
    page = figures_page()
    charts = re.findall(r"<svg.*?</svg>", page, flags=re.S)
    assert len(charts) == 4
    for chart in charts[:3]:
        assert len(ET.fromstring(chart).findall("{*}rect")) == 9 * 4


def test_a_png_is_written(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    write_png(tmp_path / "p.png", run_sweep(V4, SMALL))
    assert (tmp_path / "p.png").read_bytes().startswith(b"\x89PNG\r\n")


def test_a_png_without_matplotlib_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = builtins.__import__

    def absent(name: str, *rest: object, **more: object) -> object:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *rest, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(builtins, "__import__", absent)
    with pytest.raises(MissingDependencyError, match=r"pip install 'leto-sim\[plot\]'"):
        write_png(tmp_path / "p.png", [Row("leto", "closed", 8, 1.0, 600.0, 0.5, 4, 0.9, 0.0)])


def test_nothing_to_plot_is_refused() -> None:
    with pytest.raises(SimError, match="at least one row"):
        panels([])


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_progress_shows_on_a_terminal_only() -> None:
    terminal, pipe = Terminal(), io.StringIO()
    for stream in (terminal, pipe):
        with Progress(10, "sweep", stream) as p:
            p.advance(4)
            p.advance(6)
    assert "10/10" in terminal.getvalue()
    assert pipe.getvalue() == ""
