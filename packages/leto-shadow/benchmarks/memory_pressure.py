"""Figure 13 of the paper: shadows under memory pressure, one failure in every phase, on one GPU.

    python memory_pressure.py run --out DIR            # about two minutes on a GPU
    python memory_pressure.py render DIR/oom-free.json --out docs/benchmarks --name oom-free-h200

A real job (`leto run --backend cuda`, one rank) trains `pressure_load.py`. Its memory demand goes through
five phases: low, medium (no room for a shadow at L3), high (none for L2), and low twice. In each phase,
when the shadow stands where the preinitialization controller let it, the active trainer is killed with
SIGKILL. Recorded: memory of the active trainer and of all processes by NVML, the shadow's level, every
reclaim, every recovery. What is claimed is checked: no allocation fails, each failure is recovered in
place, and the shadow stands at the expected level.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from leto_shadow.events import EventReader

HERE = Path(__file__).parent
MIB = 1 << 20
RESERVE_MIB = 128
SAMPLE_S = 0.05
CALM = ("--hang-min-s", "120", "--hang-initial-s", "240")  # nothing hangs here, however slow the machine is
Sample = tuple[float, int, dict[int, int]]


class Nvml:
    """Memory of the first GPU, by process."""

    def __init__(self) -> None:
        from leto_shadow.nvml import Nvml as Library

        self._library = Library()
        self.gpu = self._library.gpus()[0]
        self.name = self.gpu.name

    def look(self) -> tuple[int, dict[int, int]]:
        seen = self._library.look(self.gpu.uuid)
        return seen.total_bytes - seen.free_bytes, dict(seen.processes or {})


class FakeGpu:
    """The same of the tests' simulated device."""

    name = "simulated device"

    def __init__(self, path: Path, total: int) -> None:
        self._path = path
        path.write_bytes(struct.pack("<QQ", total, 0) + bytes(64 * 24))

    def look(self) -> tuple[int, dict[int, int]]:
        data = self._path.read_bytes()
        holders = [struct.unpack_from("<QQQ", data, 16 + 24 * index) for index in range(64)]
        alive = {pid: held for pid, held, dead in holders if held and not dead}
        return sum(alive.values()), alive


class Job:
    """The running job: its events, and the samples taken beside it."""

    def __init__(
        self, folder: Path, meter: Any, extra: list[str], load: list[str], room_mib: int, ranks: int = 1
    ) -> None:
        self.folder, self.meter, self.room = folder, meter, room_mib * MIB
        self.run_dir = folder / "run"
        self.events: list[dict[str, Any]] = []
        self.samples: list[Sample] = []
        self.kills: list[dict[str, Any]] = []
        self._reader = EventReader(self.run_dir / "events.jsonl")
        self._over = threading.Event()
        for rank in range(ranks):
            self.demand(0.6 * self.room, rank)
        command = [
            sys.executable,
            "-m",
            "leto_shadow.cli",
            "run",
            "--nproc-per-node",
            str(ranks),
            "--run-dir",
        ]
        command += [str(self.run_dir), "--decide", "pressure_load:decide", *extra]
        command += ["--preinit-settle-s", "1", "--preinit-reserve-mib", str(RESERVE_MIB)]
        command += [
            str(HERE / "pressure_load.py"),
            "--folder",
            str(folder),
            "--room-mib",
            str(room_mib),
            *load,
        ]
        self.process = subprocess.Popen(command)
        self._sampler = threading.Thread(target=self._sample, daemon=True)
        self._sampler.start()

    def _sample(self) -> None:
        while not self._over.wait(SAMPLE_S):
            total, processes = self.meter.look()
            self.samples.append((time.time(), total, processes))

    def demand(self, headroom_bytes: float, rank: int = 0) -> None:
        """From the next iteration on, leave so much of the room of ``rank`` free at the peak."""
        new = self.folder / "demand.new"
        new.write_text(json.dumps({"headroom_bytes": int(headroom_bytes)}))
        new.rename(self.folder / f"demand-{rank}.json")

    def wait(self, event: str, timeout_s: float = 40.0, since: float = 0.0, **fields: Any) -> dict[str, Any]:
        """The first event of that name after ``since`` (Unix seconds) with these fields."""
        deadline = time.monotonic() + timeout_s
        while True:
            self.events += self._reader.poll()
            for one in self.events:
                matches = one["event"] == event and one["t"] > since
                if matches and all(one.get(name) == value for name, value in fields.items()):
                    return one
            if self.process.poll() is not None:
                raise RuntimeError(f"the job has ended while {event} {fields} was awaited")
            if time.monotonic() > deadline:
                raise TimeoutError(f"no event {event} {fields} within {timeout_s:g} s")
            time.sleep(0.02)

    def kill(self, phase: str, level: int, rank: int = 0) -> float:
        """SIGKILL the active trainer of ``rank``; return when all ranks train again."""
        active = json.loads((self.folder / f"active-{rank}.json").read_text())
        started = time.time()
        os.kill(active["pid"], signal.SIGKILL)
        recovered = self.wait("recovered", 90.0, started)
        again = self.wait("metrics", 60.0, recovered["t"])
        self.kills.append(
            {
                "phase": phase,
                "level": level,
                "killed_t": started,
                "pid": active["pid"],
                "recovered_s": recovered["t"] - started,
                "next_iteration_s": again["t"] - started,
                "source": recovered["source"],
                "breakdown": recovered["breakdown"],
            }
        )
        return float(recovered["t"])

    def footprints(self) -> dict[int, int]:
        """What a shadow held at each level when it reached it, as the agent's watch saw it."""
        held: dict[int, int] = {}
        for one in self.events:
            if one["event"] == "shadow_memory" and "bytes" in one:
                held[one["level"]] = int(one["bytes"])
        return held

    def stop(self) -> int:
        """End the training in order; return the exit code of `leto run`."""
        (self.folder / "stop").touch()
        code = self.process.wait(60.0)
        self._over.set()
        self._sampler.join(5.0)
        self.events += self._reader.poll()
        return code

    def abandon(self) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30.0)
            except subprocess.TimeoutExpired:
                self.process.kill()


