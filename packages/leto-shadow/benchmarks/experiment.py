"""I, R and ETTR under a seeded schedule of failures, against a run without failures (paper section 8.1).

    python packages/leto-shadow/benchmarks/experiment.py --failures 20 --mttf 11 --gap 8 --seed 7 \
        --classes '{"kill": 3, "lose": 1}' --output docs/benchmarks/shadow-recovery-host
    python packages/leto-shadow/benchmarks/experiment.py --backend cuda --script train.py --options "..." ...

Two jobs of `leto run`, one after the other on the same machine: a reference without failures, then the same
script under a schedule (`leto_shadow.schedule`), long enough for all of it. Every number is `leto report`'s
(`leto_shadow.report`), from the events of the two jobs; this script only starts jobs and writes tables.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import leto_shadow
from leto_shadow.archive import read_job
from leto_shadow.report import make_report
from leto_shadow.schedule import Schedule, dump_schedule, make_schedule

EXAMPLE = Path(__file__).parents[1] / "examples" / "plain_pytorch.py"
SMALL_POOL = "--page-bytes 16384 --data-pages 48 --tier1 6"


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
    if backend == "cuda":
        from leto_shadow.gpu import list_gpus

        found["gpus"] = [gpu.name for gpu in list_gpus()]
    return found


def run_job(arguments: argparse.Namespace, folder: Path, name: str, iterations: int, more: list[str]) -> Path:
    """Run one job to its end; return the folder with its events."""
    options = ["--nproc-per-node", str(arguments.ranks), "--backend", arguments.backend]
    options += shlex.split(arguments.options)
    options += ["--job-id", name, "--run-dir", str(folder / name), "--keep", str(folder / "kept")]
    script = [str(arguments.script), *shlex.split(arguments.script_args), "--iterations", str(iterations)]
    command = [sys.executable, "-m", "leto_shadow.cli", "run", *options, *more, *script]
    print(shlex.join(command), flush=True)
    done = subprocess.run(command, timeout=arguments.timeout, check=False)
    if done.returncode != 0:
        raise SystemExit(f"the job {name} ended with {done.returncode}")
    return folder / "kept" / name


def measure(arguments: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], Schedule]:
    """Run both jobs; return `leto report --json` of the one with failures, and its schedule."""
    reference = run_job(arguments, folder, "reference", arguments.reference_iterations, [])
    events, _ = read_job([reference])
    pace_s = make_report("reference", events).measures.iteration_s
    if pace_s is None:
        raise SystemExit("the reference run reports no iterations: its script must call ctx.metrics")
    schedule = make_schedule(
        arguments.seed,
        arguments.mttf,
        arguments.ranks,
        arguments.classes,
        count=arguments.failures,
        gap_s=arguments.gap,
    )
    plan = folder / "schedule.json"
    plan.write_bytes(dump_schedule(schedule))
    # So much training without failures, so all of them come before its end.
    iterations = int(schedule.injections[-1].at_s / pace_s) + 20
    job = run_job(arguments, folder, "experiment", iterations, ["--injections", str(plan)])
    found, skipped = read_job([job])
    data = make_report("experiment", found, skipped, events).data()
    data["injected"] = [event for event in found if event["event"] == "injected"]
    return data, schedule


def spread(values: list[float]) -> dict[str, float]:
    """Median, ends and quartiles."""
    low, _, high = statistics.quantiles(values, n=4) if len(values) > 1 else (values[0],) * 3
    return {
        "median": statistics.median(values),
        "low": min(values),
        "high": max(values),
        "quartile_low": low,
        "quartile_high": high,
    }


def page(result: dict[str, Any]) -> str:
    """The result as Markdown."""
    data, where, plan = result["report"], result["machine"], result["schedule"]
    rows = data["failures"]
    recovered = [row for row in rows if row["recovered_s"] is not None]
    on = ", ".join(where.get("gpus", [])) or f"{where['processor']}, {where['cores']} cores"
    said = ""
    if where["backend"] == "host":
        said = "No GPU took part: they say how the protocol behaves, not what a GPU job would see. "
    lines = [
        f"# Recoveries under a schedule of failures ({where['backend']} backend)",
        "",
        f"`{result['command']}`",
        "",
        f"{where['backend'].capitalize()} numbers of {on}, Linux {where['kernel']}, {where['time']}; load "
        f"{where['load_average'][0]} when it began. {said}{data['world_size']} ranks, seed {plan['seed']}, "
        f"mean time to failure {plan['mttf_s']:g} s, at least {plan['gap_s']:g} s apart; "
        f"{len(data['injected'])} failures were injected, {len(recovered)} of {len(rows)} recovered from.",
        "",
        "| | median | quartiles | lowest | highest |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, key in (("I, interruption", "interruption_s"), ("R, computed again", "recompute_s")):
        values = [row[key] for row in recovered if row[key] is not None]
        if values:
            s = spread(values)
            lines.append(
                f"| {name} (s) | {s['median']:.3f} | {s['quartile_low']:.3f} to {s['quartile_high']:.3f} | "
                f"{s['low']:.3f} | {s['high']:.3f} |"
            )
    for part, times in data["phases"].items():
        lines.append(f"| of it: {part} (s) | {times['median_s']:.3f} | | | {times['worst_s']:.3f} |")
    ratio = "unknown" if data["ettr"] is None else f"{data['ettr']:.2%}"
    reference = data["reference"]
    lost_s = sum((row["interruption_s"] or 0.0) + max(0.0, row["recompute_s"] or 0.0) for row in rows)
    pace_ms = reference["elapsed_s"] / reference["iterations"] * 1e3
    lines += [
        "",
        f"ETTR {ratio}: {data['run']['iterations']} iterations in {data['run']['elapsed_s']:.1f} s; the "
        f"reference run's mean iteration is {pace_ms:.2f} ms. Failures took {lost_s:.2f} s of it (I and R); "
        f"the rest of the difference is iterations that were slower than those of the reference: "
        f"{data['iteration_s'] * 1e3:.2f} ms in the median, beside shadows in preparation."
        + (f" {where['note']}" if where.get("note") else ""),
        "",
        "I: from the failure to training on all ranks. R: from there until the interrupted iteration is "
        "done, less "
        "what was left of it at the failure. All numbers are those of `leto report`.",
        "",
        "| # | injected | planned (s) | came (s) | rank | I (s) | R (s) | lost | source | verdict |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for number, row in enumerate(rows, 1):
        came = data["injected"][number - 1] if len(data["injected"]) == len(rows) else {}
        cells = [number, came.get("kind", row["kind"])]
        cells += [f"{came[key]:.2f}" if key in came else "-" for key in ("planned_s", "actual_s")]
        cells += [row["rank"]]
        cells += ["-" if row[key] is None else f"{row[key]:.3f}" for key in ("interruption_s", "recompute_s")]
        cells += [row["iterations_lost"], row["source"], row["verdict"]]
        lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--script", type=Path, default=EXAMPLE, help="it must take --iterations N")
    parser.add_argument("--script-args", default="", help="its other arguments, in one word")
    parser.add_argument("--options", default=SMALL_POOL, help="further options of leto run, in one word")
    parser.add_argument("--backend", choices=("host", "cuda"), default="host")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--failures", type=int, default=20)
    parser.add_argument("--mttf", type=float, default=10.0, help="mean seconds between failures")
    parser.add_argument("--gap", type=float, default=0.0, help="least seconds between failures")
    parser.add_argument("--classes", type=json.loads, default={"kill": 1}, help="weights, as JSON")
    parser.add_argument("--reference-iterations", type=int, default=2000)
    parser.add_argument("--timeout", type=float, default=3600.0, help="seconds for each job")
    parser.add_argument("--note", default="", help="a sentence for the page, such as what else ran there")
    parser.add_argument("--output", type=Path, help="write OUTPUT.json and OUTPUT.md")
    arguments = parser.parse_args()
    where = {**machine(arguments.backend), "note": arguments.note}
    with tempfile.TemporaryDirectory(prefix="leto-x-") as folder:
        data, schedule = measure(arguments, Path(folder))
    del data["lines"]
    result = {
        "machine": where,
        "command": shlex.join(["experiment.py", *(w for w in sys.argv[1:])]),
        "schedule": json.loads(dump_schedule(schedule)),
        "report": data,
    }
    text = page(result)
    print(text)
    if arguments.output is not None:
        arguments.output.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        arguments.output.with_suffix(".md").write_text(text)
    return 0 if len(data["failures"]) >= arguments.failures else 1


if __name__ == "__main__":
    sys.exit(main())
