"""torchrun, but with the agent's own exit code at the end.

torchrun answers every failure of a worker with status 1 and a page of its own; a user of Leto needs the code
that says who has to act (`leto_shadow.exit_codes`). Everything else is torchrun's. An agent that was killed
could not say so itself nor remove its socket: that is done here (I-7).

    python -m leto_shadow.launcher [torchrun's options] -m leto_shadow.agent_main ...
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import signal
import socket
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import NoReturn

import torch.distributed.launcher.api as torch_launcher
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.run import main as torchrun
from torch.distributed.run import parse_args

from leto_shadow import agent_options, linux, logs
from leto_shadow.archive import keep_or_say
from leto_shadow.events import EventWriter, read_events
from leto_shadow.exit_codes import ExitCode
from leto_shadow.jobs import EVENTS_FILE, base_dir
from leto_shadow.succession import find_progress

__all__ = ["main"]

_log = logging.getLogger("leto_shadow.launcher")

_AGENT = "leto_shadow.agent_main"
_EXIT_BARRIER_S = 5.0


def main(argv: Sequence[str], *, last: bool = False) -> int:
    """Run torchrun with ``argv``; return the exit code of the agent that failed first, or 0.

    ``last``: this process ends with it, and hears no more signals.
    """
    try:
        return _run(argv)
    finally:
        if last:
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                signal.signal(number, signal.SIG_IGN)
        _sweep(argv)


def leave(code: int) -> NoReturn:
    """End this process, whatever threads there are.

    Signals that come while torchrun ends its workers for the first one break that off, and leave threads that
    Python's own end would wait for without end.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # closed from the beginning
            with contextlib.suppress(OSError, ValueError):  # nobody reads it
                stream.flush()
    os._exit(code)


def _sweep(argv: Sequence[str]) -> None:
    """No agent will be started any more that wants to know how far the job had come."""
    options = _agent_options(argv)
    run_dir = None if options is None else _run_dir(options)
    if run_dir is not None and run_dir.is_dir():
        for path in find_progress(run_dir)[1]:
            path.unlink(missing_ok=True)


def _run(argv: Sequence[str]) -> int:
    if ":" in str(_parse(argv).nnodes):
        # A torchrun that joins later waits for ever for an address that the others, who share the store of
        # the rendezvous with their workers by default, only give out in their first round.
        os.environ.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    # At the end of a job torchrun waits five minutes for the torchruns of nodes that are lost. The agents end
    # together, so that those that are there need no such time.
    agent = partial(LocalElasticAgent, exit_barrier_timeout=_EXIT_BARRIER_S)
    torch_launcher.LocalElasticAgent = agent  # type: ignore[assignment, attr-defined]
    try:
        torchrun(_without_empty_folders(argv))
    except ChildFailedError as error:
        node, failure = error.get_first_failure()  # one worker a node, so its rank is the node's
        code = int(failure.exitcode)
        return code if code >= 0 else _on_killed(argv, node, -code)
    except SignalException as stopped:
        left = _left(argv)
        # torchrun has passed it on to the agent and waited for its end
        return 128 + int(stopped.sigval) if left is None else left
    except (OSError, RendezvousError, RuntimeError, ValueError) as error:
        return _on_refused(argv, error)
    return 0


def _left(argv: Sequence[str]) -> int | None:
    """Return the agent's exit code if it was the agent that had torchrun end, because this node leaves."""
    options = _agent_options(argv)
    run_dir = None if options is None else _run_dir(options)
    if run_dir is None or not (run_dir / EVENTS_FILE).exists():
        return None
    since = linux.started_unix(os.getpid())
    for event in read_events(run_dir / EVENTS_FILE):
        mine = event.get("launcher") == os.getpid() and float(event.get("t", 0.0)) >= since
        if event["event"] == "node_left" and mine:
            return int(event["exit_code"])
    return None


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Read ``argv`` as torchrun does."""
    known: argparse.Namespace = parse_args(list(argv))  # type: ignore[no-untyped-call]
    return known


def _without_empty_folders(argv: Sequence[str]) -> list[str]:
    """Return ``argv`` so that torchrun makes a folder for logs, in the folder for temporary files and for
    good, only if it has logs to put there."""
    known = _parse(argv)
    kept = known.log_dir is not None or known.redirects != "0" or known.tee != "0"
    return list(argv) if kept else ["--log-dir", os.devnull, *argv]


def _on_refused(argv: Sequence[str], error: Exception) -> int:
    """Say in one line why torchrun itself gave up: what it was told is wrong, or nobody came to meet it."""
    told = isinstance(
        error, (OSError, ValueError)
    )  # the others are about the other nodes, and the way to them
    code = ExitCode.USAGE if told else ExitCode.AGENT_LOST
    options = _agent_options(argv)
    logs.set_up("text" if options is None else options.log_format, dict)
    _log.error("torchrun: %s (exit code %d)", " ".join(str(error).split()) or repr(error), code)
    return code


def _on_killed(argv: Sequence[str], node: int, number: int) -> int:
    """Say for a dead agent what it could not say, remove its socket; return the exit code."""
    reason = f"the agent was killed by {signal.Signals(number).name}"
    code = ExitCode.AGENT_LOST
    options = _agent_options(argv)
    form, job = ("text", "") if options is None else (options.log_format, options.job_id)
    logs.set_up(form, lambda: {"job": job, "node": node})
    _log.error("node %d: %s (exit code %d)", node, reason, code)
    run_dir = None if options is None else _run_dir(options)
    if run_dir is None or not (run_dir / EVENTS_FILE).exists():
        return code  # it died before it had anything
    path = run_dir / f"agent-{node}.sock"
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            probe.settimeout(1.0)
            probe.connect(str(path))
        return code  # another job has this folder; ours had only just begun to start
    except FileNotFoundError:
        pass
    except ConnectionRefusedError:
        path.unlink(missing_ok=True)
    except OSError as error:
        _log.error("%s stays behind: %s", path, error)
        return code
    try:
        with EventWriter(run_dir / EVENTS_FILE) as events:
            events.write("job_failed", node=node, exit_code=code, reason=reason)
    except OSError as error:
        _log.error("event 'job_failed' is not in the log: %s", error)
    if options is not None and options.keep is not None:
        keep_or_say(run_dir, options.keep, options.job_id or run_dir.name, node)
    return code


def _agent_options(argv: Sequence[str]) -> agent_options.AgentOptions | None:
    """Return what the agent's command line in ``argv`` says, None if there is none."""
    known = _parse(argv)
    words = [known.training_script, *known.training_script_args]
    if _AGENT not in words:
        return None
    return agent_options.parse(words[words.index(_AGENT) + 1 :])


def _run_dir(options: agent_options.AgentOptions) -> Path | None:
    """Return the run directory of the job, None if its name is not known here."""
    if options.run_dir is not None:
        return options.run_dir
    return base_dir() / options.job_id if options.job_id else None


if __name__ == "__main__":
    leave(main(sys.argv[1:], last=True))
