"""Real trainer processes, driven through levels, promotion, drills and the death of their agent."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from leto_shadow import wire
from leto_shadow.drills import Drill
from leto_shadow.progress import Phase
from leto_shadow.run import EXIT_AGENT_GONE, EXIT_FAILED, EXIT_PROTOCOL, EXIT_USAGE

Start = Callable[..., object]

PLAIN = """
    import leto_shadow

    class Plain(leto_shadow.Trainer):
        def prepare(self, ctx):
            print("prepare", ctx.rank, ctx.world_size, ctx.args)

        def build(self, ctx):
            print("build")

        def connect(self, ctx):
            print("connect", ctx.world_id)

        def disconnect(self, ctx):
            print("disconnect", ctx.world_id)

        def train(self, ctx):
            print("train", ctx.generation, ctx.manager_socket)
            decision = ctx.exchange(b"summary")
            ctx.resumed(5, "in-place", attach=0.25)
            for iteration in range(5, 8):
                ctx.progress("forward", iteration)
                ctx.point("forward", iteration)
                ctx.metrics(iteration, loss=iteration / 2)
            print("decision", decision.decode())

    leto_shadow.run(Plain())
    print("the script goes on")
"""


def test_a_whole_life(start: Start) -> None:
    agent = start(PLAIN)
    assert agent.expect(wire.Hello) == wire.Hello(agent.process.pid, 0, wire.PROTOCOL)
    agent.climb(world=4, port=1)
    agent.promote(generation=2, world=4)
    assert agent.expect(wire.Summary) == wire.Summary(b"summary", 2)
    assert agent.progress().phase is Phase.EXCHANGE
    agent.send(wire.Decision(b"go", 2))
    assert agent.expect(wire.Resumed) == wire.Resumed(5, "in-place", {"attach": 0.25}, 2)
    for iteration in range(5, 8):
        assert agent.expect(wire.Metrics) == wire.Metrics(iteration, {"loss": iteration / 2}, 2)
    assert agent.expect(wire.Finished) == wire.Finished(7)
    status, out, err = agent.wait()
    assert (status, err) == (0, "")
    assert out.splitlines() == [
        "prepare 0 1 ['--flag', 'value']",
        "build",
        "connect 4",
        "train 2 /run/manager.sock",
        "decision go",
        "the script goes on",
    ]
    assert agent.progress().phase is Phase.DONE


HINTS = """
    import leto_shadow

    class Hinting(leto_shadow.Trainer):
        def prepare(self, ctx):
            try:
                ctx.hints
            except leto_shadow.ContextError as error:
                print(error)

        def connect(self, ctx):
            pass

        def train(self, ctx):
            print(ctx.hints)
            ctx.hints["no"] = 1.0
            print(ctx.hints)
            ctx.exchange(b"")
            ctx.resumed(0, "in-place")
            ctx.hint(cache_bytes=7, other=2.5)

    leto_shadow.run(Hinting())
"""


def test_hints_come_with_the_promotion_and_new_ones_go_to_the_agent(start: Start) -> None:
    agent = start(HINTS)
    agent.expect(wire.Hello)
    agent.climb(port=1)
    agent.promote(generation=3, hints={"cache_bytes": 5.0})
    agent.expect(wire.Summary)
    agent.send(wire.Decision(b"", 3))
    agent.expect(wire.Resumed)
    assert agent.expect(wire.Hint) == wire.Hint({"cache_bytes": 7.0, "other": 2.5}, 3)
    agent.expect(wire.Finished)
    status, out, err = agent.wait()
    assert (status, err) == (0, "")
    known = "{'cache_bytes': 5.0}"
    assert out.splitlines() == ["hints is known after promotion (Trainer.train)", known, known]


HINTS_TOO_MANY = """
    import leto_shadow

    class Hinting(leto_shadow.Trainer):
        def connect(self, ctx):
            pass

        def train(self, ctx):
            ctx.exchange(b"")
            ctx.resumed(0, "in-place")
            ctx.hint(**{f"h{k}": k for k in range(31)})
            for wrong in ({"x": "abc"}, {"x": 10**400}, {"one_more": 1}, {f"n{k}": 1 for k in range(33)}):
                try:
                    ctx.hint(**wrong)
                except (ValueError, OverflowError) as error:
                    print(error)
            ctx.hint(old=2)

    leto_shadow.run(Hinting())
