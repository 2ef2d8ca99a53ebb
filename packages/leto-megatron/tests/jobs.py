"""Start a run under `leto run` with drills, and a stock reference; hold one against the other."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from ranks import run_ranks

from leto_megatron.compare import Comparison, compare_runs
from leto_megatron.config import PRESETS, Config, to_arguments
from leto_megatron.plan import Pool
from leto_shadow import linux
from leto_shadow.drills import Drill, dump_drills
from leto_shadow.events import Event, read_events
from leto_shadow.timeline import Timeline

POOL = Pool(page_bytes=4096, data_pages=12, tier1_pages=3, tier2_pages=1)
PATIENT = ("--hang-min-s=300", "--hang-initial-s=300")
"""A rank that a busy machine keeps waiting does not hang. Tests of hangs give their own."""


def settings(**changes: Any) -> Config:
    return dataclasses.replace(PRESETS["tiny"], **changes)


def run_leto(
    config: Config,
    world: int,
    drills: Sequence[Drill],
    out: Path,
    options: Sequence[str] = (),
    timeout_s: float = 500.0,
    script: Sequence[str] = ("-m", "leto_megatron.pretrain"),
) -> Timeline:
    """Run to the end and return what happened. Fails with the end of the output if the job does.

    `options`: further ones of `leto run`. `script`: what it starts, with the arguments of the pretraining.
    """
    out.mkdir(parents=True, exist_ok=True)
    plan = out / "drills.json"
    plan.write_bytes(dump_drills(list(drills)))
    log = out / "output.log"
    with tempfile.TemporaryDirectory(prefix="leto-test-") as scratch:
        run_dir = Path(scratch) / "run"
        command = [
            *(sys.executable, "-W", "ignore", "-m", "leto_shadow.cli", "run", f"--nproc-per-node={world}"),
            *(f"--job-id=test-{secrets.token_hex(4)}", f"--run-dir={run_dir}", f"--drills={plan}"),
            *POOL.options(),
            *PATIENT,
            *options,
            *(*script, f"--out={out}", *to_arguments(config)),
        ]
        with open(log, "wb") as output:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )
            try:
                code = process.wait(timeout=timeout_s)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                end(process)
        path = run_dir / "events.jsonl"
        events = list(read_events(path)) if path.exists() else []
    timeline = Timeline({drill.id: drill.id for drill in drills})
    (out / "events.json").write_text(json.dumps(events))
    story = [line for event in events for line in timeline.feed(event)]
    assert code == 0, "\n".join([f"exit status {code}", *story, log.read_text(errors="replace")[-4000:]])
    assert timeline.finished, story
    return timeline


def end(process: subprocess.Popen[bytes]) -> None:
    """End a job, in order if it can be, and what is below it."""
    below = linux.descendants(process.pid) if process.poll() is None else []
    try:
        if process.poll() is None:
            process.terminate()
            process.wait(timeout=40)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    for pid in below:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def run_reference(config: Config, world: int, out: Path) -> None:
    """The stock run of the same settings, without torchrun (quicker) but otherwise as users start it."""
    run_ranks(
        world,
        "worker_modes:reference",
        {"out": str(out), "settings_": dataclasses.asdict(config)},
        out / "ranks",
    )


@contextlib.contextmanager
def reference_beside(config: Config, world: int, out: Path) -> Iterator[None]:
    """`run_reference` beside the start of a job, which for seconds is one process that imports torch."""
    with ThreadPoolExecutor(1) as beside:
        done = beside.submit(run_reference, config, world, out)
        yield
        done.result()


def reused(events: Iterable[Event]) -> list[tuple[int, int, int]]:
    """Trainers that survived a failure, were promoted again and trained: (rank, first, last generation)."""
    lives: dict[tuple[int, int], list[int]] = {}
    for event in events:
        if event["event"] == "resumed":
            lives.setdefault((event["rank"], event["pid"]), []).append(event["generation"])
    return [(rank, min(found), max(found)) for (rank, _), found in sorted(lives.items()) if len(found) > 1]


def hold_against_reference(
    config: Config,
    world: int,
    drills: Sequence[Drill],
    folder: Path,
    options: Sequence[str] = (),
    script: Sequence[str] = ("-m", "leto_megatron.pretrain"),
    timeout_s: float = 500.0,
) -> Timeline:
    """Run both; assert that every drill struck, every failure was recovered from, and every bit agrees."""
    with reference_beside(config, world, folder / "reference"):
        timeline = run_leto(config, world, drills, folder / "leto", options, timeout_s, script)
    assert {drill.id for drill in drills} <= {row.drill for row in timeline.failures}
    for row in timeline.failures:
        assert row.recovered_s is not None, row
    comparison: Comparison = compare_runs(
        folder / "reference", folder / "leto", world, config.iterations, config.pipeline_parallel
    )
    assert comparison.exact, comparison.differences
    return timeline
