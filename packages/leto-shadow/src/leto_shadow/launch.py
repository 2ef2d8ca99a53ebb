"""`leto run`: check the command line, then become torchrun with one node agent per node as its worker.

Role: torchrun's options that place and connect nodes are passed on as they are; `--nproc-per-node` becomes
the number of trainers that each agent starts. Everything that can be checked without starting anything is
checked here, so that a typing error costs no rendezvous.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import math
import os
import re
import secrets
import shlex
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.abc import InspectLoader
from importlib.machinery import ModuleSpec
from pathlib import Path

from leto_rmp import PoolConfig
from leto_rmp.config import CUDA_PAGE_BYTES, GPU_PAGES_PER_HANDLE_MAX
from leto_shadow import agent_options, logs, metrics, oom_hook, room
from leto_shadow.agent_place import UsageError, check_folder, check_run_dir
from leto_shadow.classify_hook import is_function
from leto_shadow.devices import check_backend
from leto_shadow.drills import DrillError, load_drills
from leto_shadow.jobs import CommandError, base_dir
from leto_shadow.preinit import NO_GPU_LEVEL
from leto_shadow.schedule import ScheduleError, load_schedule

__all__ = ["DESCRIPTION", "add_arguments", "check", "execute", "torchrun_command"]

DESCRIPTION = """Start a training job: torchrun places one node agent per node, and each agent starts a state
manager, an active trainer and a shadow trainer per rank. torchrun's usual options keep their meaning."""

_log = logging.getLogger("leto_shadow.launch")

_AGENT = "leto_shadow.agent_main"
_JOB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]{0,63}")
_PAGE_BYTES_MAX = 1 << 30
_RUN_DIR_BYTES = 80  # sockets in the run directory must fit in the 107 bytes of a Unix socket's address

_STREAMS = r"[0-3]|\d{1,5}:[0-3](,\d{1,5}:[0-3])*"
_TORCHRUN_FORMS = (
    ("--node-rank", r"\d{1,9}", "a number from 0 to 999999999"),
    ("--master-port", r"\d{1,5}", "a port"),
    ("--rdzv-conf", r"[^=,]+=[^=,]+(,[^=,]+=[^=,]+)*", "K=V,..."),
    ("--max-restarts", r"\d{1,9}", "a number from 0 to 999999999"),
    ("--monitor-interval", r"\d+\.?\d*|\.\d+", "a number of seconds"),
    ("--redirects", _STREAMS, "0 to 3, or NODE:0 to 3,..."),
    ("--tee", _STREAMS, "0 to 3, or NODE:0 to 3,..."),
)
"""What torchrun would refuse with a page, or a traceback, of its own."""

