"""Prometheus metrics over real HTTP, from the agent's own metric object fed with events.

A scrape of a real job, and that nothing listens after it, is in `tests/protocol/test_observed.py`.
"""

from __future__ import annotations

import contextlib
import http.client
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from leto_shadow import cli, metrics
from leto_shadow import messages as m
from leto_shadow.agent_core import AgentCore
from leto_shadow.config import Deadlines

parser = pytest.importorskip("prometheus_client.parser")

from leto_shadow.metrics import REPORTED_NAMES_MAX, JobMetrics  # noqa: E402
from leto_shadow.metrics_server import MetricsServer  # noqa: E402

PAGE = Path(__file__).parents[4] / "docs" / "how-to" / "observe.md"


class Scraped:
    """Samples of one scrape."""

    def __init__(self, url: str) -> None:
        with urllib.request.urlopen(url, timeout=60) as answer:
            assert answer.status == 200
            text = answer.read().decode()
        self.families = list(parser.text_string_to_metric_families(text))
        self.samples = [sample for family in self.families for sample in family.samples]

    def __call__(self, sample: str, /, **labels: str) -> float | None:
        found = [s.value for s in self.samples if s.name == sample and s.labels == labels]
        assert len(found) <= 1
        return found[0] if found else None


@pytest.fixture
def served() -> Iterator[tuple[JobMetrics, MetricsServer]]:
    job = JobMetrics("job-1", 0)
    server = MetricsServer(job.registry)
    yield job, server
    server.close()


def event(name: str, **fields: Any) -> dict[str, Any]:
    return {"t": 1.0, "mono": 1.0, "node": 0, "event": name, **fields}


def recovered(source: str, **breakdown: float) -> dict[str, Any]:
    return event(
        "recovered",
        generation=1,
        iteration=7,
        source=source,
        fatal=False,
        lost_pages=3,
        iterations_lost=2,
        breakdown=breakdown,
    )


def test_recoveries_and_failures_are_counted(served: tuple[JobMetrics, MetricsServer]) -> None:
    job, server = served
    scrape = Scraped(server.url)
    assert scrape("leto_recoveries_total", source="in-place") == 0.0, "a rate needs a zero to grow from"
    assert scrape("leto_job_info", job="job-1", node="0", version=metrics.__version__) == 1.0
    job.observe(event("started", generation=0, iteration=0, source="fresh"))
    job.observe(event("failure", kind="hang", rank=1, detected_s=3.0))
    assert Scraped(server.url)("leto_training") == 0.0
    job.observe(event("resumed", rank=0, iteration=7, breakdown={"attach": 0.02, "pages_reconstructed": 9.0}))
    job.observe(recovered("in-place", fence=0.03, attach=0.2, total=0.23))
    job.observe(event("failure", kind="manager", rank=0, detected_s=0.0))
    job.observe(event("fatal", rank=0, reason="gone"))
    job.observe(recovered("checkpoint", fence=0.04, managers=1.5, total=1.54))
    job.observe(event("shadow_failed", rank=0, collateral=True))
    assert Scraped(server.url)("leto_takeovers_refused_total") == 0.0, "a rate needs a zero to grow from"
    for rank in (0, 1):
        job.observe(event("takeover_refused", rank=rank, generation=1, parked_bytes=9, detail="no room"))
    scrape = Scraped(server.url)
    assert scrape("leto_training") == 1.0
    assert [scrape("leto_failures_total", kind=kind) for kind in ("hang", "manager", "exit")] == [
        1.0,
        1.0,
        0.0,
    ]
    assert scrape("leto_fatal_failures_total") == 1.0
    for source, total in (("in-place", 0.23), ("checkpoint", 1.54)):
        assert scrape("leto_recoveries_total", source=source) == 1.0
        assert scrape("leto_recovery_seconds_sum", source=source) == pytest.approx(total)
    assert scrape("leto_recovery_phase_seconds_sum", source="in-place", phase="attach") == pytest.approx(0.2)
    assert scrape("leto_recovery_phase_seconds_count", source="checkpoint", phase="managers") == 1.0
    assert scrape("leto_recovery_phase_seconds_count", source="in-place", phase="total") is None
    assert scrape("leto_recovery_seconds_bucket", source="in-place", le="0.25") == 1.0
    assert scrape("leto_recovery_seconds_bucket", source="in-place", le="0.1") == 0.0
    assert scrape("leto_detection_seconds_sum", kind="hang") == 3.0
    assert scrape("leto_resume_seconds_count", part="attach") == 1.0
    assert scrape("leto_resume_seconds_count", part="pages_reconstructed") is None, "pages are no seconds"
    assert scrape("leto_lost_pages_total") == 6.0
    assert scrape("leto_iterations_lost_total") == 4.0
    assert scrape("leto_shadow_failures_total", collateral="yes") == 1.0
    assert scrape("leto_takeovers_refused_total") == 2.0


def test_what_scripts_report(served: tuple[JobMetrics, MetricsServer]) -> None:
    job, server = served
    job.observe(event("metrics", rank=1, iteration=5, generation=0, loss=1.5, seconds=0.4, update_s=0.1))
    job.observe(event("metrics", rank=1, iteration=6, generation=0, loss=None, seconds=0.6, update_s=0.1))
    for number in range(2 * REPORTED_NAMES_MAX):
        job.observe(event("metrics", rank=1, iteration=7, generation=0, **{f"x{number}": 1.0}))
    scrape = Scraped(server.url)
    assert scrape("leto_reported", rank="1", name="loss") == 1.5
    assert scrape("leto_iteration_seconds_sum", rank="1") == pytest.approx(1.0)
    assert scrape("leto_update_seconds_count", rank="1") == 2.0
    names = {sample.labels["name"] for sample in scrape.samples if sample.name == "leto_reported"}
    assert len(names) == REPORTED_NAMES_MAX


