"""What trainers say and how they and the state managers end, on one node.

Fifth layer of `leto_shadow.agent_core`. Upheld here: I-4 (`Fenced` only when every promoted process of an
older generation is gone or cannot write any more, and every manager that was taken over has proven its last
writer dead).
"""

from __future__ import annotations

from leto_shadow import messages as m
from leto_shadow import wire
from leto_shadow.actions import UnexpectedEventError
from leto_shadow.agent_actions import (
    AgentAction,
    AnswerHook,
    KillManager,
)
from leto_shadow.agent_survivors import AgentSurvivors
from leto_shadow.fired import of_drill
from leto_shadow.localization import Ending, must_read
from leto_shadow.node_managers import ManagerStatus
from leto_shadow.oom_protocol import Verdict
from leto_shadow.operability import DeviceFacts, judge
from leto_shadow.progress import Phase
from leto_shadow.trainer_states import ACTIVE, ALLOWED, OUTDATED, TrainerRecord, TrainerState

__all__ = ["AgentProcesses"]


def _why_unfit(facts: DeviceFacts | None) -> str:
    """What to add to the story of an end if the device cannot go on."""
    found = None if facts is None else judge(facts)
    return (
        "" if found is None or found.operable else f"; the device is not operable: {'; '.join(found.reasons)}"
    )


