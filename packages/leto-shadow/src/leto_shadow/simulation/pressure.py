"""Allocations that are about to fail in simulated trainers: what the allocator hook asks, and is answered."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leto_shadow.oom_protocol import Ask, Report
from leto_shadow.simulation.invariants import ViolationError
from leto_shadow.simulation.node import SimNode
from leto_shadow.simulation.trainers import SimTrainer

if TYPE_CHECKING:
    from leto_shadow.simulation.cluster import Cluster

__all__ = ["MemoryPressure"]


class MemoryPressure:
    """Every request is answered, and only when the shadows that held memory are gone."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._asks: dict[int, list[SimTrainer]] = {}
        self._asked = 0

    def asks(self, trainer: SimTrainer) -> None:
        """An allocation is about to fail. (That the trainer is blocked meanwhile is not modelled.)"""
        node = trainer.home
        if not node.alive or trainer.sid not in node.agent.trainers:
            return
        self._asked += 1
        key = self._asked
        here = [one for one in self.cluster.trainers.values() if one.home is node and one is not trainer]
        others = [one for one in here if one.rank == trainer.rank]
        self._asks[key] = [one for one in others if one.alive and one.generation is None and one.level >= 2]
        for shadow in self._asks[key]:
            assert trainer.generation is not None
            asked = node.agent.trainers[shadow.sid].asked  # it may have been on its way there
            self.cluster.reclaims[trainer.generation, trainer.rank] += 1
            self.cluster.reclaimed[trainer.rank] = (trainer.generation, asked, max(self.cluster.trainers))

        def overdue() -> None:
            if key in self._asks and trainer.alive and node.alive and node.agent.ending is None:
                raise ViolationError(f"liveness: trainer {trainer.sid} waits for memory and gets no answer")

        self.cluster.clock.after(6.0, overdue)  # a slow death takes five
        ask = Ask(self._asked, 0, 1 << 30, 0, 80 << 30)
        node.carry(node.agent.hook_asks(trainer.sid, ask, self.cluster.clock.now))

    def answered(self, node: SimNode, sid: int, sequence: int) -> None:
        for shadow in self._asks.pop(sequence):
            if shadow.alive:
                raise ViolationError(
                    f"memory: trainer {sid} is told that shadow {shadow.sid} is gone; it lives"
                )
        free = self.cluster.rng.choice([0, 1 << 30, 8 << 30])
        report = Report(sequence, 0, 1 << 30, free, 80 << 30, 2 << 30, 0.1, True)

        def reported() -> None:
            if node.alive and self.cluster.trainers[node.key(sid)].alive:
                node.carry(node.agent.hook_reports(sid, report, self.cluster.clock.now))

        self.cluster.clock.after(self.cluster.rng.uniform(0, 0.05), reported)
