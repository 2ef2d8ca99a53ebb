"""Assessment: what a rank could repair, computed before anything is written.

Role: the vote of the recovery protocol (docs/concepts/marker-protocol.md, "Across ranks"), before anyone
writes. For restart or finish it determines, group by group, which parity is authoritative, solves for every
lost page into scratch, checks the result with spare parities, and lists the writes that would put it back.

Upholds I-1 (within tolerance the exact bytes, beyond it a reason instead) and I-6 (inconsistent parity is a
"no"; ``verified`` is False where no spare parity was left to check lost pages with). Nothing here writes to
surviving memory: lost pages are always solved into scratch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from leto_ec import CodeError, ReedSolomon
from leto_rmu import arrays
from leto_rmu._pool import PageRef
from leto_rmu.errors import ProtocolError
from leto_rmu.jobstate import JobRecord, JobState
from leto_rmu.marker import GroupCell, Marker, Phase, RankCell
from leto_rmu.ops import Bytes
from leto_rmu.regions import ARENA, GRAD_PARITY, GRADS, JOB_STATE, MARKER_REPLICAS, RING, UNDO
from leto_rmu.update import OpenGroup
from leto_rmu.views import RankMemory, indices

__all__ = ["Assessment", "Repair", "assess"]


@dataclass
class Repair:
    """Pages that are repaired, checked and acknowledged together.

    ``fixes`` are (place, content) pairs; ``restore`` is the open chunk of the group, whose C becomes U.
    """

    what: str
    group: int | None = None
    fixes: list[tuple[Bytes, Bytes]] = field(default_factory=list)
    refs: list[PageRef] = field(default_factory=list)
    restore: int | None = None
    verified: bool = True


@dataclass
class Assessment:
    """Everything recovery will do, or why it cannot. ``record`` holds the job state to go on with.

    ``regrade``: only with gradients that are computed again. ``needed``: gradient pages that the update still
    reads, where the policy is to compute them again; others may be anything.
    """

    ok: bool
    reason: str = ""
    record: JobRecord | None = None
    repairs: list[Repair] = field(default_factory=list)
    open_groups: dict[int, OpenGroup] = field(default_factory=dict)
    drained: frozenset[int] = frozenset()
    irrelevant: list[PageRef] = field(default_factory=list)
    regrade: bool = False
    needed: frozenset[int] = frozenset()

    @property
    def verified(self) -> bool:
        return all(r.verified for r in self.repairs)


class _No(Exception):  # noqa: N818 - a vote, not an error
    """This rank cannot reconstruct."""


def assess(
    memory: RankMemory,
    marker: Marker,
    jobs: JobState,
    lost: frozenset[PageRef],
    rank: RankCell,
    *,
    finish: bool,
) -> Assessment:
    """Examine memory for finishing ``rank.iteration``, or for restarting it. Reads only."""
    try:
        return _Examination(memory, marker, jobs, lost, rank, finish).result()
    except _No as no:
        return Assessment(False, str(no))


class _Examination:
    def __init__(
        self,
        memory: RankMemory,
        marker: Marker,
        jobs: JobState,
        lost: frozenset[PageRef],
        rank: RankCell,
        finish: bool,
    ) -> None:
        self.memory, self.plan, self.marker, self.jobs = memory, memory.plan, marker, jobs
        self.lost, self.rank, self.finish = lost, rank, finish
        self.repairs: list[Repair] = []
        self.needed: frozenset[int] = frozenset()

    def result(self) -> Assessment:
        if not self.marker.readable:
            raise _No("a marker cell is lost in all its replicas")
        # A no-op iteration changes no group, and after UPDATED none is left to change.
        updating = (
            self.finish
            and self.rank.phase is not Phase.UPDATED
            and not (
                self.rank.phase is Phase.SYNCED and self.rank.sync is not None and self.rank.sync.found_inf
            )
        )
        cells = {g: self._cell(g) for g in range(self.plan.groups)} if updating else {}
        try:
            self.rotation = self.marker.rotation
        except ProtocolError as error:
            raise _No(str(error)) from error
        record = self._job_record()
        for g in range(self.plan.groups):
            self._group(g, cells.get(g))
        drained = frozenset(
            g for g in range(self.plan.groups) if not updating or self._is(cells[g], Phase.DRAINED)
        )
        open_groups = {
            g: OpenGroup(c.chunk if c.phase is Phase.UNDO else c.chunk + 1, c.slot, c.phase is Phase.UNDO)
            for g, c in cells.items()
            if c is not None and c.phase in (Phase.UNDO, Phase.COMMIT)
        }
        regrade = updating and self._gradients(open_groups, drained)
        repaired = {ref for r in self.repairs for ref in r.refs}
        return Assessment(
            True,
            "",
            record,
            self.repairs,
            open_groups,
            drained,
            sorted(self.lost - repaired),
            regrade,
            self.needed,
        )

    @staticmethod
    def _is(cell: GroupCell | None, phase: Phase) -> bool:
        return cell is not None and cell.phase is phase

    def _cell(self, group: int) -> GroupCell | None:
        """The group's cell if it speaks of this iteration; None: not begun."""
        cell, t = self.marker.group(group), self.rank.iteration
        if cell.iteration < t or cell.phase is Phase.IDLE:
            if cell.phase not in (Phase.IDLE, Phase.DRAINED):
                raise _No(
                    f"marker of group {group} is {cell.phase.name}({cell.iteration}), but the rank is at {t}"
                )
            return None
        if cell.iteration > t:
            raise _No(f"marker of group {group} is of iteration {cell.iteration}, but the rank is at {t}")
        return cell

    # --- job state ----------------------------------------------------------------------------------
    def _job_record(self) -> JobRecord:
        if self.finish and self.plan.gradients == "recompute":
            self._keep_job_state(self.rank.iteration)  # computing gradients again begins with it
        tag = self.rank.iteration + (1 if self.finish else 0)
        record = self._keep_job_state(tag)
        if record is None:
            raise _No(f"the job state of iteration {tag} is lost in all its replicas")
        return record

    def _keep_job_state(self, tag: int) -> JobRecord | None:
        """The record of an iteration; its damaged replicas will be repaired."""
        record = self.jobs.read(tag)
        if record is None:
            return None
        pages = {k for r in range(MARKER_REPLICAS) for k in self.jobs.pages_of(tag, r)}
        refs = [PageRef(JOB_STATE, "data", k) for k in sorted(indices(self.lost, JOB_STATE) & pages)]
        fixes = self.jobs.fixes(record)
        if fixes or refs:
            self.repairs.append(Repair("job state", None, fixes, refs))
        return record

    # --- model state --------------------------------------------------------------------------------
    def _group(self, group: int, cell: GroupCell | None) -> None:
        """Repair one group from the parity that is authoritative for it."""
        if not self.lost and (cell is None or cell.phase is not Phase.UNDO):
            return  # nothing to solve or to restore; on a GPU a view of every page would take milliseconds
        memory, plan = self.memory, self.plan
        h1, h2 = plan.config.tier1_pages, plan.config.tier2_pages
        repair = Repair(f"group {group}", group)
        data_lost = indices(self.lost, ARENA)
        physical = plan.geometry.group_pages(group, self.rotation)
        pages = memory.group_pages(group, self.rotation)
        gone = {j for j, page in enumerate(physical) if page in data_lost}
        padding = gone & plan.padding_positions(group)
        gone -= padding  # nothing is to be solved for: they are zero
        refs = [PageRef(ARENA, "data", page) for page in physical if page in data_lost]
        if cell is not None and cell.phase is Phase.UNDO:
            # U stands for C_j, whatever became of C_j.
            undo_lost = indices(self.lost, UNDO)
            first = cell.chunk * plan.geometry.positions_per_chunk
            for j, k in enumerate(plan.geometry.buffer_pages(), first):
                if k is not None:
                    pages[j] = memory.undo[k]
                    gone.discard(j)
                    padding.discard(j)
                    if k in undo_lost:
                        gone.add(j)
            refs += [PageRef(UNDO, "data", k) for k in sorted(undo_lost)]
            repair.restore = cell.chunk
        repair.fixes += [(page, arrays.zeros_like(page)) for page in memory.arena_pages(physical, padding)]

        if cell is not None and cell.phase in (Phase.UNDO, Phase.COMMIT):
            rows = list(memory.ring(cell.slot))
            rows_gone = {i for i in range(h1) if cell.slot * h1 + i in indices(self.lost, RING)}
            refs += [PageRef(RING, "data", cell.slot * h1 + i) for i in sorted(rows_gone)]
            repair.verified = self._solve(repair, memory.code, pages, gone, rows, rows_gone)
        else:
            rows = list(memory.tier1(group))
            rows_gone = {i for i in range(h1) if group * h1 + i in indices(self.lost, ARENA, "tier1")}
            top_gone = {i for i in range(h2) if group * h2 + i in indices(self.lost, ARENA, "tier2")}
            refs += [PageRef(ARENA, "tier1", group * h1 + i) for i in sorted(rows_gone)]
            refs += [PageRef(ARENA, "tier2", group * h2 + i) for i in sorted(top_gone)]
            if rows_gone and gone and len(rows_gone) <= h2 - len(top_gone):
                self._tier2(repair, group, rows, rows_gone, top_gone)
                # Spare rows confirm the rows from tier 2 as well: they are used, or compared, here.
                repair.verified = self._solve(repair, memory.code, pages, gone, rows, set())
            else:
                # No data is lost, so H is simply encoded again; or tier 2 cannot help.
                repair.verified = self._solve(repair, memory.code, pages, gone, rows, rows_gone)
                if top_gone:
                    self._tier2(repair, group, rows, set(), top_gone)
        repair.refs += refs
        if repair.refs or repair.restore is not None:
            self.repairs.append(repair)

    def _tier2(
        self, repair: Repair, group: int, rows: list[Bytes], rows_gone: set[int], top_gone: set[int]
    ) -> None:
        code = self.memory.tier2_code
        assert code is not None
        self._solve(repair, code, rows, rows_gone, list(self.memory.tier2(group)), top_gone)

    def _solve(
        self,
        repair: Repair,
        code: ReedSolomon,
        pages: list[Any],
        pages_gone: set[int],
        rows: list[Any],
        rows_gone: set[int],
    ) -> bool:
        """Solve into scratch, which is left in the place of lost ``pages`` and ``rows``; was it verified?"""
        if not pages_gone and not rows_gone:
            return True
        for buffers, gone in ((pages, pages_gone), (rows, rows_gone)):
            for k in sorted(gone):
                scratch = arrays.zeros_like(buffers[k])
                repair.fixes.append((buffers[k], scratch))
                buffers[k] = scratch
        try:
            result = self.memory.reconstruct(code, pages, rows, pages_gone, rows_gone)
        except CodeError as error:
            raise _No(f"{repair.what}: {error}") from error
        return result.verified or not pages_gone  # parity that is encoded again from healthy data is no guess

    # --- gradients ----------------------------------------------------------------------------------
    def _gradients(self, open_groups: dict[int, OpenGroup], drained: frozenset[int]) -> bool:
        """Repair gradient groups that chunks still to be updated read; or: must they be computed again?"""
        h1 = self.plan.config.tier1_pages
        grads_lost, rows_lost = indices(self.lost, GRADS), indices(self.lost, GRAD_PARITY)
        if self.plan.gradients == "recompute":
            self.needed = frozenset(self._needed_gradients(open_groups, drained))
            return bool(self.needed if self.rank.regrading else self.needed & grads_lost)
        if not grads_lost and not rows_lost:
            return False
        needed = self._needed_gradients(open_groups, drained)
        for k, pages in enumerate(self.plan.grad_groups):
            gone = {j for j, page in enumerate(pages) if page in grads_lost}
            rows_gone = {i for i in range(h1) if k * h1 + i in rows_lost}
            if needed.isdisjoint(pages) or not (gone or rows_gone):
                continue
            repair = Repair(f"gradient group {k}")
            repair.refs += [PageRef(GRADS, "data", pages[j]) for j in sorted(gone)]
            repair.refs += [PageRef(GRAD_PARITY, "data", k * h1 + i) for i in sorted(rows_gone)]
            rows = list(self.memory.grad_parity(k))
            pages_now = self.memory.grad_group(k)
            repair.verified = self._solve(repair, self.memory.code, pages_now, gone, rows, rows_gone)
            self.repairs.append(repair)
        return False

    def _needed_gradients(self, open_groups: dict[int, OpenGroup], drained: frozenset[int]) -> set[int]:
        needed: set[int] = set()
        for g in range(self.plan.groups):
            if g not in drained:
                first = open_groups[g].chunk if g in open_groups else 0
                for c in range(first, self.plan.chunks_in(g)):
                    needed |= self.plan.grad_pages_of(self.plan.pieces(g, c))
        return needed
