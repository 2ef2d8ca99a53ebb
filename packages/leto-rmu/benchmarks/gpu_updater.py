"""What an update phase on a GPU costs: all of step(), against torch's fused AdamW on as many parameters.

    python packages/leto-rmu/benchmarks/gpu_updater.py --output docs/benchmarks/rmu-updater-h200

writes rmu-updater-h200.json and .md. Memory is of this process (`TorchMemory`), host pages pinned, as a
writer of a leto-rmp pool pins them. Needs 26 bytes of GPU memory a parameter.

The update phase is all of step(): gradients' parity, job state, PROTECTED, the (empty) barrier and
synchronization, parity of each group from and to the host, every chunk with its marks, bf16 copies, and the
wait for the last mark. It is measured by the host's clock from an idle device to an idle device, as torch's
optimizers are. Variants take turns. Predictions were written down before the run that they are printed
with.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from proof_lab import head, machine, publish

from leto_rmp import PoolConfig
from leto_rmu import Executor, Hyper, Op, Segment, SyncResult, UpdatePlan
from leto_rmu.cuda import CudaUpdater, TorchMemory, info
from leto_rmu.cuda.views import CudaRankMemory

HYPER = Hyper(2.2e-4, betas=(0.9, 0.95), weight_decay=0.1)
SYNC = SyncResult(clip=0.9)
PAGE = 2 << 20
BLOCK = 5 * PAGE // 4  # parameters of a sub-block of 15 pages


class PlainMemory(CudaRankMemory):
    use_kernels = False


class PlainUpdater(CudaUpdater):
    """Separate launches in place of the kernel."""

    views = PlainMemory


class FirstKernelMemory(CudaRankMemory):
    kernel_variant = "plain"


class FirstKernelUpdater(CudaUpdater):
    """The kernel's first variant, which makes the same bits."""

    views = FirstKernelMemory


UPDATERS = {"kernel": FirstKernelUpdater, "lean": CudaUpdater, "plain": PlainUpdater}


@dataclass(frozen=True)
class Variant:
    """``protect``: whether gradients get parity."""

    name: str
    chunk_pages: int
    protect: bool = True

    @property
    def scheme(self) -> str:
        return self.name.split()[0]

    @property
    def updater(self) -> type[CudaUpdater]:
        return UPDATERS[self.name.split()[1]]

    @property
    def label(self) -> str:
        return f"{self.name}, {self.chunk_pages} pages" + (
            "" if self.protect else ", gradients without parity"
        )


# (variant, pages in a chunk, gradients protected) -> milliseconds for 1.007 B parameters, and why
PREDICTIONS = {
    ("slots kernel", 240, True): (
        10.6,
        "parity of gradients 1.05, chunks 8.55 as the kernel alone, last drain 0.65, between phases 0.2, "
        "first launches 0.1",
    ),
    ("slots kernel", 480, True): (10.2, "chunks 8.2"),
    ("slots kernel", 960, True): (9.9, "chunks 7.85"),
    ("slots lean", 240, True): (
        10.95,
        "1.25 until PROTECTED, 7.75 for the chunks' bytes instead of 8.4, 24 x 0.046 for each chunk, 0.85 at "
        "the end (docs/benchmarks/rmu-kernel-study.md)",
    ),
    ("slots lean", 480, True): (10.4, "12 chunks instead of 24"),
    ("slots lean", 960, True): (10.1, "6 chunks"),
    ("slots kernel", 240, False): (
        9.4,
        "without the gradients' parity, but then the first load shows: 0.6 less 0.6",
    ),
    ("slots plain", 240, True): (
        48.0,
        "copy 4, foreach 22, parity 8, and the host's planning of new addresses",
    ),
    ("undo plain", 240, True): (36.0, "copy 4, foreach 22, parity 8, cached plans"),
}


def clocked(work: Callable[[], Any]) -> float:
    """Milliseconds, host clock, from an idle device to an idle device."""
    torch.cuda.synchronize()
    begin = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return 1000 * (time.perf_counter() - begin)


