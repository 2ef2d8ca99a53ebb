"""The documentation against the code: fields, commands, names, numbers and links."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest

import leto_sim
from leto_sim.cli import main
from leto_sim.fields import SCHEMA
from leto_sim.paper import reproduce_figures
from leto_sim.profile import bundled_profiles
from leto_sim.schema import REQUIRED, Choice, Number, Table, Tables

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), ROOT / "README.md"]


def rows(fields: Any, path: str = "") -> list[tuple[str, Any]]:
    found: list[tuple[str, Any]] = []
    for name, spec in fields.items():
        here = f"{path}.{name}" if path else name
        if isinstance(spec, Table | Tables):
            found += rows(spec.fields, here)
        else:
            found.append((here, spec))
    return found


@pytest.mark.parametrize(("field", "spec"), rows(SCHEMA), ids=lambda v: v if isinstance(v, str) else "")
def test_every_field_is_listed_with_its_range(field: str, spec: Any) -> None:
    table, _, name = field.rpartition(".")
    text = (DOCS / "profiles.md").read_text(encoding="utf-8")
    section = re.split(r"^## ", text, flags=re.MULTILINE)
    where = (
        [s for s in section if s.startswith(f"`{table}`")]
        if table
        else [s for s in section if s.startswith("Top")]
    )
    assert where, f"docs/profiles.md has no section for {table}"
    line = next((row for row in where[0].splitlines() if row.startswith(f"| `{name}` |")), None)
    assert line is not None, f"docs/profiles.md does not list {field}"
    cells = [c.strip() for c in line.strip("|").split("|")]
    assert cells[1] == describe(spec), field
    default = (
        "required" if spec.default is REQUIRED else "-" if spec.default is None else f"{spec.default}".lower()
    )
    assert cells[2] == (default or "empty"), field
    assert len(cells[3]) > 10, f"{field} is not explained"


def describe(spec: Any) -> str:
    if isinstance(spec, Number):
        kind = "integer" if spec.integer else "number"
        return f"{kind} in {'(' if spec.above else '['}{spec.minimum:g}, {spec.maximum:g}]"
    if isinstance(spec, Choice):
        return ", ".join(f"`{o}`" for o in spec.options)
    return {"Text": "string", "Flag": "true or false"}[type(spec).__name__]


def test_every_command_and_bundled_profile_is_in_the_guide(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--help"])
    commands = re.findall(r"^    ([a-z]+)\b", capsys.readouterr().out, flags=re.MULTILINE)
    assert len(commands) == 8
    guide, readme = (p.read_text(encoding="utf-8") for p in (DOCS / "guide.md", ROOT / "README.md"))
    for command in commands:
        assert f"leto-sim {command}" in guide
        assert f"`leto-sim {command}" in readme
    for name in bundled_profiles():
        assert f"`{name}`" in guide


def test_options_in_the_guide_exist(capsys: pytest.CaptureFixture[str]) -> None:
    text = (DOCS / "guide.md").read_text(encoding="utf-8")
    known = ""
    for command in ("run", "compare", "sweep", "plot", "reproduce", "advise", "profile", "validate"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        known += capsys.readouterr().out
    for option in set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) - {"--nproc-per-node"}:
        assert option in known, option


def test_the_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (code,) = re.findall(r"```python\n(.*?)```", (DOCS / "guide.md").read_text(encoding="utf-8"), flags=re.S)
    exec(compile(ast.parse(code), "guide.md", "exec"), {})
    values = [float(v) for v in capsys.readouterr().out.split()]
    assert values == pytest.approx([0.95, 0.95, 0.95], abs=0.003)


def test_the_table_of_where_the_methods_part_is_the_committed_result() -> None:
    text = (DOCS / "methods.md").read_text(encoding="utf-8").split("<!-- parting table")[1]
    lines = [line for line in text.splitlines() if re.match(r"\| \d", line)]
    data = json.loads((DOCS / "figures" / "results.json").read_text())["parting_deepseek_v4_hof_50"]
    assert len(lines) == len(data["leto"]) == len(data["gemini+"])
    for line, base, ours in zip(lines, data["gemini+"], data["leto"], strict=True):
        cells = [float(c) for c in line.strip("| ").split("|")]
        names = ("closed", "exact", "simulated")
        expected = [base["mttf_s"] / 60, base["recovery_over_mttf"], *(100 * base[n] for n in names)]
        expected += [ours["recovery_over_mttf"], *(100 * ours[n] for n in names)]
        assert cells == pytest.approx(expected, abs=0.051)


def test_the_stated_difference_is_the_real_one() -> None:
    worst = max(abs(c.difference) for c in reproduce_figures())
    assert f"largest difference {worst:.3f} points" in (DOCS / "inference.md").read_text(encoding="utf-8")


def test_the_table_of_the_search_is_the_committed_result() -> None:
    text = (DOCS / "inference.md").read_text(encoding="utf-8")
    for row in json.loads((DOCS / "inference.json").read_text()):
        start = f"| {row['leto_start_s']:g} | {row['gemini_plus_start_s']:g} | {row['interval_max']} "
        assert f"{start}| {row['largest_error_pp']} |" in text


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_lead_to_files(page: Path) -> None:
    for target in re.findall(r"!?\[[^\]]*\]\(([^)\s#]+)", page.read_text(encoding="utf-8")):
        assert "://" in target or (page.parent / target).exists(), target


def test_public_names_exist_and_are_documented_objects() -> None:
    assert leto_sim.__all__ == sorted(leto_sim.__all__)
    for name in leto_sim.__all__:
        thing = getattr(leto_sim, name)
        assert name == "__version__" or thing.__doc__, name
