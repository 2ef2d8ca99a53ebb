"""Real jobs on one host: real signals, hangs and torchrun; a trainer without torch keeps them short."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import socket
import stat
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from leto_shadow import control, linux
from leto_shadow.events import read_events
from leto_shadow.exit_codes import ExitCode

TCPStore = pytest.importorskip("torch.distributed").TCPStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]  # on a busy machine

Start = Callable[..., Any]


def training(job: Any, generation: int = 0, shadows: int = 2) -> bool:
    """True when the generation trains and its shadows wait at L3."""
    if not (job.run_dir / "agent-0.sock").exists():
        return False
    try:
        status = job.status()
    except control.ControlError:
        return False  # it is ending, or this machine is very busy
    if status["job"] is None:
        return False
    levels = status["job"]["shadow_levels"]
    ready = sum(level == 3 for level in levels.values()) >= shadows
    return status["job"]["phase"] == "training" and status["job"]["generation"] == generation and ready


def counted(job: Any, generation: int = 0) -> bool:
    """True when all ranks of the generation have counted: what recovers one that has not is rightly fresh."""
    return {one["rank"] for one in job.events("metrics") if one["generation"] == generation} == {0, 1}


def settings_of(job: Any) -> dict[str, list[str]]:
    """What the active trainers' processes were started with of NCCL's settings, sorted, by rank."""
    found = {}
    for rank, trainer in job.trainers("active").items():
        words = Path(f"/proc/{trainer['pid']}/environ").read_bytes().split(b"\0")
        found[rank] = sorted(word.decode() for word in words if b"NCCL_" in word.split(b"=")[0])
    return found


def test_sigkill_under_torchrun_is_recovered_in_place(
    start_job: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every generation has the settings of NCCL that the first one had (with mutants: `test_shell`)."""
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    monkeypatch.setenv("NCCL_MAX_CTAS", "8")
    stop = tmp_path / "stop"
    script = ("--", "100000", "--until", str(stop), "--child")
    job = start_job("kill", *script, torchrun=("--standalone",))
    job.until(lambda: training(job) and counted(job))
    settings = settings_of(job)
    assert {"NCCL_ALGO=Ring", "NCCL_MAX_CTAS=8"} <= set(settings[0])
    assert settings[0] == settings[1]
    victim = job.trainers("active")[1]
    os.kill(victim["pid"], signal.SIGKILL)
    job.until(lambda: training(job, 1))
    assert settings_of(job) == settings
    both = job.trainers("active")
    for rank in (0, 1):  # two at once, unless this process stands still in between
        with contextlib.suppress(ProcessLookupError):
            os.kill(both[rank]["pid"], signal.SIGKILL)
    job.until(lambda: training(job, 2, shadows=0) and counted(job, 2))
    assert settings_of(job) == settings
    stop.touch()
    assert job.wait() == ExitCode.FINISHED, job.text()
    first, second = job.events("recovered")
    assert (first["source"], first["generation"]) == ("in-place", 1)
    assert (second["source"], second["generation"]) == ("in-place", 2)
    assert second["iteration"] >= first["iteration"] > 0
    counts = [event["counter"] for event in job.events("metrics") if event["rank"] == 1]
    assert counts[-1] >= second["iteration"]
    said = [line for line in job.text().splitlines() if line.startswith("leto: rank ")]
    assert [line.split(",")[0] for line in said[:1]] == ["leto: rank 1"]
    assert said[0].endswith(": trainer died (killed by SIGKILL)"), "the terminal does not tell of the failure"
    assert f"leto: training goes on at iteration {first['iteration']}, in place, " in job.text()
    job.assert_nothing_left()


def test_drills_hang_lost_pages_and_manager_death(start_job: Start, tmp_path: Path) -> None:
    drills = [
        {"id": "hang", "kind": "hang", "rank": 0, "iteration": 30},
        {
            "id": "lose",
            "kind": "kill",
            "rank": 0,
            "iteration": 60,
            "seed": 1,
            "lose": {"allocation": "arena", "pages": 2, "tier1": 1},
        },
        {"id": "fatal", "kind": "kill_manager", "rank": 0, "iteration": 90},
    ]
    file = tmp_path / "drills.json"
    file.write_text(json.dumps(drills))
    job = start_job("drills", "--drills", str(file), "--hang-min-s", "15", "--", "120")
    assert job.wait() == ExitCode.FINISHED, job.text()
    hang, lose, fatal = job.events("failure")
    assert (hang["kind"], hang["rank"], hang["iteration"]) == ("hang", 0, 30)
    assert hang["detected_s"] >= 15
    assert (lose["kind"], lose["rank"]) == ("exit", 0)
    assert (fatal["kind"], fatal["rank"]) == ("manager", 0)
    in_place, lost, restarted = job.events("recovered")
    assert (in_place["iteration"], in_place["source"]) == (30, "in-place")
    assert lost["source"] == "in-place"
    # The seed leaves page 7 alone, where the counter is.
    assert lost["lost_pages"] == 3
    assert (restarted["iteration"], restarted["source"], restarted["fatal"]) == (0, "fresh", True)
    assert [event["generation"] for event in job.events("promoted")] == [0, 1, 2, 3]
    job.assert_nothing_left()


