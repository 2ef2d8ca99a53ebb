"""The steps of `gpu_all`: what they run, how long that is expected to take, and which may run side by side.

Predictions are from times on an H200, or, for what has not run there in this form, from what their parts took
there. Processes that come up, map pages and end do so one after another under the driver's locks, on all
GPUs of a host together: steps with many of them (`contends`) come one at a time, whatever the number of GPUs.
"""

from __future__ import annotations

import heapq
import signal
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
TESTS = "packages/leto-rmu/tests"
CRASHES = f"{TESTS}/test_cuda_updater.py::test_every_crash_point_with_losses"
# In this order: what is least proven first.
STAGES = (
    *("place", "smoke", "kills", "ranks", "aborts", "figure12", "rmp", "rmu", "ec", "shadow"),
    *("repair", "bench", "table1", "pressure", "sim", "megatron"),
)
USUAL = tuple(stage for stage in STAGES if stage != "smoke")


@dataclass(frozen=True)
class Step:
    """``seconds`` and ``predicted``: what is expected; ``page``: file of results, without suffix.

    ``keeps``: stopped early it has proven less, not nothing. ``together``: runs beside the steps of its
    stage, on the same GPU. ``all_gpus``: takes all that there are. ``stop``: the signal that asks it to
    end.
    """

    name: str
    stage: str
    command: tuple[str, ...]
    limit_s: float
    predicted: str
    page: Path | None = None
    seconds: float = 0.0
    keeps: bool = False
    together: bool = False
    contends: bool = False
    all_gpus: bool = False
    stop: signal.Signals = signal.SIGTERM


def script(name: str, *options: str) -> tuple[str, ...]:
    return (sys.executable, str(HERE / name), *options)


def tests(*selection: str) -> tuple[str, ...]:
    # Warnings of libraries of another release are no failure here.
    options = ("-v", "-m", "gpu", "-p", "no:cacheprovider", "-W", "default")
    return (sys.executable, "-m", "pytest", *options, *selection)


def all_steps(suffix: str, pages: Path, device: str) -> list[Step]:
    """Every step, in order; over the host backend those that need no GPU."""

    def page(name: str) -> Path:
        return pages / f"rmu-{name}-{suffix}"

    def proof(name: str, seconds: float, limit_s: float, predicted: str, *options: str) -> Step:
        out = page(name)
        command = script(f"gpu_{name}.py", "--device", device, "--output", str(out), *options)
        return Step(name, name, command, limit_s, predicted, out, seconds, keeps=True, contends=True)

    def smoke(name: str, predicted: str) -> Step:
        command = script(f"gpu_{name}.py", "--device", device, "--smoke")
        return Step(f"smoke {name}", "smoke", command, 90.0, predicted, seconds=25.0, contends=True)

    found = [
        Step(
            "place",
            "place",
            script("gpu_all.py", "--place", "--device", device),
            60.0,
            "mostly imports",
            seconds=9.0,
        ),
        smoke("kills", "exact"),
        smoke("ranks", "exact"),
        smoke("aborts", "exact, one trapping kernel; the compiler takes 5 s of it"),
        smoke("figure12", "RMP alone goes wrong at iteration 9, RMU nowhere"),
        smoke("repair", "exact"),
    ]
    if device == "cpu":
        return found
    found += [
        proof(
            "kills",
            *(190.0, 330.0),
            "all exact, 200 kills of AdamW, 10 each of SGD, Muon and undo; 1.6 lives a second in three lanes",
            *("--seconds", "290"),
        ),
        proof(
            "ranks",
            *(75.0, 140.0),
            "all exact, 36 kills of AdamW, SGD and Muon, sharded and unsharded; 1.6 s each in two lanes",
            *("--kills", "3", "--seconds", "110"),
        ),
        proof(
            "aborts",
            *(90.0, 150.0),
            "all exact, 45 aborts; optimizer under slots and leto-ec's in trapping kernels; 3 to 4 s each",
            *("--seconds", "120"),
        ),
        proof(
            "figure12", 60.0, 110.0, "RMP alone wrong from iteration 9 on, RMU equal in every bit; 4 s a kill"
        ),
        *test_steps(),
        *measurements(page),
    ]
    return sorted(found, key=lambda step: STAGES.index(step.stage))


