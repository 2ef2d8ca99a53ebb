"""What one client has mapped: ranges by name, kept in step with the manager's handles, pinned when it writes.

Descriptors come in batches of at most 253 and are closed once mapped (mappings survive). On the cuda
backend pages may get other handles after they were mapped (`refresh`), fresh ones are zeroed by the first
writer that maps them, and host pages are pinned for the GPU while this client is the writer. A control
client has no GPU context: it maps host sections only.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from leto_rmp import protocol as p
from leto_rmp.allocation import Allocation
from leto_rmp.backend import open_mapper
from leto_rmp.config import AllocationSpec, PoolConfig
from leto_rmp.device import CudaMapper, DeviceRange
from leto_rmp.driver import open_driver
from leto_rmp.errors import ProtocolError
from leto_rmp.layout import PageRef, PageRun, SectionLayout, SectionName, section_layouts
from leto_rmp.limits import fd_room, require_fds
from leto_rmp.mapping import MappedRange, SharedRange
from leto_rmp.pinning import Pin, PinStatus
from leto_rmp.protocol import FDS_PER_MESSAGE_MAX
from leto_rmp.retreat import note_range

__all__ = ["ClientMemory", "Hooks"]

_FD_SLACK = 8

R = TypeVar("R", bound=p.Message)
Ranges = dict[SectionName, SharedRange]
Hooks = Sequence[Callable[[Sequence[PageRef]], None]]


class Channel(Protocol):
    """The requests of a connection."""

    def request(self, message: p.Message, expected: type[R], extra_s: float = 0.0) -> R: ...
    def take_fds(self, announced: int) -> list[int]: ...


class ClientMemory:
    """The mappings of one client. The client serialises the calls."""

    def __init__(self, config: PoolConfig, device_uuid: str, channel: Channel, pin_piece_bytes: int) -> None:
        self.config = config
        self.writable = False
        self.maps_device = True
        """Whether device pages are mapped: not by control clients."""
        self._channel = channel
        self._pin_piece_bytes = pin_piece_bytes
        self._mapper = open_mapper(config.backend, device_uuid)
        self._ranges: dict[str, Ranges] = {}
        self._pins: dict[str, dict[SectionName, Pin]] = {}
        self._incarnations: dict[str, int] = {}
        self._epoch = 0

    # -- allocations ---------------------------------------------------------------------------

    def note(self, reply: p.Described) -> None:
        """Forget mappings of allocations that were freed, by whomever."""
        names = (spec.name for spec in reply.specs)
        old, self._incarnations = self._incarnations, dict(zip(names, reply.incarnations, strict=True))
        self.drop([name for name in self._ranges if self._incarnations.get(name) != old[name]])

    def drop(self, names: Iterable[str]) -> None:
        """Forget mappings; the memory goes with the last view."""
        names = list(names)
        if any(name in self._pins for name in names):
            self._drain()
        self.unpin(names)
        for name in names:
            self._ranges.pop(name, None)

    def clear(self) -> None:
        """Forget all mappings."""
        self.drop(list(self._ranges))

    def allocation(self, spec: AllocationSpec, created: bool) -> Allocation:
        """Return the allocation, mapped."""
        if spec.name not in self._ranges:
            self._ranges[spec.name] = {
                layout.section: self._map(layout)
                for layout in section_layouts(spec, self.config)
                if layout.placement == "host" or self.maps_device
            }
            if self.writable:
                self._pin(spec.name)
        return Allocation(spec, self.config, dict(self._ranges[spec.name]), created)

    def _map(self, layout: SectionLayout) -> SharedRange:
        mapped = self._mapper.reserve(layout, self.writable)
        sizes = [pages * layout.page_bytes for pages in layout.handle_pages]
        for index, fd in self._handles(layout.allocation, layout.section, 0, len(sizes)):
            if fd is None:
                mapped.skip(sizes[index])
            else:
                mapped.place(fd, sizes[index])
        mapped.finish()
        note_range(mapped)
        return mapped

    def _handles(
        self, name: str, section: SectionName, first: int, count: int
    ) -> Iterator[tuple[int, int | None]]:
        """Yield (index, fd) of each handle, fd None where there is none; fds are closed batch by batch."""
        batch = min(FDS_PER_MESSAGE_MAX, count)
        room = fd_room(batch + _FD_SLACK) - _FD_SLACK
        if room < 1:
            require_fds(1 + _FD_SLACK, f"mapping {name!r}")
        batch = max(1, min(batch, room))
        end = first + count
        while first < end:
            asked = min(batch, end - first)
            request = p.Export(allocation=name, section=section, first=first, count=asked)
            reply = self._channel.request(request, p.Handles)
            covered = reply.count + len(reply.absent)
            if not 0 < covered <= asked:
                raise ProtocolError(f"asked for {asked} handles, found {covered} announced")
            fds = self._channel.take_fds(reply.count)
            absent = set(reply.absent)
            try:
                present = iter(fds)
                for index in range(first, first + covered):
                    yield index, None if index in absent else next(present)
            finally:
                for fd in fds:
                    os.close(fd)
            first += covered

    # -- writing -------------------------------------------------------------------------------

    def set_writable(self, writable: bool) -> None:
        """Make all mappings writable in place and pin host pages, or the reverse in the reverse order.

        Before they become read-only, all work of this process on the device is waited for.
        """
        if not writable:
            self._drain()
            self.unpin()
        for ranges in self._ranges.values():
            for mapped in ranges.values():
                mapped.protect(writable)
        self.writable = writable
        if writable:
            self.pin()

    def _device_ranges(self) -> Iterator[tuple[str, SectionName, DeviceRange]]:
        for name, ranges in self._ranges.items():
            for section, mapped in ranges.items():
                if isinstance(mapped, DeviceRange):
                    yield name, section, mapped

    def _drain(self) -> None:
        """Wait for the work of this process on the device."""
        if isinstance(self._mapper, CudaMapper) and (self._pins or any(True for _ in self._device_ranges())):
            open_driver().drain(self._mapper.device.ordinal)

    # -- pinning -------------------------------------------------------------------------------

    def pin(self) -> None:
        """Pin what is mapped of the host's memory and not pinned yet."""
        for name in self._ranges:
            self._pin(name)

    def _pin(self, name: str) -> None:
        mapper = self._mapper
        if not isinstance(mapper, CudaMapper) or not self._pin_piece_bytes:
            return
        pins = self._pins.setdefault(name, {})
        rows: dict[SectionName, int] = {"tier1": self.config.tier1_pages, "tier2": self.config.tier2_pages}
        for section, mapped in self._ranges[name].items():
            if isinstance(mapped, MappedRange) and section not in pins:
                unit = rows.get(section, 1) * self.config.page_bytes
                pins[section] = Pin(open_driver(), mapper.device.ordinal, mapped, unit, self._pin_piece_bytes)

    def unpin(self, names: Iterable[str] | None = None) -> None:
        """Unpin allocations (None: all). Nothing on the device uses them any more."""
        for name in list(self._pins if names is None else names):
            for pin in self._pins.pop(name, {}).values():
                pin.undo()

    def set_pins_aside(self, refs: Sequence[PageRef]) -> None:
        """Unpin the allocations that have host pages among these; `pin` pins them again."""
        names = {ref.allocation for ref in refs if ref.section != "data"}
        names |= {ref.allocation for ref in refs if "data" in self._pins.get(ref.allocation, {})}
        if names:
            self._drain()
        self.unpin(names)

    def pin_status(self) -> PinStatus:
        """Return what is pinned and what is not."""
        status = PinStatus()
        for pins in self._pins.values():
            for pin in pins.values():
                status += pin.status
        return status

    # -- pages that change ---------------------------------------------------------------------

    def replaced(self) -> tuple[p.Changes, list[PageRef]]:
        """Ask what changed; return the answer and the pages of ours that have to be mapped anew."""
        changes = self._channel.request(p.Refresh(epoch=self._epoch), p.Changes)
        mine = {(name, section): mapped for name, section, mapped in self._device_ranges()}
        refs = {
            PageRef(run.allocation, run.section, index)
            for run in changes.replaced
            if (run.allocation, run.section) in mine
            for index in range(run.first, run.first + run.count)
        }
        refs |= {PageRef(*key, index) for key, mapped in mine.items() for index in mapped.holes()}
        return changes, sorted(refs)

    def follow(self, changes: p.Changes, refs: Sequence[PageRef]) -> None:
        """Map the replacements of these pages at their addresses; zero what is fresh if we are the writer."""
        mine = {(name, section): mapped for name, section, mapped in self._device_ranges()}
        if refs:
            self._drain()
        for name, section, number in self._handles_of(refs):
            for index, fd in self._handles(name, section, number, 1):
                mine[name, section].replace(index, fd)
        self._epoch = changes.epoch
        if self.writable:
            self._clear(changes, mine)

    def _handles_of(self, refs: Sequence[PageRef]) -> list[tuple[str, SectionName, int]]:
        """Return (allocation, section, handle) of what holds these device pages of ours, in order."""
        mine = {(name, section): mapped.layout for name, section, mapped in self._device_ranges()}
        return sorted(
            {
                (ref.allocation, ref.section, mine[ref.allocation, ref.section].handle_of(ref.index))
                for ref in refs
                if (ref.allocation, ref.section) in mine
            }
        )

    def moving(self, refs: Sequence[PageRef]) -> list[PageRef]:
        """Return these pages and all that move with them, when they get another handle."""
        mine = {(name, section): mapped.layout for name, section, mapped in self._device_ranges()}
        beside = {
            PageRef(name, section, page)
            for name, section, number in self._handles_of(refs)
            for page in mine[name, section].pages_of(number)
        }
        return sorted(beside.union(refs))

    def drain(self) -> None:
        """Wait for the work of this process on the device: pages of it are about to be copied."""
        self._drain()

    def _clear(self, changes: p.Changes, mine: dict[tuple[str, SectionName], DeviceRange]) -> None:
        cleared: list[PageRun] = []
        for run in changes.uncleared:
            mapped = mine.get((run.allocation, run.section))
            if mapped is not None and mapped.zero(run.first, run.count):
                cleared.append(run)
        if cleared:
            self._channel.request(p.Cleared(runs=tuple(cleared), epoch=changes.epoch), p.Done)

    def unmapped(self) -> tuple[PageRef, ...]:
        """Return the pages that we mapped and that the driver does not know (its query)."""
        return tuple(
            PageRef(name, section, index)
            for name, section, mapped in self._device_ranges()
            for index in mapped.unmapped()
        )
