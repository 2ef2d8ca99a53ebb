"""What `experiment.py` has measured, as numbers and as a page."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

from experiment_laps import lap_lines, lap_table

import leto_shadow
from leto_shadow.charts import PART_NAMES, PARTS, parts_of
from leto_shadow.events import Event
from leto_shadow.measures import iteration_times
from leto_shadow.report import Report
from leto_shadow.schedule import Schedule, dump_schedule

MIB = 1 << 20
RANK_PARTS = {
    "memory_free": "memory of the dead is free",
    "lose": "pages are destroyed, by the injection",
    "localize": "lost pages found and replaced",
    "writer": "become the writer",
    "attach": "attach",
    "bind": "bind the model",
    "exchange": "exchange",
    "reconstruct": "reconstruct",
}
"""Parts that the slowest rank measured by itself; they lie within those that the coordinator measured."""
EXPLAINED = """\
I: from the failure to training on all ranks. R: from there until the interrupted iteration is done, less what
was left of it at the failure; *done* is what was done of it then, so the least that R can be. *First* is by
how much the first iteration after the recovery was slower than one without a failure (a part of R). *Fence*
is until the last process of the failed generation has ended. All numbers are those of `leto report`."""


def machine(backend: str) -> dict[str, Any]:
    """Where this ran."""
    cpuinfo = Path("/proc/cpuinfo").read_text()
    model = next((line.split(":")[1].strip() for line in cpuinfo.splitlines() if "model name" in line), "?")
    found: dict[str, Any] = {
        "processor": model,
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "leto_shadow": leto_shadow.__version__,
        "load_average": [round(value, 1) for value in os.getloadavg()],
        "time": time.strftime("%Y-%m-%d"),
        "backend": backend,
    }
    for package in ("torch", "megatron-core", "nvidia-nccl-cu13", "nvidia-nccl-cu12"):
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if backend == "cuda":
        from leto_shadow.gpu import list_gpus

        found["gpus"] = [gpu.name for gpu in list_gpus()]
        found["nccl_settings"] = {
            name: value for name, value in os.environ.items() if name.startswith("NCCL_")
        }
        driver = Path("/proc/driver/nvidia/version")
        found["driver"] = driver.read_text().split("\n")[0] if driver.exists() else "unknown"
    return found


def spread(values: list[float]) -> dict[str, float]:
    """Median, ends, quartiles, and what 95 of 100 do not exceed."""
    ordered = sorted(values)
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return {
        "median": statistics.median(values),
        "low": ordered[0],
        "high": ordered[-1],
        "quartile_low": low,
        "quartile_high": high,
        "p95": ordered[-(-95 * len(ordered) // 100) - 1],
    }


def footprints(events: list[Event]) -> dict[str, list[float]]:
    """MiB that shadows held, by level. A job's first trainers are none: they do not wait."""
    found: dict[str, list[float]] = {}
    training = False
    for event in events:
        training |= event["event"] == "started"
        if training and event["event"] == "shadow_memory" and "bytes" in event:
            found.setdefault(str(event["level"]), []).append(event["bytes"] / MIB)
    return found


