"""The agent's part of a reclaim: end the shadow that stands in the way, answer when it is gone (paper
section 6).

Pure, a part of `leto_shadow.agent_core`. An active trainer is blocked inside an allocation while its answer
is awaited, so nothing here waits for the coordinator: the shadow is killed at once, and the coordinator
hears of it afterwards, when it decides on the next one (`leto_shadow.preinit`).

A request is answered when every process that can hold memory of the rank's device beside the active trainer
is proven gone, or at once if there is none. Requests of shadows get no help: no shadow may take memory from
training.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from leto_shadow.preinit import NO_GPU_LEVEL
from leto_shadow.trainer_states import TrainerRecord

__all__ = ["ReclaimDesk", "holds_memory"]


def holds_memory(trainer: TrainerRecord) -> bool:
    """Whether a process that was never promoted may hold GPU memory: it was asked to go above L1."""
    return trainer.generation is None and trainer.asked > NO_GPU_LEVEL


@dataclass(frozen=True)
class _Pending:
    asker: int
    sequence: int
    awaited: frozenset[int]


class ReclaimDesk:
    """Requests that wait for the end of a shadow, by the sid of their trainer and their sequence number."""

    def __init__(self) -> None:
        self._pending: list[_Pending] = []

    def ask(
        self, asker: TrainerRecord, sequence: int, trainers: Iterable[TrainerRecord]
    ) -> list[TrainerRecord]:
        """Take a request; return the shadows that must go. If none, the answer is `Verdict.NONE`, now."""
        if asker.generation is None:
            return []
        holders = [one for one in trainers if one.rank == asker.rank and holds_memory(one)]
        if holders:
            self._pending.append(_Pending(asker.sid, sequence, frozenset(one.sid for one in holders)))
        return holders

    def gone(self, sid: int) -> list[tuple[int, int]]:
        """A process and its tree are gone; return (asker, sequence) of the requests that can be answered."""
        answered, left = [], []
        for one in self._pending:
            if one.asker == sid:
                continue  # the one who asked has died itself
            rest = one.awaited - {sid}
            if rest:
                left.append(_Pending(one.asker, one.sequence, rest))
            else:
                answered.append((one.asker, one.sequence))
        self._pending = left
        return answered

    def is_waiting(self, sid: int) -> bool:
        """Whether trainer ``sid`` is blocked in an allocation that waits for an answer."""
        return any(one.asker == sid for one in self._pending)
