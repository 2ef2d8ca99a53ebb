"""The paper's table 1 on a GPU: an iteration without protection, with snapshots, and with the updater.

    python packages/leto-rmu/benchmarks/gpu_table1.py --output docs/benchmarks/rmu-table1-h200

A GPT of 1.11 B parameters (bf16, gradients accumulated in fp32, AdamW with fp32 masters and moments) trains
on 65,536 tokens an iteration: 8 microbatches of 4 sequences of 2048. That is what each of 8 GPUs computes
of a batch of half a million tokens. Four runs of the same computation:

* reference: torch.optim.AdamW(fused=True), then the bf16 copy;
* synchronous snapshotting: before each update all masters and moments are copied to pinned host memory;
* asynchronous snapshotting: that copy runs on a stream of its own while the next iteration computes, and
  the update waits for it;
* RMU: the updater over memory of a state manager, gradients protected by parity.

Every phase ends with a wait for the device. The peak of GPU memory is what the driver says is in use by all
processes, less what was in use before; with RMU the state manager's pages and this process's share of them.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from gpt_lab import GPT, Shape, accumulate, bind, initial, segments
from proof_lab import command_line, head, machine, parsed, publish

from leto_rmp import Client, PoolConfig, Role, spawn_manager
from leto_rmu import Action, AdamW, Hyper, SyncResult, UpdatePlan, decide

MODES = ("reference", "synchronous snapshotting", "asynchronous snapshotting", "RMU")
SHAPE = Shape(layers=20, width=2048, heads=16, vocabulary=50304, context=2048)
HYPERS = (Hyper(1e-4, betas=(0.9, 0.95), weight_decay=0.1), Hyper(1e-4, betas=(0.9, 0.95)))
PIECE = 1 << 27  # elements of one pinned buffer


class Memory:
    """GPU memory in use on the whole device, beyond that at the beginning; needs no quiet allocator."""

    def __init__(self) -> None:
        free, self.total = torch.cuda.mem_get_info()
        self.before, self.peak = self.total - free, 0

    def look(self) -> None:
        free, _ = torch.cuda.mem_get_info()
        self.peak = max(self.peak, self.total - free - self.before)

    def parts(self, regions: int = 0) -> dict[str, int]:
        """Bytes at the peak: live tensors, with PyTorch's cache, and what neither that nor the pool holds."""
        self.look()
        reserved = torch.cuda.max_memory_reserved()
        return {
            "peak": self.peak,
            "allocated": torch.cuda.max_memory_allocated(),
            "reserved": reserved,
            "other": self.peak - reserved - regions,
        }


def checksum(line: torch.Tensor) -> str:
    """Of all bits of a flat fp32 tensor and their order."""
    sums = [0, 0]
    for k, part in enumerate(line.view(torch.int32).split(1 << 24)):
        wide = part.long()
        weights = torch.arange(1, part.numel() + 1, device=part.device) % 65_521
        sums[0] += int(wide.sum())
        sums[1] += (k + 1) * int((wide * weights).sum())
    return ":".join(f"{value & (1 << 64) - 1:016x}" for value in sums)


class Phases:
    """Compute and update of every iteration, in milliseconds; the first ones warm up."""

    def __init__(self, memory: Memory) -> None:
        self.memory, self.compute, self.update = memory, [], []  # type: ignore[var-annotated]

    def run(self, compute: Any, update: Any, iterations: int, warm: int) -> None:
        torch.cuda.empty_cache()  # what setting up has left there is no part of training
        for k in range(warm + iterations):
            torch.cuda.synchronize()
            begun = time.perf_counter()
            compute()
            torch.cuda.synchronize()
            middle = time.perf_counter()
            self.memory.look()
            begun_update = time.perf_counter()
            update()
            torch.cuda.synchronize()
            end = time.perf_counter()
            self.memory.look()
            if k >= warm:
                self.compute.append(1000 * (middle - begun))
                self.update.append(1000 * (end - begun_update))


def computation(
    model: GPT, grads: torch.Tensor, options: argparse.Namespace, lending: Any = contextlib.nullcontext
) -> Any:
    generator = torch.Generator("cuda").manual_seed(options.seed)
    text = torch.randint(
        0, SHAPE.vocabulary, (options.batch, SHAPE.context), generator=generator, device="cuda"
    )

    def compute() -> None:
        grads.zero_()
        for _ in range(options.microbatches):
            with lending():
                loss = model(text) / options.microbatches
            loss.backward()

    return compute


def reference(options: argparse.Namespace) -> dict[str, Any]:
    """The first run alone, in this process."""
    return without(options, snapshots=False)


