"""Schedules of failures: drawn from a seed, carried out at their times, once, by the agents."""

from __future__ import annotations

import json
import math
import stat
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leto_shadow import cli
from leto_shadow.control import Inject, Reply
from leto_shadow.exit_codes import ExitCode
from leto_shadow.fired import fired_before, of_drill, of_injection
from leto_shadow.injector import Injector, begun_before
from leto_shadow.schedule import (
    CLASSES,
    Injection,
    Schedule,
    ScheduleError,
    dump_schedule,
    load_schedule,
    make_schedule,
    parse_schedule,
)

weights = st.dictionaries(st.sampled_from(CLASSES), st.integers(0, 5), min_size=1).filter(
    lambda found: sum(found.values()) > 0
)

# --- drawn from a seed ------------------------------------------------------------------------------


@given(st.integers(0, 2**40), st.floats(1.0, 1e4), st.integers(1, 64), weights, st.integers(0, 30))
def test_a_seed_gives_one_schedule(
    seed: int, mttf_s: float, ranks: int, classes: dict[str, int], count: int
) -> None:
    first = make_schedule(seed, mttf_s, ranks, classes, count=count)
    assert first == make_schedule(seed, mttf_s, ranks, classes, count=count)
    assert parse_schedule(dump_schedule(first), world_size=ranks) == first
    assert len(first.injections) == count
    assert all(classes.get(one.kind) for one in first.injections), "a class without weight never comes"
    longer = make_schedule(seed, mttf_s, ranks, classes, count=count + 5)
    assert longer.injections[:count] == first.injections
    if count:
        end_s = first.injections[-1].at_s
        until = make_schedule(seed, mttf_s, ranks, classes, duration_s=end_s)
        assert until.injections == tuple(one for one in first.injections if one.at_s < end_s)


def test_gaps_ranks_and_classes_are_as_asked_for() -> None:
    found = make_schedule(5, 10.0, 4, {"kill": 3, "ff": 1}, count=4000, gap_s=4.0).injections
    gaps = [after.at_s - one.at_s for one, after in pairwise(found)]
    assert min(gaps) >= 4.0 - 1e-6
    assert sum(gaps) / len(gaps) == pytest.approx(10.0, rel=0.05)
    assert sum(one.kind == "ff" for one in found) / len(found) == pytest.approx(0.25, abs=0.03)
    for rank in range(4):
        assert sum(one.rank == rank for one in found) / len(found) == pytest.approx(0.25, abs=0.03)


