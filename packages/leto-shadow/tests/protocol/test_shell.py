"""Pieces of the shell with real processes, keys and clocks."""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import zmq

from leto_shadow import linux, reactor, wire
from leto_shadow.agent_actions import SpawnTrainer
from leto_shadow.agent_main import Agent
from leto_shadow.agent_options import parse
from leto_shadow.agent_shell import AgentShell
from leto_shadow.devices import HostDevice
from leto_shadow.helper_messages import (
    CloseWorldStore,
    Decided,
    DecideOn,
    OpenWorldStore,
    StoreOpened,
    Unusable,
)
from leto_shadow.helper_process import HelperProcess
from leto_shadow.processes import TrainerProcess, trainer_environment
from leto_shadow.run import EXIT_AGENT_GONE
from leto_shadow.transport import AgentKeys, AgentSocket, CoordinatorSocket, make_keys

VALUES = {"LETO_RANK": "1", "LETO_WORLD_SIZE": "2", "LETO_LOCAL_RANK": "1", "LETO_LOCAL_WORLD_SIZE": "2"}

TREE = """
import os, subprocess, sys, time
sleep = [sys.executable, "-S", "-c", "import time; time.sleep(600)"]
subprocess.Popen(sleep)                               # a child in the trainer's group
subprocess.Popen(sleep, start_new_session=True)       # one that left it
if os.fork() == 0:                                    # and an orphan: its parent ends at once
    subprocess.Popen(sleep, start_new_session=True)
    os._exit(0)
os.wait()
print("ready", flush=True)
time.sleep(600)
"""


DEADLINE_S = 100.0