def in_turn(works: dict[str, Callable[[], Any]], runs: int, warm_up: int = 2) -> dict[str, list[float]]:
    samples: dict[str, list[float]] = {name: [] for name in works}
    for run in range(runs + warm_up):
        for name, work in works.items():
            spent = clocked(work)
            if run >= warm_up:
                samples[name].append(spent)
    return samples


class Stopwatch(Executor):
    """Waits for every operation and adds up the time of each kind."""

    def __init__(self) -> None:
        self.spent: dict[str, list[float]] = {}

    def run(self, op: Op) -> None:
        begin = time.perf_counter()
        op.apply()
        torch.cuda.synchronize()
        self.spent.setdefault(op.name, []).append(1000 * (time.perf_counter() - begin))


class Trainer:
    """One updater with its state, and when its last step got where (ms)."""

    def __init__(self, variant: Variant, numel: int, segments: int) -> None:
        part = numel // segments
        more: dict[str, Any] = {} if variant.protect else {"gradients": "recompute"}
        self.plan = UpdatePlan(
            [Segment(f"s{k}", part, 0, k * part, k * part) for k in range(segments)],
            config=PoolConfig(),
            grad_numel=part * segments,
            scheme=variant.scheme,  # type: ignore[arg-type]
            chunk_pages=variant.chunk_pages,
            model_bytes=2 * part * segments,
            **more,
        )
        self.marks: list[float] = []
        self.up = variant.updater(TorchMemory(self.plan.config), self.plan, self.barrier)
        for k in range(segments):
            self.up.write(f"s{k}", "master", torch.randn(part, device="cuda").mul_(0.02))
        self.up.initialize()
        self.up.grads.normal_(0, 1e-2)

    def barrier(self) -> None:
        if len(self.marks) == 1:  # the first of a step: PROTECTED
            self.passed()

    def passed(self) -> None:
        self.marks.append(time.perf_counter())

    def step(self) -> None:
        self.marks = [time.perf_counter()]
        self.up.step([HYPER], b"", self.synchronize)
        self.passed()
        self.up.wait()
        self.passed()

    def synchronize(self) -> SyncResult:
        return SYNC

    def phases(self, runs: int) -> dict[str, float]:
        """Medians: until PROTECTED, until all is issued, until all is done."""
        found: list[list[float]] = []
        for _ in range(runs):
            torch.cuda.synchronize()
            self.step()
            start, *ends = self.marks
            found.append([1000 * (end - start) for end in ends])
        middle = [statistics.median(column) for column in zip(*found, strict=True)]
        return dict(zip(("protected", "issued", "done"), middle, strict=True))


def measure(variant: Variant, numel: int, segments: int, runs: int) -> dict[str, Any]:
    trainer = Trainer(variant, numel, segments)
    samples = in_turn({"": trainer.step}, runs)[""]
    phases = trainer.phases(min(runs, 10))
    watch = Stopwatch()
    trainer.up.executor = watch
    trainer.step()
    key = (variant.name, variant.chunk_pages, variant.protect)
    predicted = PREDICTIONS.get(key) if numel == 6 * 64 * BLOCK else None
    middle = statistics.median(samples)
    print(f"{variant.label}: {middle:.2f} ms [{min(samples):.2f}, {max(samples):.2f}] {phases}", flush=True)
    return {
        "label": variant.label,
        "chunks": trainer.plan.chunks,
        "groups": trainer.plan.groups,
        "samples_ms": samples,
        "phases_ms": phases,
        "ops": {name: [len(spent), sum(spent)] for name, spent in watch.spent.items()},
        "predicted": predicted,
    }


def baselines(numel: int, segments: int, runs: int) -> dict[str, list[float]]:
    part = numel // segments
    parameters = [torch.nn.Parameter(torch.randn(part, device="cuda").mul_(0.02)) for _ in range(segments)]
    for p in parameters:
        p.grad = torch.randn_like(p).mul_(1e-2)
    halves = [torch.empty(part, dtype=torch.bfloat16, device="cuda") for _ in range(segments)]
    options: dict[str, Any] = {"lr": HYPER.lr, "betas": HYPER.betas, "weight_decay": HYPER.weight_decay}
    fused = torch.optim.AdamW(parameters, fused=True, **options)
    foreach = torch.optim.AdamW(parameters, foreach=True, **options)

    def with_copy() -> None:
        fused.step()
        torch._foreach_copy_(halves, [p.detach() for p in parameters])

    works = {"torch fused": fused.step, "torch fused + bf16 copy": with_copy, "torch foreach": foreach.step}
    samples = in_turn(works, runs)
    for name, values in samples.items():
        print(
            f"{name}: {statistics.median(values):.2f} ms [{min(values):.2f}, {max(values):.2f}]", flush=True
        )
    return samples


