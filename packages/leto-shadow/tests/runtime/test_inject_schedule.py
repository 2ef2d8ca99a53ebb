"""`leto inject plan` and `leto inject schedule` as a whole, against a job that runs."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from plain_jobs import Job

from leto_shadow import cli
from leto_shadow.schedule import load_schedule

pytest.importorskip("torch")
pytest.importorskip("leto_rmu")

PLAN = ["inject", "plan", "--seed", "5", "--mttf", "0.4", "--ranks", "2", "--count", "3"]
PLAN += ["--classes", "kill,lose"]


@pytest.mark.job
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_schedule_from_a_seed_is_carried_out_by_a_running_job(
    spawn: Callable[..., subprocess.Popen[bytes]],
    tmp_path: Path,
    short_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The job is held until all of it has come; then it ends with the bits of plain PyTorch."""
    plans = []
    for _ in range(2):
        assert cli.main(PLAN) == 0
        plans.append(capsys.readouterr().out)
    assert plans[0] == plans[1], "the same seed, the same failures at the same times"
    file = tmp_path / "schedule.json"
    file.write_text(plans[0])
    planned = load_schedule(file, world_size=2).injections
    assert {one.kind for one in planned} == {"kill", "lose"}

    job = Job(spawn, tmp_path, short_path / "job")
    job.until(lambda: {event["rank"] for event in job.events("metrics")} == {0, 1})
    schedule = ["inject", "schedule", str(file), "--run-dir", str(job.run_dir)]
    assert cli.main(schedule) == 0
    assert "3 injections" in capsys.readouterr().out
    job.until(lambda: len(job.events("injected")) == len(planned))
    job.until(lambda: len(job.events("recovered")) == len(planned))
    job.finish()
    injected = job.events("injected")
    assert [(one["number"], one["kind"], one["rank"], one["planned_s"]) for one in injected] == [
        (number, one.kind, one.rank, one.at_s) for number, one in enumerate(planned)
    ]
    assert all(one["done"] and one["actual_s"] >= one["planned_s"] for one in injected)
    assert [event["rank"] for event in job.events("failure")] == [one.rank for one in planned]
    recovered = job.events("recovered")
    assert [(one["source"], one["iterations_lost"]) for one in recovered] == [("in-place", 0)] * len(planned)
    assert [one["lost_pages"] for one in recovered] == [one.kind == "lose" for one in planned]
    job.assert_exact(5)
