"""Trainers of a spare node: started ahead, without a rank, so that a swap begins from warm processes.

Second layer of `leto_shadow.agent_core`. The coordinator knows nothing of them: when it asks the node for
the shadow of a rank, and one of them waits for that place, it gets the rank instead of a new process being
started. What a trainer may do without a rank, its script says (`leto_shadow.Trainer.spare_level`).
"""

from __future__ import annotations

from leto_shadow import messages as m
from leto_shadow import wire
from leto_shadow.agent_actions import RenameTrainer, SpawnTrainer
from leto_shadow.agent_state import AgentState
from leto_shadow.trainer_states import TrainerRecord, TrainerState

__all__ = ["AgentSpares"]

_TRIES = 3  # of one place, without one that came to wait in between; then it is left to be started cold
_PAUSE_S = 1.0
_HIGHEST = 2
"""L3 belongs to a world, and a spare to none."""


class AgentSpares(AgentState):
    """Start them, replace them, and give them ranks."""

    def _warm_up(self) -> None:
        """Start a trainer for every place that has none and may have one now."""
        if not self._is_spare or self.ending is not None or self.shadow_level == 0 or self._cold_spares:
            return
        taken = {trainer.rank for trainer in self.trainers.values()}
        for rank in range(-self.local_ranks, 0):
            tries, not_before = self._spare_failures.get(rank, (0, self._now))
            if rank in taken or tries >= _TRIES or self._now < not_before:
                continue
            self._last_spare_sid -= 1
            sid = self._last_spare_sid
            self.trainers[sid] = TrainerRecord(sid, rank, 0, from_spare=True)
            self._out.append(SpawnTrainer(sid, rank))

    def _spare_says(self, trainer: TrainerRecord, message: wire.Hello | wire.LevelReached) -> None:
        match message:
            case wire.Hello():
                trainer.asked = min(self.shadow_level, _HIGHEST)
                self._tell_trainer(trainer, wire.Advance(trainer.asked, 0))
            case wire.LevelReached(level=level):
                trainer.level = level
                self._spare_failures.pop(trainer.rank, None)
                self._note("spare_level", place=-1 - trainer.rank, level=level)

    def _spare_gone(self, trainer: TrainerRecord, detail: str) -> None:
        if trainer.discarded or self.ending is not None or not self._is_spare:
            return
        tries, _ = self._spare_failures.get(trainer.rank, (0, 0.0))
        self._spare_failures[trainer.rank] = tries + 1, self._now + _PAUSE_S * 2.0**tries
        self._note("spare_failed", place=-1 - trainer.rank, failures=tries + 1, detail=detail)

    def _spawn(self, message: m.SpawnShadow) -> None:
        """Start the shadow of a rank; or take the one that waits for its place."""
        rank, sid = message.rank, message.sid
        place = self.ranks.start - rank - 1
        waiting = (TrainerState.STARTING, TrainerState.SHADOW)
        warm = next((t for t in self.trainers.values() if t.rank == place and t.state in waiting), None)
        if warm is None:
            self.trainers[sid] = TrainerRecord(sid, rank, message.world)
            self._out.append(SpawnTrainer(sid, rank))
            return
        old = warm.sid
        del self.trainers[old]
        self.trainers[sid] = warm
        warm.sid, warm.rank, warm.world = sid, rank, message.world
        warm.asked = warm.level = 0  # what it has done ahead it says when it is asked for
        self._note("spare_trainer_taken", rank=rank, pid=warm.pid)
        self._out.append(RenameTrainer(old, sid, rank))
