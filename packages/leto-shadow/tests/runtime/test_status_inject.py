"""`leto status` and `leto inject`: the view over events, which job is meant, and what an agent is asked."""

from __future__ import annotations

import json
import os
import select
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leto_shadow import cli, control, jobs
from leto_shadow.events import EventWriter
from leto_shadow.progress import Phase
from leto_shadow.status import JobView, render

BREAKDOWN = {"fence": 0.1, "total": 0.75}
STORY: list[dict[str, Any]] = [
    {"event": "job_started", "world_size": 2, "nodes": 1},
    {"event": "shadow_level", "rank": 0, "level": 3, "world": 1},
    {"event": "promoted", "generation": 0, "world": 1},
    {"event": "resumed", "rank": 0, "iteration": 0, "source": "fresh", "generation": 0},
    {"event": "metrics", "rank": 0, "iteration": 6, "loss": 1.5, "generation": 0},
    {"event": "metrics", "rank": 1, "iteration": 6, "loss": 1.25, "generation": 0},
    {"event": "drill_fired", "id": "d1", "rank": 1, "generation": 0},
    {"event": "failure", "kind": "exit", "rank": 1, "generation": 0, "iteration": 7, "detected_s": 0.011},
    {"event": "recovery_begun", "generation": 1, "iteration": 7, "rank": 1, "fatal": False},
    {"event": "resumed", "rank": 1, "iteration": 7, "source": "in-place", "generation": 1},
    {
        "event": "recovered",
        "generation": 1,
        "iteration": 7,
        "source": "in-place",
        "iterations_lost": 0,
        "breakdown": BREAKDOWN,
    },
    {"event": "metrics", "rank": 1, "iteration": 7, "loss": 1.125, "generation": 1},
    {"event": "finished", "exit_code": 0, "iteration": 7, "generation": 1},
]


def text_of(view: JobView) -> str:
    from rich.console import Console

    console = Console(width=200)
    with console.capture() as capture:
        console.print(render(view, 1000.0))
    return capture.get()


def tell(events: list[dict[str, Any]]) -> JobView:
    view = JobView("j")
    for event in events:
        view.apply({"t": 990.0, "mono": 1.0, **event})
    return view


def test_nodes_that_can_take_no_place_are_named_until_they_can() -> None:
    events: list[dict[str, Any]] = [
        {"event": "job_started", "world_size": 2, "nodes": 4},
        {"event": "spare_unfit", "spare": 2, "reason": "a bad row"},
        {"event": "spare_unfit", "spare": 3, "reason": "no driver"},
        {"event": "node_replaced", "lost": 1, "spare": 4, "unfit": [1]},
        {"event": "node_replaced", "lost": 0, "spare": 5, "unfit": []},
    ]
    view = tell(events)
    assert view.unfit == {1: "the device of rank 1 is not operable", 2: "a bad row", 3: "no driver"}
    assert "node 2 can take no place: a bad row" in text_of(view)
    view = tell([*events, {"event": "spare_back", "spare": 2}, {"event": "spare_lost", "lost": 3}])
    assert set(view.unfit) == {1}
    assert "node 2" not in text_of(view)
    assert tell([*events, events[0]]).unfit == {}


@pytest.mark.parametrize(
    ("count", "state"),
    [
        (1, "starting"),
        (4, "training"),
        (7, "training"),
        (8, "recovering"),
        (9, "recovering"),
        (11, "training"),
        (13, "finished"),
    ],
)
def test_the_state_follows_the_story(count: int, state: str) -> None:
    assert tell(STORY[:count]).state == state


def test_the_table_tells_the_story() -> None:
    view = tell(STORY[:-1])
    text = text_of(view)
    assert (view.generation, view.iteration, view.ranks[1].failures, view.ranks[0].shadow_level) == (
        1,
        7,
        1,
        3,
    )
    assert "last failure: exit of rank 1 in iteration 7, detected after 0.01 s" in text
    assert "last recovery: generation 1 at iteration 7, in-place, in 0.75 s, 0 iterations lost" in text
    assert "fence 0.10 s; 1 recoveries in all" in text
    assert "drills fired: d1" in text
    assert "no agent of this job answers" in text  # it is not over, and nobody answered
    assert "no agent" not in text_of(tell(STORY))


def test_a_failed_job_says_why() -> None:
    view = tell([*STORY[:4], {"event": "job_failed", "exit_code": 71, "reason": "too many fatal failures"}])
    assert view.state == "failed"
    assert "too many fatal failures" in text_of(view)


values = (
    st.none() | st.integers(-3, 10) | st.text(max_size=5) | st.floats(allow_nan=False, allow_infinity=False)
)
names = st.sampled_from(sorted({event["event"] for event in STORY} | {"news", "over", "rank", "_of"}))


@given(st.lists(st.sampled_from(STORY) | st.builds(lambda name: {"event": name}, names), max_size=20))
def test_any_order_of_events_can_be_shown(events: list[dict[str, Any]]) -> None:
    """A log may be cut anywhere and hold events of a newer version; the view must not break on it."""
    text_of(tell(events))