"""


def test_hints_that_are_no_numbers_or_too_many_are_refused_and_none_of_them_is_left(start: Start) -> None:
    """An agent would end the trainer for them, and every trainer after it that does the same."""
    agent = start(HINTS_TOO_MANY)
    agent.expect(wire.Hello)
    agent.climb(port=1)
    agent.promote(generation=3, hints={"old": 5.0})
    agent.expect(wire.Summary)
    agent.send(wire.Decision(b"", 3))
    agent.expect(wire.Resumed)
    assert 1 + len(agent.expect(wire.Hint).values) == 32 == wire.HINTS_MAX
    assert agent.expect(wire.Hint) == wire.Hint({"old": 2.0}, 3)
    agent.expect(wire.Finished)
    status, out, err = agent.wait()
    assert (status, err) == (0, "")
    string, huge, one_more, all_at_once = out.splitlines()
    assert "'abc'" in string
    assert "too large" in huge
    assert one_more.startswith("expected at most 32 names of hints of a rank, found 33: h0, ")
    assert "found 65" in all_at_once


PARKS = PLAIN.replace(
    "def train(self, ctx):",
    """def build(self, ctx):
            for use in (lambda: ctx.waits, lambda: ctx.parked(1)):
                try:
                    use()
                except leto_shadow.ContextError as error:
                    print(error)

        def connect(self, ctx):
            try:
                ctx.parked(-1)
            except ValueError as error:
                print(error)
            if ctx.waits:
                ctx.parked(100 + ctx.world_id)

        def train(self, ctx):""",
)


def test_only_who_waits_parks_and_the_agent_hears_of_it(start: Start) -> None:
    agent = start(PARKS)
    agent.expect(wire.Hello)
    for to, reached in (
        (wire.Advance(3, 4, "127.0.0.1", 1, True), [(1, 0), (2, 0), (3, 104)]),
        (wire.Advance(3, 4, "127.0.0.1", 1, True), [(3, 104)]),
        (wire.Advance(2, 5), [(2, 0)]),
        (wire.Advance(3, 6, "127.0.0.1", 1, False), [(3, 0)]),
        (wire.Advance(3, 7, "127.0.0.1", 1, True), [(3, 107)]),
    ):
        agent.send(to)
        for level, parked in reached:
            assert agent.expect(wire.LevelReached) == wire.LevelReached(level, to.world_id, parked)
    agent.send(wire.Stop("enough"))
    status, out, _err = agent.wait()
    assert status == 0
    assert "known from level 3 on" in out
    assert "memory is parked at level 3" in out
    assert out.count("expected 0 bytes or more, found -1") == 3


SPARE = PLAIN.replace("def prepare", "spare_level = 1\n\n        def prepare").replace(
    "ctx.rank, ctx.world_size", "ctx.local_rank, ctx.world_size"
)


def test_a_trainer_of_a_spare_prepares_ahead_and_takes_its_rank_later(start: Start, tmp_path: Path) -> None:
    log = tmp_path / "rank5.log"
    agent = start(SPARE, rank=-2, world_size=6)
    assert agent.expect(wire.Hello) == wire.Hello(agent.process.pid, -1, wire.PROTOCOL)
    agent.send(wire.Advance(2, 0))
    assert agent.expect(wire.LevelReached) == wire.LevelReached(1, 0), "as far as its script allows"
    agent.send(wire.TakeRank(5, str(log)))
    agent.send(wire.Advance(1, 3))
    assert agent.expect(wire.LevelReached) == wire.LevelReached(1, 3), "it is done already"
    agent.send(wire.Advance(3, 3, "127.0.0.1", 1))
    assert [agent.expect(wire.LevelReached).level for _ in range(2)] == [2, 3]
    agent.promote(generation=2, world=3)
    assert agent.expect(wire.Summary) == wire.Summary(b"summary", 2)
    agent.send(wire.Decision(b"go", 2))
    agent.expect(wire.Resumed)
    for _ in range(5, 8):
        agent.expect(wire.Metrics)
    agent.expect(wire.Finished)
    assert agent.wait() == (0, "prepare 1 6 ['--flag', 'value']\n", "")
    assert log.read_text().split()[:3] == ["build", "connect", "3"]


@pytest.mark.parametrize("taken", [False, True])
def test_a_rank_is_known_when_there_is_one(start: Start, tmp_path: Path, taken: bool) -> None:
    """A script that promises too much is told; once the rank is given all is as ever, the environment too."""
    script = """
        import os
        import leto_shadow

        class Hasty(leto_shadow.Trainer):
            spare_level = 2

            def build(self, ctx):
                assert os.environ["RANK"] == os.environ["LETO_RANK"] == str(ctx.rank)

        leto_shadow.run(Hasty())
    """
    agent = start(script, rank=-1, world_size=2)
    agent.expect(wire.Hello)
    if taken:
        agent.send(wire.TakeRank(1, str(tmp_path / "log")))
    agent.send(wire.Advance(2, 0))
    assert agent.expect(wire.LevelReached) == wire.LevelReached(1, 0)
    if taken:
        assert agent.expect(wire.LevelReached) == wire.LevelReached(2, 0)
        agent.send(wire.TakeRank(0, str(tmp_path / "log")))
        assert "no message for a shadow" in agent.expect(wire.Failed).error, "a rank is given once"
    else:
        failed = agent.expect(wire.Failed)
        assert failed.phase == "build"


def test_levels_one_at_a_time_repeated_and_given_up(start: Start) -> None:
    """Level 3 is left for another world or a lower level, through disconnect; an advance to the present level
    is answered."""
    agent = start(PLAIN)
    agent.expect(wire.Hello)
    for message, answer in [
        (wire.Advance(1, 1), wire.LevelReached(1, 1)),
        (wire.Advance(2, 1), wire.LevelReached(2, 1)),
        (wire.Advance(1, 1), wire.LevelReached(2, 1)),
        (wire.Advance(3, 1, "127.0.0.1", 1), wire.LevelReached(3, 1)),
        (wire.Advance(3, 1, "127.0.0.1", 1), wire.LevelReached(3, 1)),
        (wire.Advance(2, 2), wire.LevelReached(2, 2)),
        (wire.Advance(3, 3, "127.0.0.1", 1), wire.LevelReached(3, 3)),
        (wire.Advance(3, 4, "127.0.0.1", 1), wire.LevelReached(3, 4)),
    ]:
        agent.send(message)
        assert agent.expect(wire.LevelReached) == answer
    agent.send(wire.Stop("enough"))
    status, out, err = agent.wait()
    assert (status, "stopped by the agent: enough" in err) == (0, True)
    assert out.splitlines()[2:] == ["connect 1", "disconnect 1", "connect 3", "disconnect 3", "connect 4"]


@pytest.mark.parametrize(
    "message",
    [wire.Promote(1, "/x", 1), wire.Decision(b"", 1), wire.Advance(4, 1)],
    ids=["promotion below level 3", "decision to a shadow", "no such level"],
)
def test_a_message_that_does_not_fit_ends_the_trainer(start: Start, message: wire.AgentMessage) -> None:
    agent = start(PLAIN)
    agent.expect(wire.Hello)
    agent.climb(level=2)
    agent.send(message)
    assert agent.expect(wire.Failed).phase == "protocol"
    assert agent.wait()[0] == EXIT_PROTOCOL


def test_promotion_in_another_world_is_refused(start: Start) -> None:
    agent = start(PLAIN)
    agent.expect(wire.Hello)
    agent.climb(world=1, port=1)
    agent.promote(world=2)
    assert "world 2" in agent.expect(wire.Failed).error
    assert agent.wait()[0] == EXIT_PROTOCOL


def test_a_decision_of_another_generation_is_not_taken(start: Start) -> None:
    agent = start(PLAIN)
    agent.expect(wire.Hello)
    agent.climb(port=1)
    agent.promote(generation=3)
    agent.expect(wire.Summary)
    agent.send(wire.Decision(b"old", 2))
    failed = agent.expect(wire.Failed)
    assert failed.phase == "train"
    assert "generation 2, expected 3" in failed.error
    assert agent.wait()[0] == EXIT_FAILED


def test_garbage_from_the_agent_ends_the_trainer(start: Start) -> None:
    agent = start(PLAIN)
    agent.expect(wire.Hello)
    agent.socket.send(b"\xff" * 64)
    status, _, err = agent.wait()
    assert (status, "cannot read" in err) == (EXIT_PROTOCOL, True)


FAILS = """
    import sys
    import leto_shadow

    class Fails(leto_shadow.Trainer):
        def build(self, ctx):
            {build}

    leto_shadow.run(Fails())
