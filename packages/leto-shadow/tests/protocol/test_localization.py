"""Pages are read for memory errors after every failure that may have been one, and after no other."""

from __future__ import annotations

import importlib
import signal
from pathlib import Path
from typing import Any

import pytest

from leto_rmp import PoolConfig
from leto_shadow import managers, wire
from leto_shadow import messages as m
from leto_shadow.agent_actions import RepairRank, Tell
from leto_shadow.agent_core import AgentCore
from leto_shadow.classifier import Classifier, Failure, FailureKind, Verdict
from leto_shadow.config import Deadlines, Limits
from leto_shadow.localization import Ending, is_python_error, must_read
from leto_shadow.operability import DeviceFacts

KILLED = Ending(-signal.SIGKILL)


@pytest.mark.parametrize(
    ("ending", "read"),
    [
        (KILLED, False),  # by an operator, the kernel, a drill; by the agent after a hang or in the fence
        (Ending(1, reported=True, python=True), False),
        (Ending(-signal.SIGKILL, reported=True, python=True), False),  # and did not exit in time
        (Ending(1, reported=True, secondary=True), False),
        (Ending(1, reported=True), True),  # RuntimeError: CUDA error: uncorrectable ECC error encountered
        (Ending(-signal.SIGKILL, reported=True), True),
        (Ending(-signal.SIGABRT), True),  # NCCL's watchdog aborts
        (Ending(-signal.SIGBUS), True),
        (Ending(1), True),  # os._exit in a library
        (Ending(0), True),
        (Ending(), True),
        (Ending(-signal.SIGKILL, again=True), True),
        (Ending(1, reported=True, python=True, again=True), True),
    ],
)
def test_must_read(ending: Ending, read: bool) -> None:
    assert must_read(ending) is read


def _after(cause: BaseException, error: BaseException) -> BaseException:
    """``error`` was raised while ``cause`` was handled."""
    error.__context__ = cause
    return error


class AcceleratorError(RuntimeError):
    pass


class LibraryError(ValueError):
    pass


