"""Every Python example here runs, by itself, with warnings as errors. (Packages test their own pages.)"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    page for page in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")) if "_build" not in page.parts
)
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def examples() -> list[pytest.param]:  # type: ignore[valid-type]
    """The blocks fenced as `python`, each with the page and the line where it begins."""
    found = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        for match in BLOCK.finditer(text):
            line = text.count("\n", 0, match.start()) + 1
            found.append(pytest.param(match.group(1), id=f"{page.relative_to(ROOT)}:{line}"))
    return found


def test_examples_are_found() -> None:
    assert len(examples()) >= 4, f"expected the examples of the README at least, in {len(PAGES)} pages"


@pytest.mark.parametrize("source", examples())
def test_example_runs(source: str, tmp_path: Path) -> None:
    script = tmp_path / "example.py"
    script.write_text(source, encoding="utf-8")
    command = [sys.executable, "-W", "error", str(script)]
    if "leto_shadow.run(" in source:
        command = under_leto(script, tmp_path)
    done = subprocess.run(
        command,
        cwd=tmp_path,
        timeout=240,
        capture_output=True,
        text=True,
        check=False,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, f"{source}\n--- standard error ---\n{done.stderr}"
    if "leto_shadow.run(" in source:
        check_recovery(tmp_path / "run" / "events.jsonl")


def under_leto(script: Path, folder: Path) -> list[str]:
    """The command that runs a trainer on two ranks and kills one of them on the way."""
    drill = {"id": "kill", "kind": "kill", "rank": 1, "iteration": 5, "point": "forward"}
    (folder / "drills.json").write_text(json.dumps([drill]), encoding="utf-8")
    pool = ["--page-bytes", "4096", "--data-pages", "48", "--tier1-pages", "6"]
    job = ["--job-id", "example", "--run-dir", str(folder / "run"), "--drills", str(folder / "drills.json")]
    patient = ["--hang-min-s", "300", "--hang-initial-s", "300"]  # a busy machine is no hang
    leto = [sys.executable, "-m", "leto_shadow.cli", "run", "--nproc-per-node", "2"]
    return [*leto, *pool, *job, *patient, str(script)]


def check_recovery(log: Path) -> None:
    """The job recovered in place, and its events are those that the documentation lists."""
    from leto_shadow import read_events

    events = read_events(log)
    resumed = [(event["iteration"], event["source"]) for event in events if event["event"] == "resumed"]
    assert sorted(resumed) == [(0, "fresh"), (0, "fresh"), (5, "in-place"), (5, "in-place")]
    page = (ROOT / "docs" / "operations" / "run-directory.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^\| `(\w+)` \|", page, re.MULTILINE))
    assert {event["event"] for event in events} <= documented