def without(options: argparse.Namespace, snapshots: bool = True) -> dict[str, Any]:
    """The first three runs, in this process."""
    memory = Memory()
    model = GPT(SHAPE)
    mine = segments(model)
    numel = sum(s.numel for s in mine)
    flat = torch.empty(numel, dtype=torch.bfloat16, device="cuda")
    grads = torch.empty(numel, device="cuda")
    planes = [torch.zeros(numel, device="cuda") for _ in range(3)]
    parameters = bind(model, mine, flat)
    accumulate(parameters, mine, grads)
    masters = []
    for s in mine:
        part = planes[0][s.grad_offset : s.grad_offset + s.numel]
        part.copy_(initial(s, options.seed))
        master = torch.nn.Parameter(part)
        master.grad = grads[s.grad_offset : s.grad_offset + s.numel]
        masters.append(master)
    groups = [
        {
            "params": [m for m, s in zip(masters, mine, strict=True) if s.group == g],
            "lr": h.lr,
            "betas": h.betas,
            "weight_decay": h.weight_decay,
        }
        for g, h in enumerate(HYPERS)
    ]
    optimizer = torch.optim.AdamW(groups, fused=True)
    for master, s in zip(masters, mine, strict=True):  # moments in one piece each, as the snapshots want them
        state = optimizer.state[master]
        state["step"] = torch.zeros((), device="cuda")
        state["exp_avg"] = planes[1][s.grad_offset : s.grad_offset + s.numel]
        state["exp_avg_sq"] = planes[2][s.grad_offset : s.grad_offset + s.numel]
    flat.copy_(planes[0])
    compute = computation(model, grads, options)

    def step() -> None:
        float(torch.linalg.vector_norm(grads))
        optimizer.step()
        flat.copy_(planes[0])

    found: dict[str, Any] = {}
    phases = Phases(memory)
    phases.run(compute, step, options.iterations, options.warm)
    found[MODES[0]] = {"compute": phases.compute, "update": phases.update, **memory.parts()}
    if not snapshots:
        return {"runs": found, "parameters": numel}

    pinned = [
        (part, torch.empty(part.numel(), pin_memory=True)) for plane in planes for part in plane.split(PIECE)
    ]
    stream = torch.cuda.Stream()

    def snapshot() -> None:
        for part, place in pinned:
            place.copy_(part, non_blocking=True)

    def synchronous() -> None:
        snapshot()
        torch.cuda.synchronize()
        step()

    phases = Phases(memory)
    phases.run(compute, synchronous, options.iterations, options.warm)
    found[MODES[1]] = {"compute": phases.compute, "update": phases.update, "peak": memory.peak}

    def begin() -> None:
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            snapshot()
        compute()
        torch.cuda.current_stream().synchronize()

    def asynchronous() -> None:
        stream.synchronize()
        step()

    phases = Phases(memory)
    phases.run(begin, asynchronous, options.iterations, options.warm)
    found[MODES[2]] = {"compute": phases.compute, "update": phases.update, "peak": memory.peak}
    return {"runs": found, "parameters": numel}


def with_updater(options: argparse.Namespace) -> dict[str, Any]:
    from leto_rmu.cuda import CudaUpdater
    from leto_rmu.cuda.views import CudaRankMemory

    memory = Memory()
    model = GPT(SHAPE)
    mine = segments(model)
    numel = sum(s.numel for s in mine)
    plan = UpdatePlan(
        mine,
        AdamW(),
        config=PoolConfig(backend="cuda"),
        grad_numel=numel,
        chunk_pages=options.chunk_pages,
        model_bytes=2 * numel,
        gradients=options.gradients,
        scheme=options.scheme,
    )
    with (
        tempfile.TemporaryDirectory(prefix="leto-table1-") as folder,
        spawn_manager(Path(folder) / "rank0", "table1", 0, plan.config, timeout_s=120.0) as manager,
        Client.connect(manager.socket_path, timeout_s=120.0) as client,
    ):
        client.attach(Role.WRITER, 1)
        views = type("Chosen", (CudaRankMemory,), {"kernel_variant": options.kernel})
        up = type("Updater", (CudaUpdater,), {"views": views})(client, plan, lambda: None)
        assert up.recover(decide([up.summary()])).action is Action.FRESH
        for s in mine:
            up.write(s.name, "master", initial(s, options.seed))
        up.initialize()
        accumulate(bind(model, mine, up.model.view(torch.bfloat16)), mine, up.grads)
        lend = options.lend_bytes

        def lending() -> Any:
            off = not lend or (options.alternate and up.iteration % 2 == 0)
            return contextlib.nullcontext() if off else up.lending(lend)

        work = computation(model, up.grads, options, lending)

        def compute() -> None:
            up.compute_begins()
            work()

        def step() -> None:
            up.step(HYPERS, b"", lambda: SyncResult(grad_norm=float(torch.linalg.vector_norm(up.grads))))

        phases = Phases(memory)
        phases.run(compute, step, options.iterations, options.warm)
        regions = {s.name: s.nbytes for s in plan.specs() if s.placement == "device"}
        pinned, parts = client.pinning, memory.parts(sum(regions.values()))
        masters = [up.read(s.name) for s in mine]
        digest = checksum(torch.cat(masters))
        idle = sum(line.numel() for line in up.memory.idle(up.marker.rotation))
    return {
        "compute": phases.compute,
        "update": phases.update,
        **parts,
        "lend_bytes": lend,
        "idle": idle,
        "held": up.lender.held,
        "moved": up.lender.moved,
        "digest": digest,
        "regions": regions,
        "pinning": str(pinned),
        "scheme": options.scheme,
        "gradients": options.gradients,
        "kernel": options.kernel,
        "chunk_pages": options.chunk_pages,
    }


