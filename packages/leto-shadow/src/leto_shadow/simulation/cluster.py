"""A simulated cluster: the real hub and agent cores, made-up processes, network and time."""

from __future__ import annotations

import math
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from leto_shadow import agent_actions as todo
from leto_shadow import messages as m
from leto_shadow import wire
from leto_shadow.actions import AskDecision, CloseStore, Done, HostStore, Record
from leto_shadow.coordinator import Coordinator
from leto_shadow.exit_codes import KEEPS_MEMORY, ExitCode
from leto_shadow.hub import Hub, HubOutput
from leto_shadow.link import encode_frame
from leto_shadow.operability import DeviceFacts
from leto_shadow.progress import Phase as TrainerPhase
from leto_shadow.simulation.clock import Clock
from leto_shadow.simulation.decision import Refused, decide
from leto_shadow.simulation.failures import Failures
from leto_shadow.simulation.invariants import (
    ViolationError,
    check_always,
    check_empty,
    check_end,
    check_exit,
)
from leto_shadow.simulation.managing import Managing
from leto_shadow.simulation.memory import SimManager
from leto_shadow.simulation.node import BEAT_S, TICK_S, SimNode
from leto_shadow.simulation.plan import Plan, Scenario, make_plan
from leto_shadow.simulation.pressure import MemoryPressure
from leto_shadow.simulation.torchrun import SimTorchrun
from leto_shadow.simulation.trainers import Meeting, SimTrainer

__all__ = ["Cluster", "Outcome", "run_seed"]