def markdown(result: dict[str, Any]) -> str:
    lines = head("Update phase on a GPU", result, __file__)
    lines += [
        "Every sample is in the JSON file.",
        "",
        "All of step(), from idle device to idle device, host clock: parity of the gradients, job state,",
        "marks, parity of each group from and to pinned host memory, chunks, bf16 copies of all parameters.",
        "AdamW, fp32 gradients, pages of 2 MiB, groups of up to 1024 + 16 + 1. `lean`: one kernel a chunk,",
        "as updaters have it; `kernel`: its first variant; `plain`: separate launches. Medians.",
        "",
    ]
    for size in result["sizes"]:
        base = {name: statistics.median(values) for name, values in size["baselines_ms"].items()}
        fused, copied = base["torch fused"], base["torch fused + bf16 copy"]
        lines += [
            f"## {size['parameters'] / 1e9:.3f} B parameters",
            "",
            "| what | chunks | ms | min | max | / fused | / fused + copy | predicted ms |",
            "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
        ]
        rows = [(name, "", values, None) for name, values in size["baselines_ms"].items()]
        rows += [
            (row["label"], row["chunks"], row["samples_ms"], row["predicted"]) for row in size["updates"]
        ]
        for name, chunks, values, predicted in rows:
            middle = statistics.median(values)
            lines.append(
                f"| {name} | {chunks} | {middle:.2f} | {min(values):.2f} | {max(values):.2f} "
                f"| {middle / fused:.2f} | {middle / copied:.2f} | {predicted[0] if predicted else ''} |"
            )
        lines += [
            "",
            "When the host has seen PROTECTED, has issued all, and when all is done (ms);",
            "then the operations of one more step, each waited for (count, ms):",
            "",
            "| what | PROTECTED | issued | done | operations |",
            "| --- | ---: | ---: | ---: | --- |",
        ]
        for row in size["updates"]:
            p = row["phases_ms"]
            ops = ", ".join(f"{name} {count}: {spent:.1f}" for name, (count, spent) in row["ops"].items())
            lines.append(
                f"| {row['label']} | {p['protected']:.2f} | {p['issued']:.2f} | {p['done']:.2f} | {ops} |"
            )
        lines.append("")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="path without suffix; default: print only")
    parser.add_argument("--groups", type=int, nargs="*", default=[6, 18], help="of 168 M parameters each")
    parser.add_argument("--chunks", type=int, nargs="*", default=[240, 480, 960], help="pages")
    parser.add_argument("--runs", type=int, default=20)
    parser.add_argument("--plain", action="store_true", help="also the variants with separate launches")
    parser.add_argument("--recompute", action="store_true", help="also without the gradients' parity")
    arguments = parser.parse_args()
    result: dict[str, Any] = {
        "machine": machine(kernels=info()["build"]),
        "command": " ".join(sys.argv[1:]),
        "sizes": [],
    }
    for groups in arguments.groups:
        numel, segments = groups * 64 * BLOCK, groups
        size: dict[str, Any] = {"parameters": numel, "updates": []}
        size["baselines_ms"] = baselines(numel, segments, arguments.runs)
        variants = [
            Variant(name, pages) for pages in arguments.chunks for name in ("slots kernel", "slots lean")
        ]
        if arguments.recompute:
            variants += [Variant("slots kernel", pages, False) for pages in arguments.chunks]
        if arguments.plain and groups == arguments.groups[0]:
            variants += [Variant("slots plain", 240), Variant("undo plain", 240)]
        for variant in variants:
            gc.collect()
            torch.cuda.empty_cache()
            size["updates"].append(measure(variant, numel, segments, arguments.runs))
        result["sizes"].append(size)
    publish(result, markdown(result), arguments.output)


if __name__ == "__main__":
    main()
