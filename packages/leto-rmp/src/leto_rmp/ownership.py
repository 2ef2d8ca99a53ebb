"""For whom a manager lives: its owner, whom it outlives for a grace period, and its guardian (I-7).

The owner is the agent that started the manager. When it dies, the manager stays for `grace_s`, so that
the owner's successor can take it over with the memory in it (`take`). The guardian, if there is one, is
the process that would start a successor (torchrun): when it is gone there will be none, and the manager
ends at once. Pure but for the question whether a process has ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from leto_rmp.errors import OwnerAlive

__all__ = ["Ownership", "Party"]


@dataclass(frozen=True)
class Party:
    """A process that the manager watches; whoever replaces the record closes `pidfd`."""

    pid: int
    pidfd: int


class Ownership:
    """Decides when the manager has to end."""

    def __init__(
        self, owner: Party, guardian: Party | None, grace_s: float, gone: Callable[[int], bool]
    ) -> None:
        self.owner = owner
        self.guardian = guardian
        self.grace_s = grace_s
        self.stop_at_s: float | None = None
        self._gone = gone

    def owner_died(self, now_s: float) -> None:
        """The grace period begins."""
        self.stop_at_s = now_s + self.grace_s

    def guardian_died(self, now_s: float) -> None:
        """Nobody will take over."""
        self.stop_at_s = now_s

    def take(self, party: Party, grace_s: float) -> Party | None:
        """Make `party` the owner; return the record that it replaces, None if it was the owner already.

        Raises OwnerAlive while the present owner lives: two agents must never believe to own one memory.
        """
        if party.pid == self.owner.pid and not self._gone(self.owner.pidfd):
            self.grace_s = grace_s
            return None
        if not self._gone(self.owner.pidfd):
            raise OwnerAlive(
                f"process {self.owner.pid} owns this manager and lives: process {party.pid} can take it over "
                "only after its end",
                pid=self.owner.pid,
            )
        previous, self.owner = self.owner, party
        self.grace_s = grace_s
        self.stop_at_s = None
        return previous
