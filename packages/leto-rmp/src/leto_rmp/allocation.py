"""An allocation as a trainer sees it: numpy and torch views of shared pages, without copies.

A view keeps its mapping alive, also past `Client.close()`. Before promotion and after `release()`
host pages are read-only: numpy views made then say so, and a write through an older view or through
a torch tensor (which knows no read-only memory) is stopped by the MMU with SIGSEGV (I-4).

Pages on a GPU come as CUDA arrays and CUDA tensors. After `release()` or `close()` of a writer they are
read-only, or not mapped at all: work that uses an old view then fails and takes the process's GPU context
along. Before promotion they are not protected, so that the takeover has nothing to map: an observer
that writes breaks I-4, and nothing stops it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from leto_rmp.config import AllocationSpec, Kind, PoolConfig
from leto_rmp.device import DeviceArray, DeviceRange
from leto_rmp.errors import ConfigError
from leto_rmp.layout import ProtectionGroup, SectionName, page_count, protection_groups
from leto_rmp.mapping import SharedRange, WritableLook

if TYPE_CHECKING:
    import torch

__all__ = ["Allocation"]

Bytes = npt.NDArray[np.uint8]


class Allocation:
    """Pages of one allocation, mapped into this process."""

    def __init__(
        self,
        spec: AllocationSpec,
        config: PoolConfig,
        ranges: dict[SectionName, SharedRange],
        created: bool,
    ) -> None:
        self.spec = spec
        self.config = config
        self.created = created
        """Whether the call that returned this object created the allocation: its pages are zero then."""
        self._ranges = ranges
        self._groups: tuple[ProtectionGroup, ...] | None = None

    def __repr__(self) -> str:
        return f"Allocation({self.name!r}, {self.kind}, {self.page_count} pages)"

    @property
    def name(self) -> str:
        """The stable name."""
        return self.spec.name

    @property
    def kind(self) -> Kind:
        """The kind."""
        return self.spec.kind

    @property
    def nbytes(self) -> int:
        """Bytes asked for; the pages may hold a few more."""
        return self.spec.nbytes

    @property
    def page_count(self) -> int:
        """Data pages."""
        return page_count(self.spec, self.config)

    @property
    def groups(self) -> tuple[ProtectionGroup, ...]:
        """Protection groups of a retained allocation, () for other kinds."""
        if self._groups is None:
            retained = self.kind is Kind.RETAINED
            self._groups = protection_groups(self.spec, self.config) if retained else ()
        return self._groups

    @property
    def writable(self) -> bool:
        """Whether this process may write now."""
        return self._data().writable

    @property
    def on_device(self) -> bool:
        """Whether the data pages are on a GPU."""
        return self.config.backend == "cuda" and self.spec.placement == "device"

    @property
    def address(self) -> int:
        """First address of the data pages: in this process's memory, or on the device."""
        return self._data().address

    def _data(self) -> SharedRange:
        if "data" not in self._ranges:
            raise ConfigError(
                f"the data pages of {self.name!r} are on a GPU, and control clients map none: attach as "
                "observer or writer"
            )
        return self._ranges["data"]

    @property
    def pages(self) -> Any:
        """Data pages: uint8 (n, page_bytes), by physical index. A numpy array, or a `DeviceArray` on a GPU.

        The latter has `__cuda_array_interface__`: torch.as_tensor and cupy.asarray take it without a copy.
        """
        data = self._data()
        if isinstance(data, DeviceRange):
            return DeviceArray(data, (self.page_count, self.config.page_bytes))
        return self._flat("data").reshape(-1, self.config.page_bytes)

    @property
    def tier1(self) -> Bytes | None:
        """Tier-1 parity: uint8 (groups, H1, page_bytes); None unless retained."""
        return self._parity("tier1", self.config.tier1_pages)

    @property
    def tier2(self) -> Bytes | None:
        """Tier-2 parity: uint8 (groups, H2, page_bytes); None unless retained and H2 > 0."""
        return self._parity("tier2", self.config.tier2_pages)

    def _parity(self, section: SectionName, rows: int) -> Bytes | None:
        if section not in self._ranges:
            return None
        return self._flat(section).reshape(-1, rows, self.config.page_bytes)

    def _flat(self, section: SectionName) -> Bytes:
        view: Bytes = np.asarray(self._ranges[section])
        return view

    def tensor(
        self, dtype: torch.dtype | None = None, offset_bytes: int = 0, numel: int | None = None
    ) -> torch.Tensor:
        """Return a flat tensor over the data pages, without a copy, on their device. `dtype` None: uint8.

        `numel` None: as many elements as fit between `offset_bytes` and `nbytes`. Raises ConfigError
        when the range does not lie in the pages or is not aligned to the dtype.
        """
        import torch

        kind = torch.uint8 if dtype is None else dtype
        item = kind.itemsize
        if numel is None:
            numel = max(0, self.nbytes - offset_bytes) // item
        end = offset_bytes + numel * item
        limit = self.page_count * self.config.page_bytes
        if offset_bytes < 0 or numel < 0 or end > limit or offset_bytes % item:
            raise ConfigError(
                f"{numel} elements of {kind} at byte {offset_bytes} of {self.name!r}: expected an offset "
                f"that is a multiple of {item} and an end within {limit} bytes, found end {end}"
            )
        data = self._data()
        if isinstance(data, DeviceRange):
            on = torch.device("cuda", data.device.ordinal)
            return torch.as_tensor(DeviceArray(data, (limit,)), device=on)[offset_bytes:end].view(kind)
        flat: npt.NDArray[Any] = np.asarray(WritableLook(data))
        return torch.from_numpy(flat[offset_bytes:end]).view(kind)
