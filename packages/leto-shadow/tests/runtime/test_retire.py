"""Real trainers that retire: what they give up, what is checked, and ten lives of one process (I-4, I-7)."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from leto_rmp import Client, PoolConfig, Role, WriterAlive, spawn_manager
from leto_shadow import Context, ContextError, linux, wire
from leto_shadow.run import EXIT_FAILED

Start = Callable[..., Any]

DEADLINE_S = 150.0

COUNTS = """
    import sys, time
    import leto_shadow

    kept = []

    class Counts(leto_shadow.Trainer):
        def prepare(self, ctx):
            print("prepare")

        def build(self, ctx):
            print("build")

        def connect(self, ctx):
            print("connect", ctx.world_id)

        def disconnect(self, ctx):
            print("disconnect", ctx.world_id)

        def retire(self, ctx):
            self.disconnect(ctx)
            return 2

        def train(self, ctx):
            print("train", ctx.generation, flush=True)
            try:
                ctx.exchange(b"summary")
                ctx.resumed(0, "fresh")
                for iteration in range(1 << 60):
                    try:
                        ctx.progress("forward", iteration)
                        if iteration == 0:
                            ctx.metrics(0, began=1.0)
                        {body}
                        time.sleep(0.001)
                    except Exception as error:
                        print("handled", error)
            finally:
                print("left", ctx.generation)

    leto_shadow.run(Counts())
"""


def counting(start: Start, body: str = "pass", source: str = COUNTS) -> Any:
    """A trainer in the middle of generation 1."""
    agent = start(source.format(body=body))
    assert agent.expect(wire.Hello).retires
    agent.climb(port=1)
    promote(agent, 1, 1)
    return agent


def promote(agent: Any, generation: int, world: int) -> None:
    agent.promote(generation=generation, world=world)
    agent.expect(wire.Summary)
    agent.send(wire.Decision(b"go", generation))
    agent.expect(wire.Resumed)
    assert agent.expect(wire.Metrics).values == {"began": 1.0}


def retire(agent: Any, generation: int, level: int = 2) -> None:
    agent.send(wire.Retire(generation))
    assert agent.expect(wire.Released) == wire.Released(generation)
    assert agent.expect(wire.Retired) == wire.Retired(level, generation)


def test_one_process_lives_twice(start: Start) -> None:
    agent = counting(start)
    retire(agent, 1)
    agent.send(wire.Advance(3, 4, "127.0.0.1", 1))
    assert agent.expect(wire.LevelReached) == wire.LevelReached(3, 4), "levels 1 and 2 are kept"
    promote(agent, 5, 4)
    retire(agent, 5)
    agent.send(wire.Stop("enough"))
    status, out, _ = agent.wait()
    assert status == 0
    lives = ["train 1", "left 1", "disconnect 1", "connect 4", "train 5", "left 5", "disconnect 4"]
    assert out.splitlines() == ["prepare", "build", "connect 1", *lives]


def test_who_waits_for_a_decision_retires_at_once(start: Start) -> None:
    agent = start(COUNTS.format(body="pass"))
    agent.expect(wire.Hello)
    agent.climb(port=1)
    agent.promote(generation=1, world=1)
    agent.expect(wire.Summary)
    retire(agent, 1)
    agent.send(wire.Advance(3, 2, "127.0.0.1", 1))
    agent.expect(wire.LevelReached)
    promote(agent, 2, 2)


def test_a_lost_peer_is_told_and_the_fence_is_waited_for(start: Start) -> None:
    source = COUNTS.replace("except Exception as error", "except ValueError as error")
    agent = counting(start, "if iteration == 3: raise RuntimeError('Connection closed by peer')", source)
    lost = agent.expect(wire.PeerLost)
    assert ("Connection closed by peer" in lost.error, lost.generation) == (True, 1)
    retire(agent, 1)


def test_an_error_of_its_own_ends_it_also_while_it_retires(start: Start) -> None:
    source = COUNTS.replace("except Exception as error", "except KeyError as error")
    agent = counting(start, "if iteration == 3: raise ValueError('this script is wrong')", source)
    failed = agent.expect(wire.Failed)
    assert (failed.phase, "this script is wrong" in failed.error) == ("train", True)
    assert agent.wait()[0] == EXIT_FAILED


def test_an_aborted_collective_may_say_what_it_likes(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the runtime itself has taken the communicators away, and torch knows of no process group."""
    monkeypatch.setenv("LETO_BACKEND", "cuda")
    source = COUNTS.replace("except Exception as error", "except KeyError as error")
    lost = "except BaseException: raise ValueError('Default process group has not been initialized')"
    source = source.replace("finally:", f"{lost}\n            finally:")
    retire(counting(start, source=source), 1)


