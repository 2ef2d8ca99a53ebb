"""Command line of the node agent, shared with `leto run`, which forwards it unchanged.

Everything that a job can be told is here once: `add_options` declares it, `parse` returns `AgentOptions`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from leto_rmp.config import GPU_PAGES_PER_HANDLE
from leto_shadow import logs
from leto_shadow.config import Deadlines, HangPolicy, JobPolicy, Limits
from leto_shadow.preinit import PreinitPolicy

__all__ = ["DEFAULT_DECIDE", "RETIRE_S", "AgentOptions", "add_options", "add_pool_options", "parse"]

DEFAULT_DECIDE = "leto_rmu:decide"

RETIRE_S = {"host": 0.25, "cuda": 0.0}
"""`--retire-s` by backend, where it is not given."""


@dataclass(frozen=True)
class AgentOptions:
    """What one agent was told. ``command`` is the script (or ``-m module``) and its arguments."""

    local_ranks: int
    command: tuple[str, ...]
    job_id: str
    run_dir: Path | None
    keep: Path | None
    log_format: str
    metrics_port: int | None
    metrics_address: str
    drills: Path | None
    active_nodes: int
    cold_spares: bool
    injections: Path | None
    decide: str
    classify_hook: str | None
    page_bytes: int
    data_pages: int
    tier1_pages: int
    tier2_pages: int
    backend: str
    gpu_pages_per_handle: int
    policy: JobPolicy


def _path(text: str) -> Path:
    if not text:
        raise argparse.ArgumentTypeError("the path must not be empty")
    return Path(text)


def _name(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("the name must not be empty")
    return text


def _port(text: str) -> int:
    number = _count(text)
    if number > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} must be a port, 0 to 65535")
    return number


def _positive(text: str) -> float:
    number = _number(text)
    if not number > 0:
        raise argparse.ArgumentTypeError(f"{text!r} must be more than 0")
    return number


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not (math.isfinite(number) and number >= 0):
        raise argparse.ArgumentTypeError(f"{text!r} must be a finite number of at least 0")
    return number


def _count(text: str) -> int:
    if not text.isdecimal() or len(text) > 9:
        raise argparse.ArgumentTypeError(f"{text[:24]!r} must be a number from 0 to 999999999")
    return int(text)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Declare the options of a job (all but the script and the number of local ranks)."""
    job = parser.add_argument_group("job")
    job.add_argument("--job-id", type=_name, metavar="ID", help="name of the job; default: torchrun's run id")
    job.add_argument("--run-dir", type=_path, metavar="DIR", help="folder for sockets, logs and events.jsonl")
    job.add_argument(
        "--keep",
        type=_path,
        metavar="DIR",
        help="folder to copy events and logs to when the job ends, for `leto report`",
    )
    job.add_argument(
        "--log-format",
        choices=logs.FORMATS,
        default="text",
        help="lines of agents and trainers: as they are, or JSON with rank and generation",
    )
    job.add_argument(
        "--metrics-port",
        type=_port,
        metavar="PORT",
        help="port of each agent for Prometheus; 0: any free one (event metrics_listening); default: none",
    )
    job.add_argument(
        "--metrics-address",
        type=_name,
        default="127.0.0.1",
        metavar="ADDRESS",
        help="address to listen on for Prometheus; default: this host only",
    )
    job.add_argument("--drills", type=_path, metavar="FILE", help="JSON file of failures to inflict")
    job.add_argument(
        "--active-nodes",
        type=_count,
        default=0,
        metavar="N",
        help="nodes that train, the others are spares (leto run: from --nnodes MIN:MAX); 0: all",
    )
    job.add_argument(
        "--cold-spares",
        action="store_true",
        help="start the trainers of a spare node when it takes a place, not ahead",
    )
    job.add_argument(
        "--injections",
        type=_path,
        metavar="FILE",
        help="JSON file of failures by time, from `leto inject plan`",
    )
    job.add_argument(
        "--decide",
        default=DEFAULT_DECIDE,
        metavar="MODULE:FUNCTION",
        help="decides on the ranks' summaries (default %(default)s)",
    )
    job.add_argument(
        "--classify-hook",
        type=_name,
        metavar="HOOK",
        help="module:function, or an executable, that may overrule whether a failure is fatal",
    )
    add_pool_options(parser)
    policy = parser.add_argument_group("recovery policy")
    policy.add_argument(
        "--shadow-level",
        type=int,
        choices=(0, 1, 2, 3),
        default=JobPolicy.shadow_level,
        help="highest level at which shadows wait while training goes on (default %(default)s); 0: none",
    )
    policy.add_argument(
        "--retire-s",
        type=_number,
        metavar="SECONDS",
        help="how long a survivor of a failure may take to give up writing, before it becomes a shadow; 0: "
        f"it is killed. Default: {RETIRE_S['host']:g} (host), {RETIRE_S['cuda']:g} (cuda)",
    )
    for prefix, cls in _GROUPS:
        for item in fields(cls):
            number = _positive if prefix == "deadline-" else _number
            kind = number if isinstance(item.default, float) else _count
            option = f"--{prefix}{item.name.replace('_', '-')}"
            policy.add_argument(option, type=kind, default=item.default, metavar="N", help=argparse.SUPPRESS)


