"""A real job seen from outside: scraped while it recovers, its log lines, its report; no port is left."""

from __future__ import annotations

import json
import socket
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leto_shadow import cli
from leto_shadow.exit_codes import ExitCode

parser = pytest.importorskip("prometheus_client.parser")

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # on a busy machine


def scrape(port: int) -> dict[tuple[str, ...], float]:
    """Samples of the job's metrics: (name, label values...) -> value."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=100) as answer:
        families = parser.text_string_to_metric_families(answer.read().decode())
        return {
            (sample.name, *(value for _, value in sorted(sample.labels.items()))): sample.value
            for family in families
            for sample in family.samples
        }


def test_metrics_logs_and_report_of_a_job_that_recovers(
    start_job: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stop, kept, drills = tmp_path / "stop", tmp_path / "kept", tmp_path / "drills.json"
    drill = {"id": "one", "kind": "kill", "rank": 1, "iteration": 30, "point": "forward"}
    drills.write_text(json.dumps([drill]))
    options = ["--metrics-port", "0", "--log-format", "json", "--keep", str(kept), "--drills", str(drills)]
    job = start_job("observed", *options, "--", "100000", "--until", str(stop))
    (listening,) = job.until(lambda: job.events("metrics_listening"))
    port = listening["port"]
    assert listening["address"] == "127.0.0.1"
    assert ("leto_recoveries_total", "in-place") in scrape(port), "a rate needs a zero to grow from"
    assert job.until(lambda: job.status())["metrics_url"] == f"http://127.0.0.1:{port}/metrics"

    job.until(lambda: scrape(port).get(("leto_recoveries_total", "in-place")) == 1.0)
    wanted = {
        ("leto_generation",): 1.0,
        ("leto_epoch",): 1.0,
        ("leto_training",): 1.0,
        ("leto_managers_alive",): 2.0,
        ("leto_trainers", "active"): 2.0,
        ("leto_shadow_level", "0"): 3.0,
        ("leto_shadow_level", "1"): 3.0,
        ("leto_failures_total", "exit"): 1.0,
        ("leto_failures_total", "hang"): 0.0,
        ("leto_reclaimed_bytes_total", "1"): 0.0,
    }
    job.until(lambda: scrape(port).items() >= wanted.items())
    found = job.until(lambda: at if (at := scrape(port))["leto_iteration", "1"] > 35 else None)
    assert found["leto_reported", "counter", "1"] >= 30
    (recovered,) = job.events("recovered")
    for phase, seconds in recovered["breakdown"].items():
        name = ("leto_recovery_phase_seconds_sum", phase, "in-place")
        if phase != "total":
            assert found[name] == pytest.approx(seconds)
    assert found["leto_recovery_seconds_sum", "in-place"] == pytest.approx(recovered["breakdown"]["total"])

    stop.touch()
    assert job.wait() == ExitCode.FINISHED, job.text()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=10)
    job.assert_nothing_left()

    # what the agent said: each line an object, with all events but the many
    lines = [json.loads(line) for line in job.text().splitlines()]
    assert {(line["job"], line["node"]) for line in lines if line.get("event") == "recovered"} == {
        (job.job_id, 0)
    }
    assert {line["event_level"] for line in lines if line.get("event") == "shadow_level"} == {1, 2, 3}
    assert {line["level"] for line in lines if "event" in line} == {"info"}
    told = [line["event"] for line in lines if "event" in line]
    wrote = [
        event["event"] for event in job.events() if event["event"] not in ("metrics", "metrics_listening")
    ]
    assert [name for name in told if name in set(wrote)] == wrote
    # and what the trainers said
    words = [json.loads(line) for line in (job.run_dir / "logs" / "rank1.log").read_text().splitlines()]
    (fired,) = [line for line in words if "drill one" in line["message"]]
    wanted_of = {"job": job.job_id, "rank": 1, "role": "active", "generation": 0, "iteration": 30}
    assert fired.items() >= wanted_of.items()

    assert cli.main(["report", str(kept / job.job_id), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["state"], data["generations"], len(data["failures"])) == ("finished", 2, 1)
    assert data["failures"][0]["drill"] == "one"
