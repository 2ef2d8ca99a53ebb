"""A simulated cluster: the real hub and agent cores, made-up processes, network and time."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from leto_shadow import agent_actions as todo
from leto_shadow import messages as m
from leto_shadow import wire
from leto_shadow.actions import AskDecision, CloseStore, Done, HostStore, Record
from leto_shadow.coordinator import Coordinator
from leto_shadow.exit_codes import ExitCode
from leto_shadow.hub import Hub, HubOutput
from leto_shadow.link import encode_frame
from leto_shadow.phases import Phase
from leto_shadow.progress import Phase as TrainerPhase
from leto_shadow.simulation.clock import Clock
from leto_shadow.simulation.decision import Refused, decide
from leto_shadow.simulation.invariants import ViolationError, check_always, check_end
from leto_shadow.simulation.memory import SimManager
from leto_shadow.simulation.node import BEAT_S, TICK_S, SimNode
from leto_shadow.simulation.plan import Fault, FaultKind, Plan, Scenario, make_plan
from leto_shadow.simulation.trainers import SimTrainer

__all__ = ["Cluster", "Outcome", "run_seed"]

_BOUND_S = 400.0  # ten times what the longest of thousands of runs takes
_BOUND_EVENTS = 40_000


@dataclass(frozen=True)
class Outcome:
    """How a run ended."""

    exit_code: int
    reason: str
    simulated_s: float
    events: int
    generations: int
    epochs: int


class Cluster:
    """One run. `run` returns its outcome or raises `ViolationError`."""

    def __init__(self, seed: int, plan: Plan, trace: Callable[[str], None] | None = None) -> None:
        self.plan = plan
        self.rng = random.Random(f"run-{seed}")
        self.clock = Clock()
        self.world_size = plan.nodes * plan.local_ranks
        self.trainers: dict[int, SimTrainer] = {}
        self.managers: dict[tuple[int, int], SimManager] = {}
        self.stores: set[int] = set()
        self.groups: dict[int, dict[int, SimTrainer]] = {}
        self.checkpoints: dict[int, set[int]] = {rank: set() for rank in range(self.world_size)}
        self.torn_checkpoints: dict[int, set[int]] = {rank: set() for rank in range(self.world_size)}
        self.highest_generation = 0
        self.events: list[tuple[str, dict[str, Any]]] = []
        self._trace = trace
        self._done: Done | None = None
        self._decisions: dict[int, bytes] = {}
        self._resumed: dict[int, tuple[int, str]] = {}
        self._dead_since: dict[int, float] = {}
        self._cut: dict[int, float] = {}
        self._phase_seen: dict[Phase, int] = {}
        self._phase: Phase | None = None
        self._pending = list(plan.faults)

        self.hub = Hub(Coordinator(plan.nodes, plan.policy, 0.0), beat_s=BEAT_S)
        self.nodes = [SimNode(self, index) for index in range(plan.nodes)]

    def trace(self, text: str) -> None:
        if self._trace is not None:
            self._trace(f"{self.clock.now:8.3f} {text}")

    # --- the run ----------------------------------------------------------------------------------

    def run(self) -> Outcome:
        for node in self.nodes:
            self.clock.after(self.rng.uniform(0, 1), lambda node=node: node.carry(node.agent.start()))  # type: ignore[misc]
            self.clock.after(self.rng.uniform(0, TICK_S), node.tick)
        self.clock.after(self.rng.uniform(0, TICK_S), self._tick_hub)
        for fault in self.plan.faults:
            if fault.phase is None:
                self.clock.after(fault.delay_s, lambda fault=fault: self._strike(fault))  # type: ignore[misc]
        if self.plan.agent_death is not None:
            index, at = self.plan.agent_death
            self.clock.after(at, lambda: self._agent_dies(self.nodes[index]))
        count = 0
        while not self._over():
            self.clock.step()
            count += 1
            check_always(self)
            self._watch_phase()
            if self.clock.now > _BOUND_S or count > _BOUND_EVENTS:
                raise ViolationError(
                    f"liveness: in phase {self.hub.coordinator.phase.value} after {self.clock.now:.0f} s"
                )
        assert self._done is not None
        check_end(self)
        self._check_outcome(self._done)
        coordinator = self.hub.coordinator
        return Outcome(
            self._done.exit_code,
            self._done.reason,
            self.clock.now,
            count,
            coordinator.generation + 1,
            coordinator.epoch,
        )

    def _over(self) -> bool:
        ended = all(node.exit is not None or not node.alive for node in self.nodes)
        return self._done is not None and ended

    def _check_outcome(self, done: Done) -> None:
        if done.exit_code not in self.plan.exit_codes:
            wanted = sorted(self.plan.exit_codes)
            raise ViolationError(f"liveness: ended with {done.exit_code} ({done.reason}), expected {wanted}")
        if done.exit_code == ExitCode.FINISHED:
            for rank, memory in ((rank, self.memory_of(rank)) for rank in range(self.world_size)):
                if memory.iteration != self.plan.iterations:
                    raise ViolationError(
                        f"liveness: rank {rank} ended at {memory.iteration} of {self.plan.iterations}"
                    )

    def _tick_hub(self) -> None:
        self._carry_hub(self.hub.tick(self.clock.now))
        if self._done is None or not self._over():
            self.clock.after(TICK_S, self._tick_hub)

    # --- network ----------------------------------------------------------------------------------

    def _deliver(self, node: int, receive: Callable[[], None]) -> None:
        copies = 2 if self.rng.random() < self.plan.duplication else 1
        for _ in range(copies):
            lost = self.rng.random() < self.plan.loss or self.clock.now < self._cut.get(node, 0.0)
            if not lost:
                self.clock.after(self.rng.uniform(0, self.plan.delay_s), receive)

    def to_hub(self, node: int, data: bytes) -> None:
        self._deliver(node, lambda: self._carry_hub(self.hub.receive(node, data, self.clock.now)))

    def _carry_hub(self, output: HubOutput) -> None:
        if not self.nodes[0].alive:
            return  # it died with its agent, and whatever it decided meanwhile stays unsaid
        for node, data in output.frames:
            self._deliver(node, lambda node=node, data=data: self.nodes[node].receive(data))  # type: ignore[misc]
        for action in output.local:
            match action:
                case HostStore(world=world):
                    self.clock.after(self.rng.uniform(0, 0.1), lambda world=world: self._host(world))  # type: ignore[misc]
                case CloseStore(world=world):
                    self.stores.discard(world)
                case AskDecision(generation=generation, summaries=summaries):
                    self._decide(generation, summaries)
                case Record(event=event, fields=fields):
                    self.events.append((event, fields))
                    self.trace(f"{event} {fields}")
                case Done():
                    self._done = action

    def _host(self, world: int) -> None:
        self.stores.add(world)
        self._carry_hub(self.hub.store_ready(world, "store", 1, self.clock.now))

    def _decide(self, generation: int, summaries: Sequence[bytes]) -> None:
        answer, error = decide(summaries, self.world_size), ""
        payload = answer.payload if isinstance(answer, Refused) else answer
        if isinstance(answer, Refused):
            error = answer.reason
        elif self.rng.random() < self.plan.decision_errors:
            error = "the decision function raised"
        slow = self.rng.random() < self.plan.slow_decisions
        delay = self.rng.uniform(1.0, 8.0) if slow else self.rng.uniform(0, 0.3)
        self.clock.after(delay, partial(self._decided, generation, payload, error))

    def _decided(self, generation: int, payload: bytes, error: str) -> None:
        self._carry_hub(self.hub.decided(generation, payload, error, self.clock.now))

    # --- agents' actions --------------------------------------------------------------------------

    def carry_agent(self, node: SimNode, action: todo.AgentAction) -> None:
        now = self.clock.now
        match action:
            case todo.Tell(message=message):
                self.trace(f"node {node.index} says {message}")
                self.to_hub(node.index, encode_frame(node.link.send(m.encode(message), now)))
            case todo.SpawnTrainer(sid=sid, rank=rank):
                trainer = self.trainers[sid] = SimTrainer(self, node.index, rank, sid)
                node.carry(node.agent.trainer_spawned(sid, sid, now))
                if rank == self.plan.doomed_rank:
                    self.clock.after(self.rng.uniform(0.1, 1), lambda: self.die(trainer, "exit 1"))
                trainer.start()
            case todo.KillTrainer(sid=sid):
                slow = self.rng.random() < self.plan.slow_deaths
                delay = self.rng.uniform(1.0, 5.0) if slow else self.rng.uniform(0.0, 0.15)
                self.clock.after(delay, lambda: self.die(self.trainers[sid], "SIGKILL"))
            case todo.TellTrainer(sid=sid, message=told):
                self.clock.after(self.rng.uniform(0, 0.01), lambda: self.trainers[sid].hear(told))
            case todo.StartManager(rank=rank, epoch=epoch):
                self.clock.after(self.rng.uniform(0.1, 1.0), lambda: self._manager_up(node, rank, epoch))
            case todo.KillManager(rank=rank, epoch=epoch):
                self.clock.after(self.rng.uniform(0, 0.1), lambda: self._manager_dies(rank, epoch))
            case todo.RepairRank(rank=rank, generation=generation, epoch=epoch):
                bad = self.rng.random() < self.plan.repair_errors
                error = "localization failed" if bad else None

                def repaired() -> None:
                    if node.alive:
                        self.memory_of(rank).localized |= not bad
                        node.carry(node.agent.repair_done(rank, generation, epoch, 0, error, self.clock.now))

                self.clock.after(self.rng.uniform(0, 0.2), repaired)
            case todo.Note():
                pass
            case todo.Exit():
                node.exit = action

    def trainer_says(self, trainer: SimTrainer, message: wire.TrainerMessage) -> None:
        node = self.nodes[trainer.node]

        def heard() -> None:
            if node.alive and trainer.sid in node.agent.trainers:
                node.carry(node.agent.trainer_says(trainer.sid, message, self.clock.now))

        self.clock.after(0.001, heard)

    def die(self, trainer: SimTrainer, how: str, *, clean: bool = False) -> None:
        """The process ends; its agent learns of it through the pidfd a little later."""
        if not trainer.alive:
            return
        trainer.alive = False
        self._dead_since[trainer.sid] = self.clock.now
        self.trace(f"trainer {trainer.sid} of rank {trainer.rank} dies: {how}")
        node = self.nodes[trainer.node]
        memory = trainer.manager
        if memory is not None and not clean and self.rng.random() < self.plan.page_losses:
            memory.lose(beyond=self.rng.random() < self.plan.heavy_losses)
            self.trace(f"rank {trainer.rank} loses pages, beyond tolerance: {memory.beyond}")

        def gone() -> None:
            if node.alive:
                node.carry(node.agent.trainer_gone(trainer.sid, how, clean, self.clock.now))

        self.clock.after(self.rng.uniform(0.002, 0.1), gone)

    def known_dead(self, trainer: SimTrainer) -> bool:
        """It died before this world was promoted, beyond doubt."""
        return False if trainer.alive else self.clock.now - self._dead_since[trainer.sid] > 30.0

    def _manager_up(self, node: SimNode, rank: int, epoch: int) -> None:
        if not node.alive:
            return
        if any(one.alive and one.rank == rank for one in self.managers.values()):
            raise ViolationError(f"I-7: rank {rank} has two managers")
        self.managers[rank, epoch] = SimManager(rank, epoch)
        node.carry(node.agent.manager_up(rank, epoch, f"manager-{rank}-{epoch}", self.clock.now))

    def _manager_dies(self, rank: int, epoch: int) -> None:
        manager = self.managers.get((rank, epoch))
        if manager is None or not manager.alive:
            return
        manager.alive = False
        self.trace(f"manager of rank {rank}, epoch {epoch}, dies")
        node = self.nodes[rank // self.plan.local_ranks]

        def gone() -> None:
            if node.alive:
                node.carry(node.agent.manager_gone(rank, epoch, "killed", self.clock.now))

        self.clock.after(self.rng.uniform(0.002, 0.05), gone)

    # --- what trainers ask ------------------------------------------------------------------------

    def manager_of(self, rank: int) -> SimManager | None:
        """The living manager of a rank."""
        return next((one for one in self.managers.values() if one.alive and one.rank == rank), None)

    def memory_of(self, rank: int) -> SimManager:
        """The newest memory of a rank, whether its manager lives or not."""
        return max((one for one in self.managers.values() if one.rank == rank), key=lambda one: one.epoch)

    def note_decision(self, trainer: SimTrainer, payload: bytes) -> None:
        assert trainer.generation is not None
        if self._decisions.setdefault(trainer.generation, payload) != payload:
            raise ViolationError(f"I-5: two decisions in generation {trainer.generation}")

    def note_resumed(self, trainer: SimTrainer, iteration: int, source: str) -> None:
        assert trainer.generation is not None
        found = self._resumed.setdefault(trainer.generation, (iteration, source))
        if found != (iteration, source):
            raise ViolationError(
                f"I-5: generation {trainer.generation} resumed from {found} and {(iteration, source)}"
            )

    # --- failures ---------------------------------------------------------------------------------

    def _watch_phase(self) -> None:
        phase = self.hub.coordinator.phase
        if phase is self._phase:
            return
        self._phase = phase
        self.trace(f"phase {phase.value}, generation {self.hub.coordinator.generation}")
        seen = self._phase_seen[phase] = self._phase_seen.get(phase, 0) + 1
        for fault in list(self._pending):
            if fault.phase is phase and fault.nth == seen:
                self._pending.remove(fault)
                self.clock.after(fault.delay_s, lambda fault=fault: self._strike(fault))  # type: ignore[misc]

    def _strike(self, fault: Fault) -> None:
        self.trace(f"fault: {fault.kind} on rank {fault.rank}")
        alive = [t for t in self.trainers.values() if t.alive]
        active = {t.rank: t for t in alive if t.generation is not None}
        match fault.kind:
            case FaultKind.KILL_ACTIVE | FaultKind.KILL_TWO:
                ranks = [fault.rank, (fault.rank + 1) % self.world_size]
                for rank in ranks[: 2 if fault.kind is FaultKind.KILL_TWO else 1]:
                    if rank in active:
                        self.die(active[rank], "SIGKILL")
            case FaultKind.KILL_SHADOW:
                for trainer in alive:
                    if trainer.generation is None and trainer.rank == fault.rank:
                        self.die(trainer, "SIGKILL")
            case FaultKind.HANG_ACTIVE:
                if fault.rank in active and active[fault.rank].phase is not TrainerPhase.DONE:
                    active[fault.rank].hung = True
            case FaultKind.KILL_MANAGER:
                manager = self.manager_of(fault.rank)
                if manager is not None:
                    self._manager_dies(manager.rank, manager.epoch)
            case FaultKind.BLACKOUT:
                node = fault.rank // self.plan.local_ranks
                self._cut[node] = self.clock.now + self.rng.uniform(0.5, 5.0)

    def _agent_dies(self, node: SimNode) -> None:
        """Everything that the agent owns dies with it."""
        if node.exit is not None:
            return
        self.trace(f"the agent of node {node.index} dies")
        node.alive = False
        if node.index == 0:
            self._done = Done(int(ExitCode.AGENT_LOST), "the coordinator died")
            self.stores.clear()
        for trainer in self.trainers.values():
            if trainer.node == node.index:
                trainer.alive = False
                self._dead_since.setdefault(trainer.sid, self.clock.now)
        for manager in self.managers.values():
            if manager.rank // self.plan.local_ranks == node.index:
                manager.alive = False


def run_seed(
    seed: int, scenario: Scenario | None = None, trace: Callable[[str], None] | None = None
) -> Outcome:
    """Run one schedule; a `ViolationError` or any other error names the command that repeats it."""
    plan = make_plan(seed, scenario)
    try:
        return Cluster(seed, plan, trace).run()
    except Exception as error:
        option = "" if scenario is None else f" --scenario {scenario.name}"
        error.add_note(f"repeat with: python -m leto_shadow.simulation --seed {seed}{option} --trace")
        raise