@pytest.mark.parametrize(
    "asked",
    [
        {"classes": {}},
        {"classes": {"kill": 0}},
        {"classes": {"earthquake": 1}},
        {"mttf_s": 0.0},
        {"ranks": 0},
        {"count": None},
        {"duration_s": 5.0},
        {"gap_s": 10.0},
    ],
)
def test_what_cannot_be_drawn_is_refused(asked: dict[str, Any]) -> None:
    given = {"seed": 1, "mttf_s": 10.0, "ranks": 2, "classes": {"kill": 1}, "count": 3, **asked}
    with pytest.raises(ScheduleError):
        make_schedule(**given)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[]", "Expected `object`"),
        ('{"injections": [{"at_s": 1, "rank": 2, "kind": "kill"}]}', "injection 0: there is no rank 2"),
        ('{"injections": [{"at_s": -1, "rank": 0, "kind": "kill"}]}', "at_s must be"),
        ('{"injections": [{"at_s": 1, "rank": 0, "kind": "flood"}]}', "Invalid enum value"),
        ('{"injections": [{"at_s": 1, "rank": 0, "kind": "lose", "pages": 0}]}', "pages must be"),
        (
            '{"injections": [{"at_s": 2, "rank": 0, "kind": "hang"},{"at_s": 1, "rank": 0, "kind": "kill"}]}',
            "in order of time",
        ),
        ('{"injections": [], "version": 2}', "version 2, expected 1"),
    ],
)
def test_a_schedule_that_makes_no_sense_is_refused(text: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        parse_schedule(text, world_size=2)


def test_the_command_line_prints_a_schedule(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    plan = ["inject", "plan", "--seed", "3", "--mttf", "60", "--ranks", "2"]
    assert cli.main([*plan, "--duration", "3600", "--classes", "kill=3,ff"]) == 0
    path = tmp_path / "plan.json"
    path.write_text(capsys.readouterr().out)
    expected = make_schedule(3, 60.0, 2, {"kill": 3.0, "ff": 1.0}, duration_s=3600.0)
    assert load_schedule(path, world_size=2) == expected
    assert cli.main([*plan, "--count", "2", "--clock", "ready"]) == 0
    assert parse_schedule(capsys.readouterr().out).clock == "ready"
    for wrong in ([], ["--duration", "9", "--count", "3"], ["--count", "3", "--classes", "rain=1"]):
        try:
            status = cli.main([*plan, *wrong])
        except SystemExit as error:
            status = int(error.code or 0)
        assert status == 2
    assert cli.main(["inject", "kill"]) == 2
    assert cli.main(["inject", "fatal", "--rank", "0", "--xid", "13"]) == 2
    assert "does not make a device inoperable" in capsys.readouterr().err
    script = tmp_path / "train.py"
    script.write_text("")
    run = ["run", "--dry-run", "--decide", "json:dumps", "--injections", str(path)]
    assert cli.main([*run, "--nproc-per-node", "2", str(script)]) == 0
    assert cli.main([*run, "--nproc-per-node", "1", str(script)]) == 2
    assert "there is no rank 1" in capsys.readouterr().err


# --- carried out ------------------------------------------------------------------------------------


class Node:
    """A clock, ranks that train or do not, and a record of what was done."""

    def __init__(
        self,
        *injections: Injection,
        ranks: range = range(2),
        ready: bool = False,
        fired: set[str] | None = None,
        trained_s: float | None = None,
    ) -> None:
        self.now = 100.0
        self.ranks = ranks
        self.training: set[int] = set()
        self.standing: set[int] = set()
        self.asked: list[Inject] = []
        self.events: list[dict[str, Any]] = []
        self.told: list[tuple[str, int]] = []
        self.injector = Injector(
            Schedule(injections, clock="ready" if ready else "wall"),
            self.inject,
            lambda: self.ranks,
            lambda rank: rank in self.training,
            lambda event, **fields: self.events.append({"event": event, **fields}),
            lambda rank: rank in self.standing,
            set() if fired is None else fired,
            lambda what: self.told.append((what, len(self.asked))),
            lambda: trained_s,
            lambda: self.now,
        )

    def inject(self, request: Inject) -> Reply:
        self.asked.append(request)
        self.training.clear()  # all recover
        self.standing.clear()
        return Reply(True, "done")

    def at(self, now: float) -> int:
        self.now = now
        self.injector.tick()
        return len(self.asked)


def test_each_comes_at_its_time_after_training_began() -> None:
    node = Node(Injection(1.0, 1, "kill"), Injection(3.0, 0, "lose", seed=9), Injection(5.0, 0, "ff"))
    assert node.at(200.0) == 0, "nobody trains"
    node.training = {0}
    assert node.at(201.0) == 0, "one of them does not"
    node.training = {0, 1}
    assert node.at(202.0) == 0
    assert node.at(202.9) == 0
    assert node.at(203.0) == 1
    node.training = {0, 1}
    assert node.at(205.5) == 2
    node.training = {0, 1}
    assert node.at(250.0) == 3
    assert node.asked == [
        Inject("kill", 1),
        Inject("lose", 0, seed=9),
        Inject("fatal", 0, xid=79),
    ]
    assert [event["event"] for event in node.events] == ["injections_begun", *["injected"] * 3]
    assert [(one["planned_s"], one["actual_s"]) for one in node.events[1:]] == [(1, 1), (3, 3.5), (5, 48)]
    assert node.injector.left == 0


def test_what_is_due_in_a_recovery_waits_for_its_end_and_keeps_its_order() -> None:
    node = Node(*(Injection(float(n), n % 2, "kill") for n in range(1, 5)))
    node.training = {0, 1}
    node.at(0.0)
    assert node.at(10.0) == 1
    assert node.at(11.0) == 1
    for count in (2, 3, 4):
        node.training = {0, 1}
        assert node.at(11.0 + count) == count
    assert [event["number"] for event in node.events[1:]] == [0, 1, 2, 3]


def test_a_clock_of_ready_shadows_counts_only_while_all_of_them_stand() -> None:
    node = Node(Injection(1.0, 1, "kill"), Injection(3.0, 0, "kill"), ready=True)
    node.training = {0, 1}
    node.at(200.0)
    node.standing = {0}
    node.at(210.0)
    assert node.injector.due_s == math.inf, "one shadow is still on its way"
    node.standing = {0, 1}
    assert node.at(220.0) == 0, "up to here they were not seen to stand"
    assert node.injector.due_s == pytest.approx(1.0)
    assert node.at(220.75) == 0
    node.now = 220.9
    assert node.injector.due_s == pytest.approx(0.1)
    node.standing = {0}
    assert node.at(220.9) == 0, "a shadow has gone down again: 0.75 s are counted"
    node.standing = {0, 1}
    node.at(300.0)
    assert node.at(300.125) == 0
    assert node.at(300.25) == 1
    node.at(310.0)
    assert node.injector.due_s == math.inf
    node.training = {0, 1}
    node.at(320.0)
    node.standing = {0, 1}
    node.at(330.0)
    assert node.injector.due_s == 2.0
    assert node.at(331.75) == 1
    assert node.at(332.0) == 2
    assert [one["actual_s"] for one in node.events[1:]] == [1.0, 3.0]


def test_shadows_that_never_come_are_not_waited_for_without_end() -> None:
    node = Node(Injection(1.0, 0, "kill"), ready=True)
    node.training = {0, 1}
    node.at(200.0)
    assert node.at(260.0) == 0
    node.at(260.5)
    assert node.at(261.0) == 0
    assert node.at(261.5) == 1


def test_when_the_next_one_is_due() -> None:
    """The agent's loop wakes up for it, and does not spin while it cannot come."""
    node = Node(Injection(1.0, 0, "kill"), Injection(1.5, 0, "kill"))
    assert node.injector.due_s == math.inf
    node.training = {0, 1}
    node.at(200.0)
    node.now = 200.75
    assert node.injector.due_s == 0.25
    assert node.at(202.0) == 1
    node.at(203.0)
    assert node.injector.due_s == math.inf, "due, but all recover"
    node.training = {0, 1}
    assert node.at(204.0) == 2
    assert node.injector.due_s == math.inf


def test_an_agent_that_takes_over_goes_on_with_a_clock_of_ready_shadows() -> None:
    injections = tuple(Injection(float(n), 0, "kill") for n in (1, 2, 4))
    fired = {of_injection(Schedule(injections).key, number) for number in (0, 1)}
    node = Node(*injections, ready=True, fired=fired)
    node.injector.resume(7.0)
    node.training = node.standing = {0, 1}
    node.at(500.0)
    assert node.injector.due_s == 2.0
    assert node.at(501.5) == 0
    assert node.at(502.0) == 1


def test_each_node_does_what_its_ranks_are_due() -> None:
    injections = [Injection(float(n), n % 4, "kill") for n in range(8)]
    done = []
    for ranks in (range(2), range(2, 4)):
        node = Node(*injections, ranks=ranks)
        for now in range(20):
            node.training = set(ranks)
            node.at(float(now))
        done += [request.rank for request in node.asked]
        assert node.injector.left == 0
    assert sorted(done) == sorted(one.rank for one in injections)


def test_an_agent_that_takes_over_goes_on_with_the_clock_and_repeats_nothing() -> None:
    injections = (Injection(1.0, 0, "kill"), Injection(2.0, 0, "kill"), Injection(9.0, 0, "kill"))
    key = Schedule(injections).key
    events: list[dict[str, Any]] = [
        {"event": "injections_begun", "node": 0, "t": 50.0, "mono": 3.0, "schedule": key},
        {"event": "injections_begun", "node": 0, "t": 98.0, "mono": 5.0, "schedule": "another one"},
        {"event": "injections_begun", "node": 0, "t": 99.0, "mono": 7.0, "schedule": key},
        {"event": "injections_begun", "node": 3, "t": 99.0, "mono": 7.0, "schedule": key, "elapsed_s": 4.0},
        {"event": "injected", "node": 1, "t": 50.5, "number": 2, "schedule": key},
        {"event": "injected", "node": 1, "t": 99.5, "number": 2, "schedule": "another one"},
        {"event": "injected", "node": 0, "t": 99.6, "number": 0, "schedule": key},
        {"event": "drill_fired", "node": 0, "t": 50.7, "id": "before"},
        {"event": "drill_fired", "node": 1, "t": 99.7, "id": "b"},
    ]
    assert begun_before(events, 0, key, since=60.0) == 7.0
    assert begun_before(events, 2, key, since=60.0) is None
    assert begun_before(events, 3, key, since=60.0) == 3.0
    fired = fired_before(events, since=60.0)
    assert fired == {of_injection(key, 0), of_injection("another one", 2), of_drill("b")}
    node = Node(*injections, fired=fired)
    node.injector.resume(7.0)
    node.training = {0, 1}
    assert node.at(8.9) == 0
    assert node.at(9.1) == 1
    assert node.events[0]["number"] == 1


def test_a_schedule_is_known_by_its_injections() -> None:
    one, other = Injection(1.0, 0, "kill"), Injection(1.0, 1, "kill")
    text = dump_schedule(Schedule((one,), seed=4, mttf_s=7.0))
    assert Schedule((one,)).key == parse_schedule(text).key != Schedule((other,)).key


@pytest.mark.parametrize("ready", [False, True])
def test_a_node_that_gets_ranks_goes_on_where_the_other_one_was(ready: bool) -> None:
    """A spare: it has read the same schedule, and seen nothing of it."""
    injections = tuple(Injection(float(n), n % 2, "kill") for n in range(1, 7))
    fired: set[str] = set()
    node = Node(*injections, ranks=range(0), ready=ready, fired=fired, trained_s=4.5)
    assert node.at(200.0) == 0
    fired |= {of_injection(node.injector.key, number) for number in range(4)}
    node.ranks = range(1, 2)
    assert node.at(201.0) == 0, "it does not train yet"
    node.training = node.standing = {1}
    assert node.at(202.0) == 0
    (begun,) = node.events
    assert (begun["count"], begun["elapsed_s"]) == (2, 4.5)
    # A clock of ready shadows goes on from the last of its ranks that struck, at 3 s; the other from 4.5 s.
    wait_s = 2.0 if ready else 0.5
    assert node.injector.due_s == wait_s
    node.at(202.0 + wait_s / 2)
    assert node.at(202.0 + wait_s) == 1
    assert node.told == [(of_injection(node.injector.key, 4), 0)], "others are told before it is done"
    assert [event["number"] for event in node.events[1:]] == [4]


def test_what_strikes_elsewhere_after_a_node_began_is_not_repeated_there() -> None:
    """It had the ranks first, lost them, and has them again."""
    fired: set[str] = set()
    node = Node(Injection(1.0, 0, "kill"), Injection(2.0, 0, "kill"), fired=fired)
    node.training = {0, 1}
    node.at(200.0)
    node.training, node.ranks = set(), range(0)
    node.at(201.5)
    fired.add(of_injection(node.injector.key, 0))
    node.ranks, node.training = range(2), {0, 1}
    assert node.at(210.0) == 1
    assert [event["number"] for event in node.events[1:]] == [1]


@pytest.mark.slow
def test_a_job_under_a_schedule_and_a_hook(
    start_job: Callable[..., Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A kill, which the hook leaves to Leto; a fatal Xid, as well; one that it overrules; a hang."""
    schedule = tmp_path / "schedule.json"
    injections = (
        Injection(0.3, 1, "kill"),
        Injection(0.6, 0, "ff", xid=95),
        Injection(0.9, 1, "ff", xid=109),
        Injection(1.2, 0, "hang"),
    )
    schedule.write_bytes(dump_schedule(Schedule(injections)))
    hook, stop, kept = tmp_path / "hook.sh", tmp_path / "stop", tmp_path / "kept"
    hook.write_text('#!/bin/sh\nif grep -q "\\[109\\]"; then echo hof; else echo default; fi\n')
    hook.chmod(hook.stat().st_mode | stat.S_IXUSR)
    options = ["--injections", str(schedule), "--classify-hook", str(hook), "--keep", str(kept)]
    options += ["--hang-initial-s", "15", "--hang-min-s", "15"]  # no false alarm on a busy machine
    job = start_job("scheduled", *options, "--", "100000", "--until", str(stop))
    job.until(lambda: len(job.events("recovered")) == 4)
    stop.touch()
    assert job.wait() == ExitCode.FINISHED, job.text()
    job.assert_nothing_left()
    injected = job.events("injected")
    assert [(one["kind"], one["rank"], one["done"]) for one in injected] == [
        ("kill", 1, True),
        ("ff", 0, True),
        ("ff", 1, True),
        ("hang", 0, True),
    ]
    assert [one["kind"] for one in job.events("failure")] == ["exit", "exit", "exit", "hang"]
    assert all(one["actual_s"] >= one["planned_s"] for one in injected)
    verdicts = job.events("verdict")
    found = [(one["rank"], one["verdict"], one["by"], one["built_in"]) for one in verdicts]
    assert found == [
        (1, "hof", "leto", "hof"),
        (0, "ff", "leto", "ff"),
        (1, "hof", "hook", "ff"),
        (0, "hof", "leto", "hof"),
    ]
    assert "uncontained memory error" in verdicts[1]["reasons"][0]
    assert [one["fatal"] for one in job.events("recovered")] == [False, True, False, False]
    assert cli.main(["report", str(kept / job.job_id), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["failures"]
    assert [(row["verdict"], row["verdict_by"]) for row in rows] == [
        ("hof", "leto"),
        ("ff", "leto"),
        ("hof", "hook"),
        ("hof", "leto"),
    ]
    assert msgspec.convert(rows[1]["reasons"], list[str])
