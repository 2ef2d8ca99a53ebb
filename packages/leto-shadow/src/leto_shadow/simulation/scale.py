"""How much one recovery costs when the job is large: the real coordinator and agents, up to 16,384 nodes.

`simulation.cluster` looks for broken invariants and checks all of them after every event, which no large
cluster can afford. Here nothing fails but what the scenario says, the network neither loses nor delays, and
time goes in rounds: what was sent in one round arrives in the next. So the number of messages and bytes is
exact and repeatable, and the processor time is that of the coordinator and of the agents and of nothing else:

    python packages/leto-shadow/benchmarks/scale.py

Paper: sections 3.4 (the recovery) and 9 (what large jobs lose).
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from leto_shadow import agent_actions as todo
from leto_shadow import messages as m
from leto_shadow import wire
from leto_shadow.actions import AskDecision, HostStore
from leto_shadow.agent_core import AgentCore
from leto_shadow.config import Deadlines, JobPolicy
from leto_shadow.coordinator import Coordinator
from leto_shadow.hub import Hub, HubOutput
from leto_shadow.link import Link, decode_frame, encode_frame
from leto_shadow.phases import Phase
from leto_shadow.progress import Phase as TrainerPhase

__all__ = ["Cost", "Failing", "ScaledJob", "measure"]

ROUND_S = 0.001
"""Simulated time between two rounds."""

_ROUNDS = 400  # a recovery takes about twenty; more means that it stands still
_SUMMARY = b"s" * 64  # as long as leto_rmu's
_DECISION = b"d" * 64


class Failing(StrEnum):
    """What fails, and so which way the recovery goes."""

    TRAINER = "trainer"
    """An active trainer dies; shadows wait at L3."""
    TRAINER_COLD = "trainer, no shadows"
    """The same while no shadow exists: the recovery starts processes first."""
    MANAGER = "manager"
    """A state manager dies: fresh managers for all ranks."""


@dataclass
class Cost:
    """What one stretch of a job took. Bytes are those of frames, without ZeroMQ's and TCP's own."""

    up: Counter[str] = field(default_factory=Counter)
    """Messages from agents to the coordinator, by kind."""
    down: Counter[str] = field(default_factory=Counter)
    """Messages from the coordinator to agents, by kind."""
    up_bytes: int = 0
    down_bytes: int = 0
    rounds: int = 0
    """Rounds of messages that follow from each other: what a large distance would cost."""
    coordinator_s: float = 0.0
    """Processor seconds of the coordinator with its links."""
    agents_s: float = 0.0
    """Processor seconds of all agents together."""


class _Node:
    """One real agent core with its link, and made-up processes that do at once what they are told."""

    def __init__(self, index: int, local_ranks: int, policy: JobPolicy) -> None:
        self.index = index
        self.agent = AgentCore(index, local_ranks, "host", policy.deadlines, (), 0.0)
        self.link = Link(f"session-{index}")
        self.levels: dict[int, int] = {}


class ScaledJob:
    """A job of ``nodes`` nodes. `settle` runs it until nothing is under way any more."""

    def __init__(self, nodes: int, local_ranks: int = 1, shadow_level: int = 3) -> None:
        # Rounds are short and never many: nothing here may run into a deadline.
        policy = JobPolicy(deadlines=Deadlines(), shadow_level=shadow_level)
        self.now = 0.0
        self.cost = Cost()
        self.hub = Hub(Coordinator(nodes, policy, 0.0), beat_s=1e9)
        self.nodes = [_Node(index, local_ranks, policy) for index in range(nodes)]
        self._local_ranks = local_ranks
        self._to_hub: list[tuple[int, bytes]] = []
        self._to_nodes: list[tuple[int, bytes]] = []
        self._answers: list[Callable[[], None]] = []
        self._hub_answers: list[Callable[[], HubOutput]] = []
        for node in self.nodes:
            self._carry(node, node.agent.start())

    @property
    def phase(self) -> Phase:
        """Where the coordinator is."""
        return self.hub.coordinator.phase

    @property
    def busy(self) -> bool:
        """Whether anything is under way."""
        return bool(self._to_hub or self._to_nodes or self._answers or self._hub_answers)

    def settle(self, until: Phase | None = None) -> Cost:
        """Run until nothing is under way, or until the coordinator is in ``until``; return what all took
        since the last call."""
        while self.busy and self.cost.rounds < _ROUNDS:
            self._round()
            if until is not None and self.phase is until:
                break
        if until is not None and self.phase is not until:
            raise RuntimeError(f"{self.phase.value} after {self.cost.rounds} rounds, not {until.value}")
        cost, self.cost = self.cost, Cost()
        return cost

    def fail(self, what: Failing, rank: int = 0) -> None:
        """Let one process die."""
        node = self.nodes[rank // self._local_ranks]
        if what is Failing.MANAGER:
            self._carry(node, node.agent.manager_gone(rank, node.agent.epoch, "killed", self.now))
            return
        active = node.agent.active_of(rank)
        assert active is not None, "the rank trains"
        self._carry(node, node.agent.trainer_gone(active.sid, "killed", False, self.now))

    def beat(self, iteration: int) -> Cost:
        """Have every agent report progress once, and the coordinator look for hangs."""
        for node in self.nodes:
            for record in node.agent.trainers.values():
                if record.generation is not None:
                    node.agent.progress(
                        record.sid,
                        phase=int(TrainerPhase.FORWARD),
                        waiting=False,
                        iteration=iteration,
                        counter=iteration,
                        changed_s=self.now,
                    )
            beat = node.agent.beat(self.now)
            self._post(node, node.link.bare(m.encode(beat)))
        self._round()
        cost, self.cost = self.cost, Cost()
        return cost

    # --- one round --------------------------------------------------------------------------------

    def _round(self) -> None:
        self.now += ROUND_S
        self.cost.rounds += 1
        to_hub, self._to_hub = self._to_hub, []
        to_nodes, self._to_nodes = self._to_nodes, []
        answers, self._answers = self._answers, []
        hub_answers, self._hub_answers = self._hub_answers, []

        begun_s = time.process_time()
        outputs = [self.hub.receive(node, data, self.now) for node, data in to_hub]
        outputs += [answer() for answer in hub_answers]
        outputs.append(self.hub.tick(self.now))
        self.cost.coordinator_s += time.process_time() - begun_s
        for output in outputs:
            self._sort(output)

        begun_s = time.process_time()
        for index, data in to_nodes:
            node = self.nodes[index]
            for payload in node.link.receive(decode_frame(data)):
                self._carry(node, node.agent.receive(m.decode_to_agent(payload), self.now))
        for act in answers:
            act()
        for index in {index for index, _ in to_nodes}:
            node = self.nodes[index]
            for frame in node.link.poll(self.now):
                self._post(node, frame)
        self.cost.agents_s += time.process_time() - begun_s

    def _sort(self, output: HubOutput) -> None:
        for node, data in output.frames:
            self._to_nodes.append((node, data))
            self.cost.down[_kind(data, m.decode_to_agent)] += 1
            self.cost.down_bytes += len(data)
        for action in output.local:
            if isinstance(action, HostStore):
                world = action.world
                self._hub_answers.append(
                    lambda world=world: self.hub.store_ready(world, "host", 1, self.now)  # type: ignore[misc]
                )
            elif isinstance(action, AskDecision):
                generation = action.generation
                self._hub_answers.append(
                    lambda generation=generation: self.hub.decided(generation, _DECISION, "", self.now)  # type: ignore[misc]
                )

    def _post(self, node: _Node, frame: object) -> None:
        data = encode_frame(frame)  # type: ignore[arg-type]
        self._to_hub.append((node.index, data))
        self.cost.up[_kind(data, m.decode_from_agent)] += 1
        self.cost.up_bytes += len(data)

    # --- made-up processes ------------------------------------------------------------------------

    def _carry(self, node: _Node, actions: Sequence[todo.AgentAction]) -> None:
        for action in actions:
            if isinstance(action, todo.Tell):
                self._post(node, node.link.send(m.encode(action.message), self.now))
            elif not isinstance(action, todo.Note):
                self._answers.append(lambda action=action: self._answer(node, action))  # type: ignore[misc]

    def _answer(self, node: _Node, action: todo.AgentAction) -> None:
        agent, now = node.agent, self.now
        match action:
            case todo.SpawnTrainer(sid=sid, rank=rank):
                node.levels[sid] = 0
                self._carry(node, agent.trainer_spawned(sid, sid, now))
                self._carry(node, agent.trainer_says(sid, wire.Hello(sid, rank), now))
            case todo.KillTrainer(sid=sid):
                if sid in agent.trainers:
                    self._carry(node, agent.trainer_gone(sid, "killed", False, now))
            case todo.StartManager(rank=rank, epoch=epoch):
                self._carry(node, agent.manager_up(rank, epoch, "socket", now))
            case todo.KillManager(rank=rank, epoch=epoch):
                self._carry(node, agent.manager_gone(rank, epoch, "killed", now))
            case todo.RepairRank(rank=rank, generation=generation, epoch=epoch):
                self._carry(node, agent.repair_done(rank, generation, epoch, 0, None, now))
            case todo.TellTrainer(sid=sid, message=told):
                self._hear(node, sid, told)

    def _hear(self, node: _Node, sid: int, told: wire.AgentMessage) -> None:
        record = node.agent.trainers.get(sid)
        if record is None:
            return
        said: list[wire.TrainerMessage] = []
        match told:
            case wire.Advance(level=level, world_id=world):
                reached = node.levels[sid] = max(level, node.levels[sid])
                said = [wire.LevelReached(step, world) for step in range(record.level + 1, reached + 1)]
            case wire.Promote(generation=generation):
                said = [wire.Summary(_SUMMARY, generation)]
            case wire.Decision(generation=generation):
                said = [wire.Resumed(0, "in-place", {}, generation)]
        for message in said:
            self._carry(node, node.agent.trainer_says(sid, message, self.now))


def _kind(data: bytes, decode: Callable[[bytes], object]) -> str:
    payload = decode_frame(data).payload
    return type(decode(payload)).__name__ if payload else "acknowledgement"


def measure(nodes: int, failing: Failing, local_ranks: int = 1) -> tuple[Cost, Cost, Cost]:
    """Run one recovery; return what it took until all ranks train again, what the shadows took that are
    prepared behind it, and what one round of beats takes."""
    level = 0 if failing is Failing.TRAINER_COLD else 3
    job = ScaledJob(nodes, local_ranks, level)
    job.settle()
    assert job.phase is Phase.TRAINING, f"the job starts, found {job.phase.value}"
    gc.collect()
    gc.freeze()  # the coordinator of a real job has no agents in its memory for the collector to look at
    job.fail(failing, rank=nodes * local_ranks // 2)
    recovery = job.settle(until=Phase.TRAINING)
    shadows = job.settle()
    job.beat(1)
    beat = job.beat(2)
    gc.unfreeze()
    return recovery, shadows, beat
