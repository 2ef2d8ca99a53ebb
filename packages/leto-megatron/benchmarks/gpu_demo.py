"""Make the page and the raw result of a demo run on GPUs.

    python -m leto_megatron.demo --device cuda --out leto-demo
    python packages/leto-megatron/benchmarks/gpu_demo.py leto-demo docs/benchmarks/demo-h200

writes `demo-h200.md` and `demo-h200.json`. Everything is read from the demo's report and event log.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from leto_shadow.charts import PART_NAMES, parts_of
from leto_shadow.events import Event, read_events
from leto_shadow.report import Report, make_report

MIB = 1 << 20
TITLES = {
    "kill-forward": "SIGKILL in the forward pass",
    "kill-update": "SIGKILL in mid-update, pages lost",
    "hang": "hang holding the GIL",
    "manager": "state manager killed",
}
EXPLAINED = """\
I is from the failure to training resumed on all ranks; R is what was computed again: the time from there to
the interrupted iteration's end, less what was left of it. Detection is part of I, and so is the losing of
pages on purpose by a helper process, which no real failure needs (the column *drill*). A hang is detected by
its deadline, three seconds here. R of the last one is the way from the checkpoint. All times are in seconds.
A failure that strikes before the next shadows stand at level 3 waits for them (*wait for shadows*)."""
MEMORY = """\
Each level of a shadow as NVML accounts for its process, and as free memory of the device fell since level 1.
The second is disturbed by whatever the active trainer took or gave back meanwhile."""


def recoveries(report: Report) -> list[dict[str, Any]]:
    """One row per failure; seconds."""
    rows = []
    for row, one in zip(report.timeline.failures, report.measures.recoveries, strict=True):
        losing = sum(
            float(event.get("seconds", 0.0))
            for event in report.events
            if event["event"] == "pages_lost" and event["generation"] == row.generation + 1
        )
        rows.append(
            {
                "failure": TITLES.get(row.drill or "", row.title),
                "iteration": row.iteration,
                "lost_pages": row.lost_pages,
                "iterations_lost": row.iterations_lost,
                "source": row.source,
                "detected_s": row.detected_s,
                "interruption_s": one.interruption_s,
                "drill_s": losing,
                "recompute_s": one.recompute_s,
                "parts": {PART_NAMES[part]: seconds for part, seconds in parts_of(row)},
                "trainer": _slowest(report.events, row.generation + 1),
            }
        )
    return rows


def _slowest(events: list[Event], generation: int) -> dict[str, float]:
    """The longest of each of the trainers' own steps after a takeover."""
    worst: dict[str, float] = {}
    for event in events:
        if event["event"] == "resumed" and event["generation"] == generation:
            for name in ("attach", "bind", "exchange", "reconstruct"):
                worst[name] = max(worst.get(name, 0.0), float(event["breakdown"].get(name, 0.0)))
    return worst


def footprints(events: list[Event]) -> list[dict[str, float]]:
    """Median MiB of a shadow at each level."""
    held: dict[int, list[float]] = {}
    taken: dict[int, list[float]] = {}
    before: dict[int, float] = {}
    for event in events:
        if event["event"] != "shadow_memory":
            continue
        level, pid = int(event["level"]), int(event["pid"])
        if level == 1:
            before[pid] = float(event["free_bytes"])
            continue
        if "bytes" in event:
            held.setdefault(level, []).append(float(event["bytes"]))
        if pid in before:
            taken.setdefault(level, []).append(before[pid] - float(event["free_bytes"]))
    return [
        {
            "level": level,
            "shadows": len(taken[level]),
            "process_mib": _median(held.get(level, [])) / MIB,
            "device_mib": _median(taken[level]) / MIB,
        }
        for level in sorted(taken)
    ]


