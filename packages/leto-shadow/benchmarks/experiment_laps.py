"""The phases of the first iteration after a recovery beside those of all others.

Of what trainers report as `lap_*` and `gpu_lap_*` (`leto_megatron.laps`); a script that reports none has no
table. All ranks count alike.
"""

from __future__ import annotations

import statistics

from leto_shadow.events import Event

CLOCKS = {"lap": "host", "gpu_lap": "device"}


def lap_table(events: list[Event], reference: list[Event]) -> dict[str, dict[str, list[float]]]:
    """Name of a lap -> {"first": of first iterations after recoveries, "other": of all others but the first
    of the job, "reference": of the run without failures}, in the order in which they were reported."""
    recovered = {int(event["generation"]) for event in events if event["event"] == "recovered"}
    found: dict[str, dict[str, list[float]]] = {}
    _collect(events, recovered, "other", found)
    _collect(reference, set(), "reference", found)
    return found


def _collect(
    events: list[Event], recovered: set[int], usual: str, found: dict[str, dict[str, list[float]]]
) -> None:
    before: dict[tuple[int, int], tuple[int, str]] = {}  # (rank, generation) -> iteration, what it counts as
    for event in events:
        if event["event"] != "metrics":
            continue
        key = (int(event["rank"]), int(event.get("generation", 0)))
        last = before.get(key)
        kind = usual
        if last is None:
            kind = "first" if key[1] in recovered else ""
        before[key] = (int(event["iteration"]), kind)
        for name, value in event.items():
            counts = kind
            if name.startswith("gpu_lap_"):  # of the iteration before
                counts = last[1] if last is not None and last[0] == event["iteration"] - 1 else ""
            elif not name.startswith("lap_"):
                continue
            if counts:
                found.setdefault(name, {}).setdefault(counts, []).append(float(value))


def lap_lines(laps: dict[str, dict[str, list[float]]]) -> list[str]:
    """The table, as Markdown: means, and by how much the first ones are slower, with its standard error."""
    rows = [
        (clock, name[len(prefix) + 1 :].removesuffix("_s"), one)
        for prefix, clock in CLOCKS.items()
        for name, one in laps.items()
        if name.startswith(prefix + "_") and name.endswith("_s") and {"first", "other"} <= one.keys()
    ]
    if not rows:
        return []
    counts = laps.get("lap_allocations", {})
    text = (
        "Where the first iterations after recoveries are slower, phase by phase, in ms, means over "
        "iterations and ranks; the error is the standard error of the difference. By the host's clock: "
        "issuing work, and waiting for it; by the device's: its stream."
    )
    if {"first", "other"} <= counts.keys():
        first, other = (statistics.fmean(counts[kind]) for kind in ("first", "other"))
        text += (
            f" Memory of the device was asked for {first:.0f} times in a first iteration, {other:.1f} later."
        )
    lines = [
        text,
        "",
        "| phase | clock | first | others | reference | slower by | error |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for clock, phase, one in rows:
        first, other = one["first"], one["other"]
        error = (_error(first) ** 2 + _error(other) ** 2) ** 0.5
        kinds = ("first", "other", "reference")
        cells = [f"{statistics.fmean(one[kind]) * 1e3:.2f}" if kind in one else "-" for kind in kinds]
        cells += [f"{(statistics.fmean(first) - statistics.fmean(other)) * 1e3:+.2f}", f"{error * 1e3:.2f}"]
        lines.append(f"| {phase} | {clock} | " + " | ".join(cells) + " |")
    return [*lines, ""]


def _error(values: list[float]) -> float:
    """Standard error of the mean, if iterations that follow each other were independent: a lower bound."""
    return statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