def test_agents_add_what_only_they_know() -> None:
    view = tell(STORY[:-1])
    trainer = {"rank": 0, "role": "active", "pid": 41, "phase": int(Phase.BACKWARD), "level": 3}
    shadow = {"rank": 0, "role": "shadow", "pid": 42, "phase": 0, "level": 2}
    view.merge({"trainers": [trainer, shadow], "job": {"phase": "training", "generation": 1}})
    text = text_of(view)
    assert "41" in text
    assert "backward" in text
    assert "L2" in text
    assert "no agent" not in text
    url = "http://127.0.0.1:9400/metrics"
    job = {"phase": "fencing", "generation": 2, "recovering_s": 0.25}
    view.merge({"trainers": [], "job": job, "metrics_url": url})
    assert "recovering (fencing, 0.25 s)" in text_of(view)
    assert f"metrics: {url}" in text_of(view)
    assert (view.state, view.generation) == ("recovering", 2)


def test_iterations_of_a_script_that_reports_none_are_those_that_its_trainers_are_in() -> None:
    trainer = {
        "rank": 0,
        "role": "active",
        "pid": 41,
        "phase": int(Phase.FORWARD),
        "level": 3,
        "iteration": 9,
    }
    snapshot = {"trainers": [trainer], "job": {"phase": "training", "generation": 1, "iteration": 9}}
    silent = tell([event for event in STORY[:-1] if event["event"] != "metrics"])
    reporting = tell(STORY[:-1])
    for view in (silent, reporting):
        view.merge(snapshot)
    assert (silent.iteration, silent.ranks[0].iteration) == (9, 9)
    assert (reporting.iteration, reporting.ranks[0].iteration) == (7, tell(STORY[:-1]).ranks[0].iteration)
    silent.apply({"event": "finished", "iteration": 12})
    assert (silent.iteration, silent.ranks[0].iteration) == (12, 12)


# --- which job ----------------------------------------------------------------------------------------------


