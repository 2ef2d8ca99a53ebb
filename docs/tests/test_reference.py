"""The reference and the code list the same public names."""

from __future__ import annotations

import importlib
import importlib.util
import re
from pathlib import Path

import pytest

REFERENCE = Path(__file__).parents[1] / "reference"
PAGES = sorted(REFERENCE.glob("leto-*.md"))
DIRECTIVE = re.compile(r"^\.\. auto(?:class|function|data|exception|module):: ([\w.]+)$", re.MULTILINE)


def documented(page: Path) -> set[str]:
    return set(DIRECTIVE.findall(page.read_text(encoding="utf-8")))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_reference_is_complete(page: Path) -> None:
    name = page.stem.replace("-", "_")
    if importlib.util.find_spec(name) is None:
        pytest.skip(f"{page.stem} is not installed here")
    module = importlib.import_module(name)
    public = {f"{name}.{item}" for item in module.__all__ if not item.startswith("__")}
    known = {item for item in documented(page) if item.count(".") == 1}
    assert known == public, f"missing: {sorted(public - known)}; unknown: {sorted(known - public)}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_documented_names_explain_themselves(page: Path) -> None:
    if importlib.util.find_spec(page.stem.replace("-", "_")) is None:
        pytest.skip(f"{page.stem} is not installed here")
    silent = []
    for path in sorted(documented(page)):
        module, _, name = path.rpartition(".")
        thing = getattr(importlib.import_module(module), name)
        if callable(thing) and not (thing.__doc__ or "").strip():
            silent.append(path)
    assert not silent, f"without a docstring: {silent}"
