"""Run a function in N fresh processes, one a rank, and collect what each returns (JSON).

    results = run_ranks(2, "worker_modes:compare", {"preset": "tiny"})

The processes are real: they form gloo groups, share nothing but a folder, and are killed after the deadline.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

TESTS = Path(__file__).resolve().parent


class RankFailedError(AssertionError):
    """A rank ended badly; the message carries the end of its output."""


def run_ranks(
    world: int, function: str, arguments: dict[str, Any], folder: Path, timeout_s: float = 400.0
) -> list[Any]:
    """Call `module:function(rank, world, **arguments)` in `world` processes; results in rank order."""
    folder.mkdir(parents=True, exist_ok=True)
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(world):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "WORLD_SIZE": str(world),
                "LOCAL_RANK": str(rank),
                "OMP_NUM_THREADS": "1",
                "PYTHONPATH": os.pathsep.join([str(TESTS), *filter(None, [os.environ.get("PYTHONPATH")])]),
                "RANKS_ARGUMENTS": json.dumps({"function": function, "folder": str(folder), **arguments}),
            }
            with open(folder / f"rank{rank}.log", "wb") as log:
                processes.append(
                    subprocess.Popen(
                        [sys.executable, "-W", "ignore", str(TESTS / "ranks.py")],
                        env=environment,
                        stdout=log,
                        stderr=subprocess.STDOUT,
                        stdin=subprocess.DEVNULL,
                    )
                )
        deadline = time.monotonic() + timeout_s
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes) or time.monotonic() > deadline:
                break  # one has failed, and the others may wait for it for long
            time.sleep(0.05)
        ended = [process.poll() for process in processes]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
    codes = ["killed by this test" if code is None else code for code in ended]
    if any(codes):
        logs = "\n".join(
            f"--- rank {r} (exit {code})\n" + (folder / f"rank{r}.log").read_text(errors="replace")[-3000:]
            for r, code in enumerate(codes)
        )
        raise RankFailedError(f"exit codes {codes}\n{logs}")
    return [json.loads((folder / f"result{rank}.json").read_text()) for rank in range(world)]


def store_path(folder: str, name: str) -> str:
    """A file for torch's FileStore, one for each world that the processes form."""
    return os.path.join(folder, f"store-{name}")


def _main() -> None:
    import torch

    torch.set_num_threads(1)
    arguments = json.loads(os.environ["RANKS_ARGUMENTS"])
    module, function = arguments.pop("function").split(":")
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    result = getattr(importlib.import_module(module), function)(rank, world, **arguments)
    path = Path(arguments["folder"]) / f"result{rank}.json"
    path.write_text(json.dumps(result))


if __name__ == "__main__":
    _main()