def test_reclaimed_bytes(served: tuple[JobMetrics, MetricsServer]) -> None:
    job, server = served
    job.watch(range(2))
    job.observe(event("reclaimed", rank=1, level=3, bytes=1 << 29))
    job.observe(event("out_of_memory", rank=0, request_bytes=1))
    scrape = Scraped(server.url)
    assert scrape("leto_reclaimed_bytes_total", rank="1") == float(1 << 29)
    assert scrape("leto_reclaimed_bytes_total", rank="0") == 0.0
    assert scrape("leto_reclaims_total", rank="1") == 1.0
    assert scrape("leto_out_of_memory_total", rank="0") == 1.0


def test_what_the_agent_is(served: tuple[JobMetrics, MetricsServer]) -> None:
    job, server = served
    agent = AgentCore(0, 2, "host", Deadlines(), (), 0.0)
    agent.receive(m.Welcome(0, 2), 0.0)
    agent.receive(m.StartManagers(1), 0.0)
    agent.manager_up(0, 1, "socket", 0.0)
    agent.receive(m.SpawnShadow(1, 7, 1), 0.0)
    agent.trainers[7].level = 2
    agent.receive(m.Fence(3), 0.0)
    agent.receive(m.Repair(2, 1), 0.0)
    for _ in range(2):  # looking twice counts nothing twice
        job.look(agent)
    scrape = Scraped(server.url)
    assert scrape("leto_generation") == 3.0
    assert scrape("leto_epoch") == 1.0
    assert scrape("leto_managers_alive") == 1.0
    assert [scrape("leto_shadow_level", rank=rank) for rank in ("0", "1")] == [0.0, 2.0]
    assert [scrape("leto_trainers", role=role) for role in ("active", "shadow")] == [0.0, 1.0]
    assert scrape("leto_stale_messages_total", kind="Repair") == 1.0


def test_a_mistake_costs_a_number_and_not_the_job(
    served: tuple[JobMetrics, MetricsServer], caplog: pytest.LogCaptureFixture
) -> None:
    job, _ = served
    job.observe(event("recovered"))
    job.observe(event("weather"))
    assert caplog.messages == ["event 'recovered' is not in the metrics: KeyError: 'source'"]


# --- the port -------------------------------------------------------------------------------------------


def test_silent_clients_do_not_hold_it_up_and_it_ends(served: tuple[JobMetrics, MetricsServer]) -> None:
    _, server = served
    with contextlib.ExitStack() as clients:
        for _ in range(4):
            clients.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
        assert Scraped(server.url)("leto_training") == 0.0
        for _ in range(16):  # too many: refused, not queued
            with contextlib.suppress(OSError):
                clients.enter_context(socket.create_connection(("127.0.0.1", server.port), timeout=60))
        server.close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", server.port), timeout=60)


def test_the_port_is_free_again_after_too_many(served: tuple[JobMetrics, MetricsServer]) -> None:
    _, server = served
    clients = [socket.create_connection(("127.0.0.1", server.port), timeout=60) for _ in range(12)]
    for client in clients:
        client.close()
    deadline = time.monotonic() + 100
    while True:
        with contextlib.suppress(OSError, http.client.HTTPException):
            assert Scraped(server.url)("leto_training") == 0.0
            return
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_it_listens_on_this_host_alone_and_may_use_ipv6() -> None:
    server = MetricsServer(JobMetrics("j", 1).registry)
    assert server.address == "127.0.0.1"
    assert server.url == f"http://127.0.0.1:{server.port}/metrics"
    server.close()
    with contextlib.suppress(OSError):  # a host without IPv6
        server = MetricsServer(JobMetrics("j", 1).registry, "::1")
        assert Scraped(server.url)("leto_generation") == 0.0
        server.close()


def test_a_port_that_is_taken_ends_the_start_with_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        command = [sys.executable, "-m", "leto_shadow.agent_main", "--local-ranks", "1", "--job-id", "taken"]
        command += ["--run-dir", str(tmp_path / "run"), "--metrics-port", str(port), "script.py"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 2
    assert done.stderr == (
        f"leto: cannot start: --metrics-address 127.0.0.1 --metrics-port {port}: Address already in use\n"
    )
    assert not list((tmp_path / "run").glob("*.sock"))


def test_without_the_library_it_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script = tmp_path / "script.py"
    script.touch()
    monkeypatch.setattr(metrics, "available", lambda: False)
    assert cli.main(["run", "--dry-run", "--metrics-port", "0", str(script)]) == 2
    assert "pip install 'leto-shadow[metrics]'" in capsys.readouterr().err
    assert cli.main(["run", "--dry-run", str(script)]) == 0, "nobody asked for metrics"


def test_every_metric_is_documented() -> None:
    families = {family.name for family in JobMetrics("j", 0).registry.collect()}
    text = PAGE.read_text(encoding="utf-8")
    missing = sorted(name for name in families if f"`{name}" not in text)
    assert not missing, f"{PAGE.name} lacks {missing}"
