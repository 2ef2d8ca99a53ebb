"""Measure the CUDA kernels against the bounds of the machine, and write the results.

    nvcc -cubin -arch=sm_90 -std=c++17 -O3 -DLETO_EC_CLMAD -I src/leto_ec/cuda -o benchmark.cubin
    benchmarks/benchmark.cu python benchmarks/gpu_bench.py --cubin benchmark.cubin --json ec-h200.json
    --markdown ec-h200.md

Code 1024 + 16, pages of 2 MiB, groups of 2 GiB; three take turns, so nothing is in the cache. Times
are of CUDA events, medians with the tenth and ninetieth percentile. Bounds (bytes read, bytes copied,
multiply-adds) are measured in the same run. Predictions were written down before the run that they are
printed with.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import cupy
import numpy as np

import leto_ec
from leto_ec import _blocks, cuda
from leto_ec.cuda import Plan, _choice

DATA, PARITY, PAGE = 1024, 16, 2 << 20
WORDS, GROUPS = PAGE // 4, 3
GROUP_BYTES = DATA * PAGE

# name -> (prediction, from what)
PREDICTIONS = {
    "encode, cuda-clmad": "0.91 of the read bound: 16 warps a multiprocessor, 4 stages in flight",
    "encode, cuda-portable": "0.24 TB/s: 16 wide multiplications and about 50 logic operations a product",
    "encode, plain matrix": "0.75 of its CLMAD bound, 1.5 TB/s: 16 products a word",
    "encode, pages not aligned": "0.8 of the read bound: plain loads, 5 blocks of 128 threads",
    "delta of one page": "1.05 times a copy of the same bytes: 2 pages and 16 rows read, 16 rows written",
    "delta of 16 pages": "0.7 of a copy: 32 loads of a thread at once (0.28 where one waits for another)",
    "reconstruct 16 lost": "the encode time and 64 MiB more: under 0.7 ms",
}


class Clock:
    """Medians of event times."""

    def __init__(self, runs: int) -> None:
        self.runs = runs

    def __call__(self, work: Callable[[int], None], inner: int = 1) -> dict[str, float]:
        """`inner` short launches are captured into one graph, so that the host does not hold them up."""
        for turn in range(4 * GROUPS):
            work(turn)
        stream = cupy.cuda.Stream(non_blocking=True)
        graph = None
        if inner > 1:
            cupy.cuda.Device().synchronize()
            with stream:
                stream.begin_capture()
                for turn in range(inner):
                    work(turn)
                graph = stream.end_capture()
            graph.launch(stream)
        stream.synchronize()
        times = []
        for run in range(self.runs):
            begin, end = cupy.cuda.Event(), cupy.cuda.Event()
            if graph is None:
                begin.record()
                work(run)
                end.record()
            else:
                begin.record(stream)
                graph.launch(stream)
                end.record(stream)
            end.synchronize()
            times.append(cupy.cuda.get_elapsed_time(begin, end) / inner)
        low, middle, high = np.percentile(times, [10, 50, 90])
        return {"ms": float(middle), "ms_p10": float(low), "ms_p90": float(high)}


def machine() -> dict[str, Any]:
    properties = cupy.cuda.runtime.getDeviceProperties(0)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False).stdout.split(
        "\n"
    )[0]
    return {
        "gpu": properties["name"].decode(),
        "multiprocessors": properties["multiProcessorCount"],
        "memory_gib": round(properties["totalGlobalMem"] / 2**30),
        "driver": driver,
        "cuda_runtime": cupy.cuda.runtime.runtimeGetVersion(),
        "cupy": cupy.__version__,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "leto_ec": leto_ec.__version__,
        "build": _choice.build_note(),
        "time": time.strftime("%Y-%m-%d"),
    }


def table(base: int, stride: int, count: int) -> Any:
    return cupy.asarray(base + np.arange(count, dtype=np.int64) * stride)


def in_turn(plans: list[Any]) -> Callable[[int], None]:
    return lambda turn: plans[turn % len(plans)].run()


class Bench:
    def __init__(self, runs: int, cubin: Path | None) -> None:
        self.clock = Clock(runs)
        self.rows: list[dict[str, Any]] = []
        self.bounds: dict[str, float] = {}
        shape = (DATA, WORDS)
        self.data = [cupy.random.randint(0, 2**32, size=shape, dtype=cupy.uint32) for _ in range(GROUPS)]
        self.pages = [group.view(cupy.uint8) for group in self.data]
        self.parity = [cupy.zeros((PARITY, PAGE), cupy.uint8) for _ in range(GROUPS)]
        self.module = None if cubin is None else cupy.RawModule(path=str(cubin))
        self.code = leto_ec.ReedSolomon(DATA, PARITY)

    def note(
        self, name: str, result: dict[str, float], moved: float, bound: str = "read", **more: Any
    ) -> None:
        rate = moved / result["ms"] / 1e9
        row = {
            "name": name,
            **result,
            "TB/s": rate,
            "bound": bound,
            "of_bound": rate / self.bounds[bound],
            **more,
        }
        row["predicted"] = PREDICTIONS.get(name, "")
        self.rows.append(row)
        print(
            f"{name:44s} {result['ms']:8.4f} ms {rate:6.3f} TB/s {row['of_bound']:5.2f} of {bound} "
            f"{more or ''}",
            flush=True,
        )

    def measure_bounds(self) -> None:
        def copy(turn: int, half: int) -> None:
            source, target = self.data[turn % GROUPS], self.data[(turn + 1) % GROUPS]
            at = turn * half % (GROUP_BYTES - half + 1)
            stream = cupy.cuda.get_current_stream().ptr
            cupy.cuda.runtime.memcpyAsync(target.data.ptr + at, source.data.ptr + at, half, 3, stream)

        self.bounds["copy"] = GROUP_BYTES / self.clock(lambda t: copy(t, GROUP_BYTES // 2))["ms"] / 1e9
        for name, pages in (("copy, bytes of a page's delta", 34), ("copy, bytes of 16 pages' delta", 48)):
            times = self.clock(lambda t, pages=pages: copy(t, pages * PAGE // 2), inner=24)
            self.bounds[name] = pages * PAGE / times["ms"] / 1e9
        cupy.cuda.Device().synchronize()
        for group in self.data:
            group[:] = cupy.random.randint(0, 2**32, size=group.shape, dtype=cupy.uint32)
        if self.module is None:
            self.bounds["read"] = self.bounds["copy"]
            return
        sink = cupy.zeros(1 << 20, cupy.uint64)
        read = self.module.get_function("leto_ec_bound_read")
        rates = []
        for blocks in (528, 1056, 2112, 4224):
            times = self.clock(
                lambda turn, blocks=blocks: read(
                    (blocks,), (256,), (self.data[turn % GROUPS], sink, np.uint64(GROUP_BYTES // 16))
                )
            )
            rates.append(GROUP_BYTES / times["ms"] / 1e9)
        self.bounds["read"] = max(rates)
        multiply = self.module.get_function("leto_ec_bound_multiply")
        blocks, iterations = 8 * cupy.cuda.runtime.getDeviceProperties(0)["multiProcessorCount"], 4000
        times = self.clock(lambda _: multiply((blocks,), (256,), (sink, np.int32(iterations), np.uint32(3))))
        rate = blocks * 256 * 8 * iterations / times["ms"] / 1e9
        self.bounds["CLMAD, T/s"] = rate
        self.bounds["CLMAD, 16 a word"] = rate / 16 * 4
        self.bounds["CLMAD, 81 a block"] = rate / 81 * 64

    def encode(self) -> None:
        for kernel in (_choice.CLMAD, _choice.PORTABLE):
            code = leto_ec.ReedSolomon(DATA, PARITY, kernel=kernel)
            plans = [Plan.encode(code, [p], [q]) for p, q in zip(self.pages, self.parity, strict=True)]
            self.note(f"encode, {kernel}", self.clock(in_turn(plans)), GROUP_BYTES)
            if kernel == _choice.CLMAD:
                wanted = [parity.copy() for parity in self.parity]
            else:
                assert all(bool((p == w).all()) for p, w in zip(self.parity, wanted, strict=True))
        shifted = [p.reshape(-1)[4 : 4 + (DATA - 1) * PAGE].reshape(DATA - 1, PAGE) for p in self.pages]
        plans = [Plan.encode(self.code, [p], [q]) for p, q in zip(shifted, self.parity, strict=True)]
        self.note(
            "encode, pages not aligned",
            self.clock(in_turn(plans)),
            GROUP_BYTES - PAGE,
        )
        small = [[group[:, at : at + PAGE // 8] for at in range(0, PAGE, PAGE // 8)] for group in self.pages]
        outs = [[rows[:, at : at + PAGE // 8] for at in range(0, PAGE, PAGE // 8)] for rows in self.parity]
        plans = [Plan.encode(self.code, s, o) for s, o in zip(small, outs, strict=True)]
        self.note(
            "encode, 8 groups of 256 KiB pages at once",
            self.clock(in_turn(plans)),
            GROUP_BYTES,
        )
        assert all(bool((p == w).all()) for p, w in zip(self.parity, wanted, strict=True))
        if self.module is not None:
            self.variants(wanted)

    def variants(self, wanted: list[Any]) -> None:
        """Kernels that lost."""
        module = self.module
        assert module is not None
        pages = [table(group.data.ptr, PAGE, DATA) for group in self.data]
        outs = [table(parity.data.ptr, PAGE, PARITY) for parity in self.parity]
        nothing = cupy.zeros(16, cupy.int64)
        f = cupy.asarray(_blocks.dyadic(np.arange(1, 1 + DATA // 16)))
        matrix = cupy.asarray(np.ascontiguousarray(self.code.coefficients.T))
        blocks = np.uint32(DATA // 16)
        plain = module.get_function("leto_ec_plain")
        runs: list[tuple[str, Callable[[int], None], Any, str]] = [
            (
                "encode, plain matrix",
                lambda t: plain(
                    (WORDS // 256,), (256,), (pages[t % 3], matrix, outs[t % 3], np.uint32(DATA))
                ),
                plain,
                "CLMAD, 16 a word",
            )
        ]
        for name, threads, width in (
            ("1_256x3", 256, 1),
            ("1_ahead_256x2", 256, 1),
            ("2_128x4", 128, 2),
            ("2_ahead_128x3", 128, 2),
        ):
            direct = module.get_function(f"leto_ec_direct_{name}")
            grid = (WORDS // (threads * width),)
            runs.append(
                (
                    f"encode, dyadic, loads to registers, {name}",
                    lambda t, k=direct, g=grid, n=threads: k(
                        g, (n,), (pages[t % 3], f, outs[t % 3], blocks), shared_mem=DATA * 16
                    ),
                    direct,
                    "read",
                )
            )
        for name, threads, stages, entries in (
            ("256x2_4", 256, 4, 128),
            ("128x4_5", 128, 5, 64),
            ("256x2_3", 256, 3, 128),
            ("512x1_3", 512, 3, 128),
        ):
            stream = module.get_function(f"leto_ec_stream_{name}")
            shared = entries * 256 + stages * 16 * threads * 4
            stream.max_dynamic_shared_size_bytes = shared
            runs.append(
                (
                    f"encode, dyadic, cp.async, {name}",
                    lambda t, k=stream, n=threads, s=shared: k(
                        (WORDS // n,), (n,), (pages[t % 3], f, nothing, outs[t % 3], blocks), shared_mem=s
                    ),
                    stream,
                    "read",
                )
            )
        for name, work, function, bound in runs:
            for parity in self.parity:
                parity[:] = 0x55
            result = self.clock(work)
            exact = all(bool((p == w).all()) for p, w in zip(self.parity, wanted, strict=True))
            assert exact, name
            self.note(
                name,
                result,
                GROUP_BYTES,
                bound,
                registers=function.num_regs,
                spilled=function.local_size_bytes,
            )

    def update(self) -> None:
        """Twelve sets of rows take turns: 384 MiB, far more than the cache."""
        rows = [cupy.random.randint(0, 256, size=(2, PARITY, PAGE), dtype=cupy.uint8) for _ in range(12)]
        moved = {
            "pair": (2 + 2 * PARITY) * PAGE,
            "delta": (1 + 2 * PARITY) * PAGE,
            "run": (16 + 2 * PARITY) * PAGE,
        }
        plans: dict[str, list[Plan]] = {"pair": [], "delta": [], "run": []}
        for i, (q, out) in enumerate(rows):
            page = self.pages[i % GROUPS]
            first = 16 * i
            plans["pair"].append(
                Plan.update(
                    self.code, [q], index=first, olds=[page[first]], news=[page[first + 1]], outs=[out]
                )
            )
            plans["delta"].append(Plan.update(self.code, [q], index=first, deltas=[page[first]]))
            run = page[first : first + 16]
            plans["run"].append(Plan.update(self.code, [q], index=first, deltas=[run], outs=[out]))
        for kind, name in (
            ("pair", "delta of one page"),
            ("delta", "delta of one page, in place"),
            ("run", "delta of 16 pages"),
        ):
            own = plans[kind]
            result = self.clock(in_turn(own), inner=24)
            bound = "copy, bytes of 16 pages' delta" if kind == "run" else "copy, bytes of a page's delta"
            self.note(name, result, moved[kind], bound)

    def reconstruct(self) -> None:
        for parity, pages in zip(self.parity, self.pages, strict=True):
            self.code.encode(pages, out=parity)
        for lost, verify in ((16, True), (15, True), (1, True), (1, False), (0, True)):
            gone = list(range(100, 100 + lost))
            wanted = [pages[gone].copy() for pages in self.pages]
            for pages in self.pages:
                pages[gone] = 0xDD
            plans = [
                Plan.reconstruct(self.code, [p], [q], lost_data=[gone], verify=verify)
                for p, q in zip(self.pages, self.parity, strict=True)
            ]
            result = self.clock(in_turn(plans))
            (spares,) = {plan.result()[0].spares_checked for plan in plans}
            assert all(bool((p[gone] == w).all()) for p, w in zip(self.pages, wanted, strict=True))
            self.note(f"reconstruct {lost} lost", result, GROUP_BYTES, spares_checked=spares)

    def calls(self) -> None:
        """What a call costs the host: until it returns, with the device idle."""
        code = leto_ec.ReedSolomon(48, 6)
        pages, parity = cupy.zeros((48, 4096), cupy.uint8), cupy.zeros((6, 4096), cupy.uint8)
        encode, change = (
            Plan.encode(code, [pages], [parity]),
            Plan.update(code, [parity], index=1, deltas=[pages[1]]),
        )
        for name, work in (
            ("host time of Plan.run, encode", encode.run),
            ("host time of Plan.run, update", change.run),
            ("host time of ReedSolomon.encode", lambda: code.encode(pages, out=parity)),
            ("host time of ReedSolomon.update", lambda: code.update(parity, index=1, delta=pages[1])),
        ):
            times = []
            for _ in range(50):
                begin = time.perf_counter()
                work()
                times.append((time.perf_counter() - begin) * 1e3)
                cupy.cuda.Device().synchronize()
            low, middle, high = np.percentile(times[10:], [10, 50, 90])
            self.rows.append({"name": name, "ms": middle, "ms_p10": low, "ms_p90": high})
            print(f"{name:44s} {middle * 1e3:.1f} us", flush=True)


def markdown(found: dict[str, Any]) -> str:
    where = found["machine"]
    lines = [
        f"# Erasure code on {where['gpu']}",
        "",
        "Made by `packages/leto-ec/benchmarks/gpu_bench.py`; do not edit. Code 1024 + 16, pages of 2 MiB,",
        "groups of 2 GiB.",
        f"{where['gpu']}, {where['multiprocessors']} multiprocessors, driver {where['driver']}, CUDA "
        f"{where['cuda_runtime']}, CuPy {where['cupy']}, {where['build']}, {where['time']}. "
        f"Medians of {found['runs']} runs, with the tenth and ninetieth percentile.",
        "",
        "| bound, measured in the same run | |",
        "| --- | --- |",
    ]
    lines += [
        f"| {name} | {value:.2f} {'' if 'T/s' in name else 'TB/s'} |"
        for name, value in found["bounds"].items()
    ]
    lines += [
        "",
        "| | ms | 10 % - 90 % | TB/s | of its bound | predicted |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for row in found["rows"]:
        rate = f"{row['TB/s']:.2f} | {row['of_bound']:.2f} ({row['bound']})" if "TB/s" in row else " | "
        spread = f"{row['ms_p10']:.4f} - {row['ms_p90']:.4f}"
        extra = ", ".join(
            f"{key} {row[key]}" for key in ("registers", "spilled", "spares_checked") if key in row
        )
        name = row["name"] + (f" ({extra})" if extra else "")
        lines.append(f"| {name} | {row['ms']:.4f} | {spread} | {rate} | {row.get('predicted', '')} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument(
        "--cubin", type=Path, help="benchmark.cu, compiled; without it bounds are those of a copy"
    )
    parser.add_argument("--runs", type=int, default=31)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    bench = Bench(options.runs, options.cubin)
    warm = time.monotonic() + 0.5  # clocks and memory at their rates before the first measurement
    while time.monotonic() < warm:
        bench.code.encode(bench.pages[0], out=bench.parity[0])
        cupy.cuda.Device().synchronize()
    bench.measure_bounds()
    print({name: round(value, 3) for name, value in bench.bounds.items()}, flush=True)
    bench.encode()
    bench.update()
    bench.reconstruct()
    bench.calls()
    found = {"machine": machine(), "runs": options.runs, "bounds": bench.bounds, "rows": bench.rows}
    found["devices"] = cuda.info()["devices"]
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.markdown:
        options.markdown.write_text(markdown(found))


if __name__ == "__main__":
    main()
