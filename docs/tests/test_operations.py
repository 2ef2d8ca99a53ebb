"""The pages on operations list what the code has: exit codes, commands, events."""

from __future__ import annotations

import argparse
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


def test_events_are_documented() -> None:
    source = Path(leto_shadow.__file__).parent
    told = re.compile(r'(?:_note|[Rr]ecord|\.write)\(\s*((?:"[a-z_]+"(?: if [^"]+ else )?)+)')
    calls = [
        found for path in source.glob("*.py") for found in told.findall(path.read_text(encoding="utf-8"))
    ]
    events = {name for call in calls for name in re.findall(r'"([a-z_]+)"', call)}
    assert {"recovered", "started", "reclaimed", "job_failed"} <= events, "how events are written has changed"
    events |= {"finished"}  # the coordinator's other name for the end
    text = (OPERATIONS / "run-directory.md").read_text(encoding="utf-8")
    documented = re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)
    assert sorted(documented) == sorted(events)


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


@pytest.mark.parametrize("command", ["run", "status", "report", "inject", "doctor"])
def test_options_are_documented(command: str) -> None:
    """Those that the help shows; each once, by any of its names."""
    from leto_shadow import cli

    (commands,) = (one for one in cli._parser()._actions if isinstance(one, argparse._SubParsersAction))
    text = (OPERATIONS / "commands.md").read_text(encoding="utf-8")
    section = text.split(f"\n## leto {command}\n")[1].split("\n## ")[0]
    missing = [
        action.option_strings[0]
        for action in commands.choices[command]._actions
        if action.option_strings and action.help != argparse.SUPPRESS and action.dest != "help"
        if not any(re.search(rf"`[^`]*{name}\b", section) for name in action.option_strings)
    ]
    assert not missing, f"commands.md says nothing of {missing}"
