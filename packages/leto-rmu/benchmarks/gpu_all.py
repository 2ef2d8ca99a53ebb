"""All of the proof on GPUs by one command a call: kills, aborts, figure 12, every test marked `gpu`,
measurements.

On one GPU, three calls of less than ten minutes each; ``--list`` says what each is expected to take:

    python packages/leto-rmu/benchmarks/gpu_all.py --suffix h200 --limit 560 --bundle 1.tar.gz \\
        --stages place kills aborts figure12 rmp
    python packages/leto-rmu/benchmarks/gpu_all.py --suffix h200 --limit 560 --bundle 2.tar.gz \\
        --stages place rmu ec shadow repair bench table1 sim
    python packages/leto-rmu/benchmarks/gpu_all.py --suffix h200 --limit 560 --bundle 3.tar.gz \\
        --stages place ranks pressure megatron

On two GPUs, two calls:

    python packages/leto-rmu/benchmarks/gpu_all.py --gpus 2 --suffix h200 --limit 560 --bundle 1.tar.gz \\
        --stages place kills aborts figure12 rmp rmu ec shadow bench table1
    python packages/leto-rmu/benchmarks/gpu_all.py --gpus 2 --suffix h200 --limit 560 --bundle 2.tar.gz \\
        --stages place ranks repair pressure sim megatron

Needs nothing installed but what the packages need (torch, CuPy, cuda-bindings, msgspec, pytest,
pytest-timeout, hypothesis; megatron-core and what leto-megatron needs for `sim` and `megatron`): the
sources of this checkout are what runs. Kernels in machine code have to be there already: builds in place
make them, on any machine that has an nvcc of CUDA 13.3 or later (`python packages/leto-rmu/hatch_build.py`,
and leto-ec's CMake). ``--list`` says, without touching a GPU, which steps there are, when they would begin
and end, and which files a build has made here, for they do not travel with a checkout.

Steps come in the order of what is least proven. Those that start many processes on a GPU run one at a time,
others beside them on another GPU: a page that was measured so says nothing of a machine with nothing else
on it. Each step has a limit and a log of its own; at its limit it is asked to end (SIGTERM, which makes the
proof scripts keep what they have proven), and killed a few seconds later. One that fails or is stopped does
not keep the others from running. After every step, and every few seconds, the pages made so far, the logs
and the summary are put into the bundle anew, so that whoever stops this script loses next to nothing. It
ends with status 0 if every step that ran ended well and none was left out.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.util
import json
import os
import select
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from proof_steps import ROOT, STAGES, USUAL, Block, Queue, Step, all_steps, foreseen

TAIL = 12  # lines of a log that are shown of a step that failed
BUILT = ("*.so", "*.cubin", "build.json")
GRACE_S = 12.0  # from the signal that asks a step to end to SIGKILL
KEEP_S = 20.0  # the bundle is made anew at least so often
ENOUGH_S = 40.0  # a step that keeps what it has proven begins if so much time is left


@dataclass
class Outcome:
    """``status``: exit status; None: not begun. ``stopped``: at its limit."""

    step: Step
    status: int | None = None
    spent_s: float = 0.0
    stopped: bool = False
    last: str = ""
    gpus: str = ""

    @property
    def word(self) -> str:
        if self.status is None:
            return "not begun: no time was left"
        if self.stopped:
            return "stopped at its limit"
        return "ok" if self.status == 0 else f"failed, status {self.status}"


# --- the place ------------------------------------------------------------------------------------------
def check_place(device: str) -> int:
    """Print what is here; 1 if a thing is missing without which the other steps mean nothing."""
    wrong = []
    names = [
        "numpy",
        "torch",
        "msgspec",
        "pytest",
        "pytest_timeout",
        "hypothesis",
        "leto_ec",
        "leto_rmp",
        "leto_rmu",
    ]
    for name in [*names, *(("cupy", "cuda.bindings.driver", "leto_rmu.cuda") if device == "cuda" else ())]:
        begun = time.monotonic()
        try:
            module = importlib.import_module(name)
        except ImportError as error:
            wrong.append(f"{name} does not import: {error}")
        else:
            print(
                f"{name} {getattr(module, '__version__', '')}, {time.monotonic() - begun:.1f} s", flush=True
            )
    if wrong:
        print("\n".join(wrong))
        return 1
    if importlib.util.find_spec("megatron") is None:
        print("no megatron-core on the path: the stages sim and megatron will skip or fail")
    import leto_ec

    print("leto_ec", leto_ec.info(), flush=True)
    if not leto_ec.info()["native"]:
        print("warning: leto-ec has no native kernel for the processor: recovery is slow")
    if device == "cuda":
        import torch

        from leto_rmp import PoolConfig
        from leto_rmu import AdamW, Segment, UpdatePlan
        from leto_rmu.cuda import CudaUpdater, TorchMemory, info
        from leto_rmu.cuda.kernels import MACHINE_CODE

        begun = time.monotonic()
        print(torch.cuda.get_device_name(), torch.cuda.get_device_capability(), info(), flush=True)
        config = PoolConfig(page_bytes=1 << 16, data_pages=32, tier1_pages=16, tier2_pages=1)
        plan = UpdatePlan([Segment("a", 5 << 14)], AdamW(), config=config, grad_numel=5 << 14, scheme="slots")
        library = CudaUpdater(TorchMemory(config), plan, lambda: None).memory.library
        print(f"{library}, {time.monotonic() - begun:.1f} s", flush=True)
        if library is None or library.build != MACHINE_CODE:
            print("the kernels that were measured are not here: run packages/leto-rmu/hatch_build.py first")
            return 1
        print("registers of the lean kernel:", library.function("leto_rmu_adamw_f32_lean").num_regs)
    return 0


def made_here() -> list[Path]:
    """Files that a build made in this checkout, and that version control leaves out."""
    found = (path for pattern in BUILT for path in ROOT.glob(f"packages/leto-*/src/**/{pattern}"))
    return sorted(path.relative_to(ROOT) for path in found)


# --- running --------------------------------------------------------------------------------------------
def environment(gpus: Sequence[str]) -> dict[str, str]:
    sources = [str(path) for path in sorted(ROOT.glob("packages/*/src"))]
    path = os.pathsep.join([*sources, *filter(None, [os.environ.get("PYTHONPATH")])])
    found = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}
    if gpus:
        found["CUDA_VISIBLE_DEVICES"] = ",".join(gpus)
    return found


@dataclass
class Running:
    """A step under way. It has a process group of its own, which is ended with it."""

    step: Step
    block: Block
    log: Path
    until: float
    asked: bool = False
    begun: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.step.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=environment(self.block.gpus),
                process_group=0,
            )
        self.pidfd = os.pidfd_open(self.process.pid)

    def ask(self) -> None:
        """Ask it to end with what it has."""
        signal.pidfd_send_signal(self.pidfd, self.step.stop)
        self.asked, self.until = True, time.monotonic() + GRACE_S

    def finish(self) -> Outcome:
        """End what is left of it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        os.close(self.pidfd)
        status, spent_s = self.process.wait(), time.monotonic() - self.begun
        lines = self.log.read_text(errors="replace").strip().splitlines()
        last = lines[-1] if lines else ""
        return Outcome(self.step, status, spent_s, self.asked, last, ",".join(self.block.gpus))


