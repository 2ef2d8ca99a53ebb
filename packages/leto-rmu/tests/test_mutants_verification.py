"""The tests of I-6 have teeth: whatever stops verifying fails the checks that the product passes.

Each check raises Wrong where something unverified is believed, whether or not harm comes of it. Mutants are
the product with one verification taken out, for everything that the check does, writing included.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from rmu_lab import SEGMENTS, LabMemory, Pool, World, Wrong

import leto_rmu.records
from leto_ec import ReedSolomon
from leto_rmp import PageRef
from leto_rmu import Action, Decision, Executor, LayoutMismatch, Op, SyncResult, UpdatePlan, decide
from leto_rmu.faults import Stopped, at, tear
from leto_rmu.jobstate import JobState
from leto_rmu.layout import JOB_HEADER_BYTES
from leto_rmu.marker import Marker, Phase, RankCell
from leto_rmu.regions import MARKER_REPLICAS

TRAINED = 2  # iterations behind every memory that is looked at
RECORD_BYTES = 80  # of a marker cell's slot: body and checksum
JOB_RECORD_HEAD = 32  # of a job state's header: fields and checksum


def trained(**options: Any) -> tuple[World, LabMemory]:
    world = World(**options)
    memory, up = world.start()
    world.train(up, TRAINED)
    return world, memory


def recover_exactly(world: World, memory: LabMemory, *, verified: bool = True) -> None:
    up = world.updater(memory)
    decision = decide([up.summary()])
    found = Decision.decode(decision)
    if found.action not in (Action.RESTART, Action.FINISH):
        raise Wrong(f"refused within tolerance: {found.reason}")
    recovered = up.recover(decision)
    world.check(memory, up)
    if recovered.verified != verified:
        raise Wrong(f"verified is {recovered.verified}, expected {verified}")


# --- checks --------------------------------------------------------------------------------------------
def check_torn_marker() -> None:
    """A write that was torn in all replicas is not there, or it is there whole."""
    world, memory = trained()
    region = memory.regions["marker"]
    known, good = Marker(world.plan, region).rank, region.pages.copy()
    new = RankCell(Phase.SYNCED, TRAINED, TRAINED, 0, SyncResult(0.5, 0.25, False, 3.0))
    for seed in range(60):
        region.pages[:] = good
        tear([Marker(world.plan, region).write(None, new)], np.random.default_rng(seed))
        found = Marker(world.plan, region).rank
        if found not in (known, new):
            raise Wrong(f"believed a torn record: {found}, tear seed {seed}")
    region.pages[:] = good
    recover_exactly(world, memory)


def check_damaged_marker() -> None:
    """A record that was damaged in all replicas gives way to the one before, whichever bit it is."""
    world, memory = trained()
    region = memory.regions["marker"]
    known = Marker(world.plan, region).rank
    new = RankCell(Phase.SYNCED, TRAINED, TRAINED, 0, SyncResult(0.5, 0.25, False, 3.0))
    write = Marker(world.plan, region).write(None, new)
    write.apply()
    for byte in reversed(range(RECORD_BYTES)):
        mask = 1 << byte % 8
        for view in write.writes:
            view[byte] ^= mask
        found = Marker(world.plan, region).rank
        if found != known:
            raise Wrong(f"believed a damaged record: {found}, byte {byte}")
        for view in write.writes:
            view[byte] ^= mask
    assert Marker(world.plan, region).rank == new, "undamaged, it counts"


def check_layout() -> None:
    """Memory of another layout, of the same sizes, is refused; without headers nothing in it is believed."""
    world, memory = trained()
    a, b, c = SEGMENTS
    others = [
        World(segments=(a, dataclasses.replace(b, name="renamed"), c)),
        World(segments=(c, b, a)),
        World(segments=(a, dataclasses.replace(b, grad_offset=104), c)),
        World(segments=(a, dataclasses.replace(b, group=0), dataclasses.replace(c, group=1))),
    ]
    marker, size = memory.regions["marker"].pages, world.plan.marker_pages
    good = memory.snapshot()
    for number, other in enumerate(others):
        assert other.plan.specs() == world.plan.specs(), "nothing but the layout hash can tell"
        memory.restore(good)
        try:
            other.updater(memory)
        except LayoutMismatch:
            pass
        else:
            raise Wrong(f"opened memory of another layout: {number}")
        for replica in range(MARKER_REPLICAS):
            marker[replica * size, :64] ^= 0xFF  # headers are gone; cells begin on the next page
        found = Marker(other.plan, memory.regions["marker"])
        if found.rank is not None or any(found._values):
            raise Wrong(f"believed marker cells of another layout: {number}, {found.rank}")
        record = JobState(other.plan, memory.regions["job_state"]).read(TRAINED)
        if record is not None:
            raise Wrong(f"believed a job state of another layout: {number}, {record.job_state!r}")
        recover_exactly(world, memory)


def check_job_state() -> None:
    """One sound replica is found and the others healed; without one the checkpoint is taken."""
    world, memory = trained()
    region = memory.regions["job_state"]
    jobs = JobState(world.plan, region)
    record = jobs.read(TRAINED)
    assert record is not None
    replicas = [
        region.pages[p.start : p.stop].reshape(-1)
        for p in (jobs.pages_of(TRAINED, r) for r in range(MARKER_REPLICAS))
    ]
    at_state = replicas[0].tobytes().index(world.job(TRAINED))
    good = memory.snapshot()
    for damaged in ((0,), (1,), (2,), (0, 1), (1, 2), (0, 2)):
        memory.restore(good)
        for r in damaged:
            replicas[r][at_state + r] ^= 1
        recover_exactly(world, memory)
        if JobState(world.plan, region).fixes(record):
            raise Wrong(f"damaged replicas {damaged} were not healed")

    memory.restore(good)
    for replica in replicas:
        replica[at_state] ^= 1
    decision = Decision.decode(decide([world.updater(memory).summary(checkpoints=[1])]))
    if decision.action is not Action.CHECKPOINT or "job state" not in decision.reason:
        raise Wrong(f"believed a damaged job state: {decision}")
    end = at_state + len(world.job(TRAINED))
    for byte in (*range(JOB_RECORD_HEAD), *range(JOB_HEADER_BYTES, end)):
        memory.restore(good)
        for replica in replicas:
            replica[byte] ^= 1 << byte % 8
        if (found := JobState(world.plan, region).read(TRAINED)) is not None:
            raise Wrong(f"believed a damaged job state: byte {byte}, {found}")


# --- parity --------------------------------------------------------------------------------------------
class CrashBefore(Executor):
    def __init__(self, match: Callable[[Op], bool]) -> None:
        self._match = match

    def run(self, op: Op) -> None:
        if self._match(op):
            raise Stopped(str(op))
        op.apply()


def refs(name: str, indices: Any, section: str = "data") -> list[PageRef]:
    return [PageRef(name, section, int(k)) for k in indices]  # type: ignore[arg-type]


@dataclass
class Case:
    """``lost`` leaves a spare parity; any one of ``witnesses``, flipped, must then be noticed in ``what``."""

    what: str
    lost: list[PageRef]
    witnesses: list[PageRef]


def crashed(match: Callable[[Op], bool], **options: Any) -> Callable[[], tuple[World, LabMemory]]:
    def make() -> tuple[World, LabMemory]:
        world, memory = trained(**options)
        up = world.updater(memory, CrashBefore(match))
        up.recover(decide([up.summary()]))
        with pytest.raises(Stopped):
            world.iterate(up)
        return world, memory

    return make


SITUATIONS: dict[str, Callable[[], tuple[World, LabMemory]]] = {
    "between iterations": trained,
    "synchronized": crashed(at("load", group=0)),
    "chunk open": crashed(at("parity", group=1, chunk=1)),
    "chunk committed": crashed(at("drain", group=1)),
    "slot open": crashed(at("parity", group=1, chunk=1), scheme="slots", pool=Pool(data_pages=8)),
}
NAMES = {
    "between iterations": ("page", "two pages", "page and parity row", "parity row"),
    "synchronized": ("gradient page", "gradient page and row", "page"),
    "chunk open": ("undo page", "page beside the open chunk", "drained page", "later page", "gradient page"),
    "chunk committed": ("page", "two pages", "page and parity row"),
    "slot open": ("moved page", "page of the open chunk", "drained page", "later page"),
}


def cases(situation: str, world: World, memory: LabMemory) -> dict[str, Case]:
    """What a group's consistency rests upon, from the order of operations; H1 = 3, H2 = 1, two chunks."""
    plan, h1 = world.plan, world.pool.tier1_pages
    moved = plan.chunks_in(0) + 1 if situation == "slot open" else 0
    arena = [
        refs("arena", [page for page in order if page is not None])
        for order in world.group_orders(TRAINED, moved)
    ]
    h = [refs("arena", range(g * h1, (g + 1) * h1), "tier1") for g in range(plan.groups)]
    undo, r = refs("undo", range(plan.pages_per_chunk)), refs("grad_parity", range(h1))
    grads = refs("grads", plan.grad_groups[0])
    gradient = Case("gradient group 0", grads[2:3], grads[:2] + grads[3:] + r)
    mine, rows = arena[1], h[1]
    if situation == "between iterations":
        top = refs("arena", [1], "tier2")
        return {
            "page": Case("group 1", mine[:1], mine[1:] + rows),
            "two pages": Case("group 1", [mine[0], mine[4]], [*mine[1:4], mine[5], *rows]),
            "page and parity row": Case("group 1", [mine[0], rows[1]], [*mine[1:], rows[0], rows[2], *top]),
            "parity row": Case("group 1", rows[1:2], [*mine, rows[0], rows[2]]),
        }
    if situation == "synchronized":
        both = Case("gradient group 0", [grads[2], r[0]], grads[:2] + grads[3:] + r[1:])
        return {
            "gradient page": gradient,
            "gradient page and row": both,
            "page": Case("group 1", mine[:1], mine[1:] + rows),
        }
    slot = Marker(plan, memory.regions["marker"]).group(1).slot
    q = refs("parity_ring", range(slot * h1, (slot + 1) * h1))
    beside = mine[: plan.pages_per_chunk]
    if situation == "slot open":  # chunk 0 has moved, chunk 1 has not, whatever is in the free slot
        return {
            "moved page": Case("group 1", mine[:1], mine[1:] + q),
            "page of the open chunk": Case("group 1", mine[4:5], mine[:4] + mine[5:] + q),
            "drained page": Case("group 0", arena[0][:1], arena[0][1:] + h[0]),
            "later page": Case("group 2", arena[2][:1], arena[2][1:] + h[2]),
        }
    if situation == "chunk open":  # U stands for the pages of chunk 1
        return {
            "undo page": Case("group 1", undo[:1], undo[1:] + beside + q),
            "page beside the open chunk": Case("group 1", beside[:1], beside[1:] + undo + q),
            "drained page": Case("group 0", arena[0][:1], arena[0][1:] + h[0]),
            "later page": Case("group 2", arena[2][:1], arena[2][1:] + h[2]),
            "gradient page": gradient,
        }
    return {
        "page": Case("group 1", mine[:1], mine[1:] + q),
        "two pages": Case("group 1", [mine[0], mine[4]], [*mine[1:4], mine[5], *q]),
        "page and parity row": Case("group 1", [mine[0], q[1]], [*mine[1:], q[0], q[2]]),
    }


