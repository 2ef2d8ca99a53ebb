"""What must hold in a simulated run; `ViolationError` begins with the name of the invariant that does not.

The checks look at the simulated processes and memory, not at what coordinator and agents believe. I-4 and I-7
are checked after every event (`check_always`), I-3, I-5 and I-6 when a rank updates, hears a decision or goes
on from a state (`trainers`, `check_verified`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from leto_shadow.phases import Phase

if TYPE_CHECKING:
    from leto_shadow.simulation.cluster import Cluster
    from leto_shadow.simulation.memory import SimManager
    from leto_shadow.simulation.trainers import SimTrainer

__all__ = [
    "ViolationError",
    "check_always",
    "check_empty",
    "check_end",
    "check_exit",
    "check_verified",
]


class ViolationError(AssertionError):
    """An invariant is broken. The text begins with its name: ``I-3`` to ``I-7``, ``memory`` (section 6),
    ``levels`` (a promotion of ranks that do not form one world), ``protocol`` or ``liveness``."""


def check_always(cluster: Cluster) -> None:
    """I-4, with monotone generations, and I-7, after any event."""
    coordinator = cluster.hub.coordinator
    if coordinator.generation < cluster.highest_generation:
        raise ViolationError(
            f"I-4: the generation went back from {cluster.highest_generation} to {coordinator.generation}"
        )
    cluster.highest_generation = coordinator.generation
    oldest: dict[tuple[int, int], int] = {}
    for trainer in cluster.trainers.values():
        if trainer.alive and trainer.generation is not None and not cluster.written_off(trainer):
            attempt = trainer.home.attempt
            if attempt == cluster.torchrun.attempt and trainer.generation > coordinator.generation:
                raise ViolationError(
                    f"I-4: a trainer of generation {trainer.generation} is ahead of the coordinator"
                )
            oldest.setdefault((attempt, trainer.generation), trainer.sid)
    if len(oldest) > 1:
        raise ViolationError(
            f"I-4: promoted trainers of (attempt, generation) {sorted(oldest)} are alive at once"
        )
    if coordinator.phase is Phase.TRAINING and oldest and min(oldest)[1] != coordinator.generation:
        raise ViolationError(f"I-7: a trainer of generation {min(oldest)[1]} lives on after the recovery")
    if coordinator.phase is Phase.TRAINING:
        _check_memory(cluster)
        assert coordinator.world is not None
        allowed = {coordinator.active_world, coordinator.world.world}
        if not cluster.stores <= allowed:
            raise ViolationError(
                f"I-7: stores {sorted(cluster.stores)} are open, expected at most {sorted(allowed)}"
            )


def _check_memory(cluster: Cluster) -> None:
    """While training goes on, and once the coordinator knows of it, no shadow stands where its predecessor
    was in the way of this generation."""
    coordinator = cluster.hub.coordinator
    assert coordinator.preinit is not None
    assert coordinator.world is not None
    for rank, (when, level, newest) in cluster.reclaimed.items():
        known = coordinator.preinit.reclaims(rank) >= cluster.reclaims[when, rank]
        if when != coordinator.generation or not known:
            continue
        member = coordinator.world.members.get(rank)
        for name, trainer in cluster.trainers.items():
            later = trainer.alive and trainer.generation is None and trainer.rank == rank and name > newest
            current = member is not None and member.sid == trainer.sid
            if later and current and trainer.level >= level:
                raise ViolationError(f"memory: the shadow of rank {rank} is back at L{trainer.level}")


def check_verified(trainer: SimTrainer, manager: SimManager, iteration: int, source: str) -> None:
    """I-6: what this rank is about to train on was complete, looked at and found good."""
    cluster, who = trainer.cluster, f"rank {trainer.rank}"
    if source == "checkpoint":
        without = [rank for rank, done in cluster.checkpoints.items() if iteration not in done]
        if without:
            raise ViolationError(
                f"I-6: {who} loads checkpoint {iteration}, torn or missing on ranks {without}"
            )
    if source != "in-place":
        return
    if manager.iteration < 0:
        raise ViolationError(
            f"I-6: {who} goes on at {iteration} from the fresh memory of epoch {manager.epoch}"
        )
    if manager.lost and not manager.localized:
        raise ViolationError(f"I-6: {who} goes on from memory with lost pages that nobody has looked for")
    if manager.beyond:
        raise ViolationError(f"I-6: {who} goes on from memory that cannot be reconstructed")


def check_exit(cluster: Cluster, index: int, *, keeps_memory: bool) -> None:
    """I-7 when an agent ends in order: its trainers are gone, and its managers unless it keeps them."""
    for trainer in cluster.trainers.values():
        if trainer.alive and trainer.home.index == index:
            raise ViolationError(f"I-7: trainer {trainer.sid} of rank {trainer.rank} outlives its agent")
    for manager in cluster.managers:
        if manager.alive and manager.owner.index == index and not keeps_memory:
            raise ViolationError(f"I-7: the manager of rank {manager.rank} outlives its agent")


def check_empty(cluster: Cluster, index: int) -> None:
    """I-7 when a node that lost its ranks is a spare again: nothing of them is left on it."""
    for trainer in cluster.trainers.values():
        if trainer.alive and trainer.home.index == index:
            raise ViolationError(f"I-7: trainer {trainer.sid} of rank {trainer.rank} is left on a spare")
    for manager in cluster.managers:
        if manager.alive and manager.owner.index == index:
            raise ViolationError(f"I-7: the manager of rank {manager.rank} is left on a spare")


def check_end(cluster: Cluster) -> None:
    """I-7 at the end: no process of a node whose agent ended in order is left; the model is complete."""
    for trainer in cluster.trainers.values():
        if trainer.alive:
            raise ViolationError(f"I-7: trainer {trainer.sid} of rank {trainer.rank} outlives the job")
    for manager in cluster.managers:
        if manager.alive:
            raise ViolationError(f"I-7: the manager of rank {manager.rank} outlives the job")
