"""A takeover whose parked memory is refused: the job goes on in place without it, and says why (case 4)."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from jobs import hold_against_reference, settings
from rich.console import Console
from worker_parked import FIRST, PARKED_BYTES, SECOND

from leto_shadow.drills import Drill
from leto_shadow.status import JobView, render

pytestmark = [pytest.mark.job, pytest.mark.slow, pytest.mark.timeout(1200)]

SCRIPT = [str(Path(__file__).with_name("worker_parked.py"))]
PATIENT = ["--hang-min-s=300", "--hang-initial-s=400", "--hang-max-s=600"]


def test_a_takeover_that_is_refused_its_parked_memory(tmp_path: Path) -> None:
    """Rank 1 is killed twice, and rank 0's shadow does not get back what it gave back while it waited.

    What goes on instead has parked nothing, so it is not refused; and the shadows that follow wait lower, so
    that the second failure meets none that is.
    """
    config = settings(iterations=12)
    drills = [
        Drill("first", "kill", 1, FIRST, "forward"),
        Drill("second", "kill", 1, SECOND, "forward"),
    ]
    timeline = hold_against_reference(config, 2, drills, tmp_path, PATIENT, SCRIPT, timeout_s=800.0)
    assert [(row.rank, row.drill) for row in timeline.failures] == [(1, "first"), (0, None), (1, "second")]
    assert [row.source for row in timeline.failures] == ["in-place"] * 3
    assert [row.iterations_lost for row in timeline.failures] == [0] * 3
    assert "LETO_PARK_STACK=0" in timeline.failures[1].detail

    out = tmp_path / "leto"
    events = json.loads((out / "events.json").read_text())
    (refused,) = [event for event in events if event["event"] == "takeover_refused"]
    assert (refused["rank"], refused["parked_bytes"]) == (0, PARKED_BYTES)
    assert [(out / f"parks-rank{rank}").read_text() for rank in (0, 1)] == ["parked\n"] * 2, "once each"
    allowed = [event for event in events if event["event"] == "shadow_allowed"]
    assert [(event["rank"], event["level"]) for event in allowed] == [(0, 2)]
    assert "a takeover was refused" in allowed[0]["reason"]

    view = JobView("job")
    for event in events:
        view.apply(event)
    console = Console(record=True, width=400)
    console.print(render(view, 0.0))
    assert "did not get back the 446 MiB that it had parked" in console.export_text()