def test_an_error_that_repeats_does_not_loop_for_ever(start_job: Start) -> None:
    job = start_job(
        "loop",
        *("--limit-hofs-same-iteration", "2", "--limit-fatals", "1"),
        *("--", "50", "--fail-at", "9"),
        torchrun=("--standalone",),  # which passes the agent's code on
    )
    assert job.wait() == ExitCode.FATAL_LIMIT, job.text()
    assert "this script is wrong at iteration 9" in job.text()
    assert 3 <= len(job.events("failure")) <= 5
    job.assert_nothing_left()


def test_a_pool_larger_than_memory_ends_the_job_with_the_numbers(start_job: Start) -> None:
    """It is met at the first allocation; what failed twice in the same way is not tried for ever."""
    bytes_asked = 1 << 50
    options = ("--data-pages", "60000", "--page-bytes", str(1 << 30))
    job = start_job("hoard", *options, "--", "10", "--keep-bytes", str(bytes_asked))
    assert job.wait() == ExitCode.CANNOT_START, job.text()
    (end,) = job.events("job_failed")
    assert "the last 3 attempts failed alike" in end["reason"]
    found = re.search(
        r"NotEnoughMemory: (\d+) bytes were asked for; .* leaves (\d+), of which", end["reason"]
    )
    assert found is not None, end["reason"]
    assert int(found[1]) > bytes_asked > int(found[2])
    assert len(job.events("failure")) == 3
    assert [event["verdict"] for event in job.events("verdict")] == ["hof"] * 3
    assert not job.events("resumed")
    job.assert_nothing_left()


@pytest.mark.parametrize("phase", ["prepare", "connect"])
def test_a_script_that_cannot_start_fails_the_job_with_its_error(start_job: Start, phase: str) -> None:
    job = start_job("start", "--", "50", "--fail-in", phase)
    assert job.wait() == ExitCode.CANNOT_START, job.text()
    assert f"this script is wrong in {phase}" in job.text()
    job.assert_nothing_left()


def test_a_failed_shadow_is_replaced_and_disturbs_nobody(start_job: Start) -> None:
    job = start_job("shadow", "--limit-shadow-backoff-s", "0.2", "--", "100000", "--pause", "0.05")
    job.until(lambda: training(job))
    before = job.trainers("shadow")
    os.kill(before[0]["pid"], signal.SIGKILL)

    def replaced() -> Any:
        status = job.status()  # one look at both: what the coordinator knows, and the processes
        now = {one["rank"]: one for one in status["trainers"] if one["role"] == "shadow"}
        ready = list(status["job"]["shadow_levels"].values()) == [3, 3]
        return ready and 0 in now and now[0]["pid"] != before[0]["pid"] and now

    after = job.until(replaced)
    assert after[1]["pid"] == before[1]["pid"], "the other shadow is demoted, not replaced"
    assert after[0]["world"] == after[1]["world"] == before[0]["world"] + 1
    assert job.status()["job"]["generation"] == 0
    assert job.events("failure") == []
    os.kill(job.process.pid, signal.SIGTERM)
    assert job.wait() == ExitCode.TERMINATED
    assert "stopped by SIGTERM" in job.text()
    job.assert_nothing_left()


def test_when_the_agent_dies_everything_dies(start_job: Start, tmp_path: Path) -> None:
    """Also a rank that hangs with the GIL held and listens to nobody."""
    drills = tmp_path / "drills.json"
    drills.write_text(json.dumps([{"id": "hang", "kind": "hang", "rank": 0, "iteration": 5}]))
    job = start_job("orphans", "--drills", str(drills), "--hang-initial-s", "300", "--", "100000")
    job.until(lambda: job.events("drill_fired"))
    assert len(job.pids()) >= 4
    os.kill(job.process.pid, signal.SIGKILL)
    assert job.wait() == -signal.SIGKILL
    deadline = time.monotonic() + 120
    while job.pids() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert job.pids() == []


