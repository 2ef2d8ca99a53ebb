"""The lives of simulated state managers: started, fenced, left alone by a dead agent, ended."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from leto_shadow.simulation.invariants import ViolationError
from leto_shadow.simulation.memory import SimManager
from leto_shadow.simulation.node import SimNode

if TYPE_CHECKING:
    from leto_shadow.simulation.cluster import Cluster

__all__ = ["Managing"]


class Managing:
    """What happens to `Cluster.managers`."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster

    def up(self, node: SimNode, rank: int, epoch: int) -> None:
        if not node.alive:
            return
        if any(
            one.alive and one.rank == rank and one.owner.index == node.index for one in self.cluster.managers
        ):
            raise ViolationError(f"I-7: rank {rank} has two managers")
        self.cluster.managers.append(SimManager(rank, epoch, node))
        node.carry(node.agent.manager_up(rank, epoch, f"manager-{rank}-{epoch}", self.cluster.clock.now))

    def dies(self, node: SimNode, rank: int, epoch: int) -> None:
        for one in self.cluster.managers:
            if one.owner is node and (one.rank, one.epoch) == (rank, epoch):
                self.ends(one)

    def ends(self, manager: SimManager) -> None:
        if not manager.alive:
            return
        manager.alive = False
        rank, epoch, node = manager.rank, manager.epoch, manager.owner
        self.cluster.trace(f"manager of rank {rank}, epoch {epoch}, dies")

        def gone() -> None:
            if node.alive and node.exit is None:
                node.carry(node.agent.manager_gone(rank, epoch, "killed", self.cluster.clock.now))

        self.cluster.clock.after(self.cluster.rng.uniform(0.002, 0.05), gone)

    def fence(self, node: SimNode, rank: int, epoch: int, generation: int) -> None:
        """The manager proves by its pidfd that the writer before is gone (I-4)."""
        until = self.cluster.clock.now + 10.0
        manager = next((one for one in self.cluster.managers if one.owner is node and one.rank == rank), None)

        def look() -> None:
            if not node.alive:
                return
            error = None
            if manager is None or not manager.alive:
                error = "it is gone"
            elif not manager.fenced(generation):
                if self.cluster.clock.now < until:
                    self.cluster.clock.after(0.05, look)
                    return
                error = "its writer does not end"
            node.carry(node.agent.manager_fenced(rank, epoch, error, self.cluster.clock.now))

        self.cluster.clock.after(self.cluster.rng.uniform(0, 0.1), look)

    def orphan(self, node: SimNode) -> None:
        """The grace period of the node's managers begins."""
        grace_s = self.cluster.plan.policy.deadlines.grace_s if self.cluster.plan.restarts else 0.0
        for manager in self.cluster.managers:
            if manager.owner is node and manager.alive:
                self.cluster.clock.after(grace_s, partial(self._grace_over, manager, node))

    def _grace_over(self, manager: SimManager, owner: SimNode) -> None:
        if manager.owner is owner:
            self.ends(manager)
