"""The command ``leto-sim``: run, sweep, plot, compare, reproduce, advise, profile, validate.

Role: arguments in, tables out; no mathematics here. Exit status 0, or 2 with one line on stderr for an input
that was refused.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import NoReturn

from leto_sim._version import __version__
from leto_sim.answers import advise_command, profile, reproduce, validate
from leto_sim.commands import compare, plot, run, sweep
from leto_sim.errors import SimError
from leto_sim.profile import bundled_profiles

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    options = _parser().parse_args(arguments)
    try:
        status: int = options.command(options)
        sys.stdout.flush()  # a full disk is met here, not when the interpreter ends
        return status
    except SimError as error:
        print(f"leto-sim: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        sys.stderr.close()
        return 1
    except OSError as error:  # an output file: inputs that cannot be read are SimErrors
        print(f"leto-sim: {error.filename or 'output'}: cannot be written: {error.strerror}", file=sys.stderr)
        return 2


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (try `{self.prog} --help`)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="leto-sim",
        description="Predict the effective training time ratio (ETTR) of a job under failures.",
        epilog=f"PROFILE is a TOML file or one of: {', '.join(bundled_profiles())}",
    )
    parser.add_argument("--version", action="version", version=f"leto-sim {__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    p = _add(commands, "run", run, "predict one setting, by closed form, exact chain and simulation")
    _setting(p)
    _simulation(p, 500, 8)
    p.add_argument("--system", help="default: every system of the profile")
    p.add_argument("--no-des", action="store_true", help="leave the simulation out")
    p.add_argument(
        "--trace", metavar="CSV", help="simulate this failure trace (or 'bundled') instead of Poisson"
    )
    p.add_argument("--repeat", type=int, default=1, help="play the trace that many times in a row")
    p.add_argument("--json", action="store_true", help="print JSON")

    p = _add(
        commands, "compare", compare, "one line for each system: recovery, overhead, ETTR, best interval"
    )
    _setting(p)
    p.add_argument("--json", action="store_true", help="print JSON")

    p = _add(commands, "sweep", sweep, "a grid of settings, as CSV")
    p.add_argument("profile", metavar="PROFILE")
    p.add_argument("--system", help="a,b,c; default: every system of the profile")
    p.add_argument("--mttf-min", metavar="AXIS", help="a,b,c or first:last:count; default: the profile's")
    p.add_argument(
        "--hof-ratio",
        "--hof-share",
        metavar="AXIS",
        default="0,0.5,1",
        help="a,b,c or first:last:count, in [0, 1]",
    )
    p.add_argument("--data", metavar="AXIS", help="data-parallel degrees to scale a stage profile to")
    p.add_argument("--method", default="closed", help="closed, exact, des; several by comma")
    p.add_argument("--interval", default="young", help="young, best, best-exact or a number")
    _simulation(p, 300, 4)
    p.add_argument("--out", metavar="CSV", required=True)

    p = _add(commands, "plot", plot, "charts of a sweep's CSV")
    p.add_argument("rows", metavar="CSV")
    p.add_argument("--html", metavar="FILE", help="one page that needs nothing else")
    p.add_argument("--png", metavar="FILE", help="needs matplotlib")
    p.add_argument("--x", choices=("mttf_s", "hof_ratio", "gpus"), help="default: what varies most")
    p.add_argument("--title", default="leto-sim")

    p = _add(commands, "reproduce", reproduce, "the paper's figures beside ours")
    p.add_argument("--html", metavar="FILE", help="write the figures as one page, too")

    p = _add(commands, "advise", advise_command, "should I turn Leto on for my cluster?")
    p.add_argument("--gpus", type=int, required=True)
    p.add_argument("--iteration-s", metavar="S|LO:HI", required=True)
    p.add_argument("--parameters", type=float, required=True, help="of the model, e.g. 70e9")
    group = p.add_mutually_exclusive_group(required=True)
    group.add_argument(
        "--mttf-min", metavar="M|LO:HI", help="of the job; one value is taken as a factor 1.5 wide"
    )
    group.add_argument("--gpu-mttf-hours", metavar="H|LO:HI", help="of one GPU")
    p.add_argument(
        "--hof-share",
        "--hof-ratio",
        metavar="H|LO:HI",
        help="one value is taken as +-0.1; default 0.227:0.73",
    )
    p.add_argument("--fallback", default="gemini+", choices=("gemini", "gemini+", "jit-ckpt", "jit-ckpt+"))
    p.add_argument("--fallback-initialize-s", metavar="S|LO:HI")
    p.add_argument("--leto-initialize-s", metavar="S|LO:HI")
    p.add_argument("--leto-overhead", metavar="F|LO:HI", help="share of an iteration, e.g. 0.003")
    p.add_argument("--checkpoint-stall-s", metavar="S|LO:HI", help="visible cost of one checkpoint")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--json", action="store_true", help="print JSON")

    p = _add(commands, "profile", profile, "measure a Megatron-Core stage here and write its profile")
    p.add_argument("--out", metavar="TOML", required=True)
    for name, kind, default, text in (
        ("layers", int, 2, "transformer layers of the bracket"),
        ("hidden-size", int, 1024, ""),
        ("heads", int, 16, ""),
        ("ffn-hidden-size", int, 4096, ""),
        ("sequence-length", int, 1024, ""),
        ("micro-sequences", int, 1, "sequences of a microbatch"),
        ("vocabulary", int, 32768, ""),
        ("experts", int, 0, "0: dense"),
        ("data", int, 1, "data-parallel degree to describe"),
        ("tensor", int, 1, "tensor-parallel degree: the ranks of torchrun"),
        ("pipeline", int, 1, "pipeline stages to describe"),
        ("virtual-pipeline", int, 1, "brackets of a stage to describe"),
        ("microbatches", int, 8, ""),
        ("repeats", int, 10, "timed repetitions; the median counts"),
        ("latency-us", float, 20.0, "of a collective's step, where it is not measured"),
        ("bandwidth-gb-per-s", float, 25.0, "of a collective, where it is not measured"),
    ):
        p.add_argument(f"--{name}", type=kind, default=default, help=f"{text} (default {default})".strip())
    p.add_argument("--name", default="profiled stage")

    p = _add(commands, "validate", validate, "predicted against measured ETTR, from a run's report.json")
    p.add_argument("report", metavar="REPORT")
    p.add_argument("--profile", metavar="PROFILE", help="predict this profile's systems, too")
    p.add_argument("--json", action="store_true", help="print JSON")
    return parser


def _add(
    commands: argparse._SubParsersAction[_Parser], name: str, command: object, text: str
) -> argparse.ArgumentParser:
    p = commands.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + ("" if text.endswith("?") else ".")
    )
    p.set_defaults(command=command)
    return p


def _setting(p: argparse.ArgumentParser) -> None:
    p.add_argument("profile", metavar="PROFILE")
    p.add_argument("--mttf-min", type=float, help="mean time to failure in minutes; default: the profile's")
    p.add_argument(
        "--hof-ratio", "--hof-share", type=float, help="share of HOFs in [0, 1]; default: the profile's"
    )
    p.add_argument("--data", type=int, help="scale a stage profile to this data-parallel degree")
    p.add_argument("--interval", default="young", help="young, best, best-exact or a number of iterations")


def _simulation(p: argparse.ArgumentParser, failures: int, replicas: int) -> None:
    p.add_argument(
        "--failures", type=int, default=failures, help=f"mean failures of a run (default {failures})"
    )
    p.add_argument("--replicas", type=int, default=replicas, help=f"runs of a setting (default {replicas})")
    p.add_argument("--seed", type=int, default=0)