def add_pool_options(parser: argparse.ArgumentParser) -> None:
    """Declare what the memory pool is made of."""
    pool = parser.add_argument_group("resilient memory pool")
    for option, pages, text in (
        ("--page-bytes", 2 << 20, "S, bytes of a page"),
        ("--data-pages", 1024, "D, data pages of a protection group"),
        ("--tier1-pages", 16, "H1, tier-1 parity pages of a group"),
        ("--tier2-pages", 1, "H2, tier-2 parity pages of a group"),
        ("--gpu-pages-per-handle", GPU_PAGES_PER_HANDLE, "GPU pages that the driver maps and unmaps as one"),
    ):
        pool.add_argument(option, type=int, default=pages, metavar="N", help=f"{text} (default %(default)s)")
    pool.add_argument(
        "--backend",
        default="host",
        metavar="NAME",
        help="where pages live: host (memfds, the default), or cuda (each rank's own GPU)",
    )


_GROUPS: tuple[tuple[str, type], ...] = (
    ("deadline-", Deadlines),
    ("limit-", Limits),
    ("hang-", HangPolicy),
    ("preinit-", PreinitPolicy),
)


def parse(argv: Sequence[str]) -> AgentOptions:
    """Parse the agent's command line; exits with status 2 and a message if it makes no sense."""
    parser = argparse.ArgumentParser(
        prog="python -m leto_shadow.agent_main", description="Leto's node agent; `leto run` starts it."
    )
    parser.add_argument("--local-ranks", type=int, required=True, help="trainers on this node")
    add_options(parser)
    parser.add_argument("-m", "--module", action="store_true", help="the script is the name of a module")
    parser.add_argument("script", help="training script")
    parser.add_argument("args", nargs=argparse.REMAINDER, help="arguments of the script")
    known = parser.parse_args(argv)
    if known.local_ranks < 1:
        parser.error(f"--local-ranks must be at least 1, found {known.local_ranks}")
    values = vars(known)

    def group(prefix: str, cls: type) -> dict[str, float]:
        start = prefix.replace("-", "_")
        return {item.name: values[start + item.name] for item in fields(cls)}

    policy = JobPolicy(
        deadlines=replace(Deadlines(), **group("deadline-", Deadlines)),
        limits=replace(Limits(), **group("limit-", Limits)),  # type: ignore[arg-type]
        hang=replace(HangPolicy(), **group("hang-", HangPolicy)),  # type: ignore[arg-type]
        preinit=replace(PreinitPolicy(), **group("preinit-", PreinitPolicy)),  # type: ignore[arg-type]
        shadow_level=known.shadow_level,
        retire_s=RETIRE_S.get(known.backend, 0.0) if known.retire_s is None else known.retire_s,
        classify_hook=known.classify_hook is not None,
    )
    command = ("-m", known.script, *known.args) if known.module else (known.script, *known.args)
    return AgentOptions(
        local_ranks=known.local_ranks,
        command=command,
        job_id=known.job_id or "",
        run_dir=known.run_dir,
        keep=known.keep,
        log_format=known.log_format,
        metrics_port=known.metrics_port,
        metrics_address=known.metrics_address,
        drills=known.drills,
        active_nodes=known.active_nodes,
        cold_spares=known.cold_spares,
        injections=known.injections,
        decide=known.decide,
        classify_hook=known.classify_hook,
        page_bytes=known.page_bytes,
        data_pages=known.data_pages,
        tier1_pages=known.tier1_pages,
        tier2_pages=known.tier2_pages,
        backend=known.backend,
        gpu_pages_per_handle=known.gpu_pages_per_handle,
        policy=policy,
    )
