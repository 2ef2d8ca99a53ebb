"""Simulated trainers: what the protocol sees of them, and the memory they leave.

The model of training is the least that makes the invariants meaningful: a rank's memory holds the iteration
it is in, whether its gradients are protected and whether the global sync has passed; a barrier lies between
the two (I-3). Where the plan has it, gradients and the result of the sync come by collectives that are
aborted under survivors and return garbage (I-6).

The death of a writer may lose pages, within the code's tolerance or beyond it, and nobody knows of them
before the repair; a death while a checkpoint is written leaves it torn (I-6). A trainer refuses nothing by
itself: a promotion, attach, write or state that the protocol should have prevented is a `ViolationError` on
the spot.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from leto_shadow import wire
from leto_shadow.progress import Phase
from leto_shadow.simulation.decision import Verdict, Vote
from leto_shadow.simulation.invariants import ViolationError, check_verified
from leto_shadow.simulation.memory import SimManager

if TYPE_CHECKING:
    from leto_shadow.simulation.cluster import Cluster
    from leto_shadow.simulation.node import SimNode

__all__ = ["Meeting", "SimTrainer"]

_TRAINING = (Phase.FORWARD, Phase.REDUCE, Phase.SYNC, Phase.BARRIER, Phase.UPDATE, Phase.CHECKPOINT)
"""Here the main thread finds out by itself that it is to leave; elsewhere it waits for a message, or asks."""


@dataclass
class Meeting:
    """A collective of a world: who has come, who waits in it, and whether what it returns is garbage."""

    ranks: set[int]
    arrived: set[int] = field(default_factory=set)
    waiting: set[int] = field(default_factory=set)
    broken: bool = False


@dataclass
class SimTrainer:
    """One process. Its next step is always one callback, dropped if it died or hangs meanwhile."""

    cluster: Cluster
    home: SimNode
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
    life: int = 0
    """How often it has become a shadow again; steps of an earlier life are dropped."""
    asked: bool = False
    """It is to retire."""
    hears_at: float = 0.0
    """When the last message that is under way to it arrives."""
    lost: bool = False
    """It has left its training because a peer is gone."""
    aborted: bool = False
    """Its communicators are."""
    true_norm: bool = True
    """What the global sync of this iteration has returned to it."""
    known_rank: int = -1
    """Rank that the process itself knows of; -1 on a spare node."""

    # --- mechanics --------------------------------------------------------------------------------

    def later(self, low_s: float, high_s: float, step: Callable[[], None]) -> None:
        life = self.life

        def run() -> None:
            if self.alive and not self.hung and life == self.life:
                step()

        self.cluster.clock.after(self.cluster.rng.uniform(low_s, high_s), run)

    def say(self, message: wire.TrainerMessage) -> None:
        self.cluster.trainer_says(self, message)

    def enter(self, phase: Phase) -> None:
        self.phase, self.changed_s = phase, self.cluster.clock.now
        self.counter += 1

    def start(self) -> None:
        self.busy = True
        self.known_rank = max(self.rank, -1)

        def hello() -> None:
            self.say(wire.Hello(pid=self.sid, rank=self.known_rank, retires=self.cluster.plan.retires))
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
            case wire.TakeRank(rank=rank):
                self.known_rank = rank
            case wire.Advance():
                self.inbox.append(message)
                self.work()
            case wire.Promote():
                self.promoted(message)
            case wire.Decision(payload=payload):
                if self.hung:
                    return
                verdict = msgspec.msgpack.decode(payload, type=Verdict)
                if verdict.generation != self.generation:
                    raise ViolationError(
                        f"I-6: rank {self.rank} of generation {self.generation} was told what was decided on "
                        f"the summaries of generation {verdict.generation}"
                    )
                self.cluster.note_decision(self, payload)
                if not self.lost and not self.asked:
                    self.later(0.05, 0.5, lambda: self.recover(verdict.iteration, verdict.source))
            case wire.Retire(generation=generation):
                self.asked_to_retire(generation)
            case _:
                raise ViolationError(f"protocol: a trainer got {message}")

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
            if not self.store_open(to.world_id):
                self.later(
                    0.1, 0.5, lambda: self.fail("the store is gone: connection refused", secondary=True)
                )
                return
            self.connecting = to.world_id
            self.wait_for_peers(to)

    def wait_for_peers(self, to: wire.Advance) -> None:
        world = self.home.attempt, to.world_id
        peers = [
            t for t in self.cluster.trainers.values() if t.alive and (t.home.attempt, t.connecting) == world
        ]
        if len(peers) == self.cluster.world_size:
            self.cluster.groups.setdefault(world, {t.rank: t for t in peers})
        if world in self.cluster.groups:
            self.later(0.01, 0.3, lambda: self.reached(to))
        elif not self.store_open(to.world_id):
            self.later(0.1, 0.5, lambda: self.fail("a peer is gone", secondary=True))
        else:
            self.later(0.1, 0.3, lambda: self.wait_for_peers(to))

    def store_open(self, world: int) -> bool:
        """The store of a world of this trainer's attempt listens."""
        return self.home.attempt == self.cluster.torchrun.attempt and world in self.cluster.stores

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
            mine = other.home.attempt == self.home.attempt
            old = other.generation is not None and (not mine or other.generation < message.generation)
            if other.alive and old and not self.cluster.written_off(other):
                raise ViolationError(
                    f"I-4: rank {self.rank} is promoted to generation {message.generation} while rank "
                    f"{other.rank} of generation {other.generation} lives"
                )
        if self.level != 3 or self.world != message.world_id:
            raise ViolationError(
                f"levels: promoted in world {message.world_id}, stands at L{self.level} of {self.world}"
            )
        if self.known_rank != self.rank:
            raise ViolationError(f"levels: {self.known_rank} is promoted in the place of rank {self.rank}")
        group = self.cluster.groups[self.home.attempt, self.world]
        if group.get(self.rank) is not self:
            raise ViolationError(f"levels: rank {self.rank} is promoted into a world that formed without it")
        broken = [rank for rank, peer in group.items() if not peer.alive and peer.level_lost]
        if broken:
            raise ViolationError(
                f"levels: promoted in world {self.world}, whose ranks {broken} were lost before"
            )
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
            not (manager.lost and manager.localized and manager.beyond),
            tuple(sorted(self.visible_checkpoints())),
        )
        self.enter(Phase.EXCHANGE)
        assert self.generation is not None
        self.say(wire.Summary(msgspec.msgpack.encode(vote), self.generation))

    def visible_checkpoints(self) -> set[int]:
        """Those with a completion marker."""
        return self.cluster.checkpoints[self.rank]

    def recover(self, iteration: int, source: str) -> None:
        manager = self.live_manager()
        if manager is None:
            return
        check_verified(self, manager, iteration, source)
        manager.lost = manager.localized = manager.beyond = False  # reconstructed, or overwritten
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
        if self.leaves():
            return
        self.enter(Phase.FORWARD)
        if self.iteration == self.cluster.plan.error_at and self.rank == 0:
            self.later(0.1, 0.5, lambda: self.fail(f"ValueError at iteration {self.iteration}"))
            return
        self.later(0.3, 0.8, self.reduce)

    def reduce(self) -> None:
        self.collective(Phase.REDUCE, self.protect)

    def protect(self, true: bool) -> None:
        """The device marks it as soon as the reduction returns: nobody has looked yet."""
        manager = self.live_manager()
        if manager is None:
            return
        manager.protected, manager.true_gradients = True, true
        self.synchronize()

    def synchronize(self) -> None:
        self.collective(Phase.SYNC, self.vouch)

    def vouch(self, true: bool) -> None:
        """The barrier is entered by those whose world was whole when they had the result of the sync."""
        self.true_norm = true
        if self.leaves():
            return
        self.enter(Phase.BARRIER)
        self.barrier()

    # --- collectives that may return garbage --------------------------------------------------------

    def collective(self, phase: Phase, then: Callable[[bool], None]) -> None:
        """Go on with whether the result is true. Where nothing returns garbage, it always is."""
        if not self.cluster.plan.garbage:
            then(True)
            return
        self.enter(phase)
        self.later(0.0, 0.4, lambda: self.join(phase, then))

    def join(self, phase: Phase, then: Callable[[bool], None]) -> None:
        ranks = set(range(self.cluster.world_size))
        if self.cluster.plan.split:
            if phase is Phase.REDUCE:
                ranks = {rank for rank in ranks if rank % 2 == self.rank % 2}
            else:
                ranks = {rank for rank in ranks if rank // 2 == self.rank // 2}
        name = self.home.attempt, self.world, self.iteration, phase, min(ranks)
        meeting = self.cluster.meetings.setdefault(name, Meeting(ranks))
        meeting.arrived.add(self.rank)
        meeting.waiting.add(self.rank)
        meeting.broken |= self.aborted and len(ranks) > 1
        self.later(0.0, 0.05, lambda: self.meet(meeting, then))

    def meet(self, meeting: Meeting, then: Callable[[bool], None]) -> None:
        if not meeting.broken and meeting.arrived != meeting.ranks:
            self.later(0.05, 0.1, lambda: self.meet(meeting, then))  # a dead peer is not noticed
            return
        meeting.waiting.discard(self.rank)
        then(not meeting.broken)

    def leaves(self) -> bool:
        """The main thread looks whether it has been told that its world is over, and leaves its training."""
        if not (self.cluster.plan.garbage and self.asked):
            return False
        self.leave()
        return True

    def end_world(self) -> None:
        """First the main thread is told, then the communicators are aborted."""
        self.told()
        self.abort()

    def told(self) -> None:
        self.asked = True

    def abort(self) -> None:
        """Whatever this process has a part in returns garbage, to itself and to its peers."""
        self.aborted = True
        for (attempt, world, *_), meeting in self.cluster.meetings.items():
            if (attempt, world) == (self.home.attempt, self.world) and self.rank in meeting.waiting:
                meeting.broken |= len(meeting.ranks) > 1

    def barrier(self) -> None:
        group = self.cluster.groups[self.home.attempt, self.world]
        ready = 0
        for peer in group.values():
            beyond = peer.iteration > self.iteration
            if beyond or (peer.iteration == self.iteration and peer.phase in (Phase.BARRIER, Phase.UPDATE)):
                ready += 1
            elif not peer.alive and self.cluster.rng.random() < self.cluster.plan.peers_notice:
                self.later(0.1, 1.0, self.peer_lost)
                return
        if ready < self.cluster.world_size:
            if self.leaves():  # its peers have left, or are dead
                return
            self.later(0.1, 0.2, self.barrier)
            return
        self.update()

    # --- retirement -------------------------------------------------------------------------------

    def peer_lost(self) -> None:
        """A collective broke."""
        error = "connection closed by peer"
        if not self.cluster.plan.retires:
            self.fail(error, secondary=True)
            return
        if self.asked:
            return  # on its way already
        self.stop_training()
        assert self.generation is not None
        self.say(wire.PeerLost(error, self.generation))
        self.lost = True

    def stop_training(self) -> None:
        """No step of the training comes any more."""
        self.life += 1

    def asked_to_retire(self, generation: int) -> None:
        if generation != self.generation:
            raise ViolationError(f"protocol: trainer {self.sid} is to leave generation {generation}")
        if self.hung:
            return
        plan, rng = self.cluster.plan, self.cluster.rng
        if rng.random() < plan.deaf_survivors and not self.lost:
            return  # it computes; its deadline passes, or its own training goes on meanwhile
        if rng.random() < plan.lying_survivors:
            self.asked = not plan.garbage
            self.say(wire.Released(generation))  # and trains on
            return
        self.end_world()
        if not plan.garbage or self.lost or self.phase not in _TRAINING:
            self.leave()

    def leave(self) -> None:
        """`train` has ended."""
        plan, rng = self.cluster.plan, self.cluster.rng
        generation = self.generation
        assert generation is not None
        self.stop_training()
        if rng.random() < plan.dying_survivors / 2:
            self.later(0.0, 0.2, lambda: self.cluster.die(self, "SIGSEGV"))
            return
        self.later(0.0, 0.2, lambda: self.give_up_writing(generation))

    def give_up_writing(self, generation: int) -> None:
        """From here on it is no trainer of that generation."""
        plan, rng = self.cluster.plan, self.cluster.rng
        if self.manager is not None:
            self.manager.release(self)
        self.generation, self.manager = None, None
        self.level = self.world = self.connecting = self.iteration = 0
        self.asked = self.lost = self.aborted = False
        self.busy = True
        self.inbox.clear()
        self.enter(Phase.INIT)
        self.say(wire.Released(generation))
        if rng.random() < plan.stuck_survivors:
            self.hung = True
        elif rng.random() < plan.dying_survivors / 2:
            self.later(0.0, 0.5, lambda: self.cluster.die(self, "SIGKILL"))
        else:
            self.later(0.0, 0.5, lambda: self.shadow_again(generation))

    def shadow_again(self, generation: int) -> None:
        self.level = self.cluster.rng.choice([1, 2])
        self.busy = False
        self.say(wire.Retired(self.level, generation))

    def update(self) -> None:
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
            if other.alive and other.iteration == self.iteration and not other.true_gradients:
                raise ViolationError(
                    f"I-6: rank {self.rank} updates {self.iteration}, rank {rank} has garbage for gradients"
                )
        if not self.true_norm:
            raise ViolationError(f"I-6: rank {self.rank} updates {self.iteration} with garbage for a norm")
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
        done = self.cluster.checkpoints[self.rank]
        if self.iteration % self.cluster.plan.checkpoint_interval or self.iteration in done:
            self.begin_iteration()
            return
        self.cluster.torn_checkpoints[self.rank].add(self.iteration)
        self.enter(Phase.CHECKPOINT)
        self.later(0.05, 0.3, self.complete_checkpoint)

    def complete_checkpoint(self) -> None:
        """The completion marker is written last (case 12)."""
        self.cluster.torn_checkpoints[self.rank].discard(self.iteration)
        self.cluster.checkpoints[self.rank].add(self.iteration)
        self.begin_iteration()
