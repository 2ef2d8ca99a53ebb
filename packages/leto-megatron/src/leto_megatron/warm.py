"""What a shadow on a GPU runs before it is needed, so that its first iteration is as fast as the others.

Role in the whole (paper, levels of initialisation): CUDA loads a kernel at its first launch, cuBLAS chooses
an algorithm at a shape's first product. Level 2 runs a small update of the optimizer; level 3, where the
groups exist, an iteration of one layer of the real shapes. Nothing of it stays but what the libraries keep.
"""

from __future__ import annotations

import dataclasses
import gc
import importlib
import logging
import os
from typing import Any

import torch

from leto_megatron import model, process
from leto_megatron.config import Config, ConfigError
from leto_rmp import PoolConfig
from leto_rmu import Hyper, Segment, SyncResult, UpdatePlan, decide
from leto_shadow import Context
from leto_shadow.oom_hook import CONF_VARIABLES

__all__ = [
    "CACHE_VARIABLE",
    "PARK_VARIABLE",
    "CacheHint",
    "cache_bytes",
    "grow_cache",
    "import_kernels",
    "iterate_once",
    "load_kernels",
    "park",
    "unpark",
]

CACHE_VARIABLE = "LETO_CACHE_MIB"
"""MiB that a trainer on a GPU takes for PyTorch's cache at once when it becomes active; 0: none. Default:
auto, what its predecessor's cache held, where twice as much is free."""

PARK_VARIABLE = "LETO_PARK_STACK"
"""Set to 0: shadows at level 3 keep the memory of stacks, which they otherwise give back until promotion."""

_PAGE_BYTES = 64 * 1024
_NUMEL = 200_000
_TEXT_BYTES = 16 * 1024
_PARKED_STACK = 16  # bytes; what the driver cannot do with so few it rounds up
_LEFT_BYTES = 1 << 30  # for libraries, and for the small blocks, which are never cut from a large one
_DEEPER = 4  # so many times what the limit says kernels with deep stacks may have made the driver reserve
_log = logging.getLogger("leto_megatron")

_parked: int | None = None  # the limit of stacks that `unpark` restores


def import_kernels() -> None:
    """Import what works on GPU memory; no GPU is touched."""
    for name in ("cupy", "leto_ec.cuda", "leto_rmu.cuda"):
        importlib.import_module(name)


def load_kernels(config: Config) -> None:
    """Run one update of a small optimizer, and a reconstruction: the kernels of both are loaded then."""
    from leto_ec import ReedSolomon
    from leto_rmu.cuda import CudaUpdater, TorchMemory

    pool = PoolConfig(_PAGE_BYTES, 64, 16, 1)
    # What the job's pool is like is not known yet: this is the usual one. Another one's kernels come later.
    scheme = config.scheme_on(PoolConfig(backend="cuda"))
    offset = 0 if scheme == "slots" and config.precision == "bf16" else None
    plan = UpdatePlan(
        [Segment("all", _NUMEL, model_offset=offset)],
        config=pool,
        grad_numel=_NUMEL,
        scheme=scheme,
        model_bytes=2 * _NUMEL,
    )
    updater = CudaUpdater(TorchMemory(pool), plan, barrier=lambda: None)
    updater.recover(decide([updater.summary()]))
    updater.write("all", "master", torch.ones(_NUMEL, device="cuda"))
    updater.initialize()
    updater.compute_begins()
    updater.grads.fill_(1.0)
    updater.step([Hyper(1e-3)], b"", lambda: SyncResult(0.5, None, False, 1.0))
    code = ReedSolomon(data=64, parity=16)
    pages = torch.zeros(64, _PAGE_BYTES, dtype=torch.uint8, device="cuda")
    parity = torch.zeros(16, _PAGE_BYTES, dtype=torch.uint8, device="cuda")
    code.encode(pages, out=parity)
    code.reconstruct(pages, parity, lost_data=[0, 5])
    torch.cuda.synchronize()
    del updater, pages, parity
    _give_back()


def iterate_once(config: Config) -> None:
    """One iteration of one layer per pipeline stage, without its optimizer step. Collective.

    Two microbatches where the run has several: only the second one adds to gradients that are there already.
    """
    small = dataclasses.replace(
        config,
        layers=config.pipeline_parallel,
        microbatches=min(2, config.microbatches),
        iterations=2,
        corpus_bytes=max(_TEXT_BYTES, 4 * config.sequence),
    )
    process.seed_everything(small)  # the streams of the run are set after this, by whatever it starts from
    transformer = model.transformer_config(small)
    parts = model.wrap(small, transformer, model.build_gpt(small, transformer))
    model.Compute(small, parts)(0)
    parts.optimizer.prepare_grads()
    parts.optimizer.get_grad_norm()
    if small.distributed_optimizer:
        parts.ddp.start_param_sync()
    torch.cuda.synchronize()
    del parts, transformer
    _give_back()


def cache_bytes() -> int | None:
    """What `CACHE_VARIABLE` asks for, None: what the predecessor had; raise ConfigError if it is neither."""
    text = os.environ.get(CACHE_VARIABLE, "auto").strip()
    if text == "auto":
        return None
    if not text.isdecimal():
        raise ConfigError(f"{CACHE_VARIABLE} must be auto or a number of MiB, found {text!r}")
    return int(text) << 20


