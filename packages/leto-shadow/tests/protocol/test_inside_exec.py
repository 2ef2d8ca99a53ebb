"""A process inside exec has no environment, so nobody can say whose it is: it is looked at again (I-7)."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Callable, Collection
from pathlib import Path

import pytest

from leto_shadow import linux, succession
from leto_shadow.processes import TrainerProcess

RUNS, EXITING, KERNEL = "R 1 7 7 0 -1 4194304", "R 1 7 7 0 -1 4194308", "S 2 0 0 0 -1 2129984"
TAG = f"{linux.TRAINER_TAG}=tag".encode()


def process(
    proc: Path, pid: int, environ: bytes, head: str = RUNS, env_start: int = 0, env_end: int = 0
) -> None:
    """What the kernel shows of a process; ``head``: fields 3 to 9 of its stat."""
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "environ").write_bytes(environ)
    stat = [*head.split(), *["0"] * 40, str(env_start), str(env_end), "0"]
    (proc / str(pid) / "stat").write_text(f"{pid} (a) b) " + " ".join(stat))


@pytest.fixture
def proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A /proc with one process of each kind: inside exec is number 4."""
    process(tmp_path, 1, b"A=1\0" + TAG + b"\0", env_start=100, env_end=110)
    process(tmp_path, 2, b"A=1\0", env_start=100, env_end=104)
    process(tmp_path, 3, b"", env_start=100, env_end=100)  # started with none
    process(tmp_path, 4, b"")
    process(tmp_path, 5, b"", "Z 1 7 7 0 -1 4194308")
    process(tmp_path, 6, b"", EXITING)
    process(tmp_path, 7, b"", KERNEL)
    monkeypatch.setattr(linux, "_PROC", tmp_path)
    return tmp_path


def test_who_has_no_environment_yet_is_told_from_who_has_none(proc: Path) -> None:
    assert [linux.environment(pid) for pid in range(3, 9)] == [b"", None, b"", b"", b"", b""]
    assert linux.tagged(range(1, 9), "tag") == ([1], [4])
    assert dict(linux.environments()) == {1: b"A=1\0" + TAG + b"\0", 2: b"A=1\0", 4: None}


def test_the_end_of_exec_between_two_looks_is_no_empty_environment(
    proc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = Path.read_bytes

    def ends_after_one_look(self: Path) -> bytes:
        found = read(self)
        if self == proc / "4" / "environ" and not found:
            for file in ("environ", "stat"):
                (proc / "4" / file).write_bytes(read(proc / "1" / file))
        return found

    monkeypatch.setattr(Path, "read_bytes", ends_after_one_look)
    assert linux.tagged([4], "tag") == ([4], [])


def test_it_is_in_one_of_both_lists_from_its_start_on() -> None:
    """A real process; Popen returns while it is inside exec."""
    for _ in range(30):
        environment = {**os.environ, linux.TRAINER_TAG: "tag"}
        with subprocess.Popen(["sleep", "600"], env=environment) as child:
            try:
                found, unclear = linux.tagged([child.pid], "tag")
                assert found + unclear == [child.pid]
            finally:
                child.kill()
        assert linux.tagged([child.pid], "tag") == ([], [])


Tagged = Callable[[Collection[int], str], tuple[list[int], list[int]]]


def forgets_it(pids: Collection[int], tag: str) -> tuple[list[int], list[int]]:
    """Broken on purpose: whatever has no environment is nobody's."""
    return TAGGED(pids, tag)[0], []


TAGGED = linux.tagged


@pytest.mark.parametrize("tagged", [TAGGED, forgets_it], ids=["real", "mutant"])
def test_a_trainer_is_not_gone_while_one_is_inside_exec(
    proc: Path, monkeypatch: pytest.MonkeyPatch, tagged: Tagged
) -> None:
    killed: list[int] = []
    monkeypatch.setattr(linux, "descendants", lambda *_, **__: [2, 4])
    monkeypatch.setattr(linux, "reap", lambda _known: None)
    monkeypatch.setattr(linux, "tagged", tagged)
    monkeypatch.setattr(os, "kill", lambda pid, _number: killed.append(pid))
    trainer = TrainerProcess.__new__(TrainerProcess)
    trainer.tag, trainer.status = "tag", -signal.SIGKILL
    assert trainer.leftovers_gone(set()) is (tagged is forgets_it)
    assert trainer.orphans(set()) == ([] if tagged is forgets_it else [4]), "it may be one of them"
    assert killed == [], "nor is it killed: it may be a neighbour's"
    (proc / "4" / "environ").write_bytes(TAG)
    assert not trainer.leftovers_gone(set())
    assert killed == [4]


def test_what_dead_agents_left_is_looked_for_until_nobody_is_inside_exec(
    proc: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run_dir, killed = Path("/run-dir"), []
    left = f"{linux.TRAINER_TAG}={run_dir}/{2**22 + 1}.7/3".encode()

    def time_passes(_seconds: float) -> None:
        environ = proc / "4" / "environ"
        if killed:
            process(proc, 8, b"", "Z 1 7 7 0 -1 4194308")
            (proc / "8" / "stat").rename(proc / "4" / "stat")
            environ.write_bytes(b"")
        else:
            environ.write_bytes(left)

    monkeypatch.setattr(os, "kill", lambda pid, _number: killed.append(pid))
    monkeypatch.setattr(succession.time, "sleep", time_passes)
    monkeypatch.setattr(succession, "_alive", lambda _incarnation: False)
    assert succession.end_leftovers(run_dir, 100.0) == 1
    assert killed == [4]


def test_a_stranger_that_stays_inside_exec_does_not_hold_up_a_job(proc: Path) -> None:
    assert succession.end_leftovers(Path("/run-dir"), 0.0) == 0
