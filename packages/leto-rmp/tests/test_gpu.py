"""What only a GPU can show: tensors, kernels in flight, contexts, pinned copies. Skipped without a device."""

from __future__ import annotations

import os
import select
import signal
from collections.abc import Callable

import numpy as np
import pytest

from leto_rmp import AllocationSpec, Client, Interleave, Kind, ManagerProcess, PoolConfig, Role
from leto_rmp.driver import open_driver
from leto_rmp.gpu_memory import free_bytes

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("gpu")]

PAGE = 2 << 20
CONFIG = PoolConfig(PAGE, 12, 3, 1, backend="cuda")
ARENA = AllocationSpec("arena", 24 * PAGE, Kind.RETAINED, Interleave(3, 2))
Start = Callable[..., ManagerProcess]
Attach = Callable[..., Client]


@pytest.fixture
def manager(spawn: Start) -> ManagerProcess:
    """Override: a manager of GPU pages."""
    return spawn(CONFIG, timeout_s=60.0)


def test_the_manager_has_no_context(spawn: Start) -> None:
    """A context alone takes hundreds of MiB."""
    device = open_driver().device(0)
    before = free_bytes(device.uuid)
    manager = spawn(CONFIG, timeout_s=60.0)
    with Client.connect(manager.socket_path) as client:
        client.attach(Role.WRITER, 0)
        assert client.device_uuid == device.uuid
        from leto_rmp import protocol as p

        client._request(p.Allocate(specs=(ARENA,)), p.Described)  # the manager's part alone
        after = free_bytes(device.uuid)
        assert before is not None
        assert after is not None
        assert before - after < 24 * PAGE + (64 << 20)


