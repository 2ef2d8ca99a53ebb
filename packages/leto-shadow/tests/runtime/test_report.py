"""`leto report`: measures, trace and page from made-up logs, where every number is known in advance.

A report of real jobs is in `tests/runtime/test_plain_pytorch.py`.
"""

from __future__ import annotations

import contextlib
import html.parser
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leto_shadow import cli
from leto_shadow.archive import keep, read_job
from leto_shadow.jobs import CommandError
from leto_shadow.report import make_report
from leto_shadow.timeline import NOT_SECONDS
from leto_shadow.trace import NEAR_S, chrome_trace

PACE_S = 0.25


class Log:
    """A job of two ranks on one node, or on two."""

    def __init__(self, nodes: int = 1, began: float = 100.0) -> None:
        self.now = began
        self.nodes = nodes
        self.generation = 0
        self.events: list[dict[str, Any]] = []

    def add(self, event: str, after_s: float = 0.0, *, node: int = 0, **fields: Any) -> None:
        self.now += after_s
        mono = self.now + 1000.0 * node  # hosts have monotonic clocks of their own
        self.events.append({"t": 1e9 + self.now, "mono": mono, "event": event, "node": node, **fields})

    def begin(self) -> Log:
        self.add("job_started", world_size=2, nodes=self.nodes)
        for level in (1, 2, 3):
            for rank in (0, 1):
                self.add("shadow_level", 0.5, rank=rank, level=level, world=1)
        self.add("promoted", generation=0, world=1)
        for rank in (0, 1):
            fields = {"iteration": 0, "source": "fresh", "generation": 0, "breakdown": {"attach": 0.5}}
            self.add("resumed", 0.5, node=rank % self.nodes, rank=rank, **fields)
        self.add("started", generation=0, iteration=0, source="fresh", breakdown={"total": 4.0})
        return self

    def train(self, first: int, last: int) -> Log:
        for iteration in range(first, last):
            for rank, share in ((0, 0.75), (1, 0.25)):
                self.add(
                    "metrics",
                    PACE_S * share,
                    node=rank % self.nodes,
                    rank=rank,
                    iteration=iteration,
                    generation=self.generation,
                    loss=1.0,
                )
        return self

    def fail(self, iteration: int, at_s: float, detected_s: float = 0.0625, kind: str = "exit") -> Log:
        """Rank 1 dies `at_s` into the iteration."""
        self.generation += 1
        self.add(
            "failure",
            at_s + detected_s,
            kind=kind,
            rank=1,
            generation=self.generation - 1,
            iteration=iteration,
            detected_s=detected_s,
            detail="killed by SIGKILL",
        )
        self.add("recovery_begun", generation=self.generation, iteration=iteration, rank=1, fatal=False)
        return self

    def recover(self, iteration: int, source: str = "in-place") -> Log:
        """Half a second in three phases."""
        # Ranks are repaired side by side; that rank 0 has been is noted only when rank 1 has been, too.
        where = {"generation": self.generation}
        self.add("memory_free", 0.125, rank=0, waited_s=0.0, **where)
        self.add("memory_free", 0.0625, rank=1, waited_s=0.25, **where)
        self.add("localized", 0.03125, rank=1, seconds=0.03125, lost_pages=0, **where)
        self.add("localized", rank=0, seconds=0.03125, lost_pages=3, **where)
        self.add("pages_lost", rank=0, seconds=0.015625, detail="drill: 3 pages", **where)
        self.add("promoted", 0.03125, generation=self.generation, world=self.generation + 1)
        parts = {"attach": 0.0625, "reconstruct": 0.125, "pages_reconstructed": 3.0, "verified": 1.0}
        for rank in (0, 1):
            node = rank % self.nodes
            fields = {"iteration": iteration, "source": source, "generation": self.generation}
            self.add("resumed", 0.125, node=node, rank=rank, breakdown=parts, **fields)
        breakdown = {"fence": 0.125, "prepare": 0.125, "resume": 0.25, "total": 0.5}
        fields = {"iteration": iteration, "source": source, "generation": self.generation}
        self.add("recovered", iterations_lost=0, lost_pages=3, breakdown=breakdown, **fields)
        return self

    def end(self, iteration: int) -> list[dict[str, Any]]:
        self.add("finished", 0.5, exit_code=0, reason="done", iteration=iteration, generation=self.generation)
        return self.events