def test_steps() -> list[Step]:
    """The tests marked `gpu` of every package."""

    def step(
        name: str, stage: str, seconds: float, limit_s: float, predicted: str, *selection: str, **more: bool
    ) -> Step:
        command = tests(*selection)
        return Step(name, stage, command, limit_s, predicted, seconds=seconds, stop=signal.SIGINT, **more)

    def crashes(name: str, seconds: float) -> Step:
        path = f"{CRASHES}[cuda-{name}]"
        return step(f"crash points, {name}", "rmu", seconds, 170.0, "1 passed", path, together=True)

    shadow, megatron = "packages/leto-shadow/tests", "packages/leto-megatron/tests"
    others = tuple(
        f"{TESTS}/test_{name}.py"
        for name in ("cuda_kill", "regrade", "cuda_updater", "first_update", "ranks")
    )
    ec = [f"packages/leto-ec/tests/test_{name}.py" for name in ("plan", "cuda")]
    memory = [f"{shadow}/memory/test_gpu_memory.py", f"{shadow}/runtime/test_gpu.py"]
    return [
        step("rmp", "rmp", 121.0, 260.0, "49 passed", "packages/leto-rmp/tests", contends=True),
        step("kernel", "rmu", 57.0, 170.0, "all passed", f"{TESTS}/test_cuda_fused.py", together=True),
        crashes("slots adamw", 72.0),
        crashes("slots sgd", 72.0),
        crashes("slots muon", 20.0),
        crashes("adamw", 46.0),
        crashes("sgd", 33.0),
        crashes("muon", 48.0),
        step(
            *("others", "rmu", 135.0, 250.0, "21 passed, 2 skipped"),
            *(*others, "-k", "not every_crash_point"),
            together=True,
        ),
        step("lent memory", "rmu", 40.0, 170.0, "12 passed", f"{TESTS}/test_lending.py", together=True),
        step("ec", "ec", 50.0, 120.0, "95 passed", *ec),
        step("shadow", "shadow", 15.0, 60.0, "10 passed", *memory),
        step(
            *("pressure", "pressure", 33.0, 240.0, "1 passed; skipped on one GPU"),
            f"{shadow}/memory/test_gpu_pressure.py",
            contends=True,
            all_gpus=True,
        ),
        step("sim", "sim", 30.0, 120.0, "2 passed", "packages/leto-sim/tests/test_profiler.py"),
        step(
            *(
                "megatron",
                "megatron",
                400.0,
                500.0,
                "8 passed; in mid-update 55 s, divided models 42 s each, a demo 71 s",
            ),
            f"{megatron}/test_gpu.py",
            contends=True,
            all_gpus=True,
        ),
    ]


def measurements(page: Callable[[str], Path]) -> list[Step]:
    return [
        Step(
            "repair",
            "repair",
            script("gpu_repair.py", "--device", "cuda", "--output", str(page("repair"))),
            100.0,
            "localize 25 ms, replace 0.43 s (12 ms in handles of one page), vote 87 ms, recover 15 ms",
            page("repair"),
            seconds=28.0,
            contends=True,
        ),
        Step(
            "updater",
            "bench",
            script("gpu_updater.py", "--groups", "6", "--output", str(page("updater"))),
            90.0,
            "kernel 12.3, 10.8, 11.1 ms at 240, 480, 960 pages, lean 10.9, 10.7, 11.1; fused 8.6",
            page("updater"),
            seconds=45.0,
        ),
        Step(
            "table 1",
            "table1",
            script("gpu_table1.py", "--kernel", "lean", "--output", str(page("table1-lean"))),
            150.0,
            "update phase 0.63 ms longer than without, 0.06 % of an iteration",
            page("table1-lean"),
            seconds=97.0,
        ),
        Step(
            "lending",
            "table1",
            script("gpu_lending.py", "--output", str(page("lending"))),
            240.0,
            "same bits; lent, 0.02 GiB beyond the reference with 240 pages and 60 (0.9 and 0.45 without), or "
            "less; compute 7 and 3.5 ms longer, what the copies take by memory's speed",
            page("lending"),
            seconds=130.0,
        ),
    ]


# --- what runs when -------------------------------------------------------------------------------------
@dataclass
class Block:
    """Steps that run side by side, on one GPU or on all."""

    steps: list[Step]
    gpus: tuple[str, ...] = field(default=())

    @property
    def contends(self) -> bool:
        return any(step.contends for step in self.steps)

    @property
    def all_gpus(self) -> bool:
        return any(step.all_gpus or step.stage == "place" for step in self.steps)


def blocks(steps: Sequence[Step]) -> list[Block]:
    found: list[Block] = []
    for step in steps:
        before = found[-1].steps[-1] if found else None
        if before is not None and step.together and before.together and step.stage == before.stage:
            found[-1].steps.append(step)
        else:
            found.append(Block([step]))
    return found


class Queue:
    """Blocks that wait, and GPUs that are free. Says which block may begin now."""

    def __init__(self, steps: Sequence[Step], gpus: Sequence[str]) -> None:
        self.gpus, self.free = tuple(gpus), list(gpus)
        self.waiting, self.running = blocks(steps), list[Block]()

    def next(self) -> Block | None:
        """The first block that may begin, which it takes; None: something has to end before."""
        for block in self.waiting:
            if self.may_begin(block):
                needed = self.needed(block)
                block.gpus, self.free = tuple(self.free[:needed]), self.free[needed:]
                self.waiting.remove(block)
                self.running.append(block)
                return block
            if block.steps[0].stage == "place":
                return None  # before everything else
        return None

    def needed(self, block: Block) -> int:
        return len(self.gpus) if block.all_gpus else 1

    def may_begin(self, block: Block) -> bool:
        contended = block.contends and any(other.contends for other in self.running)
        return len(self.free) >= self.needed(block) and not contended

    def ended(self, block: Block) -> None:
        self.running.remove(block)
        self.free = sorted([*self.free, *block.gpus], key=self.gpus.index)


def foreseen(steps: Sequence[Step], gpus: Sequence[str]) -> Iterator[tuple[float, float, Block]]:
    """When blocks would begin and end, in seconds, were predictions true."""
    queue, now, order = Queue(steps, gpus), 0.0, 0
    ends: list[tuple[float, int, Block]] = []
    while queue.waiting or ends:
        while (block := queue.next()) is not None:
            end = now + max(step.seconds for step in block.steps)
            heapq.heappush(ends, (end, order, block))
            order += 1
            yield now, end, block
        now, _, block = heapq.heappop(ends)
        queue.ended(block)
