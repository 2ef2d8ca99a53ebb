"""Torchruns with run directories of their own: a node is lost, or its agent stops, and the job ends exact.

The example with checkpoints is held until the failure has been dealt with, so that no instant is a race.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from plain_jobs import assert_plain_bits

from leto_shadow import control
from leto_shadow.events import Event, read_events

torch = pytest.importorskip("torch")
pytest.importorskip("leto_rmu")

HELD = Path(__file__).parent / "held.py"
POOL = ("--page-bytes", "16384", "--data-pages", "48", "--tier1", "6")
ITERATIONS, INTERVAL, HELD_AT = 60, 10, 25
DEADLINE_S = 300.0

pytestmark = [pytest.mark.job, pytest.mark.slow, pytest.mark.timeout(900)]

Spawn = Callable[..., subprocess.Popen[bytes]]


class Cluster:
    """Nodes of this host under one rendezvous, of which two train; or one node with two ranks."""

    def __init__(self, spawn: Spawn, folder: Path, run_dirs: Path, count: int, *options: str) -> None:
        self.folder = folder
        self.run_dirs = [run_dirs / str(index) for index in range(count)]
        self.store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        nnodes, ranks = ("1", "2") if count == 1 else (f"2:{count}", "1")
        words = [
            sys.executable,
            "-m",
            "leto_shadow.cli",
            "run",
            "--nnodes",
            nnodes,
            "--nproc-per-node",
            ranks,
        ]
        words += ["--rdzv-backend", "c10d", "--rdzv-id", "several", "--max-restarts", "5"]
        words += ["--rdzv-endpoint", f"127.0.0.1:{self.store.port}"]
        words += ["--rdzv-conf", "is_host=0,last_call_timeout=120", *POOL, *options]
        words += ["--hang-initial-s", "300", "--hang-min-s", "300"]
        script = ["--iterations", str(ITERATIONS), "--interval", str(INTERVAL), "--folder", str(folder)]
        env = {**os.environ, "HOLD_SCRIPT": "plain_checkpoint.py", "HOLD_AT": str(HELD_AT)}
        env |= {"HOLD_S": "3600", "HOLD_UNTIL": str(folder / "go-on"), "GLOO_SOCKET_IFNAME": "lo"}

        def start(index: int) -> subprocess.Popen[bytes]:
            command = [*words, "--run-dir", str(self.run_dirs[index]), str(HELD), *script]
            with open(folder / f"{index}.out", "ab") as output:
                return spawn(command, stdout=output, stderr=output, env=env)

        self.start = start
        self.nodes = [start(index) for index in range(count)]

    def events(self, name: str | None = None) -> list[Event]:
        logs = [path for run_dir in self.run_dirs if (path := run_dir / "events.jsonl").exists()]
        found = sorted((event for path in logs for event in read_events(path)), key=lambda event: event["t"])
        return [event for event in found if name in (None, event["event"])]

    def text(self) -> str:
        logs = [(self.folder / f"{index}.out").read_text()[-3000:] for index in range(len(self.run_dirs))]
        return "\n".join([*logs, str(self.events()[-15:])])

    def until(self, what: Callable[[], Any], expected: int | None = None) -> Any:
        """``expected``: how many torchruns may have ended meanwhile."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            ended = sum(node.poll() is not None for node in self.nodes)
            if found := what():
                return found
            if ended > (expected or 0) or time.monotonic() > deadline:
                pytest.fail(f"never came to pass; {ended} have ended\n{self.text()}")
            time.sleep(0.02)  # other processes append to files: there is no event to wait for

    def held(self, generation: int) -> bool:
        """Both ranks of the generation have done all that they may before they are let go on."""
        done = {e["rank"] for e in self.events("metrics") if e["iteration"] == HELD_AT - 1}
        resumed = {e["rank"] for e in self.events("resumed") if e["generation"] == generation}
        return done == resumed == {0, 1} and self.iteration() == HELD_AT

    def iteration(self) -> int:
        """That of the rank behind, as the coordinator knows."""
        for path in (path for run_dir in self.run_dirs for path in run_dir.glob("agent-0.sock")):
            try:
                reply = control.ask(path, control.StatusRequest(), timeout_s=60.0)
            except control.ControlError:
                continue
            assert isinstance(reply, control.StatusReply)
            return int(reply.status["job"]["iteration"])
        return -1

    def of_rank(self, rank: int) -> tuple[int, int, int]:
        """(which torchrun, number of the node, pid of its agent) that has a rank now."""
        for index, run_dir in enumerate(self.run_dirs):
            for path in run_dir.glob("agent-*.sock"):
                try:
                    reply = control.ask(path, control.StatusRequest(), timeout_s=60.0)
                except control.ControlError:
                    continue
                assert isinstance(reply, control.StatusReply)
                if rank in reply.status["ranks"]:
                    return index, int(reply.status["node"]), int(reply.status["pid"])
        raise AssertionError(f"nobody has rank {rank}\n{self.text()}")

    def finish(self) -> list[int]:
        (self.folder / "go-on").touch()
        return [node.wait(DEADLINE_S) for node in self.nodes]

    def assert_exact(self) -> None:
        """Both ranks ended with the bits of an uninterrupted run, in plain PyTorch and in one process."""
        assert_plain_bits([self.folder / f"final-{rank}" for rank in range(2)], ITERATIONS)


