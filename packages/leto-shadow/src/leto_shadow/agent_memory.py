"""Device memory on one node: what the allocator hook asks, what the coordinator hears (paper section 6).

Third layer of `leto_shadow.agent_core`.
"""

from __future__ import annotations

from leto_shadow import messages as m
from leto_shadow import wire
from leto_shadow.agent_actions import (
    AgentAction,
    AnswerHook,
)
from leto_shadow.agent_spares import AgentSpares
from leto_shadow.oom_protocol import Ask, Report, Verdict
from leto_shadow.reclaim import holds_memory
from leto_shadow.trainer_states import TrainerRecord, TrainerState

__all__ = ["AgentMemory"]

_TELL_BYTES = 32 << 20  # memory that the coordinator needs to hear of


class AgentMemory(AgentSpares):
    """Events of the allocator hook, and measurements."""

    def hook_asks(self, sid: int, ask: Ask, now: float) -> list[AgentAction]:
        """An allocation in trainer ``sid`` is about to fail; it is blocked until `AnswerHook`."""
        self._now = now
        trainer = self.trainers.get(sid)
        if trainer is None:
            return self._flush()
        holders = self._reclaims.ask(trainer, ask.sequence, self._alive())
        if not holders:
            self._out.append(AnswerHook(sid, ask.sequence, Verdict.NONE))
        for shadow in holders:
            if shadow.state in (TrainerState.STARTING, TrainerState.SHADOW, TrainerState.RELEASED):
                shadow.reclaimed, shadow.taken_by = True, self.generation
                trainer.took = (shadow.asked, shadow.level == shadow.asked)
                self._kill(shadow)
            elif shadow.state is TrainerState.FAILED:
                self._kill(shadow, failed=True)  # it is on its way out, but too slowly now
        return self._flush()

    def hook_reports(self, sid: int, report: Report, now: float) -> list[AgentAction]:
        """The allocation in trainer ``sid`` has its result."""
        self._now = now
        trainer = self.trainers.get(sid)
        if trainer is None or trainer.generation is None:
            return self._flush()
        level, whole = trainer.took or (0, False)
        trainer.took, trainer.told_memory = None, {}
        numbers = {
            "request_bytes": report.size_bytes,
            "free_bytes": report.free_bytes,
            "total_bytes": report.total_bytes,
        }
        where = {"rank": trainer.rank, "generation": trainer.generation, "iteration": trainer.iteration}
        if level:
            self._note(
                "reclaimed",
                **where,
                level=level,
                bytes=report.freed_bytes,
                **numbers,
                waited_s=report.waited_s,
                satisfied=report.satisfied,
            )
            self._tell(
                m.Reclaimed(
                    trainer.rank,
                    trainer.generation,
                    level,
                    whole,
                    report.size_bytes,
                    report.freed_bytes,
                    report.free_bytes,
                    report.total_bytes,
                    report.waited_s,
                    report.satisfied,
                )
            )
        if not report.satisfied:
            self._note("out_of_memory", **where, **numbers)
        return self._flush()

    def footprint(self, sid: int, level: int, held_bytes: int, now: float) -> list[AgentAction]:
        """The shell measured what trainer ``sid`` holds of its device after it had reached ``level``; 0: it
        cannot be said. What the trainer has parked there is passed on with it."""
        self._now = now
        trainer = self.trainers.get(sid)
        if trainer is not None and trainer.generation is None:
            self._tell(m.FootprintOf(trainer.rank, level, held_bytes, trainer.parked_bytes))
        return self._flush()

    def _memory(self, trainer: TrainerRecord, seen: wire.Memory) -> None:
        """Pass on what tells the controller something new: the first and every lower number at one level."""
        if any(one.reserved for one in self._alive() if one.rank == trainer.rank):
            return  # what a survivor holds beside the next shadow belongs to no level
        shadow = next((t for t in self._alive() if t.rank == trainer.rank and t.generation is None), None)
        held = 0
        if shadow is not None and holds_memory(shadow):
            if shadow.level != shadow.asked or shadow.state is not TrainerState.SHADOW:
                return  # it is on its way, and nobody knows what it holds now
            held = shadow.level
        told = trainer.told_memory.get(held)
        if (
            told is not None
            and seen.free_bytes > told[0] - _TELL_BYTES
            and (seen.free_bytes + seen.spare_bytes > told[1] - _TELL_BYTES)
        ):
            return
        low = told or (seen.free_bytes, seen.free_bytes + seen.spare_bytes)
        trainer.told_memory[held] = (
            min(low[0], seen.free_bytes),
            min(low[1], seen.free_bytes + seen.spare_bytes),
        )
        assert trainer.generation is not None
        self._tell(
            m.MemoryOf(
                trainer.rank,
                trainer.generation,
                seen.free_bytes,
                seen.total_bytes,
                seen.spare_bytes,
                held,
            )
        )
