"""`leto inject`: make a rank of a running job fail now, through the control socket of its agent.

Role: the operator's drill; for failures at an exact point of an exact iteration use a drill file
(`leto_shadow.drills`). The agent carries it out, because only it owns the processes and the manager's pages.
"""

from __future__ import annotations

import argparse
import math
import sys
from pathlib import Path
from typing import Any

import msgspec

from leto_shadow import control
from leto_shadow.drills import MAX_NUMBER
from leto_shadow.jobs import CommandError, add_job_arguments, agent_sockets, find_run_dir
from leto_shadow.operability import Class, class_of_xid
from leto_shadow.schedule import CLASSES, ScheduleError, dump_schedule, load_schedule, make_schedule

__all__ = ["DESCRIPTION", "add_arguments", "execute"]

DESCRIPTION = """Make a rank of a running job fail: kill (SIGKILL of its trainer), hang (its trainer keeps the
GIL for ever), lose (kill, and lose data pages of a protection group), poison (kill, and poison tier-1 parity
pages), fatal (kill, and say that its device had an Xid) or kill-manager (its state manager dies: a fatal
failure). plan draws a schedule of such failures from a seed and prints it, for `leto run --injections`;
schedule FILE has the agents of a running job carry one out."""

_KINDS = ("kill", "hang", "lose", "poison", "fatal", "kill-manager", "plan", "schedule")
_MAX_SCHEDULE_BYTES = 60_000


def _classes(text: str) -> dict[str, float]:
    found = {}
    for part in text.split(","):
        name, _, weight = part.partition("=")
        if name not in CLASSES:
            raise argparse.ArgumentTypeError(f"{name!r} must be one of {', '.join(CLASSES)}")
        found[name] = _positive(weight or "1", zero=True)
    return found


def _positive(text: str, *, zero: bool = False) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and (number > 0 or (zero and number == 0))):
        raise argparse.ArgumentTypeError(f"{text[:24]!r} must be a finite number above 0")
    return number


def _seconds(text: str) -> float:
    return math.inf if text == "never" else _positive(text, zero=True)