"""


@pytest.mark.parametrize(
    ("statement", "error", "secondary"),
    [
        ("raise ValueError('x' * 20000 + 'the end')", "the end", False),
        ("sys.exit(0)", "must return from its methods", False),
        ("raise RuntimeError('[gloo] Connection closed by peer [127.0.0.1]:3')", "closed by peer", True),
        ("raise RuntimeError('[gloo] Timed out waiting 3000ms for recv operation')", "3000ms", True),
        ("raise RuntimeError('Application timeout caused pair closure')", "pair closure", True),
        ("raise ValueError('Timed out waiting 3000ms')", "3000ms", False),
        ("ctx.generation", "known after promotion", False),
        ("ctx.store", "known from level 3 on", False),
    ],
)
def test_an_error_is_reported_with_the_end_of_its_traceback(
    start: Start, statement: str, error: str, secondary: bool
) -> None:
    agent = start(FAILS.format(build=statement))
    agent.expect(wire.Hello)
    agent.send(wire.Advance(2, 1))
    agent.expect(wire.LevelReached)
    failed = agent.expect(wire.Failed)
    assert (failed.phase, error in failed.error, failed.secondary) == ("build", True, secondary)
    assert len(failed.error) <= 6000
    status, _, err = agent.wait()
    assert status == EXIT_FAILED
    assert error in err or statement == "sys.exit(0)"


def test_a_trainer_without_train_says_so(start: Start) -> None:
    source = FAILS.format(build="pass").replace(
        "leto_shadow.run", "Fails.connect = Fails.build; leto_shadow.run"
    )
    agent = start(source)
    agent.expect(wire.Hello)
    agent.climb(port=1)
    agent.promote()
    assert "must override Trainer.train" in agent.expect(wire.Failed).error
    assert agent.wait()[0] == EXIT_FAILED


# --- drills -------------------------------------------------------------------------------------------------


def at_drill(start: Start, kind: str) -> object:
    agent = start(PLAIN)
    agent.expect(wire.Hello)
    agent.climb(port=1)
    drill = Drill("d1", kind, rank=0, iteration=6, point="forward")
    agent.promote(drills=(Drill("other", "kill", rank=1, iteration=5), drill))
    agent.expect(wire.Summary)
    agent.send(wire.Decision(b"", 1))
    agent.expect(wire.Resumed)
    agent.expect(wire.Metrics)
    assert agent.expect(wire.DrillFired) == wire.DrillFired("d1", 6)
    return agent


def test_a_kill_drill_is_on_the_wire_before_it_kills(start: Start) -> None:
    agent = at_drill(start, "kill")
    status, out, _ = agent.wait()
    assert status == -signal.SIGKILL
    assert "drill d1: kill at forward of iteration 6" in out


def wait_until_it_spins(pid: int) -> None:
    """Return when the process has used 0.2 s of CPU time since the call: it is in the endless loop."""

    def cpu_s() -> float:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) / os.sysconf("SC_CLK_TCK")

    begun, deadline = cpu_s(), time.monotonic() + 150
    while cpu_s() < begun + 0.2:
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_hang_drill_keeps_the_gil_and_the_progress_counter_still(start: Start) -> None:
    agent = at_drill(start, "hang")
    wait_until_it_spins(agent.process.pid)
    agent.send(wire.Stop("please"))  # the reader thread would obey this at once if it could get the GIL
    assert not select.select([agent.socket], [], [], 2.0)[0]
    assert agent.process.poll() is None
    record = agent.progress()
    assert (record.phase, record.iteration) == (Phase.FORWARD, 6)
    agent.process.kill()
    assert agent.wait()[0] == -signal.SIGKILL


def test_a_manager_drill_waits_for_the_agent(start: Start) -> None:
    agent = at_drill(start, "kill_manager")
    assert not select.select([agent.socket], [], [], 0.5)[0]
    agent.send(wire.Stop("fenced"))
    assert agent.wait()[0] == 0


def test_an_injected_hang_stops_everything(start: Start) -> None:
    agent = start(PLAIN)
    agent.expect(wire.Hello)
    agent.send(wire.Inject("hang"))
    agent.send(wire.Advance(1, 1))
    assert not select.select([agent.socket], [], [], 2.0)[0]
    assert agent.process.poll() is None


# --- the death of the agent ---------------------------------------------------------------------------------


def test_a_shadow_that_waits_sees_the_hang_up(start: Start) -> None:
    agent = start(PLAIN)
    agent.expect(wire.Hello)
    agent.climb(level=2)
    agent.socket.shutdown(2)
    status, _, err = agent.wait()
    assert (status, "the agent is gone" in err) == (EXIT_AGENT_GONE, True)


MUTANT = """
    import sys
    sys.modules["leto_shadow.run"]._die_with_agent = lambda sock: None
