"""A trainer without torch: counts iterations in retained memory, so that a test sees what a takeover kept.

counter.py ITERATIONS [--fail-at N] [--fail-in prepare|connect] [--child] [--pause S] [--until FILE] [--meet]
    [--keep-bytes N]
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import numpy as np

import leto_shadow
from leto_rmp import AllocationSpec, Client, Kind, Role
from leto_shadow import Phase


class Counter(leto_shadow.Trainer):
    def prepare(self, ctx: leto_shadow.Context) -> None:
        parser = argparse.ArgumentParser()
        parser.add_argument("iterations", type=int)
        parser.add_argument("--fail-at", type=int, default=-1)
        parser.add_argument("--fail-in", default="")
        parser.add_argument("--child", action="store_true")
        parser.add_argument("--pause", type=float, default=0.02)
        parser.add_argument("--until", type=Path, help="finish when this file exists")
        parser.add_argument("--keep-bytes", type=int, default=0, help="retain so much more")
        parser.add_argument(
            "--meet", action="store_true", help="meet in the world's store, as process groups do"
        )
        self.options = parser.parse_args(ctx.args)
        self.fail_in("prepare")

    def build(self, ctx: leto_shadow.Context) -> None:
        if self.options.child:  # like a data-loader worker that left its parent's group
            code = "import time; time.sleep(600)"
            subprocess.Popen([sys.executable, "-S", "-c", code], start_new_session=True)

    def connect(self, ctx: leto_shadow.Context) -> None:
        self.fail_in("connect")
        if self.options.meet:
            ctx.store.set(f"here-{ctx.rank}", "1")
            ctx.store.wait([f"here-{rank}" for rank in range(ctx.world_size)])

    def fail_in(self, phase: str) -> None:
        if self.options.fail_in == phase:
            raise ValueError(f"this script is wrong in {phase}")

    def train(self, ctx: leto_shadow.Context) -> None:
        client = Client.connect(ctx.manager_socket)
        client.attach(Role.WRITER, ctx.generation)
        specs = [AllocationSpec("arena", 4096 * 8, Kind.RETAINED)]
        if self.options.keep_bytes:
            specs.append(AllocationSpec("hoard", self.options.keep_bytes, Kind.RETAINED))
        arena = client.allocate(specs)["arena"]
        client.acknowledge(client.marks())  # the counter survives in page 7; the tests lose others
        words = arena.pages[7].view(np.int64)
        iteration = json.loads(ctx.exchange(json.dumps(int(words[0])).encode()))
        words[0] = iteration
        ctx.resumed(iteration, "in-place" if iteration else "fresh")
        until = self.options.until
        while iteration < self.options.iterations and not (until is not None and until.exists()):
            ctx.progress(Phase.FORWARD, iteration)
            ctx.point("forward", iteration)
            if iteration == self.options.fail_at and ctx.rank == 0:
                raise ValueError(f"this script is wrong at iteration {iteration}")
            time.sleep(self.options.pause)
            iteration += 1
            words[0] = iteration
            ctx.metrics(iteration, counter=float(iteration))


def decide(summaries: list[bytes]) -> bytes:
    """All ranks go on where the one behind stands."""
    return json.dumps(min(json.loads(summary) for summary in summaries)).encode()


if __name__ == "__main__":
    assert os.environ.get("RANK") == os.environ.get("LETO_RANK")  # a spare's trainer has neither yet
    leto_shadow.run(Counter())
