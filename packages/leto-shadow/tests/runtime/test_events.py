"""The event log: one line per event, many writers, readers that meet partial and broken lines."""

from __future__ import annotations

import errno
import itertools
import json
import logging
import math
import os
import stat
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leto_shadow.agent_main import Agent
from leto_shadow.events import MAX_LINE_BYTES, EventReader, EventWriter, read_events


def test_what_is_written_is_read_with_both_clocks(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventWriter(path) as writer:
        writer.write("metrics", rank=1, iteration=3, loss=0.1, bad=math.nan)
    (event,) = read_events(path)
    assert (event["event"], event["rank"], event["iteration"], event["loss"], event["bad"]) == (
        "metrics",
        1,
        3,
        0.1,
        None,
    )
    assert event["t"] > event["mono"] > 0
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert json.loads(path.read_text()) == event  # plain JSON for everyone else


def test_a_missing_file_is_no_error_and_growth_is_seen(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    reader = EventReader(path)
    assert reader.poll() == []
    with EventWriter(path) as writer:
        writer.write("one")
        assert [event["event"] for event in reader.poll()] == ["one"]
        assert reader.poll() == []
        writer.write("two")
        writer.write("three")
        assert [event["event"] for event in reader.poll()] == ["two", "three"]


@given(st.lists(st.integers(min_value=0, max_value=400), max_size=12))
def test_a_reader_copes_with_lines_cut_anywhere(
    tmp_path_factory: pytest.TempPathFactory, cuts: list[int]
) -> None:
    lines = [
        b'{"event": "a", "x": 1}',
        b"not json",
        b"[1]",
        b'{"event": 5}',
        b'{"event": "c", "t": "x"}',
        b'{"event": "d", "mono": null}',
        b"",
        b'{"event": "b"}',
        b"\xff\xfe",
        b"[" * 5000,  # deeper than a decoder goes
    ]
    data = b"\n".join(lines) + b"\n"
    path = tmp_path_factory.mktemp("cut") / "events.jsonl"
    reader = EventReader(path)
    names: list[str] = []
    borders = sorted({0, len(data), *(cut % len(data) for cut in cuts)})
    with open(path, "ab", buffering=0) as file:
        for a, b in itertools.pairwise(borders):
            file.write(data[a:b])
            names += [event["event"] for event in reader.poll()]
    assert names == ["a", "b"]
    assert reader.skipped == 7


def test_an_endless_line_is_skipped_without_being_kept(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    path.write_bytes(b"x" * (3 * MAX_LINE_BYTES))
    reader = EventReader(path)
    assert reader.poll() == []
    with open(path, "ab") as file:
        file.write(b'still the same line\n{"event": "after"}\n')
    assert [event["event"] for event in reader.poll()] == ["after"]
    assert reader.skipped == 1


def test_an_event_that_cannot_be_a_line_is_refused_and_leaves_no_trace(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventWriter(path) as writer:
        with pytest.raises(ValueError, match="above the limit"):
            writer.write("big", text="x" * MAX_LINE_BYTES)
        with pytest.raises(TypeError):
            writer.write("odd", thing=object())
    assert path.read_bytes() == b""


def test_a_link_planted_at_the_path_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "events.jsonl").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(OSError, match="symbolic link"):
        EventWriter(tmp_path / "events.jsonl")
    assert not (tmp_path / "elsewhere").exists()


def test_lines_of_several_processes_never_mix(spawn: Callable[..., Popen[bytes]], tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    source = """
        import sys
        from leto_shadow.events import EventWriter
        with EventWriter(sys.argv[1]) as writer:
            for number in range(400):
                writer.write("n", who=int(sys.argv[2]), number=number, text="x" * (number * 7 % 900))
    """
    processes = [
        spawn([sys.executable, "-c", textwrap.dedent(source), os.fspath(path), str(who)]) for who in range(3)
    ]
    assert [process.wait(150) for process in processes] == [0, 0, 0]
    reader = EventReader(path)
    events = reader.poll()
    assert reader.skipped == 0
    for who in range(3):
        assert [event["number"] for event in events if event["who"] == who] == list(range(400))


def test_an_agent_says_once_that_nothing_can_be_written(caplog: pytest.LogCaptureFixture) -> None:
    """A full disk costs the log, and does not fill another one with a line for each iteration."""
    caplog.set_level(logging.INFO, "leto_shadow")
    full = True

    def write(event: str, **fields: object) -> dict[str, object]:
        if full:
            raise OSError(errno.ENOSPC, "No space left on device")
        return {"event": event, **fields}

    place, events = SimpleNamespace(node=0), SimpleNamespace(write=write)
    agent: Any = SimpleNamespace(place=place, _events=events, _metrics=None, _json=False, _unwritten=0)
    for _ in range(3):
        Agent.record(agent, "metrics")
    Agent.record(agent, "adopted")
    full = False
    for _ in range(2):
        Agent.record(agent, "metrics")
    said = [record.getMessage() for record in caplog.records]
    assert said == [
        "event 'metrics' is not in the log, nor what follows for now: [Errno 28] No space left on device",
        "an agent died and was started again; the memory of all ranks is there",
        "4 events are not in the log, which goes on",
    ]