"""

AGENT = """
    import os, subprocess, sys, signal, socket
    sys.path[:0] = {path!r}
    from pathlib import Path
    from conftest import FakeAgent
    agent = FakeAgent(Path(sys.argv[1]), Path(sys.argv[2]))
    from leto_shadow import wire
    agent.expect(wire.Hello)
    agent.send(wire.Inject("hang"))
    print(agent.process.pid, flush=True)
    signal.pause()
"""


def outlives_its_agent(tmp_path: Path, trainer_source: str, wait_s: float) -> bool:
    """SIGKILL the agent's process while its trainer spins in C, where no Python code of it can run."""
    (tmp_path / "trainer.py").write_text(textwrap.dedent(trainer_source))
    source = textwrap.dedent(AGENT).format(path=[str(Path(__file__).parent)])
    command = [sys.executable, "-c", source, tmp_path / "trainer.py", tmp_path]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as agent:
        assert agent.stdout is not None
        try:
            pidfd = os.pidfd_open(int(agent.stdout.readline()))
        finally:
            agent.kill()
    outlived = not select.select([pidfd], [], [], wait_s)[0]
    if outlived:
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    os.close(pidfd)
    return outlived


def test_a_trainer_that_keeps_the_gil_dies_with_its_agent(tmp_path: Path) -> None:
    assert not outlives_its_agent(tmp_path, PLAIN, 150.0)


