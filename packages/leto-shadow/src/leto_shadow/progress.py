"""The progress counter of a trainer: shared memory that its main thread writes and its agent reads.

Role: the hang detector needs to know how far each rank's *main thread* got without asking it, because a hung
thread may keep the GIL (case 16). Paper: section 3.4 (detection); the culprit of a hang is the rank that
stands oldest by phase and is not itself waiting for others.

The memfd holds two slots of 64 bytes. A record has a sequence number and a check word; the writer fills the
slot of the *older* record and the reader takes the newest valid one. So a reader never sees a torn record,
and a trainer killed in the middle of a store leaves the record before it. Stores are aligned 64-bit words.

    word 0 sequence (1, 2, ...)   1 phase   2 iteration   3 counter   4 CLOCK_MONOTONIC ns   5 pid   6 flags
    7 check

Phases alone do not tell who waits: a rank may stand in a collective in the middle of the forward pass (tensor
or pipeline parallel). The flags say whether the main thread is inside a collective, and whether it would be
seen there at all (`leto_shadow.collectives`).
"""

from __future__ import annotations

import contextlib
import enum
import mmap
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "PROGRESS_BYTES",
    "Phase",
    "Progress",
    "ProgressReader",
    "ProgressWriter",
    "create_progress_fd",
    "read_progress",
]

_SLOT_WORDS = 8
_SLOTS = 2
PROGRESS_BYTES = 4096
"""Size of the memfd: one page, of which two slots are used."""

_IN_COLLECTIVE, _WATCHED = 1, 2  # flags

_MASK = (1 << 64) - 1
_SALT = 0x9E3779B97F4A7C15  # any odd constant: an all-zero page must not pass the check


class Phase(enum.IntEnum):
    """Where the main thread is. Ordinals grow in the order in which an iteration passes them.

    A `waiting` phase may stand still because another rank is late, so it never names a culprit by itself.
    """

    INIT = 0
    IDLE = 1  # a shadow, ready, not promoted: no deadline
    RECOVER = 2  # promoted: attach, reconstruct
    EXCHANGE = 3  # waiting for the decision on the summaries
    DATA = 4
    FORWARD = 5
    BACKWARD = 6
    REDUCE = 7
    PROTECT = 8
    SYNC = 9
    BARRIER = 10  # of the update: gradients are protected, and the result of the synchronization is there
    UPDATE = 11
    DERIVE = 12
    COMMIT = 13
    CHECKPOINT = 14
    DONE = 15  # training finished; the process is about to exit

    @property
    def waiting(self) -> bool:
        """Whether the rank may be waiting for other ranks in this phase."""
        return self in _WAITING

    @classmethod
    def word(cls, number: object) -> str | None:
        """The name of a phase for people, by its ordinal; None if this version knows none for it."""
        return next((phase.name.lower() for phase in cls if phase == number), None)


_WAITING = frozenset({Phase.EXCHANGE, Phase.REDUCE, Phase.SYNC, Phase.BARRIER, Phase.DERIVE})


@dataclass(frozen=True)
class Progress:
    """One record. counter grows with each change; monotonic_ns is CLOCK_MONOTONIC at the change (same clock
    in all processes)."""

    phase: Phase
    iteration: int
    counter: int
    monotonic_ns: int
    pid: int
    flags: int = 0

    @property
    def waiting(self) -> bool:
        """Whether the main thread waits for other ranks: seen where collectives are watched, else judged by
        the phase."""
        if self.flags & _IN_COLLECTIVE:
            return True
        return not self.flags & _WATCHED and self.phase.waiting

    @property
    def position(self) -> tuple[int, int]:
        """Order by age: (iteration, phase); the rank with the smallest one is furthest behind."""
        return (self.iteration, int(self.phase))

    def age_s(self, now_ns: int | None = None) -> float:
        """Seconds since the last change."""
        now_ns = time.monotonic_ns() if now_ns is None else now_ns
        return max(0, now_ns - self.monotonic_ns) / 1e9


def create_progress_fd(path: Path | None = None) -> int:
    """Return a new memfd of fixed size (close-on-exec) for one trainer; the caller owns it.

    ``path``: a file there instead, which outlives the agent, so that the next one learns how far it came.
    Its place on the disk is taken at once: to write or even read a hole once the disk is full can be a
    SIGBUS. Raises OSError, and leaves no file.
    """
    if path is None:
        fd = os.memfd_create("leto-progress", os.MFD_CLOEXEC)
    else:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        if path is None:
            os.ftruncate(fd, PROGRESS_BYTES)
        else:
            os.posix_fallocate(fd, 0, PROGRESS_BYTES)
    except OSError:
        os.close(fd)
        if path is not None:
            path.unlink()
        raise
    return fd


