"""Each case of the page names tests, and they exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "concepts" / "cases.md").read_text(encoding="utf-8")
ROWS = {
    int(case): tests.split(", ") for case, tests in re.findall(r"^\| (\d+) \| (.+) \|$", PAGE, re.MULTILINE)
}


def test_every_case_has_a_row() -> None:
    described = [int(case) for case in re.findall(r"^case (\d+)$", PAGE, re.MULTILINE)]
    assert described == sorted(ROWS) == list(range(1, len(described) + 1))


@pytest.mark.parametrize("case", sorted(ROWS))
def test_the_tests_of_a_case_exist(case: int) -> None:
    for test in ROWS[case]:
        path, _, name = test.partition("::")
        package, _, rest = path.partition("/")
        file = ROOT / "packages" / f"leto-{package}" / "tests" / rest
        assert file.is_file(), f"case {case} names {test}, but there is no {file}"
        found = re.search(rf"^def {name}\(", file.read_text(encoding="utf-8"), re.MULTILINE)
        assert found, f"case {case}: {file.name} has no {name}"
