"""The timeline says what the event log says: failures, times, iterations lost."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from stories import KINDS, Story, four_failures

from leto_megatron.plan import TITLES
from leto_shadow.timeline import RepairRow, Timeline


def test_four_failures() -> None:
    timeline, events = Timeline(KINDS, TITLES), four_failures()
    for event in events:
        timeline.feed(event)
    rows = timeline.failures
    assert [row.kind for row in rows] == list(KINDS)
    assert [(row.rank, row.iteration) for row in rows] == [(1, 10), (0, 20), (1, 30), (0, 37)]
    assert [row.source for row in rows] == ["in-place"] * 3 + ["checkpoint"]
    assert [row.iterations_lost for row in rows] == [0, 0, 0, 12]
    assert [row.detected_s for row in rows] == pytest.approx([0.125, 0.125, 3.0, 0.0])
    assert [row.recovered_s for row in rows] == pytest.approx([0.625, 0.625, 4.0, 2.0])
    assert rows[1].lost == "lost 6 pages, poisoned 1 parity pages"
    assert [row.lost_pages for row in rows] == [0, 7, 0, 0]
    assert [[asdict(r) for r in row.repairs] for row in rows] == [
        [],
        [{"rank": 0, "pages_reconstructed": 6, "verified": False}],
        [],
        [],
    ]
    assert rows[1].repairs[0].text == "rank 0: 6 pages reconstructed, no spare parity was left to verify with"
    assert RepairRow(1, 2, True).text == "rank 1: 2 pages reconstructed, verified"
    first, last = (next(e for e in order if e["event"] == "metrics") for order in (events, events[::-1]))
    assert timeline.training_s == pytest.approx(last["mono"] - (first["mono"] - 0.125))
    assert timeline.finished
    assert timeline.generation == 4
    assert timeline.iteration == 39
    assert timeline.tokens_per_s == pytest.approx(4096.0)
    assert len(timeline.samples) == 10 + 10 + 9 + 7 + 15, "an iteration was counted once for each rank"


def test_an_unplanned_failure_and_one_during_its_recovery() -> None:
    story = Story()
    story.add("job_started")
    story.train(0, 5)
    story.fail(None, "exit", 1, 5, 0.25)
    story.fail(None, "recovery", 0, 5, 0.0)
    timeline = Timeline()
    for event in story.events:
        timeline.feed(event)
    assert timeline.state == "recovering"
    assert timeline.open_failure is timeline.failures[1]
    story.recover(5, "in-place", 1.0)
    for event in story.events[-2:]:
        timeline.feed(event)
    assert timeline.open_failure is None
    assert [row.recovered_s for row in timeline.failures] == pytest.approx([1.25, 1.0])
    assert timeline.failures[0].title == "trainer died"


def test_what_a_first_attempt_reconstructed_counts() -> None:
    """A recovery that is interrupted after the repair leaves nothing to reconstruct for the next one."""
    story = Story()
    story.add("started", iteration=0)
    story.fail("kill-update", "exit", 0, 5, 0.25)
    for pages, verified in ((4.0, 0.0), (3.0, 1.0), (0.0, 1.0)):
        story.add("resumed", rank=0, breakdown={"pages_reconstructed": pages, "verified": verified})
    story.recover(5, "in-place", 1.0, lost_pages=7)
    timeline = Timeline(KINDS, TITLES)
    for event in story.events:
        timeline.feed(event)
    (row,) = timeline.failures
    assert [asdict(r) for r in row.repairs] == [{"rank": 0, "pages_reconstructed": 7, "verified": False}]


def test_a_failed_job_says_why() -> None:
    timeline = Timeline()
    lines = timeline.feed({"event": "job_failed", "mono": 1.0, "reason": "no more\ndetails"})
    assert timeline.failed == "no more\ndetails"
    assert lines[0].endswith("no more")


def test_unknown_events_are_nothing() -> None:
    assert Timeline().feed({"event": "weather", "mono": 1.0}) == []
