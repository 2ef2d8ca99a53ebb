"""A process with PyTorch on a real GPU, for `test_gpu_memory.py`: one JSON command a line, one JSON answer
a line."""

from __future__ import annotations

import json
import os
import sys
import time
import warnings
from typing import Any

import torch

from leto_shadow import oom_hook

GIB = 1 << 30
kept: list[Any] = []


def empty(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="cuda")


class Needy(torch.autograd.Function):
    """Needs memory in its backward pass, which runs on a thread of autograd's."""

    nbytes = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        kept.append(empty(Needy.nbytes))
        return grad * 2


def attempt(command: dict[str, Any]) -> Any:
    match command["do"]:
        case "squeeze":  # leave so much of the device free
            kept.append(empty(torch.cuda.mem_get_info()[0] - command["leave"]))
        case "clear":
            kept.clear()
            torch.cuda.empty_cache()
        case "allocate":
            kept.append(empty(command["size"]))
        case "cache":
            block = empty(command["size"])
            del block
        case "backward":
            Needy.nbytes = command["size"]
            Needy.apply(torch.ones(1, device="cuda", requires_grad=True)).sum().backward()
        case "capture":
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                kept.append(empty(command["size"]).fill_(7))
            graph.replay()
            torch.cuda.synchronize()
            assert kept[-1][-1].item() == 7
            kept.append(graph)
        case "fraction":
            torch.cuda.set_per_process_memory_fraction(command["fraction"])
        case "check":
            oom_hook.check_allocator()
        case "expandable":
            torch.cuda.memory._set_allocator_settings("expandable_segments:True")
        case "measure":
            view = oom_hook.measure()
            assert view is not None
            return [view.free_bytes, view.total_bytes, view.spare_bytes]
    return "ok"


warnings.simplefilter("ignore")
torch.ones(1, device="cuda")
if sys.argv[1:]:  # a shadow: holds memory until it is killed
    kept.append(empty(int(sys.argv[1])))
    torch.cuda.synchronize()
    print(json.dumps(os.getpid()), flush=True)
    time.sleep(600)
assert oom_hook.attach(os.environ)
for line in sys.stdin:
    started = time.monotonic()
    try:
        result = attempt(json.loads(line))
    except (torch.OutOfMemoryError, oom_hook.OomHookError) as error:
        result = f"{type(error).__name__}: {error}"
    print(json.dumps({"result": result, "seconds": time.monotonic() - started}), flush=True)
