"""Summary, decide, Decision: one agreed way to recover, as a pure function of what every rank found.

Role: after a failure each rank summarises its marker and votes whether it can reconstruct, before anyone
writes (docs/concepts/marker-protocol.md, "Across ranks"). ``decide`` needs no memory and no clock, and does
not depend on the order of the summaries; the coordinator calls it by name. Upholds I-5: all ranks continue
from one source and one iteration. T is the highest iteration that any rank has SYNCED: then all gradients of
T are protected, so every rank finishes T; ranks already at T + 1 only drop partial compute. One "no", a skew
of two, or a rank without memory sends all to the newest checkpoint that every rank can see, or to a fresh
start.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from enum import StrEnum

import msgspec

from leto_rmu.errors import DecisionError
from leto_rmu.marker import Phase, SyncResult

__all__ = ["Action", "Decision", "Summary", "Vote", "decide"]

WIRE_VERSION = 2
_BYTES_MAX = 1 << 20


class Action(StrEnum):
    """What a rank does. NONE is a RESTART of a rank that is already one iteration ahead."""

    FRESH = "fresh"
    CHECKPOINT = "checkpoint"
    RESTART = "restart"
    FINISH = "finish"
    NONE = "none"


class Vote(msgspec.Struct, frozen=True):
    """Can this rank reconstruct? ``reason`` says why not; ``regrade``: if gradients are computed again."""

    ok: bool
    reason: str = ""
    regrade: bool = False


class Summary(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one rank found. ``phase`` None: no usable state (``reason`` says why).

    ``sync`` is the result of this iteration from SYNCED to UPDATED, otherwise of the one before. ``regrade``:
    can this rank compute the gradients of ``iteration`` again?
    """

    phase: str | None
    iteration: int = 0
    epoch: int = 0
    sync: SyncResult | None = None
    restart: Vote = Vote(False, "not examined")
    finish: Vote = Vote(False, "not examined")
    regrade: Vote = Vote(False, "not examined")
    checkpoints: tuple[int, ...] = ()
    reason: str = ""
    version: int = WIRE_VERSION

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, raw: bytes) -> Summary:
        """Raise DecisionError when the bytes are no summary of this version."""
        if len(raw) > _BYTES_MAX:
            raise DecisionError(f"a summary of {len(raw)} bytes is more than {_BYTES_MAX}")
        try:
            summary = msgspec.msgpack.decode(raw, type=cls)
        except msgspec.DecodeError as error:
            raise DecisionError(f"not a marker summary: {error}") from error
        if summary.version != WIRE_VERSION:
            raise DecisionError(
                f"summary version {summary.version}, expected {WIRE_VERSION}: use one leto-rmu on all ranks"
            )
        return summary

    @property
    def ahead(self) -> bool:
        """Between two updates: the state is that of the start of ``iteration``."""
        return self.phase in (Phase.ITERATION.name, Phase.COMPUTE.name, Phase.PROTECTED.name)

    @property
    def can_finish(self) -> bool:
        """The gradients of ``iteration`` are protected, and its update may be completed."""
        return self.phase in (Phase.PROTECTED.name, Phase.SYNCED.name, Phase.UPDATED.name)

    @property
    def synced(self) -> int:
        """Highest iteration that this rank has synchronized (or holds the result of)."""
        return self.iteration - 1 if self.ahead else self.iteration

    def action(self, decision: Decision) -> Action:
        """What a rank with this summary does under the decision; raise DecisionError if it cannot."""
        if decision.action in (Action.FRESH, Action.CHECKPOINT):
            return decision.action
        if self.phase is not None and self.epoch == decision.epoch:
            if self.ahead and self.iteration == decision.iteration:
                return Action.RESTART if decision.action is Action.RESTART else Action.NONE
            if (
                decision.action is Action.FINISH
                and self.iteration == decision.iteration - 1
                and self.can_finish
            ):
                return Action.FINISH
        raise DecisionError(
            f"decision {decision.action} to iteration {decision.iteration}, epoch {decision.epoch}, does not "
            f"fit a rank at {self.phase}({self.iteration}) of epoch {self.epoch}: made from other summaries?"
        )


