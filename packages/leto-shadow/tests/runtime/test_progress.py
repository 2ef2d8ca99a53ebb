"""The progress counter: newest valid record wins, torn records are never seen, a killed writer leaves the
last one."""

from __future__ import annotations

import errno
import mmap
import os
import struct
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from subprocess import Popen

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leto_shadow import progress
from leto_shadow.progress import (
    PROGRESS_BYTES,
    Phase,
    Progress,
    ProgressReader,
    ProgressWriter,
    create_progress_fd,
    read_progress,
)


@pytest.fixture
def fd() -> Iterator[int]:
    fd = create_progress_fd()
    yield fd
    os.close(fd)


def test_the_order_of_phases_is_the_order_of_an_iteration() -> None:
    names = [phase.name for phase in Phase]
    assert names.index("DATA") < names.index("FORWARD") < names.index("BACKWARD") < names.index("REDUCE")
    assert names.index("PROTECT") < names.index("SYNC") < names.index("BARRIER") < names.index("UPDATE")
    assert names.index("UPDATE") < names.index("DERIVE") < names.index("COMMIT")
    assert {phase for phase in Phase if phase.waiting} == {
        Phase.EXCHANGE,
        Phase.REDUCE,
        Phase.BARRIER,
        Phase.SYNC,
        Phase.DERIVE,
    }


def test_nothing_is_read_before_the_first_record(fd: int) -> None:
    reader = ProgressReader(fd)
    assert reader.read() is None
    reader.close()


