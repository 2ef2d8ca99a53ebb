"""AdamW, parity delta and bf16 copy in one kernel: exactness and times of every variant, on one NVIDIA GPU.

    python packages/leto-rmu/benchmarks/gpu_fused_adamw.py --output docs/benchmarks/rmu-fused-h200

writes rmu-fused-h200.json (every sample) and rmu-fused-h200.md. The study that the kernel of the updater was
chosen from.

The kernels need the carry-less multiply-add of PTX 9.3. Where an nvcc is found that knows it (on PATH, or the
wheel nvidia-cuda-nvcc), the script compiles them; `--cubin FILE` takes what was compiled elsewhere:

    nvcc -cubin -arch=sm_90 -std=c++17 -O3 -DLETO_EC_CLMAD -I packages/leto-ec/src/leto_ec/cuda \
        -o fused.cubin packages/leto-rmu/benchmarks/gpu_fused_adamw.cu

Otherwise NVRTC compiles one variant with integer multiplication, which is many times slower.

Exactness: parameters, moments and bf16 copies against torch.optim.AdamW on the same GPU, in its three
implementations; parity against leto_ec's own update of the same pages; the undo buffer against the state
before. Times: CUDA events, all implementations in turn in one process, medians of `--runs` with the
extremes. A spinning kernel goes first, so that the launches are queued before the clock starts. Predictions
were written down before the run that they are printed with.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import cupy
import numpy as np
import torch
from proof_lab import head, machine, publish

import leto_ec
from leto_ec.cuda import block_coefficients, include_dir

HERE = Path(__file__).parent
PAGE = 2 << 20
WORDS = PAGE // 4
PAGES, PARITY = 5, 16  # pages of a plane in a sub-block; rows of parity
GROUP = 64  # sub-blocks in a protection group: 960 data pages of 1024 points
SPIN_CYCLES = 20_000_000  # some 10 ms

STEP = np.dtype(
    [(name, "f4") for name in ("keep", "omb1", "b2", "omb2", "root", "eps", "minus", "scale", "clip")]
)
CHUNK = np.dtype(
    [
        (name, "u8")
        for name in ("gradients", "source", "target", "undo", "half", "coefficients", "before", "after")
    ]
    + [(name, "u8") for name in ("plane", "undo_plane", "words", "blocks")]
    + [("step", STEP), ("pad", "f4")]
)


@dataclass(frozen=True)
class Variant:
    """One kernel. `stages` 0: plain loads."""

    name: str
    threads: int
    stages: int = 0
    undo: bool = False
    parity: bool = True

    def shared(self, blocks: int) -> int:
        table = blocks * 16 * 8 if self.parity else 0
        return table + self.stages * 4 * PAGES * self.threads * 4

    def bytes_moved(self, blocks: int) -> float:
        """Bytes of global memory a parameter: gradient, states twice, bf16; undo; a share of Q and Q'."""
        share = 2 * PARITY * 4 / (PAGES * blocks) if self.parity else 0.0
        return 4 + 24 + 2 + (12 if self.undo else 0) + share


VARIANTS = (
    Variant("plain_ldg_256", 256, parity=False),
    Variant("slot_ldg_256", 256),
    Variant("slot_ldg_128", 128),
    Variant("slot_async_128_3", 128, 3),
    Variant("slot_async_128_4", 128, 4),
    Variant("slot_async_256_3", 256, 3),
    Variant("undo_ldg_256", 256, undo=True),
    Variant("undo_async_128_3", 128, 3, undo=True),
    Variant("undo_async_128_4", 128, 4, undo=True),
    Variant("undo_async_256_3", 256, 3, undo=True),
)
BLOCKS = (64, 16, 4, 1)  # sub-blocks in a chunk; 1: 15 pages, at most H1

