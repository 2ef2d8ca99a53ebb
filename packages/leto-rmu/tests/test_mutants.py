"""The crash tests have teeth: each deliberately broken ordering ends in a wrong state, and they see it."""

from __future__ import annotations

import numpy as np
import pytest
from mutants import MUTANTS
from mutants_slots import SLOT_MUTANTS
from rmu_lab import Pool, World, Wrong, examine, loss_patterns, record_iteration, record_recovery

from leto_rmu import ProtocolError, ResumableUpdater

pytestmark = pytest.mark.timeout(900)  # on a busy machine; usually a tenth of that


def hunt(kind: type[ResumableUpdater], seed: int, limit: int, **options: object) -> str | None:
    """The search of the exhaustive tests, with random interleavings, until something is wrong.

    First every crash point alone and with one loss, then crashes of the recoveries.
    """
    world = World(seed=seed, updater=kind, no_ops=frozenset({0}), model_bytes=256, **options)  # type: ignore[arg-type]
    tried = 0
    points = record_iteration(world, seed=seed, tears=2, shuffle=True)  # right as long as nothing crashes
    memory = world.start()[0]
    order = np.random.default_rng(seed).permutation(len(points))
    for name in ("none", "derived"):
        for i in order:
            losses = loss_patterns(world, np.random.default_rng([seed, int(i)]), points[i].truths[0])[name]
            try:
                examine(world, memory, points[i], losses, seed=int(i), go_on=0)
            except (Wrong, ProtocolError) as wrong:
                return str(wrong)
    for k, i in enumerate(order):
        rng = np.random.default_rng([seed, int(i)])
        patterns = loss_patterns(world, rng, points[i].truths[0])
        names = ["none", list(patterns)[int(rng.integers(len(patterns)))], list(patterns)[k % len(patterns)]]
        try:
            for name in names:
                examine(world, memory, points[i], patterns[name], seed=int(i), go_on=0)
                tried += 1
            second = record_recovery(world, memory, points[i], patterns[names[k % 3]], seed=int(i))
            for again in second:
                more = (
                    loss_patterns(world, rng, points[i].truths[0])["1 of anything"]
                    if rng.random() < 0.7
                    else []
                )
                examine(world, memory, again, more, seed=int(i), go_on=0)
                tried += 1
        except (Wrong, ProtocolError) as wrong:
            return str(wrong)
        if tried > limit:
            return None
    return None


@pytest.mark.parametrize("name", MUTANTS)
def test_broken_ordering_is_caught(name: str) -> None:
    for seed in range(4):
        found = hunt(MUTANTS[name], seed, limit=2500)
        if found is not None:
            print(f"{name}: {found}")
            return
    pytest.fail(f"mutant {name!r} survived: the crash tests have a hole")


SLOTS = {"scheme": "slots", "pool": Pool(data_pages=8)}


@pytest.mark.parametrize("name", SLOT_MUTANTS)
def test_broken_free_slot_is_caught(name: str) -> None:
    for seed in range(4):
        found = hunt(SLOT_MUTANTS[name], seed, limit=2500, **SLOTS)
        if found is not None:
            print(f"{name}: {found}")
            return
    pytest.fail(f"mutant {name!r} survived: the crash tests have a hole")


@pytest.mark.parametrize("options", [{}, SLOTS], ids=["undo", "slots"])
def test_the_product_survives_the_same_hunt(options: dict[str, object]) -> None:
    assert hunt(ResumableUpdater, seed=0, limit=600, **options) is None