@pytest.fixture
def base(short_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Folder of all jobs, with two jobs in it; "new" is the newer one."""
    base = short_path / "base"
    for job, changed in (("new", 2_000_000_000), ("old", 1_000_000_000)):
        (base / job).mkdir(parents=True)
        path = base / job / jobs.EVENTS_FILE
        with EventWriter(path) as writer:
            for event in STORY:
                writer.write(**event)
        os.utime(path, (changed, changed))
    (base / "empty").mkdir()
    monkeypatch.setattr(jobs, "base_dir", lambda: base)
    return base


@pytest.mark.parametrize(
    ("words", "job"), [([], "new"), (["old"], "old"), (["--run-dir", "{base}/old"], "old")]
)
def test_the_job_that_is_meant(
    base: Path, capsys: pytest.CaptureFixture[str], words: list[str], job: str
) -> None:
    words = [word.format(base=base) for word in words]
    assert cli.main(["status", "--json", *words]) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["job_id"], report["state"], report["iteration"]) == (job, "finished", 7)
    assert report["recovery"]["breakdown"] == BREAKDOWN
    assert cli.main(["status", *words]) == 0  # not a terminal: once
    assert f"job {job}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        (["nope"], 1, "there is no run directory"),
        (["nope"], 1, "known jobs: empty, new, old"),
        (["../x"], 2, "'../x' is no job id"),
        (["old", "--run-dir", "y"], 2, "not both"),
        (["--run-dir", "/nope"], 1, "there is no run directory /nope"),
        (["--run-dir", "{base}/empty"], 1, "/empty is no run directory: no events.jsonl and no socket"),
        (["--run-dir", ""], 2, "the name of the job is empty"),
        ([""], 2, "the name of the job is empty"),
    ],
)
@pytest.mark.parametrize("command", [["status"], ["inject", "kill", "--rank", "0"]])
def test_a_job_that_is_not_there(
    base: Path,
    capsys: pytest.CaptureFixture[str],
    command: list[str],
    words: list[str],
    status: int,
    message: str,
) -> None:
    if command[0] == "inject" and not words[0].startswith("-"):
        words = ["--job", *words]
    words = [word.format(base=base) for word in words]
    assert cli.main([*command, *words]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert message in err
    assert err.count("\n") == 1


def test_no_job_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(jobs, "base_dir", lambda: tmp_path / "none")
    assert cli.main(["status"]) == 1
    assert "no job was found" in capsys.readouterr().err


# --- inject -------------------------------------------------------------------------------------------------


class Agents:
    """Control servers that answer from a thread and remember what they were asked."""

    def __init__(self, run_dir: Path) -> None:
        self.run_dir = run_dir
        self.asked: list[tuple[int, control.Request]] = []
        self._servers: dict[int, control.ControlServer] = {}
        self._stop, self._wake = os.pipe2(os.O_CLOEXEC)
        self._thread = threading.Thread(target=self._serve)

    def add(self, node: int, ranks: range) -> None:
        def answer(request: control.Request) -> control.StatusReply | control.Reply:
            self.asked.append((node, request))
            if isinstance(request, control.StatusRequest):
                return control.StatusReply({"trainers": [], "job": None})
            if request.rank not in ranks:
                return control.Reply(False, f"rank {request.rank} is not on node {node}")
            return control.Reply(True, f"{request.kind} on node {node}")

        server = control.ControlServer(self.run_dir / f"agent-{node}.sock", answer)
        self._servers[server.fileno()] = server

    def start(self) -> None:
        self._thread.start()

    def _serve(self) -> None:
        owners = dict(self._servers)
        while True:
            ready, _, _ = select.select([self._stop, *owners], [], [])
            if self._stop in ready:
                return
            for fd in ready:
                server = owners[fd]
                if fd == server.fileno():
                    client = server.accept()
                    if client is not None:
                        owners[client] = server
                elif not server.serve(fd):
                    del owners[fd]

    def close(self) -> None:
        os.write(self._wake, b"x")
        self._thread.join(30)
        for server in self._servers.values():
            server.close()
        os.close(self._stop)
        os.close(self._wake)


@pytest.fixture
def agents(base: Path, capsys: pytest.CaptureFixture[str]) -> Iterator[Agents]:
    agents = Agents(base / "new")
    agents.add(0, range(2))
    agents.add(1, range(2, 4))
    agents.start()
    yield agents
    agents.close()


Ask = Callable[..., control.Inject]


@pytest.mark.parametrize(
    ("words", "request_"),
    [
        (["kill", "--rank", "3"], control.Inject("kill", 3)),
        (["hang", "--rank", "2"], control.Inject("hang", 2)),
        (["kill-manager", "--rank", "3"], control.Inject("kill_manager", 3)),
        (["lose", "--rank", "2"], control.Inject("lose", 2)),
        (
            [
                "lose",
                "--rank",
                "2",
                "--allocation",
                "model",
                "--group",
                "4",
                "--pages",
                "tolerance",
                "--tier1",
                "1",
            ],
            control.Inject("lose", 2, "model", 4, "tolerance", 1),
        ),
        (["lose", "--rank", "2", "--pages", "7", "--seed", "9"], control.Inject("lose", 2, pages=7, seed=9)),
        (["poison", "--rank", "2", "--pages", "3"], control.Inject("poison", 2, tier1=3)),
    ],
)
def test_the_agent_that_owns_the_rank_is_asked(
    agents: Agents, capsys: pytest.CaptureFixture[str], words: list[str], request_: control.Inject
) -> None:
    assert cli.main(["inject", *words]) == 0
    assert f"{request_.kind} on node 1" in capsys.readouterr().out
    assert agents.asked == [(0, request_), (1, request_)]


def test_a_rank_that_nobody_owns(agents: Agents, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inject", "kill", "--rank", "9"]) == 1
    assert capsys.readouterr().err == (
        "leto inject: error: rank 9 is not on node 0; rank 9 is not on node 1\n"
    )


def test_a_job_without_agents(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["inject", "kill", "--rank", "0"]) == 1
    assert "no agent of new runs on this host" in capsys.readouterr().err


def test_an_agent_that_is_dead_or_mute(base: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import socket

    with socket.socket(socket.AF_UNIX) as mute:
        mute.bind(str(base / "new" / "agent-0.sock"))
    assert cli.main(["inject", "kill", "--rank", "0"]) == 1
    err = capsys.readouterr().err
    assert "no answer from the agent" in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["kill"], "kill needs --rank"),
        (["explode", "--rank", "0"], "invalid choice: 'explode'"),
        (["kill", "--rank", "-1"], "'-1' must be a number of at least 0"),
        (["kill", "--rank", "9" * 5000], "must be a number of at most 9223372036854775807"),
        (["lose", "--rank", "0", "--group", str(2**63)], "must be a number of at most"),
        (["lose", "--rank", "0", "--pages", str(2**64)], "must be a number of at most"),
        (["lose", "--rank", "0", "--seed", str(2**64)], "must be a number of at most"),
        (
            ["plan", "--mttf", "9", "--ranks", "1", "--count", "1", "--rank", "0"],
            "--rank has no meaning for plan",
        ),
        (["kill", "--rank", "0", "--mttf", "9"], "--mttf has no meaning for kill"),
        (["schedule", "x.json", "--rank", "0"], "--rank has no meaning for schedule"),
        (["kill", "--rank", "0", "--pages", "3"], "--pages has no meaning for kill"),
        (["poison", "--rank", "0", "--tier1", "3"], "--tier1 has no meaning for poison"),
        (["lose", "--rank", "0", "--pages", "0"], "'0' must be a number of at least 1, or 'tolerance'"),
        (["poison", "--rank", "0", "--pages", "tolerance"], "poison takes a number"),
    ],
)
def test_wrong_usage(base: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str) -> None:
    try:
        status = cli.main(["inject", *words])
    except SystemExit as error:
        status = error.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_status_asks_the_agents_of_a_running_job(agents: Agents, capsys: pytest.CaptureFixture[str]) -> None:
    path = agents.run_dir / jobs.EVENTS_FILE
    path.unlink()
    with EventWriter(path) as writer:
        for event in STORY[:-1]:
            writer.write(**event)
    assert cli.main(["status", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["agents"] == 2
    assert {node for node, _ in agents.asked} == {0, 1}
