"""What recovery asks of the device under a rank: is it operable, and is a dead trainer's memory free yet?

Paper sections 2.2 (operability) and 3.4. One small interface per backend of the memory pool. On the host
backend both answers are immediate: processes that are gone have given their memory back, and a host that
runs the agent is operable. The cuda backend (`leto_shadow.gpu`) asks its driver (Xid class, remapped rows,
free memory measured against a bound; case 4), and every call has a deadline because drivers hang.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Collection, Iterator
from typing import Protocol

from leto_shadow.gpu import CudaDevice, Watch, WatchError, chosen, usable_gpus
from leto_shadow.nvml import Gpu
from leto_shadow.operability import DeviceFacts

__all__ = ["BACKENDS", "Device", "HostDevice", "check_backend", "open_device"]

BACKENDS = ("host", "cuda")


class Device(Protocol):
    """The devices of the local ranks, as far as recovery needs them."""

    @property
    def pids(self) -> set[int]:
        """Child processes that belong to the device."""

    def use(self, rank: int, uuid: str) -> None:
        """The rank's pages are on this device from now on."""

    def facts(self, rank: int) -> DeviceFacts | None:
        """Return what is to be seen of the device, for `leto_shadow.operability`; None: nothing to judge."""

    def facts_of(self, ranks: Collection[int]) -> dict[int, DeviceFacts | None]:
        """The same of several ranks' devices at once."""

    def recheck(self) -> Callable[[], tuple[DeviceFacts, ...] | None]:
        """Begin to look anew at all devices that ranks have used: nothing of before counts, and nothing is
        held of them afterwards. Call what is returned until it has the answer."""

    def survey(self) -> Callable[[], tuple[DeviceFacts, ...] | None]:
        """Begin to look at the devices that ranks would have on this node, as `recheck` does, but beside
        whatever is on them. Nothing that was seen before is forgotten."""

    def ended(self, rank: int, pid: int) -> None:
        """A trainer of the rank has ended."""

    def wait_for_free_memory(
        self, ranks: Collection[int], timeout_s: float
    ) -> Iterator[tuple[int, dict[str, float] | OSError]]:
        """Yield each rank when memory of its dead trainers is measured to be free, with what was measured, or
        why that cannot be said; `TimeoutError` past the bound."""

    def footprint(self, rank: int, pid: int) -> dict[str, float]:
        """Return what a process holds of the device, in bytes; {} where nothing is measured."""

    def close(self) -> None:
        """Release what the device itself holds."""


class HostDevice:
    """CPU and memfds."""

    @property
    def pids(self) -> set[int]:
        return set()

    def use(self, rank: int, uuid: str) -> None:
        """There is one host."""

    def facts(self, rank: int) -> DeviceFacts | None:
        """The host runs this very code."""
        return None

    def facts_of(self, ranks: Collection[int]) -> dict[int, DeviceFacts | None]:
        """The same for every rank."""
        return dict.fromkeys(ranks)

    def recheck(self) -> Callable[[], tuple[DeviceFacts, ...] | None]:
        """Nothing to look at."""
        return tuple

    def survey(self) -> Callable[[], tuple[DeviceFacts, ...] | None]:
        """Nothing to look at."""
        return tuple

    def ended(self, rank: int, pid: int) -> None:
        """Its memory is free already."""

    def wait_for_free_memory(
        self, ranks: Collection[int], timeout_s: float
    ) -> Iterator[tuple[int, dict[str, float] | OSError]]:
        """The kernel frees a process's memory before its pidfd fires, and the fence has waited for that."""
        for rank in ranks:
            yield rank, {}

    def footprint(self, rank: int, pid: int) -> dict[str, float]:
        """Not measured."""
        return {}

    def close(self) -> None:
        """Nothing is held."""


def check_backend(backend: str, local_ranks: int) -> tuple[Gpu, ...]:
    """Raise `ValueError` unless a backend of the memory pool can serve so many ranks on this node.

    Returns the GPUs of the node; none for the host backend, which does not look for any.
    """
    if backend == "host":
        return ()
    if backend not in BACKENDS:
        raise ValueError(f"there is no backend {backend!r}; there are {', '.join(BACKENDS)}")
    try:
        gpus = usable_gpus(local_ranks)
    except WatchError as error:
        raise ValueError(f"--backend cuda cannot be used: {error}") from error
    if importlib.util.find_spec("cuda") is None or importlib.util.find_spec("cuda.bindings") is None:
        raise ValueError("--backend cuda needs the package cuda-bindings: pip install 'leto-rmp[cuda]'")
    return gpus


def open_device(backend: str, local_ranks: int = 1) -> Device:
    """Return the device that goes with a backend of the memory pool; `ValueError` if it cannot be used."""
    gpus = check_backend(backend, local_ranks)
    if backend == "host":
        return HostDevice()
    watch = Watch()
    try:
        watch.start()
    except WatchError as error:
        raise ValueError(f"--backend cuda cannot be used: {error}") from error
    return CudaDevice(watch, mine=chosen(gpus, os.environ, local_ranks))
