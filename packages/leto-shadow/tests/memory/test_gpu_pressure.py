"""Memory pressure on two GPUs: one rank takes back its shadow's memory, and the world goes down with it.

The counterpart on real devices of the second test of `test_pressure.py`; the load, the hook and the job are
those of `benchmarks/memory_pressure.py`.
"""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path
from typing import Any

import pytest

from leto_shadow import oom_hook
from leto_shadow.gpu import WatchError, usable_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(300)]

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
MIB = 1 << 20
ROOM_MIB = 12288
FEW_BUFFERS = {"NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "4", "NCCL_BUFFSIZE": str(1 << 20)}
"""The load has five communicators, which take gigabytes with NCCL's defaults."""


def load_module(path: Path) -> Any:
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_reclaim_of_one_rank_takes_both_shadows_down_and_both_return(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pytest.importorskip("torch.distributed")
    try:
        usable_gpus(2)
    except WatchError as error:
        pytest.skip(str(error))
    if importlib.util.find_spec("cuda") is None:
        pytest.skip("needs pip install 'leto-rmp[cuda]'")
    if (why := oom_hook.unavailable()) is not None:
        pytest.skip(why)
    for setting, value in FEW_BUFFERS.items():
        monkeypatch.setenv(setting, value)
    pressure = load_module(BENCHMARKS / "memory_pressure.py")
    with tempfile.TemporaryDirectory(prefix="leto-pressure-") as name:
        folder = Path(name)
        job = pressure.Job(folder, pressure.Nvml(), ["--backend", "cuda"], [], ROOM_MIB, ranks=2)
        try:
            since = job.wait("started", 150.0)["t"]
            for rank in (0, 1):
                job.wait("shadow_level", 90.0, since, rank=rank, level=3)
            held = job.footprints()
            reserve = pressure.RESERVE_MIB * MIB
            # Room for a shadow at L2, none at L3: in the middle between the two.
            job.demand((held[2] + reserve + held[3]) / 2)
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
