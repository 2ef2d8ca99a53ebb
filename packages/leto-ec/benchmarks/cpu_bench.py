"""Measure encode, repair and delta of every kernel of this machine and of the peers that are installed.

    python benchmarks/cpu_bench.py --json ec-cpu.json --markdown ec-cpu.md

Code 1024 + 16. One thread, processor time of that thread (so that other work on the machine disturbs as
little as it can), medians with the fastest and the slowest run. Every operation writes into memory that was
written before. Peers: reed-solomon-leopard and galois from PyPI (the extra `bench`). pyeclib is no peer
here: liberasurecode stops at 32 fragments. ISA-L stops at 255.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from importlib import metadata, util
from pathlib import Path
from typing import Any

import numpy as np

import leto_ec

DATA, PARITY = 1024, 16
SIZES = {
    64 << 10: (DATA, 1),
    2 << 20: (DATA // 4, 2),
}  # page bytes: pages present (rates are of those), fewer rounds
GIB = 1 << 30
SLOW = {"portable": 8, "reference": 512}  # these get so many times fewer pages; rates are of what was done
LOST = (1, 4, 16)


class Table:
    def __init__(self, rounds: int) -> None:
        self.rounds = rounds
        self.rows: list[dict[str, Any]] = []

    def measure(
        self,
        who: str,
        what: str,
        page: int,
        amount: int,
        work: Callable[[], object],
        rounds: int | None = None,
    ) -> None:
        """Time `work`, which deals with `amount` bytes of data."""
        work()
        times = []
        for _ in range(rounds or self.rounds):
            begin = time.thread_time()
            work()
            times.append(time.thread_time() - begin)
        middle = statistics.median(times)
        row = {
            "who": who,
            "what": what,
            "page_bytes": page,
            "ms": middle * 1e3,
            "ms_least": min(times) * 1e3,
            "ms_most": max(times) * 1e3,
            "rounds": len(times),
            "GiB/s": amount / middle / GIB,
            "bytes": amount,
        }
        self.rows.append(row)
        print(
            f"{who:26s} {what:22s} {page >> 10:5d} KiB {row['GiB/s']:8.3f} GiB/s {row['ms']:10.3f} ms "
            f"[{row['ms_least']:.3f}, {row['ms_most']:.3f}]",
            flush=True,
        )


def random_pages(count: int, size: int) -> np.ndarray:
    rng = np.random.default_rng(1)
    return rng.integers(0, 1 << 63, (count, size // 8), dtype=np.int64).view(np.uint8)


def ours(table: Table, kernel: str, pages: np.ndarray) -> None:
    page = pages.shape[1]
    some = pages[: max(16, len(pages) // SLOW.get(kernel, 1))]
    few = 3 if kernel in SLOW else None
    code = leto_ec.ReedSolomon(DATA, PARITY, kernel=kernel)
    parity = np.zeros((PARITY, page), np.uint8)
    who = f"leto-ec {kernel}"
    table.measure(who, "encode", page, some.nbytes, lambda: code.encode(some, out=parity), few)
    for lost in LOST:
        gone = range(lost)
        table.measure(
            who,
            f"repair of {lost}",
            page,
            some.nbytes,
            lambda gone=gone: code.reconstruct(some, parity, lost_data=gone, verify=False),
            few,
        )
    table.measure(
        who,
        "repair of 1, verified",
        page,
        some.nbytes,
        lambda: code.reconstruct(some, parity, lost_data=[0]),
        few,
    )
    delta = pages[0].copy()
    table.measure(
        who, "delta of one page", page, page, lambda: code.update(parity, index=7, delta=delta), few
    )


def leopard(table: Table, pages: np.ndarray) -> None:
    """reed-solomon-leopard: bytes in, bytes out; no delta."""
    if util.find_spec("reed_solomon_leopard") is None:
        return
    import reed_solomon_leopard as peer

    page = pages.shape[1]
    data = [row.tobytes() for row in pages]
    who = f"reed-solomon-leopard {metadata.version('reed-solomon-leopard')}"
    rounds = 3
    table.measure(who, "encode", page, pages.nbytes, lambda: peer.encode(data, PARITY), rounds)
    parity = peer.encode(data, PARITY)
    for lost in LOST:
        kept = {i: data[i] for i in range(lost, len(data))}
        spare = {i: parity[i] for i in range(lost)}
        table.measure(
            who,
            f"repair of {lost}",
            page,
            pages.nbytes,
            lambda kept=kept, spare=spare: peer.decode(len(data), PARITY, kept, spare),
            rounds,
        )


def galois_oracle(table: Table) -> None:
    """galois: an oracle, not a competitor; pages of 64 bytes, encoding only."""
    if util.find_spec("galois") is None:
        return
    import galois

    terms = [32, *(k for k in range(31, -1, -1) if leto_ec.field.TAIL >> k & 1)]
    polynomial = galois.Poly.Degrees(terms)
    field = galois.GF(2**32, irreducible_poly=polynomial, primitive_element=None, verify=False)
    pages = random_pages(64, 64)
    matrix = field(leto_ec.ReedSolomon(64, PARITY).coefficients.astype(np.int64))
    words = field(pages.view("<u4").astype(np.int64))
    table.measure(
        f"galois {metadata.version('galois')}", "encode", 64, pages.nbytes, lambda: matrix @ words, 3
    )


def machine() -> dict[str, Any]:
    model = ""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        lines = [line.split(":", 1) for line in cpuinfo.read_text().splitlines() if ":" in line]
        fields = {name.strip(): value.strip() for name, value in lines}
        model = f"{fields.get('model name', '')} (model {fields.get('model', '?')})"
    return {
        "processor": model,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "numpy": np.__version__,
        "leto_ec": leto_ec.__version__,
        "load_average": [round(value, 1) for value in os.getloadavg()],
        "time": time.strftime("%Y-%m-%d"),
    }


def markdown(found: dict[str, Any]) -> str:
    where = found["machine"]
    lines = [
        "# Erasure code on the processor",
        "",
        "Made by `packages/leto-ec/benchmarks/cpu_bench.py`; do not edit. Code 1024 + 16, one thread,",
        f"processor time of that thread. {where['processor']}, {where['cores']} cores,",
        f"Linux {where['kernel']},",
        f"Python {where['python']}, {where['time']}; load average {where['load_average'][0]} at the start.",
        "Medians with the fastest and the slowest run. Of the 1024 pages those present are "
        + ", ".join(f"{count} of {size >> 10} KiB" for size, count in found["pages"].items())
        + ".",
        "",
        "| | | page | GiB/s | ms | fastest - slowest | runs |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in found["rows"]:
        page = f"{row['page_bytes'] >> 10} KiB" if row["page_bytes"] >= 1024 else f"{row['page_bytes']} B"
        lines.append(
            f"| {row['who']} | {row['what']} | {page} | {row['GiB/s']:.3f} | {row['ms']:.3f} | "
            f"{row['ms_least']:.3f} - {row['ms_most']:.3f} | {row['rounds']} |"
        )
    return "\n".join(lines) + "\n"


def run(rounds: int, share: int = 1) -> dict[str, Any]:
    """Measure everything, with a `share`-th of the pages; the table is printed on the way."""
    found: dict[str, Any] = {
        "machine": machine(),
        "pages": {size: n // share for size, (n, _) in SIZES.items()},
    }
    table = Table(rounds)
    for size, (count, fewer) in SIZES.items():
        pages = random_pages(count // share, size)
        table.rounds = max(3, rounds // fewer)
        for kernel in leto_ec.info()["kernels"]:
            if size == min(SIZES) or kernel not in SLOW:
                ours(table, kernel, pages)
        leopard(table, pages)
    galois_oracle(table)
    found["rows"] = table.rows
    return found


def write(found: dict[str, Any], as_json: Path | None, as_markdown: Path | None) -> None:
    if as_json:
        as_json.write_text(json.dumps(found, indent=1) + "\n")
    if as_markdown:
        as_markdown.write_text(markdown(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--share", type=int, default=1, help="with so many times fewer pages")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    write(run(options.rounds, options.share), options.json, options.markdown)


if __name__ == "__main__":
    main()