# Nobody can see such a thread from Python before it has had its first turn.
START_RAW = (
    "import _thread as t; runs = t.allocate_lock(); runs.acquire(); "
    "t.start_new_thread(lambda: (runs.release(), time.sleep(60)), ()); runs.acquire()"
)
RAW = f"if iteration == 0: {START_RAW}"
THREAD = (
    "if iteration == 0: import threading as t; t.Thread(target=time.sleep, args=[60], daemon=True).start()"
)
CHILD = "if iteration == 0: import subprocess; kept.append(subprocess.Popen(['sleep', '60']))"


@pytest.mark.parametrize(
    ("body", "replacement", "text"),
    [
        (THREAD, "", "started in train(), runs on"),
        (RAW, "", "does not know run on"),
        (CHILD, "", "started in train(), run on"),
        ("pass", "return 3", "must return 1 or 2"),
        ("pass", f"{START_RAW}; return 2", "does not know run on"),  # found by the second look
        ("pass", "raise ValueError('cannot')", "cannot"),
    ],
    ids=["thread", "raw thread", "process", "level", "late thread", "error"],
)
def test_what_cannot_be_given_up_ends_the_process(
    start: Start, body: str, replacement: str, text: str
) -> None:
    source = COUNTS.replace("return 2", replacement or "return 2")
    agent = counting(start, body, source)
    agent.send(wire.Retire(1))
    if replacement:
        agent.expect(wire.Released)
    failed = agent.expect(wire.Failed)
    assert (failed.phase, text in failed.error) == ("retire", True)
    if body == CHILD:  # as an agent does
        (child,) = re.findall(r"processes \[(\d+)\]", failed.error)
        os.kill(int(child), signal.SIGKILL)
    assert agent.wait()[0] == EXIT_FAILED


# --- retained memory --------------------------------------------------------------------------------

WRITES = """
    import os, time
    import leto_shadow
    from leto_rmp import AllocationSpec, Client, Kind, Role

    class Writes(leto_shadow.Trainer):
        def connect(self, ctx):
            pass

        def meet(self):
            pass

        def retire(self, ctx):
            {retire}
            return 2

        def train(self, ctx):
            client = Client.connect(os.environ["TEST_SOCKET"], timeout_s=150.0)
            client.attach(Role.WRITER, ctx.generation)
            self.pages = client.allocate([AllocationSpec("arena", 1 << 20, Kind.RETAINED)])["arena"].pages
            for iteration in range(1 << 60):
                ctx.progress("forward", iteration)
                self.pages[0] += 1
                self.meet()
                if iteration == 3:
                    ctx.metrics(iteration, began=1.0)
                time.sleep(0.001)

    leto_shadow.run(Writes())
"""

MEETS = WRITES.replace(
    """
        def connect(self, ctx):
            pass

        def meet(self):
            pass
""",
    """
        lives = 0

        def meet(self):
            torch.distributed.all_reduce(torch.ones(1000))
""",
).replace("import leto_shadow\n", "import leto_shadow, torch\n", 1)