class AgentProcesses(AgentSurvivors):
    """Events of the processes of the node."""

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
        if trainer.state is TrainerState.RETIRING and isinstance(message, OUTDATED):
            self.stale[type(message).__name__] += 1
            return self._flush()
        said = getattr(message, "generation", None)
        lived = trainer.generation if trainer.state is not TrainerState.RELEASED else trainer.survived
        wrong_generation = said is not None and said != lived
        if trainer.state not in ALLOWED[type(message)] or wrong_generation:
            trainer.error = f"protocol: {type(message).__name__} in state {trainer.state.value}"
            self._kill(trainer, failed=True)
            return self._flush()
        self._trainer_says(trainer, message)
        return self._flush()

    def _trainer_says(self, trainer: TrainerRecord, message: wire.TrainerMessage) -> None:
        rank, generation = trainer.rank, trainer.generation
        match message:
            case wire.Hello(rank=claimed, protocol=protocol, retires=retires):
                if claimed != (-1 if trainer.from_spare else rank) or protocol != wire.PROTOCOL:
                    trainer.error = f"protocol: rank {claimed}, version {protocol} in Hello"
                    self._kill(trainer, failed=True)
                    return
                trainer.state, trainer.retires = TrainerState.SHADOW, retires
                if rank < 0:
                    self._spare_says(trainer, message)
            case wire.LevelReached() if rank < 0:
                self._spare_says(trainer, message)
            case wire.LevelReached(level=level, world_id=world):
                trainer.level, trainer.parked_bytes = level, message.parked_bytes
                self._tell(m.ShadowAt(rank, trainer.sid, world, level))
            case wire.Summary(payload=payload):
                assert generation is not None
                trainer.state = TrainerState.EXCHANGED
                self._tell(m.SummaryOf(rank, generation, payload))
            case wire.Resumed(iteration=iteration, source=source, breakdown=breakdown):
                assert generation is not None
                trainer.state, trainer.parked_bytes = TrainerState.TRAINING, 0
                trainer.iteration = iteration
                self._note(
                    "resumed",
                    rank=rank,
                    pid=trainer.pid,
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
            case wire.Hint(values=values):
                self._hint(trainer, values)
            case wire.Memory():
                self._memory(trainer, message)
            case wire.DrillFired(id=drill_id):
                self._drill_fired(trainer, drill_id)
            case wire.PeerLost(error=error):
                self._peer_lost(trainer, error)
            case wire.Released():
                self._check_released(trainer)
            case wire.Retired(level=level):
                self._shadow_again(trainer, level)
            case wire.Finished(iteration=iteration):
                assert generation is not None
                trainer.state = TrainerState.FINISHED
                self._tell(m.FinishedOf(rank, generation, iteration))
            case wire.Failed(phase=phase, error=error):
                trainer.secondary, trainer.python_error = message.secondary, message.python
                trainer.memory, trainer.reported = message.memory, True
                if trainer.state in (TrainerState.RETIRING, TrainerState.RELEASED):
                    self._give_up_survivor(trainer, f"{phase}: {error}")
                    return
                trainer.state = TrainerState.FAILED
                trainer.error = f"{phase}: {error}"
                trainer.kill_at = self._now + self._deadlines.exit_s

    def _hint(self, trainer: TrainerRecord, values: dict[str, float]) -> None:
        kept = {**self._hints.get(trainer.rank, {}), **values}
        if len(kept) > wire.HINTS_MAX:  # `Context.hint` refuses to send them
            trainer.error = (
                f"protocol: {len(kept)} hints of rank {trainer.rank}, at most {wire.HINTS_MAX} are kept"
            )
            self._kill(trainer, failed=True)
            return
        self._hints[trainer.rank] = kept

    def _drill_fired(self, trainer: TrainerRecord, drill_id: str) -> None:
        drill = self._drills.pop(drill_id, None)
        self._fires(of_drill(drill_id))
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

    def trainer_gone(
        self,
        sid: int,
        how: str,
        clean: bool,
        now: float,
        facts: DeviceFacts | None = None,
        status: int | None = None,
    ) -> list[AgentAction]:
        """The process and its whole tree are gone; ``how`` says why, ``clean`` means exit status 0.

        ``facts`` is what was observed of its device, None if there is nothing to judge; ``status`` the exit
        status, negative for a signal, None if it is not known.
        """
        self._now = now
        trainer = self.trainers.pop(sid)
        trainer.facts = facts = (
            facts if trainer.facts is None or not trainer.facts.injected else trainer.facts
        )
        unfit = _why_unfit(facts)
        how = f"{how}{unfit}"
        if unfit and facts is not None and trainer.generation is not None:
            self._unfit[trainer.rank] = facts
        detail = f"{trainer.error} ({how})" if trainer.error else how
        finished = trainer.state is TrainerState.FINISHED
        if trainer.state in (TrainerState.RETIRING, TrainerState.RELEASED):
            self._note_survivor_lost(trainer, how)
        if trainer.generation is not None:
            self._note_ending(trainer, status)
        if finished and not clean:
            self._note("untidy_exit", rank=trainer.rank, generation=trainer.generation, detail=detail)
        if trainer.rank < 0:
            self._spare_gone(trainer, detail)
        elif trainer.generation is None:
            if trainer.discarded or self.ending is not None:
                pass
            elif trainer.reclaimed:
                self._tell(m.ShadowReclaimed(trainer.rank, sid, trainer.asked, trainer.taken_by))
            else:
                self._tell(m.ShadowFailed(trainer.rank, sid, detail, trainer.secondary, trainer.memory))
        elif trainer.told:
            self._note("trainer_ended", rank=trainer.rank, generation=trainer.generation, detail=detail)
        elif trainer.generation == self.generation and not finished and self.ending is None:
            self._active_failed(trainer.rank, self.generation, detail, trainer)
        for asker, sequence in self._reclaims.gone(sid):
            self._out.append(AnswerHook(asker, sequence, Verdict.GONE))
        self._maybe_fenced()
        self._maybe_retired()
        self._maybe_end()
        return self._flush()

    def is_active(self, sid: int) -> bool:
        """Whether a closed channel of trainer ``sid`` would be news: of one that is promoted, and not on its
        way out."""
        trainer = self.trainers.get(sid)
        return trainer is not None and trainer.generation is not None and trainer.state in ACTIVE

    def trainer_hung_up(self, sid: int, facts: DeviceFacts | None, now: float) -> list[AgentAction]:
        """A trainer's channel is closed; of one that is active that is news.

        A process that is killed closes it first, and a GPU may keep the process for most of a second after
        that: time enough to fence the others, which begins at once where there are ``facts`` of a device.
        Where there are none the end follows at once, says more, and is waited for a little. Either way it
        counts as ended when it has ended (I-4).
        """
        self._now = now
        if self.is_active(sid):
            trainer = self.trainers[sid]
            if trainer.facts is None:
                trainer.facts = facts
            if facts is None:
                trainer.hung_up_at = now
            else:
                self._report_hung_up(trainer)
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
        detail = f"it closed its channel, as a process does that is killed{_why_unfit(trainer.facts)}"
        self._kill(trainer, failed=True)  # whatever became of it, nobody can talk to it any more
        self._active_failed(trainer.rank, self.generation, detail, trainer)

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
            self._maybe_retired()  # it was another node's, or the coordinator hears of it when it asks for it
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

    def _start_manager(self, rank: int) -> None:
        self._out += self.managers.start(rank, self.epoch)
