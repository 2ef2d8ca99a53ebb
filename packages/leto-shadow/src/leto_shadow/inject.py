"""`leto inject`: make a rank of a running job fail now, through the control socket of its agent.

Role: the operator's drill; for failures at an exact point of an exact iteration use a drill file
(`leto_shadow.drills`). The agent carries it out, because only it owns the processes and the manager's pages.
"""

from __future__ import annotations

import argparse
from typing import Any

from leto_shadow import control
from leto_shadow.drills import MAX_NUMBER
from leto_shadow.jobs import CommandError, add_job_arguments, agent_sockets, find_run_dir

__all__ = ["DESCRIPTION", "add_arguments", "execute"]

DESCRIPTION = """Make a rank of a running job fail: kill (SIGKILL of its trainer), hang (its trainer keeps the
GIL for ever), lose (kill, and lose data pages of a protection group), poison (kill, and poison tier-1 parity
pages) or kill-manager (its state manager dies: a fatal failure)."""

_KINDS = ("kill", "hang", "lose", "poison", "kill-manager")


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
    add_job_arguments(parser, "--job")  # argparse cannot mix a second, optional positional with options
    parser.add_argument("--rank", type=_natural, required=True, metavar="R", help="rank that fails")
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
    parser.add_argument("--seed", type=_natural, default=0, metavar="N", help="lose, poison: which pages")


def _request(arguments: argparse.Namespace) -> control.Inject:
    details: dict[str, Any] = {
        name: value
        for name in ("allocation", "group", "pages", "tier1")
        if (value := getattr(arguments, name)) is not None
    }
    allowed = {"lose": {"allocation", "group", "pages", "tier1"}, "poison": {"allocation", "group", "pages"}}
    if extra := sorted(set(details) - allowed.get(arguments.kind, set())):
        raise CommandError(f"--{extra[0]} has no meaning for {arguments.kind}", 2)
    kind = arguments.kind.replace("-", "_")
    if kind == "poison":
        details["tier1"] = details.pop("pages", 1)
        if details["tier1"] == "tolerance":
            raise CommandError("--pages 'tolerance' is for lose; poison takes a number", 2)
    return control.Inject(kind, arguments.rank, seed=arguments.seed, **details)


def execute(arguments: argparse.Namespace) -> int:
    """Ask every agent of this host; exactly the one that owns the rank does it."""
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
