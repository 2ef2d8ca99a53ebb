"""The pages on operations list what the code has: exit codes, commands, events."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

leto_shadow = pytest.importorskip("leto_shadow")
OPERATIONS = Path(__file__).parents[1] / "operations"


def test_exit_codes_are_documented() -> None:
    from leto_shadow.exit_codes import ExitCode

    text = (OPERATIONS / "exit-codes.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (\d+) \| (\w+) \|", text, re.MULTILINE))
    wanted = {str(int(code)): code.name for code in ExitCode if code < 128}
    assert rows == wanted


@pytest.mark.parametrize("command", ["run", "status", "report", "inject", "doctor"])
def test_options_of_the_page_exist(command: str) -> None:
    text = (OPERATIONS / "commands.md").read_text(encoding="utf-8")
    section = text.split(f"\n## leto {command}\n")[1].split("\n## ")[0]
    documented = set(re.findall(r"--[a-z][a-z0-9-]+", section))
    script_arguments = {"--epochs", "--help"}
    done = subprocess.run(
        [sys.executable, "-m", "leto_shadow.cli", command, "--help"],
        timeout=60,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    unknown = {option for option in documented - script_arguments if option not in done.stdout}
    assert not unknown, f"`leto {command}` has no {sorted(unknown)}"
