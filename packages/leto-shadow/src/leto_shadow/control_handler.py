"""Answers to the requests of `leto_shadow.control`: a snapshot of this node, and failures on demand."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from leto_shadow.agent_actions import KillManager
from leto_shadow.agent_shell import ASK_S, AgentShell
from leto_shadow.control import Inject, Reply, Request, RunSchedule, StatusReply, StatusRequest
from leto_shadow.coordinator_shell import CoordinatorShell
from leto_shadow.drills import Lose
from leto_shadow.reactor import Reactor

__all__ = ["ControlHandler"]


class ControlHandler:
    """Callable from request to reply; runs in the agent's event loop."""

    def __init__(
        self, shell: AgentShell, coordinator: CoordinatorShell | None, job_id: str, reactor: Reactor
    ) -> None:
        self._shell = shell
        self._coordinator = coordinator
        self._job_id = job_id
        self._reactor = reactor
        self.metrics_url = ""
        """Where this agent answers Prometheus, if it does."""
        self.run_schedule: Callable[[bytes], Reply] = lambda _text: Reply(False, "no schedule can run here")

    def __call__(self, request: Request) -> StatusReply | Reply:
        match request:
            case StatusRequest():
                return StatusReply(self._status())
            case RunSchedule(text=text):
                return self.run_schedule(text)
            case Inject():
                return self.inject(request)

    def _status(self) -> dict[str, Any]:
        agent = self._shell.agent
        return {
            "job_id": self._job_id,
            "node": agent.node,
            "pid": os.getpid(),
            "generation": agent.generation,
            "epoch": agent.epoch,
            "ranks": list(agent.ranks),
            "trainers": self._shell.snapshot(),
            "managers": [
                {
                    "rank": rank,
                    "status": manager.status.value,
                    "epoch": manager.epoch,
                    "socket": manager.socket,
                }
                for rank, manager in sorted(agent.managers.items())
            ],
            "stale": dict(agent.stale),
            "metrics_url": self.metrics_url,
            "job": None if self._coordinator is None else self._coordinator.snapshot(),
        }

    def inject(self, request: Inject, patience_s: float = ASK_S) -> Reply:
        """Make a local rank fail now, if it can. ``patience_s``: for a manager's answer, if one is asked."""
        agent, now, rank = self._shell.agent, self._reactor.now, request.rank
        if rank not in agent.ranks:
            here = f"{agent.ranks.start} to {agent.ranks.stop - 1}" if agent.ranks else "none yet"
            return Reply(False, f"rank {rank} is not on node {agent.node} (its ranks: {here})")
        if request.kind == "kill_manager":
            return self._kill_manager(rank)
        trainer = agent.active_of(rank)
        if trainer is None:
            return Reply(False, f"rank {rank} has no active trainer now; try again after the recovery")
        match request.kind:
            case "kill":
                self._shell.carry(agent.inject_kill(rank, now))
            case "hang":
                self._shell.carry(agent.inject_hang(rank, now))
            case "fatal":
                self._shell.carry(agent.inject_fatal(rank, request.xid, now, request.heals_s))
            case "lose":
                lose = Lose(request.allocation, request.group, request.pages, request.tier1)
                return self._lose(request, lose, trainer.pid, patience_s)
            case "poison":
                lose = Lose(request.allocation, request.group, 0, max(1, request.tier1))
                return self._lose(request, lose, trainer.pid, patience_s)
        return Reply(True, f"{request.kind}: active trainer {trainer.pid} of rank {rank}")

    def _lose(self, request: Inject, lose: Lose, pid: int, patience_s: float) -> Reply:
        """Look before anything is killed: a typing error must not cost a trainer."""
        if problem := self._shell.why_not_lose(request.rank, lose, patience_s):
            return Reply(False, f"nothing was done: {problem}")
        agent = self._shell.agent
        self._shell.carry(agent.inject_lose(request.rank, lose, request.seed, self._reactor.now))
        return Reply(True, f"{request.kind}: active trainer {pid} of rank {request.rank}")

    def _kill_manager(self, rank: int) -> Reply:
        pid = self._shell.manager_pid(rank)
        if pid is None:
            return Reply(False, f"rank {rank} has no state manager now; try again after the recovery")
        self._shell.carry([KillManager(rank, self._shell.agent.epoch)])
        if self._shell.manager_pid(rank) == pid:
            return Reply(False, f"the state manager of rank {rank}, process {pid}, could not be killed")
        return Reply(True, f"the state manager of rank {rank}, process {pid}, was killed")
