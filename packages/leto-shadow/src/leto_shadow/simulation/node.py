"""A simulated node: a real agent core and its end of the link, ticking in simulated time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from leto_shadow import agent_actions as todo
from leto_shadow import messages as m
from leto_shadow.agent_core import AgentCore
from leto_shadow.link import Link, decode_frame, encode_frame

if TYPE_CHECKING:
    from leto_shadow.simulation.cluster import Cluster

__all__ = ["BEAT_S", "TICK_S", "SimNode"]

TICK_S = 0.25
BEAT_S = 1.0


class SimNode:
    """One agent with its link; another attempt of the same node has another one."""

    def __init__(self, cluster: Cluster, index: int, attempt: int = 0) -> None:
        self.cluster = cluster
        self.index = index
        self.attempt = attempt
        self.alive = True
        self.exit: todo.Exit | None = None
        plan = cluster.plan
        self.agent = AgentCore(
            index,
            plan.local_ranks,
            f"node{index}",
            plan.policy.deadlines,
            (),
            cluster.clock.now,
            succession=plan.restarts > 0,
            coordinates=index == 0,
        )
        self.link = Link(f"session-{index}-{attempt}", retry_s=0.6)
        self.next_beat = 0.0

    def key(self, sid: int) -> tuple[int, int]:
        """Name of a trainer in the whole run: agents name those of spares, by negative numbers."""
        return self.attempt, sid if sid > 0 else sid * 1000 - self.index

    def carry(self, actions: Sequence[todo.AgentAction]) -> None:
        for action in actions:
            self.cluster.carry_agent(self, action)

    def tick(self) -> None:
        if not self.alive:
            return
        now = self.cluster.clock.now
        for trainer in self.cluster.trainers.values():
            if trainer.alive and trainer.home is self:
                self.agent.progress(
                    trainer.sid,
                    phase=int(trainer.phase),
                    waiting=trainer.phase.waiting,
                    iteration=trainer.iteration,
                    counter=trainer.counter,
                    changed_s=trainer.changed_s,
                )
        self.carry(self.agent.tick(now))
        for frame in self.link.poll(now):
            self.cluster.to_hub(self, encode_frame(frame))
        if now >= self.next_beat and not self.agent.done:
            self.next_beat = now + BEAT_S
            beat = m.encode(self.agent.beat(now))
            self.cluster.to_hub(self, encode_frame(self.link.bare(beat)))
        self.cluster.clock.after(TICK_S, self.tick)

    def receive(self, data: bytes) -> None:
        if self.alive:
            for payload in self.link.receive(decode_frame(data)):
                self.carry(self.agent.receive(m.decode_to_agent(payload), self.cluster.clock.now))
