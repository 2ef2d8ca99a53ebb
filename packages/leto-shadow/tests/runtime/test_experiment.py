"""The experiment under a schedule of failures, at its smallest: its numbers are those of `leto report`."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("leto_rmu")

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "experiment.py"


@pytest.fixture
def experiment(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    spec = importlib.util.spec_from_file_location("experiment", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "experiment", module)  # where its dataclasses look for their types
    spec.loader.exec_module(module)
    return module


@pytest.mark.job
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_kill_and_a_loss_are_measured(
    experiment: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    output = tmp_path / "out" / "found"
    words = ["--smoke", "--seed", "1", "--budget", "500", "--output", str(output)]
    monkeypatch.setattr(sys, "argv", ["experiment.py", *words])
    assert experiment.main() == 0, capsys.readouterr().out
    assert "checked: everything holds" in capsys.readouterr().out
    result = json.loads(output.with_suffix(".json").read_text())
    report = result["report"]
    assert report["reference"]["measured"]
    assert report["ettr"] > 0.0
    assert [(one["number"], one["kind"], one["done"]) for one in result["injected"]] == [
        (0, "kill", True),
        (1, "lose", True),
    ]
    planned = [one["rank"] for one in result["schedule"]["injections"]]
    assert (
        [one["rank"] for one in result["injected"]] == planned == [row["rank"] for row in report["failures"]]
    )
    assert [row["lost_pages"] for row in report["failures"]] == [0, 1]
    for row in report["failures"]:
        assert (row["source"], row["verdict"], row["iterations_lost"]) == ("in-place", "hof", 0)
        assert "prepare" not in row["breakdown"] or row["breakdown"]["prepare"] == 0.0, "shadows stood ready"
        assert {"localize"} <= set(row["rank_parts"])
    assert {"interruption", "recompute", "part detect", "part fence"} <= set(result["spreads"])
    kept, lost = (row["interruption_s"] for row in report["failures"])
    for name, seconds in (("kept", kept), ("lost", lost)):
        assert result["spreads"][f"interruption {name}"]["median"] == seconds
    destroying_s = report["failures"][1]["rank_parts"]["lose"]
    assert 0 < destroying_s < lost
    assert result["spreads"]["interruption found"]["median"] == lost - destroying_s
    page = output.with_suffix(".md").read_text()
    for row in report["failures"]:
        times = (row[name] for name in ("interruption_s", "recompute_s", "done_s", "first_extra_s"))
        assert "| " + " | ".join(f"{one:.3f}" for one in times) + " | 0 | in-place | hof |" in page
    assert f"ETTR {report['ettr']:.2%}" in page
    detected = result["spreads"]["part detect"]
    assert f"of I: detect (s) | {detected['median']:.3f}" in page
    trace = json.loads(output.with_suffix(".trace.json").read_text())
    spans = [one["name"] for one in trace["traceEvents"] if one["ph"] == "X"]
    assert spans.count("recovery: in-place") == 2
    of_ranks = [one for one in trace["traceEvents"] if one["ph"] == "X" and one["pid"] > 0]
    for name in ("repair", "localize"):
        assert sum(one["name"] == name for one in of_ranks) == 4, "of each rank in each recovery"
    extras = {one["args"]["first_extra_s"] for one in of_ranks if "first_extra_s" in one["args"]}
    assert extras == {row["first_extra_s"] for row in report["failures"]}
    assert f"R above the part done + 10 %: {result['judged']['above_done']} of 2; above" in page
    assert "==== experiment.log" in output.with_suffix(".log").read_text()


def test_the_end_of_the_jobs(experiment: ModuleType) -> None:
    """Iterations count from the newest recovery on, and apart from that from the shadows' being ready."""
    seen = experiment.Seen(2)

    def feed(*events: dict[str, Any]) -> tuple[int, int]:
        for event in events:
            seen.feed(event)
        return seen.since(seen.trained_at), seen.since(seen.ready_at)

    def metrics(iteration: int, rank: int = 0) -> dict[str, Any]:
        return {"event": "metrics", "rank": rank, "iteration": iteration}

    def level(rank: int, level: int = 3) -> dict[str, Any]:
        return {"event": "shadow_level", "rank": rank, "level": level}

    assert feed(level(0), level(1), {"event": "promoted"}) == (-1, -1)
    assert feed(metrics(0), metrics(0, 1), metrics(1)) == (1, -1)
    assert feed(level(0), level(1, 2), metrics(2)) == (2, -1)
    assert feed(level(1), metrics(3), metrics(4)) == (4, 1)
    assert feed({"event": "injected", "done": True}, {"event": "failure"}, {"event": "promoted"}) == (-1, -1)
    assert feed({"event": "recovered"}, metrics(5, 1)) == (-1, -1)
    assert feed(metrics(5), metrics(6)) == (1, -1)
    low = experiment.Seen(1, 2)  # shadows that wait at level 2
    for event in (metrics(0), level(0, 1), metrics(1), level(0, 2), metrics(2), metrics(3)):
        low.feed(event)
    assert low.since(low.ready_at) == 1
    feed({"event": "injected", "done": False})
    assert (seen.injected, seen.recovered, seen.refused) == (2, 1, 1)


