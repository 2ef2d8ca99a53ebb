"""What each subcommand of ``leto-sim`` does with its parsed arguments.

Role: between the command line and the model. Every function returns the exit status and prints to stdout.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from typing import Any, cast

from leto_sim.des import Lane, simulate
from leto_sim.errors import RecoveryTooSlowError, SimError
from leto_sim.failures import bundled_trace, read_trace, repeat_trace
from leto_sim.interval import best_interval_exact
from leto_sim.iteration import iteration_time
from leto_sim.plot import write_html, write_png
from leto_sim.predict import Method, choose_interval, evaluate, simulate_poisson
from leto_sim.profile import Profile, load_profile
from leto_sim.progress import Progress
from leto_sim.renewal import exact_ettr
from leto_sim.sweep import Grid, parse_axis, read_rows, run_sweep, write_rows
from leto_sim.text import percent, table

__all__ = ["compare", "plot", "run", "sweep"]

Options = argparse.Namespace


def _setting(options: Options) -> tuple[Profile, float, float, float, int | str]:
    """(profile at the wanted scale, iteration seconds, MTTF seconds, HOF ratio, interval rule)."""
    profile = load_profile(options.profile)
    if options.data is not None:
        profile = profile.scaled(options.data)
    mttf_s = options.mttf_min * 60 if options.mttf_min is not None else profile.mttf_s()
    ratio = options.hof_ratio if options.hof_ratio is not None else profile.hof_ratio()
    return profile, iteration_time(profile).total_s, mttf_s, ratio, _rule(options.interval)


def _rule(text: str) -> int | str:
    return int(text) if text.lstrip("-").isdigit() else text


def _degrees(text: str) -> tuple[int, ...]:
    """Read the data-parallel degrees of ``--data``."""
    values = parse_axis(text, "--data")
    if not all(v >= 1 and v == int(v) for v in values):
        raise SimError(f"--data: expected integers of at least 1, found {text!r}")
    return tuple(int(v) for v in values)


def _describe(profile: Profile, iteration_s: float, mttf_s: float, ratio: float) -> str:
    return (
        f"{profile.name}: {profile.gpus:,} GPUs, {iteration_s:.4g} s an iteration, a failure every "
        f"{mttf_s / 60:.4g} min, {100 * ratio:.3g} % of them HOFs"
    )


def run(options: Options) -> int:
    """``leto-sim run``."""
    profile, iteration_s, mttf_s, ratio, rule = _setting(options)
    systems = profile.systems()
    names = [options.system] if options.system else list(systems)
    if options.system and options.system not in systems:
        raise SimError(f"--system: expected one of {', '.join(systems)}, found {options.system}")
    failures = profile.data["failures"] or {}
    pool: dict[str, Any] = {"spares": failures.get("spares"), "repair_s": failures.get("repair_s", 0.0)}
    trace = None
    if options.trace:
        read = (
            bundled_trace()
            if options.trace == "bundled"
            else read_trace(options.trace, options.hof_ratio, options.seed)
        )
        trace = repeat_trace(read, options.repeat)
        if not trace.times_s.size:
            raise SimError(f"--trace: expected at least one failure, found none in {options.trace}")
        mttf_s, ratio = trace.mttf_s, float(1 - trace.fatal.mean())
    results = []
    for name in names:
        system = systems[name]
        interval = choose_interval(system, iteration_s, mttf_s, ratio, rule)
        rebuild_s = profile.shadow_rebuild_s() if system.retains_on_hof else 0.0
        entry: dict[str, Any] = {
            "system": name,
            "interval": interval,
            "closed": None,
            "exact": None,
            "des": None,
        }
        try:
            estimate = evaluate(system, iteration_s, mttf_s, ratio, interval)
            entry |= {
                "closed": estimate.ettr,
                "recovery_s": estimate.recovery_s,
                "overhead": estimate.overhead_loss,
            }
        except RecoveryTooSlowError as error:
            entry["refused"] = str(error)
        if trace is None:
            entry["exact"] = exact_ettr(system, iteration_s, mttf_s, ratio, interval)
        if trace is not None:
            outcome = simulate(
                [Lane(system, iteration_s, interval, trace, shadow_rebuild_s=rebuild_s, **pool)]
            )[0]
            entry |= {"des": outcome.ettr, "standard_error": 0.0, "during_recovery": outcome.during_recovery}
        elif not options.no_des:
            outcome_p = simulate_poisson(
                system,
                iteration_s,
                mttf_s,
                ratio,
                interval,
                failures=options.failures,
                replicas=options.replicas,
                seed=options.seed,
                shadow_rebuild_s=rebuild_s,
                **pool,
            )
            entry |= {"des": outcome_p.ettr, "standard_error": outcome_p.standard_error}
        results.append(entry)
    if options.json:
        print(
            json.dumps(
                {"mttf_s": mttf_s, "hof_ratio": ratio, "iteration_s": iteration_s, "systems": results},
                indent=1,
            )
        )
        return 0
    print(_describe(profile, iteration_s, mttf_s, ratio))
    rows = [
        [
            e["system"],
            str(e["interval"]),
            f"{e['recovery_s']:.1f} s" if "recovery_s" in e else "refused",
            percent(e["closed"]),
            percent(e["exact"]) if e["exact"] is not None else "-",
            _simulated(e),
        ]
        for e in results
    ]
    print(table(["system", "interval", "recovery", "closed form", "exact", "simulated"], rows))
    for e in results:
        if "refused" in e:
            print(f"{e['system']}: {e['refused']}")
    return 0


def _simulated(entry: dict[str, Any]) -> str:
    """The simulated ETTR, with its standard error where several runs give one (a trace is a single run)."""
    if entry["des"] is None:
        return "-"
    error = entry["standard_error"]
    return percent(entry["des"]) + (f" ± {100 * error:.2f}" if error > 0 else "")


def compare(options: Options) -> int:
    """``leto-sim compare``."""
    profile, iteration_s, mttf_s, ratio, rule = _setting(options)
    entries = []
    for name, system in profile.systems().items():
        best = best_interval_exact(system, iteration_s, mttf_s, ratio)
        entry: dict[str, Any] = {"system": name, "best_interval": best}
        entry["best_exact"] = exact_ettr(system, iteration_s, mttf_s, ratio, best)
        try:
            interval = choose_interval(system, iteration_s, mttf_s, ratio, rule)
            found = evaluate(system, iteration_s, mttf_s, ratio, interval)
            losses = {"overhead_loss": found.overhead_loss, "recovery_loss": found.recovery_loss}
            entry |= {**dataclasses.asdict(found), **losses}
        except RecoveryTooSlowError as error:
            entry |= {"ettr": None, "refused": str(error)}
        entries.append(entry)
    if options.json:
        print(json.dumps(entries, indent=1))
        return 0
    print(_describe(profile, iteration_s, mttf_s, ratio))
    rows = []
    for e in entries:
        known = e["ettr"] is not None
        rows.append(
            [
                e["system"],
                str(e["interval"]) if known else "-",
                f"{e['recovery_hof_s']:.1f} s" if known else "-",
                f"{e['recovery_ff_s']:.1f} s" if known else "-",
                percent(e["overhead_loss"]) if known else "-",
                percent(e["recovery_loss"]) if known else "-",
                percent(e["ettr"]),
                f"{percent(e['best_exact'])} at {e['best_interval']}",
            ]
        )
    head = ["system", "interval", "HOF", "FF", "lost to overhead", "to recovery", "ETTR", "best (exact)"]
    print(table(head, rows))
    for e in entries:
        if "refused" in e:
            print(f"{e['system']}: {e['refused']}")
    return 0


def sweep(options: Options) -> int:
    """``leto-sim sweep``."""
    profile = load_profile(options.profile)
    methods = tuple(options.method.split(","))
    if not set(methods) <= {"closed", "exact", "des"}:
        raise SimError(f"--method: expected closed, exact, des, found {options.method}")
    grid = Grid(
        systems=tuple(options.system.split(",")) if options.system else tuple(profile.systems()),
        hof_ratios=parse_axis(options.hof_ratio, "--hof-ratio"),
        mttf_s=tuple(60 * m for m in parse_axis(options.mttf_min, "--mttf-min"))
        if options.mttf_min
        else None,
        data_parallel=_degrees(options.data) if options.data else None,
        methods=cast("tuple[Method, ...]", methods),
        interval=_rule(options.interval),
        failures=options.failures,
        replicas=options.replicas,
        seed=options.seed,
    )
    scales = len(grid.data_parallel) if grid.data_parallel else 1
    count = len(grid.systems) * len(grid.hof_ratios) * len(grid.mttf_s or (0,)) * len(methods) * scales
    with Progress(count, "sweep") as progress:
        rows = run_sweep(profile, grid, progress.advance)
    write_rows(options.out, rows)
    print(f"{len(rows)} settings written to {options.out}")
    return 0


def plot(options: Options) -> int:
    """``leto-sim plot``."""
    if not options.html and not options.png:
        raise SimError("expected --html FILE or --png FILE")
    rows = read_rows(options.rows)
    if options.html:
        write_html(options.html, rows, options.title, options.x)
    if options.png:
        write_png(options.png, rows, options.title, options.x)
    return 0
