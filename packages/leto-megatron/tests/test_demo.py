"""The demo end to end on a tiny model, and how it fails when it has to."""

from __future__ import annotations

import io
import json
import re
import sys
from pathlib import Path

import pytest
from jobs import POOL, settings
from rich.console import Console

from leto_megatron import demo
from leto_megatron.demo import DemoFailed


@pytest.mark.slow
def test_four_failures_and_an_exact_verdict(tmp_path: Path) -> None:
    output = io.StringIO()
    config = settings(iterations=40, checkpoint_interval=6, dropout=0.1)
    exact = demo.run_demo(config, tmp_path, Console(file=output, width=100), POOL)
    text = output.getvalue()
    assert exact, text
    assert "EXACT" in text
    report = json.loads((tmp_path / "report.json").read_text())
    assert report["exact"] is True
    kinds = [row["kind"] for row in report["failures"]]
    assert kinds == ["kill-forward", "kill-update", "hang", "manager"], text
    assert [row["source"] for row in report["failures"]] == ["in-place"] * 3 + ["checkpoint"]
    assert [row["iterations_lost"] for row in report["failures"][:3]] == [0, 0, 0]
    assert 0 <= report["failures"][3]["iterations_lost"] <= 6
    assert (tmp_path / "report.html").stat().st_size > 10_000


def test_a_failing_run_shows_the_end_of_its_output(tmp_path: Path) -> None:
    log = tmp_path / "log"
    command = [sys.executable, "-c", "print('the reason'); raise SystemExit(3)"]
    with pytest.raises(DemoFailed, match=re.compile("exit status 3.*the reason", re.DOTALL)):
        demo._supervise("trial", command, log, lambda: False)


def test_a_silent_run_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "_SILENCE_S", 0.5)
    command = [sys.executable, "-c", "import os, time; print(os.getpid(), flush=True); time.sleep(600)"]
    with pytest.raises(DemoFailed, match="no progress"):
        demo._supervise("trial", command, tmp_path / "log", lambda: False)
    pid = int((tmp_path / "log").read_text())
    assert not Path(f"/proc/{pid}").exists(), "the child was left behind"


@pytest.mark.parametrize("words", [["--iterations", "10"], ["--seed", "-1"], ["--seed", "x"]])
def test_wrong_arguments_end_with_status_two(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        demo.main(words)
    assert caught.value.code == 2
    assert "error" in capsys.readouterr().err
