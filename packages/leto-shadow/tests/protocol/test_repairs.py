"""The repairs of a node's ranks run side by side, and nothing else of the agent runs beside them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Collection, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from leto_rmp import AllocationSpec, Client, Kind, PoolConfig, Role
from leto_shadow import repairs
from leto_shadow.agent_actions import RepairRank
from leto_shadow.agent_shell import AgentShell
from leto_shadow.devices import HostDevice
from leto_shadow.drills import Lose
from leto_shadow.managers import ManagerHost, Repair
from leto_shadow.reactor import Reactor
from leto_shadow.repairs import Repairs

PATIENT_S = 100.0
RANKS = (4, 5, 6)


def repairing() -> list[str]:
    """Threads of repairs; none outlives `Repairs.run`."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("leto-repair")]


def actions(*ranks: int, **fields: Any) -> list[RepairRank]:
    return [RepairRank(rank, 7, 1, (), **fields) for rank in ranks]


class Log:
    """An event log that belongs to one thread."""

    def __init__(self) -> None:
        self.owner = threading.get_ident()
        self.events: list[tuple[str, dict[str, Any]]] = []

    def __call__(self, event: str, **fields: Any) -> None:
        assert threading.get_ident() == self.owner, "the event log is written by the agent's thread alone"
        self.events.append((event, fields))

    def of(self, event: str) -> dict[int, dict[str, Any]]:
        return {fields["rank"]: fields for name, fields in self.events if name == event}


class Meeting:
    """Managers whose repairs end only when those of all ranks have begun."""

    def __init__(self, ranks: int, patience_s: float = PATIENT_S) -> None:
        self.barrier = threading.Barrier(ranks)
        self.patience_s = patience_s

    def repair(self, rank: int, *_: Any, read: bool) -> Repair:
        self.barrier.wait(self.patience_s)
        return Repair(rank, (f"lost of {rank}",), (f"skipped of {rank}",), 0.0)


def test_the_ranks_of_a_node_are_repaired_side_by_side() -> None:
    log = Log()
    done = Repairs(HostDevice(), Meeting(len(RANKS)), log).run(actions(*RANKS))
    assert {(one.action.rank, one.lost_pages, one.error) for one in done} == {
        (rank, rank, None) for rank in RANKS
    }
    for event in ("localized", "pages_lost", "loss_skipped"):
        assert log.of(event).keys() == set(RANKS)
    assert log.of("localized")[5]["lost_pages"] == 5
    assert log.of("pages_lost")[6]["detail"] == "lost of 6"
    assert repairing() == []


def test_mutant_repairs_one_after_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the test above must see: the first one waits for a second one that does not begin."""

    class Sequential(threading.Thread):
        def start(self) -> None:
            super().start()
            super().join()

    monkeypatch.setattr(repairs, "threading", SimpleNamespace(Thread=Sequential))
    with pytest.raises(threading.BrokenBarrierError):
        Repairs(HostDevice(), Meeting(len(RANKS), 0.05), Log()).run(actions(*RANKS))


def test_mutant_a_thread_writes_events(monkeypatch: pytest.MonkeyPatch) -> None:
    def repair(self: Repairs, action: RepairRank, ended: Any) -> None:
        try:
            self._record("localized", rank=action.rank)
        except BaseException as error:  # noqa: BLE001 - as in the original
            ended.put((action, error, 0.0))

    monkeypatch.setattr(Repairs, "_repair", repair)
    with pytest.raises(AssertionError, match="the event log is written by the agent's thread alone"):
        Repairs(HostDevice(), Meeting(1), Log()).run(actions(4))


class Slow(HostDevice):
    """Memory of rank 6 is never free; that of rank 5 only when rank 4 has been repaired."""

    def __init__(self) -> None:
        self.repaired = threading.Event()

    def wait_for_free_memory(
        self, ranks: Collection[int], timeout_s: float
    ) -> Iterator[tuple[int, dict[str, float] | OSError]]:
        yield 6, TimeoutError("it still grows")
        yield 4, {"waited_s": 0.25}
        assert self.repaired.wait(PATIENT_S), "rank 4 waits for the memory of rank 5"
        yield 5, {"waited_s": 0.5}


def test_a_rank_whose_memory_is_free_does_not_wait_for_the_others() -> None:
    device, log, asked = Slow(), Log(), []

    class Managers:
        def repair(self, rank: int, *_: Any, read: bool) -> Repair:
            asked.append((rank, read))
            device.repaired.set()
            return Repair(0)

    done = Repairs(device, Managers(), log).run(actions(*RANKS, read=False))
    assert asked == [(4, False), (5, False)], "without free memory nothing is repaired"
    assert {one.action.rank: one.error for one in done} == {
        4: None,
        5: None,
        6: "TimeoutError: it still grows",
    }
    assert {rank: one["waited_s"] for rank, one in log.of("memory_free").items()} == {4: 0.25, 5: 0.5}


def test_an_error_that_nobody_expects_comes_when_all_have_ended() -> None:
    ended = []

    class Managers(Meeting):
        def repair(self, rank: int, *_: Any, read: bool) -> Repair:
            self.barrier.wait(self.patience_s)
            if rank == 5:
                raise ZeroDivisionError
            ended.append(rank)
            return Repair(0)

    log = Log()
    with pytest.raises(ZeroDivisionError):
        Repairs(HostDevice(), Managers(len(RANKS)), log).run(actions(*RANKS))
    assert sorted(ended) == [4, 6]
    assert log.of("localized").keys() == {4, 6}
    assert repairing() == []


class Dying(ManagerHost):
    """Rank 1's manager dies when both repairs have begun."""

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.barrier = threading.Barrier(2)

    def repair(self, rank: int, *arguments: Any, **named: Any) -> Repair:
        self.barrier.wait(PATIENT_S)
        if rank == 1:
            pid = self.pid(1)
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
        return super().repair(rank, *arguments, **named)


