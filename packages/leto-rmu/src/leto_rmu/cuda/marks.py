"""Marks in stream order: a record of the marker is written by the device, between the work before and after
it.

Role: a mark never leads the data that it speaks of (I-2), without any wait of the host. The record is packed
when it is issued and given to a tiny kernel as its argument; the kernel stores it into all replicas, which
are pinned host memory. It runs when its stream has completed the operation that the mark names, and the
next operation of that stream starts after it. Where the marker's pages are not pinned, the host waits for
the device and writes, as it does without kernels; that is slower and just as right.
"""

from __future__ import annotations

import logging
from collections.abc import Hashable, Sequence

import numpy as np
import torch

from leto_rmu.cuda.kernels import Library, launch
from leto_rmu.cuda.lanes import COMPUTE, Lanes
from leto_rmu.marker import GroupCell, Marker, RankCell
from leto_rmu.ops import Bytes, Op
from leto_rmu.regions import MARKER_REPLICAS

__all__ = ["MarkWriter", "StreamMarker"]

_log = logging.getLogger("leto_rmu")
_QUADS = 8  # 16 bytes each, of a record
Place = tuple[str, tuple[Hashable, ...], tuple[Hashable, ...]]  # lane, what is read, what is written
MARK = np.dtype([("to", "<u8", MARKER_REPLICAS), ("pad", "<u8"), ("content", "u1", 16 * _QUADS)])


class MarkWriter:
    """Writes records from torch's current stream."""

    def __init__(self, device: torch.device, library: Library) -> None:
        self.device = device
        self._kernel = library.function("leto_rmu_mark")
        self._device_address: dict[int, int] = {}
        self._mark = np.zeros(1, MARK)  # copied by every launch

    def address(self, view: Bytes) -> int:
        """Where the device sees pinned host memory; 0 if it is not pinned."""
        import cupy

        host = view.ctypes.data
        if host not in self._device_address:
            found = cupy.cuda.runtime.pointerGetAttributes(host)
            self._device_address[host] = int(found.devicePointer or 0)
        return self._device_address[host]

    def forget(self) -> None:
        """Look addresses up anew: a page that was replaced may not be pinned any more."""
        self._device_address.clear()

    def write(self, views: Sequence[Bytes], content: Bytes) -> bool:
        """Put the record on the stream; False, and nothing is done, if a place is not pinned."""
        addresses = [self.address(view) for view in views]
        if not all(addresses):
            return False
        self._mark["to"][0], self._mark["content"][0] = addresses, content
        launch(self._kernel, 1, 32, self._mark[0], self.device)
        return True


class StreamMarker(Marker):
    """A marker that never leads the device. ``lanes`` and ``writer`` are given to it after it was read."""

    lanes: Lanes
    writer: MarkWriter | None = None
    _warned = False
    _place: Place = (COMPUTE, (), ())

    def write_on(
        self, place: Place, group: int | None, value: RankCell | GroupCell, name: str = "mark"
    ) -> Op:
        """Op that records ``value`` on a lane."""
        op = self.write(group, value, name=name)

        def apply() -> None:
            self._place = place
            try:
                op.apply()
            finally:
                self._place = StreamMarker._place

        return Op(op.name, op.group, op.chunk, op.writes, apply, op.iteration)

    def store(self, views: Sequence[Bytes], content: Bytes) -> None:
        """Write one record in stream order."""
        lane, reads, writes = self._place
        self.lanes.run(lane, lambda: self._store(views, content), reads, writes)

    def _store(self, views: Sequence[Bytes], content: Bytes) -> None:
        if self.writer is not None:
            if self.writer.write(views, content):
                return
            if not StreamMarker._warned:
                StreamMarker._warned = True
                _log.warning(
                    "the marker is not pinned: the host waits for the device before every mark, which is "
                    "slower. RLIMIT_MEMLOCK is worth a look"
                )
            torch.cuda.synchronize(self.writer.device)
        super().store(views, content)
