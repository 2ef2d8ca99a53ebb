"""What a shadow holds of a GPU, part by part, and what each setting saves or costs (two GPUs).

    python packages/leto-megatron/benchmarks/gpu_footprint.py --output OUT/footprint-h200 --budget 200

First one process that is nothing but a CUDA context, whose limits are lowered one after the other. Then, for
each variant (settings of NCCL, cuBLAS and CUDA), two ranks that do what shadows do on their way to level 3;
after each step NVML says what each process holds. Beside it the rate of collectives of the sizes of a
training step, and the time of iterations of two layers of the real width, so that a lever's price is seen in
the same run. Everything is written again after each variant. `--host` runs all of it without GPUs, to see
that the script works; its numbers mean nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import platform
import select
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

MIB = 1 << 20
RANKS = 2
READY_S, DONE_S = 60.0, 45.0
STAGES = {
    "context": "context",
    "level 2": "level 2: cuBLAS, kernels of model and update",
    "groups": "groups formed",
    "collective": "groups warmed",
    "level 3": "level 3: an iteration of one layer, caches given back",
    "parked": "the memory of stacks given back as well (`leto_megatron.warm.park`)",
    "unparked": "taken again, as at a takeover",
    "again": "the same after work, caches given back",
}


@dataclass(frozen=True)
class Variant:
    """Settings: changes of the environment (None: unset), and of the worker (``how``)."""

    name: str
    settings: dict[str, str | None] = field(default_factory=dict)
    how: tuple[str, ...] = ()


def nccl(**values: Any) -> dict[str, str | None]:
    return {f"NCCL_{name}": None if value is None else str(value) for name, value in values.items()}


def ctas(count: int) -> dict[str, str | None]:
    return nccl(MIN_CTAS=count, MAX_CTAS=count)


SMALL_LL = nccl(LL_BUFFSIZE=1 << 16, LL128_BUFFSIZE=120 * 640 * 8)
"""LL and LL128 buffers of an eighth and less; the protocols are not used (NCCL_PROTO=Simple)."""
VARIANTS = (
    Variant("as shipped"),
    Variant("no cuMem", nccl(CUMEM_ENABLE=0)),
    Variant("2 CTAs", ctas(2)),
    Variant("no cuMem, 2 CTAs", {**nccl(CUMEM_ENABLE=0), **ctas(2)}),
    Variant("traced", {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,ALLOC,P2P"}),
    Variant("1 CTA", ctas(1)),
    Variant("4 CTAs", ctas(4)),
    Variant("16 CTAs", ctas(16)),
    Variant("buffers 512 KiB", nccl(BUFFSIZE=512 << 10)),
    Variant("buffers 256 KiB", nccl(BUFFSIZE=256 << 10)),
    Variant("cuBLAS workspace :16:8", {"CUBLAS_WORKSPACE_CONFIG": ":16:8"}),
    Variant("groups not shared", {}, ("unshared",)),
    Variant("NCCL's defaults", nccl(MIN_CTAS="", MAX_CTAS="", BUFFSIZE="", ALGO="", PROTO="")),
    Variant("through shared memory", nccl(P2P_DISABLE=1)),
    Variant("modules loaded eagerly", {"CUDA_MODULE_LOADING": "EAGER"}),
    Variant("stack size set by NCCL", nccl(SET_STACK_SIZE=1)),
    # These may fail: kernels whose depth is not known, protocols with less room than they count on.
    Variant("small LL and LL128 buffers", SMALL_LL),
    Variant("stack limit 512 B", {}, ("stack=512",)),
    Variant("groups not shared, split", {}, ("unshared", "split")),
)


# --- the ranks ------------------------------------------------------------------------------------


class Meter:
    """What this process holds of its device, by NVML; on the host its resident memory."""

    def __init__(self, host: bool, rank: int) -> None:
        self.host = host
        if not host:
            from leto_shadow.nvml import Nvml

            self._nvml = Nvml()
            self._uuid = self._nvml.gpus()[rank].uuid

    def mib(self) -> float:
        if self.host:
            pages = int(Path("/proc/self/statm").read_text().split()[1])
            return pages * os.sysconf("SC_PAGE_SIZE") / MIB
        look = self._nvml.look(self._uuid)
        return (look.processes or {}).get(os.getpid(), 0) / MIB


def worker(arguments: argparse.Namespace) -> int:
    """One rank of one variant: import, wait for the word, go through the stages, say what was measured."""
    import torch
    import torch.distributed as dist

    from leto_megatron import model, process, warm
    from leto_megatron.config import PRESETS

    host, rank, how = arguments.host, arguments.rank, set(arguments.how)
    if not host:
        warm.import_kernels()
    process.prepare_process()
    for name in [name for name, value in os.environ.items() if name.startswith("NCCL_") and not value]:
        del os.environ[name]  # an empty value has kept the default of this package out
    meter = Meter(host, rank)
    print("ready", flush=True)
    if sys.stdin.readline().strip() != "go":
        return 1
    if host:
        config = dataclasses.replace(PRESETS["tiny"], iterations=50)
    else:
        config = dataclasses.replace(PRESETS["paper"], micro_batch=8, corpus_bytes=1 << 20)
    held: dict[str, float] = {}
    seconds: dict[str, float] = {}

    def stage(name: str, work: Callable[[], Any]) -> None:
        started = time.monotonic()
        work()
        if not host:
            torch.cuda.synchronize()
        seconds[name] = time.monotonic() - started
        held[name] = meter.mib()

    def context() -> None:
        if not host:
            torch.cuda.set_device(rank)
            torch.zeros(1, device="cuda")
            for one in how:
                if one.startswith("stack="):
                    set_limit("STACK_SIZE", int(one.partition("=")[2]))

    def level_2() -> None:
        process.settle_device(rank)
        if not host:
            warm.load_kernels(config)

    def groups() -> None:
        if "unshared" in how:
            process.share_groups = lambda names, wanted: 0
        store = dist.TCPStore("127.0.0.1", arguments.port, is_master=False, wait_for_workers=False)
        if "split" in how and not host:
            split_from_here(rank, store)
        process.form_groups(config, store, rank, RANKS)

    def level_3() -> None:
        if not host:
            warm.iterate_once(config)

    stage("context", context)
    stage("level 2", level_2)
    stage("groups", groups)
    stage("collective", lambda: process.warm_groups(sharded=config.distributed_optimizer))
    stage("level 3", level_3)
    stage("parked", lambda: None if host else warm.park())
    stage("unparked", warm.unpark)
    rates = {} if arguments.quick else collectives(host)
    steps = [] if arguments.quick else iterations(dataclasses.replace(config, layers=2), host)
    if not host:
        stage("again", warm._give_back)
    result = {"held_mib": held, "seconds": seconds, "rates": rates, "iteration_s": steps}
    print("result " + json.dumps(result), flush=True)
    sys.stdin.readline()  # until the other rank has measured as well
    del model
    os._exit(0)  # no farewell: leaving groups is not what is measured


def set_limit(name: str, value: int) -> None:
    """cuCtxSetLimit of the current context."""
    from cuda.bindings import driver

    (error,) = driver.cuCtxSetLimit(getattr(driver.CUlimit, f"CU_LIMIT_{name}"), value)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"cuCtxSetLimit({name}, {value}): {error}")


def split_from_here(rank: int, store: Any) -> None:
    """Have form_groups make a default group with a communicator, and split the others from it."""
    import torch
    import torch.distributed as dist

    form, make = dist.init_process_group, dist.new_group

    def init(*words: Any, **given: Any) -> None:
        form(*words, **given, device_id=torch.device("cuda", rank))

    def new_group(*words: Any, **given: Any) -> Any:
        if given.get("backend") in (None, "nccl"):
            options = dist.ProcessGroupNCCL.Options()
            options.config.split_share = 1
            given["pg_options"] = options
        return make(*words, **given)

    dist.init_process_group, dist.new_group = init, new_group


def collectives(host: bool) -> dict[str, float]:
    """GB a second of bytes that a rank sends, median of five."""
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state as ps

    group = ps.get_data_parallel_group(with_context_parallel=True)
    device = "cpu" if host else "cuda"
    count = (1 << 16) if host else (1 << 27)  # fp32: 512 MiB of gradients
    whole = torch.zeros(count, dtype=torch.float32, device=device)
    part = torch.zeros(count // RANKS, dtype=torch.float32, device=device)
    half = whole.view(torch.bfloat16)
    mine = torch.zeros(half.numel() // RANKS, dtype=torch.bfloat16, device=device)
    sent = whole.nbytes * (RANKS - 1) / RANKS
    small = torch.zeros(1024, dtype=torch.float32, device=device)
    found = {}
    for name, nbytes, call in (
        ("all-reduce, GB/s", 2 * sent, lambda: dist.all_reduce(whole, group=group)),
        ("reduce-scatter, GB/s", sent, lambda: dist.reduce_scatter_tensor(part, whole, group=group)),
        ("all-gather, GB/s", sent, lambda: dist.all_gather_into_tensor(half, mine, group=group)),
        ("all-reduce of 4 KiB, 1/ms", 1e6, lambda: dist.all_reduce(small, group=group)),
    ):
        times = []
        for _ in range(7):
            if not host:
                torch.cuda.synchronize()
            started = time.monotonic()
            call()
            if not host:
                torch.cuda.synchronize()
            times.append(time.monotonic() - started)
        found[name] = nbytes / statistics.median(times[2:]) / 1e9
    return found


def iterations(config: Any, host: bool) -> list[float]:
    """Seconds of iterations with the stock optimizer, the first two left out."""
    import torch

    from leto_megatron import model, process

    process.seed_everything(config)
    transformer = model.transformer_config(config)
    parts = model.wrap(config, transformer, model.build_gpt(config, transformer))
    compute = model.Compute(config, parts)
    times = []
    for iteration in range(10):
        started = time.monotonic()
        compute(iteration)
        parts.optimizer.step()
        parts.scheduler.step(increment=1)
        if not host:
            torch.cuda.synchronize()
        times.append(time.monotonic() - started)
    return times[2:]


# --- a bare context -------------------------------------------------------------------------------


def bare() -> int:
    """A process without torch: a context, its limits, and what it holds with each of them."""
    from cuda.bindings import driver

    from leto_shadow.nvml import Nvml

    def checked(result: tuple[Any, ...]) -> Any:
        error, *values = result
        if error != driver.CUresult.CUDA_SUCCESS:
            raise RuntimeError(str(error))
        return values[0] if values else None

    nvml = Nvml()
    uuid = nvml.gpus()[0].uuid
    before = nvml.look(uuid).free_bytes
    checked(driver.cuInit(0))
    context = checked(driver.cuDevicePrimaryCtxRetain(checked(driver.cuDeviceGet(0))))
    checked(driver.cuCtxSetCurrent(context))

    def look(what: str) -> dict[str, Any]:
        seen = nvml.look(uuid)
        limits = {
            name: int(checked(driver.cuCtxGetLimit(getattr(driver.CUlimit, f"CU_LIMIT_{name}"))))
            for name in ("STACK_SIZE", "PRINTF_FIFO_SIZE", "MALLOC_HEAP_SIZE")
        }
        mine = (seen.processes or {}).get(os.getpid(), 0)
        device = before - seen.free_bytes
        return {"what": what, "process_mib": mine / MIB, "device_mib": device / MIB, "limits": limits}

    rows = [look("context")]
    for name, value in (
        ("STACK_SIZE", 512),
        ("STACK_SIZE", 256),
        ("PRINTF_FIFO_SIZE", 64 << 10),
        ("MALLOC_HEAP_SIZE", 1 << 20),
        ("STACK_SIZE", 4096),
        ("STACK_SIZE", 256),
    ):
        try:
            set_limit(name, value)
            rows.append(look(f"{name} {value}"))
        except RuntimeError as error:
            rows.append({"what": f"{name} {value}: {error}"})
    print("result " + json.dumps(rows), flush=True)
    return 0


# --- the parent -----------------------------------------------------------------------------------


class Ranks:
    """The processes of one variant; they import at once and wait for `go`."""

    def __init__(self, variant: Variant, folder: Path, given: argparse.Namespace) -> None:
        from torch.distributed import TCPStore

        self.variant = variant
        self.host: bool = given.host
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        name = "".join(letter if letter.isalnum() else "-" for letter in variant.name)
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        if given.host:
            environment["CUDA_VISIBLE_DEVICES"] = ""
        environment.setdefault("NCCL_NVLS_ENABLE", "0")
        environment.setdefault("NCCL_SOCKET_IFNAME", "lo")
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
        for key, value in variant.settings.items():
            if value is None:
                environment.pop(key, None)
            else:
                environment[key] = value
        command = [sys.executable, __file__, "--worker", "--port", str(self.store.port)]
        command += ["--how", *variant.how] if variant.how else []
        command += ["--host"] * given.host + ["--quick"] * given.quick
        self.logs = [folder / f"{name}-{rank}.log" for rank in range(RANKS)]
        self.processes = []
        for rank, log in enumerate(self.logs):
            with open(log, "wb") as errors:
                self.processes.append(
                    subprocess.Popen(
                        [*command, "--rank", str(rank)],
                        stdin=subprocess.PIPE,
                        stdout=subprocess.PIPE,
                        stderr=errors,
                        bufsize=0,  # what is buffered here would be unseen by select
                        env={**environment, "NCCL_DEBUG_FILE": str(folder / f"{name}-nccl-{rank}")},
                    )
                )

    def measure(self) -> list[dict[str, Any]]:
        """Let them go; return what each has measured."""
        try:
            for process in self.processes:
                self._line(process, "ready", READY_S * (1 + 4 * self.host))
            self._say("go")
            found = [json.loads(self._line(process, "result", DONE_S)) for process in self.processes]
            self._say("end")
            for process in self.processes:
                process.wait(30.0)
            return found
        finally:
            self.end()

    def _say(self, word: str) -> None:
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(word.encode() + b"\n")
            process.stdin.flush()

    def _line(self, process: subprocess.Popen[bytes], word: str, timeout_s: float) -> str:
        """The rest of the line that begins with ``word``; libraries may print others before it."""
        assert process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while select.select([process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
            line = process.stdout.readline().decode(errors="replace")
            if not line:
                break
            if line.startswith(word):
                return line.removeprefix(word).strip()
        raise RuntimeError(f"no {word!r} of a rank of {self.variant.name!r}: {self.tail()}")

    def tail(self) -> str:
        return " | ".join(path.read_text(errors="replace").strip()[-400:] for path in self.logs)

    def end(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


def machine(host: bool) -> dict[str, Any]:
    import importlib.metadata

    import torch

    found: dict[str, Any] = {
        "system": f"{platform.system()} {platform.release()}",
        "cores": os.cpu_count(),
        "torch": torch.__version__,
        "date": time.strftime("%Y-%m-%d"),
    }
    for package in ("nvidia-nccl-cu13", "nvidia-nccl-cu12", "nvidia-nvjitlink", "megatron-core"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if not host:
        from leto_shadow.gpu import list_gpus

        found["gpus"] = [gpu.name for gpu in list_gpus()]
    return found


def run(given: argparse.Namespace) -> int:
    """Measure all variants that the budget allows, in their order."""
    started = time.monotonic()
    wanted = [v for v in VARIANTS if given.only is None or any(word in v.name for word in given.only)]
    data: dict[str, Any] = {"machine": machine(given.host), "bare": [], "variants": [], "failed": {}}
    ahead: list[Ranks] = []

    def say(text: str) -> None:
        print(f"[{time.monotonic() - started:6.1f} s] {text}", flush=True)

    with tempfile.TemporaryDirectory(prefix="leto-fp-") as name:
        folder = Path(name)
        try:
            waiting = list(wanted)
            ahead.append(Ranks(waiting.pop(0), folder, given))
            if not given.host:
                data["bare"] = bare_rows(say)
            while ahead:
                if waiting and time.monotonic() - started < given.budget:
                    ahead.append(Ranks(waiting.pop(0), folder, given))  # imports while this one measures
                ranks = ahead.pop(0)
                try:
                    found = ranks.measure()
                except (RuntimeError, OSError, subprocess.TimeoutExpired) as error:
                    data["failed"][ranks.variant.name] = str(error)
                    say(f"{ranks.variant.name}: FAILED: {error}")
                else:
                    one = dataclasses.asdict(ranks.variant)
                    data["variants"].append({**one, "ranks": found})
                    last = found[0]["held_mib"]
                    steps = found[0]["iteration_s"]
                    ms = f", iteration {statistics.median(steps) * 1e3:.1f} ms" if steps else ""
                    say(f"{ranks.variant.name}: {', '.join(f'{k} {v:.0f}' for k, v in last.items())}{ms}")
                data["left_out"] = [variant.name for variant in waiting]
                write(data, given.output, folder)
        finally:
            for ranks in ahead:
                ranks.end()
    say("failed: " + ", ".join(data["failed"]) if data["failed"] else "all variants were measured")
    return 1 if data["failed"] or data["left_out"] else 0


def bare_rows(say: Callable[[str], None]) -> list[dict[str, Any]]:
    """What `bare` has measured, in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--bare"], capture_output=True, text=True, timeout=60, check=False
    )
    for line in done.stdout.splitlines():
        if line.startswith("result "):
            rows: list[dict[str, Any]] = json.loads(line.removeprefix("result "))
            for row in rows:
                say(f"bare context: {row}")
            return rows
    say(f"bare context: FAILED: {done.stderr[-600:]}")
    return []


