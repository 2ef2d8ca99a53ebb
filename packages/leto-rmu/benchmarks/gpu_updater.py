"""What one update phase of the plain updater on a GPU costs, operation by operation.

    python packages/leto-rmu/benchmarks/gpu_updater.py --output docs/benchmarks/rmu-updater-h200

writes rmu-updater-h200.json and .md. Memory is of this process (`TorchMemory`): its host pages are not
pinned, which makes the copies of parity slower than over a pool. Needs 20 bytes of GPU memory a parameter.

The update phase is all of step(), the gradients' parity and the job state included. torch's fused AdamW runs
on the same number of parameters in the same process. The operations are those of another step, in which
each one is waited for.
"""

from __future__ import annotations

import argparse
import datetime
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from leto_rmp import PoolConfig
from leto_rmu import Executor, Hyper, Op, Segment, SyncResult, UpdatePlan, __version__
from leto_rmu.cuda import CudaUpdater, TorchMemory

HYPER = Hyper(2.2e-4, betas=(0.9, 0.95), weight_decay=0.1)
SYNC = SyncResult(clip=0.9)


class Stopwatch(Executor):
    """Waits for every operation and adds up the time of each kind."""

    def __init__(self) -> None:
        self.spent: dict[str, list[float]] = {}

    def run(self, op: Op) -> None:
        begin = time.perf_counter()
        op.apply()
        torch.cuda.synchronize()
        self.spent.setdefault(op.name, []).append(time.perf_counter() - begin)


def clocked(work: Callable[[], Any], runs: int) -> list[float]:
    """Milliseconds, host clock, the device waited for before and after; one run to warm up."""
    found = []
    for run in range(runs + 1):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        work()
        torch.cuda.synchronize()
        if run:
            found.append(1000 * (time.perf_counter() - begin))
    return found


def machine() -> dict[str, str]:
    query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "-i", "0"]
    gpu = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False).stdout.strip()
    return {
        "gpu": gpu or torch.cuda.get_device_name(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "leto-rmu": __version__,
        "date": datetime.date.today().isoformat(),
    }


def measure(numel: int, segments: int, chunk_pages: int | None, runs: int) -> dict[str, Any]:
    part = numel // segments
    plan = UpdatePlan(
        [Segment(f"s{k}", part, 0, k * part) for k in range(segments)],
        config=PoolConfig(),
        grad_numel=part * segments,
        chunk_pages=chunk_pages,
    )
    up = CudaUpdater(TorchMemory(plan.config), plan, lambda: None)
    for k in range(segments):
        up.master(f"s{k}").normal_(0, 0.02)
    up.initialize()
    up.grads.normal_(0, 1e-2)

    def step() -> None:
        up.step([HYPER], b"", lambda: SYNC)

    samples = clocked(step, runs)
    watch = Stopwatch()
    up.executor = watch
    step()
    ops = {name: [len(values), 1000 * sum(values)] for name, values in watch.spent.items()}
    return {
        "chunk_pages": plan.pages_per_chunk,
        "groups": plan.groups,
        "chunks": plan.chunks,
        "samples_ms": samples,
        "ops": ops,
    }


def fused(numel: int, segments: int, runs: int) -> list[float]:
    part = numel // segments
    parameters = [torch.nn.Parameter(torch.randn(part, device="cuda")) for _ in range(segments)]
    for p in parameters:
        p.grad = torch.randn_like(p)
    return clocked(torch.optim.AdamW(parameters, lr=1e-4, fused=True).step, runs)


def markdown(result: dict[str, Any]) -> str:
    lines = ["# Update phase of the plain updater on a GPU", ""]
    lines += [f"* {key}: {value}" for key, value in result["machine"].items()]
    lines += ["* script: `packages/leto-rmu/benchmarks/gpu_updater.py`; every sample is in the JSON file", ""]
    base = statistics.median(result["fused_ms"])
    lines += [
        f"{result['parameters'] / 1e9:.3f} B parameters, pages of 2 MiB, groups of up to 1024 + 16 + 1, host",
        f"pages not pinned. torch's fused AdamW on as many parameters: {base:.2f} ms (median of",
        f"{len(result['fused_ms'])}, host clock).",
        "",
        "| pages in a chunk | chunks | update phase, median | min | max | / fused |",
        "| ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in result["updates"]:
        values = row["samples_ms"]
        middle = statistics.median(values)
        lines.append(
            f"| {row['chunk_pages']} | {row['chunks']} | {middle:.0f} ms | {min(values):.0f} "
            f"| {max(values):.0f} | {middle / base:.1f} |"
        )
    lines += ["", "Operations of one step, each waited for (a single measurement):", ""]
    names = list(result["updates"][0]["ops"])
    heads = [f"{row['chunk_pages']} pages: count | ms" for row in result["updates"]]
    lines += [f"| operation | {' | '.join(heads)} |", f"| --- |{' ---: |' * 2 * len(heads)}"]
    for name in names:
        cells = [f"{row['ops'][name][0]} | {row['ops'][name][1]:.1f}" for row in result["updates"]]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    return "\n".join([*lines, ""])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="path without suffix; default: print only")
    parser.add_argument("--parameters", type=int, default=1_006_632_960)
    parser.add_argument("--segments", type=int, default=6)
    parser.add_argument("--runs", type=int, default=10)
    arguments = parser.parse_args()
    numel, segments = arguments.parameters, arguments.segments
    result: dict[str, Any] = {"machine": machine(), "parameters": numel, "updates": []}
    result["fused_ms"] = fused(numel, segments, arguments.runs)
    for chunk_pages in (None, 240):
        torch.cuda.empty_cache()
        result["updates"].append(measure(numel, segments, chunk_pages, arguments.runs))
    text = markdown(result)
    print(text)
    if arguments.output:
        arguments.output.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        arguments.output.with_suffix(".md").write_text(text)


if __name__ == "__main__":
    main()