def one_failure(nodes: int = 1) -> list[dict[str, Any]]:
    """Killed 0.125 s into iteration 10, which takes 0.25 s; it is done as late after the recovery."""
    return Log(nodes).begin().train(0, 10).fail(10, 0.125).recover(10).train(10, 20).end(20)


@pytest.mark.parametrize("nodes", [1, 2])
def test_i_and_r_and_ettr_of_one_failure(nodes: int) -> None:
    report = make_report("j", one_failure(nodes))
    found = report.measures
    assert found.iterations == 20
    assert found.iteration_s == pytest.approx(PACE_S)
    assert found.elapsed_s == pytest.approx(20 * PACE_S + 0.125 + 0.0625 + 0.5)
    (one,) = found.recoveries
    assert one.interruption_s == pytest.approx(0.0625 + 0.5)
    assert one.recompute_s == pytest.approx(0.125), "the half that was done is done again"
    assert found.ettr == pytest.approx(5.0 / found.elapsed_s)
    assert one.done_s == pytest.approx(0.125)
    assert one.first_extra_s == pytest.approx(0.0)
    assert one.resumed_s == pytest.approx(4.0 + 10 * PACE_S + 0.125 + 0.0625 + 0.5)
    data = report.data()
    assert data["failures"][0]["breakdown"]["prepare"] == 0.125
    assert data["failures"][0]["rank_parts"] == {
        "memory_free": 0.25,
        "localize": 0.03125,
        "lose": 0.015625,
        "attach": 0.0625,
        "reconstruct": 0.125,
    }
    assert data["phases"]["detect"] == {"median_s": pytest.approx(0.0625), "worst_s": pytest.approx(0.0625)}


def test_an_iteration_that_the_recovery_finished_costs_nothing_again() -> None:
    log = Log().begin().train(0, 10).fail(10, 0.125).recover(11).train(11, 20)
    (one,) = make_report("j", log.end(20)).measures.recoveries
    assert one.recompute_s == pytest.approx(-0.125), "less than nothing: the rest of it was saved"


def test_iterations_of_a_checkpoint_are_computed_again() -> None:
    log = Log().begin().train(0, 10).fail(10, 0.0, kind="manager").recover(5, "checkpoint").train(5, 20)
    report = make_report("j", log.end(20))
    (one,) = report.measures.recoveries
    assert one.recompute_s == pytest.approx(5 * PACE_S)
    assert report.measures.iterations == 20
    assert report.timeline.failures[0].iterations_lost == 5


def test_a_reference_run_gives_the_pace() -> None:
    reference = Log(began=7.0).begin().train(0, 40).end(40)
    for event in reference:
        event["mono"] *= 0.5  # twice as fast
    found = make_report("j", one_failure(), reference=reference).measures
    assert found.reference_iteration_s == pytest.approx(PACE_S / 2)
    assert found.ettr == pytest.approx(20 * PACE_S / 2 / found.elapsed_s)
    assert found.reference_scatter_s == pytest.approx(0.0)


def test_the_scatter_of_iterations() -> None:
    """Of 100 times, five are longer than the 95th: it is what counts, less the median."""
    reference = Log(began=7.0).begin().train(0, 1)
    for iteration in range(1, 101):
        extra_s = {7: 0.5, 50: 0.5, 60: 0.5, 70: 0.5, 90: 0.5, 98: 0.125}.get(iteration, 0.0)
        reference.add("train", extra_s)
        reference.train(iteration, iteration + 1)
    measures = make_report("j", one_failure(), reference=reference.end(101)).measures
    assert measures.reference_scatter_s == pytest.approx(0.125)
    assert measures.iteration_scatter_s == pytest.approx(0.0)
    data = make_report("j", one_failure()).data()
    assert data["reference_scatter_s"] is None
    assert data["iteration_scatter_s"] == pytest.approx(0.0)


def test_what_is_not_known_is_not_made_up() -> None:
    silent = [event for event in one_failure() if event["event"] != "metrics"]
    found = make_report("j", silent).measures
    assert found.ettr is None
    assert found.recoveries[0].recompute_s is None
    assert found.recoveries[0].interruption_s == pytest.approx(0.5625)
    open_end = Log().begin().train(0, 10).fail(10, 0.125).events
    report = make_report("j", open_end)
    assert report.measures.recoveries[0].interruption_s is None
    assert report.data()["state"] == "recovering"


