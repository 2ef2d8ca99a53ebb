"""The tables of the benchmarks' pages are what the scripts of this commit make of the data beside them.

So no number on such a page was written by hand, and a script that only runs on a GPU is at least read,
imported and made to write its page everywhere.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
PAGES = {
    "ec-h200": "leto-ec/benchmarks/gpu_bench.py",
    "rmp-h200": "leto-rmp/benchmarks/gpu_attach.py",
    "rmp-ends-h200": "leto-rmp/benchmarks/gpu_ends.py",
    "rmp-ends-handles-h200x2": "leto-rmp/benchmarks/gpu_ends.py",
    "rmu-fused-h200": "leto-rmu/benchmarks/gpu_fused_adamw.py",
    "rmu-updater-h200": "leto-rmu/benchmarks/gpu_updater.py",
    "rmu-updater-plain-h200": "leto-rmu/benchmarks/gpu_updater.py",
    "rmu-table1-lean-h200": "leto-rmu/benchmarks/gpu_table1.py",
    "rmu-table1-120-h200": "leto-rmu/benchmarks/gpu_table1.py",
    "rmu-lending-h200": "leto-rmu/benchmarks/gpu_lending.py",
    "rmu-repair-h200": "leto-rmu/benchmarks/gpu_repair.py",
    "rmu-repair-h200-one-page": "leto-rmu/benchmarks/gpu_repair.py",
    "rmu-figure12-h200": "leto-rmu/benchmarks/figure12_page.py",
    "rmu-kills-h200": "leto-rmu/benchmarks/gpu_kills.py",
    "rmu-kills-lost-h200": "leto-rmu/benchmarks/gpu_kills.py",
    "rmu-ranks-h200": "leto-rmu/benchmarks/gpu_ranks.py",
    "rmu-aborts-h200": "leto-rmu/benchmarks/gpu_aborts.py",
    "demo-h200": "leto-megatron/benchmarks/gpu_demo.py",
    "footprint-h200x2": "leto-megatron/benchmarks/gpu_footprint.py",
    "oom-free-h200": "leto-shadow/benchmarks/pressure_page.py",
    "recoveries-h200x2": "leto-shadow/benchmarks/experiment_page.py",
    "recoveries-h200x2-one-page": "leto-shadow/benchmarks/experiment_page.py",
    "recoveries-h200x2-handles": "leto-shadow/benchmarks/experiment_page.py",
    "recoveries-h200x2-micro4": "leto-shadow/benchmarks/experiment_page.py",
    "recoveries-h200x2-lost16": "leto-shadow/benchmarks/experiment_page.py",
    "recoveries-h200x2-lost": "leto-shadow/benchmarks/experiment_page.py",
    "recoveries-h200x2-level2": "leto-shadow/benchmarks/experiment_page.py",
    "recoveries-h200x2-level1": "leto-shadow/benchmarks/experiment_page.py",
    "shadow-recovery-gpt-host": "leto-shadow/benchmarks/experiment_page.py",
    "shadow-scale": "leto-shadow/benchmarks/scale.py",
}


@pytest.fixture
def script(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The benchmark of a page, imported; where CuPy is not, an empty module stands in for it."""
    pytest.importorskip("torch")
    path = ROOT / "packages" / PAGES[request.param]
    monkeypatch.syspath_prepend(str(path.parent))
    if importlib.util.find_spec("cupy") is None:
        monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy"))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, path.stem, module)
    spec.loader.exec_module(module)
    module.page_name = request.param  # type: ignore[attr-defined]
    yield module
    for name, found in list(sys.modules.items()):  # others import the benchmarks' modules for themselves
        if "benchmarks" in Path(getattr(found, "__file__", None) or "").parts:
            del sys.modules[name]


def made_of(script: ModuleType, data: dict[str, Any]) -> str:
    """The page that a script makes of its data."""
    if script.__name__ in (
        "gpu_kills",
        "gpu_ranks",
        "gpu_aborts",
    ):  # made of jobs, whose results are what is kept
        jobs = [
            SimpleNamespace(
                spec={**run, "kills": 0, "kinds": [one["kind"] for one in run.get("rounds", ())]},
                result=run,
                error="",
            )
            for run in data["runs"]
        ]
        found: str = script.markdown(data if script.__name__ == "gpu_aborts" else data["machine"], jobs)
    elif script.__name__ in ("gpu_demo", "gpu_footprint", "pressure_page"):
        found = script.page(data, script.page_name)
    else:
        found = (script.page if hasattr(script, "page") else script.markdown)(data)
    return found


@pytest.mark.parametrize("script", PAGES, indirect=True)
def test_tables_are_made_of_the_data(script: ModuleType) -> None:
    page = ROOT / "docs" / "benchmarks" / f"{script.page_name}.md"
    made = made_of(script, json.loads(page.with_suffix(".json").read_text(encoding="utf-8")))
    tables = [
        [line for line in text.splitlines() if line.startswith("|")]
        for text in (made, page.read_text(encoding="utf-8"))
    ]
    assert len(tables[0]) > 5
    assert tables[0] == tables[1]