def test_a_file_has_its_place_on_the_disk_from_the_beginning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the disk is full later, a hole is a SIGBUS for who writes it, and on a tmpfs for who reads it."""
    path = tmp_path / "progress"
    fd = create_progress_fd(path)
    assert path.stat().st_blocks > 0
    assert read_progress(path) is None
    writer = ProgressWriter(fd)
    writer.set(Phase.FORWARD, 7)
    found = read_progress(path)
    assert found is not None
    assert (found.phase, found.iteration, found.pid) == (Phase.FORWARD, 7, os.getpid())
    writer.close()
    os.close(fd)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(OSError, match="No space left"):
        create_progress_fd(tmp_path / "other")
    assert [one.name for one in tmp_path.iterdir()] == ["progress"]
    path.write_bytes(b"short")
    with pytest.raises(ValueError, match="has 5 bytes, expected"):
        read_progress(path)


def test_records_are_read_in_order_and_count_up(fd: int) -> None:
    writer, reader = ProgressWriter(fd), ProgressReader(fd)
    for number, phase in enumerate(Phase, start=1):
        before = time.monotonic_ns()
        writer.set(phase, 40 + number)
        record = reader.read()
        assert record is not None
        assert (record.phase, record.iteration, record.counter, record.pid) == (
            phase,
            40 + number,
            number,
            os.getpid(),
        )
        assert before <= record.monotonic_ns <= time.monotonic_ns()
        assert record.position == (40 + number, int(phase))
    writer.close()
    reader.close()


def test_a_second_writer_goes_on_counting(fd: int) -> None:
    """A shadow that takes over the same memfd must not look older than its predecessor."""
    first = ProgressWriter(fd)
    first.set(Phase.UPDATE, 9)
    second, reader = ProgressWriter(fd), ProgressReader(fd)
    second.set(Phase.INIT, 0)
    record = reader.read()
    assert record is not None
    assert (record.phase, record.iteration, record.counter) == (Phase.INIT, 0, 2)
    for mapping in (first, second, reader):
        mapping.close()


def test_a_foreign_file_is_refused() -> None:
    fd = os.memfd_create("foreign")
    os.ftruncate(fd, 64)
    with pytest.raises(ValueError, match="expected 4096"):
        ProgressReader(fd)
    os.close(fd)


@settings(max_examples=60)
@given(
    count=st.integers(1, 20), keep=st.sets(st.integers(0, 7)), where=st.integers(0, 7), bit=st.integers(0, 63)
)
def test_a_torn_newest_record_yields_the_one_before(count: int, keep: set[int], where: int, bit: int) -> None:
    """Words of the last store that never became visible, and a flipped bit, are both told from a record."""
    fd = create_progress_fd()
    writer, view = ProgressWriter(fd), mmap.mmap(fd, PROGRESS_BYTES)

    def read() -> Progress | None:  # a new reader each time: an old one remembers what it has seen
        reader = ProgressReader(fd)
        record = reader.read()
        reader.close()
        return record

    for number in range(count):
        writer.set(Phase(number % len(Phase)), number)
    before, older = read(), bytes(view)
    writer.set(Phase.COMMIT, 1000)
    complete = read()
    assert complete is not None
    assert complete.iteration == 1000
    base = 64 * ((count + 1) % 2)
    for word in set(range(8)) - keep:
        view[base + 8 * word : base + 8 * word + 8] = older[base + 8 * word : base + 8 * word + 8]
    record = read()
    assert record in (before, complete)
    if not keep:
        assert record == before
    # a flipped bit in the newest record: back to the one before, never a third thing
    (value,) = struct.unpack_from("<Q", view, base + 8 * where)
    struct.pack_into("<Q", view, base + 8 * where, value ^ (1 << bit))
    assert read() in (before, complete)
    view.close()
    writer.close()
    os.close(fd)


def test_a_reader_beside_a_running_writer_sees_no_torn_record(
    fd: int, spawn: Callable[..., Popen[bytes]]
) -> None:
    """The iteration names the phase, so a mix of two records shows; the writer is SIGKILLed in mid-flight."""
    source = """
        import sys
        from leto_shadow.progress import Phase, ProgressWriter
        writer = ProgressWriter(int(sys.argv[1]))
        number = 0
        while True:
            number += 1
            writer.set(Phase(number % len(Phase)), number)
    """
    process = spawn([sys.executable, "-c", textwrap.dedent(source), str(fd)], pass_fds=(fd,))
    reader = ProgressReader(fd)
    last, deadline = 0, time.monotonic() + 150
    while last < 20_000 and time.monotonic() < deadline:
        record = reader.read()
        if record is None:
            continue
        assert record.phase == record.iteration % len(Phase)
        assert record.counter == record.iteration >= last
        last = record.counter
    process.kill()
    process.wait(150)
    record = reader.read()
    assert record is not None
    assert record.counter == record.iteration >= last >= 20_000
    reader.close()


class OneSlotWriter(ProgressWriter):
    """Broken on purpose: always overwrites the newest record."""

    def set(self, phase: Phase, iteration: int) -> None:
        self._sequence += 1
        super().set(phase, iteration)


def torn_in_the_middle(writer: ProgressWriter, fd: int) -> Progress | None:
    """What a reader sees when the second of two records was stored up to its fourth word."""
    writer.set(Phase.FORWARD, 1)
    older = os.pread(fd, 128, 0)
    writer.set(Phase.COMMIT, 2)
    for base in (0, 64):
        if os.pread(fd, 64, base) != older[base : base + 64]:
            os.pwrite(fd, older[base + 32 : base + 64], base + 32)
    reader = ProgressReader(fd)
    record = reader.read()
    reader.close()
    writer.close()
    return record


def test_broken_variants_are_told_from_the_real_one(fd: int, monkeypatch: pytest.MonkeyPatch) -> None:
    record = torn_in_the_middle(ProgressWriter(fd), fd)
    assert record is not None
    assert (record.phase, record.iteration) == (Phase.FORWARD, 1)
    os.pwrite(fd, bytes(128), 0)
    assert torn_in_the_middle(OneSlotWriter(fd), fd) is None  # the only record is lost
    os.pwrite(fd, bytes(128), 0)
    monkeypatch.setattr(progress, "_check", lambda words: 1)
    unchecked = torn_in_the_middle(OneSlotWriter(fd), fd)
    assert unchecked is not None
    assert unchecked.iteration == 2  # a record of two halves is believed
