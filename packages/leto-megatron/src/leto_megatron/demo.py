"""The demo: a real GPT survives four failures, and the result is the fault-free one, bit for bit.

    python -m leto_megatron.demo --seed 7

1. Reference: stock Megatron-Core under plain torchrun, two ranks, no Leto anywhere.
2. The same run under `leto run`, with four failures placed by the seed.
3. Every parameter, moment, loss, learning rate, random stream and consumed sample compared.

Writes `report.json` and `report.html`; exit status 0 only if the comparison is exact and the recoveries were
those that are promised: three in place with nothing lost, one from the checkpoint.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from rich.console import Console

from leto_megatron.compare import Comparison, compare_runs
from leto_megatron.config import PRESETS, Config, ConfigError, to_arguments
from leto_megatron.display import Display, failure_table, verdict_table
from leto_megatron.folders import FolderTaken, claim
from leto_megatron.plan import POOLS, TITLES, Pool, make_drills
from leto_megatron.promises import count_promises
from leto_megatron.records import read_records
from leto_megatron.report import REPORT_FILES, headline, write_report
from leto_shadow.devices import check_backend
from leto_shadow.drills import Drill, dump_drills
from leto_shadow.events import EventReader
from leto_shadow.timeline import Timeline

__all__ = ["DemoFailed", "main", "run_demo"]

RANKS = 2
_POLL_S = 0.2
_SILENCE_S = 180.0  # nothing new from a run for so long: it is stuck
_TAIL_LINES = 25
# No hiccup of a busy machine lasts as long: a hang that nobody planned would be a fifth failure.
_HANGS = ("--hang-min-s=15", "--hang-initial-s=120", "--hang-max-s=60")


class DemoFailed(RuntimeError):  # noqa: N818 (it is an outcome, and reads as one)
    """A run of the demo did not finish; the message says which and shows the end of its output."""


def run_demo(config: Config, out: Path, console: Console, pool: Pool | None = None) -> bool:
    """Run reference and drill, write the report into `out`.

    Returns whether all bits agree and every recovery was as promised. Raises DemoFailed if a run does not
    finish, FolderTaken if `out` holds something of others where the results belong.
    """
    pool = pool if pool is not None else POOLS["cpu"]
    out.mkdir(parents=True, exist_ok=True)
    reference, drilled = claim(out, ["reference", "leto"], REPORT_FILES)
    started = time.monotonic()
    with Display(console, f"Leto demo, seed {config.seed}", config.iterations) as display:
        display.enter_stage("reference run: stock Megatron-Core, plain torchrun, no failures")
        _run_reference(config, reference, pool, display)
        drills = make_drills(config.seed, config.iterations, RANKS, _owned_numel(reference), pool, config)
        display.enter_stage("the same run under leto, with four failures")
        for drill in drills.values():
            display.say(f"          planned: {_describe(drill)}")
        timeline = _run_leto(config, drilled, drills, pool, display)
    comparison = compare_runs(reference, drilled, RANKS, config.iterations, config.pipeline_parallel)
    count_promises(comparison, timeline, drills, pool)
    seconds = time.monotonic() - started
    write_report(out, config, timeline, comparison, reference, drilled, seconds)
    _print_verdict(console, timeline, comparison, out, seconds)
    return comparison.exact


def _run_reference(config: Config, out: Path, pool: Pool, display: Display) -> None:
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--nnodes=1", f"--nproc-per-node={RANKS}"),
        *("--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0"),
        *("-m", "leto_megatron.pretrain", "--out", str(out), *to_arguments(config)),
    ]
    seen = -1

    def poll() -> bool:
        nonlocal seen
        records = read_records(out / "records-rank0.jsonl")
        if records and records[-1]["iteration"] != seen:
            seen = records[-1]["iteration"]
            display.update((seen, records[-1]["loss"]))
            return True
        return False

    _supervise("reference run", command, out / "output.log", poll, pool.backend)
    display.update((config.iterations - 1, read_records(out / "records-rank0.jsonl")[-1]["loss"]))


def _run_leto(config: Config, out: Path, drills: dict[str, Drill], pool: Pool, display: Display) -> Timeline:
    """Run under `leto run`; follow its event log. A copy of the log stays in `out`."""
    timeline = display.timeline = Timeline({drill.id: kind for kind, drill in drills.items()}, TITLES)
    plan = out / "drills.json"
    plan.write_bytes(dump_drills(list(drills.values())))
    # Sockets need a short path, which the user's folder may not have.
    with tempfile.TemporaryDirectory(prefix="leto-demo-") as scratch:
        run_dir = Path(scratch) / "run"
        reader = EventReader(run_dir / "events.jsonl")

        def poll() -> bool:
            events = reader.poll()
            for event in events:
                display.say(*timeline.feed(event))
            display.update()
            return bool(events)

        command = [
            *(sys.executable, "-m", "leto_shadow.cli", "run", f"--nproc-per-node={RANKS}"),
            *("--job-id", f"demo-{config.seed}-{secrets.token_hex(2)}", "--run-dir", str(run_dir)),
            *("--drills", str(plan), *_HANGS),
            *pool.options(),
            *("-m", "leto_megatron.pretrain", "--out", str(out), *to_arguments(config)),
        ]
        try:
            _supervise("Leto run", command, out / "output.log", poll, pool.backend)
            poll()
        finally:
            _keep_logs(run_dir, out)
    if timeline.failed is not None or not timeline.finished:
        raise DemoFailed(f"the Leto run ended without finishing: {timeline.failed or 'no reason was logged'}")
    return timeline


def _keep_logs(run_dir: Path, out: Path) -> None:
    if (run_dir / "events.jsonl").exists():
        shutil.copy(run_dir / "events.jsonl", out / "events.jsonl")
    if (run_dir / "logs").is_dir():
        shutil.copytree(run_dir / "logs", out / "logs", dirs_exist_ok=True)


def _supervise(
    name: str, command: Sequence[str], log: Path, poll: Callable[[], bool], backend: str = "host"
) -> None:
    """Run a command to its end, its output in `log`. Raises DemoFailed if it fails or falls silent."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    if backend == "host":
        environment["CUDA_VISIBLE_DEVICES"] = ""  # reference and run train on the CPU, whatever there is
    with _process(command, log, environment) as process:
        heard = time.monotonic()
        while process.poll() is None:
            if poll():
                heard = time.monotonic()
            elif time.monotonic() - heard > _SILENCE_S:
                raise DemoFailed(f"the {name} made no progress for {_SILENCE_S:.0f} s\n{_tail(log)}")
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(timeout=_POLL_S)
    if process.returncode != 0:
        raise DemoFailed(f"the {name} failed with exit status {process.returncode}\n{_tail(log)}")