def test_when_torchrun_dies_everything_dies(start_job: Start) -> None:
    job = start_job("launcher", "--", "100000", torchrun=("--standalone",))
    job.until(lambda: training(job, shadows=0))
    os.kill(job.process.pid, signal.SIGKILL)
    assert job.wait() == -signal.SIGKILL
    job.assert_nothing_left()
    assert job.events("job_failed")[0]["exit_code"] == ExitCode.AGENT_LOST


def test_an_agent_that_is_killed_under_torchrun_is_reported_by_the_launcher(
    start_job: Start,
    agent_below: Callable[[int], int | None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    kept = tmp_path / "kept"
    job = start_job("killed", "--keep", str(kept), "--", "100000", torchrun=("--standalone",))
    job.until(lambda: training(job, shadows=0))
    agent = agent_below(job.process.pid)
    assert agent is not None, job.text()
    os.kill(agent, signal.SIGKILL)
    assert job.wait() == ExitCode.AGENT_LOST, job.text()
    said = [line for line in job.text().splitlines() if line.startswith("leto:")]
    assert said == [
        "leto: training begins at iteration 0, from the beginning",
        "leto: node 0: the agent was killed by SIGKILL (exit code 72)",
    ]
    assert read_events(kept / job.job_id / "node0" / "events.jsonl") == job.events()
    last = job.events()[-1]
    assert (last["event"], last["exit_code"], last["node"]) == ("job_failed", 72, 0)
    assert "SIGKILL" in last["reason"]
    job.assert_nothing_left()
    assert list(temporary.glob("torchelastic_*")) == []


def test_control_socket_inject_and_neighbour_jobs(start_job: Start, tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        job = start_job("one", "--shadow-level", "0", "--", "100000")
        neighbour = start_job("two", "--", "100000", ranks=1)
    finally:
        os.umask(old)
    job.until(lambda: training(job, shadows=0))
    neighbour.until(lambda: training(neighbour, shadows=0))
    assert stat.S_IMODE(job.run_dir.stat().st_mode) == 0o700
    assert stat.S_IMODE((job.run_dir / "agent-0.sock").stat().st_mode) == 0o600

    again = start_job("one", "--", "10", run_dir=job.run_dir)
    assert again.wait() == ExitCode.USAGE
    assert "in use" in again.text()

    assert job.ask(control.Inject("kill", 9)).detail.startswith("rank 9 is not on node 0")
    assert job.ask(control.Inject("lose", 1, pages=1, tier1=1)).ok
    job.until(lambda: training(job, 1, shadows=0))  # no shadow was there: recovered cold
    (recovered,) = job.events("recovered")
    assert recovered["lost_pages"] == 2
    assert recovered["generation"] == 1

    for one in (job, neighbour):
        assert one.process.poll() is None, "case 17: a job touches only its own"
        os.kill(one.process.pid, signal.SIGINT)
    assert job.wait() == neighbour.wait() == ExitCode.INTERRUPTED
    job.assert_nothing_left()
    neighbour.assert_nothing_left()


@pytest.mark.nightly
def test_two_nodes_on_one_host(start_job: Start, tmp_path: Path) -> None:
    """Agents of two nodes find each other through torchrun's store, with keys of their own.

    In CI `test_stopped_agent` begins so.
    """
    rendezvous = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)  # case 8: bound, then told
    place = (
        "--nnodes=2",
        "--rdzv-backend=c10d",
        "--rdzv-id=two-nodes",
        f"--rdzv-endpoint=127.0.0.1:{rendezvous.port}",
        "--rdzv-conf=is_host=0",
    )
    stop = tmp_path / "stop"
    script = ("--", "100000", "--until", str(stop))
    first = start_job("node", *script, ranks=1, torchrun=place)
    second = start_job("node2", *script, ranks=1, torchrun=place, run_dir=first.run_dir)
    first.until(lambda: training(first) and counted(first))
    active = second.status(1)["trainers"]
    victim = next(one for one in active if one["role"] == "active")
    assert victim["rank"] == 1
    os.kill(victim["pid"], signal.SIGKILL)
    first.until(lambda: training(first, 1, shadows=0))
    stop.touch()
    assert first.wait() == ExitCode.FINISHED, first.text()
    assert second.wait() == ExitCode.FINISHED, second.text()
    (recovered,) = first.events("recovered")
    assert recovered["source"] == "in-place"
    first.assert_nothing_left()


def listening(pids: Iterable[int]) -> set[int]:
    """TCP ports on which these processes listen."""
    port_of = {}
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                port_of[f"socket:[{fields[9]}]"] = int(fields[1].rpartition(":")[2], 16)
    found = set()
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            for fd in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    found.add(port_of.get(os.readlink(f"/proc/{pid}/fd/{fd}"), 0))
    return found - {0}


@pytest.mark.parametrize("level", [0, 3])
def test_ports_that_strangers_take_do_not_disturb_a_recovery(
    start_job: Start, tmp_path: Path, level: int
) -> None:
    """Case 8: whatever port of the job becomes free after a failure is taken at once by somebody else.

    At level 0 the next world's store is opened in the recovery, at level 3 it is there before the failure.
    """
    stop = tmp_path / "stop"
    shadows = 2 if level else 0
    script = ("--", "100000", "--until", str(stop), "--meet")
    job = start_job("ports", "--shadow-level", str(level), *script)

    def ports() -> set[int]:
        return listening([job.process.pid, *linux.descendants(job.process.pid)])

    job.until(lambda: training(job, shadows=shadows) and counted(job))
    announced = ports()
    assert len(announced) >= 2, "the coordinator's and a store's"
    with contextlib.ExitStack() as strangers:
        taken: set[int] = set()

        def recovered() -> bool:
            for port in announced - taken:
                with contextlib.suppress(OSError):  # the job still has it
                    strangers.enter_context(socket.create_server(("", port)))
                    taken.add(port)
            return bool(taken) and training(job, 1, shadows=0)  # the dead world's store gave up its port

        os.kill(job.trainers("active")[1]["pid"], signal.SIGKILL)
        job.until(recovered)
        assert ports().isdisjoint(taken)
        stop.touch()
        assert job.wait() == ExitCode.FINISHED, job.text()
    (event,) = job.events("recovered")
    assert (event["source"], event["generation"]) == ("in-place", 1)
    assert len(job.events("failure")) == 1
    job.assert_nothing_left()


@pytest.mark.parametrize(
    "seed", [1, *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(2, 12))]
)
def test_random_kills_of_anything(start_job: Start, tmp_path: Path, seed: int) -> None:
    """Trainers and shadows, one or two at a time, at any moment; now and then a manager."""
    rng = random.Random(seed)
    generous = [
        word
        for name in ("hofs-per-rank", "hofs-same-iteration", "fatals", "start-failures")
        for word in (f"--limit-{name}", "1000")
    ]
    stop = tmp_path / "stop"
    script = ("--", "100000", "--until", str(stop))
    job = start_job("chaos", *generous, "--limit-shadow-backoff-s", "0.1", *script)
    job.until(lambda: training(job, shadows=0))
    for _ in range(20):
        time.sleep(rng.choice([0.0, 0.02, 0.1, 0.4, 1.0]))
        trainers = [trainer for trainer in job.status()["trainers"] if trainer["pid"]]
        for trainer in rng.sample(trainers, min(len(trainers), rng.choice([1, 1, 2]))):
            with contextlib.suppress(ProcessLookupError):
                os.kill(trainer["pid"], signal.SIGKILL)
        if rng.random() < 0.05:
            job.ask(control.Inject("kill_manager", rng.randrange(2)))
    stop.touch()
    assert job.wait() == ExitCode.FINISHED, f"seed {seed}: {job.text()}"
    assert job.events("failure"), f"seed {seed} killed no active trainer"
    job.assert_nothing_left()


def test_an_agent_that_waits_for_another_node_ends_with_torchrun(
    start_job: Start, alive: Callable[[int], bool]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:  # nobody answers as torchrun's store here
        port = silent.getsockname()[1]
        place = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        code = (
            f"import os, subprocess, sys, time; os.environ.update({place!r}, TORCHELASTIC_RUN_ID='none');"
            "subprocess.Popen([sys.executable, *sys.argv[1:]]); time.sleep(600)"
        )
        job = start_job("waits", "--", "10", launcher=("-c", code))
        agent = job.until(
            lambda: (job.run_dir / "agent-1.sock").exists() and linux.descendants(job.process.pid)
        )
        os.kill(job.process.pid, signal.SIGKILL)
        assert job.wait() == -signal.SIGKILL
        deadline = time.monotonic() + 120
        while any(map(alive, agent)) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not any(map(alive, agent))
    job.assert_nothing_left()
