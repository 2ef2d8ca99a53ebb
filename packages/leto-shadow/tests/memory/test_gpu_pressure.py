"""Memory pressure on two GPUs: one rank takes back its shadow's memory, and the world goes down with it.

The counterpart on real devices of the second test of `test_pressure.py`; the load, the hook and the job are
those of `benchmarks/memory_pressure.py`.
"""

from __future__ import annotations

import importlib.util
import tempfile
from pathlib import Path

import pytest
from pressure_case import both_shadows_give_way_and_return, load_pressure

from leto_shadow import oom_hook
from leto_shadow.gpu import WatchError, usable_gpus

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.timeout(300)]

MIB = 1 << 20
ROOM_MIB = 12288
FEW_BUFFERS = {"NCCL_NVLS_ENABLE": "0", "NCCL_MAX_CTAS": "4", "NCCL_BUFFSIZE": str(1 << 20)}
"""The load has five communicators, which take gigabytes with NCCL's defaults."""


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
    pressure = load_pressure()
    with tempfile.TemporaryDirectory(prefix="leto-pressure-") as name:
        folder = Path(name)
        job = pressure.Job(folder, pressure.Nvml(), ["--backend", "cuda"], [], ROOM_MIB, ranks=2)
        reserve = pressure.RESERVE_MIB * MIB

        def between() -> float:
            """Room for a shadow at L2, none at L3: in the middle between the two."""
            held = job.footprints()
            return float((held[2] + reserve + held[3]) / 2)

        both_shadows_give_way_and_return(job, between)
