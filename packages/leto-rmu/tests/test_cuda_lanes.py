"""Lanes: whatever the device does at once, and wherever it stops, the state is exact (I-2).

A simulated device runs the lanes in random order and dies at a random instant; a fresh updater takes over.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rmu_lab import Pool, Wrong
from sim_lanes import OneLaunchUpdater, OneLaunchWorld, SimQueues, SimWorld

import leto_rmu
from leto_rmp import PageRef
from leto_rmu import SGD, Decision, Executor, Op, Segment, SyncResult
from leto_rmu.cuda import CudaUpdater
from leto_rmu.cuda.lanes import COMPUTE, CudaQueues, Lanes, Resource
from leto_rmu.cuda.marks import MarkWriter
from leto_rmu.errors import ProtocolError
from leto_rmu.faults import Stopped
from leto_rmu.marker import Phase

SEGMENTS = (Segment("a", 300, 0, 3, 0), Segment("b", 277, 1, 303, 301), Segment("c", 590, 0, 590))
WORLDS: dict[str, dict[str, Any]] = {
    "undo": {},
    "slots": {"scheme": "slots", "pool": Pool(data_pages=8)},
    "slots, sgd": {
        "scheme": "slots",
        "optimizer": SGD(),
        "pool": Pool(data_pages=12, tier1_pages=4, tier2_pages=1),
    },
}


def world_of(name: str, lanes: type[Lanes] = Lanes) -> SimWorld:
    world = SimWorld(segments=SEGMENTS, grad_numel=1190, model_bytes=1200, **WORLDS[name])
    world.lanes = lanes
    assert world.plan.groups >= 4
    return world


def run(
    world: SimWorld, seed: int, stop: int | None, until: int = 2, kind: type[SimQueues] = SimQueues
) -> tuple[Any, SimQueues, bool]:
    """Train on simulated lanes; did it come to its end?"""
    rng = np.random.default_rng(seed)
    world.queues = None
    memory, _ = world.start()
    queues = world.queues = kind(rng, stop)
    up = world.updater(memory)
    ended = False
    try:
        up.recover(leto_rmu.decide([up.summary()]))
        world.train(up, until)
        up.wait()  # type: ignore[attr-defined]
        ended = True
    except Stopped:
        pass
    finally:
        world.queues = None
    return memory, queues, ended


def resume(world: SimWorld, memory: Any, seed: int) -> str:
    """A fresh updater recovers, with pages lost; exact, or Wrong."""
    rng = np.random.default_rng([seed, 1])
    plan, h1 = world.plan, world.pool.tier1_pages
    lost = [PageRef("arena", "data", int(rng.integers(plan.planes * plan.plane_pages)))]
    lost.append(PageRef("parity_ring", "data", int(rng.integers(4 * h1))))
    if rng.random() < 0.5:
        memory.lose(lost, seed)
    up = world.updater(memory)
    try:
        raw = leto_rmu.decide([up.summary()])
        action = Decision.decode(raw).action
        up.recover(raw)
    except ProtocolError as error:
        raise Wrong(str(error)) from error
    if action not in ("finish", "restart"):
        raise Wrong(f"refused: {Decision.decode(raw).reason}")
    world.check(memory, up)
    world.train(up, up.iteration + 1)
    world.check(memory, up)
    return str(action)


@pytest.mark.parametrize("name", WORLDS)
def test_work_of_three_lanes_in_any_order(name: str) -> None:
    world = world_of(name)
    for seed in range(4):
        memory, queues, ended = run(world, seed, None, until=3)
        assert ended
        assert queues.together > 10, "lanes never overlapped"
        up = world.updater(memory)
        up.recover(leto_rmu.decide([up.summary()]))
        assert up.iteration == 3
        world.check(memory, up)


@pytest.mark.parametrize("name", WORLDS)
def test_the_process_dies_while_three_lanes_work(name: str) -> None:
    world, tally = world_of(name), Counter[str]()
    _, queues, _ = run(world, 0, None)
    for seed in range(30):
        stop = int(np.random.default_rng([seed, 2]).integers(queues.done))
        memory, _, ended = run(world, seed, stop)
        if not ended:
            tally[resume(world, memory, seed)] += 1
    print(f"{name}: {dict(tally)}")
    assert tally["finish"] > tally["restart"] > 0


@pytest.mark.parametrize("name", WORLDS)
def test_recoveries_die_on_three_lanes_too(name: str) -> None:
    """Up to three in a row, each with pages lost; then one comes to its end."""
    world, tally = world_of(name), Counter[str]()
    _, queues, _ = run(world, 0, None)
    for seed in range(20):
        rng = np.random.default_rng([seed, 3])
        memory, _, ended = run(world, seed, int(rng.integers(queues.done)))
        for life in range(0 if ended else 3):
            kinds = [("arena", world.plan.planes * world.plan.plane_pages), ("grads", 1), ("marker", 3)]
            kinds += [("job_state", 6), ("model", 2)]
            lost = {PageRef(region, "data", int(rng.integers(count))) for region, count in kinds}
            held = {ref.allocation for ref in memory.marks}  # a third replica must not go as well
            memory.lose([r for r in sorted(lost) if r.allocation not in held and rng.random() < 0.4], seed)
            world.queues = SimQueues(rng, int(rng.integers(20)))
            up = world.updater(memory)
            try:
                up.recover(leto_rmu.decide([up.summary()]))
                up.wait()  # type: ignore[attr-defined]
            except Stopped:
                tally[f"died in life {life}"] += 1
            finally:
                world.queues = None
        if not ended:
            tally[resume(world, memory, seed)] += 1
    print(f"{name}: {dict(tally)}")
    assert tally["died in life 2"] > 3
    assert tally["finish"] > 3


class NoReaders(Lanes):
    """A mutant: who writes does not wait for who still reads."""

    def run(
        self, lane: str, work: Any, reads: Iterable[Resource] = (), writes: Iterable[Resource] = ()
    ) -> None:
        super().run(lane, work, reads, writes)
        self._read.clear()


class NoWriters(Lanes):
    """A mutant: who reads does not wait for who still writes."""

    def run(
        self, lane: str, work: Any, reads: Iterable[Resource] = (), writes: Iterable[Resource] = ()
    ) -> None:
        super().run(lane, work, reads, writes)
        self._wrote.clear()


class NoJoin(Lanes):
    """A mutant: UPDATED does not wait for the drains."""

    def join(self) -> None:
        pass


@pytest.mark.parametrize("mutant", [NoReaders, NoWriters, NoJoin])
@pytest.mark.parametrize("name", ["undo", "slots"])
def test_mutants_are_caught(name: str, mutant: type[Lanes]) -> None:
    healthy, world = world_of(name), world_of(name, mutant)
    _, queues, _ = run(healthy, 0, None)
    for seed in range(60):
        rng = np.random.default_rng([seed, 2])
        stop = int(rng.integers(queues.done))
        if seed % 3 == 1:  # around the end of an iteration
            stop = queues.done // 2 * (1 + seed % 2) - int(rng.integers(15))
        try:
            memory, _, ended = run(world, seed, None if seed % 3 == 0 else stop)
            if ended:
                up = world.updater(memory)
                up.recover(leto_rmu.decide([up.summary()]))
                world.check(memory, up)
            else:
                resume(world, memory, seed)
        except Wrong as wrong:
            print(f"seed {seed}: {wrong}")
            return
    pytest.fail("the mutant passed")


class HostWaitError(AssertionError):
    """The host waited for the device inside an update."""


class Watched(SimQueues):
    """Queues for which the host may not wait while ``inside`` an update."""

    inside, waits, updates = False, 0, 0

    def wait(self, event: Any) -> None:
        self._seen()
        super().wait(event)

    def settle(self) -> None:
        self._seen()
        super().settle()

    def _seen(self) -> None:
        if self.inside:
            raise HostWaitError("from the barrier to the end of step() the host waits for nothing")
        self.waits += 1


class WatchedUpdater(CudaUpdater):
    """An update is what comes after the barrier, for which the host has waited for PROTECTED."""

    def step(self, *args: Any) -> SyncResult:
        queues, barrier = self.memory.lanes.queues, self._barrier
        assert isinstance(queues, Watched)

        def enter() -> None:
            barrier()
            queues.inside = True

        self._barrier = enter
        try:
            return super().step(*args)
        finally:
            self._barrier, queues.inside = barrier, False
            queues.updates += 1


class WatchedOneLaunch(WatchedUpdater, OneLaunchUpdater):
    """The same, a chunk in one launch."""


def watched(name: str, updater: type[CudaUpdater], lanes: type[Lanes] = Lanes) -> Watched:
    """Train; raise HostWaitError."""
    world = world_of(name, lanes)
    world.updater_class = updater
    memory, queues, ended = run(world, 5, None, until=3, kind=Watched)
    assert ended
    assert isinstance(queues, Watched)
    world.updater_class = OneLaunchUpdater
    up = world.updater(memory)
    up.recover(leto_rmu.decide([up.summary()]))
    world.check(memory, up)
    return queues


@pytest.mark.parametrize("updater", [WatchedUpdater, WatchedOneLaunch])
@pytest.mark.parametrize("name", WORLDS)
def test_the_host_waits_for_nothing_inside_an_update(name: str, updater: type[CudaUpdater]) -> None:
    queues = watched(name, updater)
    assert queues.updates == 3
    assert queues.waits >= 3, "the waits before the barrier are not seen"


class OwnEvent(Lanes):
    """A mutant: lanes wait for what they have just been given."""

    def run(
        self, lane: str, work: Any, reads: Iterable[Resource] = (), writes: Iterable[Resource] = ()
    ) -> None:
        super().run(lane, work, reads, writes)
        if self.queues is not None:
            self.wait(self.queues.event(lane))


class SettlesBeforeUpdated(WatchedOneLaunch):
    """A mutant: UPDATED is written when the host has seen all lanes end."""

    def _rank(self, phase: Phase, *args: Any, **more: Any) -> Op:
        if phase is Phase.UPDATED:
            self.wait()
        return super()._rank(phase, *args, **more)


@pytest.mark.parametrize(
    ("updater", "lanes"),
    [(WatchedOneLaunch, OwnEvent), (WatchedUpdater, OwnEvent), (SettlesBeforeUpdated, Lanes)],
)
@pytest.mark.parametrize("name", ["undo", "slots"])
def test_waits_inside_an_update_are_caught(name: str, updater: type[CudaUpdater], lanes: type[Lanes]) -> None:
    with pytest.raises(HostWaitError):
        watched(name, updater, lanes)


class StopAfterUpdated(Executor):
    """The process lives on, but step() does not come to its end."""

    def run(self, op: Op) -> None:
        op.apply()
        if self.up.marker.rank.phase is Phase.UPDATED:
            raise Stopped("between UPDATED and the derived state")

    up: Any


def test_copies_lost_after_an_interrupted_step_are_made_again() -> None:
    """The same updater recovers: that its chunks had written all copies once is no reason to trust them."""
    world = OneLaunchWorld("cpu", segments=SEGMENTS, grad_numel=1190, model_bytes=1200, **WORLDS["slots"])
    memory, up = world.start()
    executor = StopAfterUpdated()
    executor.up, up.executor = up, executor
    with pytest.raises(Stopped):
        world.iterate(up)
    up.executor = Executor()
    pages = memory.regions["model"].pages.shape[0]
    memory.lose([PageRef("model", "data", k) for k in range(pages)], seed=1)
    up.recover(leto_rmu.decide([up.summary()]))
    world.check(memory, up)


class Streams:
    """torch.cuda as far as `CudaQueues` uses it; a stream notes what it waited for, and who waited for it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, outer = "caller's", self

        class Stream:
            def __init__(self, name: Any) -> None:
                self.name, self.behind, self.synchronized = str(name), set[str](), False
                self.cuda_stream = self.name

            def record_event(self) -> Any:
                return SimpleNamespace(of=self.name)

            def wait_event(self, event: Any) -> None:
                self.behind |= {event.of, *outer.streams[event.of].behind}

            def wait_stream(self, other: Any) -> None:
                self.wait_event(other.record_event())

            def synchronize(self) -> None:
                for name in (self.name, *self.behind):
                    outer.streams[name].synchronized = True

        self.streams: dict[str, Any] = {name: Stream(name) for name in ("caller's", "other")}

        def make(_: int, name: str) -> Any:
            return self.streams.setdefault(name, Stream(name))

        fake = SimpleNamespace(current_stream=lambda _: self.streams[self.now])
        monkeypatch.setattr("leto_rmu.cuda.lanes.torch.cuda", fake)
        monkeypatch.setattr("leto_rmu.cuda.lanes.own_stream", make)


