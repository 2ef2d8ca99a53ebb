"""The allocator hook seen from Python: where it is, how it gets into trainers, what it cannot work with.

Paper section 6. ``libleto_oom.so`` (``native/oom_hook.c``) is preloaded into trainers and asks the agent
for the shadow's memory when an allocation would fail. PyTorch itself is not changed. What bypasses
cudaMalloc cannot be helped, and is refused with the reason before or while a trainer starts, instead of
failing after hours:

* expandable segments and the cudaMallocAsync backend (they allocate through other calls), pluggable
  allocators;
* a PyTorch that does not import cudaMalloc dynamically (it would never reach the hook): counted, not assumed.

A shadow at L1 holds no GPU memory, so that everything works without the hook there; `leto run` says so.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from collections.abc import Mapping, MutableMapping
from pathlib import Path
from typing import Any

from leto_shadow.preinit import NO_GPU_LEVEL, MemoryView

__all__ = [
    "CONF_VARIABLES",
    "FD_VARIABLE",
    "LIBRARY",
    "WAIT_S",
    "OomHookError",
    "attach",
    "check_allocator",
    "choose",
    "conflict",
    "measure",
    "preload",
    "reclaim_at_first_failure",
    "unavailable",
]

LIBRARY = Path(__file__).with_name("libleto_oom.so")
FD_VARIABLE = "LETO_OOM_FD"
WAIT_S = 10.0
"""Longest time that a failing allocation waits for the shadow's memory."""

_VERSION = 1
CONF_VARIABLES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
"""Where PyTorch's allocator is set up: its name from 2.9 on, and the one before."""
_WAY_OUT = "or let shadows wait without GPU memory (leto run --shadow-level 1)"
_attached: ctypes.CDLL | None = None


class OomHookError(RuntimeError):
    """The allocator is set up in a way that keeps the hook from seeing its allocations."""


def unavailable(library: Path = LIBRARY) -> str | None:
    """Return why there is no hook; None if there is one."""
    if not sys.platform.startswith("linux"):
        return f"the allocator hook needs Linux, found {sys.platform}"
    if not library.is_file():
        return (
            f"leto-shadow was installed without its allocator hook ({library.name}): no C compiler worked"
            " when the wheel was built; install one and build it again"
        )
    return None


def conflict(environ: Mapping[str, str]) -> str | None:
    """Return which setting in ``environ`` makes PyTorch allocate past the hook; None if none does."""
    for name in CONF_VARIABLES:
        value = environ.get(name, "")
        if re.search(r"expandable_segments\s*:\s*True", value):
            return (
                f"{name} asks for expandable segments, which bypass cudaMalloc, so that a shadow's memory"
                f" could not be reclaimed: take expandable_segments out, {_WAY_OUT}"
            )
        if re.search(r"backend\s*:\s*cudaMallocAsync", value):
            return (
                f"{name} asks for the cudaMallocAsync backend, whose failures cannot be retried: take it out,"
                f" {_WAY_OUT}"
            )
    return None


def choose(backend: str, highest_level: int, environ: Mapping[str, str]) -> tuple[Path | None, int, str]:
    """Decide for an agent: the library to preload (None: no hook), the highest level of shadows, and why.

    Without the hook shadows on a device stay at L1, so that none can ever be the cause of an OOM.
    ``LETO_OOM_HOOK`` = ``always`` asks for the hook on the host backend too (a simulated device in tests).
    """
    if backend == "host" and environ.get("LETO_OOM_HOOK") != "always":
        return None, highest_level, ""
    if highest_level <= NO_GPU_LEVEL:
        return None, highest_level, ""
    why = unavailable() or conflict(environ)
    if why is not None:
        return None, NO_GPU_LEVEL, f"shadows wait at L{NO_GPU_LEVEL}, without GPU memory: {why}"
    return LIBRARY, highest_level, ""


def preload(environ: MutableMapping[str, str], library: Path = LIBRARY) -> None:
    """Add ``library`` to the objects that a process started with ``environ`` loads first."""
    others = environ.get("LD_PRELOAD", "")
    environ["LD_PRELOAD"] = f"{library}:{others}" if others else str(library)


