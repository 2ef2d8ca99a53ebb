"""Ops declare all that they write; streams are interleaved without deadlock; faults do what they say."""

from __future__ import annotations

import contextlib
import os
import signal
from collections import Counter

import numpy as np
import pytest
from rmu_lab import LabMemory, Pool, World, loss_patterns

from leto_rmu import OP_NAMES, SGD, Executor, Op, ProtocolError, Segment
from leto_rmu.faults import StopAt, Stopped, at, tear
from leto_rmu.update import ChunkTransactions


class Auditor(Executor):
    """Compare memory around every op with the write set that it declares."""

    def __init__(self, memory: LabMemory) -> None:
        self.memory, self.names = memory, Counter()

    def run(self, op: Op) -> None:
        before = self.memory.snapshot()
        op.apply()
        self.names[op.name] += 1
        claimed = [(a.__array_interface__["data"][0], a.nbytes) for a in op.writes]
        for array, old in zip(self.memory._arrays(), before.arrays, strict=True):
            base = array.__array_interface__["data"][0]
            for byte in np.flatnonzero(array.reshape(-1) != old.reshape(-1)):
                address = base + int(byte)
                assert any(a <= address < a + n for a, n in claimed), f"{op} wrote outside its write set"


COPIED = (Segment("a", 100, 0, 3, 0), Segment("b", 77, 1, 103, 100), Segment("c", 190, 0, 190, 177))


@pytest.mark.parametrize(
    "world",
    [
        World(segments=COPIED, model_bytes=1024),
        World(optimizer=SGD(), pool=Pool(tier2_pages=0, data_pages=7)),
    ],
)
def test_every_write_is_declared(world: World) -> None:
    memory, up = world.start()
    auditor = Auditor(memory)
    up.executor = auditor
    up.initialize(0, world.job(0))
    for s in world.plan.segments:
        up.master(s.name).copy_(world.initial(s.name))
    up.initialize(0, world.job(0))
    world.train(up, 2)
    for stop in range(0, 60, 3):
        up.executor = StopAt(stop, seed=stop)
        with contextlib.suppress(Stopped):
            world.iterate(up)
        memory.lose(loss_patterns(world, np.random.default_rng(stop))["one of U and data"], seed=stop)
        up = world.updater(memory, auditor)
        from leto_rmu import decide

        up.recover(decide([up.summary()]))
        world.check(memory, up)
    expected = OP_NAMES - {"recompute"} - (set() if world.pool.tier2_pages else {"tier2", "copy"})
    assert set(auditor.names) == expected, "every named op occurs, and no other"


def test_number_of_ops_is_deterministic() -> None:
    counts = set()
    for seed in range(3):
        world = World(seed=seed)
        _memory, up = world.start()
        for _ in range(3):
            counter = StopAt()
            up.executor = counter
            world.iterate(up)
            counts.add(counter.count)
    assert counts == {49}


def test_three_groups_are_in_flight_and_four_buffers_suffice() -> None:
    """Random orders have prefetch, compute and drain work on three groups at once, and never stop."""

    class Shuffled(Executor):
        def __init__(self, seed: int) -> None:
            self.rng, self.together = np.random.default_rng(seed), Counter()

        def choose(self, ready: list[str]) -> int:
            return int(self.rng.integers(len(ready)))

        def run(self, op: Op) -> None:
            groups = {o.group for o in (op, *self.in_flight)}
            self.together[len(groups)] += 1
            op.apply()

    world = World(pool=Pool(data_pages=3), segments=World().plan.segments)  # six groups of one chunk
    memory, up = world.start()
    reached = Counter()
    for seed in range(40):
        up.executor = executor = Shuffled(seed)
        world.iterate(up)
        reached += executor.together
        world.check(memory, up)
    assert reached[3] > 50


def test_streams_that_wait_for_each_other_are_reported() -> None:
    def stuck():  # type: ignore[no-untyped-def]
        yield lambda: False

    with pytest.raises(ProtocolError, match="wait for each other"):
        Executor().drive({"a": stuck(), "b": stuck()})


def test_two_groups_cannot_claim_one_buffer() -> None:
    from leto_rmu.update import OpenGroup

    world = World()
    _, up = world.start()
    with pytest.raises(ProtocolError, match="claim one parity buffer"):
        ChunkTransactions(
            up.memory,
            up.marker,
            iteration=0,
            step=1,
            hypers=world.hypers(0),
            sync=world.sync(0),
            open_groups={0: OpenGroup(2, 1, False), 1: OpenGroup(0, 1, True)},
        )


def test_unknown_op_names_are_refused() -> None:
    with pytest.raises(ProtocolError, match="unknown operation"):
        Op("scribble", None, None, (), lambda: None)


def test_tear_writes_only_mixtures() -> None:
    target = np.zeros(300, np.uint8)
    op = Op("undo", 1, 2, (target[:200], target[200:]), lambda: target.fill(255))
    mixed = 0
    for seed in range(60):
        target[:] = 0
        tear([op], np.random.default_rng(seed))
        assert set(target.tolist()) <= {0, 255}
        mixed += 0 < np.count_nonzero(target) < 300
    assert mixed > 30
    assert str(op) == "undo group=1 chunk=2 iteration=-1"


def test_match_by_name_and_place() -> None:
    op = Op("undo", 1, 2, (), lambda: None, 7)
    assert at("undo")(op)
    assert at("undo", group=1, chunk=2, iteration=7)(op)
    assert at()(op)
    assert not at("update")(op)
    assert not at("undo", group=0)(op)
    assert not at("undo", chunk=1)(op)
    assert not at("undo", iteration=8)(op)


def test_tear_and_kill_reports_first_and_dies_torn(tmp_path) -> None:  # type: ignore[no-untyped-def]
    """In a child process: the report is written before memory is touched, then SIGKILL."""
    import subprocess
    import sys

    script = f"""
import mmap, numpy as np
from leto_rmu import Executor, Op
from leto_rmu.faults import TearAndKill, at
file = open({str(tmp_path / "memory")!r}, "w+b"); file.truncate(4096)
memory = np.frombuffer(mmap.mmap(file.fileno(), 4096), np.uint8)
def before():
    assert not memory.any()
    print("fired", flush=True)
executor = TearAndKill(Executor(), match=at("update", chunk=1), seed=3, before=before)
executor.run(Op("update", 0, 0, (memory[:1],), lambda: None))
executor.run(Op("update", 0, 1, (memory,), lambda: memory.fill(255)))
print("survived")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert done.stdout == "fired\n"
    left = (tmp_path / "memory").read_bytes()
    assert set(left) <= {0, 255}
    assert os.path.getsize(tmp_path / "memory") == 4096
