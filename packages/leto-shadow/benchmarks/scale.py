"""Count the messages and measure the processor time of one recovery in jobs of 16 to 16,384 nodes.

    python packages/leto-shadow/benchmarks/scale.py --json docs/benchmarks/shadow-scale.json \
        --markdown docs/benchmarks/shadow-scale.md

The protocol is the real one (`leto_shadow.simulation.scale`), processes and network are made up. Messages,
bytes and rounds repeat exactly; processor time is that of this process, so other work on the machine disturbs
it as little as it can.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import os
import platform
import time
from pathlib import Path
from textwrap import wrap as fill
from typing import Any

import leto_shadow
from leto_shadow.config import beat_s
from leto_shadow.simulation.scale import Cost, Failing, measure

NODES = (16, 64, 256, 1024, 4096, 16384)


def machine() -> dict[str, Any]:
    cpuinfo = Path("/proc/cpuinfo")
    lines = [line.split(":", 1) for line in cpuinfo.read_text().splitlines() if ":" in line]
    fields = {name.strip(): value.strip() for name, value in lines}
    return {
        "processor": f"{fields.get('model name', '')} (model {fields.get('model', '?')})",
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "leto_shadow": leto_shadow.__version__,
        "load_average": [round(value, 1) for value in os.getloadavg()],
        "time": time.strftime("%Y-%m-%d"),
    }


def row(nodes: int, failing: Failing, rounds: int) -> dict[str, Any]:
    """One recovery; the least processor time of `rounds` repetitions, everything else of any."""
    runs = []
    for _ in range(rounds):
        gc.collect()
        runs.append(measure(nodes, failing))
    names = ("recovery", "shadows", "beat")
    parts = {name: _part([run[index] for run in runs]) for index, name in enumerate(names)}
    return {"nodes": nodes, "failing": failing.value, "beat_s": beat_s(nodes), **parts}


def _part(costs: list[Cost]) -> dict[str, Any]:
    first = costs[0]
    return {
        "up": dict(first.up),
        "down": dict(first.down),
        "messages": first.up.total() + first.down.total(),
        "up_bytes": first.up_bytes,
        "down_bytes": first.down_bytes,
        "rounds": first.rounds,
        "coordinator_s": min(cost.coordinator_s for cost in costs),
        "agents_s": min(cost.agents_s for cost in costs),
    }


def exponent(rows: list[dict[str, Any]], part: str, value: str) -> float:
    """Slope of `value` over the number of nodes, both as logarithms: 1 is linear, 2 quadratic."""
    points = [(math.log(one["nodes"]), math.log(one[part][value])) for one in rows if one["nodes"] >= 256]
    mean_x, mean_y = (sum(axis) / len(points) for axis in zip(*points, strict=True))
    above = sum((x - mean_x) * (y - mean_y) for x, y in points)
    return above / sum((x - mean_x) ** 2 for x, _ in points)


def wrap(text: str) -> list[str]:
    return fill(" ".join(text.split()), 110, break_long_words=False, break_on_hyphens=False)


def markdown(found: dict[str, Any]) -> str:
    where, rows = found["machine"], found["rows"]
    hot = [one for one in rows if one["failing"] == Failing.TRAINER.value]
    largest = hot[-1]
    lines = [
        "# A recovery in a large job",
        "",
        *wrap(
            f"""
            Made by `packages/leto-shadow/benchmarks/scale.py`; do not edit. The real coordinator
            and agents, one rank on each node; processes and network are made up and take no time.
            Processor time of one thread of {where["processor"]}, {where["cores"]} cores, Linux
            {where["kernel"]}, Python {where["python"]}, leto-shadow {where["leto_shadow"]},
            {where["time"]}; load average {where["load_average"][0]} at the start.
            """
        ),
        "",
        *wrap(
            """
            Messages are frames in both directions, acknowledgements included. Rounds are messages
            that wait for each other: the price of distance. *Behind it* are the shadows that are
            prepared while training goes on, in processor time of the coordinator.
            """
        ),
        "",
        "| what fails | nodes | messages | per node | bytes per node | rounds | coordinator | per node |"
        " an agent | behind it |",
        "| --- | --: | --: | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for one in rows:
        cost, nodes = one["recovery"], one["nodes"]
        behind = one["shadows"]
        lines.append(
            f"| {one['failing']} | {nodes:,} | {cost['messages']:,} | {cost['messages'] / nodes:.1f} "
            f"| {(cost['up_bytes'] + cost['down_bytes']) / nodes:,.0f} | {cost['rounds']} "
            f"| {cost['coordinator_s'] * 1e3:,.1f} ms | {cost['coordinator_s'] / nodes * 1e6:.0f} µs "
            f"| {cost['agents_s'] / nodes * 1e6:.0f} µs "
            f"| {'-' if not behind['messages'] else format(behind['coordinator_s'] * 1e3, ',.1f') + ' ms'} |"
        )
    growth = exponent(hot, "recovery", "coordinator_s")
    lines += [
        "",
        "## Growth",
        "",
        *wrap(
            f"""
            The number of messages is a constant for each node plus a few for the job, and so are
            the bytes; the number of rounds is a constant.
            `packages/leto-shadow/tests/protocol/test_scale.py` holds the code to it, and to steps
            of the coordinator that grow no faster than the nodes. The coordinator's processor time
            between 256 and {largest["nodes"]:,} nodes grows as nodes to the power of {growth:.2f}:
            the work is linear, and processor caches are not large enough for it.
            """
        ),
        "",
        *wrap(
            f"""
            With {largest["nodes"]:,} nodes the coordinator's part of a recovery is
            {largest["recovery"]["coordinator_s"]:.2f} s: it is one thread of Python. Up to some
            hundred nodes it is lost in the time that processes take to die and to attach; beyond a
            few thousand it is most of a recovery. Not in these numbers: ZeroMQ, encryption and the
            kernel's network, and the decision itself.
            """
        ),
        "",
        "## Signs of life",
        "",
        *wrap(
            """
            Agents report progress every 0.2 s in jobs of up to a thousand nodes, and more rarely in
            larger ones, so that the coordinator takes 5,000 reports a second and no more; the
            resolution of hang detection is as much coarser.
            """
        ),
        "",
        "| nodes | between two reports of an agent | coordinator, all agents once | share of a core |",
        "| --: | --: | --: | --: |",
    ]
    for one in hot:
        beat = one["beat"]["coordinator_s"]
        lines.append(
            f"| {one['nodes']:,} | {one['beat_s']:.1f} s | {beat * 1e3:.1f} ms | {beat / one['beat_s']:.1%} |"
        )
    return "\n".join(lines) + "\n"


def run(nodes: tuple[int, ...], rounds: int) -> dict[str, Any]:
    """Measure all scenarios; a line is printed for each."""
    found: dict[str, Any] = {"machine": machine(), "rows": []}
    for failing in Failing:
        for count in nodes:
            found["rows"].append(one := row(count, failing, rounds))
            cost = one["recovery"]
            print(
                f"{failing.value}: {count} nodes, {cost['messages']} messages, {cost['rounds']} rounds, "
                f"{cost['coordinator_s'] * 1e3:.1f} ms",
                flush=True,
            )
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--nodes", type=int, nargs="+", default=NODES)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    options = parser.parse_args()
    found = run(tuple(options.nodes), options.rounds)
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")
    if options.markdown:
        options.markdown.write_text(markdown(found))


if __name__ == "__main__":
    main()
