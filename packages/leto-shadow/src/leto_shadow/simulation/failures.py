"""The failures of a plan, and those of whole nodes and agents, carried out in a simulated cluster."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from leto_shadow.exit_codes import ExitCode
from leto_shadow.phases import Phase
from leto_shadow.progress import Phase as TrainerPhase
from leto_shadow.simulation.node import SimNode
from leto_shadow.simulation.plan import Fault, FaultKind

if TYPE_CHECKING:
    from leto_shadow.simulation.cluster import Cluster

__all__ = ["Failures"]


class Failures:
    """Those of one run: at an event of the simulation, at a time, or when the job enters a phase."""

    def __init__(self, cluster: Cluster) -> None:
        self.cluster = cluster
        self._pending = list(cluster.plan.faults)
        self._phase: Phase | None = None
        self._phase_seen: dict[Phase, int] = {}

    def new_attempt(self) -> None:
        """A new coordinator begins."""
        self._phase = None

    def watch_phase(self) -> None:
        phase = self.cluster.hub.coordinator.phase
        if phase is self._phase:
            return
        self._phase = phase
        self.cluster.trace(f"phase {phase.value}, generation {self.cluster.hub.coordinator.generation}")
        seen = self._phase_seen[phase] = self._phase_seen.get(phase, 0) + 1
        for fault in list(self._pending):
            if fault.phase is phase and fault.nth == seen:
                self._pending.remove(fault)
                self.cluster.clock.after(fault.delay_s, lambda fault=fault: self.strike(fault))  # type: ignore[misc]

    def strike(self, fault: Fault) -> None:
        self.cluster.trace(f"fault: {fault.kind} on rank {fault.rank}")
        alive = [t for t in self.cluster.trainers.values() if t.alive]
        active = {t.rank: t for t in alive if t.generation is not None}
        match fault.kind:
            case FaultKind.KILL_ACTIVE | FaultKind.KILL_TWO:
                ranks = [fault.rank, (fault.rank + 1) % self.cluster.world_size]
                for rank in ranks[: 2 if fault.kind is FaultKind.KILL_TWO else 1]:
                    if rank in active:
                        self.cluster.die(active[rank], "SIGKILL")
            case FaultKind.KILL_SHADOW:
                for trainer in alive:
                    if trainer.generation is None and trainer.rank == fault.rank:
                        self.cluster.die(trainer, "SIGKILL")
            case FaultKind.HANG_ACTIVE:
                if fault.rank in active and active[fault.rank].phase is not TrainerPhase.DONE:
                    active[fault.rank].hung = True
            case FaultKind.KILL_MANAGER:
                manager = self.cluster.manager_of(fault.rank)
                if manager is not None:
                    self.cluster.managing.ends(manager)
            case FaultKind.PRESSURE:
                if fault.rank in active and not active[fault.rank].hung:
                    self.cluster.pressure.asks(active[fault.rank])
            case FaultKind.BLACKOUT:
                node = fault.rank // self.cluster.plan.local_ranks
                self.cluster.cut[node] = self.cluster.clock.now + self.cluster.rng.uniform(0.5, 5.0)
            case FaultKind.KILL_AGENT:
                self.agent_dies(self.cluster.nodes[fault.rank // self.cluster.plan.local_ranks])
            case FaultKind.CUT_NODE:
                node = fault.rank // self.cluster.plan.local_ranks
                self.cluster.cut[node] = self.cluster.clock.now + self.cluster.rng.uniform(13.0, 30.0)
            case FaultKind.LOSE_NODE:
                self._lose_node(fault.rank)
            case FaultKind.UNFIT_SPARE:
                for index in self.cluster.hub.coordinator.spares[0][:1]:
                    self.cluster.devices_fail(index)
            case FaultKind.UNFIT_DEVICE:
                if fault.rank in active:
                    self.cluster.device_fails(active[fault.rank])

    def _lose_node(self, rank: int) -> None:
        """The node that has ``rank`` now is gone: its torchrun, agent, trainers and managers, all at once."""
        holders = [one.home.index for one in self.cluster.trainers.values() if one.alive and one.rank == rank]
        index = holders[-1] if holders else rank // self.cluster.plan.local_ranks
        node = self.cluster.nodes[index]
        if index == 0 or not node.alive or node.exit is not None or index in self.cluster.torchrun.starting:
            return
        self.cluster.trace(f"node {index} is lost")
        node.alive = False
        for trainer in self.cluster.trainers.values():
            if trainer.home is node:
                self.cluster.die(trainer, "its node is lost")
        for manager in self.cluster.managers:
            if manager.owner is node:
                self.cluster.managing.ends(manager)
        self.cluster.torchrun.node_lost(node)

    def terminate(self, node: SimNode) -> None:
        """SIGTERM for an agent."""
        self.cluster.trace(f"SIGTERM for the agent of node {node.index}")
        if node.index == 0:
            self.cluster.carry_hub(
                self.cluster.hub.stop(int(ExitCode.TERMINATED), "SIGTERM", self.cluster.clock.now)
            )
        else:
            node.carry(node.agent.stop(int(ExitCode.TERMINATED), "SIGTERM", self.cluster.clock.now))

    def agent_dies(self, node: SimNode) -> None:
        """SIGKILL: its trainers die with it, its managers outlive it for the grace period."""
        ended = node.exit is not None and (node.index != 0 or self.cluster.done is not None)
        unborn = node.index in self.cluster.torchrun.starting or node.attempt != self.cluster.torchrun.attempt
        if ended or unborn or not node.alive:
            return
        self.cluster.trace(f"the agent of node {node.index} dies")
        node.alive = False
        if node.index == 0:
            self.cluster.stores.clear()
        for trainer in self.cluster.trainers.values():
            if trainer.home is node and trainer.alive:
                slow = self.cluster.rng.random() < self.cluster.plan.slow_deaths
                delay = self.cluster.rng.uniform(2.0, 9.0) if slow else self.cluster.rng.uniform(0.0, 0.1)
                self.cluster.clock.after(delay, partial(self.cluster.die, trainer, "its agent died"))
        self.cluster.managing.orphan(node)
        self.cluster.torchrun.agent_ended(node, None)
