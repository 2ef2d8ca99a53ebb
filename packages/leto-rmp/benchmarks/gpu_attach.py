"""How long it takes to make, attach, take over and repair retained GPU memory.

    python packages/leto-rmp/benchmarks/gpu_attach.py --output docs/benchmarks/rmp-h200

writes rmp-h200.json (every sample) and rmp-h200.md (medians and spread). Every attach is a fresh process
with a GPU context of its own, as a shadow has, and the clock starts when that context is there. Needs one
GPU with 15 GiB free (100 GiB with --large).
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import select
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from leto_rmp import (
    AllocationSpec,
    Client,
    Kind,
    ManagerProcess,
    PageRef,
    PoolConfig,
    Role,
    __version__,
    spawn_manager,
)
from leto_rmp.driver import Driver, open_driver
from leto_rmp.gpu_memory import free_bytes

PAGE = 2 << 20
CONFIG = PoolConfig(backend="cuda")
TIMEOUT_S = 120.0
Samples = dict[str, list[float]]


# -- the processes that attach -------------------------------------------------------------------


def timed(parts: dict[str, float], names: list[str]) -> None:
    """Add up the time of the driver's calls; costs time itself, so totals are measured without."""
    for name in names:
        real: Callable[..., Any] = getattr(Driver, name)

        def wrapped(*arguments: Any, _real: Callable[..., Any] = real, _name: str = name) -> Any:
            started_s = time.perf_counter()
            try:
                return _real(*arguments)
            finally:
                parts[_name] = parts.get(_name, 0.0) + time.perf_counter() - started_s

        setattr(Driver, name, wrapped)


def child(role: str, socket_path: str, generation: int) -> None:
    """Attach, tell how long it took, wait to be told to write, wait to be killed."""
    told: dict[str, float] = {}
    if role == "parts":
        timed(told, ["map_fd", "set_access"])
    driver = open_driver()
    started_s = time.perf_counter()
    with driver.context(0):
        driver.synchronize()
    told["context"] = time.perf_counter() - started_s
    client = Client.connect(socket_path, timeout_s=TIMEOUT_S)
    client.attach(Role.WRITER if role == "writer" else Role.OBSERVER, generation)
    started_s = time.perf_counter()
    if role == "writer":
        pages = int(sys.stdin.readline())
        started_s = time.perf_counter()
        client.allocate([AllocationSpec("arena", pages * PAGE, Kind.RETAINED)])
    else:
        client.allocations()
    told["attach"] = time.perf_counter() - started_s
    print(json.dumps(told), flush=True)
    for line in sys.stdin:
        started_s = time.perf_counter()
        getattr(client, line.strip())(*([generation] if line.strip() == "become_writer" else []))
        print(json.dumps({line.strip(): time.perf_counter() - started_s}), flush=True)


