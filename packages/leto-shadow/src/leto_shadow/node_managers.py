"""The state managers of one node as its agent sees them: which are up, of which epoch, and what to do next.

    NONE -> STARTING -> UP -> STOPPING -> GONE -> STARTING (of the next epoch)
    UP: started, or held: found alive when this agent was started in the place of a dead one

Part of `leto_shadow.agent_core`; returns actions for the shell, does nothing itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from leto_shadow.agent_actions import AgentAction, KillManager, StartManager

__all__ = ["ManagerRecord", "ManagerStatus", "NodeManagers"]


class ManagerStatus(Enum):
    NONE = "none"
    STARTING = "starting"
    UP = "up"
    STOPPING = "stopping"
    GONE = "gone"


@dataclass
class ManagerRecord:
    status: ManagerStatus = ManagerStatus.NONE
    epoch: int = 0
    socket: str = ""


class NodeManagers(dict[int, ManagerRecord]):
    """Records by rank."""

    def hold(self, rank: int, epoch: int, socket: str) -> None:
        """A manager of a dead agent was found and is ours now."""
        self[rank] = ManagerRecord(ManagerStatus.UP, epoch, socket)

    def settle(self, ranks: Iterable[int]) -> list[AgentAction]:
        """These are the ranks of the node; managers of others, found here, are ended."""
        mine = set(ranks)
        out: list[AgentAction] = []
        for rank, manager in self.items():
            if rank not in mine:
                out += self._stop(rank, manager)
        for rank in sorted(mine - set(self)):
            self[rank] = ManagerRecord()
        return out

    def all_up(self, epoch: int, ranks: range) -> bool:
        """True when the manager of each rank is up and of this epoch."""
        return all(self[rank].status is ManagerStatus.UP and self[rank].epoch == epoch for rank in ranks)

    def start(self, rank: int, epoch: int) -> list[AgentAction]:
        """Start a fresh manager of ``epoch``; its predecessor is gone."""
        manager = self[rank]
        manager.status, manager.epoch = ManagerStatus.STARTING, epoch
        return [StartManager(rank, epoch)]

    def replace(self, epoch: int, ranks: range) -> list[AgentAction]:
        """Start those that are gone, end the others first (`gone` goes on from there)."""
        out: list[AgentAction] = []
        for rank in ranks:
            manager = self[rank]
            if manager.status in (ManagerStatus.NONE, ManagerStatus.GONE):
                out += self.start(rank, epoch)
            else:
                out += self._stop(rank, manager)
        return out

    def stop_up(self) -> list[AgentAction]:
        """End those that are up."""
        return [
            action
            for rank, manager in self.items()
            if manager.status is ManagerStatus.UP
            for action in self._stop(rank, manager)
        ]

    def settled(self, *, keep: bool) -> bool:
        """True when none is left, or, with ``keep``, none but those that are up."""
        over = {ManagerStatus.NONE, ManagerStatus.GONE} | ({ManagerStatus.UP} if keep else set())
        return all(one.status in over for one in self.values())

    def _stop(self, rank: int, manager: ManagerRecord) -> list[AgentAction]:
        if manager.status in (ManagerStatus.STOPPING, ManagerStatus.GONE):
            return []
        manager.status = ManagerStatus.STOPPING
        return [KillManager(rank, manager.epoch)]
