"""A simulated torchrun on every node: starts the agents, and all of them again when one has failed.

As observed of the real one with c10d rendezvous: the failed agent's torchrun asks for a new round, the others
notice it, end their agents by SIGTERM (SIGKILL after half a minute) and join. With static rendezvous nobody
else notices, and the others fail by themselves when the coordinator has missed the dead agent for long
enough. Either way a new attempt begins when all have ended. A new agent reports in when the trainers of its
predecessor are dead, with the managers that it has found and taken over; with the last torchrun the managers
end too.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from leto_shadow import messages as m
from leto_shadow.actions import Done
from leto_shadow.exit_codes import ExitCode
from leto_shadow.simulation.node import TICK_S, SimNode

if TYPE_CHECKING:
    from leto_shadow.simulation.cluster import Cluster

__all__ = ["SimTorchrun"]

_SIGKILL_S = 30.0


class SimTorchrun:
    """All torchruns of the job."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self.attempt = 0
        self.over = False
        """No agent is started any more."""
        self._left = cluster.plan.restarts
        self._restarting = False
        self._cut_off: set[int] = set()
        self.starting: set[int] = set()
        """Nodes whose agent of this attempt has not started yet."""

    @property
    def waiting(self) -> bool:
        """True while agents are to be started or started again."""
        return self._restarting or bool(self.starting) or bool(self._cut_off)

    def begin(self) -> None:
        """Start the agents of this attempt."""
        self._restarting = False
        self.starting = set(range(len(self.cluster.nodes)))
        for index in sorted(self.starting):
            self.cluster.clock.after(self.cluster.rng.uniform(0, 1), partial(self._start, index))

    def _start(self, index: int) -> None:
        cluster = self.cluster
        left = any(one.alive and one.home.index == index for one in cluster.trainers.values())
        keyless = index != 0 and 0 in self.starting
        if keyless or (left and self.leftovers_awaited):
            cluster.clock.after(0.05, lambda: self._start(index))
            return
        if index == 0:
            cluster.start_hub()
        node = SimNode(cluster, index, self.attempt)
        cluster.nodes[index] = node
        self.starting.discard(index)
        for manager in cluster.managers:
            if manager.alive and manager.owner.index == index:
                manager.owner = node
                node.agent.hold(
                    m.Held(manager.rank, manager.epoch, manager.newest), f"manager-{manager.rank}"
                )
        node.agent.reached(cluster.reached(index))
        if index in cluster.retired:
            node.agent.retire_again(cluster.retired[index])
        cluster.trace(f"the agent of node {index} starts, attempt {self.attempt}")
        node.carry(node.agent.start())
        cluster.clock.after(cluster.rng.uniform(0, TICK_S), node.tick)

    leftovers_awaited = True
    """False only in a deliberately broken variant."""

    def agent_ended(self, node: SimNode, exit_code: int | None) -> None:
        """An agent ended by itself, or was killed (None)."""
        cluster = self.cluster
        if (wait_s := cluster.cut_for(node.index)) and not self.over:
            self._cut_off.add(node.index)  # its torchrun does not reach the others
            cluster.clock.after(wait_s, partial(self.agent_ended, node, exit_code))
            return
        self._cut_off.discard(node.index)
        if exit_code == ExitCode.NODE_UNFIT:
            cluster.trace(f"node {node.index} leaves, and its torchrun with it")
            self._look(node)
            return
        if exit_code == ExitCode.FINISHED or self.over or node.attempt != self.attempt:
            self._look(node)
            return
        if not self._restarting:
            finished = any(one.exit and one.exit.exit_code == ExitCode.FINISHED for one in cluster.nodes)
            gave_up = exit_code is not None and cluster.gave_up
            if self._left == 0 or finished or gave_up:
                self.over = True
            else:
                self._left -= 1
                self._restarting = True
                if cluster.plan.sigterm:
                    delay = cluster.rng.uniform(0.2, 1.5)
                    cluster.clock.after(delay, partial(self._end_the_others, self.attempt))
        self._look(node)

    def node_lost(self, node: SimNode) -> None:
        """Nobody notices but the coordinator. A node that comes back asks for a new round."""
        cluster = self.cluster
        if self._restarting:
            cluster.clock.after(5.0, lambda: self._look(node))  # it is back for the round that is awaited
        elif cluster.plan.returns_s:
            cluster.clock.after(cluster.plan.returns_s, partial(self._returned, node))

    def _returned(self, node: SimNode) -> None:
        over = self.cluster.done is not None and self.cluster.done.exit_code == ExitCode.FINISHED
        if node.attempt != self.attempt or self._restarting or self.over or over:
            return
        self.cluster.trace(f"node {node.index} is back")
        self._restarting = True
        self._end_the_others(self.attempt)

    def _end_the_others(self, attempt: int) -> None:
        if attempt != self.attempt:
            return
        for node in self.cluster.nodes:
            if node.alive and node.exit is None and node.index not in self.starting:
                self.cluster.failures.terminate(node)
                self.cluster.clock.after(_SIGKILL_S, partial(self.cluster.failures.agent_dies, node))

    def _look(self, node: SimNode) -> None:
        cluster = self.cluster
        if node.index == 0 and not node.alive and self.over and cluster.done is None:
            cluster.done = Done(int(ExitCode.AGENT_LOST), "the coordinator died")
        if not self._restarting or self.starting or not cluster.all_ended():
            return
        self.attempt += 1
        cluster.new_attempt()
        cluster.clock.after(cluster.rng.uniform(0.1, 1.0), self.begin)

    def coordinator_done(self) -> None:
        """The coordinator has said its last: an attempt may be over."""
        self._look(self.cluster.nodes[0])
