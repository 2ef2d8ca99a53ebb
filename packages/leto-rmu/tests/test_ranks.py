"""Two ranks, crashed wherever the world barrier allows them to be together (I-3, I-5), and the barrier."""

from __future__ import annotations

import itertools
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import pytest
import torch
from cuda_lab import DeviceRecorder, DeviceWorld
from mutants import ProtectedEarly
from rmu_lab import (
    MATRICES,
    LabMemory,
    Point,
    Pool,
    Recorder,
    World,
    Wrong,
    beyond_tolerance,
    loss_patterns,
    truth_of,
)

from leto_rmu import SGD, Action, AdamW, Decision, Executor, Muon, Op, ResumableUpdater, decide

pytestmark = pytest.mark.timeout(900)  # on a busy machine; usually a tenth of that

ORDER = ("ITERATION", "COMPUTE", "PROTECTED", "SYNCED", "UPDATED")


PAIRS_OF_MARKS = 94
"""In the three iterations of a history; the barrier allows no others."""


class Rank(World):
    """A rank of a job: own data, common sync results."""

    def __init__(self, number: int, **more: object) -> None:
        super().__init__(seed=100 + number, model_bytes=0, **more)  # type: ignore[arg-type]


def of(kind: type[ResumableUpdater]) -> Callable[..., World]:
    """Ranks with such an updater."""
    return partial(Rank, updater=kind)


def on(device: str) -> Callable[..., World]:
    """Ranks whose state is on a device; the CPU stands in for a GPU."""
    return lambda number, **more: DeviceWorld(device, seed=100 + number, **more)


def record(rank: World, iterations: int, seed: int) -> list[Point]:
    memory, up = rank.start()
    kind = DeviceRecorder if isinstance(rank, DeviceWorld) else Recorder
    recorder = kind(memory, rank, truth_of(rank, up), np.random.default_rng(seed), tears=1, shuffle=True)
    up.executor = recorder
    rank.train(up, iterations)
    recorder.points.append(Point("after the last op", memory.snapshot(), list(recorder.truth)))
    return recorder.points


def position(point: Point) -> tuple[int, int]:
    """How far this rank certainly is: (iteration, index of the phase)."""
    return min((t.iteration, ORDER.index(t.phase)) for t in point.truths)


def farthest(point: Point) -> tuple[int, int]:
    return max((t.iteration, ORDER.index(t.phase)) for t in point.truths)


def possible(a: Point, b: Point) -> bool:
    """The barrier: nobody is SYNCED(t), or beyond, before everybody is PROTECTED(t)."""
    for one, other in ((a, b), (b, a)):
        t, phase = farthest(one)
        through = t if phase >= ORDER.index("SYNCED") else t - 1
        if through >= 0 and position(other) < (through, ORDER.index("PROTECTED")):
            return False
    return True


def recover_together(
    ranks: list[World], memories: list[LabMemory], points: list[Point], losses: list[list], seed: int
) -> tuple[Action, list[Action]]:
    """Restore both, decide once, recover each; exact and at one iteration, or refused together."""
    ups = []
    for rank, memory, point, lost in zip(ranks, memories, points, losses, strict=True):
        memory.restore(point.state)
        memory.lose(lost, seed)
        ups.append(rank.updater(memory))
    lost_now = [frozenset(m.marks) for m in memories]
    raw = decide([up.summary() for up in ups])
    decision = Decision.decode(raw)
    where = " / ".join(p.label for p in points)
    if decision.action in (Action.FRESH, Action.CHECKPOINT):
        reasons = [
            any(beyond_tolerance(rank, _as_finishing(t), lost) for t in point.truths)
            for rank, point, lost in zip(ranks, points, lost_now, strict=True)
        ]
        if not any(reasons):
            raise Wrong(f"refused within tolerance: {decision.reason} - {where}")
        return decision.action, []
    done = [up.recover(raw) for up in ups]
    for rank, memory, up, result in zip(ranks, memories, ups, done, strict=True):
        assert result.iteration == decision.iteration, where
        rank.check(memory, up)
        rank.train(up, decision.iteration + 1)
        rank.check(memory, up)
    return decision.action, [result.action for result in done]


