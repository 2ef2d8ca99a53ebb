"""Subcommands that answer a question rather than run the model: reproduce, advise, profile, validate.

Role: as `leto_sim.commands`. Every function returns the exit status and prints to stdout.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
from pathlib import Path
from typing import Any

from leto_sim import paper
from leto_sim.advise import STATE_BYTES_PER_PARAMETER, Question, Range, advise, spread
from leto_sim.errors import SimError
from leto_sim.iteration import iteration_time
from leto_sim.measured import StageConfig, profile_toml
from leto_sim.profile import load_profile
from leto_sim.profiler import profile_stage
from leto_sim.reproduce import figures_page
from leto_sim.text import percent, table
from leto_sim.validate import compare_run, read_report

__all__ = ["advise_command", "profile", "reproduce", "validate"]

Options = argparse.Namespace

LARGEST_GPU_GB = 300.0
"""Memory of the largest GPUs of 2026 (288 GB), rounded up: more state than that is a slip in the input."""

_OPTIONS = {
    "iteration_s": "the iteration time (--iteration-s)",
    "mttf_s": "the MTTF (--mttf-min or --gpu-mttf-hours)",
    "hof_ratio": "the HOF share (--hof-share)",
    "leto_initialize_s": "Leto's start (--leto-initialize-s)",
    "leto_overhead": "Leto's overhead (--leto-overhead)",
    "fallback_initialize_s": "the fallback's start (--fallback-initialize-s)",
    "checkpoint_stall_s": "the cost of a checkpoint (--checkpoint-stall-s)",
    "host_gb_per_s": "the cost of a checkpoint (--checkpoint-stall-s)",
    "checkpoint_fixed_s": "the cost of a checkpoint (--checkpoint-stall-s)",
    "detection_s": "the time to detect a failure",
}
"""Uncertain inputs in words, with the option that narrows them."""


def reproduce(options: Options) -> int:
    """``leto-sim reproduce``."""
    loss = percent(paper.illustrative_loss(), 1)
    print(f"section 2.3: 88 s of recovery every 0.23 h lose {loss} (paper: 10.6 %)\n")
    cells = paper.reproduce_figures()
    rows = [
        [
            c.cell.model,
            str(c.cell.mttf_min),
            f"{100 * c.cell.hof_ratio:.0f}",
            c.system,
            str(c.interval),
            f"{c.printed:.1f}",
            f"{c.predicted:.2f}",
            f"{c.difference:+.2f}",
        ]
        for c in cells
    ]
    print("figures 14 and 15 (ETTR in %; profiles inferred from these very figures, see the documentation)")
    print(table(["model", "MTTF min", "HOF %", "system", "interval", "paper", "ours", "difference"], rows))
    print(f"largest difference: {max(abs(c.difference) for c in cells):.3f} percentage points\n")
    ours = paper.reproduce_table_3()
    print("table 3, Kimi-MoE (recovery, initialisation, recomputation in s; ETTR in %)")
    rows = [
        [name, *(f"{p:g} / {o:.1f}" for p, o in zip(printed, ours[name], strict=True))]
        for name, printed in paper.TABLE_3.items()
    ]
    print(table(["paper / ours", "recovery", "init.", "recomp.", "ETTR"], rows))
    print("\ntable 4 against Young's formula: stall that explains all three intervals")
    rows = [
        [model, *(str(i) for i in intervals), "{:.2f}-{:.2f} s".format(*paper.table_4_stall_range_s(model))]
        for model, intervals in paper.TABLE_4_INTERVALS.items()
    ]
    print(table(["workload", "10 min", "30 min", "60 min", "T_ckpt"], rows))
    errors = paper.table_6_errors()
    mean = sum(abs(e) for e in errors.values()) / len(errors)
    print("\ntable 6, error of predicted iteration time (paper / from the printed times)")
    print(
        table(
            ["workload", "error %"],
            [[n, f"{paper.TABLE_6[n][2]:+.1f} / {e:+.2f}"] for n, e in errors.items()],
        )
    )
    print(f"mean absolute error: 2.18 / {mean:.2f} %")
    if options.html:
        Path(options.html).write_text(figures_page(), encoding="utf-8")
    return 0


def advise_command(options: Options) -> int:
    """``leto-sim advise``."""
    if options.mttf_min:
        mttf = _scaled(_around(options.mttf_min, "--mttf-min", factor=1.5), 60)
    else:
        mttf = _scaled(
            _around(options.gpu_mttf_hours, "--gpu-mttf-hours", factor=1.5), 3600 / max(1, options.gpus)
        )
    given: dict[str, Any] = {}
    for field in ("fallback_initialize_s", "leto_initialize_s", "leto_overhead", "checkpoint_stall_s"):
        text = getattr(options, field)
        if text:
            given[field] = _around(text, "--" + field.replace("_", "-"))
    if options.hof_share:
        share = _around(options.hof_share, "--hof-share")
        if share.low == share.high and 0 <= share.low <= 1:
            share = Range(max(0.0, share.low - 0.1), min(1.0, share.high + 0.1))
        given["hof_ratio"] = share
    question = Question(
        gpus=options.gpus,
        iteration_s=_around(options.iteration_s, "--iteration-s"),
        parameters=options.parameters,
        mttf_s=mttf,
        fallback=options.fallback,
        seed=options.seed,
        **given,
    )
    answer = advise(question)
    if options.json:
        print(json.dumps(dataclasses.asdict(answer), indent=1))
        return 0
    print(f"Turn Leto on? {answer.verdict}.\n")
    rows = [
        [name, *(percent(v) for v in values)]
        for name, values in (
            (f"ETTR of {question.fallback} alone", answer.fallback_ettr),
            (f"ETTR of Leto over {question.fallback}", answer.leto_ettr),
        )
    ]
    rows.append(["gain", *(f"{100 * v:+.2f} pp" for v in answer.gain)])
    rows.append(["GPU-hours saved a day", *(f"{v:,.0f}" for v in answer.gpu_hours_per_day)])
    print(table(["", "5 %", "median", "95 %"], rows))
    even = answer.break_even_hof
    print(f"\nLeto is better in {percent(answer.share_better, 0)} of {question.draws} draws.")
    print(
        "It would not pay even if every failure were a HOF."
        if even is None
        else f"It pays from a HOF share of about {percent(even, 1)} on."
    )
    print(f"The answer depends most on: {_OPTIONS.get(answer.most_uncertain, answer.most_uncertain)}.")
    state_gb = STATE_BYTES_PER_PARAMETER * question.parameters / question.gpus / 1e9
    if state_gb > LARGEST_GPU_GB:
        print(f"Check --gpus and --parameters: {state_gb:,.0f} GB of model state a GPU fit no GPU.")
    return 0


def _around(text: str, name: str, factor: float = 1.0) -> Range:
    """Read ``value`` or ``low:high``; a single value is widened by ``factor``."""
    try:
        numbers = [float(part) for part in text.split(":")]
    except ValueError as error:
        raise SimError(f"{name}: expected a number or low:high, found {text!r}") from error
    if len(numbers) not in (1, 2) or not all(math.isfinite(n) and n >= 0 for n in numbers):
        raise SimError(f"{name}: expected a number or low:high of at least 0, found {text!r}")
    if len(numbers) == 2:
        if numbers[0] > numbers[1]:
            raise SimError(f"{name}: expected low <= high, found {text!r}")
        return Range(numbers[0], numbers[1])
    if factor > 1:
        if numbers[0] == 0:
            raise SimError(f"{name}: expected a number above 0, found {text!r}")
        return spread(numbers[0], factor)
    return Range(numbers[0], numbers[0])


def _scaled(r: Range, factor: float) -> Range:
    return Range(r.low * factor, r.high * factor, r.log)


def profile(options: Options) -> int:
    """``leto-sim profile``."""
    names = {f.name for f in dataclasses.fields(StageConfig)}
    config = StageConfig(**{k: v for k, v in vars(options).items() if k in names})
    measured = profile_stage(config)
    if os.environ.get("RANK", "0") != "0":  # under torchrun all ranks measure, one writes
        return 0
    Path(options.out).write_text(profile_toml(config, measured), encoding="utf-8")
    predicted = iteration_time(load_profile(options.out))
    times = f"forward {measured.forward_ms:.3f} ms, backward {measured.backward_ms:.3f} ms"
    print(f"{options.out}: {times} on {measured.device}")
    print(f"predicted iteration: {predicted.total_s:.4g} s")
    return 0


def validate(options: Options) -> int:
    """``leto-sim validate``."""
    measured = read_report(options.report)
    known = load_profile(options.profile) if options.profile else None
    results = compare_run(measured, known)
    if options.json:
        print(json.dumps([{**dataclasses.asdict(c), "error": c.error} for c in results], indent=1))
        return 0
    print(
        f"measured: {measured.iterations} iterations in {measured.elapsed_s:.1f} s, "
        f"{measured.failures} failures, mean recovery {measured.mean_recovery_s:.2f} s, "
        f"ETTR {percent(measured.ettr)}"
    )
    rows = [[c.name, percent(c.predicted), percent(c.measured), f"{100 * c.error:+.2f} %"] for c in results]
    print(table(["prediction", "predicted", "measured", "error"], rows))
    return 0
