"""`leto report`: what failures cost a job, finished or running, and where each recovery spent its time.

Role: the operator's view afterwards; `leto status` is the one meanwhile. Everything is read from event logs
(`leto_shadow.archive`), so a copy of them is as good as the run directory itself. As text, as JSON (which
``leto-sim validate`` reads), as a page without scripts, or as a trace for Perfetto.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from leto_shadow.archive import read_job
from leto_shadow.charts import PART_NAMES, PARTS, parts_of
from leto_shadow.events import Event
from leto_shadow.jobs import CommandError, find_run_dir
from leto_shadow.measures import Measures, measure, one_clock
from leto_shadow.report_page import render_page
from leto_shadow.timeline import Timeline
from leto_shadow.trace import chrome_trace

__all__ = ["DESCRIPTION", "Report", "add_arguments", "execute", "make_report"]

DESCRIPTION = """Report on a job that has ended, or is running: how much of its time was training (ETTR),
what each recovery took and in which phase, and what happened when. Give a job id, or the folders with its
event logs: the run directory of every node, or what `leto run --keep` has kept."""

_KEPT_LINES = 400
_MALFORMED = (AttributeError, KeyError, TypeError, ValueError)  # events of another version, or nonsense


@dataclass(frozen=True)
class Report:
    """A job's report; the same content in every form."""

    name: str
    events: list[Event]
    skipped: int
    """Lines of the logs that were no events."""
    timeline: Timeline
    lines: list[str]
    """What happened, in words."""
    measures: Measures

    def data(self) -> dict[str, Any]:
        """Return everything as JSON values; times in seconds."""
        found = self.measures
        pace, measured = found.reference_iteration_s or found.iteration_s, found.reference_iteration_s
        started = [event for event in self.events if event["event"] == "job_started"]
        last = started[-1] if started else {}
        return {
            "job": self.name,
            "state": self.timeline.state,
            "reason": self.timeline.failed,
            "world_size": last.get("world_size"),
            "nodes": last.get("nodes"),
            "generations": self.timeline.generation + 1,
            "began_unix_s": self.events[0]["t"],
            "ettr": found.ettr,
            "interruption_s": found.interruption_s,
            "iteration_s": found.iteration_s,
            "iteration_scatter_s": found.iteration_scatter_s,
            "reference_scatter_s": found.reference_scatter_s,
            "reference": None
            if pace is None or not found.iterations
            else {
                "iterations": found.iterations,
                "elapsed_s": pace * found.iterations,
                "measured": measured is not None,
            },
            "run": {"iterations": found.iterations, "elapsed_s": found.elapsed_s},
            "failures": [
                {
                    **row.as_dict(),
                    "interruption_s": one.interruption_s,
                    "recompute_s": one.recompute_s,
                    "done_s": one.done_s,
                    "first_extra_s": one.first_extra_s,
                }
                for row, one in zip(self.timeline.failures, found.recoveries, strict=True)
            ],
            "phases": self.phases(),
            "lines": self.lines,
            "skipped_lines": self.skipped,
        }

    def phases(self) -> dict[str, dict[str, float]]:
        """Median and worst seconds of each phase, over all recoveries."""
        times: dict[str, list[float]] = {}
        for row in self.timeline.failures:
            if row.recovered_s is not None:
                for part, seconds in parts_of(row):
                    times.setdefault(part, []).append(seconds)
        return {
            part: {"median_s": statistics.median(times[part]), "worst_s": max(times[part])}
            for part in PARTS
            if part in times
        }


def make_report(
    name: str, events: list[Event], skipped: int = 0, reference: list[Event] | None = None
) -> Report:
    """Read a job's events, in order of time. `CommandError` if they are not what this version knows."""
    timeline, lines = Timeline(clock=one_clock(events)), []
    for event in events:
        try:
            lines += timeline.feed(event)
        except _MALFORMED as error:
            raise CommandError(
                f"the event {event['event']!r} is not as this version writes it "
                f"({type(error).__name__}: {error}): {json.dumps(event)[:200]}"
            ) from error
    try:
        return Report(name, events, skipped, timeline, lines, measure(events, timeline, reference))
    except _MALFORMED as error:
        raise CommandError(f"an event is not as this version writes it: {error}") from error


