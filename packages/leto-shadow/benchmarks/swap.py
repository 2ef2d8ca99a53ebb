"""How long a swap takes: a node with an unfit device for a spare, with trainers started ahead and without.

    python benchmarks/swap.py [--swaps 5] [--out swap.json] [script.py [its arguments]]

Three torchruns on this host, one rank each, two of which train. The device under rank 1 is said to be unfit,
the spare takes its place, the node becomes the spare, and so on. Seconds are the coordinator's, from the
failure to training on all ranks. Without a script, `examples/plain_pytorch.py`. A swap begins when the
shadows wait, and the trainer of the spare, if it is to have one. (All three nodes share these processors.)
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore

from leto_shadow import cli, control
from leto_shadow.events import Event, read_events

EXAMPLE = Path(__file__).parents[1] / "examples" / "plain_pytorch.py"
POOL = ("--page-bytes", "16384", "--data-pages", "48", "--tier1", "6")
DEADLINE_S = 300.0


class Job:
    """Three nodes of this host in one run directory."""

    def __init__(self, folder: Path, options: Sequence[str], script: Sequence[str]) -> None:
        self.run_dir = folder / "job"
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        command = [sys.executable, "-m", "leto_shadow.cli", "run", "--nnodes", "2:3", "--nproc-per-node", "1"]
        command += ["--rdzv-backend", "c10d", "--rdzv-id", folder.name]
        command += ["--rdzv-endpoint", f"127.0.0.1:{self._store.port}"]
        command += ["--rdzv-conf", "is_host=0,last_call_timeout=5", "--run-dir", str(self.run_dir), *options]
        self._log = open(folder / "output", "wb")  # noqa: SIM115 - `end` closes it
        self._processes = [
            subprocess.Popen(
                [*command, *script], stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log
            )
            for _ in range(3)
        ]

    def events(self, name: str) -> list[Event]:
        path = self.run_dir / "events.jsonl"
        return [event for event in (read_events(path) if path.exists() else []) if event["event"] == name]

    def until(self, what: Callable[[], Any]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not what():
            if time.monotonic() > deadline or any(one.poll() is not None for one in self._processes):
                raise SystemExit(f"never came to pass: see {self._log.name}")
            time.sleep(0.05)  # other processes append to a file: there is no event to wait for

    def ready(self) -> bool:
        """All ranks train, and their shadows wait at L3."""
        try:
            reply = control.ask(self.run_dir / "agent-0.sock", control.StatusRequest())
        except control.ControlError:
            return False
        assert isinstance(reply, control.StatusReply)
        job = reply.status["job"]
        levels = list(job["shadow_levels"].values())
        return bool(job["phase"] == "training" and levels == [3, 3])

    def end(self) -> None:
        for process in self._processes:
            process.terminate()
        for process in self._processes:
            process.wait(60)
        self._log.close()


def measure(warm: bool, swaps: int, script: Sequence[str], folder: Path) -> list[dict[str, float]]:
    """Seconds of each swap, by part of the recovery."""
    job = Job(folder, [*POOL, "--limit-fatals", "1000", *([] if warm else ["--cold-spares"])], script)
    try:
        for number in range(swaps):
            job.until(job.ready)
            if warm:  # of the first spare, or of the node that has just become it
                job.until(lambda n=number: len(job.events("spare_level")) > n)
            if number:
                job.until(lambda n=number: len(job.events("spare_back")) >= n)
            done = len(job.events("recovered"))
            if cli.main(["inject", "fatal", "--rank", "1", "--run-dir", str(job.run_dir)]):
                raise SystemExit("the failure was refused")
            job.until(lambda n=done: len(job.events("recovered")) > n)
            total_s = job.events("recovered")[-1]["breakdown"]["total"]
            print(f"{'warm' if warm else 'cold'}: {total_s:.3f} s", flush=True)
        assert len(job.events("node_replaced")) == swaps
        assert bool(job.events("spare_trainer_taken")) is warm
        return [dict(event["breakdown"]) for event in job.events("recovered")]
    finally:
        job.end()


def main() -> int:
    """Measure both ways and print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--swaps", type=int, default=5)
    parser.add_argument("--out", type=Path)
    parser.add_argument("script", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    script = options.script or [str(EXAMPLE), "--iterations", "1000000"]
    found: dict[str, list[dict[str, float]]] = {}
    for name in ("warm", "cold"):
        with tempfile.TemporaryDirectory(prefix=f"leto-swap-{name}-") as folder:
            found[name] = measure(name == "warm", options.swaps, script, Path(folder))
    parts = list(found["warm"][0])
    print(f"{'seconds':<10}" + "".join(f"{part:>11}" for part in parts))
    for name, rows in found.items():
        medians = [statistics.median(row[part] for row in rows) for part in parts]
        print(f"{name:<10}" + "".join(f"{median:11.3f}" for median in medians))
    if options.out is not None:
        result = {"swaps": options.swaps, "script": script, "processors": os.cpu_count(), "seconds": found}
        options.out.write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
