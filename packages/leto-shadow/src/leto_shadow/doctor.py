"""`leto doctor`: what will work on this machine, what will not, and the fix.

Role: every limit that Leto meets at run time is looked at here first, by trying it where that is harmless. A
check never changes the machine. `leto_shadow.checks` holds the checks; this module runs and prints them.

Exit status: 0 if nothing fails (warnings allowed), 1 otherwise.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import msgspec
from rich.console import Console
from rich.table import Table
from rich.text import Text

from leto_rmp import ConfigError, PoolConfig
from leto_shadow import agent_options, room
from leto_shadow.checks import CHECKS, Machine, Result, check_pool
from leto_shadow.devices import BACKENDS
from leto_shadow.jobs import CommandError
from leto_shadow.room import Need

__all__ = ["DESCRIPTION", "add_arguments", "diagnose", "execute"]

DESCRIPTION = """Check this machine: kernel features, limits, memory, installed packages, GPU driver.
Exit status 1 if something that Leto needs is missing."""

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def diagnose(machine: Machine, need: Need | None = None) -> list[Result]:
    """Run all checks; with ``need``, also whether such pools fit. A check that breaks is reported as failed,
    and the others still run."""
    results = []
    for check in CHECKS:
        try:
            results.append(check(machine))
        except Exception as error:  # noqa: BLE001 - reported as a result of its own
            name = check.__name__.removeprefix("check_").replace("_", "-")
            found = f"{type(error).__name__}: {error}"
            fix = "report this as a bug of leto doctor"
            results.append(Result(name, "fail", found, "the check itself broke", fix))
    if need is not None:
        results.append(check_pool(machine, need))
    return results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `leto doctor`."""
    parser.add_argument("--json", action="store_true", help="print the results as JSON")
    job = parser.add_argument_group("a job that is to fit")
    job.add_argument(
        "--nproc-per-node", "--nproc_per_node", type=int, default=1, metavar="N", help="ranks on this node"
    )
    room.add_option(job)
    agent_options.add_pool_options(parser)


def _need(arguments: argparse.Namespace) -> Need:
    if arguments.nproc_per_node < 1:
        raise CommandError(f"--nproc-per-node must be at least 1, found {arguments.nproc_per_node}", 2)
    if arguments.backend not in BACKENDS:
        raise CommandError(f"there is no backend {arguments.backend!r}; there are {', '.join(BACKENDS)}", 2)
    numbers = (arguments.page_bytes, arguments.data_pages, arguments.tier1_pages, arguments.tier2_pages)
    try:
        pool = PoolConfig(*numbers, backend=arguments.backend)
    except ConfigError as error:
        raise CommandError(str(error), 2) from error
    return room.least(pool, arguments.nproc_per_node, arguments.retained_bytes)


def _print(results: Sequence[Result], console: Console) -> None:
    table = Table(box=None, pad_edge=False, header_style="dim")
    for name in ("check", "status", "found"):
        table.add_column(name, overflow="fold", no_wrap=name == "status")
    for result in results:
        found = Text(result.found)
        if result.status != "ok":
            found.append(f"\n{result.meaning}", style="dim")
            found.append(f"\nfix: {result.fix}", style=_COLOURS[result.status])
        table.add_row(result.name, Text(result.status, style=_COLOURS[result.status]), found)
    console.print(table)
    count = {status: sum(result.status == status for result in results) for status in _COLOURS}
    console.print(f"\n{count['ok']} ok, {count['warn']} warnings, {count['fail']} failures")


def execute(arguments: argparse.Namespace) -> int:
    """Run the checks and print them."""
    results = diagnose(Machine(), _need(arguments))
    if arguments.json:
        text = msgspec.json.format(msgspec.json.encode(results), indent=2).decode()
        sys.stdout.write(text + "\n")
    else:
        _print(results, Console())
    return int(any(result.status == "fail" for result in results))