@pytest.mark.parametrize(("last", "again"), [(98, False), (99, False), (100, True)])
def test_a_reference_that_ended_before_the_last_failure_is_run_again(
    experiment: ModuleType, last: int, again: bool
) -> None:
    """Iterations 0 to 99 have been compared; another one, and it ends when it is beyond the failure."""
    ends: list[int] = []
    asked: list[str] = []

    def follow(name: str, more: list[str], over: Any) -> None:
        assert not more, "without failures"
        asked.append(name)
        ends.append(next(n for n in range(1000) if over(SimpleNamespace(iteration=n))))

    mine = experiment.Experiment.__new__(experiment.Experiment)
    mine.result, mine.covers = {"compared": {"iterations": 100}}, "reference"
    mine.follow, mine.write = follow, lambda _report: asked.append(f"write {mine.covers}")
    rows = [SimpleNamespace(iteration=5), SimpleNamespace(iteration=last)]
    mine.cover(SimpleNamespace(timeline=SimpleNamespace(failures=rows)))
    assert asked == (["cover", "write cover"] if again else [])
    assert ends == ([last + 2] if again else [])


@pytest.fixture
def experiment_page(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPT.parent))
    return importlib.import_module("experiment_page")


def test_what_is_held_against_a_tenth(experiment_page: ModuleType) -> None:
    """18 recoveries of a GPT of 1.2 B parameters on two H200s: five are above what was done and a tenth of
    it, two of these above it and a tenth of an iteration."""
    done = [225, 125, 330, 36, 91, 295, 322, 309, 292, 178, 129, 69, 79, 183, 143, 202, 330, 114]
    again = [181, 104, 327, 6, 91, 269, 274, 275, 307, 107, 125, 97, 104, 245, 183, 195, 334, 144]
    rows: list[dict[str, Any]] = [
        {"recompute_s": r / 1e3, "done_s": d / 1e3} for r, d in zip(again, done, strict=True)
    ]
    rows.append({"recompute_s": None, "done_s": 0.1})
    found = experiment_page.judged(rows, 0.345)
    assert found == {
        "of": 18,
        "above_done": 5,
        "tenth_of_iteration_s": pytest.approx(0.0345),
        "above_iteration": 2,
    }
    report = {"reference_scatter_s": 0.0301, "iteration_scatter_s": 0.0402}
    first, end = experiment_page._judged({"judged": found, "report": report})
    assert first.startswith(
        "R above the part done + 10 %: 5 of 18; above the part done + 10 % of an iteration (34.5 ms): "
        "2 of 18. R less"
    )
    assert "30.1 ms or more (p95 - median; 40.2 ms in this run" in first
    assert end == ""
    without = {"reference_scatter_s": None, "iteration_scatter_s": None}
    assert experiment_page._judged({"judged": found, "report": without})[0].endswith("2 of 18.")
    assert experiment_page._judged({"judged": experiment_page.judged([], None), "report": report}) == []