def phases(job: Job, hold_s: float, assumed: dict[int, int]) -> dict[int, int]:
    """Go through the five phases; return the footprints that the demand was chosen by."""
    low = 0.6 * job.room
    since = job.wait("started", 120.0)["t"]

    def at(level: int, hold: float = hold_s) -> None:
        job.wait("shadow_level", 60.0, since, level=level)
        time.sleep(hold)

    at(3)
    held = {**assumed, **job.footprints()}
    since = job.kill("low", 3)

    at(3, 0.5)
    medium = (held[2] + RESERVE_MIB * MIB + held[3]) / 2
    job.demand(medium)
    since = job.wait("reclaimed", 40.0, since)["t"]
    at(2)
    since = job.kill("medium", 2)

    at(2, 0.5)
    job.demand(0.35 * held[2])
    since = job.wait("reclaimed", 40.0, since)["t"]
    at(1)
    job.demand(low)  # the pressure subsides with this failure
    since = job.kill("high", 1)

    at(1)
    since = job.kill("low again", 1)

    at(3)
    job.kill("low, expected", 3)
    return held


def summary(job: Job, code: int, held: dict[int, int], seconds: float) -> dict[str, Any]:
    """Everything that the page and the picture need."""
    events = job.events
    failures = [one for one in events if one["event"] == "failure"]
    start = job.samples[0][0]
    promoted = {one["generation"]: one["t"] for one in events if one["event"] == "promoted"}
    last = json.loads((job.folder / "active-0.json").read_text())["pid"]
    since = {pid: promoted[g] for g, pid in enumerate([*(one["pid"] for one in job.kills), last])}
    series = []
    for t, total, processes in job.samples:
        active = sum(held_by for pid, held_by in processes.items() if t >= since.get(pid, t + 1))
        series.append([round(t - start, 3), total, active])
    levels = [
        [round(one["t"] - start, 3), 0 if one["event"] in ("promoted", "reclaimed") else one["level"]]
        for one in events
        if one["event"] in ("shadow_level", "promoted", "reclaimed")
    ]
    reclaims = [
        {**{name: one[name] for name in RECLAIM_FIELDS}, "t": round(one["t"] - start, 3)}
        for one in events
        if one["event"] == "reclaimed"
    ]
    iterations = [one for one in events if one["event"] == "metrics"]
    return {
        "device": job.meter.name,
        "room_bytes": job.room,
        "seconds": seconds,
        "exit_code": code,
        "footprint_bytes": held,
        "iterations": len(iterations),
        "iterations_lost": sum(one["iterations_lost"] for one in events if one["event"] == "recovered"),
        "allocation_failures": sum(one["event"] == "out_of_memory" for one in events),
        "unexpected_failures": len(failures) - len(job.kills),
        "reclaims": reclaims,
        "recoveries": [{**one, "t": round(one.pop("killed_t") - start, 3)} for one in job.kills],
        "levels": levels,
        "allowed": [
            [round(one["t"] - start, 3), one["level"], one["reason"]]
            for one in events
            if one["event"] == "shadow_allowed"
        ],
        "memory": series,
    }


