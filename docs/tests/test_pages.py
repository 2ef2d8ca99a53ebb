"""Links between the files of the repository lead somewhere, and CI runs what the README says."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    path
    for pattern in ("*.md", "docs/**/*.md", "packages/*/*.md", "packages/*/docs/*.md")
    for path in ROOT.glob(pattern)
    if "_build" not in path.parts
)
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s#]+)(#[^)\s]*)?\)")
MARK = re.compile(r"^(<{7}|>{7}|\|{7}) ", re.MULTILINE)
FENCE = re.compile(r"^(`{3,}).*?^\1$", re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files(page: Path) -> None:
    text = FENCE.sub("", page.read_text(encoding="utf-8"))
    targets = [target for target, _ in LINK.findall(text) if "://" not in target]
    missing = [target for target in targets if not (page.parent / target).exists()]
    assert not missing, f"{page.relative_to(ROOT)} links to files that do not exist: {missing}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_merge_has_left_its_marks(page: Path) -> None:
    assert not MARK.search(page.read_text(encoding="utf-8")), page.relative_to(ROOT)


def test_ci_runs_the_command_of_the_readme() -> None:
    last_line = (ROOT / ".ci" / "run").read_text(encoding="utf-8").strip().splitlines()[-1]
    assert f"\n    {last_line}\n" in (ROOT / "README.md").read_text(encoding="utf-8")
