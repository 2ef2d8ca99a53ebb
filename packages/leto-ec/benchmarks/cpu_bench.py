"""Measure encode, repair and delta of every kernel of this machine, of peers, and of memory alone.

    python benchmarks/cpu_bench.py --json ec-cpu.json --markdown ec-cpu.md

Code 1024 + 16. One thread, processor time of that thread (so that other work on the machine disturbs as
little as it can), medians with the fastest and the slowest run. Those who do the same take turns, run by
run and in another order every time, so that a busy minute of the machine hits all of them. Buffers begin at
a page of memory, and every operation writes into memory that was written before. Threads are measured by the
clock instead.

Peers: reed-solomon-leopard and galois from PyPI (the extra `bench`), Jerasure and ISA-L where the system has
them (peers.py). What is missing is said in a line. pyeclib is no peer: liberasurecode stops at 32 fragments.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata, util
from pathlib import Path
from typing import Any

import numpy as np
import peers

import leto_ec

DATA, PARITY = 1024, 16
SIZES = {
    64 << 10: (DATA, 1),
    2 << 20: (DATA // 8, 2),
}  # page bytes: pages present (rates are of those), fewer rounds
GIB = 1 << 30
SLOW = {"portable": 8, "reference": 512}  # these get so many times fewer pages; rates are of what was done
LOST = (1, 2, 4, 16)
FEW = 3  # rounds of what is slow
DELTAS = 31  # rounds of deltas, at least
CHANGED = 7  # the page that changes
RUN = 16  # pages of a longer change
ENCODE, VERIFIED = "encode", "repair of 1, verified"
DELTA, LONG_DELTA = "delta of one page", f"delta of {RUN} pages"
PLAN = "plan"
READ, XOR = "memory alone: read", "memory alone: XOR"
XOR_ALONE = f"XOR of a page into {PARITY} rows"
Work = Callable[[], object]


def repair_of(lost: int) -> str:
    return f"repair of {lost}"


@dataclass
class Competitor:
    """Somebody's way to do one thing."""

    who: str
    work: Work
    amount: int  # bytes of data that it deals with
    rounds: int


