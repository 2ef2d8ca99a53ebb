"""The operator's hook: asked about each verdict it may overrule, waited for at the fence, no longer."""

from __future__ import annotations

import json
import os
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leto_shadow import cli
from leto_shadow.classifier import Case, Classifier, Failure, FailureKind, Ruling, Verdict
from leto_shadow.classify_hook import ClassifyHook, is_function
from leto_shadow.config import Limits
from leto_shadow.hook_question import Question, make_question
from leto_shadow.operability import DeviceFacts
from leto_shadow.reactor import Reactor

LIMITS = Limits(hofs_per_rank=3, hofs_same_iteration=2, fatals=2, window_s=100.0)
BAD = DeviceFacts("GPU-1", xids=(79,))
DEADLINE_S = 100.0


def question(**more: Any) -> Question:
    failure = Failure(FailureKind.EXIT, 1, 7, "killed", BAD, **more)
    ruling = Ruling(Verdict.FATAL, ("the hardware is not operable: Xid 79",))
    return make_question(Case(failure), ruling, 2, LIMITS)


# --- the processes ----------------------------------------------------------------------------------


class Asker:
    """A hook in an event loop of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reactor = Reactor()
        self.children: set[int] = set()
        self.answers: list[tuple[int, str, str]] = []
        self.hook: ClassifyHook | None = None

    def use(self, hook: str) -> ClassifyHook:
        def answered(*answer: Any) -> None:
            self.answers.append(answer)

        log = self.folder / "hook.log"
        self.hook = ClassifyHook(hook, self.folder, log, self.reactor, answered, self.children)
        return self.hook

    def until_answers(self, count: int) -> list[tuple[int, str, str]]:
        deadline = time.monotonic() + DEADLINE_S
        while len(self.answers) < count:
            assert time.monotonic() < deadline, self.answers
            self.reactor.turn(0.05)
        return self.answers


@pytest.fixture
def asker(tmp_path: Path) -> Iterator[Asker]:
    asker = Asker(tmp_path)
    yield asker
    if asker.hook is not None:
        asker.hook.close()
    assert asker.children == set()


def executable(folder: Path, text: str) -> str:
    path = folder / "hook.sh"
    path.write_text("#!/bin/sh\n" + text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def test_an_executable_gets_the_facts_and_answers(asker: Asker) -> None:
    kept = asker.folder / "asked.json"
    hook = asker.use(executable(asker.folder, f"cat > {kept}; echo HOF\n"))
    asked = question(detected_s=0.5)
    hook.ask(4, asked)
    assert asker.until_answers(1) == [(4, "hof", "")]
    assert msgspec.json.decode(kept.read_bytes(), type=Question) == asked
    assert json.loads(kept.read_text())["facts"]["xids"] == [79]


def test_a_function_is_started_ahead_and_may_print(asker: Asker) -> None:
    (asker.folder / "policy_of_tests.py").write_text(
        "def rule(question):\n    print('a word to the log')\n"
        "    return 'ff' if question['facts_seen'] else 'default'\n".replace(
            "question['facts_seen']", "question['facts'] and 79 in question['facts']['xids']"
        )
    )
    hook = asker.use("policy_of_tests:rule")
    assert len(asker.children) == 1
    hook.ask(1, question())
    hook.ask(2, question())  # at once, before the first has answered
    assert sorted(asker.until_answers(2)) == [(1, "ff", ""), (2, "ff", "")]
    assert "a word to the log" in (asker.folder / "hook.log").read_text()
    assert len(asker.children) == 1


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("exit 3", "exit status 3"),
        ("kill -9 $$", "killed by SIGKILL"),
        ("echo maybe", "found 'maybe'"),
        ("echo hof ff", "found 'hof ff'"),
        ("true", "found ''"),
        ("sleep 600 & true", "found ''"),
    ],
)
def test_whatever_goes_wrong_is_an_error(asker: Asker, text: str, error: str) -> None:
    asker.use(executable(asker.folder, text + "\n")).ask(1, question(drill=True))
    ((number, answer, found),) = asker.until_answers(1)
    assert (number, answer) == (1, "")
    assert error in found


def test_a_hook_that_cannot_be_imported_says_so(asker: Asker) -> None:
    asker.use("no_such_module_here:rule").ask(1, question())
    ((_, answer, error),) = asker.until_answers(1)
    assert (answer, "exit status 1" in error) == ("", True)


def test_one_that_nobody_waits_for_is_killed_with_what_it_started(
    asker: Asker, alive: Callable[[int], bool]
) -> None:
    note = asker.folder / "pid"
    hook = asker.use(executable(asker.folder, f"sleep 600 & echo $! > {note}; wait\n"))
    hook.ask(1, question())
    deadline = time.monotonic() + DEADLINE_S
    while not (note.exists() and note.read_text().strip()):
        assert time.monotonic() < deadline
        asker.reactor.turn(0.02)
    hook.keep({1})
    assert asker.children
    hook.keep(())
    assert asker.children == set()
    pid = int(note.read_text())
    while alive(pid):
        assert time.monotonic() < deadline
        time.sleep(0.01)  # another's child: the kernel offers no event
    assert asker.answers == []


def test_names_of_functions_and_of_files() -> None:
    assert is_function("policy:rule")
    assert is_function("our.policy:rule")
    for hook in ("rule", "./policy:rule", "/usr/bin/true", "a:b:c", ":rule", "our.:rule"):
        assert not is_function(hook)


def test_hooks_that_are_none_are_refused_before_anything_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    Path("policy_of_jobs.py").write_text("def rule(question):\n    return 'hof'\n")
    run = ["run", "--dry-run", "--decide", "json:dumps"]
    for hook, words in (
        ("nowhere:rule", "the module of --classify-hook"),
        ("policy_of_jobs:ruling", "has no function 'ruling'"),
        ("train.py", "neither module:function nor a file that can be executed"),
    ):
        assert cli.main([*run, "--classify-hook", hook, "train.py"]) == 2
        assert words in capsys.readouterr().err
    assert cli.main([*run, "--classify-hook", "policy_of_jobs:rule", "train.py"]) == 0
    assert "--classify-hook policy_of_jobs:rule" in capsys.readouterr().out
    os.chmod("train.py", 0o700)
    assert cli.main([*run, "--classify-hook", "train.py", "train.py"]) == 0
    assert f"--classify-hook {tmp_path}/train.py" in capsys.readouterr().out


# --- the protocol -----------------------------------------------------------------------------------


@given(
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from(FailureKind), st.booleans()), min_size=20),
)
def test_no_hook_makes_a_series_endless(failures: list[tuple[int, FailureKind, bool]]) -> None:
    """It is asked only of rulings that are open, and the counts behind the end do not listen to it."""
    classifier = Classifier(LIMITS)
    for rank, kind, operable in failures:
        ruling = classifier.classify(Failure(kind, rank, 5, "", None if operable else BAD), 0.0)
        if ruling.verdict is Verdict.ABORT:
            assert not ruling.open
            return
        if kind in (FailureKind.MANAGER, FailureKind.NODE, FailureKind.DECISION):
            assert not ruling.open, "no word of an operator brings memory back"
    raise AssertionError("20 failures without progress did not end the job")