def _median(values: list[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else 0.0


def _seconds(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def page(data: dict[str, Any], name: str) -> str:
    """The tables, in Markdown."""
    machine, config = data["machine"], data["config"]
    lines = [
        "# Four failures on two GPUs",
        "",
        f"* gpus: {machine.get('gpus', 'none')}; driver {machine.get('driver', 'unknown')}",
        f"* system: {machine['system']}, {machine.get('cores', '?')} cores",
        f"* python {machine['python']}, torch {machine['torch']}, megatron-core {data['megatron_core']}",
        f"* date: {data['date']}",
        f"* script: `python -m leto_megatron.demo --device cuda --seed {data['seed']} --iterations "
        f"{data['iterations']}`, then `packages/leto-megatron/benchmarks/gpu_demo.py`; everything is in "
        f"[{name}.json]({name}.json)",
        "",
        "One run: single measurements, without a spread.",
        "",
        f"A GPT of {config['layers']} layers, {config['hidden']} wide, sequences of {config['sequence']}, "
        "bf16 with fp32 masters, distributed optimizer over two ranks "
        f"({data['owned'] / 1e6:.0f} M parameters a rank), NCCL. An iteration takes "
        f"{1e3 * data['reference_iteration_s']:.1f} ms with stock Megatron-Core under torchrun (mean) and "
        f"{1e3 * (data['iteration_s'] or 0):.1f} ms under Leto (median).",
        "",
        f"**{'Exact' if data['exact'] else 'Not exact'}**: "
        + ", ".join(f"{row['equal']} of {row['of']} {kind}" for kind, row in data["compared"].items())
        + ".",
        "",
        "## Recoveries",
        "",
        "| failure | iteration | pages lost | I | detection | drill | R | iterations lost | from |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | --- |",
    ]
    for row in data["recoveries"]:
        times = (row[name] for name in ("interruption_s", "detected_s", "drill_s", "recompute_s"))
        cells = [str(row["iteration"]), str(row["lost_pages"]), *map(_seconds, times)]
        cells += [str(row["iterations_lost"]), str(row["source"])]
        lines.append(f"| {row['failure']} | " + " | ".join(cells) + " |")
    names = list(dict.fromkeys(part for row in data["recoveries"] for part in row["parts"]))
    steps = ("attach", "bind", "exchange", "reconstruct")
    lines += [
        "",
        EXPLAINED,
        "",
        "Where the time goes, in seconds; the last four columns are parts of the trainers' own share:",
        "",
        "| failure | " + " | ".join(names) + " | " + " | ".join(steps) + " |",
        "| --- |" + " ---: |" * (len(names) + len(steps)),
    ]
    for row in data["recoveries"]:
        cells = [_seconds(row["parts"].get(part)) for part in names]
        cells += [_seconds(row["trainer"].get(step)) for step in steps]
        lines.append(f"| {row['failure']} | " + " | ".join(cells) + " |")
    lines += [
        "",
        "## Memory of a shadow",
        "",
        "| level | shadows | its process, MiB | taken of the device, MiB |",
        "| --- | ---: | ---: | ---: |",
    ]
    for row in data["footprints"]:
        sizes = (row["shadows"], row["process_mib"], row["device_mib"])
        lines.append(f"| L{row['level']:.0f} | " + " | ".join(f"{size:.0f}" for size in sizes) + " |")
    return "\n".join([*lines, "", MEMORY, ""])


def collect(folder: Path) -> dict[str, Any]:
    """Read a demo's folder."""
    told = json.loads((folder / "report.json").read_text())
    events = list(read_events(folder / "leto" / "events.jsonl"))
    report = make_report("demo", events)
    final = json.loads((folder / "reference" / "final-rank0.json").read_text())
    records = (folder / "reference" / "records-rank0.jsonl").read_text().splitlines()
    return {
        **{key: told[key] for key in ("exact", "compared", "seed", "iterations", "config", "machine")},
        "date": told.get("date", ""),
        "megatron_core": told.get("megatron_core", "0.16.1"),
        "owned": final["owned_numel"],
        "reference_iteration_s": final["elapsed_s"] / len(records),
        "iteration_s": report.measures.iteration_s,
        "ettr": report.measures.ettr,
        "recoveries": recoveries(report),
        "footprints": footprints(events),
        "events": [event for event in events if event["event"] != "metrics"],
    }


def main() -> int:
    """Command line; see the module's docstring."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("folder", type=Path, help="what --out of the demo was")
    parser.add_argument("target", type=Path, help="path of the page and of the raw result, without suffix")
    parser.add_argument("--date", required=True, help="day of the run, as 2026-11-29")
    options = parser.parse_args()
    data = {**collect(options.folder), "date": options.date}
    options.target.with_suffix(".json").write_text(json.dumps(data, indent=1) + "\n")
    options.target.with_suffix(".md").write_text(page(data, options.target.name))
    return 0


if __name__ == "__main__":
    sys.exit(main())
