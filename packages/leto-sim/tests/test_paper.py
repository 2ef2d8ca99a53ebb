"""The paper's figures, with stated tolerances. See docs/inference.md for what is fitted and what is not."""

from __future__ import annotations

import itertools
import re
import runpy
from dataclasses import replace
from pathlib import Path

import pytest

from leto_sim import evaluate, load_profile
from leto_sim.paper import (
    FIGURE_CELLS,
    MODELS,
    TABLE_3,
    TABLE_6,
    illustrative_loss,
    reproduce_figures,
    reproduce_table_3,
    table_6_errors,
)

FIGURE_TOLERANCE_PP = 0.1
"""The paper prints tenths, i.e. +-0.05; the inferred parameters leave at most as much again."""

NUMBER = r"(-?\d+(?:\.\d+)?)"

ROOT = Path(__file__).parents[1]


def test_the_illustrative_loss_is_10_6_percent() -> None:
    assert round(100 * illustrative_loss(), 1) == 10.6


@pytest.mark.parametrize(
    "cell",
    reproduce_figures(),
    ids=lambda c: f"{c.cell.model}-{c.cell.mttf_min}min-{c.cell.hof_ratio:g}-{c.system}",
)
def test_figures_14_and_15(cell) -> None:  # type: ignore[no-untyped-def]
    assert abs(cell.difference) <= FIGURE_TOLERANCE_PP


def test_the_figures_are_complete_and_agree_with_what_the_text_says_of_them() -> None:
    # 27 pairs. The text's statements fix which of the rotated labels belongs where.
    assert len(FIGURE_CELLS) == len({(c.model, c.mttf_min, c.hof_ratio) for c in FIGURE_CELLS}) == 27

    def gains(minutes: set[int], ratio: float) -> list[float]:
        return [
            round(c.leto - c.gemini_plus, 1)
            for c in FIGURE_CELLS
            if c.mttf_min in minutes and c.hof_ratio == ratio
        ]

    def span(values: list[float]) -> tuple[float, float]:
        return min(values), max(values)

    assert span(gains({10}, 0.5)) == (3.5, 4.3)  # "3.5-4.3 percentage points" at 50 %
    assert set(gains({10}, 0.0)) == {-0.3}  # "trails by just 0.3"
    assert span(gains({30, 60}, 0.5)) == (0.7, 1.8)
    assert span(gains({30, 60}, 1.0)) == (2.8, 5.6)
    assert span(gains({30, 60}, 0.0)) == (-0.4, -0.3)
    assert span([c.gemini_plus for c in FIGURE_CELLS if c.mttf_min == 10]) == (83.0, 85.3)


@pytest.mark.parametrize("model", MODELS)
def test_all_hofs_every_10_minutes_up_to_131072_gpus(model: str) -> None:
    cells = (c for c in reproduce_figures() if (c.cell.model, c.cell.mttf_min) == (model, 10))
    ours = {c.system: c.predicted for c in cells if c.cell.hof_ratio == 1.0}
    assert 94.9 <= ours["leto"] <= 96.1  # the paper: 95-96 %
    assert 82.9 <= ours["gemini+"] <= 85.4  # the paper: 83.0-85.3 %


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("d", [-2.0, 2.0])
def test_what_can_be_told_apart_only_as_a_sum(model: str, d: float) -> None:
    # d seconds more of iteration, d/2 less for Leto's start, d less for Gemini+'s: nearly the same figures.
    profile = load_profile(model)
    other = {
        name: replace(
            system,
            initialize_hof_s=system.initialize_hof_s - (d / 2 if name == "leto" else d),
            initialize_ff_s=system.initialize_ff_s - d,
        )
        for name, system in profile.systems().items()
    }
    iteration_s = profile.data["job"]["iteration_s"] + d
    for cell in (c for c in FIGURE_CELLS if c.model == model):
        for name, printed in (("leto", cell.leto), ("gemini+", cell.gemini_plus)):
            e = evaluate(other[name], iteration_s, cell.mttf_min * 60.0, cell.hof_ratio)
            assert 100 * e.ettr == pytest.approx(printed, abs=0.35)


def test_table_3_has_the_papers_order_and_size() -> None:
    ours = reproduce_table_3()
    rows = list(TABLE_3)
    for a, b in itertools.pairwise(rows):
        assert ours[a][0] > ours[b][0], "recovery falls down the table"
        assert ours[a][3] < ours[b][3], "ETTR rises down the table"
    for row in rows:
        assert ours[row][0] == pytest.approx(
            TABLE_3[row][0], abs=12
        )  # s; three injections a run in the paper
        assert ours[row][3] == pytest.approx(TABLE_3[row][3], abs=3.5)  # percentage points


@pytest.mark.parametrize(
    ("system", "ratio", "interval", "printed"),
    [
        ("gemini+", 1.0, 5, 84.5),  # figures 8, 9, 10
        ("leto", 1.0, 5, 93.8),
        ("leto", 1.0, 16, 95.8),
        ("leto", 0.0, 5, 83.7),
    ],
)
def test_olmoe_on_the_testbed(system: str, ratio: float, interval: int, printed: float) -> None:
    # Only the initialisation is taken from section 8.2; the ETTR is not fitted. Tolerance: 1.8 points.
    profile = load_profile("olmoe-4")
    e = evaluate(profile.systems()[system], 12.002, 600.0, ratio, interval)
    assert 100 * e.ettr == pytest.approx(printed, abs=1.8)


def test_the_mix_of_section_8_2() -> None:
    # Four HOFs of 11 s and four FFs of 57 s: 34 s on average, 4.6 minutes in total.
    assert 0.5 * 11 + 0.5 * 57 == 34
    assert round(8 * 34 / 60, 1) == pytest.approx(4.6, abs=0.1)


def test_table_6_error_arithmetic() -> None:
    errors = table_6_errors()
    for name, (_, _, printed) in TABLE_6.items():
        assert round(errors[name], 1) == printed
    # The printed mean of 2.18 % is that of the rounded errors; from the times it is 2.19 %.
    assert sum(abs(row[2]) for row in TABLE_6.values()) / 5 == pytest.approx(2.18)
    assert sum(abs(e) for e in errors.values()) / 5 == pytest.approx(2.19, abs=0.005)


def test_the_committed_figures_are_what_the_script_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.argv", ["reproduce.py", str(tmp_path)])
    runpy.run_path(str(ROOT / "examples" / "reproduce.py"), run_name="__main__")
    committed = ROOT / "docs" / "figures"
    assert {f.name for f in tmp_path.iterdir()} == {f.name for f in committed.iterdir()}
    for file in sorted(tmp_path.iterdir()):
        mine, theirs = (re.split(NUMBER, f.read_text()) for f in (file, committed / file.name))
        # Split by numbers: text between them must be equal, numbers to the last printed place.
        assert mine[::2] == theirs[::2], f"{file.name}: run examples/reproduce.py again"
        for a, b in zip(mine[1::2], theirs[1::2], strict=True):
            assert float(a) == pytest.approx(float(b), rel=1e-3, abs=0.11), (
                f"{file.name}: run examples/reproduce.py"
            )