def _table(report: Report) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("#", justify="right")
    table.add_column("failure")
    for name in ("rank", "iteration", "detected", "I", "R", "lost"):
        table.add_column(name, justify="right")
    table.add_column("source")
    for name in PARTS[1:]:
        table.add_column(name, justify="right")
    for number, row in enumerate(report.timeline.failures, 1):
        one = report.measures.recoveries[number - 1]
        parts = dict(parts_of(row))
        table.add_row(
            str(number),
            row.title,
            str(row.rank),
            str(row.iteration),
            _seconds(row.detected_s),
            _seconds(one.interruption_s),
            _seconds(one.recompute_s),
            "-" if row.iterations_lost is None else str(row.iterations_lost),
            row.source or "not recovered",
            *(_seconds(parts.get(part)) for part in PARTS[1:]),
        )
    return table


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def _print(report: Report, console: Console) -> None:
    """The report as text."""
    found, timeline, data = report.measures, report.timeline, report.data()

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False)

    where = f"world size {data['world_size']}, nodes {data['nodes']}, " if data["world_size"] else ""
    say(f"job {report.name}: {timeline.state}, {where}generations {data['generations']}")
    if timeline.failed:
        say(f"it failed: {timeline.failed}")
    say(ettr_sentence(found))
    if not timeline.failures:
        say("no failure")
    else:
        say(
            f"{len(timeline.failures)} failures; {found.interruption_s:.2f} s without training. "
            "I: failure to training on all ranks; R: what was computed again; seconds"
        )
        console.print(_table(report))
        for number, line in enumerate(rank_lines(report), 1):
            if line:
                say(f"  {number}: {line}")
        for number, row in enumerate(timeline.failures, 1):
            for line in (row.detail, row.verdict_text if row.verdict else ""):
                if line:
                    say(f"  {number}: {line}")
        for part, times in report.phases().items():
            say(f"  {PART_NAMES[part]}: median {times['median_s']:.3f} s, worst {times['worst_s']:.3f} s")
    say("what happened:")
    for line in report.lines[-_KEPT_LINES:]:
        say(f"  {line}")
    if report.skipped:
        say(f"{report.skipped} lines of the logs are no events")


def rank_lines(report: Report) -> list[str]:
    """For each failure, what the slowest rank spent its part on, and the iteration after it."""
    lines = []
    for row, one in zip(report.timeline.failures, report.measures.recoveries, strict=True):
        words = [f"{name} {seconds:.3f} s" for name, seconds in row.rank_parts.items()]
        if words:
            words[0] = f"slowest rank: {words[0]}"
        if one.first_extra_s is not None:
            words.append(f"first iteration slower by {one.first_extra_s:.3f} s")
        lines.append(", ".join(words))
    return lines


def ettr_sentence(found: Measures) -> str:
    """The effective training time ratio, and what it was made from."""
    if found.ettr is None:
        return "ETTR: unknown, since the script reports no iterations (`ctx.metrics`)"
    if found.reference_iteration_s is not None:
        pace = f"{found.reference_iteration_s * 1e3:.1f} ms, as in the reference run"
    else:
        pace = f"{(found.iteration_s or 0.0) * 1e3:.1f} ms, the median of this run without failures"
    return (
        f"ETTR {found.ettr:.2%}: {found.iterations} iterations of {pace}, in {found.elapsed_s:.2f} s of "
        "training and recoveries"
    )


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `leto report`."""
    parser.add_argument(
        "job", nargs="*", metavar="JOB|DIR", help="job id or folders; the newest job of this user if left out"
    )
    parser.add_argument("--reference", metavar="DIR", help="folder of a run without failures, for the ETTR")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write the report as a page")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write a trace for Perfetto or Chrome")


def _folders(given: Sequence[str]) -> list[Path]:
    if not given:
        return [find_run_dir(None, None)]
    named = [bool(one) and ("/" in one or Path(one).exists()) for one in given]
    return [Path(one) if path else find_run_dir(one, None) for one, path in zip(given, named, strict=True)]


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}") from error


def execute(arguments: argparse.Namespace) -> int:
    """Make the report in the forms asked for; as text if in none."""
    folders = _folders(arguments.job)
    events, skipped = read_job(folders)
    reference = read_job([Path(arguments.reference)])[0] if arguments.reference else None
    report = make_report(folders[0].resolve().name, events, skipped, reference)
    if arguments.html is not None:
        _write(
            arguments.html,
            render_page(report.data(), report.timeline, ettr_sentence(report.measures), rank_lines(report)),
        )
    if arguments.trace is not None:
        trace = chrome_trace(events, recoveries=report.measures.recoveries)
        _write(arguments.trace, json.dumps(trace) + "\n")
    if arguments.json:
        sys.stdout.write(json.dumps(report.data(), indent=1) + "\n")
    elif arguments.html is None and arguments.trace is None:
        _print(report, Console(width=None if sys.stdout.isatty() else 200, soft_wrap=True))
    return 0