def test_a_caller_who_changes_streams_keeps_the_order_of_marks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two marks of the rank's cell on two streams, in any order, could tear both of its slots."""
    streams = Streams(monkeypatch)
    lanes = Lanes(CudaQueues(torch.device("cuda", 0)))
    lanes.run(COMPUTE, lambda: None, writes=[("cell", 0)])
    streams.now = "other"
    lanes.run(COMPUTE, lambda: None, writes=[("cell", 0)])
    assert streams.streams["other"].behind == {"caller's"}


def test_waiting_includes_the_stream_that_was_current_before(monkeypatch: pytest.MonkeyPatch) -> None:
    """An exception leaves ``with torch.cuda.stream(...)``; recovery must not read beside the work there."""
    streams = Streams(monkeypatch)
    streams.now = "other"
    lanes = Lanes(CudaQueues(torch.device("cuda", 0)))
    lanes.run(COMPUTE, lambda: None)
    streams.now = "caller's"
    lanes.settle()
    assert all(stream.synchronized for stream in streams.streams.values())


def test_addresses_of_pinned_pages_are_looked_up_after_every_attach(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page that was replaced may not be pinned any more: no kernel may store there."""
    pinned, world = True, world_of("undo")

    def attributes(address: int) -> Any:
        return SimpleNamespace(devicePointer=address if pinned else 0)

    runtime = SimpleNamespace(pointerGetAttributes=attributes)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=SimpleNamespace(runtime=runtime)))
    _, up = world.start()
    writer: Any = MarkWriter(torch.device("cpu"), SimpleNamespace(function=lambda name: name))  # type: ignore[arg-type]
    up.memory.__dict__["mark_writer"] = writer
    page = up.memory.marker.pages[0]
    assert writer.address(page) == page.ctypes.data
    pinned = False
    up.summary()
    assert writer.address(page) == 0