def test_the_test_above_notices_when_the_kernel_is_not_asked(tmp_path: Path) -> None:
    """Without the death signal the reader thread is the only guard, and it needs the GIL."""
    broken = PLAIN.replace("import leto_shadow\n", f"import leto_shadow\n{MUTANT}", 1)
    assert outlives_its_agent(tmp_path, broken, 2.0)


def test_children_of_a_trainer_do_not_hold_its_socket(start: Start) -> None:
    source = """
        import os, subprocess
        import leto_shadow

        def sockets():
            with os.scandir("/proc/self/fd") as entries:
                return sum(os.readlink(entry.path).startswith("socket:") for entry in entries)

        class Forks(leto_shadow.Trainer):
            def prepare(self, ctx):
                assert "LETO_AGENT_FD" not in os.environ
                pid = os.fork()
                if pid == 0:
                    os._exit(sockets())
                print("fork", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                ls = subprocess.run(["ls", "-l", "/proc/self/fd"], capture_output=True, close_fds=False)
                print("exec", ls.stdout.count(b"socket:"))
                print("self", sockets(), flush=True)

        leto_shadow.run(Forks())
    """
    agent = start(source)
    agent.expect(wire.Hello)
    agent.climb(level=1)
    agent.send(wire.Stop("done"))
    assert agent.wait()[1].splitlines() == ["fork 0", "exec 0", "self 1"]