@pytest.mark.parametrize(
    "how", ["lost", "stopped", pytest.param("stopped with shadows", marks=pytest.mark.nightly)]
)
def test_a_spare_goes_on_from_a_checkpoint(
    spawn: Spawn, alive: Callable[[int], bool], tmp_path: Path, short_path: Path, how: str
) -> None:
    """A node is lost with its torchrun, and comes back under another one; or its agent stops, answers again
    when its place is taken, and is turned away. It is the spare then, and neither costs a bit. The
    checkpoint of iteration 20 is the newest that both ranks have.

    Where a node is lost there are shadows, and what waits on the spare; where an agent stops CI has none.
    """
    options = ["--deadline-agent-s", "150" if how == "lost" else "20"]
    options += ["--shadow-level", "0"] if how == "stopped" else []
    cluster = Cluster(spawn, tmp_path, short_path, 3, *options)
    cluster.until(lambda: cluster.held(0))
    assert sorted(path.name for path in tmp_path.glob("20.*")) == ["20.0", "20.1"]
    index, node, agent = cluster.of_rank(1)
    if node == 0:  # the coordinator's is another story
        index, node, agent = cluster.of_rank(0)
    if how == "lost":
        cluster.nodes[index].kill()
        cluster.nodes[index].wait()
    else:
        os.kill(agent, signal.SIGSTOP)
    ended = how == "lost"
    (replaced,) = cluster.until(lambda: cluster.events("node_replaced"), ended)
    assert replaced["lost"] == node
    (recovered,) = cluster.until(lambda: cluster.events("recovered"), ended)
    assert (recovered["source"], recovered["iteration"], recovered["fatal"]) == ("checkpoint", 20, True)
    assert recovered["iterations_lost"] == HELD_AT - 20
    assert [event["spares"] for event in cluster.events("job_started")] == [1], "nobody was started again"
    if how == "lost":
        cluster.nodes[index] = cluster.start(index)
    else:
        os.kill(agent, signal.SIGCONT)
        cluster.until(lambda: not alive(agent))
    # torchrun starts all agents again, and those that train hold the memory; the other one is the spare now.
    cluster.until(lambda: len(cluster.events("job_started")) == 2)
    cluster.until(lambda: len(cluster.events("recovered")) == 2)
    assert cluster.events("job_started")[-1]["spares"] == 1
    assert cluster.events("recovered")[-1]["source"] == "in-place"
    if how == "lost":
        assert {cluster.of_rank(rank)[0] for rank in range(2)} == {0, 1, 2} - {index}
        # Agents that stop for less than the deadline are not missed, and their trainers go on.
        agents = [cluster.of_rank(rank)[2] for rank in range(2)]
        for stopped in agents:
            os.kill(stopped, signal.SIGSTOP)
        (tmp_path / "go-on").touch()
        cluster.until(lambda: len(list(tmp_path.glob("40.*"))) == 2)
        for stopped in agents:
            os.kill(stopped, signal.SIGCONT)
    assert cluster.finish() == [0, 0, 0], cluster.text()
    if how != "lost":
        said = (tmp_path / f"{index}.out").read_text()  # all of it: what follows may be long
        assert "another node has taken the place of this one" in said
    assert len(cluster.events("failure")) == 1
    cluster.assert_exact()
    assert not [path for run_dir in cluster.run_dirs for path in run_dir.rglob("*.sock") if path.exists()]


def test_an_agent_that_dies_with_memory_costs_what_is_told(
    spawn: Spawn,
    agent_below: Callable[[int], int | None],
    alive: Callable[[int], bool],
    tmp_path: Path,
    short_path: Path,
) -> None:
    """The memory of one rank dies with the agent: all go back to iteration 20; what that costs is told."""
    cluster = Cluster(spawn, tmp_path, short_path, 1)
    cluster.until(lambda: cluster.held(0))
    agent = cluster.until(lambda: agent_below(cluster.nodes[0].pid))
    (manager,) = (event["pid"] for event in cluster.events("manager_started") if event["rank"] == 1)
    os.kill(agent, signal.SIGSTOP)  # so that it does not see the end of the manager
    os.kill(manager, signal.SIGKILL)
    os.kill(agent, signal.SIGKILL)
    first, second = cluster.until(lambda: (found := cluster.events("started"))[1:] and found)
    assert (first["source"], first["iterations_lost"]) == ("fresh", 0)
    assert cluster.events("memory_given_up")
    assert (second["source"], second["iteration"]) == ("checkpoint", 20)
    assert second["iterations_lost"] == HELD_AT - 20
    assert cluster.finish() == [0], cluster.text()
    cluster.assert_exact()
    assert not list(cluster.run_dirs[0].glob("progress-*"))