def _pages(text: str) -> int | str:
    if text == "tolerance":
        return text
    if not text.isdecimal() or not (number := _natural(text)):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of at least 1, or 'tolerance'")
    return number


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} must be a number of at least 0")
    if len(text) > len(str(MAX_NUMBER)) or int(text) > MAX_NUMBER:
        raise argparse.ArgumentTypeError(f"{text[:24]!r} must be a number of at most {MAX_NUMBER}")
    return int(text)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `leto inject`."""
    parser.add_argument("kind", choices=_KINDS, metavar="KIND", help=", ".join(_KINDS))
    parser.add_argument("file", nargs="?", type=Path, metavar="FILE", help="schedule: its file")
    add_job_arguments(parser, "--job")  # argparse cannot mix a second, optional positional with options
    parser.add_argument("--rank", type=_natural, metavar="R", help="rank that fails")
    parser.add_argument("--allocation", metavar="NAME", help="lose, poison: allocation (default arena)")
    parser.add_argument(
        "--group", type=_natural, metavar="G", help="lose, poison: protection group (default 0)"
    )
    parser.add_argument(
        "--pages", type=_pages, metavar="N", help="lose, poison: number of pages, or 'tolerance' (default 1)"
    )
    parser.add_argument(
        "--tier1", type=_natural, metavar="N", help="lose: tier-1 parity pages poisoned besides"
    )
    parser.add_argument(
        "--seed", type=_natural, default=0, metavar="N", help="lose, poison: which pages; plan: its seed"
    )
    parser.add_argument("--xid", type=_natural, metavar="N", help="fatal: which Xid (default 79)")
    parser.add_argument(
        "--heals-after",
        type=_seconds,
        metavar="S",
        help="fatal: if a spare takes the node's place, seconds until its device can be used again, "
        "or 'never' (default 0)",
    )
    plan = parser.add_argument_group("plan")
    plan.add_argument("--mttf", type=_positive, metavar="S", help="mean seconds between failures")
    plan.add_argument(
        "--gap", type=_natural, metavar="S", help="least seconds between two failures (default 0)"
    )
    plan.add_argument("--ranks", type=_natural, metavar="N", help="ranks of the job")
    plan.add_argument("--duration", type=_positive, metavar="S", help="seconds of training to plan for")
    plan.add_argument("--count", type=_natural, metavar="N", help="so many failures, instead of --duration")
    plan.add_argument(
        "--classes",
        type=_classes,
        metavar="K=W,...",
        help=f"weights of {', '.join(CLASSES)} (default kill=1)",
    )
    plan.add_argument(
        "--clock",
        choices=("wall", "ready"),
        default="wall",
        help="ready: time counts only while shadows stand ready (default wall)",
    )


def _request(arguments: argparse.Namespace) -> control.Inject:
    details: dict[str, Any] = {
        name: value
        for name in ("allocation", "group", "pages", "tier1")
        if (value := getattr(arguments, name)) is not None
    }
    if arguments.rank is None:
        raise CommandError(f"{arguments.kind} needs --rank", 2)
    if arguments.xid is not None and arguments.kind != "fatal":
        raise CommandError(f"--xid has no meaning for {arguments.kind}", 2)
    if arguments.heals_after is not None and arguments.kind != "fatal":
        raise CommandError(f"--heals-after has no meaning for {arguments.kind}", 2)
    if arguments.kind == "fatal":
        xid = 79 if arguments.xid is None else arguments.xid
        if class_of_xid(xid) is not Class.FF:
            raise CommandError(f"Xid {xid} does not make a device inoperable: such a failure is not fatal", 2)
        heals_s = arguments.heals_after or 0.0
        return control.Inject(
            "fatal", arguments.rank, xid=xid, heals_s=heals_s if math.isfinite(heals_s) else None
        )
    allowed = {"lose": {"allocation", "group", "pages", "tier1"}, "poison": {"allocation", "group", "pages"}}
    if extra := sorted(set(details) - allowed.get(arguments.kind, set())):
        raise CommandError(f"--{extra[0]} has no meaning for {arguments.kind}", 2)
    kind = arguments.kind.replace("-", "_")
    if kind == "poison":
        details["tier1"] = details.pop("pages", 1)
        if details["tier1"] == "tolerance":
            raise CommandError("--pages 'tolerance' is for lose; poison takes a number", 2)
    return control.Inject(kind, arguments.rank, seed=arguments.seed, **details)


_PLAN_ONLY = ("mttf", "ranks", "duration", "count", "classes", "gap")
_FAILURE_ONLY = ("rank", "allocation", "group", "pages", "tier1", "xid")


def _refuse_strangers(arguments: argparse.Namespace) -> None:
    """What the chosen kind has no use for is a mistake, not something to pass over in silence."""
    plans = arguments.kind == "plan"
    strangers = _FAILURE_ONLY if plans or arguments.kind == "schedule" else ()
    for name in (*strangers, *(("job", "run_dir") if plans else _PLAN_ONLY)):
        if getattr(arguments, name) is not None:
            raise CommandError(f"--{name.replace('_', '-')} has no meaning for {arguments.kind}", 2)


def _plan(arguments: argparse.Namespace) -> int:
    for name in ("mttf", "ranks"):
        if not getattr(arguments, name):
            raise CommandError(f"plan needs --{name}", 2)
    try:
        schedule = make_schedule(
            arguments.seed,
            arguments.mttf,
            arguments.ranks,
            arguments.classes or {"kill": 1.0},
            duration_s=arguments.duration,
            count=arguments.count,
            gap_s=arguments.gap or 0,
            clock=arguments.clock,
        )
    except ScheduleError as error:
        raise CommandError(str(error), 2) from error
    sys.stdout.write(dump_schedule(schedule).decode())
    return 0


def _schedule(arguments: argparse.Namespace) -> int:
    if arguments.file is None:
        raise CommandError("schedule needs the file of one", 2)
    try:
        text = msgspec.json.encode(load_schedule(arguments.file))
    except ScheduleError as error:
        raise CommandError(str(error), 2) from error
    if len(text) > _MAX_SCHEDULE_BYTES:
        raise CommandError("the schedule is too long for a running job: start it with leto run --injections")
    run_dir = find_run_dir(arguments.job, arguments.run_dir)
    sockets = agent_sockets(run_dir)
    if not sockets:
        raise CommandError(f"no agent of {run_dir.name} runs on this host (no agent-*.sock in {run_dir})")
    for path in sockets:
        try:
            reply = control.ask(path, control.RunSchedule(text))
        except control.ControlError as error:
            raise CommandError(str(error)) from error
        if not isinstance(reply, control.Reply) or not reply.ok:
            raise CommandError(getattr(reply, "detail", "") or f"the agent at {path} refused")
        print(f"leto inject: {path.stem}: {reply.detail}")
    return 0


def execute(arguments: argparse.Namespace) -> int:
    """Ask every agent of this host; exactly the one that owns the rank does it."""
    if arguments.file is not None and arguments.kind != "schedule":
        raise CommandError(f"{arguments.kind} takes no file, found {arguments.file}", 2)
    _refuse_strangers(arguments)
    if arguments.kind == "plan":
        return _plan(arguments)
    if arguments.kind == "schedule":
        return _schedule(arguments)
    request = _request(arguments)
    run_dir = find_run_dir(arguments.job, arguments.run_dir)
    sockets = agent_sockets(run_dir)
    if not sockets:
        raise CommandError(f"no agent of {run_dir.name} runs on this host (no agent-*.sock in {run_dir})")
    refusals = []
    for path in sockets:
        try:
            reply = control.ask(path, request)
        except control.ControlError as error:
            refusals.append(str(error))
            continue
        if not isinstance(reply, control.Reply):
            raise CommandError(f"the agent at {path} gave an answer to another question")
        if reply.ok:
            print(f"leto inject: {arguments.kind} of rank {arguments.rank}: {reply.detail or 'done'}")
            return 0
        refusals.append(reply.detail or f"the agent at {path} refused")
    raise CommandError("; ".join(dict.fromkeys(refusals)))
