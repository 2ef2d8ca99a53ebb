"""A rank that stands in a collective waits; the one that keeps it waiting is to blame, whatever the phase."""

from __future__ import annotations

import os
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from subprocess import PIPE, Popen

import pytest

from leto_shadow.config import HangPolicy
from leto_shadow.hang import HangDetector
from leto_shadow.messages import RankProgress
from leto_shadow.progress import Phase, Progress, ProgressReader, ProgressWriter, create_progress_fd

pytest.importorskip("torch")

# Both ranks stand in the same phase; rank 1 entered it first and waits there for rank 0, which never comes.
TRAINER = """
    import sys, threading
    import torch, torch.distributed as dist
    from leto_shadow.collectives import watch_collectives
    from leto_shadow.progress import Phase, ProgressWriter

    rank, fd, path, watched = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], sys.argv[4] == "watched"
    phase = Phase[sys.argv[5]]
    writer = ProgressWriter(fd)
    if watched:
        watch_collectives(writer)
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=2)
    dist.all_reduce(torch.ones(1))
    if rank == 0:
        sys.stdin.readline()  # rank 1 is in the collective
    writer.set(phase, 7)
    print("there", flush=True)
    if rank == 1:
        dist.all_reduce(torch.ones(1))
    threading.Event().wait()
"""


@pytest.fixture
def progress_fds() -> Iterator[list[int]]:
    fds = [create_progress_fd() for _ in range(2)]
    yield fds
    for fd in fds:
        os.close(fd)


def _positions(fds: list[int], path: Path, watched: str, phase: Phase = Phase.FORWARD) -> list[Progress]:
    """Where the two ranks stand when one of them waits for the other."""

    def words(rank: int, fd: int) -> list[str]:
        return [str(rank), str(fd), os.fspath(path), watched, phase.name]

    trainers = [
        Popen(
            [sys.executable, "-c", textwrap.dedent(TRAINER), *words(rank, fd)],
            pass_fds=(fd,),
            stdin=PIPE,
            stdout=PIPE,
            text=True,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
        )
        for rank, fd in enumerate(fds)
    ]
    readers = [ProgressReader(fd) for fd in fds]
    try:
        assert trainers[1].stdout is not None
        assert trainers[1].stdout.readline() == "there\n"
        deadline = time.monotonic() + 150
        while watched == "watched":
            record = readers[1].read()
            if record is not None and record.waiting:
                break
            assert time.monotonic() < deadline, f"rank 1 does not wait: {record}"
            time.sleep(0.005)
        assert trainers[0].stdin is not None
        assert trainers[0].stdout is not None
        print(file=trainers[0].stdin, flush=True)
        assert trainers[0].stdout.readline() == "there\n"
        records = [reader.read() for reader in readers]
        assert None not in records
        return [record for record in records if record is not None]
    finally:
        for trainer in trainers:
            trainer.kill()
            trainer.communicate(timeout=150)
        for reader in readers:
            reader.close()


def _culprit(records: list[Progress]) -> int | None:
    """Whom the detector blames when both have stood there for a minute, rank 1 a moment longer."""
    detector = HangDetector(HangPolicy(initial_s=1.0, min_s=1.0, max_s=10.0, factor=2.0))
    detector.begin(1)
    detector.observe(
        [
            RankProgress(
                rank, 1, r.iteration, int(r.phase), r.waiting, r.counter, r.monotonic_ns / 1e9, 60.0 + rank
            )
            for rank, r in enumerate(records)
        ],
        0.0,
    )
    hang = detector.check(0.0)
    return None if hang is None else hang.rank


def test_the_rank_in_a_collective_is_not_blamed(progress_fds: list[int], tmp_path: Path) -> None:
    records = _positions(progress_fds, tmp_path / "rendezvous", "watched")
    assert [r.phase for r in records] == [Phase.FORWARD, Phase.FORWARD]
    assert [r.waiting for r in records] == [False, True]
    assert _culprit(records) == 0


def test_without_the_watch_the_wrong_rank_is_blamed(progress_fds: list[int], tmp_path: Path) -> None:
    """Broken on purpose: phases alone cannot tell, and the rank that stands longest is the one that waits."""
    records = _positions(progress_fds, tmp_path / "rendezvous", "unwatched")
    assert _culprit(records) == 1


@pytest.mark.parametrize(("watched", "culprit"), [("watched", 0), ("unwatched", 1)])
def test_a_rank_that_hangs_in_a_waiting_phase_is_found_where_collectives_are_watched(
    progress_fds: list[int], tmp_path: Path, watched: str, culprit: int
) -> None:
    """Rank 0 hangs on its way to the all-reduce of a phase that is one of waiting."""
    records = _positions(progress_fds, tmp_path / "rendezvous", watched, Phase.REDUCE)
    assert [r.phase for r in records] == [Phase.REDUCE, Phase.REDUCE]
    assert [r.waiting for r in records] == [watched == "unwatched", True]
    assert _culprit(records) == culprit


def test_waits_may_be_nested_and_phases_decide_only_where_nobody_watches(progress_fds: list[int]) -> None:
    writer, reader = ProgressWriter(progress_fds[0]), ProgressReader(progress_fds[0])

    def waiting() -> bool:
        record = reader.read()
        assert record is not None
        return record.waiting

    writer.set(Phase.REDUCE, 1)
    assert waiting()
    writer.watched()
    assert not waiting()
    with writer.waiting():
        assert waiting()
        with writer.waiting():
            assert waiting()
        assert waiting()
        writer.set(Phase.FORWARD, 2)
        assert waiting()
    assert not waiting()
    with pytest.raises(ValueError, match="lost peer"), writer.waiting():
        raise ValueError("lost peer")
    assert not waiting()
    reader.close()
    writer.close()