RECLAIM_FIELDS = ("level", "bytes", "request_bytes", "free_bytes", "waited_s", "satisfied", "iteration")


def check(result: dict[str, Any]) -> list[str]:
    """What is claimed and does not hold; empty if all does."""
    wrong = []
    if result["exit_code"] != 0:
        wrong.append(f"leto run ended with {result['exit_code']}")
    if result["allocation_failures"] or not all(one["satisfied"] for one in result["reclaims"]):
        wrong.append("an allocation failed")
    if result["unexpected_failures"]:
        wrong.append(f"{result['unexpected_failures']} failures beside the injected ones")
    if [one["level"] for one in result["recoveries"]] != [3, 2, 1, 1, 3]:
        wrong.append("a phase is missing")
    if any(one["source"] != "in-place" for one in result["recoveries"]):
        wrong.append("a recovery did not happen in place")
    if sorted({one["level"] for one in result["reclaims"]}) != [2, 3]:
        wrong.append("L3 and L2 were not both reclaimed")
    return wrong


def run(arguments: argparse.Namespace) -> int:
    """Run the job in a folder of its own; keep its events, its log and the result."""
    with tempfile.TemporaryDirectory(prefix="leto-pressure-") as folder:
        return run_in(Path(folder), arguments)


def run_in(folder: Path, arguments: argparse.Namespace) -> int:
    out: Path = arguments.out
    out.mkdir(parents=True, exist_ok=True)
    extra, load, room_mib = ["--backend", "cuda"], [], 8192
    assumed: dict[int, int] = {}
    if arguments.simulated:
        meter: Any = FakeGpu(folder / "gpu.0", 20480 * MIB)
        os.environ.update(LETO_OOM_HOOK="always", FAKE_GPU=str(folder / "gpu"))
        extra, load = ["--page-bytes", "4096", *CALM], ["--simulated", str(arguments.simulated)]
        assumed = {2: 950 * MIB, 3: 1450 * MIB}
        for level, held in assumed.items():
            extra += [f"--preinit-l{level}-mib", str(held // MIB)]
    else:
        meter = Nvml()
    started = time.monotonic()
    job = Job(folder, meter, extra, load, room_mib)
    try:
        held = phases(job, arguments.hold_s, assumed)
        code = job.stop()
    finally:
        job.abandon()
        for path in (job.run_dir / "events.jsonl", *(job.run_dir / "logs").glob("rank0.log")):
            if path.exists():
                (out / path.name).write_bytes(path.read_bytes())
    result = summary(job, code, held, time.monotonic() - started)
    if not arguments.simulated:
        import torch

        result["software"] = {
            "torch": torch.__version__,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        }
    (out / "oom-free.json").write_text(json.dumps(result) + "\n")
    wrong = check(result)
    print(json.dumps({name: result[name] for name in ("recoveries", "reclaims", "allowed")}, indent=1))
    print("checked:", "; ".join(wrong) or "everything holds", flush=True)
    return 1 if wrong else 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(dest="command", required=True)
    one = commands.add_parser("run", help="run the job and record it")
    one.add_argument("--out", type=Path, required=True)
    one.add_argument(
        "--hold-s", type=float, default=3.0, help="how long a phase lasts once its level is reached"
    )
    one.add_argument("--simulated", type=Path, help="library of the tests' simulated device")
    two = commands.add_parser("render", help="write the page and the picture of a recorded run")
    two.add_argument("result", type=Path)
    two.add_argument("--out", type=Path, required=True)
    two.add_argument("--name", default="oom-free")
    arguments = parser.parse_args()
    if arguments.command == "run":
        return run(arguments)
    from pressure_page import render

    render(json.loads(arguments.result.read_text()), arguments.out, arguments.name)
    return 0


if __name__ == "__main__":
    sys.exit(main())
