"""I, R and ETTR under a seeded schedule of failures, against a run without failures (paper section 8.1).

    python packages/leto-shadow/benchmarks/experiment.py --failures 20 --mttf 11 --gap 8 --seed 7 \
        --classes '{"kill": 3, "lose": 1}' --output docs/benchmarks/shadow-recovery-host
    python packages/leto-shadow/benchmarks/experiment.py --backend cuda --workload gpt-1b --failures 22 \
        --budget 500 --output OUT/recoveries-h200

Two jobs of `leto run`, one after the other on the same machine: a reference without failures, until shadows
have stood for some iterations, then the same script under a schedule (`leto_shadow.schedule`), until the last
failure has been recovered from. Both are followed through their event logs and ended by SIGTERM, so nothing
has to be known about how long an iteration takes. Every number is `leto report`'s, from the events of the two
jobs. The page (`.md`), the numbers (`.json`), a trace for Perfetto (`.trace.json`) and the ends of the logs
(`.log`) are written again after every recovery: whatever ends this script, what was measured is there.

--clock ready (the default on GPUs): a failure strikes only while shadows stand ready, at an instant that the
seed chose. --level 1 or 2: shadows wait there; what a level saves is the difference. --smoke: one kill and
one loss of pages with a small model, in less than a minute, through all of this script.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
from experiment_page import count_equal, machine, page, results

from leto_shadow.events import Event, EventReader
from leto_shadow.report import Report, make_report
from leto_shadow.schedule import Injection, Schedule, dump_schedule, make_schedule
from leto_shadow.timeline import Timeline
from leto_shadow.trace import chrome_trace

EXAMPLE = Path(__file__).parents[1] / "examples" / "plain_pytorch.py"
SMALL_POOL = "--page-bytes 16384 --data-pages 48 --tier1 6"
POLL_S = 0.1
START_S = 240.0  # until a job trains: interpreters, contexts, weights drawn on a processor
SILENCE_S = 90.0  # no event for so long: the job is stuck
END_S = 40.0
TRACED = 20_000
CALM = "--hang-min-s 120 --hang-initial-s 240"  # nothing hangs in a smoke run, however slow the machine is
TAIL_BYTES = 6000


@dataclass(frozen=True)
class Workload:
    """A script, its arguments ("{out}": a folder of its own) and the options of `leto run` that go with it.

    ``small``: arguments that make it quick, for --smoke. ``records``: it leaves the records of
    `leto_megatron.records`, whose bits are compared between the two jobs.
    """

    script: str
    arguments: str
    options: str
    small: str = ""
    records: bool = False


GPT = "--checkpoint-interval 0 --corpus-bytes 4194304 --laps --out {out}"
GPU_POOL = "--page-bytes 2097152 --data-pages 1024 --tier1-pages 16 --hang-min-s 20"
WORKLOADS = {
    "plain": Workload(str(EXAMPLE), "--iterations 100000000", SMALL_POOL),
    # 24 layers, 2048 wide: 1.21 B parameters; the schedule of learning rates is that of a long run
    "gpt-1b": Workload(
        "-m leto_megatron.pretrain",
        f"--preset paper --micro-batch 8 --iterations 20000 {GPT}",
        GPU_POOL,
        small="--layers 2",
        records=True,
    ),
    "gpt-tiny": Workload(
        "-m leto_megatron.pretrain",
        f"--preset tiny --iterations 1000000 {GPT}",
        SMALL_POOL,
        records=True,
    ),
}


class Seen:
    """What has happened in a job so far, as far as its end depends on it."""

    def __init__(self, ranks: int, level: int = 3) -> None:
        self.ranks, self.level = ranks, level
        self.injected = self.recovered = self.refused = 0
        self.iteration = 0  # rank 0's newest
        self.trained_at: int | None = None  # its first after the newest recovery
        self.ready_at: int | None = None  # its first after all shadows stood
        self._ready: set[int] = set()

    def feed(self, event: Event) -> None:
        match event["event"]:
            case "injected":
                self.injected += 1
                self.refused += not event["done"]
            case "promoted":
                self._ready.clear()
                self.trained_at = self.ready_at = None
            case "recovered":
                self.recovered += 1
            case "shadow_level" if event["level"] == self.level:
                self._ready.add(int(event["rank"]))
            case "metrics" if event["rank"] == 0:
                self.iteration = int(event["iteration"])
                if self.trained_at is None:
                    self.trained_at = self.iteration
                if self.ready_at is None and len(self._ready) == self.ranks:
                    self.ready_at = self.iteration

    def since(self, iteration: int | None) -> int:
        """Iterations since then; -1 if it has not come yet."""
        return -1 if iteration is None else self.iteration - iteration


class Experiment:
    """Both jobs, in a folder of their own; ``arguments`` as of the command line."""

    def __init__(self, arguments: argparse.Namespace, folder: Path) -> None:
        self.arguments = arguments
        self.folder = folder
        self.workload: Workload = arguments.workload
        self.where = {**machine(arguments.backend), "note": arguments.note}
        self.started = time.monotonic()
        self.reference: list[Event] = []
        self.schedule: Schedule | None = None
        self.wrong: list[str] = []
        self.covers = "reference"  # the job whose bits are those of a run without failures

    @property
    def left_s(self) -> float:
        """Seconds of the budget that are left."""
        return float(self.arguments.budget - (time.monotonic() - self.started))

    def say(self, text: str) -> None:
        """A line of progress."""
        print(f"[{time.monotonic() - self.started:6.1f} s] {text}", flush=True)

    def out(self, name: str) -> Path:
        return self.folder / f"{name}-out"

    # --- jobs -------------------------------------------------------------------------------------

    def command(self, name: str, more: list[str]) -> list[str]:
        """`leto run` for one of the two jobs."""
        given, arguments = self.arguments, self.workload
        words = [*(sys.executable, "-m", "leto_shadow.cli", "run", "--nproc-per-node", str(given.ranks))]
        words += ["--backend", given.backend, "--shadow-level", str(given.level)]
        words += [*shlex.split(arguments.options), *shlex.split(given.options)]
        words += shlex.split(CALM) if given.smoke else []
        words += ["--job-id", f"{name}-{os.getpid()}", "--run-dir", str(self.folder / name), *more]
        words += shlex.split(arguments.script)
        own = arguments.arguments + (f" {arguments.small}" if given.smoke else "")
        return words + shlex.split(own.format(out=self.out(name))) + shlex.split(given.script_args)

    def follow(
        self,
        name: str,
        more: list[str],
        over: Callable[[Seen], bool],
        see: Callable[[Seen, list[Event]], None] = lambda _seen, _events: None,
    ) -> list[Event]:
        """Run a job until ``over`` says so, it ends, hangs, or the budget is spent; return its events.

        ``see`` may look at them meanwhile.
        """
        command, log = self.command(name, more), self.folder / f"{name}.log"
        self.say(shlex.join(command))
        self.out(name).mkdir()
        events: list[Event] = []
        reader, timeline = EventReader(self.folder / name / "events.jsonl"), Timeline()
        seen = Seen(self.arguments.ranks, self.arguments.level)
        with open(log, "wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
                start_new_session=True,
            )
        begun = heard = time.monotonic()
        try:
            while True:
                new = reader.poll()
                events += new
                for event in new:
                    heard = time.monotonic()
                    seen.feed(event)
                    for line in timeline.feed(event):
                        self.say(f"{name}: {line}")
                    if event["event"] == "shadow_level" and event["level"] == seen.level:
                        self.say(f"{name}: the shadow of rank {event['rank']} stands at level {seen.level}")
                if over(seen):
                    return events
                see(seen, events)
                if process.poll() is not None:
                    return self.failed(events, f"the job {name} ended with {process.returncode}")
                silent_s = time.monotonic() - (heard if timeline.training_s else begun)
                if silent_s > (SILENCE_S if timeline.training_s else START_S):
                    return self.failed(events, f"nothing new of the job {name} for {silent_s:.0f} s")
                if self.left_s < 0:
                    return self.failed(events, f"the budget was spent in the job {name}")
                time.sleep(POLL_S)
        finally:
            self.end(process)
            self.keep_logs()

    def failed(self, events: list[Event], what: str) -> list[Event]:
        self.wrong.append(what)
        self.say(what)
        return events

    def end(self, process: subprocess.Popen[bytes]) -> None:
        """SIGTERM goes from torchrun to the agent, which leaves nothing behind."""
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(END_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()

    def keep_logs(self) -> None:
        """The ends of all logs, where somebody will find them."""
        if self.arguments.output is None:
            return
        logs = [*self.folder.glob("*.log"), *self.folder.glob("*/logs/*.log")]
        parts = []
        for path in sorted(logs):
            text = path.read_bytes()[-TAIL_BYTES:].decode(errors="replace")
            parts.append(f"==== {path.relative_to(self.folder)}\n{text}\n")
        self.arguments.output.with_suffix(".log").write_text("".join(parts))

    # --- the two of them --------------------------------------------------------------------------

    def run(self) -> Report | None:
        """Run both; return the report of the one with failures, None if it never trained."""
        given = self.arguments

        def enough(seen: Seen) -> bool:
            return seen.since(seen.ready_at) >= given.reference_iterations

        self.reference = self.steady(self.follow("reference", [], enough))
        if self.wrong:
            return None
        self.schedule = schedule = self.planned()
        plan = self.folder / "schedule.json"
        plan.write_bytes(dump_schedule(schedule))
        shown: dict[str, Any] = {"recovered": -1, "next": 0.0}

        def see(seen: Seen, events: list[Event]) -> None:
            ended = seen.since(seen.trained_at) > 0  # the interrupted iteration is over
            if seen.recovered != shown["recovered"] and ended and time.monotonic() >= shown["next"]:
                shown["recovered"], began = seen.recovered, time.monotonic()
                self.write(self.report(events))
                shown["next"] = time.monotonic() + 20 * (time.monotonic() - began)

        def over(seen: Seen) -> bool:
            done = seen.injected == len(schedule.injections)
            done = done and seen.recovered >= seen.injected - seen.refused
            return done and seen.since(seen.trained_at) >= given.tail

        report = self.report(self.follow("experiment", ["--injections", str(plan)], over, see))
        self.write(report)
        if given.cover and self.workload.records and report is not None:
            self.cover(report)
        return report

    def cover(self, report: Report) -> None:
        """Hold all recoveries against bits: run the reference once more, as far as the last one at least."""
        failures = report.timeline.failures
        last = max((row.iteration for row in failures), default=0)
        if failures and last >= int(self.result["compared"]["iterations"]):
            self.follow("cover", [], lambda seen: seen.iteration > last + 1)
            self.covers = "cover"
            self.write(report)

    def steady(self, events: list[Event]) -> list[Event]:
        """A run without failures as of when its shadows stand: they slow it down while they come up."""
        trains = next((k for k, event in enumerate(events) if event["event"] == "started"), len(events))
        ready: dict[int, int] = {}
        for index in range(trains, len(events)):
            if events[index]["event"] == "shadow_level" and events[index]["level"] == self.arguments.level:
                ready.setdefault(int(events[index]["rank"]), index)
        if len(ready) < self.arguments.ranks:
            return []
        since = max(ready.values())
        return [events[trains], *(one for one in events[since:] if one["event"] == "metrics")]

    def planned(self) -> Schedule:
        given = self.arguments
        schedule = make_schedule(
            given.seed,
            given.mttf,
            given.ranks,
            given.classes,
            count=given.failures,
            gap_s=given.gap,
            clock=given.clock,
        )

        def asked_for(number: int, one: Injection) -> Injection:
            kind = ("kill", "lose")[number % 2] if given.smoke else one.kind
            pages = given.lose_pages if kind == "lose" else one.pages
            return msgspec.structs.replace(one, kind=kind, pages=pages)

        chosen = (asked_for(number, one) for number, one in enumerate(schedule.injections))
        return msgspec.structs.replace(schedule, injections=tuple(chosen))

    def report(self, events: list[Event]) -> Report | None:
        if not any(event["event"] == "started" for event in events):
            return None
        return make_report("experiment", events, reference=self.reference)

    def write(self, report: Report | None) -> None:
        """Write the page, the numbers and the trace of what there is by now."""
        output: Path | None = self.arguments.output
        if report is None or self.schedule is None:
            return
        compared = None
        if self.workload.records:
            compared = count_equal(self.out(self.covers), self.out("experiment"), self.arguments.ranks)
        result = results(
            report, self.where, self.schedule, compared, self.wrong, self.reference, self.arguments.level
        )
        result["command"] = shlex.join(["experiment.py", *sys.argv[1:]])
        if output is not None:
            output.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
            output.with_suffix(".md").write_text(page(result))
            trace = chrome_trace(report.events, TRACED, report.measures.recoveries)
            output.with_suffix(".trace.json").write_text(json.dumps(trace) + "\n")
        self.result = result


def parse() -> argparse.Namespace:
    """The command line, defaults of backend and --smoke filled in."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workload", choices=WORKLOADS, help="default: plain, on GPUs gpt-1b")
    parser.add_argument("--script", help="another script, or '-m module'; it trains until it is ended")
    parser.add_argument("--script-args", default="", help="further arguments of the script, in one word")
    parser.add_argument("--options", default="", help="further options of leto run, in one word")
    parser.add_argument("--level", type=int, choices=(1, 2, 3), default=3, help="at which shadows wait")
    parser.add_argument("--backend", choices=("host", "cuda"), default="host")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--failures", type=int, default=20)
    parser.add_argument("--clock", choices=("wall", "ready"), help="default: wall, on GPUs ready")
    parser.add_argument("--mttf", type=float, help="mean seconds between failures (10; clock ready: 2)")
    parser.add_argument("--gap", type=float, default=0.0, help="least seconds between failures")
    parser.add_argument("--classes", type=json.loads, default={"kill": 1}, help="weights, as JSON")
    parser.add_argument(
        "--lose-pages",
        type=lambda text: text if text == "tolerance" else int(text),
        default=1,
        help="data pages that each loss takes of one group; tolerance: as many as its parity makes good",
    )
    parser.add_argument("--reference-iterations", type=int, help="default 2000, on GPUs 40")
    parser.add_argument(
        "--cover",
        action="store_true",
        help="afterwards run the reference again, for the bits of all recoveries",
    )
    parser.add_argument("--tail", type=int, default=5, help="iterations after the last recovery")
    parser.add_argument("--budget", type=float, default=3600.0, help="seconds for all of it")
    parser.add_argument("--smoke", action="store_true", help="one kill and one loss with a small model")
    parser.add_argument("--note", default="", help="a sentence for the page, such as what else ran there")
    parser.add_argument("--output", type=Path, help="write OUTPUT.json, .md, .trace.json and .log")
    given = parser.parse_args()
    cuda = given.backend == "cuda"
    given.workload = WORKLOADS[given.workload or ("gpt-1b" if cuda else "plain")]
    if given.script is not None:
        given.workload = Workload(given.script, "", "")
    given.clock = given.clock or ("ready" if cuda or given.smoke else "wall")
    given.reference_iterations = given.reference_iterations or (40 if cuda else 2000)
    if given.smoke:
        given.failures, given.reference_iterations, given.tail = 2, 5, 3
        given.mttf = given.mttf or 1.0
    given.mttf = given.mttf or (2.0 if given.clock == "ready" else 10.0)
    if given.output is not None:
        given.output.parent.mkdir(parents=True, exist_ok=True)
    return given


def main() -> int:
    """0: every failure came and was recovered from in place."""
    given = parse()
    with tempfile.TemporaryDirectory(prefix="leto-x-") as folder:
        experiment = Experiment(given, Path(folder))
        try:
            report = experiment.run()
        finally:
            experiment.keep_logs()
    if report is None:
        print("nothing was measured: " + "; ".join(experiment.wrong or ["the job never trained"]))
        return 1
    print(page(experiment.result))
    rows = report.data()["failures"]
    in_place = sum(row["source"] == "in-place" for row in rows)
    wrong = list(experiment.wrong)
    if in_place < given.failures or len(rows) > in_place:
        wrong.append(
            f"{in_place} of {len(rows)} failures were recovered from in place, planned were {given.failures}"
        )
    if experiment.workload.records and experiment.result["compared"]["differences"]:
        wrong.append("the records of the two jobs differ")
    experiment.say("checked: " + ("; ".join(wrong) or "everything holds"))
    return 1 if wrong else 0


if __name__ == "__main__":
    signal.signal(
        signal.SIGTERM, lambda number, _frame: sys.exit(128 + number)
    )  # the job ends with this script
    sys.exit(main())
