"""Every Python example in the documentation runs, by itself, with warnings as errors."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "packages/*/README.md")
    for path in ROOT.glob(pattern)
    if "_build" not in path.parts
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
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=tmp_path,
        timeout=120,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{source}\n--- standard error ---\n{done.stderr}"
