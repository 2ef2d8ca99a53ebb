"""Jobs of several torchruns on this host, and what their agents say of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leto_shadow import control, linux

TCPStore = pytest.importorskip("torch.distributed").TCPStore

Start = Callable[..., Any]


def job_state(job: Any) -> dict[str, Any]:
    """The coordinator's state, empty while nobody answers."""
    try:
        return dict(job.status()["job"] or {})
    except control.ControlError:
        return {}


def trains(job: Any, at_least: int) -> bool:
    """A generation from ``at_least`` on is in training."""
    state = job_state(job)
    return bool(state.get("phase") == "training" and state["generation"] >= at_least)


def counted(job: Any, at_least: int) -> bool:
    """Both ranks are as far as that: what is recovered is what the one behind has done."""
    return {event["rank"] for event in job.events("metrics") if event["iteration"] >= at_least} == {0, 1}


def nodes_of(
    start_job: Start,
    stop: Path,
    count: int,
    options: tuple[str, ...],
    name: str = "spare",
    active: int = 2,
) -> tuple[list[Any], Callable[[], Any]]:
    """``count`` torchruns on this host, ``active`` of whose nodes train one rank each, until there is a file
    ``stop``; and a way to start another one."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    place = (
        f"--nnodes={active}:{count}" if active < count else f"--nnodes={count}",
        "--rdzv-backend=c10d",
        f"--rdzv-id={name}",
        f"--rdzv-endpoint=127.0.0.1:{store.port}",
        "--rdzv-conf=is_host=0,last_call_timeout=120",  # nobody waits for it: all come, each at its own pace
        "--max-restarts=5",
    )
    spares = ("--active-nodes", str(active)) if active < count else ()
    script = (*spares, *options, "--", "100000", "--until", str(stop))
    jobs: list[Any] = []

    def another() -> Any:
        run_dir = jobs[0].run_dir if jobs else None
        jobs.append(start_job(name, *script, ranks=1, torchrun=place, run_dir=run_dir))
        jobs[-1].store = store
        return jobs[-1]

    for _ in range(count):
        another()
    return jobs, another


def holder(jobs: list[Any], rank: int) -> tuple[int, int]:
    """(agent's number, agent's pid) of the node that trains ``rank``."""
    for node in range(3):
        try:
            status = jobs[0].status(node)
        except control.ControlError:
            continue
        if rank in status["ranks"]:
            return node, int(status["pid"])
    return -1, -1


def torchrun_of(jobs: list[Any], agent: int) -> Any:
    return next(
        job for job in jobs if job.process.poll() is None and agent in linux.descendants(job.process.pid)
    )
