"""Job state: what a training loop needs to go on at iteration t + 1, committed with it.

Role: RNG streams, learning-rate schedule, loss scale, data position and the user's own, as opaque bytes
(docs/concepts/marker-protocol.md, "One iteration"). Two slots, each in three replicas.
The record for t + 1 is staged in the slot that t does not use, before PROTECTED(t), and becomes the job's
state with ITERATION(t+1). It also carries the hyperparameters of t, so that a resumed update uses the same
bits.

Upholds I-6: a record counts only with its checksum and the iteration that the marker names.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Collection

import msgspec
import numpy as np

from leto_rmu.errors import JobStateTooLarge
from leto_rmu.layout import JOB_HEADER_BYTES, UpdatePlan
from leto_rmu.memory import Region
from leto_rmu.ops import Bytes, Op
from leto_rmu.optimizers import Hyper
from leto_rmu.regions import MARKER_REPLICAS

__all__ = ["JobRecord", "JobState"]

_VERSION = 1
_HEADER = struct.Struct("<IIqQ")
_MAGIC = 0x534A544C  # "LTJS"


class JobRecord(msgspec.Struct, frozen=True):
    """State for ``iteration``; ``hypers`` are those of the update that leads to it."""

    iteration: int
    job_state: bytes
    hypers: tuple[Hyper, ...] = ()


class JobState:
    """The slots of one rank."""

    def __init__(self, plan: UpdatePlan, region: Region, lost_pages: Collection[int] = ()) -> None:
        self._plan = plan
        self._pages = region.pages
        self._lost = frozenset(lost_pages)

    def pages_of(self, iteration: int, replica: int) -> range:
        """Indices of the pages that hold one replica of the slot of ``iteration``."""
        first = ((iteration % 2) * MARKER_REPLICAS + replica) * self._plan.job_pages
        return range(first, first + self._plan.job_pages)

    def stage(self, record: JobRecord) -> Op:
        """Op that writes the record into all replicas of its slot."""
        content = np.frombuffer(self._encode(record), np.uint8)
        views = tuple(self._view(record.iteration, r)[: content.size] for r in range(MARKER_REPLICAS))

        def apply() -> None:
            for view in views:
                view[:] = content

        return Op("stage", None, None, views, apply, record.iteration - 1)

    def read(self, iteration: int) -> JobRecord | None:
        """The record of ``iteration``, or None when no combination of surviving pages holds it."""
        for raw in (*(self._view(iteration, r) for r in range(MARKER_REPLICAS)), self._assembled(iteration)):
            record = self._decode(raw, iteration)
            if record is not None:
                return record
        return None

    def fixes(self, record: JobRecord) -> list[tuple[Bytes, Bytes]]:
        """Places of the record's slot that do not hold it, with their contents."""
        content = np.frombuffer(self._encode(record), np.uint8)
        places = [self._view(record.iteration, r)[: content.size] for r in range(MARKER_REPLICAS)]
        return [(view, content) for view in places if not np.array_equal(view, content)]

    def _encode(self, record: JobRecord) -> bytes:
        payload = msgspec.msgpack.encode(record)
        size, capacity = len(record.job_state), self._plan.job_state_bytes
        if size > capacity or JOB_HEADER_BYTES + len(payload) > self._plan.job_record_bytes:
            raise JobStateTooLarge(
                f"job state of {size} bytes does not fit job_state_bytes={capacity}: "
                f"make the plan with job_state_bytes={max(size, capacity + 1)} or more"
            )
        head = _HEADER.pack(_MAGIC, _VERSION, record.iteration, len(payload))
        return (head + self._checksum(head, payload)).ljust(JOB_HEADER_BYTES, b"\0") + payload

    def _decode(self, raw: Bytes, iteration: int) -> JobRecord | None:
        head = raw[: _HEADER.size].tobytes()
        magic, version, tag, size = _HEADER.unpack(head)
        if (magic, version, tag) != (_MAGIC, _VERSION, iteration) or size > raw.size - JOB_HEADER_BYTES:
            return None
        payload = raw[JOB_HEADER_BYTES : JOB_HEADER_BYTES + size].tobytes()
        if raw[_HEADER.size : _HEADER.size + 8].tobytes() != self._checksum(head, payload):
            return None
        return msgspec.msgpack.decode(payload, type=JobRecord)

    def _checksum(self, head: bytes, payload: bytes) -> bytes:
        return hashlib.blake2b(head + payload, digest_size=8, key=self._plan.layout_hash).digest()

    def _view(self, iteration: int, replica: int) -> Bytes:
        pages = self.pages_of(iteration, replica)
        return self._pages[pages.start : pages.stop].reshape(-1)

    def _assembled(self, iteration: int) -> Bytes:
        """Each page from the first replica that still has it (losses in different pages of each)."""
        choices = []
        for k in range(self._plan.job_pages):
            indices = [self.pages_of(iteration, r)[k] for r in range(MARKER_REPLICAS)]
            choices.append(next((i for i in indices if i not in self._lost), indices[0]))
        return self._pages[choices].reshape(-1)
