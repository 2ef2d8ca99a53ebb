"""A simulated state manager: the memory of one rank in one epoch, and what its writers left of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from leto_shadow.simulation.invariants import ViolationError

if TYPE_CHECKING:
    from leto_shadow.simulation.node import SimNode
    from leto_shadow.simulation.trainers import SimTrainer

__all__ = ["SimManager"]


@dataclass
class SimManager:
    """Retained memory of one rank in one epoch."""

    rank: int
    epoch: int
    owner: SimNode
    alive: bool = True
    iteration: int = -1
    protected: bool = False
    synced: bool = False
    true_gradients: bool = True
    """The protected gradients are what the reduction of all ranks gives, and not what a broken one left."""
    writer: SimTrainer | None = None
    newest: int = -1
    lost: bool = False
    """Pages are lost and not yet reconstructed."""
    localized: bool = False
    """The manager knows which."""
    beyond: bool = False
    """They are more than the code tolerates."""

    def lose(self, *, beyond: bool) -> None:
        """Pages are gone with their writer; nobody has looked yet."""
        self.lost, self.localized, self.beyond = True, False, self.beyond or beyond

    def fenced(self, generation: int) -> bool:
        """Refuse older generations from now on; True when no older writer is left."""
        self.newest = max(self.newest, generation - 1)
        return self.writer is None or not self.writer.alive

    def release(self, trainer: SimTrainer) -> None:
        """The trainer cannot write any more, if it was the writer."""
        if self.writer is trainer:
            self.writer = None

    def become_writer(self, trainer: SimTrainer) -> None:
        """I-4: the writer before is dead, and the generation newer."""
        assert trainer.generation is not None
        if self.writer is not None and self.writer.alive:
            raise ViolationError(
                f"I-4: rank {self.rank} has two writers, {self.writer.sid} and {trainer.sid}"
            )
        if trainer.generation <= self.newest:
            raise ViolationError(
                f"I-4: generation {trainer.generation} after {self.newest} on rank {self.rank}"
            )
        self.writer, self.newest = trainer, trainer.generation