_TORCHRUN = (
    ("--nnodes", "N[:M]", "nodes that train (default 1), and with how many there are M - N spares"),
    ("--node-rank", "R", "rank of this node, for static rendezvous"),
    ("--master-addr", "HOST", "address of node 0, for static rendezvous"),
    ("--master-port", "PORT", "port of node 0, for static rendezvous"),
    ("--local-addr", "HOST", "address of this node"),
    ("--rdzv-backend", "NAME", "rendezvous backend, for example c10d"),
    ("--rdzv-endpoint", "HOST:PORT", "rendezvous endpoint"),
    ("--rdzv-id", "ID", "rendezvous id; also the job id unless --job-id is given"),
    ("--rdzv-conf", "K=V,...", "rendezvous settings"),
    ("--max-restarts", "N", "how often torchrun starts the agents again after a fatal failure (default 0)"),
    ("--monitor-interval", "S", "seconds between torchrun's looks at the agents"),
    ("--log-dir", "DIR", "torchrun's folder for the agents' output"),
    ("--redirects", "SPEC", "torchrun: send the agents' output to files"),
    ("--tee", "SPEC", "torchrun: send the agents' output to files and the console"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `leto run`."""
    parser.usage = "leto run [options] script.py [script's arguments]"
    torchrun = parser.add_argument_group("torchrun's options")
    torchrun.add_argument(
        "--nproc-per-node",
        "--nproc_per_node",
        default="1",
        metavar="N",
        help="ranks per node: a number, cpu, gpu or auto",
    )
    torchrun.add_argument(
        "--standalone", action="store_true", help="one node, any free port (the default for one node)"
    )
    for flag, metavar, text in _TORCHRUN:
        names = [flag] if flag.count("-") == 2 else [flag, "--" + flag[2:].replace("-", "_")]
        torchrun.add_argument(*names, metavar=metavar, help=text)
    torchrun.add_argument(
        "-m", "--module", action="store_true", help="script is a module name, as in python -m"
    )
    agent_options.add_options(parser)
    room.add_option(parser)
    short = parser.add_argument_group("shorthands")
    for flag, target in (("--tier1", "tier1_pages"), ("--tier2", "tier2_pages")):
        short.add_argument(
            flag, dest=target, type=int, default=argparse.SUPPRESS, metavar="N", help=f"{flag}-pages"
        )
    short.add_argument(
        "--hang-deadline",
        type=float,
        metavar="S",
        help="no progress for S seconds is a hang in every phase, from the first iteration on; less "
        "may be, in phases that have never taken long",
    )
    short.add_argument("--dry-run", action="store_true", help="print the command that would be run")
    parser.add_argument("script", help="training script (or module with -m)")
    parser.add_argument("script_args", nargs=argparse.REMAINDER, metavar="...", help="its arguments")


def _nproc(text: str) -> int:
    """Ranks per node from torchrun's words."""
    if text.isdecimal():
        return int(text)
    if text not in ("auto", "cpu", "gpu"):
        raise CommandError(f"--nproc-per-node must be a number, cpu, gpu or auto, found {text!r}", 2)
    gpus = 0
    if text != "cpu":
        import torch

        gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if text == "gpu" and not gpus:
            raise CommandError("--nproc-per-node gpu: no GPU was found; give a number or cpu", 2)
    return gpus or len(os.sched_getaffinity(0))


def _nodes(text: str | None) -> int:
    """Number of nodes that train: it is fixed, because ranks own memory and cannot come and go."""
    return _range(text)[0]


def _range(text: str | None) -> tuple[int, int]:
    """Nodes that train, and nodes with the spares."""
    low, _, high = (text or "1").partition(":")
    if not low.isdecimal() or (high and not high.isdecimal()) or int(low) < 1:
        raise CommandError(f"--nnodes must be a number of at least 1, found {text!r}", 2)
    if high and int(high) < int(low):
        raise CommandError(f"--nnodes {text}: there cannot be fewer nodes than train", 2)
    return int(low), int(high or low)


def _active(arguments: argparse.Namespace) -> int:
    """Return how many nodes train, by ``--nnodes`` and ``--active-nodes``; CommandError if these contradict.

    How many nodes there are torchrun knows when they have met; here is known what it will wait for.
    """
    low, high = _range(arguments.nnodes)
    active, told = arguments.active_nodes, arguments.nnodes or "1, its default"
    if active in (0, low):
        return low
    if high > low:
        raise CommandError(
            f"--active-nodes must be {low}, the MIN of --nnodes {told} (up to {high - low} more nodes are "
            f"spares), found {active}: leave it out, or give --nnodes {active}:{max(high, active)}",
            2,
        )
    if active > low:
        raise CommandError(
            f"--active-nodes {active}: expected at least so many nodes, found --nnodes {told}: give --nnodes "
            f"{active}, or {active}:MAX with spares, and start each node; or leave out --active-nodes",
            2,
        )
    return int(active)


def _job_id(arguments: argparse.Namespace, nodes: int) -> str:
    if arguments.job_id:
        return str(arguments.job_id)
    if arguments.rdzv_id is not None:
        return str(arguments.rdzv_id)
    if nodes > 1:
        raise CommandError(
            f"a job on several nodes (--nnodes {arguments.nnodes}) needs --job-id (or --rdzv-id), the same "
            "on every node",
            2,
        )
    return f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"


def check(arguments: argparse.Namespace) -> None:
    """Check everything that can be checked before anything starts, and fill in defaults. Raises
    CommandError."""
    nodes, nproc = _active(arguments), _nproc(arguments.nproc_per_node)

    def require(condition: bool, what: str) -> None:
        if not condition:
            raise CommandError(what, 2)

    require(nproc >= 1, f"--nproc-per-node must be at least 1, found {nproc}")
    arguments.nproc_per_node = nproc
    low, high = _range(arguments.nnodes)
    require(
        not arguments.standalone or high == 1,
        f"--standalone is for one node, whom no other one can meet; found --nnodes {arguments.nnodes}",
    )
    if high > low:
        arguments.active_nodes = nodes
    if arguments.module:
        _require_module(arguments.script, "the module to run")
    else:
        require(Path(arguments.script).is_file(), f"there is no script {arguments.script or repr('')}")
    arguments.job_id = job_id = _job_id(arguments, high)
    require(
        _JOB_ID.fullmatch(job_id) is not None,
        f"--job-id must be 1 to 64 letters, digits or _.- (first no sign), found {job_id!r}",
    )
    arguments.run_dir = run_dir = Path(os.path.abspath(arguments.run_dir or base_dir() / job_id))
    require(
        len(os.fsencode(run_dir)) <= _RUN_DIR_BYTES,
        f"--run-dir {run_dir} is longer than {_RUN_DIR_BYTES} bytes: too long for the sockets in it",
    )
    try:
        check_run_dir(run_dir)
        if arguments.keep is not None:  # not only when the job has ended
            arguments.keep = Path(os.path.abspath(arguments.keep))
            check_folder(arguments.keep, "a folder for --keep", "give another one")
    except UsageError as error:
        raise CommandError(str(error), 2) from error
    try:
        gpus = check_backend(arguments.backend, nproc)
    except ValueError as error:
        raise CommandError(str(error), 2) from error
    if arguments.backend != "host" and arguments.shadow_level > NO_GPU_LEVEL:
        why = oom_hook.conflict(os.environ)
        require(why is None, str(why))
    page_bytes = arguments.page_bytes
    require(
        page_bytes > 0 and page_bytes % 4096 == 0,
        f"--page-bytes must be a positive multiple of 4096, found {page_bytes}",
    )
    require(
        page_bytes <= _PAGE_BYTES_MAX,
        f"--page-bytes must be at most {_PAGE_BYTES_MAX} (1 GiB), found {page_bytes}",
    )
    require(
        arguments.backend == "host" or page_bytes % CUDA_PAGE_BYTES == 0,
        f"--page-bytes must be a multiple of {CUDA_PAGE_BYTES} with --backend cuda, found {page_bytes}",
    )
    for flag, form, what in _TORCHRUN_FORMS:
        text = getattr(arguments, flag[2:].replace("-", "_"))
        require(
            text is None or re.fullmatch(form, text, re.ASCII) is not None,
            f"{flag} must be {what}, found {text!r}",
        )
    for flag, value, low, high in (
        ("--data-pages", arguments.data_pages, 1, 65535),
        ("--tier1-pages", arguments.tier1_pages, 1, 64),
        ("--tier2-pages", arguments.tier2_pages, 0, 64),
        ("--gpu-pages-per-handle", arguments.gpu_pages_per_handle, 1, GPU_PAGES_PER_HANDLE_MAX),
    ):
        require(low <= value <= high, f"{flag} must be {low} to {high}, found {value}")
    pool = PoolConfig(
        page_bytes, arguments.data_pages, arguments.tier1_pages, arguments.tier2_pages, arguments.backend
    )
    lack = room.why_not(room.least(pool, nproc, arguments.retained_bytes), room.look(gpus))
    require(lack is None, str(lack))
    deadline = arguments.hang_deadline
    if deadline is not None:
        require(
            deadline > 0 and math.isfinite(deadline),
            f"--hang-deadline must be positive and finite, found {deadline:g}",
        )
        arguments.hang_initial_s = arguments.hang_max_s = deadline
        arguments.hang_min_s = min(arguments.hang_min_s, deadline)
    require(
        arguments.hang_min_s <= arguments.hang_max_s,
        f"--hang-min-s must be at most --hang-max-s, found {arguments.hang_min_s:g} and "
        f"{arguments.hang_max_s:g}",
    )
    require(arguments.metrics_port is None or metrics.available(), metrics.INSTALL)
    if arguments.drills is not None:
        arguments.drills = Path(os.path.abspath(arguments.drills))
        try:
            load_drills(arguments.drills, world_size=nodes * nproc)
        except DrillError as error:
            raise CommandError(str(error), 2) from error
    if arguments.injections is not None:
        arguments.injections = Path(os.path.abspath(arguments.injections))
        try:
            load_schedule(arguments.injections, world_size=nodes * nproc)
        except ScheduleError as error:
            raise CommandError(str(error), 2) from error
    script_folder = Path.cwd() if arguments.module else Path(arguments.script).absolute().parent
    if (hook := arguments.classify_hook) is not None:
        arguments.classify_hook = _checked_hook(hook, script_folder)
    module, _, function = arguments.decide.partition(":")
    require(function.isidentifier(), f"--decide must be module:function, found {arguments.decide!r}")
    spec = _require_module(module, "the module of --decide", script_folder)
    _require_function(module, spec, function, "--decide")


def _checked_hook(hook: str, script_folder: Path) -> str:
    """Return a hook that a process with another working directory finds as well."""
    if is_function(hook):
        module, _, function = hook.partition(":")
        spec = _require_module(module, "the module of --classify-hook", script_folder)
        _require_function(module, spec, function, "--classify-hook")
        return hook
    path = Path(os.path.abspath(hook))
    if not (path.is_file() and os.access(path, os.X_OK)):
        raise CommandError(
            f"--classify-hook {hook} is neither module:function nor a file that can be executed", 2
        )
    return str(path)


@contextmanager
def _search_path(*folders: Path) -> Iterator[None]:
    """Look for modules where the agent's helper does: here and, last, beside the script."""
    before = list(sys.path)
    sys.path[:] = [os.getcwd(), *before, *map(str, folders)]
    try:
        yield
    finally:
        sys.path[:] = before


def _require_module(name: str, what: str, *folders: Path) -> ModuleSpec:
    found: ModuleSpec | None = None
    with _search_path(*folders):
        try:
            found = importlib.util.find_spec(name)
        except (ImportError, ValueError):
            found = None
    if found is None:
        raise CommandError(f"{what}, {name!r}, cannot be found; is its package installed?", 2)
    return found


def _require_function(module: str, spec: ModuleSpec, name: str, option: str) -> None:
    """Refuse what is surely no function of the module, without importing it: that may take seconds.

    What passes here and is none all the same is refused by the agent's helper, before training starts.
    """
    if (loaded := sys.modules.get(module)) is not None:
        if not callable(getattr(loaded, name, None)):
            raise CommandError(f"{option}: module {module!r} has no function {name!r}", 2)
        return
    source: str | None = None
    if isinstance(spec.loader, InspectLoader):
        try:
            source = spec.loader.get_source(module)
        except ImportError:
            source = None  # no readable source: left to the helper
    if source and not re.search(rf"\b(?:{re.escape(name)}|__getattr__|globals)\b|import \*", source):
        raise CommandError(f"{option}: module {module!r} has no function {name!r}", 2)


def _forwarded(arguments: argparse.Namespace) -> list[str]:
    """Return the job's options that are not at their default, as the agent reads them."""
    declared = argparse.ArgumentParser(add_help=False)
    agent_options.add_options(declared)
    words: list[str] = []
    for name, default in vars(declared.parse_args([])).items():
        value = getattr(arguments, name)
        if value != default:
            flag = "--" + name.replace("_", "-")
            words += [flag] if value is True else [flag, str(value)]
    return words


def torchrun_command(arguments: argparse.Namespace) -> list[str]:
    """Return the torchrun command line for checked arguments."""
    command = [sys.executable, "-m", "leto_shadow.launcher", "--nproc-per-node", "1"]
    connects = False
    for flag, _, _ in _TORCHRUN:
        value = getattr(arguments, flag[2:].replace("-", "_"))
        if value is not None:
            command += [flag, value]
            connects |= flag.startswith(("--rdzv", "--master", "--node-rank"))
    if arguments.standalone or not (connects or _nodes(arguments.nnodes) > 1):
        command.append("--standalone")  # binds any free port, so two jobs on one host cannot collide (case 8)
    command += ["-m", _AGENT, "--local-ranks", str(arguments.nproc_per_node), *_forwarded(arguments)]
    module = ["-m"] if arguments.module else []
    return [*command, *module, arguments.script, *arguments.script_args]


def execute(arguments: argparse.Namespace) -> int:
    """Become torchrun; returns only for --dry-run."""
    check(arguments)
    command = torchrun_command(arguments)
    environment = dict(os.environ)
    environment.setdefault("PYTHONUNBUFFERED", "1")  # a killed trainer's last words must be in its log
    if arguments.nproc_per_node > 1:
        environment.setdefault("OMP_NUM_THREADS", "1")  # as torchrun does for several workers on a node
    if arguments.dry_run:
        print(shlex.join(command))
    else:
        logs.set_up(arguments.log_format, lambda: {"job": arguments.job_id})
        _log.info("job %s, run directory %s", arguments.job_id, arguments.run_dir)
        os.execve(command[0], command, environment)
    return 0
