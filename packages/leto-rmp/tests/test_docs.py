"""The README names what is public, and its example runs."""

from __future__ import annotations

import re
import tempfile
from pathlib import Path

import pytest

import leto_rmp

README = Path(__file__).parent.parent / "README.md"


def test_every_public_name_is_documented() -> None:
    section = README.read_text().split("## Public names")[1]
    assert set(re.findall(r"`(\w+)`", section)) == set(leto_rmp.__all__)


def test_the_example_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("torch").set_num_threads(1)
    first, second = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    body = second.replace("\n", "\n    ").rstrip()
    names: dict[str, object] = {}
    exec(first + "    " + body + "\n    client.close()\n", names)
    weights = names["weights"]
    assert isinstance(weights, leto_rmp.Allocation)
    assert not weights.created
    assert weights.pages.all()