def test_a_job_that_the_launcher_started_again() -> None:
    log = Log().begin().train(0, 10).fail(10, 0.125)
    log.add("job_failed", 1.0, exit_code=72, reason="gone", iteration=10, generation=0)
    log.generation = 0
    log.begin()
    log.events[-1]["iteration"], log.events[-1]["source"] = 5, "checkpoint"
    report = make_report("j", log.train(5, 20).end(20))
    (row,) = report.timeline.failures
    assert row.source == "checkpoint"
    assert row.recovered_s == pytest.approx(0.0625 + 1.0 + 4.0)
    assert report.measures.iterations == 20


def test_an_agent_that_was_started_again_and_took_over_the_memory() -> None:
    """Nobody writes down the death of an agent: it is after the last event."""
    log = Log().begin().train(0, 10)
    log.add("job_started", 2.0, world_size=2, nodes=1)
    log.generation = 1
    log.add("adopted", 0.5, generation=1, epoch=1)
    log.add("recovery_begun", generation=1, iteration=-1, rank=-1, fatal=False)
    events = log.recover(10).train(10, 20).end(20)
    report = make_report("j", events)
    (row,) = report.timeline.failures
    assert (row.kind, row.title, row.iteration, row.source) == ("agent", "agent died", 10, "in-place")
    assert (row.detected_s, row.recovered_s) == (pytest.approx(2.5), pytest.approx(3.0))
    assert report.measures.recoveries[0].recompute_s == pytest.approx(0.0)
    spans = [one for one in chrome_trace(events)["traceEvents"] if one["ph"] == "X"]
    (recovery,) = [one for one in spans if one["name"] == "recovery: in-place"]
    assert recovery["dur"] == 3_000_000


# --- the trace ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("nodes", [1, 2])
def test_spans_of_a_thread_nest_and_phases_add_up(nodes: int) -> None:
    trace = json.loads(json.dumps(chrome_trace(one_failure(nodes))))
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    threads: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for span in spans:
        assert span["ts"] >= 0
        threads[span["pid"], span["tid"]].append((span["ts"], span["ts"] + span["dur"]))
    for found in threads.values():
        for begin, end in found:
            for other_begin, other_end in found:
                apart = end <= other_begin or other_end <= begin
                inside = (begin <= other_begin and other_end <= end) or (
                    other_begin <= begin and end <= other_end
                )
                assert apart or inside
    recovery = next(span for span in spans if span["name"] == "recovery: in-place")
    assert recovery["dur"] == 562_500
    phases = [span for span in spans if span["name"] in ("fence", "prepare", "resume")]
    assert sum(span["dur"] for span in phases) == 500_000
    for rank in (0, 1):
        mine = [span for span in spans if span["pid"] == rank + 1]
        assert [one["dur"] for one in mine if one["name"] == "reconstruct"] == [125_000]
        assert not {span["name"] for span in mine} & NOT_SECONDS
        assert {"L1", "L2", "L3"} <= {span["name"] for span in mine}
        assert sum(span["name"].startswith("iteration") for span in mine) == 20
        by_name = {span["name"]: span for span in mine}
        (outside,) = [span for span in mine if span["name"] == "no trainer"]
        repair, free, localize = (by_name[name] for name in ("repair", "memory free", "localize"))
        assert (free["dur"], localize["dur"]) == ([0, 250_000][rank], 31_250)
        freed_us = free["ts"] + free["dur"]
        assert localize["ts"] == freed_us + [15_625, 0][rank], "what a drill's losses took is not of it"
        for inner, outer in ((free, repair), (localize, repair), (repair, outside)):
            assert outer["ts"] <= inner["ts"]
            assert inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"]
        assert repair["args"] == {"free_bytes": None, "lost_pages": [3, 0][rank]}
    names = {e["args"]["name"] for e in trace["traceEvents"] if e["name"] == "process_name"}
    assert names == {"job", "rank 0", "rank 1"}


