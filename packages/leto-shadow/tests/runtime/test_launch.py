"""`leto run`: what becomes torchrun's command line, and what is refused before anything starts."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import pytest
from torch.distributed.elastic.rendezvous import RendezvousTimeoutError

from leto_rmp import PoolConfig
from leto_shadow import agent_options, cli, launch, launcher
from leto_shadow.agent_place import pool_config

AGENT = "leto_shadow.agent_main"


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A script named train.py in the current directory; `json` stands in for the decision's module."""
    monkeypatch.chdir(tmp_path)
    Path("train.py").write_text("")
    return "train.py"


def dry_run(capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    assert cli.main(["run", "--dry-run", "--decide", "json:dumps", *words]) == 0
    return shlex.split(capsys.readouterr().out)


def agent_part(command: list[str]) -> list[str]:
    return command[command.index(AGENT) + 1 :]


def test_the_shortest_command(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    command = dry_run(capsys, script)
    head = [
        sys.executable,
        "-m",
        "leto_shadow.launcher",
        "--nproc-per-node",
        "1",
        "--standalone",
        "-m",
        AGENT,
    ]
    assert command[: len(head)] == head
    options = agent_options.parse(agent_part(command))
    assert (options.local_ranks, options.command, options.drills) == (1, ("train.py",), None)
    assert options.run_dir is not None
    assert options.run_dir.name == options.job_id


def test_everything_that_was_said_reaches_the_agent(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    Path("drills.json").write_text('[{"id": "a", "kind": "kill", "rank": 3, "iteration": 1}]')
    words = [
        "--nproc-per-node=4",
        "--job-id",
        "j1",
        "--run-dir",
        "run",
        "--drills",
        "drills.json",
        "--tier1",
        "6",
    ]
    words += ["--page-bytes", "16384", "--data-pages", "48", "--tier2-pages", "2", "--hang-deadline", "3"]
    words += ["--gpu-pages-per-handle", "4", "--shadow-level", "2", "--limit-fatals", "9"]
    words += [script, "--lr", "0.1", "--page-bytes", "7"]
    options = agent_options.parse(agent_part(dry_run(capsys, *words)))
    assert options.local_ranks == 4
    assert options.command == ("train.py", "--lr", "0.1", "--page-bytes", "7")
    assert (options.job_id, options.run_dir) == ("j1", Path.cwd() / "run")
    assert options.drills == Path.cwd() / "drills.json"
    assert (options.page_bytes, options.data_pages, options.tier1_pages, options.tier2_pages) == (
        16384,
        48,
        6,
        2,
    )
    assert pool_config(options).gpu_pages_per_handle == 4
    assert options.decide == "json:dumps"
    assert (options.policy.shadow_level, options.policy.limits.fatals) == (2, 9)
    hang = options.policy.hang
    assert (hang.initial_s, hang.min_s, hang.max_s) == (3.0, 3.0, 3.0)


def test_who_says_nothing_gets_handles_of_sixteen_gpu_pages(
    script: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pool = pool_config(agent_options.parse(agent_part(dry_run(capsys, script))))
    assert pool == PoolConfig()
    assert pool.gpu_pages_per_handle == 16


@pytest.mark.parametrize(
    ("nodes", "active"),
    [
        ([], 0),
        (["--active-nodes", "1"], 1),
        (["--nnodes", "2:4"], 2),
        (["--nnodes", "2:4", "--active-nodes", "2"], 2),
        (["--nnodes", "4", "--active-nodes", "2"], 2),
    ],
)
def test_how_many_nodes_train(
    script: str, capsys: pytest.CaptureFixture[str], nodes: list[str], active: int
) -> None:
    """A drill of rank 2 is one of a third rank, which two nodes with one rank each do not have."""
    words = ["--job-id", "j", *nodes]
    assert agent_options.parse(agent_part(dry_run(capsys, *words, script))).active_nodes == active
    Path("drills.json").write_text('[{"id": "a", "kind": "kill", "rank": 2, "iteration": 1}]')
    assert cli.main(["run", "--decide", "json:dumps", *words, "--drills", "drills.json", script]) == 2
    assert "rank" in capsys.readouterr().err


def test_a_module_and_a_rendezvous(script: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--nnodes", "2", "--nproc_per_node", "2", "--rdzv-id", "many", "--rdzv_backend", "c10d"]
    words += ["--rdzv-endpoint", "host:29400", "--max-restarts", "3", "-m", "json.tool", "-x"]
    command = dry_run(capsys, *words)
    assert "--standalone" not in command
    torch_run = import_module("torch.distributed.run")
    parsed = torch_run.parse_args(command[3:])
    assert (parsed.nnodes, parsed.nproc_per_node, parsed.rdzv_backend, parsed.max_restarts) == (
        "2",
        "1",
        "c10d",
        3,
    )
    assert (parsed.rdzv_endpoint, parsed.rdzv_id, parsed.module) == ("host:29400", "many", True)
    assert parsed.training_script == AGENT
    options = agent_options.parse(parsed.training_script_args)
    assert (options.job_id, options.local_ranks) == ("many", 2)
    assert options.command == ("-m", "json.tool", "-x")


def test_ranks_from_words(
    script: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2})
    assert (
        agent_options.parse(agent_part(dry_run(capsys, "--nproc-per-node", "cpu", script))).local_ranks == 3
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ([], "the following arguments are required: script"),
        (["nowhere.py"], "there is no script nowhere.py"),
        (["-m", "no.such.module"], "the module to run, 'no.such.module', cannot be found"),
        (["--bogus", "train.py"], "unknown arguments: --bogus"),
        (["--nproc-per-node", "0", "train.py"], "--nproc-per-node must be at least 1"),
        (["--nproc-per-node", "many", "train.py"], "must be a number, cpu, gpu or auto, found 'many'"),
        (["--nnodes", "4:1", "train.py"], "--nnodes 4:1: there cannot be fewer nodes than train"),
        (["--nnodes", "0", "train.py"], "--nnodes must be a number of at least 1"),
        (
            ["--active-nodes", "3", "train.py"],
            "--active-nodes 3: expected at least so many nodes, found --nnodes 1, its default: give",
        ),
        (["--nnodes", "2", "--active-nodes", "3", "train.py"], "found --nnodes 2: give --nnodes 3, or 3:MAX"),
        (
            ["--nnodes", "1:4", "--active-nodes", "3", "train.py"],
            "--active-nodes must be 1, the MIN of --nnodes 1:4 (up to 3 more nodes are spares), found 3: "
            "leave it out, or give --nnodes 3:4",
        ),
        (["--nnodes", "2", "train.py"], "a job on several nodes (--nnodes 2) needs --job-id"),
        (["--nnodes", "1:4", "train.py"], "a job on several nodes (--nnodes 1:4) needs --job-id"),
        (["--job-id", "../x", "train.py"], "--job-id must be"),
        (["--run-dir", "x" * 200, "train.py"], "too long for the sockets in it"),
        (["--page-bytes", "1000", "train.py"], "--page-bytes must be a positive multiple of 4096"),
        (["--page-bytes", "1073745920", "train.py"], "--page-bytes must be at most 1073741824 (1 GiB)"),
        (["--max-restarts", "-1", "train.py"], "--max-restarts must be a number from 0 to 999999999"),
        (["--max-restarts", "many", "train.py"], "--max-restarts must be a number from 0"),
        (["--run-dir", "train.py/x", "train.py"], "train.py is no folder: give another --run-dir"),
        (
            ["--run-dir", "/", "train.py"],
            "give another --run-dir; one that is not there yet",
        ),
        (
            ["--run-dir", "\udcff", "train.py"],
            "cannot be a run directory, it is no UTF-8: give another",
        ),
        (["--keep", "train.py/x", "train.py"], "train.py is no folder: give another one"),
        (["", "--iterations", "3"], "there is no script ''"),
        (["--node-rank", "x", "train.py"], "--node-rank must be a number from 0 to 999999999, found 'x'"),
        (["--master-port", "x", "train.py"], "--master-port must be a port, found 'x'"),
        (["--monitor-interval", "1s", "train.py"], "--monitor-interval must be a number of seconds"),
        (["--rdzv-conf", "timeout", "train.py"], "--rdzv-conf must be K=V,..., found 'timeout'"),
        (["--redirects", "4", "train.py"], "--redirects must be 0 to 3, or NODE:0 to 3,..., found '4'"),
        (["--tee", "0:3,1", "train.py"], "--tee must be 0 to 3, or NODE:0 to 3,..., found '0:3,1'"),
        (["--run-dir", "", "train.py"], "argument --run-dir: the path must not be empty"),
        (["--job-id", "", "train.py"], "argument --job-id: the name must not be empty"),
        (["--drills", "", "train.py"], "argument --drills: the path must not be empty"),
        (["--deadline-fence-s", "nan", "train.py"], "argument --deadline-fence-s: 'nan' must be a finite"),
        (["--deadline-join-s", "inf", "train.py"], "argument --deadline-join-s: 'inf' must be a finite"),
        (["--deadline-agent-s", "0", "train.py"], "argument --deadline-agent-s: '0' must be more than 0"),
        (["--hang-factor", "nan", "train.py"], "argument --hang-factor: 'nan' must be a finite number"),
        (["--limit-fatals", "-1", "train.py"], "argument --limit-fatals: '-1' must be a number from 0"),
        (["--drills", "fifo", "train.py"], "fifo: a drill file must be a regular file"),
        (["--page-bytes", "x", "train.py"], "argument --page-bytes: invalid int value: 'x'"),
        (["--backend", "tpu", "train.py"], "there is no backend 'tpu'; there are host, cuda"),
        (["--data-pages", "0", "train.py"], "--data-pages must be 1 to 65535"),
        (["--tier1", "65", "train.py"], "--tier1-pages must be 1 to 64"),
        (["--tier2", "-1", "train.py"], "--tier2-pages must be 0 to 64"),
        (["--gpu-pages-per-handle", "0", "train.py"], "--gpu-pages-per-handle must be 1 to 512"),
        (["--shadow-level", "4", "train.py"], "argument --shadow-level: invalid choice: 4"),
        (["--hang-deadline", "0", "train.py"], "--hang-deadline must be positive"),
        (["--hang-deadline", "inf", "train.py"], "--hang-deadline must be positive and finite"),
        (["--hang-deadline", "nan", "train.py"], "--hang-deadline must be positive and finite"),
        (["--hang-min-s", "601", "train.py"], "--hang-min-s must be at most --hang-max-s, found 601 and 600"),
        (["--standalone", "--nnodes", "1:2", "train.py"], "--standalone is for one node"),
        (["--decide", "json", "train.py"], "--decide must be module:function, found 'json'"),
        (["--decide", "no_such:f", "train.py"], "the module of --decide, 'no_such', cannot be found"),
        (["--decide", "json:no_such", "train.py"], "--decide: module 'json' has no function 'no_such'"),
        (["--decide", "json:__name__", "train.py"], "--decide: module 'json' has no function '__name__'"),
        (["--decide", "this:no_such", "train.py"], "--decide: module 'this' has no function 'no_such'"),
        (["--decide", ":f", "train.py"], "the module of --decide, '', cannot be found"),
        (["--drills", "none.json", "train.py"], "none.json: cannot read the drill file"),
        (["--drills", "bad.json", "train.py"], "there is no rank 1 (this job has ranks 0 to 0)"),
    ],
)
def test_mistakes_are_one_line_and_status_2(
    script: str, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    os.mkfifo("fifo")
    Path("bad.json").write_text('[{"id": "a", "kind": "kill", "rank": 1, "iteration": 1}]')
    if "--decide" not in words:
        words = ["--decide", "json:dumps", *words]
    try:
        status = cli.main(["run", *words])
    except SystemExit as error:
        status = error.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert err.startswith("leto run: error: ")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("error", "status"),
    [
        (ValueError("there is no\nbackend 'x'"), 2),
        (PermissionError(13, "no", "/logs"), 2),
        (RendezvousTimeoutError("nobody came"), 72),
    ],
)
def test_what_torchrun_refuses_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception, status: int
) -> None:
    def refuse(_argv: object) -> None:
        raise error

    monkeypatch.setattr(launcher, "torchrun", refuse)
    assert launcher.main(["--standalone", "-m", AGENT, "--local-ranks", "1", "train.py"]) == status
    err = capsys.readouterr().err
    assert err.startswith("leto: torchrun: ")
    assert err.endswith(f" (exit code {status})\n")
    assert err.count("\n") == 1


def test_the_launcher_ends_whatever_threads_torchrun_has_left() -> None:
    """Several signals in a row break off torchrun's own end; Python's would wait for its threads for ever."""
    code = (
        "import sys, threading\n"
        "from leto_shadow import launcher\n"
        "threading.Thread(target=threading.Event().wait).start()\n"
        "print('last words')\n"
        "launcher.leave(130)\n"
    )
    python = [sys.executable, "-c", code]
    done = subprocess.run(python, capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "last words\n", "")
    closed = ["bash", "-c", 'exec 0<&- 1>&- 2>&-; exec "$@"', "bash", *python]
    assert subprocess.run(closed, timeout=300, check=False).returncode == 130


def test_a_full_disk_is_found_before_anything_starts(
    script: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = SimpleNamespace(f_bavail=3, f_frsize=4096, f_blocks=100)
    monkeypatch.setattr(os, "statvfs", lambda _folder: full)
    assert cli.main(["run", "--decide", "json:dumps", "--run-dir", "run", script]) == 2
    err = capsys.readouterr().err
    assert "/run cannot be a run directory, the disk is full: 12288 bytes are free, 65536 are needed" in err
    assert err.count("\n") == 1
    assert not Path("run").exists()


@pytest.mark.parametrize(
    "words", [["doctor", "--json"], ["inject", "plan", "--mttf=9", "--ranks=1", "--count=1"]]
)
def test_output_that_cannot_be_written_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        assert cli.main(words) == 1
    assert capsys.readouterr().err == f"leto {words[0]}: error: [Errno 28] No space left on device\n"


def test_a_decision_beside_the_script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The helper finds the module there, so the check must as well; it does not import it."""
    folder = tmp_path / "project"
    folder.mkdir()
    (folder / "train.py").write_text("")
    (folder / "neighbour_decides.py").write_text("raise SystemExit\ndef decide(summaries): ...\n")
    monkeypatch.chdir(tmp_path)
    before = list(sys.path)
    assert cli.main(["run", "--dry-run", "--decide", "neighbour_decides:decide", "project/train.py"]) == 0
    assert cli.main(["run", "--dry-run", "--decide", "neighbour_decides:decode", "project/train.py"]) == 2
    assert "neighbour_decides" not in sys.modules
    assert sys.path == before


def test_run_becomes_torchrun_and_sets_what_torchrun_would(
    script: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[str, list[str], dict[str, str]]] = []
    monkeypatch.setattr(launch.os, "execve", lambda *call: seen.append(call))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    assert cli.main(["run", "--nproc-per-node", "2", "--decide", "json:dumps", script]) == 0
    ((program, command, environment),) = seen
    assert program == command[0] == sys.executable
    assert environment["OMP_NUM_THREADS"] == "1"
    assert environment["PYTHONUNBUFFERED"] == "1"


def test_the_entry_point_exists() -> None:
    pyproject = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    module, _, name = pyproject["project"]["scripts"]["leto"].partition(":")
    assert getattr(import_module(module), name) is cli.main


@pytest.mark.parametrize("command", [[], ["run"], ["status"], ["inject"], ["doctor"]])
def test_help_and_version(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main([*command, "--help"])
    assert ended.value.code == 0
    assert "usage: leto" in capsys.readouterr().out


def test_the_command_starts_without_torch() -> None:
    """Help and errors must come at once; importing torch takes seconds."""
    code = "import sys; from leto_shadow import cli; cli._parser(); print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "False\n"
    )


def test_a_reader_that_leaves_is_no_traceback(script: str) -> None:
    command = f"{shlex.quote(sys.executable)} -m leto_shadow.cli run --help | true"
    result = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=True, timeout=60)
    assert "Traceback" not in result.stderr
