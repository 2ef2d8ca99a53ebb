"""How long it takes processes to end that have retained GPU memory mapped: the fence of a recovery.

    python packages/leto-rmp/benchmarks/gpu_ends.py --output docs/benchmarks/rmp-ends-h200

A recovery may not promote a shadow before the last process of the old generation has ended, and the driver
unmaps a dying process's pages one after another. Every process here has a GPU context of its own, and maps
the pages of a real state manager as a shadow does. With several GPUs their processes are killed together,
as the survivors of a rank are. With --handles the most pages are mapped once more in handles of so many
pages each: whether the driver's time goes with handles or with bytes. Needs 16 GiB free on each GPU.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import select
import signal
import sys
import tempfile
import threading
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from gpu_attach import PAGE, TIMEOUT_S, Child, Samples, machine, publish, table

from leto_rmp import AllocationSpec, Client, Kind, PoolConfig, Role, spawn_manager
from leto_rmp.driver import open_driver


# --- the processes --------------------------------------------------------------------------------------
def child(role: str, socket_path: str, generation: int) -> None:
    """Map the pages as an observer, or create them as the writer; say so; wait to be killed."""
    device = int(os.environ["LETO_ENDS_DEVICE"])
    driver = open_driver()
    with driver.context(device):
        driver.synchronize()
    allocation, started_s = None, time.perf_counter()
    if role != "context":
        client = Client.connect(socket_path, timeout_s=TIMEOUT_S)
        client.attach(Role.WRITER if role == "writer" else Role.OBSERVER, generation)
        if role == "writer":
            pages = int(os.environ["LETO_ENDS_PAGES"])
            client.allocate([AllocationSpec("arena", pages * PAGE, Kind.RETAINED)])
        else:
            allocation = client.allocations()["arena"]
    print(json.dumps({"ready": 1.0, "attach": time.perf_counter() - started_s}), flush=True)
    for line in sys.stdin:
        if line.strip() == "unmap" and allocation is not None:
            with driver.context(device):
                started_s = time.perf_counter()
                driver.unmap(allocation.address, allocation.page_count * PAGE)
                print(json.dumps({"unmap": time.perf_counter() - started_s}), flush=True)


class Ending(Child):
    """A process of this script on one GPU."""

    script = __file__

    def __init__(self, role: str, manager: Any, device: int, pages: int = 0) -> None:
        os.environ["LETO_ENDS_DEVICE"], os.environ["LETO_ENDS_PAGES"] = str(device), str(pages)
        super().__init__(role, manager, 0 if role == "writer" else 1)


# --- what NVML knows of a process -----------------------------------------------------------------------
class _Process(ctypes.Structure):
    _fields_ = [
        ("pid", ctypes.c_uint),
        ("used", ctypes.c_ulonglong),
        ("gpu_instance", ctypes.c_uint),
        ("compute_instance", ctypes.c_uint),
    ]


class Nvml:
    """The list of processes of one GPU."""

    def __init__(self, uuid: str) -> None:
        self.library = ctypes.CDLL("libnvidia-ml.so.1")
        assert self.library.nvmlInit_v2() == 0
        self.device = ctypes.c_void_p()
        found = self.library.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(self.device))
        assert found == 0, f"nvmlDeviceGetHandleByUUID: {found}"

    def lists(self, pid: int) -> bool:
        count, found = ctypes.c_uint(256), (_Process * 256)()
        call = self.library.nvmlDeviceGetComputeRunningProcesses_v3
        status = call(self.device, ctypes.byref(count), found)
        assert status == 0, f"nvmlDeviceGetComputeRunningProcesses_v3: {status}"
        return pid in {found[i].pid for i in range(count.value)}


# --- the measurement ------------------------------------------------------------------------------------
def kill(children: list[Ending], apart_s: float = 0.0) -> list[float]:
    """SIGKILL all, the first ``apart_s`` before the others; seconds from the first kill to each end."""
    pidfds = {os.pidfd_open(c.process.pid): c for c in children}
    started_s = time.perf_counter()
    ends: dict[int, float] = {}
    waiting = set(pidfds)
    children[0].process.send_signal(signal.SIGKILL)
    while time.perf_counter() - started_s < apart_s:  # busy: an agent's reaction is not a round number of ms
        pass
    for c in children[1:]:
        c.process.send_signal(signal.SIGKILL)
    while waiting:
        ready, _, _ = select.select(list(waiting), [], [], TIMEOUT_S)
        assert ready, "a process did not end"
        for fd in ready:
            ends[fd] = time.perf_counter() - started_s
            waiting.discard(fd)
    for fd, c in pidfds.items():
        os.close(fd)
        c.process.wait(TIMEOUT_S)
    return [ends[fd] for fd in pidfds]


def watched(nvml: Nvml, victim: Ending) -> tuple[float, float, float]:
    """Seconds from SIGKILL until NVML does not list it, until its pidfd fires; the longest question."""
    pid, gone, longest = victim.process.pid, [0.0], [0.0]
    assert nvml.lists(pid), "NVML does not list the process; are its pids those of another namespace?"
    started_s = time.perf_counter()

    def poll() -> None:
        while time.perf_counter() - started_s < TIMEOUT_S:
            asked_s = time.perf_counter()
            there = nvml.lists(pid)
            longest[0] = max(longest[0], time.perf_counter() - asked_s)
            if not there:
                break
        gone[0] = time.perf_counter() - started_s

    thread = threading.Thread(target=poll)
    thread.start()
    (end,) = kill([victim])
    thread.join(TIMEOUT_S)
    return gone[0], end, longest[0]


def handles_name(pages: int, per_handle: int, gpus: int) -> str:
    """The name of a row."""
    where = "" if gpus == 1 else f" on each of {gpus} GPUs, killed together, the last"
    return f"{pages} pages in handles of {per_handle} ({2 * per_handle} MiB){where}"


def measure(
    pages: list[int], handles: list[int], gpus: int, runs: int, folder: Path, budget_s: float
) -> Samples:
    samples: Samples = {}
    until = time.monotonic() + budget_s

    def note(name: str, *values: float) -> None:
        samples.setdefault(name, []).extend(values)
        print(f"{name}: " + ", ".join(f"{1000 * v:.1f} ms" for v in values), flush=True)

    with ExitStack() as stack:
        managers: dict[tuple[int, int], Any] = {}

        def manage(device: int, n: int, per_handle: int, stack: ExitStack) -> Any:
            """A manager of so many pages, made by a writer that has ended."""
            config = PoolConfig(backend="cuda", device=device, gpu_pages_per_handle=per_handle)
            path = folder / f"rank{device}-{n}-{per_handle}"
            manager = stack.enter_context(
                spawn_manager(path, f"ends-{n}", device, config, timeout_s=TIMEOUT_S)
            )
            writer = Ending("writer", manager, device, n)
            writer.told()
            kill([writer])
            return manager

        most = pages[-1]
        for per_handle in handles:
            with ExitStack() as own:  # one size after the other: together they would need much memory
                some = [manage(device, most, per_handle, own) for device in range(gpus)]
                for _ in range(runs):
                    if time.monotonic() > until:
                        break
                    for used in sorted({1, gpus}):
                        several = [Ending("shadow", some[d], d) for d in range(used)]
                        for c in several:
                            c.told()
                        note(handles_name(most, per_handle, used), max(kill(several)))
                    one = Ending("shadow", some[0], 0)
                    attached = one.told()
                    note(f"attaching {handles_name(most, per_handle, 1)}", attached["attach"])
                    kill([one])
        for device in range(gpus):
            for n in pages if device == 0 else pages[-1:]:
                managers[device, n] = manage(device, n, 1, stack)
        nvml = Nvml(open_driver().device(0).uuid)
        for _ in range(runs):
            if time.monotonic() > until:
                break
            alone = Ending("context", managers[0, most], 0)
            alone.told()
            note("context alone", *kill([alone]))
            for n in pages:
                one = Ending("shadow", managers[0, n], 0)
                one.told()
                note(f"{n} pages", *kill([one]))
            if gpus > 1:
                for apart_s in (0.0, 0.03):
                    several = [Ending("shadow", managers[d, most], d) for d in range(gpus)]
                    for c in several:
                        c.told()
                    name = f"{most} pages on each of {gpus} GPUs, " + (
                        "killed together, the last" if not apart_s else "one 30 ms before, the last"
                    )
                    note(name, max(kill(several, apart_s)))
            one = Ending("shadow", managers[0, most], 0)
            one.told()
            one.say("unmap")
            note(f"{most} pages unmapped by one call", one.told()["unmap"])
            note("end after that", *kill([one]))
            one = Ending("shadow", managers[0, most], 0)
            one.told()
            gone, end, longest = watched(nvml, one)
            note(f"{most} pages, watched: NVML lists the process no more", gone)
            note("its pidfd fires", end)
            note("longest question to NVML meanwhile", longest)
    return samples


def markdown(result: dict[str, Any]) -> str:
    text = "# The end of processes that map retained GPU memory\n\n"
    text += "\n".join(f"* {key}: {value}" for key, value in result["machine"].items())
    text += (
        f"\n* script: `packages/leto-rmp/benchmarks/gpu_ends.py {result['command']}`; every sample is in the "
        "JSON file\n\nTime from SIGKILL until the pidfd fires, unless the row says otherwise. "
        "A page is 2 MiB.\n\n"
    )
    return text + table(result["samples_s"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="path without suffix; default: print only")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--pages", type=int, nargs="+", default=[1024, 8192], help="ascending")
    parser.add_argument(
        "--handles", type=int, nargs="*", default=[], help="pages of a handle, such as 1 4 16 128"
    )
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument(
        "--budget", type=float, default=600.0, help="begin no further run after so many seconds"
    )
    parser.add_argument("--child", nargs=3, metavar=("ROLE", "SOCKET", "GENERATION"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child[0], arguments.child[1], int(arguments.child[2]))
        return
    with tempfile.TemporaryDirectory() as folder:
        samples = measure(
            arguments.pages,
            arguments.handles,
            arguments.gpus,
            arguments.runs,
            Path(folder),
            arguments.budget,
        )
    result = {"machine": machine(), "command": " ".join(sys.argv[1:]), "samples_s": samples}
    publish(result, markdown(result), arguments.output)


if __name__ == "__main__":
    main()
