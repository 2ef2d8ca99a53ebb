"""All of leto-rmu's proof on a GPU by one command: smoke runs, tests, full runs, measurements.

    python packages/leto-rmu/benchmarks/gpu_all.py --suffix h200 --bundle results.tar.gz

Needs nothing installed but what the packages need (torch, CuPy, cuda-bindings, msgspec, pytest,
pytest-timeout, hypothesis): the sources of this checkout are what runs. Kernels in machine code have to be
there already: builds in place make them, on any machine that has an nvcc of CUDA 13.3 or later
(`python packages/leto-rmu/hatch_build.py`, and leto-ec's CMake). ``--list`` says, without touching a GPU,
which steps there are and which files a build has made here, for they do not travel with a checkout.

Steps of a stage run side by side; stages come one after another, the most important first. Each step has a
limit and a log of its own; one that fails or is stopped does not keep the others from running. After every
step the pages made so far, the logs and the summary are put into the bundle anew, so that whoever stops this
script loses the steps under way and nothing else. It ends with status 0 if every step that ran ended well and
none was left out.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
TESTS = "packages/leto-rmu/tests"
STAGES = ("place", "smoke", "tests", "full", "repair", "bench", "table1")
TAIL = 12  # lines of a log that are shown of a step that failed
CRASHES = f"{TESTS}/test_cuda_updater.py::test_every_crash_point_with_losses"
BUILT = ("*.so", "*.cubin", "build.json")


@dataclass(frozen=True)
class Step:
    """``predicted``: what was expected before it ran on a GPU; ``page``: file of results, without suffix."""

    name: str
    stage: str
    command: tuple[str, ...]
    limit_s: float
    predicted: str
    page: Path | None = None


@dataclass
class Outcome:
    """``status``: exit status; None: not begun. ``stopped``: at its limit."""

    step: Step
    status: int | None = None
    spent_s: float = 0.0
    stopped: bool = False
    last: str = ""

    @property
    def word(self) -> str:
        if self.status is None:
            return "not begun: no time was left"
        if self.stopped:
            return "stopped at its limit"
        return "ok" if self.status == 0 else f"failed, status {self.status}"


# --- steps ----------------------------------------------------------------------------------------------
def script(name: str, *options: str) -> tuple[str, ...]:
    return (sys.executable, str(HERE / name), *options)


def tests(*selection: str) -> tuple[str, ...]:
    # Warnings of libraries of another release are no failure here.
    options = ("-v", "-m", "gpu", "-p", "no:cacheprovider", "-W", "default")
    return (sys.executable, "-m", "pytest", *options, *selection)


def all_steps(suffix: str, pages: Path, device: str) -> list[Step]:
    """Every step, in order; over the host backend those that need no GPU."""

    def page(name: str) -> Path:
        return pages / f"rmu-{name}-{suffix}"

    def full(stage: str, name: str, limit_s: float, predicted: str, *options: str) -> Step:
        out = page(name)
        command = script(f"gpu_{name}.py", "--device", device, "--output", str(out), *options)
        return Step(name, stage, command, limit_s, predicted, out)

    def smoke(name: str, predicted: str) -> Step:
        return Step(
            f"smoke {name}", "smoke", script(f"gpu_{name}.py", "--device", device, "--smoke"), 90.0, predicted
        )

    def crashes(name: str) -> Step:
        return Step(
            f"crash points, {name}", "tests", tests(f"{CRASHES}[cuda-{name}]"), 250.0, "1 passed; 60 to 200 s"
        )

    found = [
        Step(
            "place",
            "place",
            script("gpu_all.py", "--place", "--device", device),
            60.0,
            "15 s, mostly imports",
        ),
        smoke("kills", "exact; 20 s"),
        smoke("aborts", "exact, one trapping kernel; 18 s, of which the compiler 5"),
        smoke("figure12", "RMP alone goes wrong at iteration 9, RMU nowhere; 18 s"),
        smoke("repair", "exact; 12 s"),
    ]
    if device == "cpu":
        return found
    rest = (f"{TESTS}/test_cuda_kill.py", f"{TESTS}/test_regrade.py", f"{TESTS}/test_cuda_updater.py")
    return [
        *found,
        Step("kernel", "tests", tests(f"{TESTS}/test_cuda_fused.py"), 170.0, "all passed; 60 s"),
        *(crashes(name) for name in ("slots adamw", "slots sgd", "adamw", "sgd", "muon")),
        Step(
            "others",
            "tests",
            tests(*rest, "-k", "not every_crash_point"),
            170.0,
            "14 passed, 2 skipped; 135 s",
        ),
        full(
            "full",
            "kills",
            210.0,
            "all exact, 200 kills of AdamW; recovery 0.15 to 0.3 s; 190 s with 32 cores",
            *("--runs", "6", "--others", "10", "--seconds", "170"),
        ),
        full(
            "full",
            "aborts",
            205.0,
            "all exact; aborts of the optimizer under slots and those of leto-ec in trapping kernels; 165 s",
            *("--seconds", "45"),
        ),
        full("full", "figure12", 125.0, "RMP alone wrong from iteration 9 on, RMU equal in every bit; 70 s"),
        full("repair", "repair", 100.0, "localize 30 ms, vote 64 ms, recover 45 ms; 60 s"),
        Step(
            "updater",
            "bench",
            script("gpu_updater.py", "--groups", "6", "--output", str(page("updater"))),
            90.0,
            "kernel 12.3, 10.8, 11.1 ms at 240, 480, 960 pages, lean 10.9, 10.7, 11.1; fused 8.6; 45 s",
            page("updater"),
        ),
        Step(
            "table 1",
            "table1",
            script("gpu_table1.py", "--kernel", "lean", "--output", str(page("table1-lean"))),
            150.0,
            "update phase 0.7 ms longer than without, 0.07 % of an iteration; 100 s",
            page("table1-lean"),
        ),
    ]


# --- the place ------------------------------------------------------------------------------------------
def check_place(device: str) -> int:
    """Print what is here; 1 if a thing is missing without which the other steps mean nothing."""
    import importlib

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
def environment() -> dict[str, str]:
    sources = [str(path) for path in sorted(ROOT.glob("packages/*/src"))]
    path = os.pathsep.join([*sources, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}


@dataclass
class Running:
    """A step under way. It has a process group of its own, which is ended with it."""

    step: Step
    log: Path
    until: float
    begun: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                self.step.command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=ROOT,
                env=environment(),
                process_group=0,
            )
        self.pidfd = os.pidfd_open(self.process.pid)

    def finish(self, stopped: bool) -> Outcome:
        """End what is left of it."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        os.close(self.pidfd)
        status = self.process.wait()
        lines = self.log.read_text(errors="replace").strip().splitlines()
        return Outcome(self.step, status, time.monotonic() - self.begun, stopped, lines[-1] if lines else "")