def check_parity(situation: str, name: str) -> None:
    """While a spare parity is left, one flipped bit in any survivor is refused, and nothing is written."""
    world, memory = SITUATIONS[situation]()
    case = cases(situation, world, memory)[name]
    memory.lose(case.lost, seed=1)
    damaged = memory.snapshot()
    for k, ref in enumerate(case.witnesses):
        memory.restore(damaged)
        page = memory.regions[ref.allocation].section(ref.section)[ref.index]
        page[(17 * k) % page.size] ^= 1 << k % 8
        before = memory.snapshot()
        found = Decision.decode(decide([world.updater(memory).summary(checkpoints=[0])]))
        if found.action in (Action.RESTART, Action.FINISH):
            raise Wrong(f"believed a flipped bit in {ref}: {situation}, {name}")
        if found.action is not Action.CHECKPOINT or f"{case.what}:" not in found.reason:
            raise Wrong(f"refused for another reason: {found}")
        for array, kept in zip(memory.snapshot().arrays, before.arrays, strict=True):
            if not np.array_equal(array, kept):
                raise Wrong("a vote wrote to memory")
    memory.restore(damaged)
    if situation == "slot open":  # what is in the free slot is not believed, so it may be anything
        free = world.places(TRAINED, world.plan.chunks_in(0) + 1)[1]
        assert free is not None
        for index in (page for page in world.slot_order(free) if page is not None):
            memory.regions["arena"].pages[index] ^= 0xFF
    recover_exactly(world, memory)  # the loss alone is within tolerance


