"""The Megatron step stopped at operations all through the update, crossed with page losses (I-2).

The RMU's own tests do this exhaustively; here it is held that nothing *around* the update (schedule, data
position, random streams, gradient norm, step counts) is applied twice or not at all.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from ranks import run_ranks


@pytest.mark.parametrize(
    ("precision", "scheme"), [("bf16", "undo"), ("fp32", "undo"), ("bf16", "slots"), ("fp32", "slots")]
)
def test_stopped_anywhere_in_the_update(precision: str, scheme: str, tmp_path: Path) -> None:
    seed = int(os.environ.get("LETO_TEST_SEED", random.SystemRandom().randrange(1 << 30)))
    repeat = f"LETO_TEST_SEED={seed} pytest {__file__} -k {precision}-{scheme}"
    print(repeat)
    changes = {"precision": precision, "dropout": 0.1, "scheme": scheme, "lend_bytes": 64}
    arguments = {"changes": changes, "seed": seed, "points": 24}
    (result,) = run_ranks(1, "worker_crash:crash_points", arguments, tmp_path, timeout_s=500)
    assert result["wrong"] == [], f"{repeat}: {result}"
    assert result["operations"] > 40
    assert result["lent"] > 0, "no activation was in lent memory"
    assert result["actions"] == ["finish", "restart"], f"{repeat}: only one way out was tried"
