"""GPU memory at its peak, and time, with memory of the update lent to activations and without.

    python packages/leto-rmu/benchmarks/gpu_lending.py --output docs/benchmarks/rmu-lending-h200

The computation of `gpu_table1`: a GPT of 1.11 B parameters in 8 microbatches of 4 sequences of 2048, without
protection (torch.optim.AdamW, fused) and with the updater, in chunks of several sizes, each without and with
`ResumableUpdater.lending`; then two of these where PyTorch's allocator has expandable segments, which leave
less unused between tensors. Each run is a process of its own. Times come from others, which lend in every
second iteration only, so that each of these has one without lending beside it. Three more runs, with
PyTorch's deterministic algorithms, are compared: two without lending and one with it have to leave the same
masters, or the script fails. (The usual backward pass of attention gives other bits in every run.)

What is compared: what the driver says is in use by all processes at the peak, less what was in use before;
the bytes that PyTorch had allocated at most together with the regions of the pool, which no cache and no
fragmentation is part of; and what neither PyTorch nor the pool holds (contexts, modules, local memory).
"""

from __future__ import annotations

import os
import statistics
from typing import Any

from gpu_table1 import MODES, run_part
from proof_lab import command_line, head, machine, parsed, publish

GIB = 2**30
EXPANDABLE = "expandable_segments:True"
TITLES = {"0": "", "lent": ", lent"}


def run(options: Any, part: str, *more: str, allocator: str = "") -> dict[str, Any]:
    """One part of table 1, in a process of its own; ``allocator``: settings of PyTorch's."""
    common = [f"--{name}={getattr(options, name)}" for name in ("batch", "microbatches", "seed")]
    common += ["--iterations=2", "--warm=1"]  # memory at its peak; what is in ``more`` counts where both are
    # Deterministic algorithms ask for it; it takes as much memory in every run.
    environment = {
        **os.environ,
        "CUBLAS_WORKSPACE_CONFIG": ":4096:8",
        "PYTORCH_CUDA_ALLOC_CONF": allocator,
    }
    return run_part(part, *common, *more, environment=environment)


def needed(found: dict[str, Any]) -> int:
    """Bytes of live tensors and of the pool at the peak."""
    return int(found["allocated"] + sum(found.get("regions", {}).values()))


def spread(times: list[float], digits: int) -> str:
    """Median, lowest and highest."""
    return f"{statistics.median(times):.{digits}f} ({min(times):.{digits}f} to {max(times):.{digits}f})"


def pair(times: list[float], digits: int) -> list[str]:
    """Without lending, with it, and by how much each of these is longer than the one before."""
    without, lent = times[0::2], times[1::2]
    differences = [b - a for a, b in zip(without, lent, strict=True)]
    return [spread(each, digits) for each in (without, lent, differences)]


def verdict(result: dict[str, Any]) -> str:
    """What is wrong with the bits; "" if nothing is."""
    bits = result["bits"]
    if bits["0"] != bits["again"]:
        return "two runs without lending differ: nothing can be said of lending"
    return "" if bits["0"] == bits["lent"] else "lending has changed the masters"


def markdown(result: dict[str, Any]) -> str:
    base = result["reference"]
    lines = head("Memory lent to activations", result, __file__)
    lines += [
        f"GPT, {result['parameters'] / 1e9:.3f} B parameters, {result['microbatches']} microbatches; "
        f"seed {result['seed']}. "
        f"Tensors of {result['lend_bytes']} bytes or more are lent.",
        "",
        "| run | in use at the peak, GiB | beyond the reference "
        "| live tensors and pool, GiB | beyond the reference "
        "| other, GiB | lent, GiB | of it used |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    rows = [("reference", base, base)]
    for pages, runs in result["runs"].items():
        rows += [(f"{pages}-page chunks{TITLES[key]}", found, base) for key, found in runs.items()]
    other = result["expandable"]
    rows += [
        ("reference, expandable segments", other["reference"], other["reference"]),
        (f"{next(iter(result['runs']))}-page chunks, lent, expandable", other["lent"], other["reference"]),
    ]
    for name, found, reference in rows:
        lent = found.get("lend_bytes", 0)
        peak, bytes_needed = found["peak"], needed(found)
        lines.append(
            f"| {name} | {peak / GIB:.3f} | {(peak - reference['peak']) / GIB:+.3f} "
            f"| {bytes_needed / GIB:.3f} | {(bytes_needed - needed(reference)) / GIB:+.3f} "
            f"| {found['other'] / GIB:.3f} "
            f"| {found['idle'] / GIB if lent else 0:.3f} | {found['held'] / GIB if lent else 0:.3f} |"
        )
    lines += [
        "",
        f"Times, median (lowest to highest), of {len(next(iter(result['times'].values()))['compute']) // 2} "
        f"pairs of iterations after {result['warm']}, without and with lending in turns:",
        "",
        "| run | compute, ms | lent | longer | update, ms | lent | longer |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for pages, found in result["times"].items():
        cells = [
            cell for phase, digits in (("compute", 1), ("update", 2)) for cell in pair(found[phase], digits)
        ]
        lines.append(f"| {pages}-page chunks | " + " | ".join(cells) + " |")
    wrong = verdict(result)
    lines += [
        "",
        f"WRONG: {wrong}."
        if wrong
        else "With deterministic algorithms two runs without lending and one with it leave the same masters.",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--batch", type=int, default=4, help="sequences of a microbatch")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--iterations", type=int, default=20, help="of those whose time is taken")
    parser.add_argument("--warm", type=int, default=2)
    parser.add_argument("--lend-bytes", type=int, default=1 << 20, help="smallest tensor in lent memory")
    parser.add_argument("--chunk-pages", type=int, nargs="+", default=[240, 60])
    options = parsed(parser, {"microbatches": 1, "iterations": 2, "warm": 2})
    if options.warm % 2 or options.iterations % 2:
        parser.error("--warm and --iterations are of pairs: give even numbers")
    reference = run(options, "reference")
    result: dict[str, Any] = {
        "machine": machine(),
        "parameters": reference["parameters"],
        **{k: getattr(options, k) for k in ("microbatches", "warm", "seed", "lend_bytes")},
        "reference": reference["runs"][MODES[0]],
        "runs": {},
    }
    lend = f"--lend-bytes={options.lend_bytes}"
    for pages in options.chunk_pages:
        result["runs"][str(pages)] = {
            key: run(options, "with", f"--chunk-pages={pages}", *arguments)
            for key, arguments in (("0", []), ("lent", [lend]))
        }
    first = f"--chunk-pages={options.chunk_pages[0]}"
    one = run(options, "reference", allocator=EXPANDABLE)["runs"][MODES[0]]
    result["expandable"] = {
        "reference": one,
        "lent": run(options, "with", first, lend, allocator=EXPANDABLE),
    }
    timed = ["--alternate", f"--iterations={options.iterations}", f"--warm={options.warm}"]
    result["times"] = {
        str(pages): run(options, "with", f"--chunk-pages={pages}", lend, *timed)
        for pages in options.chunk_pages
    }
    short = ["--deterministic", "--microbatches=2"]
    result["bits"] = {
        key: run(options, "with", first, *arguments, *short)["digest"]
        for key, arguments in (("0", []), ("again", []), ("lent", [lend]))
    }
    publish(result, markdown(result), options.output)
    if wrong := verdict(result):
        raise SystemExit(wrong)


if __name__ == "__main__":
    main()
