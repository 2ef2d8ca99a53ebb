"""The node agent without I/O: managers and trainers of one node, for the coordinator (paper section 3.4).

It takes messages of the coordinator and of trainers, ends of processes and the time, and returns values that
the shell (`leto_shadow.agent_main`) carries out.

Upheld here: I-4 (`Fenced` is sent only when every promoted process of an older generation is gone, with its
whole process tree), I-7 (at shutdown `Bye` and the end come only when no process is left); messages of an
older generation are dropped and counted (case 7).
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from leto_shadow import messages as m
from leto_shadow import wire
from leto_shadow.actions import UnexpectedEventError
from leto_shadow.agent_actions import (
    AgentAction,
    AnswerHook,
    Exit,
    FenceManager,
    KillManager,
    KillTrainer,
    Note,
    RepairRank,
    SpawnTrainer,
    Tell,
    TellTrainer,
)
from leto_shadow.config import BEAT_S, Deadlines
from leto_shadow.drills import Drill, Lose
from leto_shadow.exit_codes import KEEPS_MEMORY, ExitCode
from leto_shadow.localization import Ending, must_read
from leto_shadow.node_managers import ManagerStatus, NodeManagers
from leto_shadow.oom_protocol import Ask, Report, Verdict
from leto_shadow.progress import Phase
from leto_shadow.reclaim import ReclaimDesk, holds_memory
from leto_shadow.trainer_states import ACTIVE, ALLOWED, TrainerRecord, TrainerState

__all__ = ["AgentCore", "ManagerStatus"]

_KILL_AGAIN_S = 1.0
_ENDING_S = 0.02  # after its channel: where no GPU is, the end of a process follows at once, and says more
_TELL_BYTES = 32 << 20  # memory that the coordinator needs to hear of


class AgentCore:
    """State of one node. ``drills`` are those of the whole job; each rank gets its own unfired ones.

    ``succession``: if this agent fails, another one may be started in its place and take over its managers.
    """

    def __init__(
        self,
        node: int,
        local_ranks: int,
        host: str,
        deadlines: Deadlines,
        drills: tuple[Drill, ...],
        now: float,
        shadow_level: int = 3,
        *,
        succession: bool = False,
    ) -> None:
        self.node = node
        self.shadow_level = shadow_level
        self.local_ranks = local_ranks
        self.generation = 0
        self.epoch = 0
        self.world_size = 0
        self.beat_s = BEAT_S
        self.ranks = range(0)
        self.trainers: dict[int, TrainerRecord] = {}
        self.managers = NodeManagers()
        self.stale: Counter[str] = Counter()
        self.ending: Exit | None = None
        self.done = False
        self._host = host
        self._deadlines = deadlines
        self._drills = {drill.id: drill for drill in drills}
        self._losses: dict[int, list[tuple[str, Lose, int]]] = {}
        self._heard = now
        self._now = now
        self._succession = succession
        self._held: list[m.Held] = []
        self._unfenced: set[int] = set()
        self._fence_owed = False
        self._repairing: set[int] = set()
        self._lost_pages = 0
        self._suspects: set[int] = set()  # ranks whose trainer may have met a memory error
        self._ended_at: dict[int, int] = {}
        self._reports_progress = False  # a script that never does is not watched for hangs
        self._reclaims = ReclaimDesk()
        self._out: list[AgentAction] = []

    def hold(self, held: m.Held, socket: str) -> None:
        """A dead agent's manager was found and taken over; before `start`."""
        self._held.append(held)
        self.managers.hold(held.rank, held.epoch, socket)

    def start(self) -> list[AgentAction]:
        """Report in."""
        return [
            Tell(
                m.Join(
                    self.node,
                    self.local_ranks,
                    self._host,
                    shadow_level=self.shadow_level,
                    held=tuple(self._held),
                )
            )
        ]

    # --- from the coordinator ---------------------------------------------------------------------

    def receive(self, message: m.ToAgent | m.Beat, now: float) -> list[AgentAction]:
        """Take one message of the coordinator."""
        self._now = self._heard = now
        if self.ending is not None or isinstance(message, m.Beat):
            return self._flush()
        if getattr(message, "generation", self.generation) < self.generation or (
            getattr(message, "epoch", self.epoch) < self.epoch
        ):
            self.stale[type(message).__name__] += 1
            return self._flush()
        match message:
            case m.Welcome(first_rank=first, world_size=world_size, beat_s=beat_s, spare=spare):
                self.beat_s = beat_s
                self.ranks = range(0) if spare else range(first, first + self.local_ranks)
                self.world_size = world_size
                self._out += self.managers.settle(self.ranks)
            case m.StartManagers(epoch=epoch):
                self._start_managers(epoch)
            case m.Adopt():
                self._adopt(message)
            case m.SpawnShadow(rank=rank, sid=sid, world=world):
                self.trainers[sid] = TrainerRecord(sid, rank, world)
                self._out.append(SpawnTrainer(sid, rank))
            case m.AdvanceShadow():
                self._advance(message)
            case m.DiscardShadow(sid=sid):
                trainer = self.trainers.get(sid)
                if trainer is not None:
                    trainer.discarded = True
                    self._kill(trainer)
            case m.Fence(generation=generation):
                self.generation = generation
                self._fence_owed = True
                self._repairing.clear()
                for trainer in self._older():
                    self._kill(trainer)
                self._maybe_fenced()
            case m.Repair():
                self._repair(message)
            case m.Promote():
                self._promote(message)
            case m.Decide(generation=generation, payload=payload):
                for trainer in self.trainers.values():
                    if trainer.generation == generation and trainer.state is TrainerState.EXCHANGED:
                        trainer.state = TrainerState.RESUMING
                        self._tell_trainer(trainer, wire.Decision(payload, generation))
            case m.Shutdown(exit_code=exit_code, reason=reason):
                self._shut_down(exit_code, reason)
        return self._flush()

    def _start_managers(self, epoch: int) -> None:
        assert not self._older(), "managers are replaced only after the fence"
        self.epoch = epoch
        self._losses.clear()  # what a drill wanted to lose is gone with its manager
        self._suspects.clear()
        self._out += self.managers.replace(epoch, self.ranks)

    def _start_manager(self, rank: int) -> None:
        self._out += self.managers.start(rank, self.epoch)

    def _adopt(self, message: m.Adopt) -> None:
        self.generation, self.epoch = message.generation, message.epoch
        self._fence_owed = True
        self._suspects.update(self.ranks)  # nobody saw how the trainers ended
        self._unfenced = set(self.ranks)
        for rank in self.ranks:
            if self.managers[rank].status is ManagerStatus.UP:
                self._out.append(FenceManager(rank, message.epoch, message.generation))
            else:
                self._tell(m.ManagerFailed(rank, message.epoch, "it ended before it was taken over"))
                self._unfenced.discard(rank)
        self._maybe_fenced()

    def _advance(self, message: m.AdvanceShadow) -> None:
        trainer = self.trainers.get(message.sid)
        if trainer is None or trainer.state not in (TrainerState.STARTING, TrainerState.SHADOW):
            return  # it failed, and the report of that is on its way
        trainer.world, trainer.asked = message.world, message.level
        trainer.level = min(trainer.level, message.level)
        self._tell_trainer(
            trainer, wire.Advance(message.level, message.world, message.store_host, message.store_port)
        )

    def _repair(self, message: m.Repair) -> None:
        if not self.managers.all_up(self.epoch, self.ranks):
            return  # ManagerFailed has been sent; it makes this failure fatal
        self._repairing = set(self.ranks)
        self._lost_pages = 0
        for rank in self.ranks:
            losses = tuple(self._losses.pop(rank, ()))
            read = rank in self._suspects
            self._out.append(RepairRank(rank, message.generation, message.epoch, losses, read))
        self._suspects.clear()

    def _promote(self, message: m.Promote) -> None:
        self.generation = message.generation
        assert not self._older(), "I-4: an older generation is alive on this node"
        shadows = {t.rank: t for t in self._alive() if t.generation is None and not t.discarded}
        for rank in self.ranks:
            trainer, manager = shadows.get(rank), self.managers[rank]
            if trainer is None:
                # Its ShadowFailed crossed the promotion on the wire.
                self._active_failed(rank, self.generation, "the shadow died before it was promoted")
                continue
            trainer.generation = message.generation
            ready = trainer.state is TrainerState.SHADOW and trainer.level == 3
            if not ready or trainer.world != message.world or manager.status is not ManagerStatus.UP:
                trainer.error = trainer.error or "the shadow or its manager was lost at promotion"
                self._kill(trainer, failed=True)
                continue
            trainer.state = TrainerState.PROMOTED
            drills = tuple(drill for drill in self._drills.values() if drill.rank == rank)
            self._tell_trainer(
                trainer, wire.Promote(message.generation, manager.socket, message.world, drills)
            )

    # --- from trainers ----------------------------------------------------------------------------

    def trainer_spawned(self, sid: int, pid: int, now: float) -> list[AgentAction]:
        self._now = now
        self.trainers[sid].pid = pid
        return self._flush()

    def trainer_says(self, sid: int, message: wire.TrainerMessage, now: float) -> list[AgentAction]:
        """Take one message of a trainer; those of a trainer that is being killed are dropped."""
        self._now = now
        trainer = self.trainers.get(sid)
        if trainer is None or trainer.state in (TrainerState.KILLED, TrainerState.FAILED):
            self.stale[type(message).__name__] += 1
            return self._flush()
        said = getattr(message, "generation", None)
        wrong_generation = said is not None and said != trainer.generation
        if trainer.state not in ALLOWED[type(message)] or wrong_generation:
            trainer.error = f"protocol: {type(message).__name__} in state {trainer.state.value}"
            self._kill(trainer, failed=True)
            return self._flush()
        self._trainer_says(trainer, message)
        return self._flush()

    def _trainer_says(self, trainer: TrainerRecord, message: wire.TrainerMessage) -> None:
        rank, generation = trainer.rank, trainer.generation
        match message:
            case wire.Hello(rank=claimed, protocol=protocol):
                if claimed != rank or protocol != wire.PROTOCOL:
                    trainer.error = f"protocol: rank {claimed}, version {protocol} in Hello"
                    self._kill(trainer, failed=True)
                    return
                trainer.state = TrainerState.SHADOW
            case wire.LevelReached(level=level, world_id=world):
                trainer.level = level
                self._tell(m.ShadowAt(rank, trainer.sid, world, level))
            case wire.Summary(payload=payload):
                assert generation is not None
                trainer.state = TrainerState.EXCHANGED
                self._tell(m.SummaryOf(rank, generation, payload))
            case wire.Resumed(iteration=iteration, source=source, breakdown=breakdown):
                assert generation is not None
                trainer.state = TrainerState.TRAINING
                trainer.iteration = iteration
                self._note(
                    "resumed",
                    rank=rank,
                    iteration=iteration,
                    source=source,
                    generation=generation,
                    breakdown=breakdown,
                )
                self._tell(m.ResumedOf(rank, generation, iteration, source, breakdown))
            case wire.Metrics(iteration=iteration, values=values):
                self._note(
                    "metrics", **{**values, "rank": rank, "iteration": iteration, "generation": generation}
                )
            case wire.Memory():
                self._memory(trainer, message)
            case wire.DrillFired(id=drill_id):
                self._drill_fired(trainer, drill_id)
            case wire.Finished(iteration=iteration):
                assert generation is not None
                trainer.state = TrainerState.FINISHED
                self._tell(m.FinishedOf(rank, generation, iteration))
            case wire.Failed(phase=phase, error=error):
                trainer.state = TrainerState.FAILED
                trainer.error = f"{phase}: {error}"
                trainer.secondary, trainer.python_error = message.secondary, message.python
                trainer.memory = message.memory
                trainer.kill_at = self._now + self._deadlines.exit_s

    def _drill_fired(self, trainer: TrainerRecord, drill_id: str) -> None:
        drill = self._drills.pop(drill_id, None)
        self._note("drill_fired", id=drill_id, rank=trainer.rank, generation=trainer.generation)
        trainer.fired_at = self._now
        if drill is None:
            return
        if drill.lose is not None:
            self._losses.setdefault(trainer.rank, []).append((drill.id, drill.lose, drill.seed))
        if drill.kind == "kill_manager":
            self._out.append(KillManager(trainer.rank, self.epoch))

    def progress(
        self, sid: int, *, phase: int, waiting: bool, iteration: int, counter: int, changed_s: float
    ) -> None:
        """Note what the shell read from the trainer's progress page."""
        trainer = self.trainers.get(sid)
        if trainer is not None:
            trainer.phase, trainer.waiting, trainer.iteration = phase, waiting, iteration
            trainer.counter, trainer.changed_s = counter, changed_s
            self._reports_progress |= trainer.state is TrainerState.TRAINING and phase > Phase.EXCHANGE

    def beat(self, clock_s: float) -> m.Beat:
        """Return the sign of life to send; ``clock_s`` is on the clock of the trainers' progress pages.

        A trainer whose allocation waits for memory does not hang: the hook has a deadline of its own.
        """
        for t in self.trainers.values():
            if self._reclaims.is_waiting(t.sid):
                t.excused_s = clock_s
        return m.Beat(
            self.node,
            self.generation,
            tuple(
                m.RankProgress(
                    t.rank,
                    self.generation,
                    t.iteration,
                    t.phase,
                    t.waiting,
                    t.counter,
                    t.changed_s,
                    max(0.0, clock_s - max(t.changed_s, t.excused_s)),
                )
                for t in self.trainers.values()
                if t.generation == self.generation
                and t.state is TrainerState.TRAINING
                and self._reports_progress
            ),
        )

    # --- memory of the device ---------------------------------------------------------------------

    def hook_asks(self, sid: int, ask: Ask, now: float) -> list[AgentAction]:
        """An allocation in trainer ``sid`` is about to fail; it is blocked until `AnswerHook`."""
        self._now = now
        trainer = self.trainers.get(sid)
        if trainer is None:
            return self._flush()
        holders = self._reclaims.ask(trainer, ask.sequence, self._alive())
        if not holders:
            self._out.append(AnswerHook(sid, ask.sequence, Verdict.NONE))
        for shadow in holders:
            if shadow.state in (TrainerState.STARTING, TrainerState.SHADOW):
                shadow.reclaimed, shadow.taken_by = True, self.generation
                trainer.took = (shadow.asked, shadow.level == shadow.asked)
                self._kill(shadow)
            elif shadow.state is TrainerState.FAILED:
                self._kill(shadow, failed=True)  # it is on its way out, but too slowly now
        return self._flush()

    def hook_reports(self, sid: int, report: Report, now: float) -> list[AgentAction]:
        """The allocation in trainer ``sid`` has its result."""
        self._now = now
        trainer = self.trainers.get(sid)
        if trainer is None or trainer.generation is None:
            return self._flush()
        level, whole = trainer.took or (0, False)
        trainer.took, trainer.told_memory = None, {}
        numbers = {
            "request_bytes": report.size_bytes,
            "free_bytes": report.free_bytes,
            "total_bytes": report.total_bytes,
        }
        where = {"rank": trainer.rank, "generation": trainer.generation, "iteration": trainer.iteration}
        if level:
            self._note(
                "reclaimed",
                **where,
                level=level,
                bytes=report.freed_bytes,
                **numbers,
                waited_s=report.waited_s,
                satisfied=report.satisfied,
            )
            self._tell(
                m.Reclaimed(
                    trainer.rank,
                    trainer.generation,
                    level,
                    whole,
                    report.size_bytes,
                    report.freed_bytes,
                    report.free_bytes,
                    report.total_bytes,
                    report.waited_s,
                    report.satisfied,
                )
            )
        if not report.satisfied:
            self._note("out_of_memory", **where, **numbers)
        return self._flush()

    def footprint(self, sid: int, level: int, held_bytes: int, now: float) -> list[AgentAction]:
        """The shell measured what trainer ``sid`` holds of its device after it had reached ``level``."""
        self._now = now
        trainer = self.trainers.get(sid)
        if trainer is not None and trainer.generation is None:
            self._tell(m.FootprintOf(trainer.rank, level, held_bytes))
        return self._flush()

    def _memory(self, trainer: TrainerRecord, seen: wire.Memory) -> None:
        """Pass on what tells the controller something new: the first and every lower number at one level."""
        shadow = next((t for t in self._alive() if t.rank == trainer.rank and t.generation is None), None)
        held = 0
        if shadow is not None and holds_memory(shadow):
            if shadow.level != shadow.asked or shadow.state is not TrainerState.SHADOW:
                return  # it is on its way, and nobody knows what it holds now
            held = shadow.level
        told = trainer.told_memory.get(held)
        if (
            told is not None
            and seen.free_bytes > told[0] - _TELL_BYTES
            and (seen.free_bytes + seen.spare_bytes > told[1] - _TELL_BYTES)
        ):
            return
        low = told or (seen.free_bytes, seen.free_bytes + seen.spare_bytes)
        trainer.told_memory[held] = (
            min(low[0], seen.free_bytes),
            min(low[1], seen.free_bytes + seen.spare_bytes),
        )
        assert trainer.generation is not None
        self._tell(
            m.MemoryOf(
                trainer.rank,
                trainer.generation,
                seen.free_bytes,
                seen.total_bytes,
                seen.spare_bytes,
                held,
            )
        )

    # --- ends of processes ------------------------------------------------------------------------

    def trainer_gone(
        self,
        sid: int,
        how: str,
        clean: bool,
        now: float,
        inoperable: str | None = None,
        status: int | None = None,
    ) -> list[AgentAction]:
        """The process and its whole tree are gone; ``how`` says why, ``clean`` means exit status 0.

        ``inoperable`` is the verdict of the operability check, None if the device can go on; ``status`` the
        exit status, negative for a signal, None if it is not known.
        """
        self._now = now
        if inoperable is not None:
            how = f"{how}; the device is not operable: {inoperable}"
        trainer = self.trainers.pop(sid)
        detail = f"{trainer.error} ({how})" if trainer.error else how
        finished = trainer.state is TrainerState.FINISHED
        if trainer.generation is not None:
            self._note_ending(trainer, status)
        if finished and not clean:
            self._note("untidy_exit", rank=trainer.rank, generation=trainer.generation, detail=detail)
        if trainer.generation is None:
            if trainer.discarded or self.ending is not None:
                pass
            elif trainer.reclaimed:
                self._tell(m.ShadowReclaimed(trainer.rank, sid, trainer.asked, trainer.taken_by))
            else:
                self._tell(m.ShadowFailed(trainer.rank, sid, detail, trainer.secondary, trainer.memory))
        elif trainer.told:
            self._note("trainer_ended", rank=trainer.rank, generation=trainer.generation, detail=detail)
        elif trainer.generation == self.generation and not finished and self.ending is None:
            self._active_failed(trainer.rank, self.generation, detail, trainer, operable=inoperable is None)
        for asker, sequence in self._reclaims.gone(sid):
            self._out.append(AnswerHook(asker, sequence, Verdict.GONE))
        self._maybe_fenced()
        self._maybe_end()
        return self._flush()

    def trainer_hung_up(self, sid: int, inoperable: str | None, now: float) -> list[AgentAction]:
        """An active trainer's channel is closed.

        A process that is killed closes it first, and a GPU may keep the process for a fifth of a second after
        that: time enough to fence the others. Its end is waited for all the same (I-4).
        """
        self._now = now
        trainer = self.trainers.get(sid)
        if trainer is not None and trainer.generation is not None and trainer.state in ACTIVE:
            trainer.hung_up_at, trainer.inoperable = now, inoperable
        return self._flush()

    @property
    def watches_an_end(self) -> bool:
        """Whether a trainer's channel closed and its end is awaited: look again soon."""
        return any(trainer.hung_up_at is not None for trainer in self.trainers.values())

    def _report_hung_up(self, trainer: TrainerRecord) -> None:
        trainer.hung_up_at = None
        if trainer.state not in ACTIVE or trainer.generation != self.generation or self.ending is not None:
            return  # a fence was faster
        trainer.told = True
        operable = trainer.inoperable is None
        detail = "it closed its channel, as a process does that is killed"
        if not operable:
            detail = f"{detail}; the device is not operable: {trainer.inoperable}"
        self._kill(trainer, failed=True)  # whatever became of it, nobody can talk to it any more
        self._active_failed(trainer.rank, self.generation, detail, trainer, operable=operable)

    def _note_ending(self, trainer: TrainerRecord, status: int | None) -> None:
        again = self._ended_at.get(trainer.rank) == trainer.iteration
        self._ended_at[trainer.rank] = trainer.iteration
        ending = Ending(status, bool(trainer.error), trainer.python_error, trainer.secondary, again)
        if must_read(ending):
            self._suspects.add(trainer.rank)

    def manager_up(self, rank: int, epoch: int, socket: str, now: float) -> list[AgentAction]:
        """A manager started and answers."""
        self._now = now
        manager = self.managers[rank]
        assert manager.epoch == epoch, "a manager is started only when its predecessor is gone"
        if self.ending is not None or manager.status is ManagerStatus.STOPPING:
            manager.status = ManagerStatus.STOPPING  # its end was asked for while it was starting
            self._out.append(KillManager(rank, epoch))
            return self._flush()
        manager.status, manager.socket = ManagerStatus.UP, socket
        if self.managers.all_up(self.epoch, self.ranks):
            self._tell(m.ManagersReady(self.epoch))
        return self._flush()

    def manager_gone(self, rank: int, epoch: int, how: str, now: float) -> list[AgentAction]:
        """A manager ended, could not be started, or was ended on request."""
        self._now = now
        manager = self.managers[rank]
        if manager.epoch != epoch:
            raise UnexpectedEventError(
                f"manager of rank {rank}: end of epoch {epoch}, expected {manager.epoch}"
            )
        wanted = manager.status is ManagerStatus.STOPPING
        manager.status = ManagerStatus.GONE
        if self.ending is not None:
            self._maybe_end()
        elif rank not in self.ranks:
            pass  # it was another node's, or the coordinator hears of it when it asks for it
        elif wanted or epoch < self.epoch:
            self._start_manager(rank)
        else:
            active = self.active_of(rank)
            self._tell(m.ManagerFailed(rank, epoch, how, 0 if active is None else active.iteration))
        return self._flush()

    def manager_fenced(self, rank: int, epoch: int, error: str | None, now: float) -> list[AgentAction]:
        """The manager that was taken over admits no older writer any more; or ``error`` says why not."""
        self._now = now
        self._unfenced.discard(rank)
        if error is not None and epoch == self.epoch:
            self._tell(m.ManagerFailed(rank, epoch, f"it cannot be taken over: {error}"))
        self._maybe_fenced()
        return self._flush()

    def repair_done(
        self, rank: int, generation: int, epoch: int, lost_pages: int, error: str | None, now: float
    ) -> list[AgentAction]:
        """The shell has lost, localized and remapped; or could not."""
        self._now = now
        if generation != self.generation or epoch != self.epoch or rank not in self._repairing:
            self.stale["repair_done"] += 1
            return self._flush()
        if error is not None:
            self._repairing.clear()
            self._tell(m.RepairFailed(rank, generation, epoch, error))
            return self._flush()
        self._lost_pages += lost_pages
        self._repairing.discard(rank)
        if not self._repairing:
            self._tell(m.Repaired(generation, epoch, self._lost_pages))
        return self._flush()

    # --- operator ---------------------------------------------------------------------------------

    def active_of(self, rank: int) -> TrainerRecord | None:
        """The promoted trainer of a local rank, if it lives."""
        return next((t for t in self._alive() if t.rank == rank and t.generation is not None), None)

    def inject_lose(self, rank: int, lose: Lose, seed: int, now: float) -> list[AgentAction]:
        """Kill the active trainer of ``rank`` and lose pages before the localization that follows."""
        self._losses.setdefault(rank, []).append(("inject", lose, seed))
        return self.inject_kill(rank, now)

    def inject_hang(self, rank: int, now: float) -> list[AgentAction]:
        """Have the active trainer keep its GIL for ever."""
        self._now = now
        trainer = self.active_of(rank)
        if trainer is not None:
            trainer.fired_at = now
            self._tell_trainer(trainer, wire.Inject("hang"))
        return self._flush()

    def inject_kill(self, rank: int, now: float) -> list[AgentAction]:
        """Kill the active trainer as an accident would: the agent learns of it through its pidfd."""
        self._now = now
        trainer = self.active_of(rank)
        if trainer is not None:
            trainer.fired_at = now
            self._out.append(KillTrainer(trainer.sid))
        return self._flush()

    # --- time and the end -------------------------------------------------------------------------

    def tick(self, now: float) -> list[AgentAction]:
        """Let time pass: overdue exits, a silent coordinator."""
        self._now = now
        for trainer in self.trainers.values():
            if trainer.kill_at is not None and now >= trainer.kill_at:
                trainer.kill_at = now + _KILL_AGAIN_S
                self._out.append(KillTrainer(trainer.sid))
        for trainer in self._alive():
            if trainer.hung_up_at is not None and now - trainer.hung_up_at >= _ENDING_S:
                self._report_hung_up(trainer)
        if self.ending is None and now - self._heard > self._deadlines.agent_s:
            self._shut_down(
                ExitCode.AGENT_LOST, f"the coordinator has been silent for {now - self._heard:.0f} s"
            )
        return self._flush()

    def stop(self, exit_code: int, reason: str, now: float) -> list[AgentAction]:
        """End this node from here (a signal, a lost coordinator)."""
        self._now = now
        if self.ending is None:
            self._shut_down(exit_code, reason)
        return self._flush()

    def _shut_down(self, exit_code: int, reason: str) -> None:
        self.ending = Exit(exit_code, reason)
        for trainer in self.trainers.values():
            if trainer.state is TrainerState.FINISHED:
                trainer.kill_at = self._now + self._deadlines.exit_s
            else:
                self._kill(trainer)
        self._maybe_end()

    def _maybe_end(self) -> None:
        if self.ending is None or self.trainers or self.done:
            return
        keep = self._succession and self.ending.exit_code in KEEPS_MEMORY
        if not keep:
            self._out += self.managers.stop_up()
        if self.managers.settled(keep=keep):
            self.done = True
            self._tell(m.Bye(self.node, self.ending.exit_code))
            self._out.append(self.ending)

    # --- helpers ----------------------------------------------------------------------------------

    def _alive(self) -> list[TrainerRecord]:
        return list(self.trainers.values())

    def _older(self) -> list[TrainerRecord]:
        return [t for t in self._alive() if t.generation is not None and t.generation < self.generation]

    def _kill(self, trainer: TrainerRecord, *, failed: bool = False) -> None:
        trainer.state = TrainerState.FAILED if failed else TrainerState.KILLED
        trainer.kill_at = self._now + _KILL_AGAIN_S
        self._out.append(KillTrainer(trainer.sid))

    def _maybe_fenced(self) -> None:
        if self._fence_owed and not self._older() and not self._unfenced:
            self._fence_owed = False
            self._tell(m.Fenced(self.generation))

    def _active_failed(
        self,
        rank: int,
        generation: int,
        detail: str,
        trainer: TrainerRecord | None = None,
        *,
        operable: bool = True,
    ) -> None:
        iteration, detected_s, secondary, drill = 0, 0.0, False, False
        if trainer is not None:
            iteration, secondary, drill = trainer.iteration, trainer.secondary, trainer.fired_at is not None
            since = trainer.fired_at if trainer.fired_at is not None else self._now
            detected_s = self._now - since
        self._tell(
            m.ActiveFailed(rank, generation, iteration, detail, operable, detected_s, secondary, drill)
        )

    def _tell(self, message: m.FromAgent) -> None:
        self._out.append(Tell(message))

    def _tell_trainer(self, trainer: TrainerRecord, message: wire.AgentMessage) -> None:
        self._out.append(TellTrainer(trainer.sid, message))

    def _note(self, event: str, **fields: Any) -> None:
        self._out.append(Note(event, fields))

    def _flush(self) -> list[AgentAction]:
        out, self._out = self._out, []
        return out
