"""One rank under memory pressure, on simulated and on real GPUs: the same job, the same demands on it."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def load_pressure() -> Any:
    """The module `benchmarks/memory_pressure.py`."""
    path = BENCHMARKS / "memory_pressure.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def both_shadows_give_way_and_return(job: Any, demand: Callable[[], float]) -> None:
    """L3 belongs to the world: when rank 0 takes back memory for ``demand()`` bytes, which leave room for L2
    only, rank 1's goes to L2 too; L3 returns for both at once. Failures in both states are recovered."""
    try:
        since = job.wait("started", 150.0)["t"]
        for rank in (0, 1):
            job.wait("shadow_level", 90.0, since, rank=rank, level=3)
        job.demand(demand())
        reclaimed = job.wait("reclaimed", 60.0, since, rank=0)
        assert reclaimed["level"] == 3
        assert reclaimed["satisfied"]
        since = reclaimed["t"]
        world = job.wait("world_renewed", 40.0, since - 1.0)["world"]
        for rank in (0, 1):
            assert job.wait("shadow_level", 90.0, since, rank=rank, level=2)["world"] >= world
        up = [one for one in job.events if one["event"] == "shadow_level" and one["t"] > since]
        assert not [one for one in up if one["level"] == 3], "L3 belongs to the world"
        job.demand(0.6 * job.room)
        since = job.kill("medium", 2, rank=1)  # the deferred initialisation takes both to L3
        for rank in (0, 1):
            job.wait("shadow_level", 90.0, since, rank=rank, level=2)
        since = job.kill("calm", 2, rank=0)
        for rank in (0, 1):
            job.wait("shadow_level", 90.0, since, rank=rank, level=3)
        assert job.stop() == 0
    except BaseException:
        for log in sorted((job.run_dir / "logs").glob("*.log")):
            print(f"==== {log.name}\n{log.read_text(errors='replace')[-3000:]}")
        raise
    finally:
        job.abandon()
    assert [one["source"] for one in job.kills] == ["in-place", "in-place"]
    assert not [one for one in job.events if one["event"] == "out_of_memory"]
    assert {one["rank"] for one in job.events if one["event"] == "shadow_allowed"} == {0}