class Run:
    """Runs steps until all are done or time is up."""

    def __init__(
        self,
        steps: Sequence[Step],
        logs: Path,
        limit_s: float,
        bundle: Path | None,
        gpus: Sequence[str] = ("",),
    ) -> None:
        self.steps, self.logs, self.bundle = list(steps), logs, bundle
        self.queue = Queue(steps, gpus)
        self.begun = self.kept = time.monotonic()
        self.until = self.begun + limit_s
        self.running: list[Running] = []
        self.outcomes: list[Outcome] = []
        logs.mkdir(parents=True, exist_ok=True)

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.begun:6.1f} s] {text}", flush=True)

    def all(self) -> list[Outcome]:
        """Outcomes of all steps, in the order in which they ended."""
        try:
            while self.begin() or self.running:
                self.wait()
        finally:
            self.stop()
        return self.outcomes

    def stop(self) -> None:
        """End what is under way: nothing, unless this script was asked to end."""
        for r in self.running:
            r.ask()
        until = time.monotonic() + GRACE_S
        while self.running:
            left = max(0.0, until - time.monotonic())
            ready, _, _ = select.select([r.pidfd for r in self.running], [], [], left)
            for r in [r for r in self.running if r.pidfd in ready or not ready]:
                self.running.remove(r)
                self.ended(r.finish(), r.log)

    def begin(self) -> bool:
        """Begin what may begin; False: nothing did."""
        begun = False
        while (block := self.queue.next()) is not None:
            for step in block.steps:
                left = self.until - time.monotonic()
                if left < (
                    min(step.seconds, ENOUGH_S) if step.keeps else max(step.seconds, step.limit_s / 4)
                ):
                    self.ended(Outcome(step))  # it would hardly come to its end
                    continue
                where = f" on GPU {', '.join(block.gpus)}" if any(block.gpus) else ""
                self.say(f"{step.name}: begins{where}; predicted: {step.seconds:.0f} s; {step.predicted}")
                log = self.logs / f"{step.name.replace(' ', '-').replace(',', '')}.log"
                until = time.monotonic() + min(left, step.limit_s)
                self.running.append(Running(step, block, log, until))
                begun = True
            if all(r.block is not block for r in self.running):
                self.queue.ended(block)
        return begun

    def wait(self) -> None:
        """Until a step ends, or has to be ended, or the bundle is to be made anew."""
        now = time.monotonic()
        left = min(*(r.until for r in self.running), self.kept + KEEP_S, now + KEEP_S) - now
        ready, _, _ = select.select([r.pidfd for r in self.running], [], [], max(0.0, left))
        now = time.monotonic()
        for r in list(self.running):
            if r.pidfd not in ready and now >= r.until and not r.asked:
                self.say(f"{r.step.name}: at its limit; is asked to end")
                r.ask()
            elif r.pidfd in ready or now >= r.until:
                self.running.remove(r)
                outcome = r.finish()
                if all(other.block is not r.block for other in self.running):
                    self.queue.ended(r.block)
                self.ended(outcome, r.log)
        if now >= self.kept + KEEP_S:
            self.keep()

    def ended(self, outcome: Outcome, log: Path | None = None) -> None:
        self.outcomes.append(outcome)
        self.say(f"{outcome.step.name}: {outcome.word}, {outcome.spent_s:.1f} s; {outcome.last[:300]}")
        if log is not None and outcome.status != 0:
            lines = log.read_text(errors="replace").rstrip().splitlines()[-TAIL:]
            print("\n".join(f"    | {line[:400]}" for line in lines), flush=True)
        if outcome.step.stage == "place" and outcome.status:
            self.say("the place is not as it must be: nothing else is run")
            self.outcomes += [Outcome(step) for block in self.queue.waiting for step in block.steps]
            self.queue.waiting.clear()
        self.keep()

    def keep(self) -> None:
        """Write the summary, and everything there is so far into the bundle."""
        self.kept = time.monotonic()
        summary = [
            {
                "name": o.step.name,
                "stage": o.step.stage,
                "outcome": o.word,
                "seconds": round(o.spent_s, 1),
                "predicted": f"{o.step.seconds:.0f} s; {o.step.predicted}",
                "gpus": o.gpus,
                "last": o.last[:500],
                "command": " ".join(o.step.command[1:]),
            }
            for o in self.outcomes
        ]
        (self.logs / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")
        (self.logs / "summary.md").write_text(markdown(summary))
        if self.bundle is None:
            return
        self.bundle.parent.mkdir(parents=True, exist_ok=True)
        partial = self.bundle.with_name(self.bundle.name + ".new")
        with tarfile.open(partial, "w:gz") as tar:
            for path in sorted(self.logs.iterdir()):
                tar.add(path, f"logs/{path.name}")
            begun = [r.step for r in self.running]
            for step in [*(o.step for o in self.outcomes if o.status is not None), *begun]:
                for suffix in (".md", ".json"):
                    path = step.page and step.page.with_suffix(suffix)
                    if path and path.exists():
                        tar.add(path, f"pages/{path.name}")
        partial.replace(self.bundle)


def markdown(summary: Sequence[dict[str, Any]]) -> str:
    lines = ["| step | outcome | seconds | predicted | its last line |", "| --- | --- | ---: | --- | --- |"]
    for row in summary:
        last = row["last"].replace("|", "/")[:160]
        lines.append(f"| {row['name']} | {row['outcome']} | {row['seconds']} | {row['predicted']} | {last} |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--suffix", default="h200", help="of the pages: rmu-kills-SUFFIX and so on")
    add("--pages", type=Path, default=ROOT / "docs" / "benchmarks", help="folder of the pages")
    add("--logs", type=Path, default=ROOT / ".gpu-logs", help="folder of the logs")
    add("--bundle", type=Path, help="one file with pages, logs and summary: NAME.tar.gz")
    add("--limit", type=float, default=560.0, help="seconds for everything")
    add("--stages", nargs="+", choices=STAGES, default=list(USUAL))
    add("--gpus", type=int, default=1, help="how many to use, of those that are visible")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--list", action="store_true", help="say what would run and what builds have made here; run nothing")
    add("--place", action="store_true", help="check this machine and nothing else")
    arguments = parser.parse_args()
    if arguments.place:
        return check_place(arguments.device)
    pages, logs = arguments.pages.resolve(), arguments.logs.resolve()
    steps = [s for s in all_steps(arguments.suffix, pages, arguments.device) if s.stage in arguments.stages]
    gpus = visible(arguments.gpus) if arguments.device == "cuda" else [""]
    if arguments.list:
        print(listed(steps, gpus))
        print("made by builds, not under version control:", *made_here(), sep="\n  ")
        return 0
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))
    bundle = arguments.bundle.resolve() if arguments.bundle else None
    outcomes = Run(steps, logs, arguments.limit, bundle, gpus).all()
    print(f"\n{(logs / 'summary.md').read_text()}")
    return 0 if all(outcome.status == 0 and not outcome.stopped for outcome in outcomes) else 1


def visible(count: int) -> list[str]:
    """The first GPUs of those that this process may see, as CUDA_VISIBLE_DEVICES names them."""
    given = [name for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    found = given or [str(k) for k in range(count)]
    if len(found) < count:
        raise SystemExit(f"{count} GPUs were asked for, CUDA_VISIBLE_DEVICES names {len(found)}")
    return found[:count]


def listed(steps: Sequence[Step], gpus: Sequence[str]) -> str:
    """What would run, from when to when and where, if all took as long as predicted."""
    lines, total = [], 0.0
    for begin, end, block in foreseen(steps, gpus):
        total = max(total, end)
        lines += [
            f"{begin:4.0f} to {begin + step.seconds:4.0f} s  GPU {','.join(block.gpus):4} {step.stage:8} "
            f"{step.name}: at most {step.limit_s:.0f} s; predicted: {step.predicted}"
            for step in block.steps
        ]
    return "\n".join([*lines, f"predicted in all: {total:.0f} s on {len(gpus)} GPU(s)"])


if __name__ == "__main__":
    sys.exit(main())
