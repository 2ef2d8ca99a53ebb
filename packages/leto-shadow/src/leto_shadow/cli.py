"""The `leto` command: run, status, report, inject, doctor.

Role: the user's way in. `leto run` checks its arguments and becomes torchrun (`leto_shadow.launcher`) with
one node agent per node as its worker, so that rendezvous, placement and node failures stay with torch's own
engine (docs/concepts/architecture.md, "Processes on a node"). The other subcommands talk to a running job, or
to this machine only.

Errors are one line on stderr. Exit status 2: the command line is wrong, nothing was done; 1: it could not be
done.
"""

from __future__ import annotations

import argparse
import contextlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from leto_shadow import doctor, inject, launch, report, status
from leto_shadow._version import __version__
from leto_shadow.jobs import CommandError

__all__ = ["main"]


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        message = message.replace("required: script, ...", "required: script")
        self.exit(2, f"{self.prog}: error: {message} (try `{self.prog} --help`)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="leto", description="In-place recovery for training jobs.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"leto-shadow {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)
    for name, module, text in (
        ("run", launch, "start a training job"),
        ("status", status, "show a job: ranks, generation, last recovery"),
        ("report", report, "tell what failures cost a job, and where recoveries spent their time"),
        ("inject", inject, "make a running job fail, as a drill"),
        ("doctor", doctor, "tell what will work on this machine and what not"),
    ):
        command = commands.add_parser(name, help=text, description=module.DESCRIPTION, allow_abbrev=False)
        module.add_arguments(command)
        command.set_defaults(execute=module.execute)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return its exit status (`leto run` does not return: it becomes torchrun)."""
    arguments, unknown = _parser().parse_known_args(argv)
    try:
        if unknown:
            raise CommandError(f"unknown arguments: {' '.join(unknown)}", 2)
        status = int(arguments.execute(arguments))
        sys.stdout.flush()  # a full disk is met here, not when the interpreter ends
        return status
    except CommandError as error:
        print(f"leto {arguments.command}: error: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output (head, less) has left
        sys.stderr.close()
        return 141
    except OSError as error:
        print(f"leto {arguments.command}: error: {error}", file=sys.stderr)
        with contextlib.suppress(OSError):
            sys.stdout.close()  # what could not be written is not tried again at the end
        return 1


if __name__ == "__main__":
    sys.exit(main())