def until(what: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while not (found := what()):
        assert time.monotonic() < deadline, "never came to pass"
        time.sleep(0.01)
    return found


def test_a_trainers_end_is_the_end_of_all_that_it_started(tmp_path: Path) -> None:
    """In a process of its own, because subreaping would change this one for good."""
    code = f"""
import os, select, sys, time
sys.path[:0] = {sys.path!r}
from pathlib import Path
from leto_shadow import linux
from leto_shadow.processes import TrainerProcess
linux.become_subreaper()
log = Path({str(tmp_path / "log")!r})
trainer = TrainerProcess(1, 1, ["-c", {TREE!r}], dict(os.environ), log, "tag-1")
other = TrainerProcess(2, 0, ["-c", {TREE!r}], dict(os.environ), log.with_suffix(".2"), "tag-2")
deadline = time.monotonic() + 150
while not all(p.exists() and p.read_text() for p in (log, log.with_suffix(".2"))):
    assert time.monotonic() < deadline
    time.sleep(0.01)
def of(tag):
    while (found := linux.tagged(linux.descendants(os.getpid()), tag))[1]:  # one is still inside exec
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return found[0]
assert len(of("tag-1")) == 4
assert len(trainer.orphans({{trainer.pid, other.pid}})) == 1, "what the trainer cannot see itself"
trainer.kill()
assert select.select([trainer.pidfd], [], [], 100)[0]
trainer.collect()
known = {{trainer.pid, other.pid}}
while not trainer.leftovers_gone(known):
    assert time.monotonic() < deadline
    time.sleep(0.01)
assert trainer.how() == "killed by SIGKILL"
assert of("tag-1") == []
assert len(of("tag-2")) == 4, "the neighbour is untouched"
other.kill()
assert select.select([other.pidfd], [], [], 100)[0]
other.collect()
while not other.leftovers_gone(known):
    assert time.monotonic() < deadline
    time.sleep(0.01)
trainer.close()
other.close()
assert linux.descendants(os.getpid()) == []
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=200)


def test_a_trainer_starts_where_the_run_directory_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    file = tmp_path / "progress-1-0-1"
    trainer = TrainerProcess(1, 0, ["-c", ""], dict(os.environ), tmp_path / "log", "tag", progress=file)
    assert "the next agent will not know how far it came" in caplog.text
    assert select.select([trainer.pidfd], [], [], DEADLINE_S)[0]
    trainer.collect()
    assert trainer.status == 0
    assert not file.exists()
    assert trainer.close(keep_progress=True) is None


AWAKE = """
import os, signal, time
signal.signal(signal.SIGUSR1, lambda *_: print("survived", flush=True))
print("importing", flush=True)
while True:
    time.sleep(600)
"""
"""A module that is never imported to its end; it answers a signal as long as it lives."""


@pytest.mark.parametrize("broken", [False, True], ids=["protected", "mutant"])
@pytest.mark.parametrize("kind", ["trainer", "helper"])
def test_a_process_that_still_imports_dies_with_its_agent(tmp_path: Path, kind: str, broken: bool) -> None:
    """The mutant starts it without the stub, and must be seen to survive."""
    (tmp_path / "awake.py").write_text(AWAKE)
    code = f"""
import os, signal, sys
sys.path[:0] = {sys.path!r}
os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
from pathlib import Path
from leto_shadow import linux
from leto_shadow.helper_process import HelperProcess
from leto_shadow.processes import TrainerProcess
folder = Path({str(tmp_path)!r})
if {broken}:
    linux.dying_with_us = list
if {kind!r} == "trainer":
    child = TrainerProcess(1, 1, [str(folder / "awake.py")], dict(os.environ), folder / "log", "tag")
else:
    child = HelperProcess("awake:decide", folder, folder / "log")
print(child.pid, flush=True)
signal.pause()
"""
    log = tmp_path / "log"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as agent:
        try:
            assert agent.stdout is not None
            pidfd = os.pidfd_open(int(agent.stdout.readline()))
            until(lambda: "importing" in log.read_text())
        finally:
            agent.kill()
    # The agent is dead and collected, so the kernel has sent what it sends.
    try:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGUSR1)
        if broken:
            until(lambda: "survived" in log.read_text())
        else:
            assert select.select([pidfd], [], [], DEADLINE_S)[0], "it outlives its agent"
            assert "survived" not in log.read_text()
    finally:
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)


def test_a_process_whose_agent_died_before_it_began_does_not_begin() -> None:
    command = linux.dying_with_us([sys.executable, "-c", "print('begun')"])
    mine = command.index(str(os.getpid()))
    ended = subprocess.run(command, capture_output=True, timeout=DEADLINE_S)
    assert (ended.returncode, ended.stdout) == (0, b"begun\n")
    command[mine] = "1"  # who adopts it
    ended = subprocess.run(command, capture_output=True, timeout=DEADLINE_S)
    assert (ended.returncode, ended.stdout) == (EXIT_AGENT_GONE, b"")


def test_descendants_where_the_kernel_lists_children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The layout of CONFIG_PROC_CHILDREN, which the kernel of a test machine may lack."""
    lists = {
        "10/task/10": "11 12 ",
        "10/task/19": "13 ",
        "11/task/11": "14 ",
        "12/task/12": "",
        "14/task/14": "",
    }
    for thread, children in lists.items():
        (tmp_path / thread).mkdir(parents=True)
        (tmp_path / thread / "children").write_text(children)
    monkeypatch.setattr(linux, "_PROC", tmp_path)
    assert sorted(linux.descendants(10)) == [11, 12, 13, 14], "13 has just ended: listed, but without a task"
    assert sorted(linux.descendants(10, skip={11})) == [12, 13]


def test_descendants() -> None:
    sleep = [sys.executable, "-S", "-c", "import time; print(1, flush=True); time.sleep(60)"]
    nest = f"import subprocess, time; p = subprocess.Popen({sleep!r}); time.sleep(60)"
    with subprocess.Popen([sys.executable, "-S", "-c", nest], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == b"1\n"
        (inner,) = linux.descendants(child.pid)
        try:
            assert {child.pid, inner} <= set(linux.descendants(os.getpid()))
            assert not {child.pid, inner} & set(linux.descendants(os.getpid(), skip={child.pid}))
        finally:
            os.kill(inner, signal.SIGKILL)
            child.kill()


def test_messages_larger_than_the_socket_buffer_and_last_words(tmp_path: Path) -> None:
    go_on = tmp_path / "go-on"
    os.mkfifo(go_on)
    code = f"""
import os, socket, sys
from leto_shadow import wire
channel = wire.Channel(socket.socket(fileno=int(os.environ["LETO_AGENT_FD"])), wire.TrainerDecoder())
channel.send(wire.Hello(pid=os.getpid(), rank=1))
open({str(go_on)!r}).close()  # not read before it is full
size = len(channel.recv(100.0).payload)
channel.send(wire.Failed("train", f"got {{size}}"))
print("the reason", flush=True)
os._exit(3)
"""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    trainer = TrainerProcess(1, 1, ["-c", code], env, tmp_path / "log", "tag-big")
    try:
        said: list[Any] = []
        until(lambda: said.extend(trainer.read()) or said)
        assert said == [wire.Hello(pid=trainer.pid, rank=1)]
        trainer.send(wire.Decision(b"x" * 3_000_000))
        assert trainer.wants_to_write
        open(go_on, "w").close()
        until(lambda: trainer.flush() or not trainer.wants_to_write)
        assert select.select([trainer.pidfd], [], [], DEADLINE_S)[0]
        while trainer.channel_fd is not None:
            said += trainer.read()
        assert said[1:] == [wire.Failed("train", "got 3000000")]
        trainer.collect()
        assert trainer.how().startswith("exit status 3")
        assert "the reason" in trainer.how()
    finally:
        trainer.kill()
        if trainer.status is None:
            trainer.collect()
        trainer.close()


def test_a_trainer_sees_its_own_place_and_not_the_agents() -> None:
    base = {"RANK": "0", "MASTER_ADDR": "x", "MASTER_PORT": "1", "TORCHELASTIC_RUN_ID": "y", "HOME": "/h"}
    env = trainer_environment(base, VALUES)
    assert (env["RANK"], env["WORLD_SIZE"], env["LOCAL_RANK"], env["HOME"]) == ("1", "2", "1", "/h")
    assert not {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"} & set(env)


SETTINGS = {"NCCL_ALGO": "Ring", "NCCL_MAX_CTAS": "8", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"}
SLEEP = ["-S", "-c", "import time; time.sleep(600)"]


def settings_of(pid: int) -> dict[str, str]:
    """What a process was started with that decides how NCCL adds: channels and algorithms are its order."""
    file = Path(f"/proc/{pid}/environ")
    words = until(lambda: b"LETO_RANK=" in file.read_bytes() and file.read_bytes()).split(b"\0")
    pairs = (word.decode().partition("=") for word in words)
    return {name: value for name, _, value in pairs if name.startswith(("NCCL_", "TORCH_NCCL_"))}


class Forgetful(Agent):
    """Forgets what it was started with as soon as the first trainer has it."""

    def _trainer_environment(self, rank: int) -> dict[str, str]:
        found = super()._trainer_environment(rank)
        for name in SETTINGS:
            os.environ.pop(name, None)
        return found


class Meddling(Agent):
    """Makes later trainers faster than those that they stand in for."""

    def _trainer_environment(self, rank: int) -> dict[str, str]:
        found = super()._trainer_environment(rank)
        os.environ["NCCL_MAX_CTAS"] = str(int(os.environ["NCCL_MAX_CTAS"]) * 2)
        return found


@pytest.mark.parametrize("kind", [Agent, Forgetful, Meddling])
def test_every_generation_of_a_rank_starts_with_the_same_settings_of_nccl(
    kind: type[Agent], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise a sum of the next generation is another one, and its bits are not those of the last.

    Real processes, as the shell starts them for four generations of two ranks, one after another.
    """
    for name in [name for name in os.environ if name.startswith(("NCCL_", "TORCH_NCCL_"))]:
        monkeypatch.delenv(name)
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "logs").mkdir()
    pids: dict[int, int] = {}

    def spawned(sid: int, pid: int, _now: float) -> list[Any]:
        pids[sid] = pid
        return []

    def end(process: TrainerProcess) -> None:
        process.kill()
        process.collect()
        process.close()

    core: Any = SimpleNamespace(world_size=2, ranks=range(2), local_ranks=2, trainer_spawned=spawned)
    agent: Any = kind.__new__(kind)
    agent.__dict__.update(run_dir=tmp_path, place=SimpleNamespace(node=0, job_id="settings"))
    agent.__dict__.update(_backend="host", _json=False, _gloo={})
    pipe = os.pipe()
    node: Any = SimpleNamespace(dealer=pipe[0])
    managers: Any = SimpleNamespace()
    agent.shell = AgentShell(
        core,
        "session",
        node,
        managers,
        HostDevice(),
        reactor.Reactor(),
        SLEEP,
        agent._trainer_environment,
        tmp_path,
        lambda *_, **__: None,
        set(),
    )
    found = []
    try:
        for generation in range(4):
            sids = [2 * generation + rank for rank in range(2)]
            agent.shell.carry([SpawnTrainer(sid, sid % 2) for sid in sids])
            assert set(pids) == set(sids)
            found += [settings_of(pids[sid]) for sid in sids]
            for sid in sids:
                end(agent.shell._trainers.pop(sid))
                del pids[sid]
    finally:
        for process in agent.shell._trainers.values():
            end(process)
        for fd in pipe:
            os.close(fd)
    assert found[0] == SETTINGS
    assert (found == [SETTINGS] * 8) is (kind is Agent), "and the test would notice"


def test_nothing_aborts_communicators_behind_a_trainers_back() -> None:
    """torchrun asks torch's watchdog to do so, for its workers: the agents."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    found = {how: trainer_environment({name: how}, VALUES)[name] for how in "0123"}
    assert found == {"0": "0", "1": "3", "2": "3", "3": "3"}
    assert name not in trainer_environment({}, VALUES)


def test_only_agents_with_a_known_key_are_heard() -> None:
    with zmq.Context() as context:
        keys, foreign = make_keys(1), make_keys(1)
        server = CoordinatorSocket(context, keys)
        address = f"tcp://127.0.0.1:{server.port}"
        public, secret = keys.clients[0]
        agent = AgentSocket(context, 0, AgentKeys(address, keys.public, public, secret))
        public, secret = foreign.clients[0]
        stranger = AgentSocket(context, 0, AgentKeys(address, keys.public, public, secret))
        plain = context.socket(zmq.DEALER)
        plain.linger = 0
        plain.connect(address)
        try:
            for _ in range(3):
                stranger.send(b"let me in")
                with contextlib.suppress(zmq.Again):  # it has been turned away already, and for good
                    plain.send(b"let me in", zmq.NOBLOCK)
            agent.send(b"hello")
            heard: list[tuple[int, bytes]] = []

            def served() -> bool:
                server.serve_zap()
                heard.extend(server.receive())
                return bool(heard) and server.denied > 0

            until(served)
            assert heard == [(0, b"hello")]
            server.send(0, b"welcome")
            assert until(agent.receive) == [b"welcome"]
        finally:
            stranger.dealer.linger = 0
            plain.close()
            stranger.close()
            agent.close()
            server.close()


def test_the_protocols_clock_does_not_count_our_own_absence(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([100.0, 100.4, 160.0, 160.1])
    monkeypatch.setattr(reactor, "time", SimpleNamespace(monotonic=lambda: next(moments)))  # not everybody's
    loop = reactor.Reactor()
    read, write = os.pipe()
    loop.watch(read, lambda _events: None)
    try:
        loop.turn(0)
        assert loop.now == pytest.approx(100.4)
        loop.turn(0)  # stopped for a minute
        assert loop.now == pytest.approx(100.4 + reactor.STEP_S)
        loop.turn(0)
        assert loop.now == pytest.approx(100.5 + reactor.STEP_S)
        assert loop.moment == 160.1
        lost = 160.0 - 100.4 - reactor.STEP_S
        assert [loop.lost_since(moment) for moment in (90.0, 100.3)] == pytest.approx([lost] * 2)
        assert loop.lost_since(130.0) == pytest.approx(30.0), "what moved meanwhile was not away for so long"
        assert loop.lost_since(160.05) == 0.0
    finally:
        loop.forget(read)
        os.close(read)
        os.close(write)


def test_options_reach_the_policy() -> None:
    words = "--local-ranks 2 --shadow-level 1 --deadline-fence-s 7 --limit-fatals 9 --hang-factor 2.5"
    options = parse([*words.split(), "-m", "package.module", "--flag", "value"])
    assert options.command == ("-m", "package.module", "--flag", "value")
    assert (options.policy.shadow_level, options.policy.deadlines.fence_s) == (1, 7.0)
    assert (options.policy.limits.fatals, options.policy.hang.factor) == (9, 2.5)
    with pytest.raises(SystemExit):
        parse(["--local-ranks", "0", "script.py"])


class Helper:
    def __init__(self, decide: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(sys.path))
        self.process = HelperProcess(decide, folder, folder / "helper.log")
        self.heard: list[Any] = []

    def expect(self, kind: type[Any]) -> Any:
        deadline = time.monotonic() + DEADLINE_S
        while not any(isinstance(one, kind) for one in self.heard):
            fds, left = [self.process.fd], max(0.0, deadline - time.monotonic())
            assert any(select.select(fds, fds if self.process.unsent else [], [], left))
            self.process.flush()
            messages = self.process.read()
            assert messages is not None, self.process.how()
            self.heard += messages
        found = next(one for one in self.heard if isinstance(one, kind))
        self.heard.remove(found)
        return found


@pytest.mark.slow
def test_the_summaries_of_very_many_ranks_reach_the_helper(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """131,072 ranks with leto_rmu's summaries are more than a frame between agent and trainer may be."""
    (tmp_path / "count.py").write_text("def decide(summaries):\n    return b'%d' % len(summaries)")
    helper = Helper("count:decide", tmp_path, monkeypatch)
    try:
        helper.process.ask(DecideOn(3, (b"s" * 170,) * 131_072))
        assert helper.expect(Decided) == Decided(3, b"131072")
    finally:
        helper.process.end()


@pytest.mark.slow
def test_a_decision_that_hangs_holds_up_neither_stores_nor_the_next_decision(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fatal failure that follows its deadline needs both."""
    (tmp_path / "stuck.py").write_text(
        "import threading\n"
        "def decide(summaries):\n"
        "    if summaries == (b'hang',):\n"
        "        threading.Event().wait()\n"
        "    return b'+'.join(summaries)\n"
    )
    helper = Helper("stuck:decide", tmp_path, monkeypatch)
    try:
        helper.process.ask(DecideOn(1, (b"hang",)))
        helper.process.ask(OpenWorldStore(2, "127.0.0.1"))
        assert helper.expect(StoreOpened).world == 2
        helper.process.ask(DecideOn(2, (b"a", b"b")))
        assert helper.expect(Decided) == Decided(2, b"a+b")
    finally:
        helper.process.end()


@pytest.mark.slow
def test_a_stopped_helper_does_not_stop_its_agent(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is said to it may be larger than the buffer of its socket."""
    (tmp_path / "count.py").write_text("def decide(summaries):\n    return b'%d' % len(summaries)")
    helper = Helper("count:decide", tmp_path, monkeypatch)
    try:
        os.kill(helper.process.pid, signal.SIGSTOP)
        helper.process.ask(DecideOn(3, (b"s" * 170,) * 131_072))
        assert helper.process.unsent
        helper.process.ask(OpenWorldStore(2, "127.0.0.1"))  # behind the other
        os.kill(helper.process.pid, signal.SIGCONT)
        assert helper.expect(Decided) == Decided(3, b"131072")
        assert helper.expect(StoreOpened).world == 2
    finally:
        helper.process.end()


def test_the_helper_decides_hosts_stores_and_dies_with_its_agent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "mine.py").write_text(
        "def decide(summaries):\n    return b'+'.join(summaries)[: 1 / len(summaries) * 99]"
    )
    (tmp_path / "good.py").write_text("def decide(summaries):\n    return b'+'.join(summaries)")
    helper = Helper("good:decide", tmp_path, monkeypatch)
    bad = Helper("mine:decide", tmp_path, monkeypatch)
    missing = Helper("nowhere:decide", tmp_path, monkeypatch)
    try:
        helper.process.ask(DecideOn(3, (b"a", b"b")))
        assert helper.expect(Decided) == Decided(3, b"a+b")
        bad.process.ask(DecideOn(4, (b"a",)))
        assert "TypeError" in bad.expect(Decided).error
        assert "nowhere" in missing.expect(Unusable).error
        for world in (1, 2):
            helper.process.ask(OpenWorldStore(world, "127.0.0.1"))
        first, second = helper.expect(StoreOpened), helper.expect(StoreOpened)
        assert first.port != second.port
        assert not first.error
        helper.process.ask(CloseWorldStore(1))
        os.kill(helper.process.pid, signal.SIGKILL)
        assert select.select([helper.process.fd], [], [], DEADLINE_S)[0]
        assert until(lambda: helper.process.read() is None)
    finally:
        for one in (helper, bad, missing):
            one.process.end()
    assert linux.tagged([helper.process.pid], "x") == ([], [])
