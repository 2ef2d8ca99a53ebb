"""Cells and records: torn, lost, foreign and stale copies (I-6)."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from rmu_lab import Pool, World

from leto_rmu import Hyper, JobStateTooLarge, LayoutMismatch, ProtocolError, SyncResult
from leto_rmu.faults import tear
from leto_rmu.jobstate import JobRecord, JobState
from leto_rmu.marker import GroupCell, Marker, Phase, RankCell
from leto_rmu.regions import CELL_BYTES

PLAN = World(pool=Pool(page_bytes=512)).plan  # two cells a page


def blank() -> tuple[Marker, np.ndarray]:
    world = World(pool=Pool(page_bytes=512))
    memory, _ = world.start()
    region = memory.regions["marker"]
    region.pages[:] = 0
    return Marker(PLAN, region), region


def reread(region: object, lost: tuple[int, ...] = ()) -> Marker:
    return Marker(PLAN, region, lost)  # type: ignore[arg-type]


rank_cells = st.builds(
    RankCell,
    st.sampled_from([p for p in Phase if p < Phase.IDLE]),
    st.integers(-1, 2**62),
    st.integers(0, 2**62),
    st.integers(0, 2**32 - 1),
    st.none()
    | st.builds(
        SyncResult,
        st.none() | st.floats(allow_nan=False),
        st.none() | st.floats(allow_nan=False),
        st.booleans(),
        st.floats(allow_nan=False),
    ),
)
group_cells = st.builds(
    GroupCell,
    st.sampled_from([p for p in Phase if p >= Phase.IDLE]),
    st.integers(-1, 2**62),
    st.integers(0, 2**32 - 1),
    st.integers(0, 3),
)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(rank_cells, group_cells), min_size=1, max_size=4))
def test_newest_record_is_read_back(history: list[tuple[RankCell, GroupCell]]) -> None:
    marker, region = blank()
    for rank, group in history:
        marker.write(None, rank).apply()
        marker.write(1, group).apply()
        assert (marker.rank, marker.group(1)) == (rank, group)
        again = reread(region)
        assert (again.rank, again.group(1)) == (rank, group)
    assert not again.readable  # group 0 was never written


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 2**32), st.integers(1, 5))
@example(seed=196035, writes=2)
def test_torn_writes_leave_the_old_or_the_new_record(seed: int, writes: int) -> None:
    """Crash after crash, wiping and healing torn now and then too, as recovery would."""
    rng = np.random.default_rng(seed)
    marker, region = blank()
    known = RankCell(Phase.ITERATION, 0)
    marker.write(None, known).apply()
    marker.write(0, GroupCell(Phase.IDLE, 0)).apply()
    for g in range(1, PLAN.groups):
        marker.write(g, GroupCell(Phase.IDLE, 0)).apply()
    for t in range(1, writes + 1):
        for _ in range(int(rng.integers(3))):
            marker = reread(region)
            ops = [*marker.forget_torn(), marker.heal()]
            stop = int(rng.integers(len(ops)))
            for op in ops[:stop]:
                op.apply()
            tear([ops[stop]], rng)
            assert reread(region).rank == known
        marker = reread(region)
        for op in [*marker.forget_torn(), marker.heal()]:
            op.apply()
        tear([marker.write(None, RankCell(Phase.COMPUTE, t))], rng)
        found = reread(region).rank
        assert found in (known, RankCell(Phase.COMPUTE, t))
        known = found
    assert reread(region).rank == known


def test_a_torn_record_is_not_completed_by_the_next_torn_write() -> None:
    """The worst case: X lacks one byte, and just that byte of Y arrives. Wiping prevents it."""
    ended = []
    for wipe in (True, False):
        marker, region = blank()
        for t in range(3):
            marker.write(None, RankCell(Phase.ITERATION, t)).apply()  # sequence 3, and 2 in the other slot
        torn = reread(region).write(None, RankCell(Phase.SYNCED, 9))
        before = [view.copy() for view in torn.writes]
        torn.apply()
        common = 16  # low byte of the sequence number: differs from the old record, equal in X and Y
        for view, old in zip(torn.writes, before, strict=True):
            assert view[common] != old[common]
            view[common] = old[common]
        marker = reread(region)
        assert marker.rank == RankCell(Phase.ITERATION, 2)
        if wipe:
            for op in marker.forget_torn():
                op.apply()
        following = marker.write(None, RankCell(Phase.COMPUTE, 2))
        before = [view.copy() for view in following.writes]
        following.apply()
        for view, old in zip(following.writes, before, strict=True):
            new = int(view[common])
            view[:] = old
            view[common] = new
        ended.append(reread(region).rank)
    assert ended == [RankCell(Phase.ITERATION, 2), RankCell(Phase.SYNCED, 9)], "without wiping X comes back"


def test_a_newer_record_on_a_lost_page_is_wiped_too() -> None:
    """It was not believed, so it must not be found later, when the page is healthy again."""
    marker, region = blank()
    marker.write(None, RankCell(Phase.ITERATION, 1)).apply()
    unseen = marker.write(None, RankCell(Phase.COMPUTE, 1)).writes[0]
    marker.write(None, RankCell(Phase.COMPUTE, 1)).apply()
    replicas = region.pages.reshape(3, -1)
    first = slice(CELL_BYTES + CELL_BYTES // 2, 2 * CELL_BYTES)  # slot of sequence 1
    for r in (1, 2):
        replicas[r] = 0
        replicas[r, first] = replicas[0, first]
    marker = reread(region, (0,))
    assert marker.rank == RankCell(Phase.ITERATION, 1)
    for op in marker.forget_torn():
        op.apply()
    assert (unseen == 0xFF).all()
    assert reread(region).rank == RankCell(Phase.ITERATION, 1)


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**32))
def test_torn_wipes_never_make_a_record_valid(seed: int) -> None:
    """X lacks bytes that a wipe would write: the byte of the magic that is stored first keeps it invalid."""
    rng = np.random.default_rng(seed)
    marker, region = blank()
    for t in range(3):
        marker.write(None, RankCell(Phase.ITERATION, t)).apply()
    x = RankCell(Phase.SYNCED, -1)  # many bytes of 0xFF
    torn = reread(region).write(None, x)
    torn.apply()
    for view in torn.writes:
        ones = np.flatnonzero(view == 0xFF)
        view[rng.choice(ones, size=1 + int(rng.integers(len(ones))), replace=False)] = 0
    for _ in range(3):
        marker = reread(region)
        assert marker.rank == RankCell(Phase.ITERATION, 2)
        for op in marker.forget_torn():
            if rng.random() < 0.5:
                tear([op], rng)
                break
            op.apply()
    assert reread(region).rank == RankCell(Phase.ITERATION, 2)


def test_each_replica_alone_suffices_and_page_wise_combinations_do() -> None:
    world = World(pool=Pool(page_bytes=512))
    memory, up = world.start()
    world.train(up, 2)
    region, n = memory.regions["marker"], PLAN.marker_pages
    for alone in range(3):
        lost = tuple(k for k in range(3 * n) if k // n != alone)
        assert reread(region, lost).rank == up.marker.rank
        assert reread(region, lost).readable
    mixed = tuple(r * n + k for k in range(n) for r in range(3) if r != k % 3)
    assert reread(region, mixed).readable
    assert reread(region, tuple(range(3 * n))).rank is None
    assert not reread(region, tuple(range(3 * n))).blank, "lost is not the same as never used"


def test_a_flipped_bit_anywhere_in_a_record_makes_it_invalid() -> None:
    marker, region = blank()
    marker.write(None, RankCell(Phase.SYNCED, 7, 3, 1, SyncResult(0.5, None, False, 2.0))).apply()
    slot = marker.write(None, RankCell(Phase.SYNCED, 8)).writes
    end = 80  # record and checksum
    good = region.pages.copy()
    for byte in range(end):
        region.pages[:] = good
        for r in range(3):
            flat = region.pages[r * PLAN.marker_pages : (r + 1) * PLAN.marker_pages].reshape(-1)
            flat[CELL_BYTES + CELL_BYTES // 2 + byte] ^= 1 << (byte % 8)  # sequence 1 lies in slot 1
        assert reread(region).rank is None, byte
    assert len(slot) == 3


def test_heal_makes_replicas_equal_and_is_idempotent() -> None:
    world = World(pool=Pool(page_bytes=512))
    memory, up = world.start()
    world.train(up, 1)
    region, n = memory.regions["marker"], PLAN.marker_pages
    region.pages[: 2 * n] = 0xFF
    marker = reread(region, tuple(range(2 * n)))
    for _ in range(2):
        marker.heal().apply()
        for alone in range(3):
            assert reread(region, tuple(k for k in range(3 * n) if k // n != alone)).rank == up.marker.rank


def test_versions_and_cells_are_checked() -> None:
    marker, region = blank()
    with pytest.raises(ProtocolError, match="does not belong"):
        marker.write(None, GroupCell(Phase.UNDO, 1))
    with pytest.raises(ProtocolError, match="does not belong"):
        marker.write(0, RankCell(Phase.COMPUTE, 1))
    with pytest.raises(ProtocolError, match="no valid record"):
        marker.heal()
    with pytest.raises(ProtocolError, match="no valid record"):
        marker.group(0)
    first = marker.write(None, RankCell(Phase.COMPUTE, 1))
    second = marker.write(None, RankCell(Phase.COMPUTE, 2))
    first.apply()
    first.apply()  # repeating is harmless
    marker.write(None, RankCell(Phase.COMPUTE, 3)).apply()
    with pytest.raises(AssertionError, match="two writers"):
        second.apply()
    marker.write_headers().apply()
    region.pages.reshape(-1)[8] ^= 3  # version of replica 0: its checksum no longer fits, so it says nothing
    assert reread(region).rank == RankCell(Phase.COMPUTE, 3)


def test_a_header_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    marker, region = blank()
    monkeypatch.setattr("leto_rmu.records.MARKER_VERSION", 1)
    marker.write_headers().apply()
    monkeypatch.undo()
    with pytest.raises(LayoutMismatch, match="version 1, this leto-rmu writes 2"):
        reread(region)


# --- job state -----------------------------------------------------------------------------------------
HYPER = Hyper(lr=0.1 + 0.2, betas=(0.9, 1 - 2**-53), eps=5e-324, weight_decay=1e300)


def job(size: int = 200) -> tuple[JobState, np.ndarray]:
    world = World(pool=Pool(page_bytes=512))
    memory, _ = world.start()
    return JobState(PLAN, memory.regions["job_state"]), memory.regions["job_state"]


def test_records_are_bit_exact_and_tagged() -> None:
    state, region = job()
    record = JobRecord(8, bytes(range(200)), (HYPER, Hyper(1.0)))
    state.stage(record).apply()
    found = JobState(PLAN, region).read(8)
    assert found == record
    assert found is not None
    assert found.hypers[0].eps == 5e-324
    assert state.read(6) is None, "same slot, other iteration"
    assert state.read(9) is None


def test_staging_never_touches_the_valid_slot() -> None:
    state, region = job()
    state.stage(JobRecord(7, b"seven")).apply()
    for seed in range(30):
        tear([state.stage(JobRecord(8, b"eight" * 30))], np.random.default_rng(seed))
        assert JobState(PLAN, region).read(7) == JobRecord(7, b"seven")
        assert JobState(PLAN, region).read(8) in (None, JobRecord(8, b"eight" * 30))


def test_lost_pages_of_different_replicas_are_combined() -> None:
    state, region = job()
    record = JobRecord(8, bytes(200), (HYPER,) * 2)
    state.stage(record).apply()
    n = PLAN.job_pages
    assert n >= 2
    lost = [list(state.pages_of(8, r))[k] for k in range(n) for r in range(3) if r != k % 3]
    region.pages[lost] = 0x55
    damaged = JobState(PLAN, region, lost)
    assert damaged.read(8) == record
    for place, content in damaged.fixes(record):
        place[:] = content
    assert damaged.fixes(record) == []
    assert all(JobState(PLAN, region).read(8) == record for _ in range(3))


def test_what_does_not_fit_is_refused_with_the_size_that_would() -> None:
    state, _ = job()
    with pytest.raises(
        JobStateTooLarge, match=r"201 bytes does not fit job_state_bytes=200.*job_state_bytes=201"
    ):
        state.stage(JobRecord(1, bytes(201)))