# --- two ranks ----------------------------------------------------------------------------------------------

PAIR = """
    import torch
    import torch.distributed as dist
    import leto_shadow

    class Pair(leto_shadow.Trainer):
        def train(self, ctx):
            total = torch.tensor([1.0 + ctx.rank])
            dist.all_reduce(total)
            ctx.metrics(0, total=total.item(), world=ctx.world_id)

    leto_shadow.run(Pair())
"""


def test_two_ranks_form_their_world_leave_it_and_form_the_next(start: Start) -> None:
    """The default connect and disconnect, on one store for two worlds: keys of the first do not disturb the
    second."""
    import torch.distributed as dist

    store = dist.TCPStore(
        "127.0.0.1", 0, is_master=True, wait_for_workers=False
    )  # as the agent of node rank 0
    pair = [start(PAIR, rank=rank, world_size=2) for rank in range(2)]
    for agent in pair:
        agent.expect(wire.Hello)
        agent.send(wire.Advance(3, 1, "127.0.0.1", store.port))
    for agent in pair:
        assert [agent.expect(wire.LevelReached).level for _ in range(3)] == [1, 2, 3]
    for agent in pair:
        agent.send(wire.Advance(2, 2))
        agent.send(wire.Advance(3, 2, "127.0.0.1", store.port))
    for agent in pair:
        for level in (2, 3):
            assert agent.expect(wire.LevelReached) == wire.LevelReached(level, 2)
        agent.promote(world=2)
    for agent in pair:
        assert agent.expect(wire.Metrics).values == {"total": 3.0, "world": 2.0}
        agent.expect(wire.Finished)
        status, _, err = agent.wait()
        assert status == 0, err


# --- outside of Leto ----------------------------------------------------------------------------------------


def outside(tmp_path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "mine.py").write_text(textwrap.dedent(PLAIN))
    clean = {name: value for name, value in os.environ.items() if not name.startswith("LETO_")}
    command = [sys.executable, str(tmp_path / "mine.py")]
    return subprocess.run(
        command, env={**clean, **environment}, capture_output=True, text=True, timeout=150, check=False
    )


def test_a_trainer_started_by_hand_says_how_to_start_it(tmp_path: Path) -> None:
    result = outside(tmp_path)
    assert (result.returncode, result.stdout) == (EXIT_USAGE, "")
    assert "leto run --nproc-per-node 2 mine.py" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("fd", ["77", "-1", "x"])
def test_descriptors_that_are_none_are_named(tmp_path: Path, fd: str) -> None:
    result = outside(tmp_path, LETO_AGENT_FD=fd, LETO_PROGRESS_FD=fd)
    assert result.returncode == EXIT_USAGE
    assert "cannot be used" in result.stderr
    assert "Traceback" not in result.stderr