def test_tensors_are_the_pages(manager: ManagerProcess, attach: Attach) -> None:
    torch = pytest.importorskip("torch")
    a = attach(Role.WRITER, 0).allocate([ARENA])["arena"]
    flat = a.tensor(torch.float32)
    assert (flat.device.type, flat.data_ptr(), flat.numel()) == ("cuda", a.address, 24 * PAGE // 4)
    assert not flat.any()
    flat.copy_(torch.arange(flat.numel(), device="cuda"))
    half = a.tensor(torch.bfloat16, offset_bytes=PAGE, numel=8)
    assert half.data_ptr() == a.address + PAGE
    pages = torch.as_tensor(a.pages, device="cuda")
    assert (pages.shape, pages.data_ptr()) == ((24, PAGE), a.address)
    again = torch.from_dlpack(flat)
    assert again.data_ptr() == a.address
    torch.cuda.synchronize()
    raw = np.frombuffer(a.pages.read(PAGE, 64), np.float32)
    assert raw.tolist() == [PAGE // 4 + i for i in range(16)]


def test_a_view_outlives_the_client(manager: ManagerProcess) -> None:
    torch = pytest.importorskip("torch")
    client = Client.connect(manager.socket_path)
    client.attach(Role.WRITER, 0)
    flat = client.allocate([ARENA])["arena"].tensor(torch.int64)
    flat.fill_(7)
    observer = Client.connect(manager.socket_path)
    observer.attach(Role.OBSERVER, 1)
    view = observer.allocations()["arena"].tensor(torch.int64)
    observer.close()
    assert bool((view == 7).all())
    free = torch.cuda.mem_get_info()[0]
    client.close()
    manager.stop()
    assert bool((view == 7).all()), "also past its manager"
    del flat, view
    torch.cuda.synchronize()
    assert torch.cuda.mem_get_info()[0] >= free + 24 * PAGE


def test_pinned_pages_copy_to_the_device(manager: ManagerProcess) -> None:
    """In pieces: a copy of a whole group never crosses from one into another."""
    torch = pytest.importorskip("torch")
    torch.cuda.init()  # before that, torch takes nothing for pinned
    with Client.connect(manager.socket_path, pin_piece_bytes=PAGE) as client:
        client.attach(Role.WRITER, 0)
        a = client.allocate([ARENA])["arena"]
        assert client.pinning.pinned_bytes == (2 * 3 + 2) * PAGE
        assert a.tier1 is not None
        a.tier1[0], a.tier1[1] = 5, 6
        for group in (0, 1):
            host = torch.from_numpy(a.tier1[group])
            assert host.is_pinned()
            device = host.to("cuda", non_blocking=True)
            torch.cuda.synchronize()
            assert bool((device == 5 + group).all())
            host.copy_(device * 2, non_blocking=True)
            torch.cuda.synchronize()
        assert (a.tier1[1] == 12).all()


SPIN = '''
import ctypes, sys
from leto_rmp import *
from leto_rmp.driver import open_driver
PTX = b"""
.version 7.0
.target sm_75
.address_size 64
.visible .entry spin(.param .u64 where, .param .u64 ns)
{
    .reg .pred %more;
    .reg .b64 %a, %ns, %start, %now, %count;
    ld.param.u64 %a, [where];
    ld.param.u64 %ns, [ns];
    mov.u64 %start, %globaltimer;
    mov.u64 %count, 0;
AGAIN:
    add.u64 %count, %count, 1;
    st.volatile.global.u64 [%a], %count;
    membar.sys;
    mov.u64 %now, %globaltimer;
    sub.u64 %now, %now, %start;
    setp.lt.u64 %more, %now, %ns;
    @%more bra AGAIN;
    ret;
}
\\0"""
client = Client.connect(sys.argv[1])
client.attach(Role.WRITER, 0)
a = client.allocate([AllocationSpec("arena", 24 * (2 << 20), Kind.RETAINED, Interleave(3, 2))])["arena"]
driver = open_driver()
api = driver._api
with driver.context(0):
    module = driver._check(api.cuModuleLoadData(PTX), "load")
    spin = driver._check(api.cuModuleGetFunction(module, b"spin"), "function")
    arguments = ((a.address, 10_000_000_000), (ctypes.c_uint64, ctypes.c_uint64))
    driver._check(api.cuLaunchKernel(spin, 1, 1, 1, 1, 1, 1, 0, 0, arguments, 0), "launch")
    print("spinning", flush=True)
    driver.synchronize()
print("the kernel ended before the kill", flush=True)
'''


def test_nothing_is_written_after_the_fence(
    manager: ManagerProcess, attach: Attach, worker: Callable[..., object]
) -> None:
    """A kernel of 10 s runs when its process is killed: the pidfd fires after its last write (I-4)."""
    writer = worker(SPIN, manager.socket_path)
    assert writer.line() == "spinning"
    shadow, agent = attach(Role.OBSERVER, 1), attach(Role.CONTROL, 1)
    a = shadow.allocations()["arena"]

    def counter() -> int:
        return int.from_bytes(a.pages.read(0, 8), "little")

    first = counter()
    while counter() == first:  # the kernel's own 10 s bound this
        pass
    os.kill(writer.pid, signal.SIGKILL)
    agent.fence(1, wait_s=10.0)
    shadow.become_writer(1)
    last = counter()
    for _ in range(50):
        select.select([], [], [], 0.01)
        assert counter() == last, "a write after the fence"
    assert last > 0


def test_a_dead_writers_memory_is_waited_for(
    manager: ManagerProcess, attach: Attach, worker: Callable[..., object]
) -> None:
    """Case 4: it held most of the GPU, with a kernel queued; retained pages stay, the rest becomes free."""
    hog = SPIN.replace(
        "    print(",
        "    free, total = driver.memory()\n"
        "    driver._check(api.cuMemAlloc(free - (1 << 30)), 'hog')\n"
        "    print(",
    )
    writer = worker(hog, manager.socket_path)
    assert writer.line() == "spinning"
    agent = attach(Role.CONTROL, 1)
    need = (free_bytes(agent.device_uuid) or 0) + (8 << 30)
    os.kill(writer.pid, signal.SIGKILL)
    agent.fence(1, wait_s=10.0)
    assert agent.wait_free(need, 20.0) < 20
    assert attach(Role.WRITER, 1).allocations()["arena"].page_count == 24