class CacheHint:
    """What a trainer's cache holds for large tensors, in bytes: left for the next trainer of the rank.

    Looked at after iterations number 1, 2, 4, 8 and so on of a life: it seldom grows after the first.
    """

    NAME = "cache_bytes"

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._iterations = self._left = 0

    @classmethod
    def left(cls, ctx: Context) -> int:
        """What was left for the trainer of ``ctx``; 0: nothing."""
        return int(ctx.hints.get(cls.NAME, 0.0))

    def after_iteration(self) -> None:
        self._iterations += 1
        if self._ctx.backend == "cuda" and not self._iterations & (self._iterations - 1):
            held = int(torch.cuda.memory_stats().get("reserved_bytes.large_pool.current", 0))
            if held > self._left:
                self._left = held
                self._ctx.hint(**{self.NAME: float(held)})


def grow_cache(predecessor_bytes: int = 0) -> int:
    """Take memory for PyTorch's cache in one piece; return the bytes: 0 if none are asked for, or no room is.

    A new process's cache is empty, so its first iteration asks the driver for every large tensor anew, and
    the device waits for that (10 ms of an iteration of 285: docs/benchmarks/recoveries-h200x2-handles.md).
    The cache cuts them from one large block instead. Memory that is not free is not asked for: it would be
    taken from the next shadow. One block with a small tensor in it cannot be given back, as most of many can
    be: so what the predecessor had is taken only where the device holds it twice. With max_split_size_mb
    PyTorch cuts nothing from a block that large, so it would lie there beside what training takes.
    """
    asked = cache_bytes()
    wanted = predecessor_bytes if asked is None else asked
    if not wanted:
        return 0
    free, _total = torch.cuda.mem_get_info()
    left = _LEFT_BYTES if asked is not None else max(wanted, _LEFT_BYTES)
    why = f"{free} bytes are free" if free < wanted + left else ""
    if any("max_split_size_mb" in os.environ.get(name, "") for name in CONF_VARIABLES):
        why = "max_split_size_mb keeps large blocks whole"
    if why:
        level = logging.INFO if asked is None else logging.WARNING
        _log.log(level, "%s: %s, so the cache grows piece by piece", CACHE_VARIABLE, why)
        return 0
    torch.empty(wanted, dtype=torch.uint8, device="cuda")  # nobody keeps it: it is the cache's at once
    return wanted


def park() -> int:
    """Give back the memory that the driver reserves for stacks; no kernel may be launched before `unpark`.

    It is reserved for as many threads as the device can hold at once, with the default of 1 KiB each: 264 MiB
    on a chip of 132 multiprocessors, and more once a kernel with a deeper stack has run. Lowering the limit
    frees it. A shadow that waits runs no kernel. What cannot be done costs memory and nothing else.

    Returns how many bytes `unpark` will need; 0 if nothing was given back. What others on the device take or
    give at the same moment is in that measure, hence its bounds: what the limit says, and a few times that.
    """
    global _parked
    if _parked is not None or not _is_on_device():
        return 0
    try:
        before = _stack_limit()
        free, least = _free_bytes(), before * _threads()
        _set_stack_limit(_PARKED_STACK)
    except (ImportError, RuntimeError) as error:
        _log.warning("the memory of stacks is not given back: %s", error)
        return 0
    _parked = before
    return min(max(_free_bytes() - free, least), _DEEPER * least)


def unpark() -> None:
    """Reserve the memory of stacks again, if it was given back.

    Raises torch.OutOfMemoryError if others have taken it meanwhile, RuntimeError if the driver refuses it for
    another reason. The process can run no kernel then: it has to end, and a trainer that has given nothing
    back goes on in its place.
    """
    global _parked
    if _parked is not None:
        _set_stack_limit(_parked)
        _parked = None


def _is_on_device() -> bool:
    """Whether this process uses a device; then nothing that it has launched there runs any more."""
    cuda: Any = torch.cuda
    if not cuda.is_initialized():
        return False
    cuda.synchronize()
    return True


def _free_bytes() -> int:
    return int(torch.cuda.mem_get_info()[0])


def _threads() -> int:
    """Threads that the device can hold at once, each with a stack."""
    found: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    return int(found.multi_processor_count * found.max_threads_per_multi_processor)


def _driver() -> Any:
    from cuda.bindings import driver

    return driver


def _stack_limit() -> int:
    driver = _driver()
    error, value = driver.cuCtxGetLimit(driver.CUlimit.CU_LIMIT_STACK_SIZE)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"cuCtxGetLimit(CU_LIMIT_STACK_SIZE): {error}")
    return int(value)


def _set_stack_limit(nbytes: int) -> None:
    driver = _driver()
    (error,) = driver.cuCtxSetLimit(driver.CUlimit.CU_LIMIT_STACK_SIZE, nbytes)
    if error == driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY:
        raise torch.OutOfMemoryError(
            f"the device has no memory left for stacks of {nbytes} bytes a thread, which this shadow had "
            f"given back while it waited: others have taken it. {PARK_VARIABLE}=0 keeps it ({error})"
        )
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(f"cuCtxSetLimit(CU_LIMIT_STACK_SIZE, {nbytes}): {error}")


def _give_back() -> None:
    """Return the memory of what was dropped: a shadow keeps none, and cuBLAS gets its workspace again when
    it is next used."""
    gc.collect()
    clear = getattr(torch._C, "_cuda_clearCublasWorkspaces", None)
    if clear is not None:
        clear()
    torch.cuda.empty_cache()
