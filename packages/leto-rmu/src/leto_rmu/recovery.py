"""Recovery of one rank: heal the marker, repair pages, finish or restart (docs/concepts/marker-protocol.md).

Role: carries out the common decision. Order is everything here too, because recovery can crash itself (I-2):

1. torn marker records are wiped, so that no later torn write completes one, and all replicas are made equal,
   so that what was acted upon cannot be lost with one page;
2. the rank's role is marked: SYNCED(t) where a peer had already synchronized, ITERATION(t) for a restart -
   only
   then may lost gradients or stale job state be declared irrelevant;
3. group by group: reconstructed pages are written and read back, U included (or a second crash would
   restore an empty page), the open chunk is restored from U, and only then are the page marks acknowledged;
   under the scheme "slots" there is no U, and an open chunk needs nothing;
4. where the policy is to compute lost gradients again, that is done between two marks (`leto_rmu.regrade`);
5. the update is finished from the open groups; derived state is rebuilt; ITERATION(t+1).

Every step is an op and idempotent.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from leto_rmu import arrays
from leto_rmu._pool import PageRef
from leto_rmu.assess import Assessment, Repair
from leto_rmu.decision import Action, Decision
from leto_rmu.errors import DecisionError, ProtocolError
from leto_rmu.marker import Phase, RankCell, SyncResult
from leto_rmu.ops import Op
from leto_rmu.regions import MARKER, MODEL
from leto_rmu.regrade import regrade

if TYPE_CHECKING:
    from leto_rmu.updater import ResumableUpdater

__all__ = ["Recovered", "Recovery"]


@dataclass(frozen=True)
class Recovered:
    """Outcome of one rank. ``iteration`` is the next to compute; ``job_state`` is valid for it.

    ``verified``: spare parities confirmed every page solved for (True when none was lost). ``sync`` is
    the result of the iteration before. FRESH and CHECKPOINT carry no job state: load, then initialize().
    """

    iteration: int
    job_state: bytes
    action: Action
    pages_reconstructed: int
    verified: bool
    seconds: float
    sync: SyncResult | None = None
    reason: str = ""


class Recovery:
    """One attempt to recover; made by ``ResumableUpdater.recover``."""

    def __init__(self, updater: ResumableUpdater) -> None:
        self.up = updater

    def run(self, encoded: bytes) -> Recovered:
        """Carry out the decision; raise DecisionError when it does not fit this rank."""
        started = time.monotonic()
        up, decision = self.up, Decision.decode(encoded)
        action = up.position().action(decision)
        if action in (Action.FRESH, Action.CHECKPOINT):
            self._forget(decision)
            seconds = time.monotonic() - started
            return Recovered(decision.iteration, b"", action, 0, True, seconds, None, decision.reason)

        finish = action is Action.FINISH
        found = up.assess(finish=finish)
        if not found.ok or found.record is None:
            raise DecisionError(f"this rank voted no, but the decision is {decision.action}: {found.reason}")
        skipped = decision.sync is not None and decision.sync.found_inf  # no update, no gradients
        if found.regrade and not decision.regrade and not skipped:
            raise DecisionError("this rank needs gradients computed again, but the decision is to use them")
        cell = up.marker.rank
        assert cell is not None
        up.executor.run_all([*up.marker.forget_torn(), up.marker.heal()])
        up.executor.run_all(self._acknowledge([ref for ref in found.irrelevant if ref.allocation == MARKER]))
        role = self._role(cell, decision, finish)
        if role != cell:
            up.executor.run(up.marker.write(None, role))
        for repair in found.repairs:
            up.executor.run_all(self.repair_ops(repair))
        derived = [ref for ref in found.irrelevant if ref.allocation == MODEL]
        irrelevant = [ref for ref in found.irrelevant if ref.allocation not in (MARKER, MODEL)]
        up.executor.run_all(up.clear_padding())
        up.executor.run_all(self._acknowledge(irrelevant))

        up.resume(found.record)
        if finish:
            if decision.regrade:
                regrade(up, role, () if cell.regrading else found.needed)
            self._finish(role, found)
            up.commit(found.record)
        else:
            up.rebuild_derived()
        up.executor.run_all(self._acknowledge(derived))
        pages = sum(len(r.refs) for r in found.repairs)
        return Recovered(
            up.iteration,
            up.job_state,
            action,
            pages,
            found.verified,
            time.monotonic() - started,
            up.last_sync,
            decision.reason,
        )

    @staticmethod
    def _role(cell: RankCell, decision: Decision, finish: bool) -> RankCell:
        if not finish:
            return replace(cell, phase=Phase.ITERATION)
        if cell.phase is Phase.SYNCED:
            return replace(cell, regrading=decision.regrade)
        if cell.phase is not Phase.PROTECTED:
            return cell
        if decision.sync is None:
            raise DecisionError(
                "the decision lacks the global synchronization that this rank has not recorded"
            )
        return replace(cell, phase=Phase.SYNCED, sync=decision.sync, regrading=decision.regrade)

    def _forget(self, decision: Decision) -> None:
        """Nothing here may be trusted until initialize() has run to its end."""
        up = self.up
        up.executor.run_all([*up.marker.forget_torn(), up.marker.write_headers()])
        loading = RankCell(Phase.LOADING, decision.iteration, 0, decision.epoch, turn=up.marker.turn)
        up.executor.run(up.marker.write(None, loading))

    def _finish(self, cell: RankCell, found: Assessment) -> None:
        if cell.phase is Phase.UPDATED:
            return
        assert cell.sync is not None
        assert found.record is not None
        self.up.update(found.record.hypers, cell.sync, found)

    # --- repairs ------------------------------------------------------------------------------------
    def repair_ops(self, repair: Repair) -> Iterator[Op]:
        """Write, restore the open chunk, check what was written, acknowledge."""
        if repair.fixes:
            yield self.write_op(repair)
        if repair.restore is not None:
            yield self.restore_op(repair)
        self.check(repair)
        yield from self._acknowledge(repair.refs)

    def write_op(self, repair: Repair) -> Op:
        """Put reconstructed pages in their places."""

        def apply() -> None:
            for place, content in repair.fixes:
                arrays.copy(place, content)

        return Op(
            "repair", repair.group, None, tuple(place for place, _ in repair.fixes), apply, self._iteration
        )

    def restore_op(self, repair: Repair) -> Op:
        """C = U for the chunk that was being updated."""
        group, chunk = repair.group, repair.restore
        assert group is not None
        assert chunk is not None
        memory = self.up.memory
        runs = memory.chunk_runs(group, chunk)

        def apply() -> None:
            for target, source in zip(runs, memory.undo_runs(), strict=True):
                arrays.copy(target, source)

        return Op("restore", group, chunk, tuple(runs), apply, self._iteration)

    @staticmethod
    def check(repair: Repair) -> None:
        """Read back: a page that does not hold what was written must not become healthy."""
        if not all(arrays.equal(place, content) for place, content in repair.fixes):
            raise ProtocolError(
                f"{repair.what}: a repaired page does not hold what was written: is it mapped?"
            )

    def _acknowledge(self, refs: Sequence[PageRef]) -> Iterator[Op]:
        if refs:
            kept = tuple(refs)
            acknowledge = self.up.memory.memory.acknowledge
            yield Op("acknowledge", None, None, (), lambda: acknowledge(kept), self._iteration, kept)

    @property
    def _iteration(self) -> int:
        cell = self.up.marker.rank
        return cell.iteration if cell is not None else -1