def results(
    report: Report,
    where: dict[str, Any],
    schedule: Schedule,
    compared: dict[str, Any] | None,
    wrong: list[str],
    reference: list[Event] | None = None,
    level: int = 3,
) -> dict[str, Any]:
    """Everything, as JSON values; ``reference``: the events of the run without failures; ``level``: where
    shadows wait."""
    data = report.data()
    del data["lines"]
    recovered = [row for row in data["failures"] if row["recovered_s"] is not None]
    tables: dict[str, list[float]] = {
        "interruption": [row["interruption_s"] for row in recovered],
        "recompute": [row["recompute_s"] for row in recovered if row["recompute_s"] is not None],
        "beyond": [row["recompute_s"] - row["done_s"] for row in recovered if row["recompute_s"] is not None],
        "first": [row["first_extra_s"] for row in recovered if row["first_extra_s"] is not None],
        "ready": _ready_after(report.events, data["world_size"] or 1, level),
    }
    lost = [row for row in recovered if row["lost_pages"]]
    kept = [row for row in recovered if not row["lost_pages"]]
    if lost and kept:
        tables["interruption kept"] = [row["interruption_s"] for row in kept]
        tables["interruption lost"] = [row["interruption_s"] for row in lost]
        tables["interruption found"] = [
            row["interruption_s"] - row["rank_parts"].get("lose", 0.0) for row in lost
        ]
    for row in report.timeline.failures:
        if row.recovered_s is not None:
            for part, seconds in parts_of(row):
                tables.setdefault(f"part {part}", []).append(seconds)
            for part, seconds in row.rank_parts.items():
                tables.setdefault(f"rank part {part}", []).append(seconds)
    return {
        "machine": where,
        "level": level,
        "schedule": json.loads(dump_schedule(schedule)),
        "report": data,
        "injected": [event for event in report.events if event["event"] == "injected"],
        "spreads": {name: spread(values) for name, values in tables.items() if values},
        "footprints_mib": {
            level: spread(values) for level, values in sorted(footprints(report.events).items())
        },
        "judged": judged(data["failures"], data["iteration_s"], iteration_times(report.events)),
        "laps": lap_table(report.events, reference or []),
        "compared": compared,
        "wrong": wrong,
        "events": [event for event in report.events if event["event"] != "metrics"],
        "iterations": [
            [round(event["mono"], 4), event["rank"], event["iteration"]]
            for event in report.events
            if event["event"] == "metrics"
        ][-20_000:],
    }


def judged(
    rows: list[dict[str, Any]], iteration_s: float | None, times: list[float] | None = None
) -> dict[str, Any]:
    """How many R are above what was done of the interrupted iteration by more than a tenth of it, and by
    more than a tenth of an iteration; and, given the ``times`` of iterations without a failure, how many
    would be if the first iteration after a recovery were one of those, drawn by lot. Mean of what R is
    above, with the standard error of the mean."""
    known = [
        (row["recompute_s"], row["done_s"])
        for row in rows
        if row["recompute_s"] is not None and row["done_s"] is not None
    ]
    tenth_s = (iteration_s or 0.0) / 10
    found: dict[str, Any] = {
        "of": len(known),
        "above_done": sum(r > 1.1 * done for r, done in known),
        "tenth_of_iteration_s": tenth_s,
        "above_iteration": sum(r > done + tenth_s for r, done in known),
    }
    if times and iteration_s is not None and len(known) > 1:
        beyond = [r - done for r, done in known]

        def later(by_s: float) -> float:
            return sum(one > iteration_s + by_s for one in times) / len(times)

        found["lot_above_done"] = sum(later(done / 10) for _, done in known)
        found["lot_above_iteration"] = len(known) * later(tenth_s)
        found["mean_beyond_s"] = statistics.fmean(beyond)
        found["error_beyond_s"] = statistics.stdev(beyond) / len(beyond) ** 0.5
    return found


def _ready_after(events: list[Event], ranks: int, level: int) -> list[float]:
    """Seconds from training (again) until the next shadows of all ranks stood at ``level``, each time."""
    found, since, ready = [], None, set()
    for event in events:
        if event["event"] in ("started", "recovered"):
            since, ready = event["mono"], set()
        elif event["event"] == "failure":
            since = None
        elif event["event"] == "shadow_level" and event["level"] == level and since is not None:
            ready.add(event["rank"])
            if len(ready) == ranks:
                found.append(event["mono"] - since)
                since = None
    return found


def count_equal(reference: Path, other: Path, ranks: int) -> dict[str, Any]:
    """Compare the bits of all iterations that both jobs have recorded, as far as the reference went."""
    from leto_megatron.compare import compare_records

    return compare_records(reference, other, ranks)


