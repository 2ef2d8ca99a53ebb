"""Every manager has an owner and an end, and leaves nothing behind (I-7, case 17)."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from leto_rmp import (
    AllocationSpec,
    Client,
    ConfigError,
    Kind,
    ManagerGone,
    ManagerProcess,
    ManagerStartFailed,
    PoolConfig,
    RmpError,
    Role,
    manager,
    spawn_manager,
)
from leto_rmp.endpoint import Endpoint

PAGE = 4096
OWNER = """
import sys
from leto_rmp import *
manager = spawn_manager(sys.argv[1], "job", 0, PoolConfig(4096, 12, 3, 1), grace_s=float(sys.argv[2]))
print(manager.pid, flush=True)
sys.stdin.readline()
"""


def leto_memory() -> set[tuple[str, str]]:
    """Return the memfds of pools that this process maps, by inode and name."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    return {(line.split()[4], line.split()[5]) for line in lines if "memfd:leto" in line}


def test_stop_leaves_nothing(
    tmp_path: Path, config: PoolConfig, count_fds: Callable[..., int], ended: Callable[..., bool]
) -> None:
    before, mapped = count_fds(), leto_memory()
    manager = spawn_manager(tmp_path / "rank0", "job", 0, config)
    assert manager.alive()
    with Client.connect(manager.socket_path) as client:
        client.attach(Role.WRITER, 0)
        client.allocate([AllocationSpec("a", 5 * PAGE, Kind.RETAINED)])
    assert manager.stop() == 0
    assert manager.stop() == 0
    assert not manager.alive()
    assert list(tmp_path.iterdir()) == []
    assert count_fds() == before
    assert leto_memory() <= mapped
    assert ended(manager.pid, 0)
    with pytest.raises(ManagerGone):
        Client.connect(manager.socket_path)