# (variant, sub-blocks) -> milliseconds for 1.007 B parameters, and why
PREDICTIONS = {
    ("slot_async_128_3", 64): (7.9, "prototype measured: 3.86 TB/s of 30.4 bytes a parameter"),
    ("slot_async_128_3", 16): (8.7, "prototype measured"),
    ("slot_async_128_3", 4): (10.2, "36.4 bytes a parameter at 3.6 TB/s: short pipelines fill 96 times"),
    ("slot_async_128_3", 1): (17.5, "55.6 bytes a parameter at 3.2 TB/s: nothing is ahead in the pipeline"),
    ("undo_async_128_3", 64): (
        11.2,
        "42.4 bytes a parameter at the free slot's rate, a little less for more writes",
    ),
    ("undo_async_128_3", 16): (12.0, "43.6 bytes a parameter, same"),
    ("undo_async_128_3", 1): (
        21.5,
        "67.6 bytes a parameter at 3.2 TB/s; undo stays in the 60 MB cache in part",
    ),
    ("undo_ldg_256", 64): (13.5, "prototype measured, with addresses beyond its undo buffer"),
    ("slot_ldg_256", 64): (9.5, "prototype measured"),
    ("plain_ldg_256", 64): (9.2, "prototype measured"),
}


# -- building ------------------------------------------------------------------------------------


def compilers() -> Iterator[str]:
    found = shutil.which("nvcc")
    if found:
        yield found
    package = importlib.util.find_spec("nvidia")
    for root in (package.submodule_search_locations or []) if package else []:
        yield from map(str, sorted(Path(root).glob("*/bin/nvcc")))


def build(cubin: Path | None) -> tuple[Any, str, tuple[Variant, ...]]:
    """Return the module, what made it, and the variants that it has."""
    if cubin is not None:
        return cupy.RawModule(path=str(cubin)), f"CLMAD, compiled elsewhere ({cubin.name})", VARIANTS
    source = HERE / "gpu_fused_adamw.cu"
    major, minor = torch.cuda.get_device_capability()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "fused.cubin"
        for nvcc in compilers():
            options = ["-cubin", f"-arch=sm_{major}{minor}", "-std=c++17", "-O3", "-DLETO_EC_CLMAD"]
            command = [nvcc, *options, "-I", str(include_dir()), "-o", str(out), str(source)]
            if subprocess.run(command, capture_output=True, timeout=300, check=False).returncode == 0:
                module = cupy.RawModule(path=str(out))
                module.get_function(VARIANTS[0].name)  # loads it while the file is there
                return module, f"CLMAD, {nvcc}", VARIANTS
    return *portable(), tuple(v for v in VARIANTS if v.name == "slot_async_128_3")


def portable() -> tuple[Any, str]:
    code = (HERE / "gpu_fused_adamw.cu").read_text()
    options = ("-std=c++17", f"-I{include_dir()}", "-DLETO_RMU_ONE")
    return cupy.RawModule(code=code, options=options), "NVRTC, integer multiplication"


# -- the optimizer -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """One step of AdamW. `scale` and `clip` multiply the gradient first."""

    step: int
    weight_decay: float
    scale: float = 1.0
    clip: float = 1.0
    lr: float = 2.2e-4
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 1e-8

    def constants(self) -> Any:
        """As torch computes them: in double, rounded to float when the kernel is launched."""
        b1, b2 = self.betas
        one = np.zeros(1, STEP)
        one["keep"] = 1 - self.lr * self.weight_decay
        one["omb1"], one["b2"], one["omb2"] = 1 - b1, b2, 1 - b2
        one["root"], one["eps"] = math.sqrt(1 - b2**self.step), self.eps
        one["minus"] = -(self.lr / (1 - b1**self.step))
        one["scale"], one["clip"] = self.scale, self.clip
        return one[0]

    def optimizer(self, parameters: list[torch.Tensor], **kind: bool) -> torch.optim.AdamW:
        return torch.optim.AdamW(
            parameters, lr=self.lr, betas=self.betas, eps=self.eps, weight_decay=self.weight_decay, **kind
        )