def test_the_first_iteration_after_a_recovery_says_what_it_cost_more() -> None:
    log = Log().begin().train(0, 10).fail(10, 0.125).recover(10)
    log.add("train", 0.0625)  # so much later
    events = log.train(10, 20).fail(20, 0.125).recover(20).train(20, 30).end(30)
    report = make_report("j", events)
    found = [one.first_extra_s for one in report.measures.recoveries]
    assert found == [pytest.approx(0.0625), pytest.approx(0.0)]
    spans = chrome_trace(events, recoveries=report.measures.recoveries)["traceEvents"]
    for rank in (0, 1):
        told = {
            span["name"]: span["args"]["first_extra_s"]
            for span in spans
            if span["pid"] == rank + 1 and "first_extra_s" in span["args"]
        }
        assert told == {"iteration 10": found[0], "iteration 20": found[1]}


def test_a_repair_without_a_wait_for_memory_and_one_that_was_begun_anew() -> None:
    """On the host nothing is waited for. A second failure in a recovery has its own repair."""
    log = Log().begin().train(0, 10).fail(10, 0.125)
    log.add("localized", 0.125, rank=1, generation=1, seconds=0.0625, lost_pages=2)
    log.fail(10, 0.0)
    log.add("localized", 0.5, rank=1, generation=2, seconds=9.0, lost_pages=0)
    log.add("localized", rank=0, generation=2, seconds=0.0, lost_pages=0)
    log.add("promoted", 0.125, generation=2, world=3)
    spans = [one for one in chrome_trace(log.events)["traceEvents"] if one["ph"] == "X"]
    mine = [one for one in spans if one["pid"] == 2 and one["name"] == "localize"]
    assert [one["dur"] for one in mine] == [62_500, 62_500 + 125_000 + 62_500 + 500_000], (
        "not before failures"
    )
    repairs = [one for one in spans if one["name"] == "repair" and one["pid"] == 2]
    assert [one["args"]["lost_pages"] for one in repairs] == [2, 0]


def test_a_trace_of_a_long_job_keeps_the_iterations_around_failures() -> None:
    log = Log().begin().train(0, 400).fail(400, 0.1).recover(400).train(400, 800)
    events = log.end(800)
    spans = chrome_trace(events, iterations_max=500)["traceEvents"]
    kept = {int(one["name"].split()[1]) for one in spans if one["name"].startswith("iteration ")}
    near = round(NEAR_S / PACE_S)
    assert {399, 400, 401} <= kept
    assert {400 - near - 3, 400 + near + 3}.isdisjoint(kept)
    assert len(kept) <= 3 * near + 6, "around the start, the failure and the recovery"
    assert [one["name"] for one in spans if one["ph"] == "X"].count("recovery: in-place") == 1


# --- logs, wherever they are ----------------------------------------------------------------------------


def write(path: Path, events: list[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(event) + "\n" for event in events))
    return path


def test_logs_of_several_nodes_become_one(tmp_path: Path) -> None:
    events = one_failure(2)
    for node in (0, 1):
        run_dir = tmp_path / f"run{node}"
        write(run_dir / "events.jsonl", [event for event in events if event["node"] == node])
        (run_dir / "logs").mkdir()
        (run_dir / "logs" / f"rank{node}.log").write_text("words\n")
        keep(run_dir, tmp_path / "kept", "the-job", node)
    kept = tmp_path / "kept" / "the-job"
    assert sorted(str(one.relative_to(kept)) for one in kept.rglob("*") if one.is_file()) == [
        "node0/events.jsonl",
        "node0/logs/rank0.log",
        "node1/events.jsonl",
        "node1/logs/rank1.log",
    ]
    for places in (
        [kept],
        [tmp_path / "run0", tmp_path / "run1"],
        [tmp_path / "run1" / "events.jsonl", kept / "node0"],
    ):
        found, skipped = read_job(places)
        assert skipped == 0
        assert [event["t"] for event in found] == [event["t"] for event in events]
        assert sorted(map(json.dumps, found)) == sorted(map(json.dumps, events))


