"""One trainer's life over retained GPU memory; started and killed by test_cuda_kill.py.

    python packages/leto-rmu/tests/cuda_kill_lab.py --socket S --generation 1 --until 8

Attaches as the writer, recovers, compares every byte with torch.optim (foreach) on the same GPU, says what it
found as one line of JSON, and trains on; with --tear-at it leaves that operation torn and kills itself.
"""

from __future__ import annotations

import argparse
import json
import sys
from types import SimpleNamespace

import torch
from cuda_lab import DeviceWorld
from kill_lab import KillAtCount

from leto_rmp import Client, PoolConfig, Role
from leto_rmu import Action, Executor, Segment, decide

PAGE = 2 << 20
CONFIG = PoolConfig(page_bytes=PAGE, data_pages=12, tier1_pages=6, tier2_pages=1, backend="cuda")


def world() -> DeviceWorld:
    """Two groups of two chunks of six pages; segments that begin and end inside pages."""
    return DeviceWorld(
        "cuda",
        pool=CONFIG,
        segments=(
            Segment("a", 1_500_001, 0, 0),
            Segment("b", 700_003, 1, 1_500_100),
            Segment("c", 1_900_007, 0, 2_300_000),
        ),
        grad_numel=4_200_100,
        grad_dtype=torch.bfloat16,
        model_bytes=8_200_022,
        no_ops=frozenset({3}),
    )


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", required=True)
    parser.add_argument("--generation", type=int, required=True)
    parser.add_argument("--until", type=int, required=True)
    parser.add_argument("--tear-at", type=int)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    here = world()
    with Client.connect(options.socket, timeout_s=60.0) as client:
        client.attach(Role.WRITER, options.generation)
        executor = Executor() if options.tear_at is None else KillAtCount(options.tear_at, options.seed)
        up = here.updater(client)
        summary = up.summary()
        phase = up.position().phase or "none"
        recovered = up.recover(decide([summary]))
        if recovered.action is Action.FRESH:
            assert phase == "none", f"state at {phase} was given up: {recovered.reason}"
            here.fill(up)
        here.check(SimpleNamespace(regions=up.memory.regions, marks=client.marks()), up)
        found = {
            "iteration": up.iteration,
            "phase": phase,
            "action": str(recovered.action),
            "pages": recovered.pages_reconstructed,
            "verified": recovered.verified,
            "seconds": recovered.seconds,
        }
        print(json.dumps(found), flush=True)
        up.executor = executor
        here.train(up, options.until)
        here.check(SimpleNamespace(regions=up.memory.regions, marks=client.marks()), up)
    return 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(main())