def check_admission() -> None:
    """Without a spare parity nothing can be noticed, and the result says so."""
    world, memory = trained()
    pages = memory.regions["arena"].groups[1].pages
    memory.lose(refs("arena", pages[: world.pool.tier1_pages]), seed=1)
    recover_exactly(world, memory, verified=False)


PARITY = [(situation, name) for situation, names in NAMES.items() for name in names]


# --- the product ---------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    "check", [check_torn_marker, check_damaged_marker, check_layout, check_job_state, check_admission]
)
def test_the_product_passes(check: Callable[[], None]) -> None:
    check()


@pytest.mark.parametrize(("situation", "name"), PARITY)
def test_the_product_notices_contradictions(situation: str, name: str) -> None:
    check_parity(situation, name)


# --- mutants -------------------------------------------------------------------------------------------
class AlwaysRight(bytes):
    """A checksum that equals whatever is found."""

    __hash__ = bytes.__hash__

    def __eq__(self, other: object) -> bool:
        return True

    def __ne__(self, other: object) -> bool:
        return False


real_marker_checksum, real_job_checksum = leto_rmu.records.checksum, JobState._checksum


def marker_checksum_always_true(patch: pytest.MonkeyPatch) -> None:
    def checksum(body: bytes, key: bytes) -> bytes:
        found = real_marker_checksum(body, key)
        return AlwaysRight(found) if key else found  # headers, which have no key, as they are

    patch.setattr(leto_rmu.records, "checksum", checksum)


