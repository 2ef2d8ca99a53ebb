"""The scheme "slots": chunks move, and every step is bit-equal to torch.optim wherever they are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from rmu_lab import MATRICES, Pool, World

from leto_rmu import SGD, AdamW, Muon, Segment

WORLDS: dict[str, dict[str, Any]] = {
    "adamw": {"pool": Pool(data_pages=8)},
    "two sub-blocks": {"pool": Pool(data_pages=17), "chunk_pages": 6},
    "sgd": {"pool": Pool(data_pages=8, tier1_pages=4, tier2_pages=0), "optimizer": SGD()},
    "not aligned": {"pool": Pool(data_pages=7), "align": False},
    "one chunk": {"segments": (Segment("a", 60, 0, 3),), "pool": Pool(data_pages=4)},
    **(
        {
            "muon": {
                "pool": Pool(data_pages=8),
                "optimizer": Muon(AdamW()),
                "segments": MATRICES,
                "grad_numel": 450,
            }
        }
        if hasattr(torch.optim, "Muon")
        else {}
    ),
    "aligned in place": {"pool": Pool(data_pages=17), "chunk_pages": 6, "scheme": "undo", "align": True},
}


def world_of(name: str, **more: Any) -> World:
    return World(**{"scheme": "slots", **WORLDS[name], **more})


@pytest.mark.parametrize("name", WORLDS)
def test_many_iterations_wrap_around_the_slots(name: str) -> None:
    world = world_of(name, no_ops=frozenset({3, 4}))
    memory, up = world.start()
    for _ in range(2 * world.chunks + 5):
        world.check(memory, up)
        world.iterate(up)
    world.check(memory, up)
