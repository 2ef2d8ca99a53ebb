"""The experiment under a schedule of failures, at its smallest: its numbers are those of `leto report`."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytest.importorskip("leto_rmu")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "experiment.py"


@pytest.fixture
def experiment() -> ModuleType:
    spec = importlib.util.spec_from_file_location("experiment", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_two_failures_are_measured(
    experiment: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = tmp_path / "found"
    words = ["--failures", "2", "--mttf", "3", "--gap", "2", "--seed", "1", "--reference-iterations", "150"]
    monkeypatch.setattr(sys, "argv", ["experiment.py", *words, "--output", str(output)])
    assert experiment.main() == 0
    result = json.loads(output.with_suffix(".json").read_text())
    report = result["report"]
    assert report["state"] == "finished"
    assert report["reference"]["measured"]
    assert 0.0 < report["ettr"] < 1.0
    injected = report["injected"]
    assert [one["number"] for one in injected] == [0, 1]
    assert [one["rank"] for one in injected] == [one["rank"] for one in result["schedule"]["injections"]]
    for row in report["failures"]:
        assert (row["source"], row["verdict"], row["iterations_lost"]) == ("in-place", "hof", 0)
    page = output.with_suffix(".md").read_text()
    for row in report["failures"]:
        assert f"| {row['interruption_s']:.3f} | {row['recompute_s']:.3f} | 0 | in-place | hof |" in page
    assert f"ETTR {report['ettr']:.2%}" in page