@pytest.mark.parametrize("dies", [False, True])
def test_real_managers(tmp_path: Path, dies: bool) -> None:
    """What a drill loses, and how long that takes, is its own rank's; so is a manager's death."""
    config = PoolConfig(page_bytes=4096, data_pages=4, tier1_pages=2, tier2_pages=1)
    host = (Dying if dies else ManagerHost)(tmp_path, "test-repairs", config)
    log = Log()
    try:
        for rank in (0, 1):
            with Client.connect(host.start(rank).socket_path) as writer:
                writer.attach(Role.WRITER, 1)
                writer.allocate([AllocationSpec("arena", 4096 * 8, Kind.RETAINED)])
        losses = (("drill", Lose("arena", 1, 2), 1),)
        done = Repairs(HostDevice(), host, log).run([RepairRank(0, 2, 1, losses), RepairRank(1, 2, 1, ())])
        found = {one.action.rank: one for one in done}
        assert (found[0].lost_pages, found[0].error) == (2, None)
        assert log.of("pages_lost").keys() == {0}
        assert log.of("pages_lost")[0]["seconds"] > 0
        assert log.of("localized").keys() == ({0} if dies else {0, 1})
        assert (found[1].lost_pages, found[1].error is not None) == (0, dies)
        assert all(one["seconds"] > 0 for one in log.of("localized").values())
    finally:
        host.end_all()


def test_a_folder_that_a_manager_left_which_died_with_its_agent_is_gone_in_the_end(tmp_path: Path) -> None:
    """Its successor has not made it, and is the last one to use it."""
    config = PoolConfig(page_bytes=4096, data_pages=4, tier1_pages=2, tier2_pages=1)
    dead = tmp_path / "rank0"
    dead.mkdir(mode=0o700)
    (dead / "manager.lock").write_text("1\n")
    host = ManagerHost(tmp_path, "test-repairs", config)
    try:
        host.start(0)
    finally:
        host.end_all()
    assert list(tmp_path.iterdir()) == []


class Shell:
    """An agent's shell over a core that only listens."""

    def __init__(self, managers: Any) -> None:
        self.done: list[tuple[int, ...]] = []
        self.pipe = os.pipe()
        core = SimpleNamespace(repair_done=self.repair_done)
        self.log = Log()
        self.shell = AgentShell(
            core,  # type: ignore[arg-type]
            "session",
            SimpleNamespace(dealer=self.pipe[0]),  # type: ignore[arg-type]
            managers,
            HostDevice(),
            Reactor(),
            [],
            lambda _rank: {},
            Path(),
            self.log,
            set(),
        )

    def repair_done(self, rank: int, generation: int, *_: Any) -> list[Any]:
        self.done.append((rank, generation))
        return []

    def close(self) -> None:
        for fd in self.pipe:
            os.close(fd)


@pytest.mark.parametrize(
    ("rest", "groups"),
    [
        ([RepairRank(1, 7, 1, ()), RepairRank(2, 7, 1, ())], [[0, 1, 2]]),
        ([RepairRank(0, 7, 1, ()), RepairRank(1, 7, 1, ())], [[0], [0, 1]]),
        ([RepairRank(1, 8, 1, ()), RepairRank(0, 8, 1, ())], [[0], [1, 0]]),
    ],
    ids=["one recovery", "a rank twice", "two recoveries"],
)
def test_what_the_shell_carries_out_together(rest: list[RepairRank], groups: list[list[int]]) -> None:
    ran = []

    def run(together: list[RepairRank]) -> list[repairs.Done]:
        ran.append([action.rank for action in together])
        return [repairs.Done(action) for action in together]

    node = Shell(Meeting(1))
    try:
        node.shell._repairs = SimpleNamespace(run=run)  # type: ignore[assignment]
        first = RepairRank(0, 7, 1, ())
        node.shell.carry([first, *rest])
        assert ran == groups
        assert node.done == [(action.rank, action.generation) for action in (first, *rest)]
    finally:
        node.close()


def test_the_shells_repairs_meet() -> None:
    node = Shell(Meeting(len(RANKS)))
    try:
        node.shell.carry(actions(*RANKS))
        assert sorted(node.done) == [(rank, 7) for rank in RANKS]
        assert node.log.of("localized").keys() == set(RANKS)
    finally:
        node.close()
