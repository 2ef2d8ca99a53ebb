"""A manager outlives its owner and is taken over with its memory; never from a living owner (I-4, I-7)."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from leto_rmp import (
    AllocationSpec,
    Client,
    Kind,
    ManagerGone,
    ManagerProcess,
    NotWriter,
    OtherManager,
    OwnerAlive,
    PoolConfig,
    Role,
    StaleGeneration,
    StaleSocket,
    WriterAlive,
    adopt_manager,
)
from leto_rmp.ownership import Ownership, Party

PAGE = 4096
SPEC = AllocationSpec("a", PAGE, Kind.RETAINED)
OWNER = """
import sys
from leto_rmp import *
folder, grace, guardian = sys.argv[1], float(sys.argv[2]), int(sys.argv[3]) or None
config = PoolConfig(4096, 12, 3, 1)
manager = spawn_manager(folder, "job", 0, config, grace_s=grace, guardian_pid=guardian, job_epoch=7)
print(manager.pid, flush=True)
sys.stdin.readline()
"""
WRITER = """
import sys
from leto_rmp import *
client = Client.connect(sys.argv[1])
client.attach(Role.WRITER, int(sys.argv[2]))
client.allocate([AllocationSpec("a", 4096, Kind.RETAINED)])["a"].pages[:] = 9
print("wrote", flush=True)
sys.stdin.readline()
"""
WAIT = "import sys; print('here', flush=True); sys.stdin.readline()"


@pytest.fixture
def orphan(worker: Callable[..., object], tmp_path: Path) -> Iterator[Callable[..., int]]:
    """A manager whose owner was killed after a writer of generation 4 had written and died."""
    made: list[int] = []

    def make(grace_s: float = 3600.0, guardian_pid: int = 0) -> int:
        owner = worker(OWNER, tmp_path / "rank0", grace_s, guardian_pid)
        made.append(os.pidfd_open(pid := int(owner.line())))
        writer = worker(WRITER, tmp_path / "rank0/manager.sock", 4)
        writer.line()
        writer.kill()
        owner.kill()
        return pid

    yield make
    for pidfd in made:  # a test that fails leaves no manager behind for its hour of grace
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)


def test_the_memory_is_taken_over_with_the_manager(
    orphan: Callable[..., int], tmp_path: Path, count_fds: Callable[..., int], ended: Callable[..., bool]
) -> None:
    pid = orphan()
    before = count_fds()
    adopted = adopt_manager(tmp_path / "rank0", "job", 0, grace_s=0.0)
    assert (adopted.pid, adopted.status.job_epoch, adopted.status.generation) == (pid, 7, 4)
    assert adopted.alive()
    with Client.connect(adopted.socket_path) as client:
        assert client.status().owner_pid == os.getpid()
        client.attach(Role.OBSERVER, 5)
        with pytest.raises(StaleGeneration):
            client.become_writer(4)
        client.become_writer(5)
        assert client.allocate([SPEC])["a"].pages[0, :2].tolist() == [9, 9]
    assert adopted.kill() is None
    assert adopted.kill() is None
    assert ended(pid, 0)
    assert list(tmp_path.iterdir()) == []
    assert count_fds() == before


def test_a_writer_that_outlived_its_agent_is_still_fenced(
    worker: Callable[..., object], tmp_path: Path
) -> None:
    """I-4: taking the manager over does not make its living writer harmless."""
    owner = worker(OWNER, tmp_path / "rank0", 3600, 0)
    owner.line()
    writer = worker(WRITER, tmp_path / "rank0/manager.sock", 4)
    writer.line()
    owner.kill()
    adopted = adopt_manager(tmp_path / "rank0", "job", 0)
    try:
        with Client.connect(adopted.socket_path) as client:
            client.attach(Role.CONTROL, 5)
            with pytest.raises(WriterAlive):
                client.fence(5, wait_s=0.05)
            writer.kill()
            client.fence(5, wait_s=120.0)
    finally:
        adopted.kill()


def test_it_ends_with_its_new_owner(
    orphan: Callable[..., int], worker: Callable[..., object], tmp_path: Path, ended: Callable[..., bool]
) -> None:
    pid = orphan(grace_s=3600.0)
    code = "import sys; from leto_rmp import *; adopt_manager(sys.argv[1], 'job', 0, grace_s=0.0);" + WAIT
    successor = worker(code, tmp_path / "rank0")
    successor.line()
    assert not ended(pid, 0)
    successor.kill()
    assert ended(pid)
    assert list(tmp_path.iterdir()) == []


def test_the_guardian_ends_the_grace_period(
    orphan: Callable[..., int], worker: Callable[..., object], tmp_path: Path, ended: Callable[..., bool]
) -> None:
    guardian = worker(WAIT)
    guardian.line()
    pid = orphan(guardian_pid=guardian.pid)
    with Client.connect(tmp_path / "rank0/manager.sock") as client:
        assert client.status().guardian_pid == guardian.pid
    guardian.kill()
    assert ended(pid)
    assert list(tmp_path.iterdir()) == []


def test_what_is_not_ours_is_not_taken(
    orphan: Callable[..., int], worker: Callable[..., object], tmp_path: Path, ended: Callable[..., bool]
) -> None:
    guardian = worker(WAIT)
    guardian.line()
    pid = orphan(guardian_pid=guardian.pid)
    for job, rank, of in (("other", 0, guardian.pid), ("job", 1, guardian.pid), ("job", 0, os.getpid())):
        with pytest.raises(OtherManager, match="not ours to take"):
            adopt_manager(tmp_path / "rank0", job, rank, guardian_pid=of)
    with pytest.raises(OtherManager):
        adopt_manager(tmp_path / "rank0", "job", 0)
    assert not ended(pid, 0)
    os.kill(pid, 9)
    assert ended(pid)
    with pytest.raises(StaleSocket):
        adopt_manager(tmp_path / "rank0", "job", 0, guardian_pid=guardian.pid)
    with pytest.raises(ManagerGone):
        adopt_manager(tmp_path / "nowhere", "job", 0)


def test_a_living_owner_keeps_its_manager(
    spawn: Callable[..., ManagerProcess], worker: Callable[..., object], config: PoolConfig, tmp_path: Path
) -> None:
    owner = worker(WAIT)
    owner.line()
    manager = spawn(config, owner_pid=owner.pid)
    with pytest.raises(OwnerAlive, match=f"process {owner.pid} owns this manager and lives"):
        adopt_manager(tmp_path / "rank0", "job", 0)
    with Client.connect(manager.socket_path) as client:
        client.attach(Role.OBSERVER, 0)
        with pytest.raises(NotWriter):
            client.own(0.0)
        assert client.status().owner_pid == owner.pid


def test_an_owner_that_leaves_does_not_end_it_but_its_death_does(
    worker: Callable[..., object], tmp_path: Path, ended: Callable[..., bool]
) -> None:
    code = OWNER.replace("sys.stdin.readline()", "manager.leave(); manager.leave(); sys.stdin.readline()")
    owner = worker(code, tmp_path / "rank0", 3600, 0)
    pid = int(owner.line())
    status, _, errors = owner.finish()
    assert (status, errors) == (0, "")
    assert not ended(pid, 0)
    adopt_manager(tmp_path / "rank0", "job", 0).kill()
    assert ended(pid)


def test_ownership_decides_when_it_is_over() -> None:
    gone: set[int] = set()
    ownership = Ownership(Party(1, 11), Party(2, 12), 5.0, gone.__contains__)
    with pytest.raises(OwnerAlive):
        ownership.take(Party(3, 13), 1.0)
    assert ownership.take(Party(1, 14), 6.0) is None, "the owner itself may change the grace period"
    gone.add(11)
    ownership.owner_died(100.0)
    assert ownership.stop_at_s == 106.0
    assert ownership.take(Party(3, 13), 1.0) == Party(1, 11)
    assert ownership.stop_at_s is None
    gone.add(13)
    assert ownership.take(Party(3, 15), 1.0) == Party(3, 13), "the same number, another process"
    ownership.guardian_died(200.0)
    assert ownership.stop_at_s == 200.0