def test_lines_that_are_no_events_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = write(tmp_path / "events.jsonl", one_failure())
    with path.open("a") as file:
        file.write('{"event": "torn')
    path.write_text('nonsense\n{"event": "no time"}\n' + path.read_text())
    assert cli.main(["report", str(tmp_path)]) == 0
    assert "2 lines of the logs are no events" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda folder: None, "there is no events.jsonl in"),
        (lambda folder: write(folder / "events.jsonl", []), "there are no events in"),
        (
            lambda folder: write(folder / "events.jsonl", [{"t": 1, "mono": 1, "event": "failure"}]),
            "not as this version",
        ),
    ],
)
def test_what_cannot_be_reported_is_said_in_one_line(
    make: Any, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path)
    assert cli.main(["report", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert words in error
    assert error.count("\n") == 1


@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["rank", "iteration", "breakdown", "level", "source"]),
            st.one_of(
                st.none(),
                st.integers(),
                st.text(max_size=3),
                st.dictionaries(st.text(max_size=2), st.integers()),
            ),
        ),
        max_size=4,
    ),
    st.sampled_from(
        ["failure", "metrics", "recovered", "resumed", "shadow_level", "started", "promoted", "weather"]
    ),
)
def test_any_event_is_taken_or_refused(fields: list[dict[str, Any]], name: str) -> None:
    events = [{"t": 1.0 + i, "mono": 1.0 + i, "event": name, **one} for i, one in enumerate(fields)]
    if events:
        with contextlib.suppress(CommandError):
            make_report("j", events)


# --- the command ----------------------------------------------------------------------------------------


class Checker(html.parser.HTMLParser):
    EMPTY = frozenset({"meta", "rect", "line", "circle", "path", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen.append(tag)
        if tag not in self.EMPTY:
            self.open.append(tag)
        assert not {"src", "href"} & {name for name, _ in attrs}, "the page must not need anything else"

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.EMPTY:
            assert self.open.pop() == tag


def test_all_forms_of_a_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    events = one_failure()
    events[-1]["reason"] = "<done>"
    write(tmp_path / "job-1" / "events.jsonl", events)
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    job = str(tmp_path / "job-1")
    assert cli.main(["report", job, "--json", "--html", str(page), "--trace", str(trace)]) == 0
    data = json.loads(capsys.readouterr().out)
    assert (data["job"], data["state"], data["generations"]) == ("job-1", "finished", 2)
    assert data["reference"] == {"iterations": 20, "elapsed_s": pytest.approx(5.0), "measured": False}
    checker = Checker()
    checker.feed(page.read_text())
    assert checker.open == []
    assert checker.seen.count("svg") == 2
    assert "script" not in checker.seen
    assert "$" not in page.read_text()
    assert json.loads(trace.read_text())["traceEvents"]

    assert cli.main(["report", job]) == 0
    text = capsys.readouterr().out
    parts = (
        "1: slowest rank: memory_free 0.250 s, localize 0.031 s, lose 0.016 s, attach 0.062 s, "
        "reconstruct 0.125 s, "
        "first iteration slower by"
    )
    died = "  1: killed by SIGKILL\n"
    for words in ("job job-1: finished", "ETTR 87.9", "trainer died", "0.562", died, parts, "what happened:"):
        assert words in text


def test_the_page_of_a_long_job_stays_small(tmp_path: Path) -> None:
    write(
        tmp_path / "events.jsonl",
        Log().begin().train(0, 9000).fail(9000, 0.1).recover(9000).train(9000, 9100).end(9100),
    )
    page = tmp_path / "page.html"
    assert cli.main(["report", str(tmp_path), "--html", str(page)]) == 0
    assert page.stat().st_size < 400_000
    for iteration in (0, 8999, 9000, 9099):
        assert f"iteration {iteration} at" in page.read_text()


def test_a_file_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path / "events.jsonl", one_failure())
    assert cli.main(["report", str(tmp_path), "--trace", str(tmp_path / "no" / "trace.json")]) == 1
    assert "cannot be written" in capsys.readouterr().err


def test_the_simulator_reads_the_report(tmp_path: Path) -> None:
    """`leto-sim validate` takes what `leto report --json` prints."""
    validate = pytest.importorskip("leto_sim.validate")
    path = tmp_path / "report.json"
    path.write_text(json.dumps(make_report("j", one_failure()).data()))
    measured = validate.read_report(path)
    assert measured.reference_iteration_s == pytest.approx(PACE_S)
    assert measured.hof_recoveries_s == (pytest.approx(0.5625 + 0.125),)