def write(data: dict[str, Any], output: Path | None, folder: Path) -> None:
    if output is None:
        return
    output.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
    output.with_suffix(".md").write_text(page(data, output.name))
    logs = []
    for path in sorted(folder.iterdir()):
        text = path.read_text(errors="replace")
        if text.strip():
            logs.append(f"==== {path.name}\n{text[-100_000:]}\n")
    output.with_suffix(".log").write_text("".join(logs))


def page(data: dict[str, Any], name: str) -> str:
    """The tables, in Markdown."""
    where = data["machine"]
    lines = [
        "# GPU memory of a shadow, part by part",
        "",
        *(f"* {key}: {value}" for key, value in where.items()),
        f"* script: `packages/leto-megatron/benchmarks/gpu_footprint.py`; data: [{name}.json]({name}.json)",
        "",
        "MiB that the process of rank 0 holds of its GPU after each step, as NVML accounts for it. Variants",
        "change what this package ships (`leto_megatron.process.NCCL_SETTINGS`).",
        "",
    ]
    stages = [key for key in STAGES if any(key in v["ranks"][0]["held_mib"] for v in data["variants"])]
    rates = list(data["variants"][0]["ranks"][0]["rates"]) if data["variants"] else []
    lines.append("| variant | " + " | ".join([*stages, *rates, "iteration, ms"]) + " |")
    lines.append("| --- |" + " ---: |" * (len(stages) + len(rates) + 1))
    for variant in data["variants"]:
        first = variant["ranks"][0]
        cells = [f"{first['held_mib'][key]:.0f}" if key in first["held_mib"] else "-" for key in stages]
        cells += [f"{first['rates'].get(key, 0.0):.1f}" for key in rates]
        steps = first["iteration_s"]
        cells.append(f"{statistics.median(steps) * 1e3:.1f}" if steps else "-")
        lines.append(f"| {variant['name']} | " + " | ".join(cells) + " |")
    lines += ["", *(f"* {key}: {STAGES[key]}" for key in stages), ""]
    if data["variants"]:
        took = data["variants"][0]["ranks"][0]["seconds"]
        words = ", ".join(f"{key} {seconds:.3f}" for key, seconds in took.items())
        lines += [f"Seconds of the steps as shipped: {words}.", ""]
    for variant in data["variants"]:
        if variant["settings"] or variant["how"]:
            words = [f"{k}={v}" for k, v in variant["settings"].items()] + list(variant["how"])
            lines.append(f"* {variant['name']}: `{' '.join(words)}`")
    if data["bare"]:
        lines += [
            "",
            "## A bare context",
            "",
            "| | process | device | limits |",
            "| --- | ---: | ---: | --- |",
        ]
        for row in data["bare"]:
            numbers = [f"{row[key]:.0f}" if key in row else "-" for key in ("process_mib", "device_mib")]
            lines.append(f"| {row['what']} | {' | '.join(numbers)} | {row.get('limits', '')} |")
    for key, text in data["failed"].items():
        lines += ["", f"Failed: {key}: {text}"]
    if data.get("left_out"):
        lines += ["", f"Left out for want of time: {', '.join(data['left_out'])}"]
    return "\n".join(lines) + "\n"


def main() -> int:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--output", type=Path, help="write OUTPUT.json, .md and .log")
    parser.add_argument("--budget", type=float, default=240.0, help="seconds after which no variant begins")
    parser.add_argument("--only", nargs="+", help="variants whose names hold one of these words")
    parser.add_argument("--quick", action="store_true", help="memory alone: no rates, no iterations")
    parser.add_argument("--host", action="store_true", help="without GPUs, to try the script")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--bare", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--how", nargs="*", default=[], help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.bare:
        return bare()
    if given.worker:
        return worker(given)
    if given.output is not None:
        given.output.parent.mkdir(parents=True, exist_ok=True)
    return run(given)


if __name__ == "__main__":
    sys.exit(main())