@pytest.mark.parametrize(
    ("error", "of_python"),
    [
        (ValueError("bad sample"), True),
        (_after(TypeError("y"), KeyError("x")), True),
        (FileNotFoundError("data"), True),
        (AcceleratorError("CUDA error: uncorrectable ECC error encountered"), False),
        (RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED"), False),
        (LibraryError("who knows"), False),
        (_after(AcceleratorError("CUDA error"), ValueError("loss is no number")), False),
        (ExceptionGroup("several", [ValueError("x")]), False),
        (MemoryError(), False),
        (SystemExit(1), False),
    ],
)
def test_is_python_error(error: BaseException, of_python: bool) -> None:
    assert is_python_error(error) is of_python


def test_a_circle_of_causes_is_no_endless_loop() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert is_python_error(first)


@pytest.mark.parametrize(("error", "of_python"), [(ValueError("x"), True), (AcceleratorError("x"), False)])
def test_the_trainer_says_so(monkeypatch: pytest.MonkeyPatch, error: Exception, of_python: bool) -> None:
    run = importlib.import_module("leto_shadow.run")  # the package has a function of this name
    said: list[wire.Failed] = []
    monkeypatch.setattr(run, "_report", lambda _channel, message: said.append(message))
    monkeypatch.setattr(run, "_exit", lambda _status, _reason: None)

    def fails(_ctx: Any) -> None:
        raise error

    nothing: Any = None
    run._step("train", fails, nothing, nothing)
    assert [message.python for message in said] == [of_python]


class Node:
    """One agent of two ranks; each generation is promoted and ends as the test says."""

    def __init__(self) -> None:
        self.core = AgentCore(0, 2, "host", Deadlines(), (), 0.0)
        self.generation = -1
        self.receive(m.Welcome(0, 2))
        self.receive(m.StartManagers(1))
        for rank in (0, 1):
            self.core.manager_up(rank, 1, "socket", 0.0)

    def receive(self, message: Any) -> list[Any]:
        return self.core.receive(message, 0.0)

    def promote(self) -> None:
        self.generation += 1
        world = self.generation + 1
        for rank in (0, 1):
            sid = 2 * self.generation + rank
            self.receive(m.SpawnShadow(rank, sid, world))
            self.core.trainer_says(sid, wire.Hello(1, rank), 0.0)
            for level in (1, 2, 3):
                self.core.trainer_says(sid, wire.LevelReached(level, world), 0.0)
        self.receive(m.Promote(self.generation, world, 1))

    def at(self, rank: int, iteration: int) -> None:
        sid = 2 * self.generation + rank
        self.core.progress(sid, phase=5, waiting=False, iteration=iteration, counter=1, changed_s=0.0)

    def say(self, rank: int, message: wire.TrainerMessage) -> None:
        self.core.trainer_says(2 * self.generation + rank, message, 0.0)

    def end(self, *statuses: int) -> list[bool]:
        """Both trainers end with these statuses; return which ranks are read in the repair that follows."""
        self.receive(m.Fence(self.generation + 1))
        for rank, status in enumerate(statuses):
            self.core.trainer_gone(2 * self.generation + rank, "", False, 0.0, status=status)
        actions = self.receive(m.Repair(self.generation + 1, 1))
        return [action.read for action in actions if isinstance(action, RepairRank)]


def test_the_agent_asks_only_for_the_ranks_that_may_have_met_an_error() -> None:
    node = Node()
    node.promote()
    node.at(0, 3)
    node.at(1, 3)
    node.say(1, wire.Failed("train", "RuntimeError: CUDA error"))
    assert node.end(-signal.SIGKILL, 1) == [False, True]
    node.promote()
    node.at(0, 5)
    node.at(1, 5)
    node.say(1, wire.Failed("train", "ValueError: bad sample", python=True))
    assert node.end(-signal.SIGKILL, 1) == [False, False], "what was read once is not read again"
    node.promote()
    node.at(0, 6)
    node.at(1, 5)
    assert node.end(-signal.SIGKILL, -signal.SIGKILL) == [False, True], "rank 1 got no further"


@pytest.mark.parametrize("told", [False, True])
@pytest.mark.parametrize(("xid", "verdict"), [(13, Verdict.HOF), (79, Verdict.FATAL)])
def test_an_abort_in_a_destructor_is_a_failure_like_others(told: bool, xid: int, verdict: Verdict) -> None:
    """A destructor of PyTorch that meets an error of CUDA ends the process by SIGABRT, before or after Python
    has told of it: recovered from in place unless the device says otherwise, and pages are read."""
    node = Node()
    node.promote()
    node.at(1, 3)
    if told:
        node.say(1, wire.Failed("train", "AcceleratorError: CUDA error: unspecified launch failure"))
    facts = DeviceFacts("GPU-1", xids=(xid,))
    actions = node.core.trainer_gone(1, "killed by SIGABRT", False, 0.0, facts, -signal.SIGABRT)
    [failed] = [a.message for a in actions if isinstance(a, Tell) and isinstance(a.message, m.ActiveFailed)]
    assert (failed.rank, failed.iteration, failed.reported) == (1, 3, told)
    assert "killed by SIGABRT" in failed.detail
    found = Failure(FailureKind.EXIT, failed.rank, failed.iteration, failed.detail, failed.facts)
    assert Classifier(Limits()).classify(found, 0.0).verdict is verdict
    node.receive(m.Fence(1))
    node.core.trainer_gone(0, "", False, 0.0, status=-signal.SIGKILL)
    reads = [a.read for a in node.receive(m.Repair(1, 1)) if isinstance(a, RepairRank)]
    assert reads == [False, True]


def test_fresh_memory_is_not_read() -> None:
    node = Node()
    node.promote()
    node.end(-signal.SIGABRT, -signal.SIGKILL)
    node.promote()
    node.at(0, 1)
    node.receive(m.Fence(2))
    for sid in (2, 3):
        node.core.trainer_gone(sid, "", False, 0.0, status=-signal.SIGABRT)
    node.receive(m.StartManagers(2))
    for rank in (0, 1):
        node.core.manager_gone(rank, 1, "", 0.0)
        node.core.manager_up(rank, 2, "socket", 0.0)
    actions = node.receive(m.Repair(2, 2))
    assert [action.read for action in actions if isinstance(action, RepairRank)] == [False, False]


@pytest.mark.parametrize("read", [False, True])
def test_the_manager_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, read: bool) -> None:
    asked = []
    original = managers.Client.localize

    def localize(self: managers.Client, read: bool = True) -> Any:
        asked.append(read)
        return original(self, read)

    monkeypatch.setattr(managers.Client, "localize", localize)
    config = PoolConfig(page_bytes=4096, data_pages=8, tier1_pages=2, tier2_pages=1)
    host = managers.ManagerHost(tmp_path, "test-localization", config)
    try:
        host.start(0)
        assert host.repair(0, 1, (), 10.0, read=read) == managers.Repair(0)
    finally:
        host.end_all()
    assert asked == [read]
