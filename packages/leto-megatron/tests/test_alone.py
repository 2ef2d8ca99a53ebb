"""What one process without peers can show: the promises of the CPU shim, and where a bind puts things.

A takeover only points at retained memory: a bind writes nothing there, and leaves nothing on the meta device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from test_storage import CONFIGURATIONS

MUTANTS = {
    "Zeroes": "bind writes",
    "CopiesParameters": "a parameter lies elsewhere",
    "ForgetsBuffers": "tensors stay on the meta device",
    "ForgetsCopies": "tensors stay on the meta device",
    "ForgetsHooks": "a gradient does not arrive",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """One process looks at all of it: importing Megatron is the slow part."""
    wanted = {name: changes for name, changes in CONFIGURATIONS.items() if name.startswith("dp2")}
    folder: Path = tmp_path_factory.mktemp("alone")
    [result] = run_ranks(1, "worker_placement:look", {"configurations": wanted}, folder)
    return dict(result)


def test_the_shim_keeps_its_promises(found: dict[str, Any]) -> None:
    """None of them leaks further than stated."""
    promises = found["promises"]
    assert [name for name, kept in promises.items() if not kept] == []
    assert len(promises) > 10


def test_everything_gets_its_place_and_nothing_is_written(found: dict[str, Any]) -> None:
    right = {name: problems for name, problems in found["placed"].items() if name not in MUTANTS}
    assert len(right) == 6, "four configurations, two of them with masters that move as well"
    assert {name: problems for name, problems in right.items() if problems} == {}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_bind_that_is_wrong_is_noticed(mutant: str, found: dict[str, Any]) -> None:
    assert MUTANTS[mutant] in found["placed"][mutant]
