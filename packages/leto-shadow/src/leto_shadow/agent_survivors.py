"""Survivors of a failure, on one node: asked to retire, checked, handed on as shadows (paper section 3.4).

Fourth layer of `leto_shadow.agent_core`. A trainer that is not to blame keeps its process: it gives up
writing under a deadline and becomes a shadow again. Upheld here: I-4. A survivor counts as fenced when it has
said that it cannot write any more *and* the shell has seen that the kernel agrees; one that is late, wrong or
dead is killed, and counts when it is gone.
"""

from __future__ import annotations

from leto_shadow import messages as m
from leto_shadow import wire
from leto_shadow.agent_actions import AgentAction, CheckReleased
from leto_shadow.agent_memory import AgentMemory
from leto_shadow.preinit import NO_GPU_LEVEL
from leto_shadow.trainer_states import ACTIVE, TrainerRecord, TrainerState

__all__ = ["AgentSurvivors"]


class AgentSurvivors(AgentMemory):
    """From `messages.Fence` until the survivor is a shadow."""

    def _end_older(self, fence: m.Fence) -> None:
        """Ask survivors to retire, and kill all others of an older generation."""
        for trainer in self._older():
            if trainer.state is TrainerState.RETIRING and fence.retire:
                continue  # asked already, and its deadline stands
            if self._may_retire(trainer, fence):
                self._ask_to_retire(trainer, fence.retire_s)
            else:
                self._kill(trainer)

    def _may_retire(self, trainer: TrainerRecord, fence: m.Fence) -> bool:
        able = trainer.retires and trainer.state in ACTIVE | {TrainerState.LOST}
        healthy = trainer.fired_at is None and trainer.hung_up_at is None and not trainer.error
        return able and healthy and trainer.facts is None and trainer.rank in fence.retire

    def _ask_to_retire(self, trainer: TrainerRecord, within_s: float) -> None:
        assert trainer.generation is not None
        trainer.state = TrainerState.RETIRING
        trainer.asked_at, trainer.kill_at = self._now, self._now + within_s
        self._tell_trainer(trainer, wire.Retire(trainer.generation))

    @property
    def awaits_survivors(self) -> bool:
        """Whether a survivor's answer holds up the fence: its deadline is short."""
        return any(trainer.state is TrainerState.RETIRING for trainer in self.trainers.values())

    def _peer_lost(self, trainer: TrainerRecord, error: str) -> None:
        """It is no culprit, but the first to know that there is one; the fence comes, or its own end."""
        trainer.state = TrainerState.LOST
        trainer.secondary = trainer.told = True
        trainer.kill_at = self._now + self._deadlines.exit_s
        assert trainer.generation is not None
        self._active_failed(trainer.rank, trainer.generation, f"train: {error}", trainer)

    def released(self, sid: int, error: str | None, now: float) -> list[AgentAction]:
        """The shell looked whether trainer ``sid`` can write retained memory still; ``error``: it can, or
        nobody can tell."""
        self._now = now
        trainer = self.trainers.get(sid)
        if trainer is None or trainer.state is not TrainerState.RETIRING:
            return self._flush()  # it was killed meanwhile
        if error is not None:
            trainer.secondary = True
            self._give_up_survivor(trainer, f"it has not given up writing: {error}")
            return self._flush()
        gave_up_s = now - trainer.asked_at
        # Nothing of its last life may be taken for this one's: not an error, not a level, not a measurement.
        self.trainers[sid] = TrainerRecord(
            sid,
            trainer.rank,
            world=0,
            state=TrainerState.RELEASED,
            asked=NO_GPU_LEVEL + 1,
            pid=trainer.pid,
            retires=True,
            asked_at=trainer.asked_at,
            gave_up_s=gave_up_s,
            survived=trainer.generation,
            kill_at=now + self._deadlines.demote_s,
        )
        self._maybe_fenced()
        return self._flush()

    def _check_released(self, trainer: TrainerRecord) -> None:
        self._out.append(CheckReleased(trainer.sid))

    def _shadow_again(self, trainer: TrainerRecord, level: int) -> None:
        """It is a shadow again."""
        trainer.state, trainer.level, trainer.kill_at = TrainerState.SHADOW, level, None
        self._note(
            "survived",
            rank=trainer.rank,
            generation=trainer.survived,
            pid=trainer.pid,
            level=level,
            gave_up_s=trainer.gave_up_s,
            seconds=self._now - trainer.asked_at,
        )
        if trainer.announced:
            self._tell(m.SurvivorAt(trainer.rank, trainer.sid, level))

    def _give_up_survivor(self, trainer: TrainerRecord, detail: str) -> None:
        """The survivor is not reused: it ends, and a new process takes its place."""
        self._note_survivor_lost(trainer, detail)
        trainer.error = trainer.error or detail
        self._kill(trainer, failed=True)

    def _note_survivor_lost(self, trainer: TrainerRecord, detail: str) -> None:
        generation = trainer.survived if trainer.generation is None else trainer.generation
        self._note("survivor_lost", rank=trainer.rank, generation=generation, pid=trainer.pid, detail=detail)

    def _overdue(self, trainer: TrainerRecord) -> bool:
        """Give a survivor up whose deadline has passed; False if it is none."""
        if trainer.state is TrainerState.RETIRING:
            what = "given up writing"
        elif trainer.state is TrainerState.RELEASED:
            what = "become a shadow"
        else:
            return False
        trainer.secondary = True  # killed by us: no sign of a memory error (`leto_shadow.localization`)
        self._give_up_survivor(trainer, f"it has not {what} within {self._now - trainer.asked_at:.2f} s")
        return True

    def _survivors(self) -> tuple[m.Survivor, ...]:
        """Those that are in no world; the coordinator may have missed an earlier fence, and hears of all."""
        found = []
        for trainer in self._alive():
            if trainer.reserved and trainer.state in (TrainerState.RELEASED, TrainerState.SHADOW):
                trainer.announced = True
                found.append(m.Survivor(trainer.rank, trainer.sid, trainer.level))
        return tuple(found)