def test_a_full_disk_is_told_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first bytes that a manager writes are those of its lock file."""

    def full(*_arguments: object) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(
        ManagerStartFailed, match=r"/rank0 cannot hold .*: No space left on device\. Make room"
    ):
        Endpoint(tmp_path / "rank0")
    assert list(tmp_path.iterdir()) == []


def test_kill_leaves_nothing(tmp_path: Path, config: PoolConfig, count_fds: Callable[..., int]) -> None:
    before = count_fds()
    manager = spawn_manager(tmp_path / "rank0", "job", 0, config)
    assert manager.kill() == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []
    assert count_fds() == before


def test_a_manager_that_does_not_answer_sigterm_is_killed(tmp_path: Path, config: PoolConfig) -> None:
    manager = spawn_manager(tmp_path / "rank0", "job", 0, config)
    os.kill(manager.pid, signal.SIGSTOP)
    assert manager.stop(timeout_s=0.1) == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_mapped_memory_outlives_a_killed_manager(tmp_path: Path, config: PoolConfig) -> None:
    with spawn_manager(tmp_path / "rank0", "job", 0, config) as manager:
        client = Client.connect(manager.socket_path)
        client.attach(Role.WRITER, 0)
        pages = client.allocate([AllocationSpec("a", PAGE, Kind.RETAINED)])["a"].pages
        pages[:] = 8
        manager.kill()
        pages[0, 0] = 9
        assert pages[0, :2].tolist() == [9, 8]
        client.close()


def test_a_job_removes_only_its_own_files(tmp_path: Path, config: PoolConfig) -> None:
    """Case 17: a neighbour's manager, a neighbour's file, and a file in our own folder stay."""
    (tmp_path / "note").write_text("neighbour")
    ours = spawn_manager(tmp_path / "job-a" / "rank0", "a", 0, config)
    with spawn_manager(tmp_path / "job-b" / "rank0", "b", 0, config) as theirs:
        (tmp_path / "job-a" / "rank0" / "log").write_text("keep")
        ours.stop()
        assert os.listdir(tmp_path / "job-a" / "rank0") == ["log"]
        with Client.connect(theirs.socket_path) as client:
            assert client.job_id == "b"
        assert (tmp_path / "note").read_text() == "neighbour"


def test_a_folder_that_was_there_stays(tmp_path: Path, config: PoolConfig) -> None:
    for end in ("stop", "kill"):
        getattr(spawn_manager(tmp_path, "job", 0, config), end)()
        assert tmp_path.is_dir()
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_signals_end_it_cleanly(
    tmp_path: Path, config: PoolConfig, number: signal.Signals, ended: Callable[..., bool]
) -> None:
    manager = spawn_manager(tmp_path / "rank0", "job", 0, config)
    os.kill(manager.pid, number)
    assert ended(manager.pid)
    assert list(tmp_path.iterdir()) == []
    assert manager.stop() == 0


@pytest.mark.parametrize("how", ["kill", "finish"])
def test_it_ends_with_its_owner(
    worker: Callable[..., object], tmp_path: Path, how: str, ended: Callable[..., bool]
) -> None:
    owner = worker(OWNER, tmp_path / "rank0", 0.0)
    pid = int(owner.line())
    getattr(owner, how)()
    assert ended(pid)
    assert list(tmp_path.iterdir()) == []


def test_it_outlives_its_owner_for_the_grace_period(
    worker: Callable[..., object], tmp_path: Path, ended: Callable[..., bool]
) -> None:
    owner = worker(OWNER, tmp_path / "rank0", 3600)
    pid = int(owner.line())
    with Client.connect(tmp_path / "rank0/manager.sock") as client:
        owner.kill()
        client.attach(Role.WRITER, 0)
        client.allocate([AllocationSpec("a", PAGE, Kind.RETAINED)])
        with Client.connect(tmp_path / "rank0/manager.sock") as late:
            assert late.status().pid == pid
        os.kill(pid, signal.SIGTERM)
    assert ended(pid)
    assert list(tmp_path.iterdir()) == []


def test_the_grace_period_ends(
    worker: Callable[..., object], tmp_path: Path, ended: Callable[..., bool]
) -> None:
    owner = worker(OWNER, tmp_path / "rank0", 0.2)
    pid = int(owner.line())
    owner.kill()
    assert ended(pid)
    assert list(tmp_path.iterdir()) == []


def test_another_process_can_be_the_owner(
    worker: Callable[..., object],
    tmp_path: Path,
    spawn: Callable[..., ManagerProcess],
    config: PoolConfig,
    ended: Callable[..., bool],
) -> None:
    owner = worker("import sys; sys.stdin.readline()")
    manager = spawn(config, owner_pid=owner.pid)
    with Client.connect(manager.socket_path) as client:
        client.status()
    owner.kill()
    assert ended(manager.pid)


def test_a_dead_owner_is_no_owner(worker: Callable[..., object], tmp_path: Path, config: PoolConfig) -> None:
    gone = worker("pass")
    gone.finish()
    with pytest.raises(ManagerStartFailed, match="has ended already"):
        spawn_manager(tmp_path / "rank0", "job", 0, config, owner_pid=gone.pid)
    command = [sys.executable, "-m", "leto_rmp.manager", "--directory", str(tmp_path / "rank0")]
    command += ["--job-id", "j", "--rank", "0", "--owner-pid", str(gone.pid)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "has ended already" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("owner", [("--owner-pid", "-5"), ("--owner-fd", "999")])
def test_a_wrong_owner_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], owner: tuple[str, str]
) -> None:
    assert manager.main(["--directory", str(tmp_path / "rank0"), "--job-id", "j", "--rank", "0", *owner]) == 1
    said = capfd.readouterr().err
    assert "expected a living process or an inherited pidfd of one, found " in said
    assert said.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_it_can_be_started_by_hand(tmp_path: Path, eventually: Callable[..., None]) -> None:
    command = [sys.executable, "-m", "leto_rmp.manager", "--directory", str(tmp_path / "rank0")]
    command += [
        "--job-id",
        "j",
        "--rank",
        "3",
        "--owner-pid",
        str(os.getpid()),
        "--config",
        '{"page_bytes": 4096}',
    ]
    with subprocess.Popen(command) as process:
        try:
            eventually((tmp_path / "rank0/manager.sock").exists, "the socket is there, and so it listens")
            with Client.connect(tmp_path / "rank0/manager.sock") as client:
                assert (client.rank, client.config.page_bytes, client.config.data_pages) == (3, 4096, 1024)
            process.terminate()
            assert process.wait(120) == 0
        finally:
            process.kill()


def test_a_start_that_fails_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: PoolConfig
) -> None:
    before = os.listdir("/proc/self/fd")
    with pytest.raises(ConfigError, match="no backend is called 'abacus'"):
        spawn_manager(tmp_path / "rank0", "job", 0, PoolConfig(4096, 12, 3, 1, backend="abacus"))
    script = tmp_path / "python"
    script.write_text("#!/bin/sh\nexec sleep 600\n")
    script.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(script))
    with pytest.raises(ManagerStartFailed, match=r"not ready within 0\.0 s"):
        spawn_manager(tmp_path / "rank0", "job", 0, config, timeout_s=0.0)
    script.write_text("#!/bin/sh\necho the interpreter is broken >&2\nexit 3\n")
    with pytest.raises(ManagerStartFailed, match=r"ended before it was ready.*the interpreter is broken"):
        spawn_manager(tmp_path / "rank0", "job", 0, config)
    assert os.listdir(tmp_path) == ["python"]
    assert len(os.listdir("/proc/self/fd")) == len(before)


def test_a_bad_configuration_is_refused_by_the_process(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "leto_rmp.manager", "--directory", str(tmp_path / "rank0")]
    command += [
        "--job-id",
        "j",
        "--rank",
        "0",
        "--owner-pid",
        str(os.getpid()),
        "--config",
        '{"page_bytes": 3}',
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert "page_bytes" in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_it_is_light(manager: ManagerProcess) -> None:
    """Neither numpy nor torch is loaded: the manager is up in the time that Python needs."""
    maps = Path(f"/proc/{manager.pid}/maps").read_text()
    assert "msgspec" in maps
    assert "numpy" not in maps
    assert "torch" not in maps


def test_errors_are_one_family() -> None:
    import leto_rmp

    names = [name for name in leto_rmp.__all__ if isinstance(getattr(leto_rmp, name), type)]
    errors = [name for name in names if issubclass(getattr(leto_rmp, name), Exception)]
    assert len(errors) > 15
    assert all(issubclass(getattr(leto_rmp, name), RmpError) for name in errors)
    with pytest.raises(AttributeError):
        _ = leto_rmp.no_such_name