_BOUND_S = 400.0  # ten times what the longest of thousands of runs takes
_BOUND_EVENTS = 40_000
_SETTLE_S = 12.0  # longer than the slowest death of a process whose agent is dead


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
        self.trainers: dict[tuple[int, int], SimTrainer] = {}  # by attempt and sid
        self.managers: list[SimManager] = []
        self.stores: set[int] = set()
        self.groups: dict[tuple[int, int], dict[int, SimTrainer]] = {}  # by attempt and world
        self.checkpoints: dict[int, set[int]] = {rank: set() for rank in range(self.world_size)}
        self.torn_checkpoints: dict[int, set[int]] = {rank: set() for rank in range(self.world_size)}
        self.meetings: dict[tuple[int, int, int, TrainerPhase, int], Meeting] = {}
        """Collectives, by attempt, world, iteration, kind and first rank."""
        self.highest_generation = 0
        self.events: list[tuple[str, dict[str, Any]]] = []
        self.reclaimed: dict[int, tuple[int, int, tuple[int, int]]] = {}
        """Last reclaim of each rank: generation, level that was asked for, newest process at that time."""
        self.reclaims: Counter[tuple[int, int]] = Counter()
        """How many reclaims of each (generation, rank)."""
        self.heals: dict[int, float] = {}
        """When the devices of a node are operable again."""
        self.retired: dict[int, str] = {}
        """Why nodes had to give up their ranks, until their devices are operable again: from their logs."""
        self._trace = trace
        self.done: Done | None = None
        self._decisions: dict[tuple[int, int], bytes] = {}
        self._resumed: dict[tuple[int, int], tuple[int, str]] = {}
        self._dead_since: dict[int, float] = {}
        self.cut: dict[int, float] = {}
        self._hub_attempt = -1

        self.torchrun = SimTorchrun(self)
        self.failures = Failures(self)
        self.pressure = MemoryPressure(self)
        self.managing = Managing(self)
        self.nodes = [SimNode(self, index) for index in range(plan.nodes + plan.spares)]
        self.hub = Hub(Coordinator(plan.nodes + plan.spares, plan.policy, 0.0, plan.nodes), beat_s=BEAT_S)

    def trace(self, text: str) -> None:
        if self._trace is not None:
            self._trace(f"{self.clock.now:8.3f} {text}")

    # --- the run ----------------------------------------------------------------------------------

    def run(self) -> Outcome:
        self.torchrun.begin()
        at_event = {fault.event: fault for fault in self.plan.faults if fault.event}
        for fault in self.plan.faults:
            if fault.phase is None and not fault.event:
                self.clock.after(fault.delay_s, lambda fault=fault: self.failures.strike(fault))  # type: ignore[misc]
        if self.plan.agent_death is not None:
            index, at = self.plan.agent_death
            self.clock.after(at, lambda: self.failures.agent_dies(self.nodes[index]))
        count, bound = 0, 3 if self.plan.restarts else 1
        while not self._over():
            self.clock.step()
            count += 1
            if count in at_event:
                self.failures.strike(at_event[count])
            check_always(self)
            self.failures.watch_phase()
            if self.clock.now > bound * _BOUND_S or count > bound * _BOUND_EVENTS:
                raise ViolationError(
                    f"liveness: in phase {self.hub.coordinator.phase.value} after {self.clock.now:.0f} s"
                )
        assert self.done is not None
        self._settle()
        check_end(self)
        self._check_outcome(self.done)
        coordinator = self.hub.coordinator
        return Outcome(
            self.done.exit_code,
            self.done.reason,
            self.clock.now,
            count,
            coordinator.generation + 1,
            coordinator.epoch,
        )

    def _over(self) -> bool:
        return self.done is not None and not self.torchrun.waiting and self.all_ended()

    def all_ended(self) -> bool:
        """All agents of this attempt have ended, and the coordinator with its agent."""
        ended = all(node.exit is not None or not node.alive for node in self.nodes)
        return ended and (self.done is not None or not self.nodes[0].alive)

    @property
    def gave_up(self) -> bool:
        """The job is not worth another attempt: a script's error, say. Real users see its exit code."""
        return self.done is not None and self.done.exit_code not in KEEPS_MEMORY

    def _settle(self) -> None:
        """The job is over and torchrun with it: see what ends by itself."""
        self.torchrun.over = True
        for manager in self.managers:
            self.clock.after(self.rng.uniform(0, 0.5), partial(self.managing.ends, manager))
        until = self.clock.now + _SETTLE_S
        while self.clock.next_at < until:
            self.clock.step()

    def start_hub(self) -> None:
        """The coordinator starts in the agent of node 0."""
        self.highest_generation = 0
        self._hub_attempt = self.torchrun.attempt
        coordinator = Coordinator(
            self.plan.nodes + self.plan.spares, self.plan.policy, self.clock.now, self.plan.nodes
        )
        hub = self.hub = Hub(coordinator, beat_s=BEAT_S)
        self.clock.after(self.rng.uniform(0, TICK_S), lambda: self._tick_hub(hub))

    def new_attempt(self) -> None:
        """torchrun is about to start the agents again, and with that of node 0 a new coordinator."""
        self.done = None
        self.stores.clear()
        self.failures.new_attempt()

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

    def _tick_hub(self, hub: Hub) -> None:
        if hub is self.hub and not self._over():
            self.carry_hub(hub.tick(self.clock.now))
            self.clock.after(TICK_S, lambda: self._tick_hub(hub))

    # --- network ----------------------------------------------------------------------------------

    def _deliver(self, node: int, receive: Callable[[], None]) -> None:
        copies = 2 if self.rng.random() < self.plan.duplication else 1
        for _ in range(copies):
            lost = self.rng.random() < self.plan.loss or self.clock.now < self.cut.get(node, 0.0)
            if not lost:
                self.clock.after(self.rng.uniform(0, self.plan.delay_s), receive)

    def to_hub(self, node: SimNode, data: bytes) -> None:
        def receive() -> None:
            if node.attempt == self._hub_attempt:  # a coordinator of another attempt has other keys
                self.carry_hub(self.hub.receive(node.index, data, self.clock.now))

        self._deliver(node.index, receive)

    def carry_hub(self, output: HubOutput) -> None:
        if not self.nodes[0].alive:
            return  # it died with its agent, and whatever it decided meanwhile stays unsaid
        for node, data in output.frames:
            self._deliver(node, partial(self.nodes[node].receive, data))
        for action in output.local:
            match action:
                case HostStore(world=world):
                    self.clock.after(self.rng.uniform(0, 0.1), partial(self._host, self.hub, world))
                case CloseStore(world=world):
                    self.stores.discard(world)
                case AskDecision(generation=generation, summaries=summaries):
                    self._decide(generation, summaries)
                case Record(event=event, fields=fields):
                    self.events.append((event, fields))
                    if event == "spare_back":
                        check_empty(self, fields["spare"])
                    self.trace(f"{event} {fields}")
                case Done():
                    self.done = action
                    self.torchrun.coordinator_done()

    def _host(self, hub: Hub, world: int) -> None:
        if hub is not self.hub or not self.nodes[0].alive:
            return  # the helper died with its agent
        self.stores.add(world)
        self.carry_hub(self.hub.store_ready(world, "store", 1, self.clock.now))

    def _decide(self, generation: int, summaries: Sequence[bytes]) -> None:
        answer, error = decide(summaries, self.world_size), ""
        payload = answer.payload if isinstance(answer, Refused) else answer
        if isinstance(answer, Refused):
            error = answer.reason
        elif self.rng.random() < self.plan.decision_errors:
            error = "the decision function raised"
        slow = self.rng.random() < self.plan.slow_decisions
        delay = self.rng.uniform(1.0, 8.0) if slow else self.rng.uniform(0, 0.3)
        self.clock.after(delay, partial(self._decided, self.hub, generation, payload, error))

    def _decided(self, hub: Hub, generation: int, payload: bytes, error: str) -> None:
        if hub is self.hub:
            self.carry_hub(hub.decided(generation, payload, error, self.clock.now))

    # --- agents' actions --------------------------------------------------------------------------

    def carry_agent(self, node: SimNode, action: todo.AgentAction) -> None:
        now = self.clock.now
        match action:
            case todo.Tell(message=message):
                self.trace(f"node {node.index} says {message}")
                self.to_hub(node, encode_frame(node.link.send(m.encode(message), now)))
            case todo.SpawnTrainer(sid=sid, rank=rank):
                trainer = self.trainers[node.key(sid)] = SimTrainer(self, node, rank, sid)
                node.carry(node.agent.trainer_spawned(sid, sid, now))
                if rank == self.plan.doomed_rank:
                    self.clock.after(self.rng.uniform(0.1, 1), lambda: self.die(trainer, "exit 1"))
                trainer.start()
            case todo.RenameTrainer(old=old, sid=sid, rank=rank):
                renamed = self.trainers[node.key(sid)] = self.trainers.pop(node.key(old))
                renamed.sid, renamed.rank = sid, rank
                self.clock.after(self.rng.uniform(0, 0.01), partial(renamed.hear, wire.TakeRank(rank, "")))
            case todo.KillTrainer(sid=sid):
                slow = self.rng.random() < self.plan.slow_deaths
                delay = self.rng.uniform(1.0, 5.0) if slow else self.rng.uniform(0.0, 0.15)
                self.clock.after(delay, partial(self.die, self.trainers[node.key(sid)], "SIGKILL"))
            case todo.TellTrainer(sid=sid, message=told):
                hearer = self.trainers[node.key(sid)]
                # A stream keeps the order: never two at one instant.
                hearer.hears_at = max(hearer.hears_at + 1e-6, now + self.rng.uniform(0, 0.01))
                self.clock.after(hearer.hears_at - now, partial(hearer.hear, told))
            case todo.CheckReleased(sid=sid):
                suspect = self.trainers[node.key(sid)]
                error = "it can write" if suspect.generation is not None and suspect.alive else None
                node.carry(node.agent.released(sid, error, now))
            case todo.AnswerHook(sid=sid, sequence=sequence):
                self.pressure.answered(node, sid, sequence)
            case todo.CheckDevices():
                self.clock.after(self.rng.uniform(0.05, 2.0), partial(self._devices_checked, node))
            case todo.StartManager(rank=rank, epoch=epoch):
                self.clock.after(self.rng.uniform(0.1, 1.0), lambda: self.managing.up(node, rank, epoch))
            case todo.KillManager(rank=rank, epoch=epoch):
                self.clock.after(self.rng.uniform(0, 0.1), lambda: self.managing.dies(node, rank, epoch))
            case todo.FenceManager(rank=rank, epoch=epoch, generation=generation):
                self.managing.fence(node, rank, epoch, generation)
            case todo.RepairRank(rank=rank, generation=generation, epoch=epoch):
                bad = self.rng.random() < self.plan.repair_errors
                error = "localization failed" if bad else None

                def repaired() -> None:
                    if node.alive:
                        self.memory_of(rank).localized |= not bad
                        node.carry(node.agent.repair_done(rank, generation, epoch, 0, error, self.clock.now))

                self.clock.after(self.rng.uniform(0, 0.2), repaired)
            case todo.Note(event="retired", fields=fields):
                self.retired[node.index] = fields["reason"]
            case todo.Note(event="fit"):
                del self.retired[node.index]
            case todo.Note():
                pass
            case todo.Exit(exit_code=exit_code):
                node.exit = action
                if exit_code == ExitCode.NODE_UNFIT and self.clock.now >= self.heals.get(node.index, 0.0):
                    raise ViolationError(f"liveness: node {node.index} leaves, and its devices are fit")
                keeps = self.plan.restarts > 0 and exit_code in KEEPS_MEMORY
                check_exit(self, node.index, keeps_memory=keeps)
                self.managing.orphan(node)
                self.torchrun.agent_ended(node, exit_code)

    def trainer_says(self, trainer: SimTrainer, message: wire.TrainerMessage) -> None:
        node = trainer.home

        def heard() -> None:
            if node.alive and trainer.sid in node.agent.trainers:
                node.carry(node.agent.trainer_says(trainer.sid, message, self.clock.now))

        self.clock.after(0.001, heard)

    def die(self, trainer: SimTrainer, how: str, *, clean: bool = False) -> None:
        """The process ends; its agent learns of it through the pidfd a little later."""
        if not trainer.alive:
            return
        trainer.alive = False
        self._dead_since[id(trainer)] = self.clock.now
        self.trace(f"trainer {trainer.sid} of rank {trainer.rank} dies: {how}")
        node = trainer.home
        memory = trainer.manager
        if memory is not None and not clean and self.rng.random() < self.plan.page_losses:
            memory.lose(beyond=self.rng.random() < self.plan.heavy_losses)
            self.trace(f"rank {trainer.rank} loses pages, beyond tolerance: {memory.beyond}")

        def gone() -> None:
            if node.alive:
                facts = self._facts(node) if trainer.generation is not None else None
                node.carry(node.agent.trainer_gone(trainer.sid, how, clean, self.clock.now, facts))

        self.clock.after(self.rng.uniform(0.002, 0.1), gone)

    def device_fails(self, trainer: SimTrainer) -> None:
        """The device under an active trainer is not operable any more."""
        self.devices_fail(trainer.home.index)
        self.die(trainer, "its device failed")

    def devices_fail(self, index: int) -> None:
        """Those of a node; they are repaired later, or never."""
        heals_s = self.rng.choice([self.rng.uniform(0.3, 1.0), self.rng.uniform(1.0, 12.0), math.inf])
        self.heals[index] = self.clock.now + heals_s

    def _facts(self, node: SimNode) -> DeviceFacts | None:
        unfit = self.clock.now < self.heals.get(node.index, 0.0)
        return DeviceFacts(f"device-{node.index}", answers=False, error="gone") if unfit else None

    def _devices_checked(self, node: SimNode) -> None:
        if node.alive and node.exit is None:
            facts = self._facts(node)
            node.carry(node.agent.devices_checked(() if facts is None else (facts,), self.clock.now))

    def cut_for(self, index: int) -> float:
        """Seconds until the network reaches this node again."""
        return max(0.0, self.cut.get(index, 0.0) - self.clock.now)

    def reached(self, index: int) -> dict[int, int]:
        """How far the newest trainers that ever trained on a node had come, by rank."""
        newest: dict[int, tuple[int, int, int]] = {}
        for trainer in self.trainers.values():
            if trainer.home.index == index and trainer.generation is not None and trainer.iteration:
                found = (trainer.home.attempt, trainer.generation, trainer.iteration)
                newest[trainer.rank] = max(newest.get(trainer.rank, found), found)
        return {rank: iteration for rank, (_, _, iteration) in newest.items()}

    def written_off(self, trainer: SimTrainer) -> bool:
        """Its node lost its place to a spare. What it writes nobody reads; it may take a while to end."""
        current = trainer.home.attempt == self.torchrun.attempt
        return current and trainer.home.index in self.hub.coordinator._gone

    def known_dead(self, trainer: SimTrainer) -> bool:
        """It died before this world was promoted, beyond doubt."""
        return False if trainer.alive else self.clock.now - self._dead_since[id(trainer)] > 30.0

    # --- what trainers ask ------------------------------------------------------------------------

    def manager_of(self, rank: int) -> SimManager | None:
        """The living manager of a rank; an older one may be about to end on a node that lost its place."""
        return next((one for one in reversed(self.managers) if one.alive and one.rank == rank), None)

    def memory_of(self, rank: int) -> SimManager:
        """The newest memory of a rank, whether its manager lives or not."""
        return [one for one in self.managers if one.rank == rank][-1]

    def note_decision(self, trainer: SimTrainer, payload: bytes) -> None:
        assert trainer.generation is not None
        key = trainer.home.attempt, trainer.generation
        if self._decisions.setdefault(key, payload) != payload:
            raise ViolationError(f"I-5: two decisions in generation {trainer.generation}")

    def note_resumed(self, trainer: SimTrainer, iteration: int, source: str) -> None:
        assert trainer.generation is not None
        key = trainer.home.attempt, trainer.generation
        found = self._resumed.setdefault(key, (iteration, source))
        if found != (iteration, source):
            raise ViolationError(
                f"I-5: generation {trainer.generation} resumed from {found} and {(iteration, source)}"
            )


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
