"""Reports of measured runs: predicted beside measured, and reports that cannot be used."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from leto_sim import Lane, RecoveryTooSlowError, ReportError, leto, load_profile, poisson_schedule, simulate
from leto_sim.systems import gemini
from leto_sim.validate import compare_run, read_report

REPORT = {
    "reference": {"iterations": 200, "elapsed_s": 100.0, "loss": [1, 2]},
    "run": {"iterations": 200, "elapsed_s": 125.0, "effective_iteration_s": 0.51, "note": "ignored"},
    "failures": [
        {"class": "hof", "initialize_s": 0.8, "recompute_s": 0.2, "rank": 3},
        {"recovery_s": 2.0},
        {"class": "ff", "recovery_s": 19.0},
    ],
    "verdict": "exact",
}


def write(folder: Path, report: object) -> Path:
    file = folder / "report.json"
    file.write_text(json.dumps(report))
    return file


def test_a_report_by_hand(tmp_path: Path) -> None:
    run = read_report(write(tmp_path, REPORT))
    assert (run.ettr, run.failures, run.hof_ratio) == (0.8, 3, pytest.approx(2 / 3))
    assert run.mean_recovery_s == pytest.approx(22 / 3)
    (own,) = compare_run(run)
    assert own.predicted == pytest.approx(0.5 / 0.51 * (1 - 22 / 3 / (125 / 3)))
    assert own.measured == 0.8
    assert own.error == pytest.approx((own.predicted - 0.8) / 0.8)


def test_the_failures_of_the_demo_are_read_as_they_are(tmp_path: Path) -> None:
    demo = {"kind": "kill-update", "rank": 1, "detected_s": 0.1, "recovered_s": 0.9, "iterations_lost": 0}
    rows = [{**demo, "source": "in-place"}, {**demo, "source": "checkpoint", "iterations_lost": 7}]
    run = read_report(write(tmp_path, {**REPORT, "failures": rows}))
    assert run.hof_recoveries_s == (pytest.approx(0.9 + 0.5 * 0.51),)
    assert run.ff_recoveries_s == (pytest.approx(0.9 + 7.5 * 0.51),)


def test_a_profile_is_predicted_too(tmp_path: Path) -> None:
    slow = {
        **REPORT,
        "reference": {"iterations": 2, "elapsed_s": 18.0},
        "run": {"iterations": 200, "elapsed_s": 2500.0},
    }
    found = compare_run(read_report(write(tmp_path, slow)), load_profile("kimi-moe-64"))
    assert [c.name.split(": ")[-1] for c in found[1:]] == ["gemini", "gemini+", "leto"]


def test_a_simulated_run_is_predicted_from_its_own_figures(tmp_path: Path) -> None:
    # The simulation stands in for a measured run: equation 6 must explain it within a point.
    system = leto(gemini(initialize_s=30.0, checkpoint_stall_s=0.0), initialize_s=2.0, overhead_fraction=0.01)
    schedule = poisson_schedule(300.0, 30_000.0, 1.0, seed=2)
    run = simulate([Lane(system, 5.0, 50, schedule)])[0]
    each = (run.downtime_s + run.lost_s) / run.failures
    report = {
        "reference": {"iterations": 100, "elapsed_s": 500.0},
        "run": {"iterations": run.iterations, "elapsed_s": run.elapsed_s, "effective_iteration_s": 5.05},
        "failures": [{"recovery_s": each}] * run.failures,
    }
    (own,) = compare_run(read_report(write(tmp_path, report)))
    assert own.error == pytest.approx(0.0, abs=0.001)


def test_a_run_without_failures(tmp_path: Path) -> None:
    run = read_report(write(tmp_path, {**REPORT, "failures": []}))
    assert compare_run(run)[0].predicted == pytest.approx(0.5 / 0.51)


def test_recovery_beyond_the_mttf_is_refused(tmp_path: Path) -> None:
    run = read_report(write(tmp_path, {**REPORT, "failures": [{"recovery_s": 200.0}]}))
    with pytest.raises(RecoveryTooSlowError):
        compare_run(run)


@pytest.mark.parametrize(
    ("report", "message"),
    [
        ([], r"report\.json: \(root\): found \[\], expected a table"),
        ({}, "reference: missing"),
        (
            {**REPORT, "run": {"iterations": 0, "elapsed_s": 1}},
            r"run\.iterations: found 0, expected an integer in \[1",
        ),
        ({**REPORT, "run": {"iterations": 1}}, r"run\.elapsed_s: missing"),
        (
            {**REPORT, "failures": [{"class": "odd"}]},
            r"failures\[0\]\.class: found 'odd', expected one of 'hof', 'ff'",
        ),
        (
            {**REPORT, "failures": [{"initialize_s": 1}]},
            r"failures\[0\]\.recovery_s: missing, expected recovery_s, or",
        ),
    ],
)
def test_bad_reports_name_the_field(tmp_path: Path, report: object, message: str) -> None:
    with pytest.raises(ReportError, match=message):
        read_report(write(tmp_path, report))


def test_a_file_that_is_no_json(tmp_path: Path) -> None:
    (tmp_path / "r.json").write_text("{")
    with pytest.raises(ReportError, match="expected a readable JSON report"):
        read_report(tmp_path / "r.json")