class Child:
    """A process of this script, or of the one that a subclass names."""

    script = __file__

    def __init__(self, role: str, manager: ManagerProcess, generation: int) -> None:
        command = [sys.executable, self.script, "--child", role, str(manager.socket_path), str(generation)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def say(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def told(self) -> dict[str, float]:
        assert self.process.stdout is not None
        ready, _, _ = select.select([self.process.stdout], [], [], TIMEOUT_S)
        line = self.process.stdout.readline() if ready else ""
        if not line:
            self.kill()
            raise SystemExit("a child process said nothing")
        found: dict[str, float] = json.loads(line)
        return found

    def kill(self) -> float:
        """SIGKILL; return the seconds until its pidfd fires."""
        pidfd = os.pidfd_open(self.process.pid)
        started_s = time.perf_counter()
        self.process.send_signal(signal.SIGKILL)
        select.select([pidfd], [], [], TIMEOUT_S)
        waited_s = time.perf_counter() - started_s
        os.close(pidfd)
        self.process.wait(TIMEOUT_S)
        return waited_s


# -- the measurement -----------------------------------------------------------------------------


def measure(pages: int, runs: int, folder: Path) -> tuple[Samples, dict[str, float]]:
    """Return samples by name, in seconds, and single numbers."""
    samples: Samples = {}
    facts: dict[str, float] = {}

    def note(**found: float) -> None:
        for name, value in found.items():
            samples.setdefault(name, []).append(value)

    def clock(name: str, call: Callable[[], object]) -> None:
        started_s = time.perf_counter()
        call()
        note(**{name: time.perf_counter() - started_s})

    uuid = open_driver().device(0).uuid
    free = free_bytes(uuid) or 0
    with spawn_manager(folder / f"rank{pages}", "benchmark", 0, CONFIG, timeout_s=TIMEOUT_S) as manager:
        facts["manager_mib"] = (free - (free_bytes(uuid) or 0)) / (1 << 20)
        writer = Child("writer", manager, 0)
        writer.say(str(pages))
        note(allocate_first=writer.told()["attach"])
        for _ in range(runs):
            shadow = Child("shadow", manager, 1)
            note(**shadow.told())
            shadow.kill()
        parts = Child("parts", manager, 1)
        told = parts.told()
        facts["map_ms"], facts["set_access_ms"] = told["map_fd"] * 1000, told["set_access"] * 1000
        parts.kill()
        agent = Client.connect(manager.socket_path, timeout_s=TIMEOUT_S)
        agent.attach(Role.CONTROL, 0)
        for generation in range(1, runs + 1):
            shadow = Child("shadow", manager, generation)
            shadow.told()
            note(kill_to_pidfd=writer.kill())
            clock("fence", partial(agent.fence, generation, wait_s=10.0))
            refs = [PageRef("arena", "data", (generation * 97 + i) % pages) for i in range(16)]
            clock("inject_16", partial(agent.inject_lose, refs, generation))
            clock("localize", partial(agent.localize, read=False))
            clock("remap_16", agent.remap)
            shadow.say("become_writer")
            note(**shadow.told())
            writer = shadow
        for _ in range(min(3, runs)):
            clock("localize_read", partial(agent.localize, read=True))
        facts["kept_fds"] = agent.status().kept_fds
        agent.close()
        writer.kill()
    return samples, facts


NAMES = {
    "allocate_first": "manager creates and exports all pages, first writer maps and zeroes them",
    "attach": "a fresh process attaches: descriptors, import, map, access",
    "kill_to_pidfd": "SIGKILL of the writer until its pidfd fires",
    "fence": "fence after that",
    "become_writer": "takeover by a shadow that mapped ahead; 16 replaced pages mapped, host pages pinned",
    "inject_16": "lose 16 pages on purpose (helper process)",
    "localize": "localize by handles",
    "remap_16": "replace 16 pages",
    "localize_read": "localize by reading every page (helper process)",
    "context": "GPU context of a process, not part of the above",
}


def table(samples: Samples) -> str:
    """A row for each name, of samples in seconds."""
    rows = ["| what | median | min | max | runs |", "| --- | ---: | ---: | ---: | ---: |"]
    for name, found in samples.items():
        values = [value * 1000 for value in found]
        middle = statistics.median(values)
        rows.append(f"| {name} | {middle:.1f} ms | {min(values):.1f} | {max(values):.1f} | {len(values)} |")
    return "\n".join(rows)


def publish(result: dict[str, Any], text: str, output: Path | None) -> None:
    """Print the page; write it and every sample beside each other."""
    print(text)
    if output:
        output.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        output.with_suffix(".md").write_text(text)


def machine() -> dict[str, str]:
    """Name what this ran on."""
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "-i", "0"]
    gpu = ""
    if shutil.which(query[0]):
        gpu = subprocess.run(query, capture_output=True, text=True, check=False).stdout.strip()
    processor = next(
        (
            line.split(":")[1].strip()
            for line in Path("/proc/cpuinfo").read_text().splitlines()
            if "model name" in line
        ),
        platform.machine(),
    )
    return {
        "gpu": gpu or open_driver().device(0).name,
        "processor": f"{processor}, {os.cpu_count()} cores",
        "kernel": platform.release(),
        "python": platform.python_version(),
        "leto-rmp": __version__,
        "date": datetime.date.today().isoformat(),
    }


def markdown(result: dict[str, Any]) -> str:
    """The page of a result."""
    text = "# Retained GPU memory: make, attach, take over, repair\n\n"
    text += "\n".join(f"* {key}: {value}" for key, value in result["machine"].items())
    text += "\n* script: `packages/leto-rmp/benchmarks/gpu_attach.py`; every sample is in the JSON file\n"
    text += "\nRows with 1 run are single measurements without a spread; those with 3 show an order of "
    text += "magnitude.\n"
    for pool in result["pools"]:
        pages, facts = pool["pages"], pool["facts"]
        samples = pool["samples_s"]
        named = {label: samples[name] for name, label in NAMES.items() if samples.get(name)}
        text += f"\n## {pages} pages, {pages * PAGE / (1 << 30):.0f} GiB\n\n{table(named)}\n\n"
        text += (
            f"Within one attach: import and map {facts['map_ms']:.0f} ms, access "
            f"{facts['set_access_ms']:.0f} ms.\n\nGPU memory of the manager before its first page: "
            f"{facts['manager_mib']:.0f} MiB. Descriptors that it keeps: {facts['kept_fds']:.0f}.\n"
        )
    return text


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="path without suffix; default: print only")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--pages", type=int, default=7168, help="data pages of 2 MiB (7168: 14 GiB)")
    parser.add_argument("--large", action="store_true", help="once more with 100 GiB (51,200 pages)")
    parser.add_argument("--child", nargs=3, metavar=("ROLE", "SOCKET", "GENERATION"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child[0], arguments.child[1], int(arguments.child[2]))
        return
    facts = {**machine(), "handles": f"{CONFIG.gpu_pages_per_handle} pages each"}
    result: dict[str, Any] = {"machine": facts, "command": " ".join(sys.argv[1:]), "pools": []}
    with tempfile.TemporaryDirectory() as folder:
        for pages, runs in [(arguments.pages, arguments.runs)] + ([(51200, 1)] if arguments.large else []):
            samples, facts = measure(pages, runs, Path(folder))
            result["pools"].append({"pages": pages, "samples_s": samples, "facts": facts})
    publish(result, markdown(result), arguments.output)


if __name__ == "__main__":
    main()