@contextlib.contextmanager
def _process(
    command: Sequence[str], log: Path, environment: dict[str, str]
) -> Iterator[subprocess.Popen[bytes]]:
    """A child in a process group of its own, ended with everything it started when the block is left."""
    with open(log, "wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=environment,
            start_new_session=True,
        )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()  # torchrun passes it on to its workers
            try:
                process.wait(timeout=15.0)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def _tail(log: Path) -> str:
    lines = log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
    return f"the end of {log}:\n" + "\n".join(f"  {line}" for line in lines)


def _owned_numel(reference: Path) -> int:
    """Elements of the smallest rank's optimizer state, as the reference run recorded it."""
    return min(
        int(json.loads((reference / f"final-rank{rank}.json").read_text())["owned_numel"])
        for rank in range(RANKS)
    )


def _describe(drill: Drill) -> str:
    where = f"rank {drill.rank}, iteration {drill.iteration}"
    if drill.point == "update":
        where += f", group {drill.group}, chunk {drill.chunk} half written"
    if drill.lose is not None:
        where += (
            f"; {drill.lose.pages} data pages of group {drill.lose.group} lost, "
            f"{drill.lose.tier1} tier-1 parity page poisoned"
        )
    return f"{drill.id}: {where}"


def _print_verdict(
    console: Console, timeline: Timeline, comparison: Comparison, out: Path, seconds: float
) -> None:
    console.print()
    console.print(failure_table(timeline.failures))
    console.print()
    console.print(verdict_table(comparison))
    console.print()
    for row in timeline.failures:
        for repair in row.repairs:
            console.print(f"{row.title}: {repair.text}.", highlight=False, markup=False, soft_wrap=True)
    word = headline(comparison.kinds).upper()
    if comparison.exact:
        console.print(
            f"[bold green]{word}[/]: bit for bit the fault-free run of stock Megatron-Core, "
            "every recovery as promised."
        )
    else:
        console.print(f"[bold red]{word}[/]: the first differences are")
        for line in comparison.differences:
            console.print(f"  {line}", markup=False)
    console.print(f"{seconds:.0f} s in all; report: {out / 'report.html'}", highlight=False)


def _need_gpus() -> None:
    try:
        check_backend("cuda", RANKS)
    except ValueError as error:
        raise ConfigError(f"--device cuda needs {RANKS} GPUs: {error}") from error


def main(argv: Sequence[str] | None = None) -> int:
    """Command line of the demo. 0: exact and as promised; 1: not so, or a run failed; 2: wrong arguments."""
    parser = argparse.ArgumentParser(
        prog="python -m leto_megatron.demo",
        description="Train a small GPT on Megatron-Core through four failures and compare every bit.",
    )
    parser.add_argument(
        "--device",
        choices=("cpu", "cuda"),
        default="cpu",
        help="where to train: two processes on the CPU (default), or two GPUs",
    )
    parser.add_argument("--seed", type=int, default=1, help="moves weights, data and every injection point")
    parser.add_argument(
        "--out", type=Path, default=Path("leto-demo"), help="folder for the report and the runs"
    )
    parser.add_argument(
        "--iterations",
        type=int,
        help=f"default {PRESETS['demo'].iterations}, on GPUs {PRESETS['demo-cuda'].iterations}",
    )
    options = parser.parse_args(argv)
    console = Console(width=None if sys.stdout.isatty() else 120)  # a pipe's 80 columns would cut the tables
    try:
        changes = {} if options.iterations is None else {"iterations": options.iterations}
        preset = PRESETS["demo-cuda" if options.device == "cuda" else "demo"]
        config = dataclasses.replace(preset, seed=options.seed, **changes)
        if options.device == "cuda":
            _need_gpus()
        if config.iterations < 40:
            raise ConfigError(f"--iterations must be at least 40, found {config.iterations}")
    except ConfigError as error:
        parser.error(str(error))
    out: Path = options.out.absolute()
    try:
        return 0 if run_demo(config, out, console, POOLS[options.device]) else 1
    except FolderTaken as error:
        parser.error(str(error))
    except OSError as error:
        where = "" if error.filename is None else f" ({error.filename})"
        console.print(
            f"[bold red]The demo failed[/]: {error.strerror}{where}", highlight=False, soft_wrap=True
        )
        return 1
    except DemoFailed as error:
        console.print(f"[bold red]The demo failed[/]: {error}", highlight=False, soft_wrap=True)
        return 1
    except KeyboardInterrupt:
        console.print("interrupted; every process of the demo was ended")
        return 130


if __name__ == "__main__":
    sys.exit(main())
