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

from leto_shadow.checks import CHECKS, Machine, Result

__all__ = ["DESCRIPTION", "add_arguments", "diagnose", "execute"]

DESCRIPTION = """Check this machine: kernel features, limits, memory, installed packages, GPU driver.
Exit status 1 if something that Leto needs is missing."""

_COLOURS = {"ok": "green", "warn": "yellow", "fail": "red"}


def diagnose(machine: Machine) -> list[Result]:
    """Run all checks. A check that breaks is reported as failed, and the others still run."""
    results = []
    for check in CHECKS:
        try:
            results.append(check(machine))
        except Exception as error:  # noqa: BLE001 - reported as a result of its own
            name = check.__name__.removeprefix("check_").replace("_", "-")
            found = f"{type(error).__name__}: {error}"
            fix = "report this as a bug of leto doctor"
            results.append(Result(name, "fail", found, "the check itself broke", fix))
    return results


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `leto doctor`."""
    parser.add_argument("--json", action="store_true", help="print the results as JSON")


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
    results = diagnose(Machine())
    if arguments.json:
        text = msgspec.json.format(msgspec.json.encode(results), indent=2).decode()
        sys.stdout.write(text + "\n")
    else:
        _print(results, Console())
    return int(any(result.status == "fail" for result in results))