@dataclass
class Table:
    rounds: int
    rows: list[dict[str, Any]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)

    def miss(self, line: str) -> None:
        if line not in self.missing:
            self.missing.append(line)
            print(line, flush=True)

    def measure(
        self,
        what: str,
        page: int,
        competitors: list[Competitor],
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        """Time the competitors, in turn."""
        times: list[list[float]] = [[] for _ in competitors]
        for competitor in competitors:
            competitor.work()
        order = list(zip(competitors, times, strict=True))
        shuffle = random.Random(what).shuffle
        for turn in range(max(competitor.rounds for competitor in competitors)):
            shuffle(order)  # whose turn it was before leaves the caches and the clock as it used them
            for competitor, taken in order:
                if turn < competitor.rounds:
                    begin = clock()
                    competitor.work()
                    taken.append(clock() - begin)
        for competitor, taken in zip(competitors, times, strict=True):
            middle = statistics.median(taken)
            row = {
                "who": competitor.who,
                "what": what,
                "page_bytes": page,
                "ms": middle * 1e3,
                "ms_least": min(taken) * 1e3,
                "ms_most": max(taken) * 1e3,
                "rounds": len(taken),
                "GiB/s": competitor.amount / middle / GIB,
                "bytes": competitor.amount,
            }
            self.rows.append(row)
            print(
                f"{competitor.who:28s} {what:22s} {page >> 10:5d} KiB {row['GiB/s']:8.3f} GiB/s "
                f"{row['ms']:10.3f} ms [{row['ms_least']:.3f}, {row['ms_most']:.3f}]",
                flush=True,
            )


def buffer(count: int, size: int) -> np.ndarray:
    """Pages from the beginning of a page of memory on."""
    memory = np.zeros(count * size + 4096, np.uint8)
    start = -memory.ctypes.data % 4096
    return memory[start : start + count * size].reshape(count, size)


def random_pages(count: int, size: int) -> np.ndarray:
    pages = buffer(count, size)
    rng = np.random.default_rng(1)
    pages.view(np.int64)[:] = rng.integers(0, 1 << 63, (count, size // 8), dtype=np.int64)
    return pages


class Contest:
    """All competitors of one page size, by operation."""

    def __init__(self, table: Table, pages: np.ndarray) -> None:
        self.table, self.pages, self.size = table, pages, pages.shape[1]
        self.rows, self.run = random_pages(PARITY, self.size), random_pages(RUN, self.size)  # all deltas' own
        self.of: dict[str, list[Competitor]] = {}

    def enter(self, what: str, who: str, work: Work, amount: int, rounds: int | None = None) -> None:
        default = max(DELTAS, self.table.rounds) if "delta" in what else self.table.rounds
        self.of.setdefault(what, []).append(Competitor(who, work, amount, rounds or default))

    def alone(self, who: str, work: Work) -> None:
        self.table.measure(XOR_ALONE, self.size, [Competitor(who, work, self.size, DELTAS)])

    def take_turns(self) -> None:
        for what, competitors in self.of.items():
            self.table.measure(what, self.size, competitors)

    def ours(self, kernel: str) -> None:
        some = self.pages[: max(RUN, len(self.pages) // SLOW.get(kernel, 1))]
        few = FEW if kernel in SLOW else None
        code = leto_ec.ReedSolomon(DATA, PARITY, kernel=kernel)
        parity, who = buffer(PARITY, self.size), f"leto-ec {kernel}"
        code.encode(some, out=parity)
        self.enter(ENCODE, who, lambda: code.encode(some, out=parity), some.nbytes, few)
        for lost in LOST:
            work = repairing(code, some, parity, lost, verify=False)
            self.enter(repair_of(lost), who, work, some.nbytes, few)
        self.enter(VERIFIED, who, repairing(code, some, parity, 1, verify=True), some.nbytes, few)
        rows, run = self.rows, self.run
        self.enter(DELTA, who, lambda: code.update(rows, index=CHANGED, delta=run[0]), self.size, few)
        self.enter(LONG_DELTA, who, lambda: code.update(rows, index=0, delta=run), run.nbytes, few)
        if kernel == leto_ec.info()["kernels"][0]:
            self.planned(code, parity)

    def planned(self, code: leto_ec.ReedSolomon, parity: np.ndarray) -> None:
        """The same with everything prepared beforehand, as the libraries have it."""
        who, amount = f"leto-ec {code.kernel}, {PLAN}", self.pages.nbytes
        make = leto_ec.Plan
        self.enter(ENCODE, who, make.encode(code, [self.pages], [parity]).run, amount)
        for lost in LOST:
            gone = [range(lost)]
            plan = make.reconstruct(code, [self.pages], [parity], lost_data=gone, verify=False)
            self.enter(repair_of(lost), who, plan.run, amount)
        for what, index, changed in ((DELTA, CHANGED, self.run[0]), (LONG_DELTA, 0, self.run)):
            plan = make.update(code, [self.rows], index=index, deltas=[changed])
            self.enter(what, who, plan.run, changed.nbytes)

    def memory(self, memory: peers.Memory) -> None:
        if memory.problem:
            self.table.miss(memory.problem)
            return
        self.enter(repair_of(1), READ, memory.read(self.pages), self.pages.nbytes)
        self.enter(DELTA, XOR, memory.xor(self.rows, self.run[0]), self.size)
        # No turns here: rows that were written past the cache would be cold for whoever comes next.
        for how, strip in (("strips of 4 KiB", 4096), ("whole rows", self.size), ("line by line", 64)):
            self.alone(f"{XOR}, {how}", memory.xor(self.rows, self.run[0], strip))
        past = memory.xor_past(self.rows, self.run[0])
        if past is not None:
            self.alone(f"{XOR}, past the cache", past)

    def library(self, peer: peers.Jerasure | peers.Isal, slow: bool) -> None:
        few, amount = FEW if slow else None, peer.pages.nbytes
        self.enter(ENCODE, peer.who, peer.encode, amount, few)
        for lost in LOST:
            self.enter(repair_of(lost), peer.who, peer.repair(lost), amount, few)
        self.enter(DELTA, peer.who, peer.update(self.rows, CHANGED, self.run[:1]), self.size)
        self.enter(LONG_DELTA, peer.who, peer.update(self.rows, 0, self.run), self.run.nbytes, few)

    def libraries(self) -> None:
        """The C libraries; what they repair must come out right."""
        for name, library in peers.libraries():
            if isinstance(library, str):
                self.table.miss(library)
                continue
            made: list[peers.Jerasure | peers.Isal]
            if name == "ISA-L":
                made = [peers.Isal(library, self.pages, buffer(PARITY, self.size))]
            else:
                made = [peers.Jerasure(library, w, self.pages, buffer(PARITY, self.size)) for w in (16, 32)]
            for peer in made:
                peer.encode()
                if isinstance(peer, peers.Jerasure) and peer.w == 32:
                    ours = leto_ec.ReedSolomon(DATA, PARITY).encode(self.pages)
                    assert np.array_equal(ours, peer.parity), "Jerasure's code is not ours"
                original = self.pages[: max(LOST)].copy()
                self.pages[: max(LOST)] = 0
                peer.repair(max(LOST))()
                assert np.array_equal(self.pages[: max(LOST)], original), f"{peer.who} repairs something else"
                self.library(peer, slow=isinstance(peer, peers.Jerasure))

    def leopard(self) -> None:
        """reed-solomon-leopard: bytes in, bytes out; no delta."""
        if util.find_spec("reed_solomon_leopard") is None:
            self.table.miss("reed-solomon-leopard is not measured: it is not installed")
            return
        import reed_solomon_leopard as peer

        data = [row.tobytes() for row in self.pages]
        who = f"reed-solomon-leopard {metadata.version('reed-solomon-leopard')}"
        self.enter(ENCODE, who, lambda: peer.encode(data, PARITY), self.pages.nbytes, FEW)
        parity = peer.encode(data, PARITY)
        for lost in LOST:
            kept = {i: data[i] for i in range(lost, len(data))}
            spare = {i: parity[i] for i in range(lost)}

            def work(kept: dict[int, bytes] = kept, spare: dict[int, bytes] = spare) -> object:
                return peer.decode(len(data), PARITY, kept, spare)

            self.enter(repair_of(lost), who, work, self.pages.nbytes, FEW)


def repairing(
    code: leto_ec.ReedSolomon, pages: np.ndarray, parity: np.ndarray, lost: int, verify: bool
) -> Work:
    return lambda: code.reconstruct(pages, parity, lost_data=range(lost), verify=verify)


def threads(table: Table, pages: np.ndarray) -> None:
    """The default kernel with one thread and with as many as there are cores, by the clock."""
    page, run = pages.shape[1], random_pages(1, pages.shape[1])[0]
    counts = sorted({1, os.cpu_count() or 1})
    of: dict[str, list[Competitor]] = {ENCODE: [], repair_of(16): [], DELTA: []}
    rows = buffer(PARITY, page)
    for count in counts:
        code = leto_ec.ReedSolomon(DATA, PARITY, threads=count)
        parity, who = buffer(PARITY, page), f"leto-ec {code.kernel}, threads={count}"
        code.encode(pages, out=parity)

        def encode(code: leto_ec.ReedSolomon = code, parity: np.ndarray = parity) -> object:
            return code.encode(pages, out=parity)

        def update(code: leto_ec.ReedSolomon = code) -> object:
            return code.update(rows, index=CHANGED, delta=run)

        repair = repairing(code, pages, parity, 16, verify=False)
        of[ENCODE].append(Competitor(who, encode, pages.nbytes, table.rounds))
        of[repair_of(16)].append(Competitor(who, repair, pages.nbytes, table.rounds))
        of[DELTA].append(Competitor(who, update, page, DELTAS))
    for what, competitors in of.items():
        table.measure(f"{what}, by the clock", page, competitors, time.perf_counter)


def fixed_cost(table: Table) -> None:
    """A call with next to nothing to do."""
    code = leto_ec.ReedSolomon(DATA, PARITY)
    rows, delta = random_pages(PARITY, 64), random_pages(1, 64)[0]
    who = f"leto-ec {code.kernel}"

    def update() -> object:
        return code.update(rows, index=CHANGED, delta=delta)

    plan = leto_ec.Plan.update(code, [rows], index=CHANGED, deltas=[delta])
    planned = Competitor(f"{who}, {PLAN}", plan.run, delta.nbytes, 301)
    table.measure(DELTA, 64, [Competitor(who, update, delta.nbytes, 301), planned])


def galois_oracle(table: Table) -> None:
    """galois: an oracle, not a competitor; pages of 64 bytes, encoding only."""
    if util.find_spec("galois") is None:
        table.miss("galois is not measured: it is not installed")
        return
    import galois

    terms = [32, *(k for k in range(31, -1, -1) if leto_ec.field.TAIL >> k & 1)]
    polynomial = galois.Poly.Degrees(terms)
    gf = galois.GF(2**32, irreducible_poly=polynomial, primitive_element=None, verify=False)
    pages = random_pages(64, 64)
    matrix = gf(leto_ec.ReedSolomon(64, PARITY).coefficients.astype(np.int64))
    words = gf(pages.view("<u4").astype(np.int64))
    who = f"galois {metadata.version('galois')}"
    table.measure(ENCODE, 64, [Competitor(who, lambda: matrix @ words, pages.nbytes, FEW)])


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
        "kernel_of_leto_ec": leto_ec.info()["kernel"],
        "load_average": [round(value, 1) for value in os.getloadavg()],
        "time": time.strftime("%Y-%m-%d"),
    }


def ratios(found: dict[str, Any]) -> list[str]:
    """The default kernel against each peer and memory, from the medians: lines of a table."""
    ours = f"leto-ec {found['machine']['kernel_of_leto_ec']}"
    rates = {(row["what"], row["page_bytes"], row["who"]): row["GiB/s"] for row in found["rows"]}
    names = (row["who"] for row in found["rows"])
    others = list(
        dict.fromkeys(name for name in names if not name.startswith(("leto-ec", "galois", XOR + ",")))
    )
    others.sort(key=lambda name: not name.startswith("memory"))
    lines = ["| | page | " + " | ".join(others) + " |", "| --- | --- |" + " --- |" * len(others)]
    for (what, page, who), rate in rates.items():
        if who not in (ours, f"{ours}, {PLAN}"):
            continue
        cells = [rates.get((what, page, other)) for other in others]
        shown = [f"{rate / cell:.2f}" if cell else "" for cell in cells]
        if any(shown):
            lines.append(f"| {what}{who.removeprefix(ours)} | {page >> 10} KiB | " + " | ".join(shown) + " |")
    return lines


NOTES = """\
*Memory alone: read* reads the same pages as a repair; *memory alone: XOR* reads and writes the same 16 rows
as a delta of one page, in strips of 4 KiB, and multiplies nothing. Jerasure with `w = 32` is the same code,
byte for byte (checked in the run); `w = 16` is the same matrix in a field of 16-bit words. ISA-L has words of
8 bits: 255 pages and rows are its limit, so it is no code of 1024 + 16, and a product of a byte is a quarter
of the work. Its decoding matrix was inverted beforehand. reed-solomon-leopard takes and returns `bytes` and
has no delta. *Plan* is `leto_ec.Plan`, with buffers checked and tables made beforehand; the rest are calls of
`leto_ec.ReedSolomon`, which check their buffers each time."""


def markdown(found: dict[str, Any]) -> str:
    where = found["machine"]
    present = ", ".join(f"{count} of {size >> 10} KiB" for size, count in found["pages"].items())
    lines = [
        "# Erasure code on the processor",
        "",
        "Made by `packages/leto-ec/benchmarks/cpu_bench.py`; do not edit. Code 1024 + 16, one thread,",
        f"processor time of that thread. {where['processor']}, {where['cores']} cores,",
        f"Linux {where['kernel']},",
        f"Python {where['python']}, {where['time']}; load average {where['load_average'][0]} at the start.",
        "Medians with the fastest and the slowest run; those who do the same took turns, run by run, in an",
        "order that was drawn anew for every round.",
        f"Of the 1024 pages those present are {present}.",
        "GiB/s are of data: of the pages that are encoded or read for a repair, or of the delta.",
        "",
        *NOTES.splitlines(),
        *(f"{line}." for line in found["missing"]),
        "",
        f"## `leto-ec {where['kernel_of_leto_ec']}`, the default here, is so many times as fast as",
        "",
        *ratios(found),
        "",
        "## All",
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
    memory = peers.Memory()
    for size, (count, fewer) in SIZES.items():
        pages = random_pages(count // share, size)
        table.rounds = max(FEW, rounds // fewer)
        contest = Contest(table, pages)
        contest.memory(memory)
        contest.libraries()
        for kernel in leto_ec.info()["kernels"]:
            if size == min(SIZES) or kernel not in SLOW:
                contest.ours(kernel)
        contest.leopard()
        contest.take_turns()
        threads(table, pages)
    fixed_cost(table)
    galois_oracle(table)
    found["rows"], found["missing"] = table.rows, table.missing
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