@dataclass
class Buffers:
    """`groups` groups of GROUP sub-blocks, with a chunk of free slots below them."""

    groups: int

    def __post_init__(self) -> None:
        self.group_numel = GROUP * PAGES * WORDS
        self.numel = self.groups * self.group_numel
        # A whole group as the largest chunk: so many free slots.
        self.plane = self.numel + self.group_numel
        self.state = torch.empty(3, self.plane, device="cuda")
        self.gradients = torch.empty(self.numel, device="cuda")
        self.half = torch.empty(self.numel, dtype=torch.bfloat16, device="cuda")
        self.undo = torch.empty(3, self.group_numel, device="cuda")
        self.parity = torch.empty(self.groups, 2, PARITY, WORDS, dtype=torch.int32, device="cuda")
        table = block_coefficients(PARITY // 16, GROUP).astype(np.uint32)
        self.coefficients = torch.from_numpy(table.view(np.int32)).cuda()

    def fill(self, seed: int, *, first_step: bool = False) -> None:
        generator = torch.Generator("cuda").manual_seed(seed)
        self.gradients.normal_(0, 1e-2, generator=generator)
        self.state[0].normal_(0, 0.02, generator=generator)
        self.state[1].normal_(0, 1e-3, generator=generator)
        self.state[2].uniform_(0, 1e-5, generator=generator)
        if first_step:
            self.state[1:].zero_()
        self.parity.random_(-(2**31), 2**31 - 1, generator=generator)

    def slot_start(self, variant: Variant, blocks: int) -> int:
        """Where the states lie before the update: one chunk above the free slot, or in place."""
        return 0 if variant.undo else blocks * PAGES * WORDS

    def chunks(self, variant: Variant, blocks: int, setting: Setting) -> list[Any]:
        """Kernel arguments of every chunk in order; Q and Q' take turns."""
        per, found = blocks * PAGES * WORDS, []
        for k in range(self.numel // per):
            group, inside = divmod(k * blocks, GROUP)
            turn = k & 1
            one = np.zeros(1, CHUNK)
            one["gradients"] = self.gradients.data_ptr() + k * per * 4
            one["target"] = self.state.data_ptr() + k * per * 4
            one["source"] = one["target"] + self.slot_start(variant, blocks) * 4
            one["undo"] = self.undo.data_ptr()
            one["half"] = self.half.data_ptr() + k * per * 2
            one["coefficients"] = self.coefficients.data_ptr() + inside * 64
            one["before"], one["after"] = (self.parity[group, x].data_ptr() for x in (turn, 1 - turn))
            one["plane"], one["undo_plane"] = self.plane, self.undo.shape[1]
            one["words"], one["blocks"], one["step"] = WORDS, blocks, setting.constants()
            found.append(one[0])
        return found


def launcher(module: Any, variant: Variant, blocks: int, chunks: list[Any]) -> Callable[[], None]:
    kernel = module.get_function(variant.name)
    shared = variant.shared(blocks)
    kernel.max_dynamic_shared_size_bytes = max(shared, kernel.max_dynamic_shared_size_bytes)
    grid, threads = (WORDS // variant.threads,), (variant.threads,)

    def run() -> None:
        for chunk in chunks:
            kernel(grid, threads, (chunk,), shared_mem=shared)

    return run


# -- exactness -----------------------------------------------------------------------------------

KINDS: dict[str, dict[str, bool]] = {
    "foreach": {"foreach": True},
    "fused": {"fused": True},
    "single-tensor": {"foreach": False, "fused": False},
}
SETTINGS = (Setting(1, 0.1), Setting(7, 0.1), Setting(1000, 0.0, scale=2.0**-7 * 1.1, clip=0.37))


def reference(buffers: Buffers, setting: Setting, before: torch.Tensor, **kind: bool) -> list[torch.Tensor]:
    """p, m, v after torch's own step."""
    p = before[0].clone().requires_grad_()
    gradient = buffers.gradients
    if (setting.scale, setting.clip) != (1.0, 1.0):
        gradient = (gradient * setting.scale) * setting.clip
    p.grad = gradient
    optimizer = setting.optimizer([p], **kind)
    step = torch.tensor(float(setting.step - 1), device="cuda" if kind.get("fused") else "cpu")
    optimizer.state[p] = {"step": step, "exp_avg": before[1].clone(), "exp_avg_sq": before[2].clone()}
    optimizer.step()
    return [p.detach(), optimizer.state[p]["exp_avg"], optimizer.state[p]["exp_avg_sq"]]


def ordered(a: torch.Tensor) -> torch.Tensor:
    """Integers in the order of the floats, neighbours one apart."""
    bits = a.view(torch.int32).long()
    return torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)


def ulps(a: torch.Tensor, b: torch.Tensor) -> dict[str, float]:
    """How many differ, and by how many units in the last place at most."""
    apart = (ordered(a) - ordered(b)).abs_()
    return {
        "differ": int((apart != 0).sum()),
        "ulp_max": int(apart.max()),
        "absolute_max": float((a - b).abs().max()),
    }


def pages_of(state: torch.Tensor) -> list[torch.Tensor | None]:
    """Pages in the order of the code's points: sub-block by sub-block, 15 pages and a hole."""
    found: list[torch.Tensor | None] = []
    view = state.view(3, -1, PAGES, WORDS)
    for b in range(view.shape[1]):
        found += [view[s, b, j].view(torch.uint8) for s in range(3) for j in range(PAGES)] + [None]
    return found


def parity_after(before: torch.Tensor, after: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    code = leto_ec.ReedSolomon(GROUP * 16, PARITY)
    out = torch.empty_like(rows).view(torch.uint8)
    old, new = pages_of(before)[:-1], pages_of(after)[:-1]
    code.update(rows.view(torch.uint8), index=0, old=old, new=new, out=out)
    return out.view(torch.int32)


def exactness(module: Any, variants: tuple[Variant, ...]) -> dict[str, Any]:
    """Raise unless every variant gives the bits of foreach; count the differences to the others."""
    buffers, numbers = Buffers(1), {}
    for setting in SETTINGS:
        buffers.fill(setting.step, first_step=setting.step == 1)
        before = buffers.state[:, : buffers.numel].clone()
        rows = buffers.parity[0, 0].clone()
        expected = reference(buffers, setting, before, foreach=True)
        expected_parity = parity_after(before, torch.stack(expected), rows)
        for name, kind in KINDS.items():
            theirs = reference(buffers, setting, before, **kind)
            pairs = zip(("p", "exp_avg", "exp_avg_sq"), theirs, expected, strict=True)
            numbers[f"step {setting.step}, foreach against {name}"] = {n: ulps(a, b) for n, a, b in pairs}
            del theirs
        for variant in variants:
            for blocks in BLOCKS:
                start = buffers.slot_start(variant, blocks)
                for tensor in (buffers.state, buffers.undo, buffers.half):
                    tensor.fill_(float("nan"))
                buffers.state[:, start : start + buffers.numel] = before
                buffers.parity[0, 0] = rows
                launcher(module, variant, blocks, buffers.chunks(variant, blocks, setting))()
                torch.cuda.synchronize()
                after = buffers.state[:, : buffers.numel]
                wrong = [
                    name
                    for name, mine, theirs in zip(
                        ("p", "exp_avg", "exp_avg_sq"), after, expected, strict=True
                    )
                    if not torch.equal(mine.view(torch.int32), theirs.view(torch.int32))
                ]
                if not torch.equal(buffers.half.view(torch.int16), expected[0].bfloat16().view(torch.int16)):
                    wrong.append("bf16")
                turns = buffers.numel // (blocks * PAGES * WORDS)
                if variant.parity and not torch.equal(buffers.parity[0, turns & 1], expected_parity):
                    wrong.append("parity")
                last = buffers.numel - blocks * PAGES * WORDS
                if variant.undo and not torch.equal(
                    buffers.undo[:, : buffers.numel - last].view(torch.int32),
                    before[:, last:].view(torch.int32),
                ):
                    wrong.append("undo")
                if wrong:
                    raise SystemExit(f"{variant.name}, {blocks} sub-blocks, {setting}: wrong {wrong}")
        print(f"step {setting.step}: {len(variants) * len(BLOCKS)} kernels equal foreach", flush=True)
        del before, expected
    return {"elements": buffers.numel, "settings": [str(s) for s in SETTINGS], "torch": numbers}


# -- times ---------------------------------------------------------------------------------------


def timed(works: dict[str, Callable[[], Any]], runs: int) -> dict[str, list[float]]:
    """Milliseconds of each, taken in turn, `runs` times."""
    samples: dict[str, list[float]] = {name: [] for name in works}
    for run in range(runs + 2):
        for name, work in works.items():
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda._sleep(SPIN_CYCLES)
            begin.record()
            work()
            end.record()
            end.synchronize()
            if run >= 2:
                samples[name].append(begin.elapsed_time(end))
    return samples


def times(module: Any, variants: tuple[Variant, ...], groups: int, runs: int, slow: Any) -> dict[str, Any]:
    buffers, setting = Buffers(groups), Setting(7, 0.1)
    buffers.fill(0)
    n = buffers.numel
    parameters = [torch.nn.Parameter(x) for x in buffers.state[0, :n].view(groups, -1).clone()]
    for p, gradient in zip(parameters, buffers.gradients.view(groups, -1), strict=True):
        p.grad = gradient
    halves = list(buffers.half.view(groups, -1))
    fused, foreach = (setting.optimizer(list(parameters), **KINDS[k]) for k in ("fused", "foreach"))

    def with_copy() -> None:
        fused.step()
        torch._foreach_copy_(halves, [p.detach() for p in parameters])

    works: dict[str, Callable[[], Any]] = {
        "torch fused": fused.step,
        "torch fused + bf16 copy": with_copy,
        "torch foreach": foreach.step,
    }
    moved = {"torch fused": 28.0, "torch fused + bf16 copy": 34.0}
    rows = []
    for variant in variants:
        for blocks in BLOCKS if variant.parity else (GROUP,):
            name = f"{variant.name}, {blocks}"
            works[name] = launcher(module, variant, blocks, buffers.chunks(variant, blocks, setting))
            moved[name] = variant.bytes_moved(blocks)
            rows.append((name, variant, blocks))
    samples = timed(works, runs)
    if slow is not None:
        variant = next(v for v in VARIANTS if v.name == "slot_async_128_3")
        name = "slot_async_128_3, 64, without CLMAD"
        work = launcher(slow, variant, GROUP, buffers.chunks(variant, GROUP, setting))
        samples |= timed({name: work}, 10)
        moved[name] = variant.bytes_moved(GROUP)
    base = statistics.median(samples["torch fused"])
    copied = statistics.median(samples["torch fused + bf16 copy"])
    table = []
    for name, values in samples.items():
        middle = statistics.median(values)
        key: Any = next(((v.name, b) for n_, v, b in rows if n_ == name), None)
        predicted = PREDICTIONS.get(key)
        table.append(
            {
                "name": name,
                "ms": middle,
                "min": min(values),
                "max": max(values),
                "to_fused": middle / base,
                "to_fused_and_copy": middle / copied,
                "bytes": moved.get(name),
                "TB/s": moved[name] * n / middle / 1e9 if name in moved else None,
                "predicted_ms": predicted[0] if predicted else None,
                "predicted_why": predicted[1] if predicted else None,
                "samples_ms": values,
            }
        )
        print(
            f"{name:40s} {middle:7.3f} ms [{min(values):.3f}, {max(values):.3f}] {middle / base:.3f}",
            flush=True,
        )
    return {"parameters": n, "rows": table}


# -- report --------------------------------------------------------------------------------------


def number(value: float | None, digits: int = 2) -> str:
    return "" if value is None else f"{value:.{digits}f}"


def markdown(result: dict[str, Any]) -> str:
    lines = head("AdamW, parity and bf16 copy in one kernel", result, __file__)
    lines += [
        "Every sample is in the JSON file.",
        "",
        "The study of kernels from which the updater's was chosen (`slot_async_128_3`). `slot`: writes the",
        "free slot, the old slot is the undo copy. `undo`: writes an undo buffer and updates in place.",
        "`ldg`, `async`: plain loads, or cp.async (threads of a block, stages). The last number: sub-blocks",
        "in a chunk, of 15 data pages each.",
        "All but `plain` update the 16 parity rows; all write the bf16 copy.",
        "",
    ]
    measured = result["times"]
    lines += [
        f"## Times, {measured['parameters'] / 1e9:.3f} B parameters",
        "",
        "Medians; ratios to torch's fused AdamW, and to it followed by the bf16 copy, in the same run.",
        "",
        "| what | ms | min | max | / fused | / fused + copy | bytes a parameter | TB/s | predicted ms |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for row in measured["rows"]:
        values = (
            *(number(row[k]) for k in ("ms", "min", "max", "to_fused", "to_fused_and_copy")),
            *(number(row[k], d) for k, d in (("bytes", 1), ("TB/s", 2), ("predicted_ms", 1))),
        )
        lines.append(f"| {row['name']} | {' | '.join(values)} |")
    found = result["exactness"]
    lines += [
        "",
        "Reasons of the predictions, and registers and spills of each kernel, are in the JSON file.",
        "",
        f"## Exactness, {found['elements'] / 1e6:.0f} M elements",
        "",
        "Every variant, with every number of sub-blocks, equals `torch.optim.AdamW(foreach=True)` on the",
        "same GPU in every bit of parameters, moments and bf16 copy, and leto-ec's update in every bit of",
        "parity.",
        "torch's own implementations differ from each other (elements, and units in the last place):",
        "",
        "| compared | p: differ | max ulp | exp_avg: differ | max ulp | exp_avg_sq: differ | max ulp |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name, planes in found["torch"].items():
        cells = [f"{planes[k][what]:,}" for k in planes for what in ("differ", "ulp_max")]
        lines.append(f"| {name} | {' | '.join(cells)} |")
    lines += ["", f"Settings: {'; '.join(found['settings'])}.", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, help="path without suffix; default: print only")
    parser.add_argument("--cubin", type=Path, help="kernels compiled elsewhere")
    parser.add_argument("--runs", type=int, default=12)
    parser.add_argument("--groups", type=int, default=6, help="of 168 M parameters each")
    parser.add_argument("--portable", action="store_true", help="also time one variant without CLMAD")
    arguments = parser.parse_args()
    module, note, variants = build(arguments.cubin)
    slow = portable()[0] if arguments.portable else None
    kernels = {}
    for variant in variants:
        kernel = module.get_function(variant.name)
        kernels[variant.name] = {"registers": kernel.num_regs, "local_bytes": kernel.local_size_bytes}
    where = machine(cupy=cupy.__version__, build=note, **{"leto-ec": leto_ec.__version__})
    result: dict[str, Any] = {"machine": where, "command": " ".join(sys.argv[1:]), "kernels": kernels}
    result["exactness"] = exactness(module, variants)
    torch.cuda.empty_cache()
    result["times"] = times(module, variants, arguments.groups, arguments.runs, slow)
    publish(result, markdown(result), arguments.output)


if __name__ == "__main__":
    main()
