"""Memory with its data pages on a GPU: of a state manager, and of this process alone.

Role: the counterpart of `leto_rmu.memory` (paper section 4). Pages on the device are torch tensors, uint8
(n, S); parity pages and what is placed on the host are numpy arrays. A page that was replaced has the same
address, so tensors stay valid.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from leto_rmp import ProtectionGroup, page_count, protection_groups
from leto_rmu import arrays
from leto_rmu._pool import AllocationSpec, Kind, PageRef, PoolConfig
from leto_rmu.errors import PlanError, ProtocolError
from leto_rmu.memory import ClientMemory, Region

__all__ = ["CudaMemory", "DeviceRegion", "TorchMemory"]


@dataclass(frozen=True)
class DeviceRegion:
    """A region: ``pages`` is a tensor if it is on the device, else a numpy array, as parity always is."""

    name: str
    spec: AllocationSpec
    pages: Any
    tier1: Any
    tier2: Any
    groups: Sequence[ProtectionGroup]

    def section(self, name: str) -> Any:
        """All pages of a section as (n, S), in PageRef order."""
        array = {"data": self.pages, "tier1": self.tier1, "tier2": self.tier2}[name]
        if array is None:
            raise PlanError(f"region {self.name!r} has no section {name!r}")
        return array.reshape(-1, self.pages.shape[1])


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
        return DeviceRegion(found.name, found.spec, pages, found.tier1, found.tier2, found.groups)

    def acknowledge(self, refs: Sequence[PageRef]) -> None:
        for device in self._devices:
            _wait(device)
        super().acknowledge(refs)


class TorchMemory:
    """Memory in tensors on ``device``, parity in numpy arrays: survives an updater object, not a process.

    On the device "cpu" it stands in for a GPU: the same tensors and the same code.
    """

    def __init__(self, config: PoolConfig, device: torch.device | str = "cuda") -> None:
        self.config = config
        self.device = torch.device(device)
        self.regions: dict[str, DeviceRegion] = {}
        self.marks: set[PageRef] = set()

    def allocate(self, specs: Sequence[AllocationSpec]) -> Mapping[str, Region]:
        for spec in specs:
            known = self.regions.get(spec.name)
            if known is None:
                self.regions[spec.name] = self._create(spec)
            elif known.spec != spec:
                raise PlanError(f"region {spec.name!r} exists as {known.spec}, asked for {spec}")
        return {spec.name: self.regions[spec.name] for spec in specs}

    def _create(self, spec: AllocationSpec) -> DeviceRegion:
        c, n = self.config, page_count(spec, self.config)
        groups = protection_groups(spec, c) if spec.kind is Kind.RETAINED else ()
        pages: Any = np.zeros((n, c.page_bytes), np.uint8)
        if spec.placement == "device":
            pages = torch.zeros((n, c.page_bytes), dtype=torch.uint8, device=self.device)

        def parity(rows: int) -> Any:
            return np.zeros((len(groups), rows, c.page_bytes), np.uint8) if groups and rows else None

        return DeviceRegion(spec.name, spec, pages, parity(c.tier1_pages), parity(c.tier2_pages), groups)

    def lost(self) -> frozenset[PageRef]:
        return frozenset(self.marks)

    def acknowledge(self, refs: Sequence[PageRef]) -> None:
        _wait(self.device)
        unknown = [r for r in refs if r not in self.marks]
        if unknown:
            raise ProtocolError(f"acknowledged pages that were not lost: {unknown[:3]}")
        self.marks.difference_update(refs)

    def lose(self, refs: Iterable[PageRef], seed: int) -> None:
        """Destroy pages, as a failure and the remap after it would; contents become random bytes."""
        rng = np.random.default_rng(seed)
        for ref in refs:
            page = self.regions[ref.allocation].section(ref.section)[ref.index]
            arrays.copy(page, rng.integers(0, 256, page.shape[0], dtype=np.uint8))
            self.marks.add(ref)