def job_state_checksum_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(JobState, "_checksum", lambda *args: AlwaysRight(real_job_checksum(*args)))


def layout_hash_ignored(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(UpdatePlan, "layout_hash", property(lambda plan: bytes(32)))


def header_not_compared(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Marker, "_check_headers", lambda marker, lost: None)


def cells_without_key(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(leto_rmu.records, "checksum", lambda body, key: real_marker_checksum(body, b""))


def job_state_without_key(patch: pytest.MonkeyPatch) -> None:
    def checksum(jobs: JobState, head: bytes, payload: bytes) -> bytes:
        return hashlib.blake2b(head + payload, digest_size=8).digest()

    patch.setattr(JobState, "_checksum", checksum)


def reconstructed_without_verification(patch: pytest.MonkeyPatch, claim: bool = False) -> None:
    real = ReedSolomon.reconstruct

    def reconstruct(code: ReedSolomon, *args: Any, **more: Any) -> Any:
        result = real(code, *args, **{**more, "verify": False})
        return dataclasses.replace(result, verified=True) if claim else result

    patch.setattr(ReedSolomon, "reconstruct", reconstruct)


def claimed_to_be_verified(patch: pytest.MonkeyPatch) -> None:
    reconstructed_without_verification(patch, claim=True)


@pytest.mark.parametrize(
    ("mutate", "check", "said"),
    [
        (marker_checksum_always_true, check_torn_marker, "believed a torn record"),
        (marker_checksum_always_true, check_damaged_marker, "believed a damaged record"),
        (layout_hash_ignored, check_layout, "opened memory of another layout"),
        (header_not_compared, check_layout, "opened memory of another layout"),
        (cells_without_key, check_layout, "believed marker cells of another layout"),
        (job_state_without_key, check_layout, "believed a job state of another layout"),
        (job_state_checksum_ignored, check_job_state, "job state b'"),
        (claimed_to_be_verified, check_admission, "verified is True, expected False"),
    ],
)
def test_what_does_not_verify_is_caught(
    mutate: Callable[[pytest.MonkeyPatch], None],
    check: Callable[[], None],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutate(monkeypatch)
    with pytest.raises(Wrong, match=f"^{said}"):
        check()


@pytest.mark.parametrize(("situation", "name"), PARITY)
@pytest.mark.parametrize("mutate", [reconstructed_without_verification, claimed_to_be_verified])
def test_reconstruction_without_verification_is_caught(
    mutate: Callable[[pytest.MonkeyPatch], None],
    situation: str,
    name: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mutate(monkeypatch)
    with pytest.raises(Wrong, match=r"^believed a flipped bit"):
        check_parity(situation, name)
