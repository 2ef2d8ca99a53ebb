"""The trainer of `leto_megatron.pretrain` on the host, with a device whose part is played: its shadows park.

The driver that is played has a limit for stacks, gives memory back when it is lowered, and refuses to raise
it again on rank 0: others have taken the room. `main` of the pretraining is used as it is, but for two
places where it waits, with a deadline, until the shadows stand where the test wants them at a drill.
"""

from __future__ import annotations

import enum
import sys
import time
from pathlib import Path
from typing import Any

import leto_megatron.trainer
from leto_megatron import pretrain, warm
from leto_megatron.trainer import MegatronTrainer
from leto_shadow import Context
from leto_shadow.events import read_events

PARKED_BYTES = 446 << 20
FIRST, SECOND = 3, 8
"""Iterations in which rank 1 is killed: the first one waits for parked shadows, the second one for any."""

_DEADLINE_S = 300.0


class _Result(enum.Enum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_OUT_OF_MEMORY = 2


class Driver:
    """The stack limit of a context, and the room beside it."""

    CUresult = _Result

    class CUlimit(enum.Enum):
        CU_LIMIT_STACK_SIZE = 0

    def __init__(self, rank: int, parks: Path) -> None:
        self.rank, self.parks = rank, parks
        self.limit, self.free = 1024, 1 << 30

    def cuCtxGetLimit(self, _what: Any) -> tuple[_Result, int]:  # noqa: N802 - the driver's name
        return _Result.CUDA_SUCCESS, self.limit

    def cuCtxSetLimit(self, _what: Any, limit: int) -> tuple[_Result]:  # noqa: N802 - the driver's name
        if limit < self.limit:
            self.free += PARKED_BYTES
            with open(self.parks, "a") as file:
                file.write("parked\n")
        elif self.rank == 0:
            return (_Result.CUDA_ERROR_OUT_OF_MEMORY,)
        self.limit = limit
        return (_Result.CUDA_SUCCESS,)


class ParkingTrainer(MegatronTrainer):
    """Decides as on a GPU, without one."""

    def build(self, ctx: Context) -> None:
        driver = Driver(ctx.rank, self.out / f"parks-rank{ctx.rank}")
        warm._driver = lambda: driver  # type: ignore[attr-defined]
        warm._is_on_device = lambda: True
        warm._free_bytes = lambda: driver.free
        warm._threads = lambda: 132 * 2048
        super().build(ctx)

    def _parks(self, ctx: Context) -> bool:
        return ctx.waits

    def train(self, ctx: Context) -> None:
        point = ctx.point

        def waiting_point(name: str, iteration: int, **where: Any) -> None:
            if name == "forward" and iteration == FIRST and not _has_failed(ctx):
                _wait_for_shadows(ctx, 3)
            elif name == "forward" and iteration == SECOND:
                _wait_for_shadows(ctx, 2)
            point(name, iteration, **where)

        ctx.point = waiting_point  # type: ignore[method-assign]
        super().train(ctx)


def _has_failed(ctx: Context) -> bool:
    return any(event["event"] == "failure" for event in read_events(ctx.run_dir / "events.jsonl"))


def _wait_for_shadows(ctx: Context, level: int) -> None:
    """Return when the shadows of all ranks stand at `level` or above, as the log of the job says."""
    end = time.monotonic() + _DEADLINE_S
    while time.monotonic() < end:
        levels: dict[int, int] = {}
        for event in read_events(ctx.run_dir / "events.jsonl"):
            if event["event"] == "promoted":
                levels = {}
            elif event["event"] == "shadow_level":
                levels[event["rank"]] = event["level"]
        if len(levels) == ctx.world_size and min(levels.values()) >= level:
            return
        time.sleep(0.05)
    raise TimeoutError(f"the shadows do not stand at L{level} within {_DEADLINE_S:g} s: {levels}")


if __name__ == "__main__":
    leto_megatron.trainer.MegatronTrainer = ParkingTrainer  # type: ignore[misc]
    sys.exit(pretrain.main())
