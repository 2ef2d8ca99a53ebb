"""Log lines as JSON: one object a line with rank and generation, whatever a script prints or logs."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leto_rmp import PoolConfig
from leto_shadow import logs
from leto_shadow.managers import ManagerHost

WHERE = {"job": "j", "node": 0, "rank": 3, "generation": 2}


@pytest.fixture(autouse=True)
def _restore_loggers() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("leto_shadow", "leto_rmp")]
    before = [(one, list(one.handlers), one.level, one.propagate) for one in loggers]
    yield
    for one, handlers, level, propagate in before:
        one.handlers, one.level, one.propagate = handlers, level, propagate


def test_text_is_as_it_was_and_json_says_where(capsys: pytest.CaptureFixture[str]) -> None:
    log = logging.getLogger("leto_shadow.agent")
    logs.set_up("text", lambda: WHERE)
    log.warning("rank %d: %s", 3, "words", extra={"fields": {"rank": 3}})
    assert capsys.readouterr().err == "leto: rank 3: words\n"
    logs.set_up("json", lambda: WHERE)
    log.warning("words", extra={"fields": {"rank": 1, "event": "failure"}})
    logging.getLogger("leto_rmp").error("other words")
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    assert first.pop("t") > 1e9
    assert first == {
        "level": "warning",
        "message": "words",
        "logger": "leto_shadow.agent",
        **WHERE,
        "rank": 1,
        "event": "failure",
    }
    assert (second["message"], second["logger"], second["rank"]) == ("other words", "leto_rmp", 3)


class Dead:
    """A state manager that has ended."""

    pid = 41

    def stderr(self) -> str:
        return "a defect\nand another"

    def kill(self) -> int:
        return -9


def test_what_a_state_manager_wrote_is_told_when_it_ends(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logs.set_up("json", lambda: {"job": "j", "node": 0, "generation": 2})
    host = ManagerHost(tmp_path, "j", PoolConfig(4096, 8, 2, 1))
    host._managers[3] = Dead()  # type: ignore[assignment]
    assert host.end(3) == "killed by signal 9: a defect\nand another"
    first, second = map(json.loads, capsys.readouterr().err.splitlines())
    wanted = {"rank": 3, "generation": 2, "role": "manager", "pid": 41, "level": "warning"}
    assert first.items() >= {**wanted, "message": "state manager of rank 3: a defect"}.items()
    assert second["message"] == "state manager of rank 3: and another"


SCRIPT = """
import logging, sys, warnings
from leto_shadow import logs
logs.adopt_output(lambda: {"rank": 1, "generation": 0})
print("one\\ntwo", "three")
print("no end", end="", flush=True)
print("\\udcff is no text")
sys.stdout.write("")
logging.getLogger("script").error("by itself", extra={"fields": {"loss": float("nan")}})
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("script").exception("an error")
sys.stderr.writelines(["to ", "stderr\\n"])
assert sys.stdout.fileno() == 1 and not sys.stdout.isatty() and sys.stderr.writable()
print("last words", end="")
sys.stdout.flush()
raise SystemExit(3)
"""


def test_all_that_a_script_says(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        timeout=60,
        check=False,
        cwd=tmp_path,
    )
    assert done.returncode == 3, done.stdout
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert all((line["rank"], line["generation"]) == (1, 0) for line in lines)
    said = [line["message"] for line in lines]
    assert said == [
        "one",
        "two three",
        "no end",
        "\\udcff is no text",
        "by itself",
        "an error",
        "to stderr",
        "last words",
    ]
    by_itself, error = lines[4], lines[5]
    assert (by_itself["logger"], by_itself["loss"]) == ("script", None)
    assert "ZeroDivisionError" in error["exception"]
    assert [line.get("stream") for line in lines[:2] + lines[6:]] == ["stdout", "stdout", "stderr", "stdout"]


@given(st.lists(st.text(max_size=12), max_size=8))
def test_any_pieces_become_their_lines(pieces: list[str]) -> None:
    lines = told(lambda stream: [stream.write(piece) for piece in pieces])
    wanted = [line for line in "".join(pieces).split("\n") if line]
    assert [line["message"] for line in lines] == [
        line.encode("utf-8", "backslashreplace").decode() for line in wanted
    ]


def test_lines_of_threads_do_not_mix() -> None:
    def talk(stream: logs.LineStream) -> None:
        threads = [
            threading.Thread(target=lambda i=i: [stream.write(f"{i}" * 50 + "\n") for _ in range(50)])  # type: ignore[misc]
            for i in range(4)
        ]
        for one in threads:
            one.start()
        for one in threads:
            one.join(30)

    lines = told(talk)
    assert len(lines) == 200
    assert {line["message"] for line in lines} == {f"{i}" * 50 for i in range(4)}


def test_a_line_without_an_end_does_not_grow_for_ever() -> None:
    lines = told(lambda stream: stream.write("x" * 200_000))
    assert sum(len(line["message"]) for line in lines) == 200_000
    assert max(len(line["message"]) for line in lines) <= 65536


def told(talk: Callable[[logs.LineStream], Any]) -> list[dict[str, Any]]:
    """The lines that a stream writes."""
    fd = os.memfd_create("log", os.MFD_CLOEXEC)
    with open(fd, "w", encoding="utf-8") as file:
        stream = logs.LineStream("stdout", file, lambda: WHERE)
        talk(stream)
        stream.flush()
        data = os.pread(fd, 1 << 24, 0)
    return [json.loads(line) for line in data.splitlines()]
