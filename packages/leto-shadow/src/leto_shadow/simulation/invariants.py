"""What must hold after every event of a simulated run; `ViolationError` names the invariant that does not.

The checks look at the simulated processes and memory, not at what coordinator and agents believe.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from leto_shadow.phases import Phase

if TYPE_CHECKING:
    from leto_shadow.simulation.cluster import Cluster

__all__ = ["ViolationError", "check_always", "check_end"]


class ViolationError(AssertionError):
    """An invariant is broken."""


def check_always(cluster: Cluster) -> None:
    """I-4, I-5, I-7 and monotone generations, after any event."""
    coordinator = cluster.hub.coordinator
    if coordinator.generation < cluster.highest_generation:
        raise ViolationError(
            f"generation went back from {cluster.highest_generation} to {coordinator.generation}"
        )
    cluster.highest_generation = coordinator.generation
    oldest: dict[int, int] = {}
    for trainer in cluster.trainers.values():
        if trainer.alive and trainer.generation is not None:
            if trainer.generation > coordinator.generation:
                raise ViolationError(f"trainer of generation {trainer.generation} ahead of the coordinator")
            oldest.setdefault(trainer.generation, trainer.sid)
    if len(oldest) > 1:
        raise ViolationError(f"I-4: promoted trainers of generations {sorted(oldest)} are alive at once")
    if coordinator.phase is Phase.TRAINING and oldest and min(oldest) != coordinator.generation:
        raise ViolationError(f"I-7: a trainer of generation {min(oldest)} lives on after the recovery")
    if coordinator.phase is Phase.TRAINING:
        assert coordinator.world is not None
        allowed = {coordinator.active_world, coordinator.world.world}
        if not cluster.stores <= allowed:
            raise ViolationError(
                f"I-7: stores {sorted(cluster.stores)} are open, expected at most {sorted(allowed)}"
            )


def check_end(cluster: Cluster) -> None:
    """I-7 at the end: no process of a node whose agent ended in order is left; the model is complete."""
    for trainer in cluster.trainers.values():
        if trainer.alive:
            raise ViolationError(f"I-7: trainer {trainer.sid} of rank {trainer.rank} outlives the job")
    for manager in cluster.managers.values():
        if manager.alive:
            raise ViolationError(f"I-7: the manager of rank {manager.rank} outlives the job")