def markdown(result: dict[str, Any]) -> str:
    runs = result["runs"]
    base = {k: statistics.median(runs[MODES[0]][k]) for k in ("compute", "update")}
    total = base["compute"] + base["update"]
    lines = head("Table 1: an iteration with and without protection", result, __file__)
    rmu = runs["RMU"]
    lines += [
        f"GPT, {result['parameters'] / 1e9:.3f} B parameters, {result['tokens']} tokens an iteration in",
        f"{result['microbatches']} microbatches; {len(rmu['update'])} iterations after {result['warm']};",
        f"seed {result['seed']}. RMU: scheme {rmu['scheme']}, gradients {rmu['gradients']}, "
        f"{rmu['chunk_pages']}-page chunks, kernel {rmu['kernel']}.",
        "",
        "| run | compute, ms | update, ms | total, ms | min - max of totals | total / reference | paper |",
        "| --- | ---: | ---: | ---: | --- | ---: | ---: |",
    ]
    paper = {MODES[1]: "1.071", MODES[2]: "1.067", "RMU": "1.006"}
    for name in MODES:
        compute, update = (runs[name][k] for k in ("compute", "update"))
        totals = [a + b for a, b in zip(compute, update, strict=True)]
        lines.append(
            f"| {name} | {statistics.median(compute):.1f} | {statistics.median(update):.2f} "
            f"| {statistics.median(totals):.1f} | {min(totals):.1f} - {max(totals):.1f} "
            f"| {statistics.median(totals) / total:.4f} | {paper.get(name, '')} |"
        )
    extra = statistics.median(rmu["update"]) - base["update"]
    lines += [
        "",
        f"With RMU the update phase takes {1 + extra / base['update']:.2f} times as long as without,",
        f"{extra:.2f} ms more: {100 * extra / total:.2f} % of the reference's iteration. (It includes the",
        "gradient norm, the gradients' parity, marks and the bf16 copy.)",
        "",
        "| GPU memory at its peak | GiB |",
        "| --- | ---: |",
        f"| reference | {runs[MODES[0]]['peak'] / 2**30:.2f} |",
        f"| RMU | {rmu['peak'] / 2**30:.2f} |",
        "",
        "Regions of the pool on the GPU, GiB: "
        + ", ".join(f"{name} {nbytes / 2**30:.2f}" for name, nbytes in rmu["regions"].items())
        + ".",
    ]
    return "\n".join(lines)


def run_part(part: str, *arguments: str, environment: dict[str, str] | None = None) -> dict[str, Any]:
    """What a part says that runs in a process of its own; the script fails where it does."""
    command = [sys.executable, __file__, *arguments, "--part", part]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, check=False, env=environment)
    print(done.stderr, file=sys.stderr, flush=True)
    if done.returncode:
        raise SystemExit(f"part {part} {' '.join(arguments)} failed with status {done.returncode}")
    found: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


PARTS = {"reference": reference, "without": without, "with": with_updater}


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--batch", type=int, default=4, help="sequences of a microbatch")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=10)
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--scheme", default="slots")
    parser.add_argument("--gradients", default="parity")
    parser.add_argument("--kernel", default="lean", help="variant of the updater's kernel: plain or lean")
    parser.add_argument("--chunk-pages", type=int, default=240)
    parser.add_argument("--lend-bytes", type=int, default=0, help="smallest tensor in lent memory; 0: none")
    parser.add_argument("--alternate", action="store_true", help="lend in every second iteration only")
    parser.add_argument("--deterministic", action="store_true", help="the same bits in every run")
    parser.add_argument("--part", choices=PARTS, help="one part, printed as JSON")
    options = parsed(parser, {"microbatches": 1, "iterations": 2, "warm": 1})
    if options.alternate and not (options.part == "with" and options.lend_bytes):
        parser.error("--alternate is for --part with and a --lend-bytes")
    if options.part:
        if options.deterministic:  # the backward pass of attention adds in any order otherwise
            torch.use_deterministic_algorithms(True)
            torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        print(json.dumps(PARTS[options.part](options)), flush=True)
        return
    halves = {part: run_part(part, *sys.argv[1:]) for part in ("without", "with")}
    result = {
        "machine": machine(),
        "tokens": options.batch * SHAPE.context * options.microbatches,
        "parameters": halves["without"]["parameters"],
        **{k: getattr(options, k) for k in ("microbatches", "warm", "seed")},
        "runs": {**halves["without"]["runs"], "RMU": halves["with"]},
    }
    publish(result, markdown(result), options.output)


if __name__ == "__main__":
    main()