def test_how_many_would_be_above_by_the_scatter_alone(experiment_page: ModuleType) -> None:
    """Of ten iterations around 1 s two are 60 ms longer, one 200 ms: bounds of 50 and 100 ms."""
    rows = [{"recompute_s": done + 0.03 * k, "done_s": done} for k, done in enumerate((0.5, 0.5, 1.0))]
    times = [1.0] * 7 + [1.06, 1.06, 1.2]
    found = experiment_page.judged(rows, 1.0, times)
    assert (found["lot_above_done"], found["lot_above_iteration"]) == pytest.approx((0.3 + 0.3 + 0.1, 0.3))
    assert (found["mean_beyond_s"], found["error_beyond_s"]) == pytest.approx((0.03, 0.03 / 3**0.5))
    report = {"reference_scatter_s": None, "iteration_scatter_s": None}
    text = experiment_page._judged({"judged": found, "report": report})[0]
    assert text.endswith(
        "from the others of this run, 0.7 and 0.3 would be expected above. In the mean R is 30 ms above what "
        "was done, 3.0% of an iteration; the standard error of that is 17 ms."
    )


def test_laps_of_first_iterations_beside_the_others(experiment_page: ModuleType) -> None:
    """What the device tells comes one iteration later, and belongs to the one before."""
    lap_table, lap_lines = experiment_page.lap_table, experiment_page.lap_lines

    def metrics(generation: int, iteration: int, first_s: float, device_s: float = 0.0) -> dict[str, Any]:
        event = {"event": "metrics", "rank": 0, "generation": generation, "iteration": iteration}
        event |= {"lap_first_s": first_s, "lap_allocations": 10 * first_s, "seconds": 9.0}
        return {**event, "gpu_lap_first_s": device_s} if device_s else event

    recovered = {"event": "recovered", "generation": 1, "iteration": 7}
    job = [metrics(0, 4, 50.0), metrics(0, 5, 1.0, 51.0), metrics(0, 6, 3.0, 2.0)]
    after = [metrics(1, 7, 9.0), metrics(1, 8, 2.0, 8.0), metrics(1, 9, 2.0, 3.0)]
    laps = lap_table([*job, recovered, *after], [metrics(0, 20, 9.0), metrics(0, 21, 1.5, 9.0)])
    assert laps["lap_first_s"] == {"first": [9.0], "other": [1.0, 3.0, 2.0, 2.0], "reference": [1.5]}
    assert laps["gpu_lap_first_s"] == {"first": [8.0], "other": [2.0, 3.0]}, "none of the job's first one"
    text, _, _, _, host, device, _ = lap_lines(laps)
    assert "asked for 90 times in a first iteration, 20.0 later." in text
    assert host == "| first | host | 9000.00 | 2000.00 | 1500.00 | +7000.00 | 408.25 |"
    assert device.startswith("| first | device | 8000.00 | 2500.00 | - | +5500.00 |")
    assert lap_lines(lap_table([recovered, metrics(1, 7, 1.0)], [])) == []


def test_the_first_trainers_are_no_shadows(experiment_page: ModuleType) -> None:
    """They go through the levels as shadows do, but wait at none, and so give nothing back."""
    memory = {"event": "shadow_memory", "level": 3}
    events = [
        {**memory, "bytes": 1418 << 20, "parked_bytes": 0},
        {"event": "started"},
        {**memory, "level": 1},
        {**memory, "bytes": 972 << 20, "parked_bytes": 446 << 20},
    ]
    assert experiment_page.footprints(events) == {"3": [972.0]}


def test_spreads_of_few_values(experiment_page: ModuleType) -> None:
    spread = experiment_page.spread
    assert spread([2.0])["p95"] == 2.0
    assert spread([float(n) for n in range(1, 21)])["p95"] == 19.0
    assert spread([float(n) for n in range(1, 20)])["p95"] == 19.0
    assert spread([3.0, 1.0])["high"] == 3.0
