"""The build hook: machine code where a compiler makes it, and else a wheel that says why it has none."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, Generic, TypeVar

import pytest

ROOT = Path(__file__).parents[1]
OUTPUT = 'while [ "$1" != -o ]; do shift; done; '


@pytest.fixture
def hook(monkeypatch: pytest.MonkeyPatch) -> Any:
    """hatch_build.py, without hatchling, which only builds need."""
    interface: Any = ModuleType("hatchling.builders.hooks.plugin.interface")
    kind = TypeVar("kind")

    class BuildHookInterface(Generic[kind]):
        pass

    interface.BuildHookInterface = BuildHookInterface
    monkeypatch.setitem(sys.modules, interface.__name__, interface)
    spec = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.delenv(module.VARIABLE, raising=False)
    return module


def compiler(folder: Path, name: str, script: str | bytes) -> str:
    """A compiler that does as the script says."""
    path = folder / name
    path.write_bytes(script if isinstance(script, bytes) else f"#!/bin/sh\n{script}\n".encode())
    path.chmod(0o755)
    return str(path)


GOOD = f'if [ "$1" = --version ]; then echo release 13.5, V13.5.37; else {OUTPUT}echo code > "$2"; fi'
LATE = f'{OUTPUT}case "$2" in *100*) echo PTX of the future >&2; exit 1;; esac; echo code > "$2"'


def built(hook: Any, monkeypatch: pytest.MonkeyPatch, out: Path, *found: str) -> tuple[str, list[str]]:
    monkeypatch.setattr(hook, "compilers", lambda: iter(found))
    out.mkdir()
    return hook.compile_all(ROOT, out), sorted(path.name for path in out.iterdir())


def test_every_architecture_is_compiled(hook: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    note, files = built(hook, monkeypatch, tmp_path / "out", compiler(tmp_path, "nvcc", GOOD))
    assert note == "cubins by nvcc V13.5.37"
    assert files == sorted(f"kernels_sm_{k}.cubin" for k in hook.ARCHITECTURES)


@pytest.mark.parametrize(
    ("script", "why"),
    [
        (LATE, "PTX of the future"),
        (b"\x7fELF of another machine", "Exec format"),
        ("exec sleep 30", "timed out"),
    ],
    ids=["refuses", "does not start", "hangs"],
)
def test_a_compiler_that_fails_leaves_nothing(
    hook: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, script: str | bytes, why: str
) -> None:
    """The wheel is built all the same; the next compiler is tried."""
    monkeypatch.setattr(hook, "TIMEOUT_S", 0.5 if why == "timed out" else 60.0)
    bad, good = compiler(tmp_path, "bad", script), compiler(tmp_path, "good", GOOD)
    note, files = built(hook, monkeypatch, tmp_path / "out", bad)
    assert why in note
    assert files == []
    monkeypatch.setattr(hook, "TIMEOUT_S", 60.0)
    if why != "timed out":
        note, files = built(hook, monkeypatch, tmp_path / "again", bad, good)
        assert len(files) == len(hook.ARCHITECTURES), note


def test_the_compiler_can_be_left_out(hook: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(hook.VARIABLE, "1")
    note, files = built(hook, monkeypatch, tmp_path / "out", compiler(tmp_path, "nvcc", GOOD))
    assert (note, files) == (f"{hook.VARIABLE} was set", [])
    assert hook.Kernels.dependencies(SimpleNamespace(target_name="wheel")) == []