class Run:
    """Runs steps, stage after stage, until all are done or time is up."""

    def __init__(self, steps: Sequence[Step], logs: Path, limit_s: float, bundle: Path | None) -> None:
        self.steps, self.logs, self.bundle = list(steps), logs, bundle
        self.begun = time.monotonic()
        self.until = self.begun + limit_s
        self.outcomes: list[Outcome] = []
        logs.mkdir(parents=True, exist_ok=True)

    def say(self, text: str) -> None:
        print(f"[{time.monotonic() - self.begun:6.1f} s] {text}", flush=True)

    def all(self) -> list[Outcome]:
        """Outcomes of all steps, in the order in which they ended."""
        for stage in dict.fromkeys(step.stage for step in self.steps):
            self.stage([step for step in self.steps if step.stage == stage])
            if stage == "place" and any(outcome.status for outcome in self.outcomes):
                self.say("the place is not as it must be: nothing else is run")
                for step in self.steps:
                    if step.stage != "place":
                        self.ended(Outcome(step))
                break
        return self.outcomes

    def stage(self, steps: Iterable[Step]) -> None:
        """Steps side by side."""
        running: list[Running] = []
        for step in steps:
            now = time.monotonic()
            if self.until - now < step.limit_s / 2:  # it would hardly come to its end
                self.ended(Outcome(step))
                continue
            self.say(f"{step.name}: begins; predicted: {step.predicted}")
            log = self.logs / f"{step.name.replace(' ', '-').replace(',', '')}.log"
            running.append(Running(step, log, min(self.until, now + step.limit_s)))
        try:
            while running:
                left = min(r.until for r in running) - time.monotonic()
                ready, _, _ = select.select([r.pidfd for r in running], [], [], max(0.0, left))
                now = time.monotonic()
                for r in [r for r in running if r.pidfd in ready or now >= r.until]:
                    running.remove(r)
                    self.ended(r.finish(stopped=r.pidfd not in ready), r.log)
        finally:
            for r in running:
                r.finish(stopped=True)

    def ended(self, outcome: Outcome, log: Path | None = None) -> None:
        self.outcomes.append(outcome)
        self.say(f"{outcome.step.name}: {outcome.word}, {outcome.spent_s:.1f} s; {outcome.last[:300]}")
        if log is not None and outcome.status != 0:
            lines = log.read_text(errors="replace").rstrip().splitlines()[-TAIL:]
            print("\n".join(f"    | {line[:400]}" for line in lines), flush=True)
        self.keep()

    def keep(self) -> None:
        """Write the summary, and everything there is so far into the bundle."""
        summary = [
            {
                "name": o.step.name,
                "stage": o.step.stage,
                "outcome": o.word,
                "seconds": round(o.spent_s, 1),
                "predicted": o.step.predicted,
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
            for outcome in self.outcomes:
                for suffix in (".md", ".json"):
                    path = outcome.step.page and outcome.step.page.with_suffix(suffix)
                    if outcome.status is not None and path and path.exists():
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
    add("--limit", type=float, default=570.0, help="seconds for everything")
    add("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--list", action="store_true", help="say what would run and what builds have made here; run nothing")
    add("--place", action="store_true", help="check this machine and nothing else")
    arguments = parser.parse_args()
    if arguments.place:
        return check_place(arguments.device)
    pages, logs = arguments.pages.resolve(), arguments.logs.resolve()
    steps = [s for s in all_steps(arguments.suffix, pages, arguments.device) if s.stage in arguments.stages]
    if arguments.list:
        for step in steps:
            print(f"{step.stage:7} {step.name}: at most {step.limit_s:.0f} s; predicted: {step.predicted}")
        print("made by builds, not under version control:", *made_here(), sep="\n  ")
        return 0
    bundle = arguments.bundle.resolve() if arguments.bundle else None
    outcomes = Run(steps, logs, arguments.limit, bundle).all()
    print(f"\n{(logs / 'summary.md').read_text()}")
    return 0 if all(outcome.status == 0 and not outcome.stopped for outcome in outcomes) else 1


if __name__ == "__main__":
    sys.exit(main())