def read_progress(path: Path) -> Progress | None:
    """Return the newest complete record of a file whose writer is gone; None if there is none.

    Raises OSError, and ValueError where the file is none of `create_progress_fd`.
    """
    data = path.read_bytes()
    if len(data) != PROGRESS_BYTES:
        raise ValueError(f"{path} has {len(data)} bytes, expected {PROGRESS_BYTES}")
    newest = _newest(memoryview(data).cast("Q"))
    return None if newest is None else _progress(newest)


def _slot(words: memoryview, index: int) -> tuple[int, ...] | None:
    """The words 0 to 6 of a slot if its check word holds, else None."""
    base = index * _SLOT_WORDS
    slot = tuple(words[base : base + _SLOT_WORDS])
    return slot[:-1] if slot[0] and slot[-1] == _check(slot[:-1]) else None


def _newest(words: memoryview) -> tuple[int, ...] | None:
    """The valid slot with the highest sequence."""
    valid = [slot for slot in (_slot(words, index) for index in range(_SLOTS)) if slot is not None]
    return max(valid, default=None)


def _progress(words: tuple[int, ...]) -> Progress:
    _, phase, iteration, counter, monotonic_ns, pid, flags = words
    return Progress(Phase(phase), iteration, counter, monotonic_ns, pid, flags)


def _check(words: tuple[int, ...]) -> int:
    """Check word over words 0 to 6: a multiply-and-rotate fold, so that no two fields can swap unseen."""
    value = _SALT
    for word in words:
        value = ((value ^ word) * 0x100000001B3) & _MASK
        value = ((value << 31) | (value >> 33)) & _MASK
    return value


class _Mapping:
    """The mapped page as 64-bit words."""

    def __init__(self, fd: int, *, writable: bool) -> None:
        size = os.fstat(fd).st_size
        if size != PROGRESS_BYTES:
            raise ValueError(
                f"progress memfd has {size} bytes, expected {PROGRESS_BYTES}: not made by create_progress_fd"
            )
        protection = mmap.PROT_READ | mmap.PROT_WRITE if writable else mmap.PROT_READ
        self._map = mmap.mmap(fd, PROGRESS_BYTES, mmap.MAP_SHARED, protection)
        self._bytes = memoryview(self._map)
        self.words = self._bytes.cast("Q")

    def newest(self) -> tuple[int, ...] | None:
        """The valid slot with the highest sequence."""
        return _newest(self.words)

    def close(self) -> None:
        self.words.release()
        self._bytes.release()
        self._map.close()


class ProgressWriter:
    """The trainer's end. One writer, its main thread only. Does not own the fd (the mapping outlives it)."""

    def __init__(self, fd: int) -> None:
        self._mapping = _Mapping(fd, writable=True)
        newest = self._mapping.newest()
        self._sequence = newest[0] if newest else 0
        self._pid = os.getpid()
        self._phase, self._iteration = (newest[1], newest[2]) if newest else (int(Phase.INIT), 0)
        self._flags = 0

    def set(self, phase: Phase, iteration: int) -> None:
        """Publish that the main thread enters `phase` of `iteration`; a repeated call counts as progress
        too."""
        if iteration < 0:
            raise ValueError(f"iteration must not be negative, found {iteration}")
        self._phase, self._iteration = int(phase), iteration
        self._publish()

    def watched(self) -> None:
        """From now on every wait for other ranks goes through `waiting`, so that phases need not be asked."""
        self._flags |= _WATCHED
        self._publish()

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """The main thread waits for other ranks inside this block; blocks may be nested."""
        before = self._flags
        self._flags |= _IN_COLLECTIVE
        if self._flags != before:
            self._publish()
        try:
            yield
        finally:
            if self._flags != before:
                self._flags = before
                self._publish()

    def _publish(self) -> None:
        self._sequence += 1
        words = (
            self._sequence,
            self._phase,
            self._iteration,
            self._sequence,
            time.monotonic_ns(),
            self._pid,
            self._flags,
        )
        base = (self._sequence % _SLOTS) * _SLOT_WORDS
        target = self._mapping.words
        target[base + _SLOT_WORDS - 1] = 0  # the slot is invalid until the last store
        for index, word in enumerate(words):
            target[base + index] = word
        target[base + _SLOT_WORDS - 1] = _check(words)

    def close(self) -> None:
        """Unmap the page."""
        self._mapping.close()


class ProgressReader:
    """The agent's end. Does not own the fd."""

    def __init__(self, fd: int) -> None:
        self._mapping = _Mapping(fd, writable=False)
        self._newest: tuple[int, ...] = ()

    def read(self) -> Progress | None:
        """Return the newest complete record, never an older one than before; None if there is none yet.

        A fast writer may fill both slots while they are read one after the other, so that neither is whole or
        only the older one is: then the record of the previous call stands.
        """
        newest = max(self._mapping.newest() or (), self._newest)
        if not newest:
            return None
        self._newest = newest
        return _progress(newest)

    def close(self) -> None:
        """Unmap the page."""
        self._mapping.close()