@pytest.fixture
def manager(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The socket of a state manager."""
    config = PoolConfig(page_bytes=16384, data_pages=48, tier1_pages=6, tier2_pages=1)
    process = spawn_manager(short_path, "job", 0, config, timeout_s=DEADLINE_S)
    monkeypatch.setenv("TEST_SOCKET", str(process.socket_path))
    yield process.socket_path
    process.kill()


def writing(start: Start, retire: str) -> Any:
    """A trainer that writes, as the writer of generation 1."""
    agent = start(WRITES.format(retire=retire))
    agent.expect(wire.Hello)
    agent.climb(port=1)
    agent.promote()
    agent.expect(wire.Metrics)
    return agent


def test_a_released_trainer_cannot_write_and_its_successor_can(start: Start, manager: Path) -> None:
    agent = writing(start, "del self.pages")
    with Client.connect(manager, timeout_s=DEADLINE_S) as successor:
        successor.attach(Role.OBSERVER, 0)
        assert "memfd:leto:arena" in str(linux.why_it_may_write(agent.process.pid))
        with pytest.raises(WriterAlive):
            successor.become_writer(2)
        retire(agent, 1)
        assert linux.why_it_may_write(agent.process.pid) is None
        successor.become_writer(2)


@pytest.mark.parametrize(
    ("what", "status"),
    [("pass", EXIT_FAILED), ("self.pages[0] = 7", -signal.SIGSEGV), ("self.pages.sum()", -signal.SIGSEGV)],
    ids=["kept", "written", "read"],
)
def test_a_view_of_the_past_ends_the_process(start: Start, manager: Path, what: str, status: int) -> None:
    del manager
    agent = writing(start, what)
    agent.send(wire.Retire(1))
    agent.expect(wire.Released)
    if status == EXIT_FAILED:
        assert "views of" in agent.expect(wire.Failed).error
    assert agent.wait()[0] == status


def test_a_trainer_that_cannot_be_looked_at_counts_as_a_writer() -> None:
    assert "cannot be read" in str(linux.why_it_may_write(2**22 + 1))


# --- collectives that are aborted, and return ---------------------------------------------------------

UPDATES = """
    import os, threading, time
    import torch.distributed as dist
    import leto_shadow
    from leto_rmp import Client, Role
    from leto_rmu import Hyper, ResumableUpdater, Segment, SyncResult, UpdatePlan

    aborted = threading.Event()
    c10d = dist.distributed_c10d
    ctx = None

    def abort():  # NCCL's, played: the collective that waits returns, and says nothing
        print("told before the abort:", ctx._retiring == ctx.generation)
        aborted.set()

    class Updates(leto_shadow.Trainer):
        def connect(self, ctx):
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
            c10d._abort_process_group = abort

        def retire(self, ctx):
            dist.destroy_process_group()
            del self.updater
            return 2

        def train(self, given):
            global ctx
            ctx = given
            client = Client.connect(os.environ["TEST_SOCKET"], timeout_s=150.0)
            client.attach(Role.WRITER, ctx.generation)
            plan = UpdatePlan([Segment("weight", 1000)], config=client.config, grad_numel=1000)
            self.updater = updater = ResumableUpdater(client, plan, barrier={barrier})
            updater.master("weight").fill_(1.0)
            updater.initialize()
            for _ in range(2):
                updater.compute_begins()
                updater.grads.fill_(self.collective())
                updater.step([Hyper(0.1)], b"", lambda: SyncResult(grad_norm=self.collective()))
            raise AssertionError("its world is over")

        def collective(self):
            if self.updater.iteration == 0:
                return 3.0
            if not aborted.is_set():
                ctx.metrics(1, waits=1.0)
            assert aborted.wait(150.0)
            return float("nan")

    leto_shadow.run(Updates())
"""


@pytest.mark.parametrize("barrier", ["ctx.barrier", "lambda: None"], ids=["product", "mutant"])
def test_what_aborted_collectives_leave_is_not_committed(
    start: Start, manager: Path, monkeypatch: pytest.MonkeyPatch, barrier: str
) -> None:
    """The trainer is told first. NCCL's part is played, with a gloo group of one: gloo itself would raise."""
    from leto_rmu import ResumableUpdater, Segment, UpdatePlan, decide

    monkeypatch.setenv("LETO_BACKEND", "cuda")
    agent = start(UPDATES.format(barrier=barrier))
    agent.expect(wire.Hello)
    agent.climb(port=1)
    agent.promote()
    assert agent.expect(wire.Metrics).values == {"waits": 1.0}
    agent.send(wire.Retire(1))
    assert agent.expect(wire.Released) == wire.Released(1)
    assert agent.expect(wire.Retired) == wire.Retired(2, 1)
    agent.send(wire.Stop("enough"))
    status, out, _ = agent.wait()
    assert (status, out) == (0, "told before the abort: True\n")
    with Client.connect(manager, timeout_s=DEADLINE_S) as successor:
        successor.attach(Role.WRITER, 2)
        plan = UpdatePlan([Segment("weight", 1000)], config=successor.config, grad_numel=1000)
        updater = ResumableUpdater(successor, plan, barrier=lambda: None)
        cell = updater.marker.rank
        assert cell is not None
        found = (cell.phase.name, cell.iteration)
        assert found == (("PROTECTED", 1) if barrier == "ctx.barrier" else ("ITERATION", 2))
        assert updater.recover(decide([updater.summary()])).action == "restart"
        assert updater.master("weight").isfinite().all() == (barrier == "ctx.barrier")


def test_only_gloo_carries_the_barrier_of_an_update(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch.distributed as dist

    monkeypatch.setattr(dist, "get_backend", lambda group: group)
    monkeypatch.setattr(dist, "barrier", lambda *, group: calls.append(group))
    monkeypatch.setattr(Context, "progress", lambda self, phase, iteration: calls.append(phase.name))
    calls: list[Any] = []
    ctx = Context.__new__(Context)
    ctx.iteration = 3
    ctx.barrier("gloo")  # type: ignore[arg-type]
    assert calls == ["BARRIER", "gloo", "UPDATE"]
    for backend in ("nccl", "cpu:gloo,cuda:nccl"):
        with pytest.raises(ContextError, match=f"expected a group of gloo, found {backend}, whose"):
            ctx.barrier(backend)  # type: ignore[arg-type]
    assert calls.count("UPDATE") == 1


Holds = tuple[list[str], int, int, int]
PF_EXITING = 0x4


def threads(pid: int) -> int:
    """Those that are not on their way out: who joins a thread goes on before the kernel has forgotten it."""
    count = 0
    for thread in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            flags = (thread / "stat").read_text().rpartition(")")[2].split()[6]
            count += not int(flags) & PF_EXITING
    return count


def holds(pid: int) -> Holds:
    """Descriptors (what they are), mappings of retained memory, threads, resident KiB."""
    folder = Path(f"/proc/{pid}")
    names = []
    for entry in os.scandir(folder / "fd"):
        with contextlib.suppress(FileNotFoundError):  # closed since it was listed
            names.append(os.readlink(entry.path))
    status = dict(line.split(":", 1) for line in (folder / "status").read_text().splitlines())
    mapped = (folder / "maps").read_text().count("memfd:leto:")
    return (
        sorted(name.partition("[")[0] for name in names),
        mapped,
        threads(pid),
        int(status["VmRSS"].split()[0]),
    )


def settled(pid: int, like: list[Holds]) -> Holds:
    """What the process holds, as soon as it is what it held once before: a thread may be on its way out, now
    or then."""
    deadline = time.monotonic() + DEADLINE_S
    while (found := holds(pid))[:3] not in [one[:3] for one in like] and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ten_lives_leave_nothing_behind(start: Start, short_path: Path) -> None:
    """A pair of processes through ten generations: descriptors, mappings, threads, memory. In the eleventh
    they forget to leave their process groups."""
    import torch.distributed as dist

    config = PoolConfig(page_bytes=16384, data_pages=48, tier1_pages=6, tier2_pages=1)
    managers = [
        spawn_manager(short_path / str(rank), "job", rank, config, timeout_s=DEADLINE_S) for rank in range(2)
    ]
    source = MEETS.format(
        retire="del self.pages; self.lives += 1; self.lives > 10 or self.disconnect(ctx)"
    ).replace('os.environ["TEST_SOCKET"]', f'"{short_path}/" + str(ctx.rank) + "/manager.sock"')
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    agents = [start(source, rank=rank, world_size=2) for rank in range(2)]
    early: list[list[Holds]] = [[], []]
    tenth: list[Holds] = []
    try:
        for generation in range(1, 12):
            for agent in agents:
                agent.send(wire.Advance(3, generation, "127.0.0.1", store.port))
            for agent in agents:
                while agent.channel.recv(DEADLINE_S) != wire.LevelReached(3, generation):
                    pass
                agent.promote(generation=generation, world=generation)
            for agent in agents:
                agent.expect(wire.Metrics)
            for agent in agents:
                agent.send(wire.Retire(generation))
            for agent in agents:
                while isinstance(message := agent.channel.recv(DEADLINE_S), (wire.PeerLost, wire.Released)):
                    pass
                if generation == 11:
                    assert "has not left the process groups" in message.error
                else:
                    assert message == wire.Retired(2, generation)
            if generation in (2, 3):
                for agent, found in zip(agents, early, strict=True):
                    found.append(holds(agent.process.pid))
            elif generation == 10:
                tenth = [settled(agent.process.pid, one) for agent, one in zip(agents, early, strict=True)]
    finally:
        for manager in managers:
            manager.kill()
    assert [agent.wait()[0] for agent in agents] == [EXIT_FAILED] * 2
    for (second, third), late in zip(early, tenth, strict=True):
        assert late[:3] in (second[:3], third[:3]), "descriptors, mappings, threads"
        assert late[3] < third[3] + (32 << 10), f"resident memory grew from {third[3]} to {late[3]} KiB"