def _as_finishing(truth):  # type: ignore[no-untyped-def]
    """A protected rank may have to finish: then its gradients count too."""
    import dataclasses

    return dataclasses.replace(truth, phase="SYNCED") if truth.phase == "PROTECTED" else truth


Pairs = Iterator[list[Point]]


def drawn(histories: list[list[Point]], pairs: int, rng: np.random.Generator) -> Pairs:
    """Any points that may be together; every third pair in two iterations, every third before an update."""
    every = [(a, b) for a in histories[0] for b in histories[1] if possible(a, b)]
    assert len(every) > 2000
    apart = [(a, b) for a, b in every if position(a)[0] != position(b)[0]]
    calm = [(a, b) for a, b in every if max(farthest(a), farthest(b))[1] < 3]
    for k in range(pairs):
        pool = (every, apart, calm)[k % 3]
        yield list(pool[int(rng.integers(len(pool)))])


def enumerated(histories: list[list[Point]], rng: np.random.Generator) -> Pairs:
    """Every pair of marks that two ranks can stand at together, at any of the points with these marks."""
    marked: list[dict[tuple[int, int], list[Point]]] = []
    for history in histories:
        marked.append({})
        for point in history:
            if position(point) == farthest(point):  # no mark is being written: it is certain
                marked[-1].setdefault(position(point), []).append(point)
    found = 0
    for first, second in itertools.product(*(sorted(points.items()) for points in marked)):
        if possible(first[1][0], second[1][0]):
            found += 1
            yield [points[int(rng.integers(len(points)))] for _, points in (first, second)]
    assert found == PAIRS_OF_MARKS, "the marks are the same, whatever the optimizer"


def sweep(
    make: Callable[..., World],
    pairs: int | None,
    seed: int,
    kinds: tuple[str, ...] = (),
    **options: object,
) -> Counter:
    """Crash two ranks at so many random pairs of points, or (None) at every pair of marks; count outcomes."""
    ranks = [make(0, **options), make(1, **options)]
    histories = [record(rank, 3, seed + k) for k, rank in enumerate(ranks)]
    memories = [rank.start()[0] for rank in ranks]
    rng, seen = np.random.default_rng(seed), Counter()
    chosen = enumerated(histories, rng) if pairs is None else drawn(histories, pairs, rng)
    for k, points in enumerate(chosen):
        losses: list[list] = [[], []]
        if k % 2:
            which = int(rng.integers(2))
            patterns = loss_patterns(ranks[which], rng, points[which].truths[0])
            names = kinds or tuple(patterns)
            losses[which] = patterns[names[int(rng.integers(len(names)))]]
        action, taken = recover_together(ranks, memories, points, losses, seed=k)
        seen[action] += 1
        seen.update(f"rank: {a}" for a in taken)
        seen["mixed"] += len(set(taken)) > 1
    return seen


def _sweep_seeds(kind: type[ResumableUpdater], seeds: range) -> None:
    for seed in seeds:
        sweep(of(kind), pairs=200, seed=seed, kinds=("gradients",))


SLOTS = {"scheme": "slots", "pool": Pool(data_pages=8)}
MUON = {"optimizer": Muon(AdamW()), "segments": MATRICES, "grad_numel": 450}
OPTIMIZERS: dict[str, dict[str, object]] = {
    "adamw": {},
    "adamw-slots": SLOTS,
    "sgd": {"optimizer": SGD()},
    "sgd-slots": {"optimizer": SGD(), **SLOTS},
    "muon": MUON,
    "muon-slots": {**MUON, **SLOTS},
}


def assert_all_happened(seen: Counter) -> None:
    """Nothing was proven about what did not happen. Losses beyond tolerance are rare, and rarest for Muon."""
    assert min(seen[Action.RESTART], seen[Action.FINISH], seen["rank: none"], seen["mixed"]) > 5
    assert seen[Action.FRESH] > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_ranks_at_every_pair_of_marks(name: str) -> None:
    seen = sweep(of(ResumableUpdater), pairs=None, seed=5, **OPTIMIZERS[name])
    assert_all_happened(seen)


@pytest.mark.slow
@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_two_ranks_with_their_state_on_a_device(device: str, name: str) -> None:
    """The state is divided between two ranks, each with its own part of it on the device."""
    if name.startswith("muon") and not hasattr(torch.optim, "Muon"):
        pytest.skip("torch has Muon from 2.9 on")
    seen = sweep(on(device), pairs=None, seed=5, **OPTIMIZERS[name])
    assert_all_happened(seen)


