"""A training process before it has a model: imports, determinism, process groups, random streams.

Role in the whole: what both modes (stock Megatron, and Leto) do alike and first. Groups belong to a world
and can be left again, so that a shadow may meet others in the next one.

On GPUs the groups are NCCL's, with the same settings in every generation (`NCCL_SETTINGS`): a sum that is
formed in another order has other bits. What the *host* does (barriers, small exchanges, checkpoints' plans)
goes through one gloo group beside them, so that it neither waits for a stream nor needs a communicator.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import random
import socket
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from leto_megatron import cpu
from leto_megatron.config import Config, ConfigError

__all__ = [
    "NCCL_SETTINGS",
    "form_groups",
    "host_barrier",
    "host_group",
    "leave_groups",
    "prepare_process",
    "quiet",
    "seed_everything",
    "settle_device",
    "share_groups",
    "stay_on_loopback",
    "warm_groups",
]

NCCL_SETTINGS = {
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_ALGO": "Ring",
    "NCCL_PROTO": "Simple",
    "NCCL_MIN_CTAS": "8",
    "NCCL_MAX_CTAS": "8",
    "NCCL_BUFFSIZE": str(1 << 20),
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
"""Algorithm, protocol and channels, fixed: they decide the order of sums. Few channels and small buffers keep
a shadow small, and collectives slower than NCCL could make them (docs/how-to/gpu-memory.md). What the
environment sets already stands, and must then be the same for reference and run."""

PEER_S = 900.0
"""How long a collective waits for a peer. Longer than `leto run` lets any phase take by default (600 s): who
stands still is known to the hang detector, and to a communicator only that somebody does not come."""

_host_group: Any = None


def prepare_process() -> None:
    """What every training process does first: import Megatron, settle devices, ask for reproducible bits."""
    if torch.cuda.is_available():
        for name, value in {**NCCL_SETTINGS, "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}.items():
            os.environ.setdefault(name, value)
    # Megatron uses collectives by names that newer releases of torch call deprecated, at every call.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\..*")
    cpu.install()
    _deterministic()


def _deterministic() -> None:
    """Bit-reproducible kernels, and one thread a process: ranks share the machine's cores."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory with NaN is a debugging aid of the deterministic mode; it costs a pass over it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]


def settle_device(local_rank: int) -> None:
    """Make the rank's GPU the current device, with a context, cuBLAS and a first kernel of each sort in it.

    Without a GPU there is nothing to do. A shadow does this at level 2: a takeover does not wait for it.
    """
    if not torch.cuda.is_available():
        return
    torch.cuda.set_device(local_rank)
    with torch.random.fork_rng(devices=[local_rank]):
        for dtype in (torch.bfloat16, torch.float32):
            left = torch.ones(64, 64, device="cuda", dtype=dtype, requires_grad=True)
            loss = (left @ left).float().softmax(-1).sum()
            torch.autograd.backward(loss)
    torch.cuda.synchronize()


def form_groups(
    config: Config, store: Any = None, rank: int = -1, world_size: int = -1, timeout_s: float = PEER_S
) -> None:
    """Join the world and form Megatron's process groups. Without a store the launcher's environment is used.

    ``timeout_s``: of all its communicators, see `PEER_S`.

    Raises
    ------
    ConfigError
        If the world does not hold a whole number of model-parallel groups.
    """
    global _host_group
    from megatron.core import parallel_state

    timeout = datetime.timedelta(seconds=timeout_s)
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    if store is None:
        dist.init_process_group(backend, timeout=timeout)
    else:
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)
    model_ranks = config.tensor_parallel * config.pipeline_parallel
    if dist.get_world_size() % model_ranks:
        raise ConfigError(
            f"a world of {dist.get_world_size()} ranks does not hold whole groups of "
            f"tensor_parallel {config.tensor_parallel} x pipeline_parallel {config.pipeline_parallel}"
        )
    _host_group = dist.new_group(backend="gloo", timeout=timeout) if backend == "nccl" else None
    with quiet():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=config.tensor_parallel,
            pipeline_model_parallel_size=config.pipeline_parallel,
            distributed_timeout_minutes=max(1, int(timeout_s // 60)),
        )
    if backend == "nccl":
        share_groups(vars(parallel_state), lambda group: dist.get_backend(group) == "nccl")


def share_groups(names: dict[str, Any], wanted: Callable[[Any], bool]) -> int:
    """Let Megatron's groups that have the same ranks in the same order be one group; return how many are
    left.

    Megatron makes a group for each purpose (tensor parallel and model parallel ones are the same without
    pipeline stages, those of gradients and of their norm without tensor parallelism), and NCCL gives each one
    that is used a communicator with buffers of its own. Nothing here overlaps collectives of two groups, and
    the sums are of the same ranks in the same order. ``names``: the variables of `parallel_state`.
    """
    first: dict[tuple[int, ...], Any] = {}
    for name, group in sorted(names.items()):
        if isinstance(group, dist.ProcessGroup) and wanted(group):
            names[name] = first.setdefault(tuple(dist.get_process_group_ranks(group)), group)
    return len(first)


def stay_on_loopback() -> None:
    """Keep gloo on the loopback interface, for a world on one host: no host name has to resolve."""
    if "lo" in (name for _index, name in socket.if_nameindex()):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")


def host_group() -> Any:
    """The group of all ranks whose collectives take CPU tensors; None stands for the default group."""
    return _host_group


def host_barrier() -> None:
    """Return when every rank has called it; no work on a device is waited for."""
    dist.barrier(group=_host_group)


def leave_groups() -> None:
    """Give up Megatron's process groups and torch's; the latter may have been aborted before."""
    global _host_group
    from megatron.core import parallel_state

    _host_group = None
    parallel_state.destroy_model_parallel()
    if dist.is_initialized():
        dist.destroy_process_group()


def warm_groups(*, sharded: bool = True) -> None:
    """Run one collective in every group that training uses: connections exist before the first step.

    `sharded`: the distributed optimizer is used.
    """
    from megatron.core import parallel_state as ps

    token = torch.ones(1, device=torch.cuda.current_device())
    data = ps.get_data_parallel_group(with_context_parallel=True)
    model = (
        ps.get_tensor_model_parallel_group(),
        ps.get_model_parallel_group(),
        ps.get_pipeline_model_parallel_group(),
    )
    groups = [dist.group.WORLD, data, *model]
    if torch.cuda.is_available():
        # A communicator takes memory of the GPU: those only that training uses (all ranks of a group of one
        # wait for nobody, and Megatron leaves it out).
        norm = (
            ps.get_intra_distributed_optimizer_instance_group() if sharded else ps.get_model_parallel_group()
        )
        groups = [data, norm, *(group for group in model if dist.get_world_size(group) > 1)]
    for group in dict.fromkeys(groups):  # some of them are one and the same
        dist.all_reduce(token.clone(), group=group)
    host_barrier()


def seed_everything(config: Config) -> None:
    """Start every random stream of the job from the seed: Python, NumPy, torch and Megatron's tracker."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    # Stages of a pipeline draw different numbers, as in Megatron's own initialisation.
    seed = config.seed + 100 * parallel_state.get_pipeline_model_parallel_rank()
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Megatron warns about each optional package that it does without; the limits are stated in our docs."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