def attach(environ: MutableMapping[str, str], wait_s: float = WAIT_S) -> bool:
    """In a trainer: give the hook its socket. Children inherit neither socket nor library.

    Returns False if the agent passed none. Raises `OomHookError` if the library is not the one that belongs
    to this version.
    """
    global _attached
    fd = environ.pop(FD_VARIABLE, None)
    if fd is None:
        return False
    names = [name for name in environ.pop("LD_PRELOAD", "").split(":") if name]
    left = [name for name in names if Path(name).name != LIBRARY.name]
    if left:
        environ["LD_PRELOAD"] = ":".join(left)
    os.set_inheritable(int(fd), False)
    hook = ctypes.CDLL(None)  # what is preloaded is in the global scope
    try:
        version = hook.leto_oom_version()
    except AttributeError:
        raise OomHookError(
            f"the allocator hook is not loaded although the agent preloads it (LD_PRELOAD: {names}); does"
            " something between agent and trainer reset that variable?"
        ) from None
    if version != _VERSION:
        raise OomHookError(f"expected version {_VERSION} of the allocator hook, found {version}: reinstall")
    hook.leto_oom_calls.restype = ctypes.c_uint64
    hook.leto_oom_attach.argtypes = (ctypes.c_int, ctypes.c_uint32, ctypes.c_int)
    # Without its cache PyTorch makes no second call.
    uncached = environ.get("PYTORCH_NO_CUDA_MEMORY_CACHING", "") not in ("", "0")
    hook.leto_oom_attach(int(fd), round(wait_s * 1000), int(uncached))
    _attached = hook
    return True


def reclaim_at_first_failure(enabled: bool = True) -> None:
    """Take the shadow's memory at an allocation's first failure already, before PyTorch flushes its cache.

    For code whose allocator makes no second attempt: allocations inside ``torch.cuda.use_mem_pool`` of
    PyTorch 2.8 to 2.12. Captures of CUDA graphs are recognised without this. Does nothing without the hook.
    """
    if _attached is not None:
        _attached.leto_oom_eager(int(enabled))


def _cuda() -> Any:
    """torch.cuda, if this process has already started to use a device; nothing is initialised by asking."""
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return None
    return torch.cuda


def check_allocator() -> None:
    """In a trainer with the hook: raise `OomHookError` if PyTorch's allocations do not pass through it."""
    cuda = _cuda()
    if _attached is None or cuda is None:
        return
    backend = cuda.get_allocator_backend()
    if backend != "native":
        raise OomHookError(
            f"expected PyTorch's native allocator, found {backend!r}: use that one, {_WAY_OUT}"
        )
    if cuda.memory._snapshot()["allocator_settings"].get("expandable_segments", False):
        raise OomHookError(
            "expandable segments were turned on at run time; they bypass cudaMalloc, so that a shadow's"
            f" memory cannot be reclaimed: leave them off, {_WAY_OUT}"
        )
    segments = sum(
        cuda.memory_stats(device).get("segment.all.allocated", 0) for device in range(cuda.device_count())
    )
    if segments and not _attached.leto_oom_calls():
        raise OomHookError(
            f"PyTorch made {segments} allocations and none passed through the allocator hook (a build with a"
            f" static CUDA runtime?): use PyTorch's own wheels, {_WAY_OUT}"
        )


def measure() -> MemoryView | None:
    """Return the memory of this process's current device; None before it uses one."""
    cuda = _cuda()
    if cuda is None:
        return None
    free, total = cuda.mem_get_info()
    stats = cuda.memory_stats_as_nested_dict()
    split = stats["inactive_split_bytes"]["all"][
        "peak"
    ]  # cannot be flushed, so a successor may need it as well
    needed = stats["allocated_bytes"]["all"]["peak"] + split
    return MemoryView(free, total, stats["reserved_bytes"]["all"]["current"] - needed)
