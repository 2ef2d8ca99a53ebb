"""The start of an agent: whose folders it accepts, and what a start that fails leaves behind."""

from __future__ import annotations

import os
import re
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest

from leto_shadow import agent_main
from leto_shadow.exit_codes import ExitCode


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder for temporary files; no agent that gets as far as to change this process."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(agent_main.linux, "become_subreaper", lambda: None)
    return tmp_path


def start(*options: str) -> int:
    words = ["--local-ranks", "1", "--job-id", "j", "--page-bytes", "4096", "--data-pages", "8"]
    return agent_main.main([*words, "--tier1-pages", "2", *options, "script.py"])


def stop_before_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise agent_main.UsageError("the folders were accepted")

    monkeypatch.setattr(agent_main, "Agent", refuse)


def test_the_default_folders_are_made_private(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stop_before_the_agent(monkeypatch)
    assert start() == ExitCode.USAGE
    assert "the folders were accepted" in capsys.readouterr().err
    base = temporary / f"leto-{os.getuid()}"
    assert [path.stat().st_mode & 0o777 for path in (base, base / "j", base / "j" / "logs")] == [0o700] * 3


@pytest.mark.parametrize("named", [False, True], ids=["default", "as leto run names it"])
def test_a_default_parent_that_others_can_use_is_refused(
    temporary: Path, capsys: pytest.CaptureFixture[str], named: bool
) -> None:
    base = temporary / f"leto-{os.getuid()}"
    base.mkdir()
    base.chmod(0o777)
    assert start(*(("--run-dir", str(base / "j")) if named else ())) == ExitCode.USAGE
    err = capsys.readouterr().err
    assert f"{base} must belong to uid {os.getuid()} with mode 0700" in err
    assert err.count("\n") == 1
    assert list(base.iterdir()) == []


def test_a_link_in_the_place_of_the_default_parent_is_refused(
    temporary: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    elsewhere = temporary / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    (temporary / f"leto-{os.getuid()}").symlink_to(elsewhere)
    assert start() == ExitCode.USAGE
    assert "with mode 0700" in capsys.readouterr().err
    assert list(elsewhere.iterdir()) == []


def test_a_parent_that_the_user_names_may_be_anyones_but_the_run_directory_may_not(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shared = temporary / "shared"
    shared.mkdir()
    shared.chmod(0o777)
    (shared / "open").mkdir()
    (shared / "open").chmod(0o755)
    assert start("--run-dir", str(shared / "open")) == ExitCode.USAGE
    assert "found uid" in capsys.readouterr().err
    assert list((shared / "open").iterdir()) == [], "refused before anything is put into it"
    stop_before_the_agent(monkeypatch)
    assert start("--run-dir", str(shared / "mine")) == ExitCode.USAGE
    assert "the folders were accepted" in capsys.readouterr().err


def test_a_full_disk_stops_no_agent_that_is_started_again(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It costs the log, not the memory that the agent is to take over."""
    full = SimpleNamespace(f_bavail=3, f_frsize=4096, f_blocks=100)
    monkeypatch.setattr(os, "statvfs", lambda _folder: full)
    stop_before_the_agent(monkeypatch)
    assert start() == ExitCode.USAGE
    assert "the disk is full" in capsys.readouterr().err
    (temporary / f"leto-{os.getuid()}" / "j").mkdir(parents=True)
    for folder in (temporary / f"leto-{os.getuid()}", temporary / f"leto-{os.getuid()}" / "j"):
        folder.chmod(0o700)
    assert start() == ExitCode.USAGE
    assert "the folders were accepted" in capsys.readouterr().err


def test_fewer_nodes_than_are_to_train_end_the_start(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It trained on what there was, and said nothing."""
    stop_before_the_agent(monkeypatch)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert start("--active-nodes", "3") == ExitCode.USAGE
    assert "expected at least so many nodes, found 2 (WORLD_SIZE): start torchrun" in capsys.readouterr().err
    assert list(temporary.iterdir()) == []
    for active in ("0", "1", "2"):
        assert start("--active-nodes", active) == ExitCode.USAGE
        assert "the folders were accepted" in capsys.readouterr().err


def test_too_few_descriptors_end_the_start_and_the_error_names_the_number(tmp_path: Path) -> None:
    """Case 2, for the agent itself."""
    agent = f"{sys.executable} -m leto_shadow.agent_main --local-ranks 8 --job-id few"
    command = f"ulimit -n 64 && exec {agent} --run-dir {tmp_path / 'run'} script.py"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == ExitCode.USAGE
    said = (
        r"leto: cannot start: the agent of node 0 needs 170 more file descriptors: RLIMIT_NOFILE must be at "
    )
    assert re.match(said + r"least \d+, the hard limit of process \d+ is 64\. Raise it", done.stderr)
    assert "handle" not in done.stderr, "an agent has none of them"
    assert done.stderr.count("\n") == 1
    assert not (tmp_path / "run").exists()


def test_a_soft_limit_that_is_too_low_is_raised(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Case 2: nobody has to raise what may be raised."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    stop_before_the_agent(monkeypatch)
    resource.setrlimit(resource.RLIMIT_NOFILE, (50, hard))
    try:
        assert start() == ExitCode.USAGE
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > 50
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert "the folders were accepted" in capsys.readouterr().err


@pytest.mark.parametrize("part", ["EventWriter", "HelperProcess", "AgentSocket", "AgentShell", "_Signals"])
def test_a_start_that_fails_late_leaves_no_socket(
    temporary: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], part: str
) -> None:
    reached = []

    def fail(*_: object, **__: object) -> None:
        reached.append((temporary / "run" / "agent-0.sock").exists())
        raise OSError("no more of these")

    monkeypatch.setattr(agent_main, part, fail)
    assert start("--run-dir", str(temporary / "run")) == ExitCode.USAGE
    assert "cannot start: no more of these" in capsys.readouterr().err
    assert reached == [True]
    assert {path.name for path in (temporary / "run").iterdir()} <= {"logs", "events.jsonl"}
