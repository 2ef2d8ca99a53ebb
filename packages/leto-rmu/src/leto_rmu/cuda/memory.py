"""Memory with its data pages on a GPU: of a state manager, and of this process alone.

Role: the counterpart of `leto_rmu.memory` (paper section 4). Pages on the device are torch tensors, uint8
(n, S); parity pages and what is placed on the host are numpy arrays. A page that was replaced has the same
address, so tensors stay valid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from leto_rmp import page_count
from leto_rmu._pool import AllocationSpec, PageRef, PoolConfig
from leto_rmu.memory import ArrayMemory, ArrayRegion, ClientMemory, Region
from leto_rmu.ops import Bytes

__all__ = ["CudaMemory", "DeviceRegion", "TorchMemory"]


@dataclass(frozen=True)
class DeviceRegion(ArrayRegion):
    """A region: ``pages`` is a tensor if it is on the device, else a numpy array, as parity always is."""

    pages: Any


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class CudaMemory(ClientMemory):
    """GPU memory of a state manager, through a leto_rmp ``Client`` (backend "cuda") with the writer role.

    A page is acknowledged only when all work of this process on the device has ended.
    """

    def __init__(self, client: Any) -> None:
        super().__init__(client)
        self._devices: set[torch.device] = set()

    def allocate(self, specs: Sequence[AllocationSpec]) -> Mapping[str, Region]:
        return {name: self._region(found) for name, found in self.client.allocate(specs).items()}

    def _region(self, found: Any) -> DeviceRegion:
        pages = found.pages
        if found.on_device:
            size = found.config.page_bytes
            pages = found.tensor(torch.uint8, numel=found.page_count * size).view(-1, size)
            self._devices.add(pages.device)
        return DeviceRegion(found.name, found.spec, pages, found.tier1, found.tier2, tuple(found.groups))

    def acknowledge(self, refs: Sequence[PageRef]) -> None:
        for device in self._devices:
            _wait(device)
        super().acknowledge(refs)


class TorchMemory(ArrayMemory):
    """Memory in tensors on ``device``, parity in numpy arrays: survives an updater object, not a process.

    On the device "cpu" it stands in for a GPU: the same tensors and the same code. Beside a GPU host memory
    is pinned, as a leto_rmp writer pins it, unless ``pinned`` is False.
    """

    region = DeviceRegion

    def __init__(
        self, config: PoolConfig, device: torch.device | str = "cuda", *, pinned: bool = True
    ) -> None:
        super().__init__(config)
        self.device = torch.device(device)
        self._pinned = pinned and self.device.type == "cuda"

    def _pages(self, spec: AllocationSpec) -> Any:
        if spec.placement != "device":
            return super()._pages(spec)
        shape = (page_count(spec, self.config), self.config.page_bytes)
        return torch.zeros(shape, dtype=torch.uint8, device=self.device)

    def _host_pages(self, *count: int) -> Bytes:
        if not self._pinned:
            return super()._host_pages(*count)
        pages: Bytes = torch.zeros(
            (*count, self.config.page_bytes), dtype=torch.uint8, pin_memory=True
        ).numpy()
        return pages

    def acknowledge(self, refs: Sequence[PageRef]) -> None:
        _wait(self.device)
        super().acknowledge(refs)