@pytest.mark.nightly
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_ranks_at_different_markers(name: str) -> None:
    seen = sweep(of(ResumableUpdater), pairs=400, seed=5, **OPTIMIZERS[name])
    assert_all_happened(seen)


def test_protecting_after_the_mark_is_caught_by_two_ranks() -> None:
    """Mutant: PROTECTED before R. Then a peer's SYNCED has it finish with gradients nobody can rebuild."""
    with pytest.raises(Wrong, match=r"chunks \["):
        _sweep_seeds(ProtectedEarly, range(6))


# --- I-3 -----------------------------------------------------------------------------------------------
class Spy(Executor):
    """Note for one rank what is written when."""

    def __init__(self, log: list[tuple[str, str]], rank: str) -> None:
        self.log, self.rank = log, rank

    def run(self, op: Op) -> None:
        self.log.append((self.rank, op.name))
        super().run(op)


def violations(log: list[tuple[str, str]]) -> list[str]:
    """I-3 over a log of ops and barrier arrivals: model state is written only after all ranks arrived."""
    arrived, protected, found = Counter(), Counter(), []
    for rank, event in log:
        if event == "protect":
            protected[rank] += 1
        elif event == "arrive":
            arrived[rank] += 1
            if protected[rank] < arrived[rank]:
                found.append(f"{rank} arrived with unprotected gradients")
        elif event in ("load", "undo", "update", "drain"):
            iteration = max(arrived.values(), default=0)
            if iteration == 0 or any(arrived[r] < arrived[rank] for r in ("a", "b")):
                found.append(f"{rank}: {event} before everybody arrived at barrier {iteration}")
    return found


def run_two(kind: type[ResumableUpdater]) -> list[tuple[str, str]]:
    log: list[tuple[str, str]] = []
    barrier = threading.Barrier(2, timeout=60)
    failed: list[BaseException] = []

    def wait(rank: str) -> Callable[[], None]:
        def arrive() -> None:
            log.append((rank, "arrive"))
            barrier.wait()

        return arrive

    def body(world: World, rank: str) -> None:
        try:
            memory, _ = world.start()
            up = world.updater(memory, Spy(log, rank), wait(rank))
            up.recover(decide([up.summary()]))
            world.train(up, 4)
            world.check(memory, up)
        except BaseException as error:
            failed.append(error)
            barrier.abort()
            raise

    worlds = {"a": World(seed=1, updater=kind), "b": World(seed=2, updater=kind)}
    for world in worlds.values():
        world.arena(4)
    threads = [threading.Thread(target=body, args=(w, r), daemon=True) for r, w in worlds.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
        assert not thread.is_alive()
    assert not failed
    return log


class NoBarrier(ResumableUpdater):
    """Mutant: the world barrier comes after the update."""

    def __init__(self, *args, **kwargs) -> None:  # type: ignore[no-untyped-def]
        super().__init__(*args, **kwargs)
        self._real, self._barrier = self._barrier, lambda: None

    def commit(self, record) -> None:  # type: ignore[no-untyped-def]
        self._real()
        super().commit(record)


def test_no_rank_writes_before_all_are_protected() -> None:
    log = run_two(ResumableUpdater)
    assert violations(log) == []
    assert Counter(log)["a", "arrive"] == 4
    assert Counter(log)["b", "update"] == 4 * 6
    assert violations(run_two(NoBarrier)), "the spy must see a late barrier"


def test_barrier_comes_when_the_result_is_there_and_before_it_is_marked() -> None:
    """Not earlier: it vouches for the gradients and for the result of the synchronization (I-6)."""
    world, log = World(), []
    _memory, up = world.start()
    up.executor = Spy(log, "a")
    up._barrier = lambda: log.append(("a", "barrier"))

    def sync():  # type: ignore[no-untyped-def]
        log.append(("a", "sync"))
        return world.sync(0)

    world.begin(up)
    up.step(world.hypers(0), world.job(1), sync)
    names = [name for _, name in log]
    assert names[: names.index("sync") + 3] == ["mark", "protect", "stage", "mark", "sync", "barrier", "mark"]
    assert names[-2:] == ["mark", "mark"]
