"""Rank function: what the CPU shim promises, looked at from inside a process that installed it."""

from __future__ import annotations

import sys
from typing import Any

import torch

from leto_megatron import cpu


def promises(rank: int, world: int, folder: str) -> dict[str, Any]:
    compile_before, random_before = torch.compile, torch.randn
    cpu.install()
    patched = torch.zeros
    cpu.install()
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    with torch.device("meta"):
        on_meta = torch.empty(3).is_meta and torch.zeros(3).is_meta
    tracker = get_cuda_rng_tracker()
    torch.manual_seed(1)
    tracker.add("stream", 5)
    outside = torch.get_rng_state()
    with tracker.fork("stream"):
        first = torch.rand(4).tolist()
    undisturbed = bool(torch.equal(outside, torch.get_rng_state()))
    with tracker.fork("stream"):
        second = torch.rand(4).tolist()
    return {
        "compile restored": torch.compile is compile_before,
        "compiler not imported": "torch._inductor" not in sys.modules,
        "nothing else touched": torch.randn is random_before,
        "installed once": torch.zeros is patched,
        "meta context works": on_meta,
        "literal device": str(torch.zeros(2, device="cuda").device) == "cpu",
        "device object": str(torch.ones(2, device=torch.device("cuda", 0)).device) == "cpu",
        "explicit meta kept": torch.empty(2, device="meta").is_meta,
        "current device": str(torch.empty(2, device=torch.cuda.current_device()).device) == "cpu",
        "fp32 type": torch.zeros(1).type() == "torch.cuda.FloatTensor",
        "bf16 type": torch.zeros(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor",
        "meta type": torch.zeros(1, device="meta").type() == "torch.cuda.FloatTensor",
        "conversion by type": torch.zeros(1).type(torch.float64).dtype == torch.float64,
        "tracker leaves the outer stream alone": undisturbed,
        "tracker goes on": first != second,
    }