class Decision(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The unanimous decision. ``iteration`` is the one that every rank computes next.

    ``step`` is the checkpoint to load (CHECKPOINT only). ``epoch`` is the source that all share afterwards.
    ``sync`` is the result of the iteration to finish, for ranks that had not recorded it yet. ``regrade``:
    all ranks compute the gradients of the iteration to finish again.
    """

    action: Action
    iteration: int
    epoch: int
    step: int | None = None
    sync: SyncResult | None = None
    regrade: bool = False
    reason: str = ""
    version: int = WIRE_VERSION

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @classmethod
    def decode(cls, raw: bytes) -> Decision:
        """Raise DecisionError when the bytes are no decision of this version."""
        if len(raw) > _BYTES_MAX:
            raise DecisionError(f"a decision of {len(raw)} bytes is more than {_BYTES_MAX}")
        try:
            decision = msgspec.msgpack.decode(raw, type=cls)
        except msgspec.DecodeError as error:
            raise DecisionError(f"not a decision: {error}") from error
        if decision.version != WIRE_VERSION:
            raise DecisionError(
                f"decision version {decision.version}, expected {WIRE_VERSION}: use one leto-rmu on all ranks"
            )
        return decision


def decide(summaries: Sequence[bytes]) -> bytes:
    """Decide for all ranks: an encoded `Decision`. Pure; the order of the summaries does not matter."""
    if not summaries:
        raise DecisionError("decide needs the summary of every rank, found none")
    return _decide([Summary.decode(raw) for raw in sorted(summaries)]).encode()


def _decide(ranks: Sequence[Summary]) -> Decision:
    blank = [s for s in ranks if s.phase is None]
    if blank:
        return _from_outside(ranks, _count(s.reason or "no state" for s in blank))
    epochs = {s.epoch for s in ranks}
    if len(epochs) > 1:
        return _from_outside(ranks, f"ranks hold state of different sources (epochs {sorted(epochs)})")
    epoch = epochs.pop()
    where = _count(f"{s.phase}({s.iteration})" for s in ranks)
    if all(s.ahead for s in ranks) and len({s.iteration for s in ranks}) == 1:
        no = [s.restart.reason for s in ranks if not s.restart.ok]
        if no:
            return _from_outside(ranks, f"cannot restart in place: {_count(no)}")
        iteration = ranks[0].iteration
        return Decision(Action.RESTART, iteration, epoch, reason=f"nobody began to update: {where}")

    target = max(s.synced for s in ranks)  # T
    no, regrade = [], False
    # Unanimity matters only where a rank has to use another's result.
    found = [s.sync for s in ranks if s.synced == target and s.sync is not None]
    agreed = len({_key(sync) for sync in found}) == 1
    sync = min(found, key=msgspec.msgpack.encode) if agreed else None
    for s in ranks:
        if s.synced == target:
            vote = s.restart if s.ahead else s.finish
        elif s.phase == Phase.PROTECTED.name and s.iteration == target:
            vote = s.finish
        elif s.iteration == target and s.ahead:
            return _from_outside(ranks, f"a rank began to update before all were protected: {where}")
        else:
            return _from_outside(ranks, f"ranks are two iterations apart: {where}")
        if not vote.ok:
            no.append(vote.reason)
        regrade |= vote.regrade
    if regrade and sync is not None and sync.found_inf:
        regrade = False  # nobody updates: gradients are of no use any more
    if regrade:
        if any(s.ahead and s.synced == target for s in ranks):
            return _from_outside(
                ranks, f"gradients of iteration {target} are lost, its parameters gone: {where}"
            )
        no += [s.regrade.reason for s in ranks if not s.regrade.ok]
    if no:
        return _from_outside(ranks, f"cannot finish iteration {target} in place: {_count(no)}")

    if not agreed and any(s.synced < target for s in ranks):
        return _from_outside(ranks, f"ranks disagree on the global synchronization of iteration {target}")
    how = " with gradients computed again" if regrade else ""
    reason = f"finish iteration {target}{how}: {where}"
    return Decision(Action.FINISH, target + 1, epoch, sync=sync, regrade=regrade, reason=reason)


def _from_outside(ranks: Sequence[Summary], reason: str) -> Decision:
    """All ranks load one source: the newest checkpoint that all can see, or none at all."""
    epoch = 1 + max(s.epoch for s in ranks)
    common = set(ranks[0].checkpoints).intersection(*(s.checkpoints for s in ranks))
    if common:
        step = max(common)
        return Decision(
            Action.CHECKPOINT, step, epoch, step=step, reason=f"{reason}; newest common checkpoint"
        )
    return Decision(Action.FRESH, 0, epoch, reason=f"{reason}; no checkpoint that every rank can see")


def _key(sync: SyncResult) -> bytes:
    """Bits that a resumed update depends on; the norm is only reported."""
    return msgspec.msgpack.encode((sync.clip, sync.inv_scale, sync.found_inf))


def _count(texts: Iterable[str]) -> str:
    counted = Counter(texts)
    return ", ".join(f"{n} x {text}" if n > 1 else text for text, n in sorted(counted.items()))