def page(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    data, where, plan = result["report"], result["machine"], result["schedule"]
    rows = data["failures"]
    recovered = [row for row in rows if row["recovered_s"] is not None]
    on = ", ".join(where.get("gpus", [])) or f"{where['processor']}, {where['cores']} cores"
    said = ""
    if where["backend"] == "host":
        said = "No GPU took part: they say how the protocol behaves, not what a GPU job would see. "
    if plan.get("clock") == "ready":
        often = f"a failure {plan['mttf_s']:g} s in the mean after the shadows stood again"
    else:
        often = f"mean time to failure {plan['mttf_s']:g} s"
    if plan["gap_s"]:
        often += f", at least {plan['gap_s']:g} s apart"
    software = ", ".join(f"{name} {where[name]}" for name in ("torch", "megatron-core") if name in where)
    lines = [
        f"# Recoveries under a schedule of failures ({where['backend']} backend)",
        "",
        f"`{result['command']}`",
        "",
        f"{where['backend'].capitalize()} numbers of {on}, Linux {where['kernel']}, {software}, "
        f"{where['time']}; load {where['load_average'][0]} when it began. {said}{data['world_size']} ranks, "
        f"seed {plan['seed']}, {often}; {len(result['injected'])} of {len(plan['injections'])} failures were "
        f"injected, {len(recovered)} of {len(rows)} recovered from.",
        *(["", f"**Not as it should be**: {'; '.join(result['wrong'])}."] if result["wrong"] else []),
        "",
        *_spreads(result),
        "",
        *_judged(result),
        *_ettr(result),
        "",
        EXPLAINED,
        "",
        *lap_lines(result.get("laps", {})),
        *_recoveries(result),
    ]
    return "\n".join(lines) + "\n"


def _spreads(result: dict[str, Any]) -> list[str]:
    names = {
        "interruption": "I, interruption (s)",
        "interruption kept": "I where no page was lost (s)",
        "interruption lost": "I where pages were lost (s)",
        "interruption found": "the same, less the time that destroying them took (s)",
        "recompute": "R, computed again (s)",
        "beyond": "R beyond what was done (s)",
        **{f"part {part}": f"of I: {PART_NAMES[part]} (s)" for part in PARTS},
        **{f"rank part {part}": f"slowest rank: {text} (s)" for part, text in RANK_PARTS.items()},
        "first": "first iteration slower by (s)",
        "ready": f"training to the next shadows at level {result.get('level', 3)} (s)",
    }
    lines = ["| | median | quartiles | 95 % | lowest | highest |", "| --- | --- | --- | --- | --- | --- |"]
    for key, name in names.items():
        if key in result["spreads"]:
            lines.append(_row(name, result["spreads"][key], 3))
    for level, found in result["footprints_mib"].items():
        lines.append(_row(f"GPU memory of a shadow at level {level} (MiB)", found, 0))
    return lines


def _row(name: str, s: dict[str, float], digits: int) -> str:
    low, high = f"{s['quartile_low']:.{digits}f}", f"{s['quartile_high']:.{digits}f}"
    cells = [f"{s['median']:.{digits}f}", f"{low} to {high}"]
    cells += [f"{s[key]:.{digits}f}" for key in ("p95", "low", "high")]
    return f"| {name} | " + " | ".join(cells) + " |"


def _judged(result: dict[str, Any]) -> list[str]:
    found, data = result["judged"], result["report"]
    if not found["of"]:
        return []
    of, tenth_ms = found["of"], found["tenth_of_iteration_s"] * 1e3
    text = (
        f"R above the part done + 10 %: {found['above_done']} of {of}; above the part done + 10 % of an "
        f"iteration ({tenth_ms:.1f} ms): {found['above_iteration']} of {of}."
    )
    scatter, own = data["reference_scatter_s"], data["iteration_scatter_s"]
    if scatter is not None and own is not None:
        text += (
            " R less the part done is the time of a single iteration less the median of this run: of the "
            "reference run's iterations, without failures, one in twenty is longer than their median by "
            f"{scatter * 1e3:.1f} ms or more (p95 - median; {own * 1e3:.1f} ms in this run, between "
            "failures). Anything smaller cannot be told from that scatter."
        )
    if "lot_above_done" in found:
        share = found["mean_beyond_s"] / (10 * found["tenth_of_iteration_s"])
        text += (
            f" Had the first iterations been drawn by lot from the others of this run, "
            f"{found['lot_above_done']:.1f} and {found['lot_above_iteration']:.1f} would be expected above. "
            f"In the mean R is {found['mean_beyond_s'] * 1e3:.0f} ms above what was done, {share:.1%} of an "
            f"iteration; the standard error of that is {found['error_beyond_s'] * 1e3:.0f} ms."
        )
    return [text, ""]


def _ettr(result: dict[str, Any]) -> list[str]:
    data = result["report"]
    ratio = "unknown" if data["ettr"] is None else f"{data['ettr']:.2%}"
    reference = data["reference"]
    if reference is None or data["iteration_s"] is None:
        return [f"ETTR {ratio}."]
    rows = data["failures"]
    lost_s = sum((row["interruption_s"] or 0.0) + max(0.0, row["recompute_s"] or 0.0) for row in rows)
    pace_ms = reference["elapsed_s"] / reference["iterations"] * 1e3
    own = f"{data['iteration_s'] * 1e3:.2f} ms in the median"
    said = f"ETTR {ratio}: {data['run']['iterations']} iterations in {data['run']['elapsed_s']:.1f} s; the "
    said += (
        f"reference run's mean iteration is {pace_ms:.2f} ms. Failures took {lost_s:.2f} s of it (I and R)"
    )
    if data["ettr"] is not None and data["ettr"] > 1.0:
        said += f". The reference was the slower run (here {own}), so the ETTR is no measure of this one."
    else:
        said += "; the rest of the difference is iterations that were slower than those of the reference: "
        said += f"{own}, beside shadows in preparation."
    lines = [said + (f" {result['machine']['note']}" if result["machine"].get("note") else "")]
    if (found := result["compared"]) is not None:
        kinds = ", ".join(f"{same} of {total} {kind}" for kind, (same, total) in found["kinds"].items())
        word = "differ" if found["differences"] else "are equal"
        covered = sum(row["iteration"] < found["iterations"] for row in rows)
        lines += [
            "",
            f"The bits of the first {found['iterations']} iterations, which both runs have recorded, "
            f"{word}: {kinds}. {covered} of {len(rows)} failures came in these iterations.",
        ]
    return lines


def _recoveries(result: dict[str, Any]) -> list[str]:
    rows, injected = result["report"]["failures"], result["injected"]
    parts = [part for part in PARTS if f"part {part}" in result["spreads"]]
    ranked = [part for part in RANK_PARTS if f"rank part {part}" in result["spreads"]]
    head = [
        "#",
        "injected",
        "planned",
        "came",
        "rank",
        "iteration",
        "I",
        "R",
        "done",
        "first",
        "lost",
        "source",
    ]
    head += ["verdict", *parts, *(part.replace("_", " ") for part in ranked)]
    lines = [
        "All times in seconds.",
        "",
        "| " + " | ".join(head) + " |",
        "| " + " | ".join(["---"] * len(head)) + " |",
    ]
    for number, row in enumerate(rows, 1):
        came = injected[number - 1] if len(injected) == len(rows) else {}
        times = {"detect": row["detected_s"], **row["breakdown"]}
        cells = [number, came.get("kind", row["kind"])]
        cells += [f"{came[key]:.2f}" if key in came else "-" for key in ("planned_s", "actual_s")]
        cells += [row["rank"], row["iteration"]]
        cells += [_s(row[key]) for key in ("interruption_s", "recompute_s", "done_s", "first_extra_s")]
        cells += [row["iterations_lost"], row["source"], row["verdict"]]
        cells += [_s(times.get(part)) for part in parts]
        cells += [_s(row["rank_parts"].get(part)) for part in ranked]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return lines


def _s(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"
