"""Simulated trainers and state managers: what the protocol sees of them, and the memory they leave.

The model of training is the least that makes the invariants meaningful: a rank's memory holds the
iteration it is in, whether its gradients are protected and whether the global sync has passed; a barrier lies
between the two (I-3). A trainer refuses nothing by itself: a promotion, attach or write that the protocol
should have prevented is a `ViolationError` on the spot.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from leto_shadow import wire
from leto_shadow.progress import Phase
from leto_shadow.simulation.invariants import ViolationError

if TYPE_CHECKING:
    from leto_shadow.simulation.cluster import Cluster

__all__ = ["SimManager", "SimTrainer", "Vote", "decide"]


class Vote(msgspec.Struct, frozen=True):
    """Summary of one rank: iteration -1 means fresh memory; ``checkpoints`` are the steps it can see."""

    rank: int
    generation: int
    epoch: int
    iteration: int
    protected: bool
    synced: bool
    checkpoints: tuple[int, ...]


def decide(summaries: Sequence[bytes], world_size: int) -> bytes:
    """Decide like leto_rmu, and check what leto_shadow owes it: all ranks, one generation, one epoch."""
    votes = [msgspec.msgpack.decode(summary, type=Vote) for summary in summaries]
    if [vote.rank for vote in votes] != list(range(world_size)):
        raise ViolationError(f"I-5: the decision saw ranks {[vote.rank for vote in votes]} of {world_size}")
    if len({vote.generation for vote in votes}) != 1:
        raise ViolationError(f"I-5: summaries of generations {sorted({vote.generation for vote in votes})}")
    if len({vote.epoch for vote in votes}) != 1:
        raise ViolationError("I-5: some ranks have fresh managers, others retained memory")
    if any(vote.iteration < 0 for vote in votes):  # a first start or a restore that was interrupted, too
        common = set.intersection(*(set(vote.checkpoints) for vote in votes))
        return msgspec.msgpack.encode((max(common), "checkpoint") if common else (0, "fresh"))
    target = max(vote.iteration if not vote.synced else vote.iteration + 1 for vote in votes)
    for vote in votes:
        if target - vote.iteration > 1:
            raise ViolationError(
                f"I-3: rank {vote.rank} at {vote.iteration}, another one goes on at {target}"
            )
        if target - vote.iteration == 1 and not vote.protected:
            raise ViolationError(
                f"I-3: an update of {vote.iteration} began, rank {vote.rank} has no gradients"
            )
    return msgspec.msgpack.encode((target, "in-place"))


@dataclass
class SimManager:
    """Retained memory of one rank in one epoch."""

    rank: int
    epoch: int
    alive: bool = True
    iteration: int = -1
    protected: bool = False
    synced: bool = False
    writer: SimTrainer | None = None
    newest: int = -1

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


@dataclass
class SimTrainer:
    """One process. Its next step is always one callback, dropped if it died or hangs meanwhile."""

    cluster: Cluster
    node: int
    rank: int
    sid: int
    alive: bool = True
    hung: bool = False
    level: int = 0
    world: int = 0
    connecting: int = 0
    generation: int | None = None
    manager: SimManager | None = None
    inbox: list[wire.Advance] = field(default_factory=list)
    busy: bool = False
    phase: Phase = Phase.INIT
    iteration: int = 0
    counter: int = 0
    changed_s: float = 0.0

    # --- mechanics --------------------------------------------------------------------------------

    def later(self, low_s: float, high_s: float, step: Callable[[], None]) -> None:
        def run() -> None:
            if self.alive and not self.hung:
                step()

        self.cluster.clock.after(self.cluster.rng.uniform(low_s, high_s), run)

    def say(self, message: wire.TrainerMessage) -> None:
        self.cluster.trainer_says(self, message)

    def enter(self, phase: Phase) -> None:
        self.phase, self.changed_s = phase, self.cluster.clock.now
        self.counter += 1

    def start(self) -> None:
        self.busy = True

        def hello() -> None:
            self.say(wire.Hello(pid=self.sid, rank=self.rank))
            self.busy = False
            self.work()

        self.later(0.1, 1.0, hello)

    def fail(self, error: str, *, secondary: bool = False) -> None:
        """Report an error and exit with status 1."""
        self.say(wire.Failed("sim", error, secondary))
        self.hung = True  # it takes no further step
        self.cluster.clock.after(self.cluster.rng.uniform(0, 0.2), lambda: self.cluster.die(self, "exit 1"))

    # --- shadow -----------------------------------------------------------------------------------

    def hear(self, message: wire.AgentMessage) -> None:
        """Take one message of the agent."""
        if not self.alive:
            return
        match message:
            case wire.Advance():
                self.inbox.append(message)
                self.work()
            case wire.Promote():
                self.promoted(message)
            case wire.Decision(payload=payload):
                if self.hung:
                    return
                self.cluster.note_decision(self, payload)
                iteration, source = msgspec.msgpack.decode(payload, type=tuple[int, str])
                self.later(0.05, 0.5, lambda: self.recover(iteration, source))
            case _:
                raise ViolationError(f"a trainer got {message}")

    def work(self) -> None:
        if self.busy or not self.inbox or self.hung:
            return
        self.busy = True
        to = self.inbox.pop(0)
        if self.level == 3 and (to.level < 3 or to.world_id != self.world):
            if self.cluster.rng.random() < self.cluster.plan.stuck_demotions:
                self.hung = True
                return
            self.level = 2
        self.world = to.world_id
        self.climb(to, again=True)

    def climb(self, to: wire.Advance, *, again: bool) -> None:
        if again and self.level >= to.level:
            self.say(wire.LevelReached(self.level, self.world))
        if self.level >= to.level:
            self.busy = False
            self.work()
            return
        if self.level < 2:
            self.later(0.1, 0.8, lambda: self.reached(to))
        else:
            if to.world_id not in self.cluster.stores:
                self.later(
                    0.1, 0.5, lambda: self.fail("the store is gone: connection refused", secondary=True)
                )
                return
            self.connecting = to.world_id
            self.wait_for_peers(to)

    def wait_for_peers(self, to: wire.Advance) -> None:
        peers = [t for t in self.cluster.trainers.values() if t.alive and t.connecting == to.world_id]
        if len(peers) == self.cluster.world_size:
            self.cluster.groups.setdefault(to.world_id, {t.rank: t for t in peers})
        if to.world_id in self.cluster.groups:
            self.later(0.01, 0.3, lambda: self.reached(to))
        elif to.world_id not in self.cluster.stores:
            self.later(0.1, 0.5, lambda: self.fail("a peer is gone", secondary=True))
        else:
            self.later(0.1, 0.3, lambda: self.wait_for_peers(to))

    def reached(self, to: wire.Advance) -> None:
        if self.cluster.rng.random() < self.cluster.plan.shadow_errors:
            self.fail("error while preparing")
            return
        self.level += 1
        self.say(wire.LevelReached(self.level, self.world))
        self.climb(to, again=False)

    # --- active -----------------------------------------------------------------------------------

    def promoted(self, message: wire.Promote) -> None:
        for other in self.cluster.trainers.values():
            old = other.generation is not None and other.generation < message.generation
            if other.alive and old:
                raise ViolationError(
                    f"I-4: rank {self.rank} is promoted to generation {message.generation} while rank "
                    f"{other.rank} of generation {other.generation} lives"
                )
        if self.level != 3 or self.world != message.world_id:
            raise ViolationError(
                f"promoted in world {message.world_id}, stands at L{self.level} of {self.world}"
            )
        group = self.cluster.groups[self.world]
        if group.get(self.rank) is not self:
            raise ViolationError(f"rank {self.rank} is promoted into a world that formed without it")
        broken = [rank for rank, peer in group.items() if not peer.alive and peer.level_lost]
        if broken:
            raise ViolationError(f"promoted in world {self.world}, whose ranks {broken} were lost before")
        self.generation = message.generation
        if not self.hung:
            self.later(0.02, 0.4, self.attach)

    @property
    def level_lost(self) -> bool:
        """It died before it was promoted, and long enough ago for everybody to know."""
        return self.generation is None and self.cluster.known_dead(self)

    def attach(self) -> None:
        manager = self.cluster.manager_of(self.rank)
        if manager is None:
            self.fail("the manager is gone")
            return
        manager.become_writer(self)
        self.manager = manager
        vote = Vote(
            self.rank,
            self.generation or 0,
            manager.epoch,
            manager.iteration,
            manager.protected,
            manager.synced,
            tuple(sorted(self.cluster.checkpoints[self.rank])),
        )
        self.enter(Phase.EXCHANGE)
        assert self.generation is not None
        self.say(wire.Summary(msgspec.msgpack.encode(vote), self.generation))

    def recover(self, iteration: int, source: str) -> None:
        manager = self.live_manager()
        if manager is None:
            return
        manager.iteration, manager.protected, manager.synced = iteration, False, False
        self.iteration = iteration
        self.cluster.note_resumed(self, iteration, source)
        assert self.generation is not None
        self.say(wire.Resumed(iteration, source, {}, self.generation))  # type: ignore[arg-type]
        self.begin_iteration()

    def live_manager(self) -> SimManager | None:
        assert self.manager is not None
        if not self.manager.alive and self.cluster.rng.random() < 0.5:
            self.fail("the manager is gone")  # the other half does not notice: its mappings live on
            return None
        return self.manager

    def begin_iteration(self) -> None:
        manager = self.live_manager()
        if manager is None:
            return
        if self.iteration == self.cluster.plan.iterations:
            assert self.generation is not None
            self.say(wire.Finished(self.iteration))
            self.enter(Phase.DONE)
            self.later(0.0, 0.5, lambda: self.cluster.die(self, "exit 0", clean=True))
            return
        self.enter(Phase.FORWARD)
        if self.iteration == self.cluster.plan.error_at and self.rank == 0:
            self.later(0.1, 0.5, lambda: self.fail(f"ValueError at iteration {self.iteration}"))
            return
        self.later(0.3, 0.8, self.protect)

    def protect(self) -> None:
        manager = self.live_manager()
        if manager is None:
            return
        manager.protected = True
        self.enter(Phase.BARRIER)
        self.barrier()

    def barrier(self) -> None:
        group = self.cluster.groups[self.world]
        ready = 0
        for peer in group.values():
            beyond = peer.iteration > self.iteration
            if beyond or (peer.iteration == self.iteration and peer.phase in (Phase.BARRIER, Phase.UPDATE)):
                ready += 1
            elif not peer.alive and self.cluster.rng.random() < self.cluster.plan.peers_notice:
                self.later(0.1, 1.0, lambda: self.fail("connection closed by peer", secondary=True))
                return
        if ready < self.cluster.world_size:
            self.later(0.1, 0.2, self.barrier)
            return
        for rank in range(self.cluster.world_size):
            other = self.cluster.memory_of(rank)
            if (
                other.alive
                and other.iteration <= self.iteration
                and not (other.iteration == self.iteration and other.protected)
            ):
                raise ViolationError(
                    f"I-3: rank {self.rank} updates {self.iteration}, rank {rank} is unprotected"
                )
        manager = self.live_manager()
        if manager is None:
            return
        manager.synced = True
        self.enter(Phase.UPDATE)
        self.later(0.1, 0.4, self.commit)

    def commit(self) -> None:
        manager = self.live_manager()
        if manager is None:
            return
        if manager.alive and manager.writer is not self:
            raise ViolationError(f"I-4: trainer {self.sid} writes the memory of another writer")
        self.iteration += 1
        manager.iteration, manager.protected, manager.synced = self.iteration, False, False
        if self.iteration % self.cluster.plan.checkpoint_interval == 0:
            self.cluster.checkpoints[self.rank].add(self.iteration)
        self.begin_iteration()
