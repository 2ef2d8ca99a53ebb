"""The memory check: every cgroup on the way up counts, and nothing half-allocated stays behind."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from leto_rmp import AllocationSpec, Client, Kind, ManagerProcess, NotEnoughMemory, PoolConfig, Role
from leto_rmp.host import HostBackend
from leto_rmp.memory import RESERVE_BYTES, available, require_memory
from leto_rmp.pool import Pool

GIB = 1 << 30


class FakeRoot:
    """A /proc and /sys of our own."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.write("proc/meminfo", f"MemTotal: 1 kB\nMemAvailable: {64 * GIB // 1024} kB\n")
        self.write("proc/self/cgroup", "")
        self.write("proc/self/mountinfo", "")

    def write(self, path: str, text: object) -> None:
        where = self.root / path
        where.parent.mkdir(parents=True, exist_ok=True)
        where.write_text(f"{text}\n" if text != "" else "")

    def v2(self, cgroup: str, mount_root: str = "/") -> None:
        self.write("proc/self/cgroup", f"0::{cgroup}")
        self.write("proc/self/mountinfo", f"1 0 0:1 {mount_root} /sys/fs/cgroup rw - cgroup2 cgroup2 rw")

    def group(self, path: str, limit: object, current: int, inactive_file: int = 0) -> None:
        self.write(f"sys/fs/cgroup/{path}/memory.max", limit)
        self.write(f"sys/fs/cgroup/{path}/memory.current", current)
        self.write(f"sys/fs/cgroup/{path}/memory.stat", f"anon 5\ninactive_file {inactive_file}")


@pytest.fixture
def fake(tmp_path: Path) -> FakeRoot:
    return FakeRoot(tmp_path)


def test_without_cgroups_the_machine_bounds(fake: FakeRoot) -> None:
    budget = available(fake.root)
    assert budget.available_bytes == 64 * GIB
    assert "MemAvailable" in budget.source


def test_a_parent_can_be_the_tightest(fake: FakeRoot) -> None:
    fake.v2("/pod/container")
    fake.group("pod/container", "max", GIB)
    fake.group("pod", 10 * GIB, 7 * GIB)
    budget = available(fake.root)
    assert budget.available_bytes == 3 * GIB
    assert budget.source.endswith("/sys/fs/cgroup/pod")


def test_idle_file_cache_counts_as_free(fake: FakeRoot) -> None:
    fake.v2("/pod")
    fake.group("pod", 10 * GIB, 9 * GIB, inactive_file=4 * GIB)
    assert available(fake.root).available_bytes == 5 * GIB


def test_usage_above_the_limit_is_no_negative_room(fake: FakeRoot) -> None:
    fake.v2("/pod")
    fake.group("pod", GIB, 2 * GIB)
    assert available(fake.root).available_bytes == 0


def test_a_container_that_sees_the_path_of_the_host(fake: FakeRoot) -> None:
    fake.v2("/docker/abc", mount_root="/docker/abc")
    fake.group(".", 2 * GIB, GIB)
    assert available(fake.root).available_bytes == GIB


def test_a_cgroup_outside_our_namespace(fake: FakeRoot) -> None:
    fake.v2("/../other")
    fake.group(".", 2 * GIB, GIB)
    assert available(fake.root).available_bytes == GIB


def test_cgroup_v1(fake: FakeRoot) -> None:
    fake.write("proc/self/cgroup", "5:cpu,cpuacct:/x\n4:memory:/job\n0::/")
    mount = "1 0 0:1 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"
    fake.write("proc/self/mountinfo", f"{mount}\n2 0 0:2 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu")
    for path, limit in (("", 0x7FFFFFFFFFFFF000), ("job/", 3 * GIB)):
        fake.write(f"sys/fs/cgroup/memory/{path}memory.limit_in_bytes", limit)
        fake.write(f"sys/fs/cgroup/memory/{path}memory.usage_in_bytes", GIB)
        fake.write(f"sys/fs/cgroup/memory/{path}memory.stat", "total_inactive_file 0")
    assert available(fake.root).available_bytes == 2 * GIB


def test_the_error_names_what_bounds(fake: FakeRoot) -> None:
    fake.v2("/pod")
    fake.group("pod", GIB, GIB // 2)
    budget = available(fake.root)
    require_memory(GIB // 2 - RESERVE_BYTES, budget)
    with pytest.raises(NotEnoughMemory, match=r"memory\.max - memory\.current of cgroup") as caught:
        require_memory(GIB // 2 - RESERVE_BYTES + 1, budget)
    assert caught.value.details["have"] == GIB // 2


def test_this_machine_has_a_budget() -> None:
    assert 0 < available().available_bytes < 1 << 50


@pytest.mark.parametrize("nbytes", [1 << 45, 1 << 61])
def test_a_huge_request_fails_at_the_start(
    manager: ManagerProcess, attach: Callable[..., Client], count_fds: Callable[..., int], nbytes: int
) -> None:
    client = attach(Role.WRITER)
    before = count_fds(manager.pid)
    small = AllocationSpec("small", 4096, Kind.TRANSACTION)
    with pytest.raises(NotEnoughMemory, match="leaves"):
        client.allocate([small, AllocationSpec("huge", nbytes, Kind.TRANSACTION)])
    status = client.status()
    assert (status.allocations, status.allocated_bytes, status.handles) == ((), 0, 0)
    assert count_fds(manager.pid) == before
    assert client.allocate([small])["small"].created


@pytest.mark.parametrize("fails_at", range(4))
def test_nothing_half_allocated_stays(
    fails_at: int, monkeypatch: pytest.MonkeyPatch, count_fds: Callable[..., int]
) -> None:
    """The kernel may still say no after the check: at every one of the sections."""
    pool = Pool(PoolConfig(4096, 12, 3, 1), HostBackend())
    specs = [AllocationSpec("a", 9000, Kind.RETAINED), AllocationSpec("b", 9000, Kind.TRANSACTION)]
    before = count_fds()
    real, calls = os.posix_fallocate, iter(range(100))

    def refuse(fd: int, offset: int, length: int) -> None:
        if next(calls) == fails_at:
            raise OSError(28, "No space left on device")
        real(fd, offset, length)

    with monkeypatch.context() as patch:
        patch.setattr(os, "posix_fallocate", refuse)
        with pytest.raises(NotEnoughMemory, match="could not allocate"):
            pool.create(specs)
    assert pool.specs == ()
    assert pool.handle_count() == 0
    assert count_fds() == before
    pool.create(specs)
    assert len(pool.specs) == 2
    pool.backend.close()
