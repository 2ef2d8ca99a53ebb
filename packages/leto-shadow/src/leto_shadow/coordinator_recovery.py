"""From a failure to training: rule, fence, repair, promote, decide, resume (paper section 3.4).

Second layer of `leto_shadow.coordinator`. Upheld here: I-4 (no promotion before every node has proven the
older generations dead), I-5 (one decision from *all* summaries, sent to all; all must resume at the same
iteration from the same source), I-6 (a fatal failure replaces the managers of *all* ranks).
"""

from __future__ import annotations

import msgspec

from leto_shadow import messages as m
from leto_shadow.actions import AskDecision, AskHook, CloseStore
from leto_shadow.classifier import Failure, FailureKind, Ruling, Verdict, last_words
from leto_shadow.coordinator_state import CoordinatorState
from leto_shadow.exit_codes import ExitCode
from leto_shadow.hook_question import make_question
from leto_shadow.phases import Phase
from leto_shadow.preinit import Change, MemoryView
from leto_shadow.recovery import Recovery

__all__ = ["CoordinatorRecovery"]


class CoordinatorRecovery(CoordinatorState):
    """The steps of a recovery, each begun by the end of the one before."""

    def _rule(self, failure: Failure, recovery: Recovery) -> bool:
        """Record and classify one failure for ``recovery``; return False if the job ends with it."""
        self._record(
            "failure",
            kind=str(failure.kind),
            rank=failure.rank,
            generation=self.generation,
            iteration=failure.iteration,
            detected_s=failure.detected_s,
            detail=failure.detail,
            phase=self.phase.value,
        )
        ruling = self._classifier.classify(failure, self._now)
        self._verdicts += 1
        recovery.verdicts[self._verdicts] = ruling.verdict
        if ruling.device:
            recovery.suspects[self._verdicts] = failure.rank
        if not (self.policy.classify_hook and ruling.open):
            self._pronounce(failure, ruling.verdict, ruling, "leto")
        if ruling.verdict is Verdict.ABORT:
            self._stop(ExitCode.FATAL_LIMIT, f"{ruling.reason}; last failure: {failure.detail}")
            return False
        if self.policy.classify_hook and ruling.open:
            # It is waited for at the end of the fence, which comes first whatever the answer is.
            self._asked[self._verdicts] = (recovery, failure, ruling, self._now)
            case = self._classifier.case
            assert case is not None
            question = make_question(case, ruling, self.generation, self.policy.limits)
            self._out.append(AskHook(self._verdicts, question))
        return True

    def _pronounce(self, failure: Failure, verdict: Verdict, ruling: Ruling, by: str) -> None:
        """Record a verdict and what it rests on; ``by``: leto or hook."""
        names = {Verdict.HOF: "hof", Verdict.FATAL: "ff", Verdict.ABORT: "abort"}
        where = {"rank": failure.rank, "iteration": failure.iteration}
        self._record(
            "verdict",
            **where,
            generation=self.generation,
            kind=str(failure.kind),
            verdict=names[verdict],
            by=by,
            built_in=names[ruling.verdict],
            reasons=list(ruling.reasons),
            facts=None if failure.facts is None else msgspec.to_builtins(failure.facts),
        )
        if verdict is Verdict.FATAL:
            reason = ruling.reason if ruling.verdict is verdict else "the operator's hook says so"
            self._record("fatal", **where, generation=self.generation, reason=reason)

    def _hook_said(self, number: int, answer: str, error: str) -> None:
        if number not in self._asked:
            self.stale["hook_answered"] += 1
            return
        recovery, failure, ruling, _ = self._asked.pop(number)
        if error:
            self._record("classify_hook_failed", rank=failure.rank, generation=self.generation, detail=error)
        verdict = {"hof": Verdict.HOF, "ff": Verdict.FATAL}.get(answer, ruling.verdict)
        recovery.verdicts[number] = verdict
        if ruling.verdict is Verdict.HOF:  # if the hook knows better, it knows of the hardware
            recovery.suspects[number] = failure.rank
        self._pronounce(failure, verdict, ruling, "leto" if error or answer == "default" else "hook")
        if recovery is self.recovery and self.phase is Phase.FENCING and not self._waiting_for:
            self._on_fenced()

    def _judge_devices(self, fenced: m.Fenced) -> bool:
        """Rule on devices that were found not operable when trainers had ended; False if the job ends."""
        recovery = self.recovery
        assert recovery is not None
        first = recovery.failure
        for one in fenced.unfit:
            if first is not None and first.rank == one.rank and first.facts is not None:
                continue
            detail = "its device is not operable"
            failure = Failure(FailureKind.DEVICE, one.rank, self.iteration, detail, one.facts)
            if recovery.fatal:  # no further failure of the job, but this rank cannot stay where it is either
                self._verdicts += 1
                recovery.verdicts[self._verdicts] = Verdict.FATAL
                recovery.suspects[self._verdicts] = one.rank
                continue
            if not self._rule(failure, recovery):
                return False
        return True

    def _note_progress(self) -> None:
        """Take over how far all ranks have come."""
        iteration = self.hang.min_iteration() if self.phase is Phase.TRAINING else None
        if iteration is not None and iteration > self.iteration:
            self._classifier.progress(iteration)
            self.iteration = iteration

    def _fail(self, failure: Failure) -> None:
        """A promoted generation is over: fence it and recover."""
        self._note_progress()
        self.iteration = max(self.iteration, failure.iteration)
        self._blamed = None
        assert self.world is not None
        recovery = Recovery(self._now, failure)
        if not self._rule(failure, recovery) or not self._can_begin(failure):
            return
        self.recovery = recovery
        self.generation += 1
        self._begin_fence(failure)
        may_retire = self._may_retire(failure)
        self._out += self.world.begin(self._now, urgent=True, crowded=True, hold=may_retire)

    def _can_begin(self, failure: Failure) -> bool:
        """Return False if the job ends, because no generation has ever trained and they fail alike.

        Nothing is there that a recovery could go on from, and the next attempt meets what this one met: a
        pool that does not fit, or an error in the script.
        """
        if self._trained:
            return True
        before = self._set_up_failures
        if not (before and failure.resembles(before[-1])):
            before.clear()
        before.append(failure)
        if len(before) < self.policy.limits.start_failures:
            return True
        self._stop(
            ExitCode.CANNOT_START,
            f"no rank has begun to train, and the last {len(before)} attempts failed alike; rank "
            f"{failure.rank}: {failure.words}",
        )
        return False

    def _begin_fence(self, failure: Failure) -> None:
        assert self.recovery is not None
        self._record(
            "recovery_begun",
            generation=self.generation,
            iteration=self.iteration,
            rank=failure.rank,
            fatal=self.recovery.fatal,
        )
        self._waiting_for = set(self.ranks_of)
        may_retire = self._may_retire(failure)
        for node, ranks in self.ranks_of.items():
            asked = tuple(rank for rank in ranks if rank in may_retire)
            self._send(node, m.Fence(self.generation, asked, self.policy.retire_s if asked else 0.0))
        self._enter(Phase.FENCING)

    def _may_retire(self, failure: Failure) -> frozenset[int]:
        """Ranks whose trainers may become shadows again. A fatal recovery makes everything anew."""
        assert self.recovery is not None
        assert self.world is not None
        if not self.policy.retire_s or self.recovery.fatal:
            return frozenset()
        return self.world.can_use_survivors() - {failure.rank}

    def _on_fenced(self) -> None:
        assert self.recovery is not None
        if any(recovery is self.recovery for recovery, *_ in self._asked.values()):
            return  # the way forks here; `_hook_said` goes on
        self._fenced_for = self.generation
        self._mark("fence")
        self._out.append(CloseStore(self.active_world))
        if self.recovery.fatal:
            self._start_managers()
            return
        self._waiting_for = set(self.ranks_of)
        for node in self.ranks_of:
            self._send(node, m.Repair(self.generation, self.epoch))
        self._enter(Phase.REPAIRING)

    def _fatal_in_recovery(self, failure: Failure) -> None:
        assert self.recovery is not None
        if self._rule(failure, self.recovery):
            self._start_managers()

    def _on_manager_failed(self, rank: int, detail: str, iteration: int = 0) -> None:
        if self.phase is Phase.STARTING or (self.phase is Phase.PREPARING and not self._trained):
            self._manager_starts += 1
            if self._manager_starts >= self.policy.limits.manager_starts:
                self._stop(
                    ExitCode.CANNOT_START, f"the state manager of rank {rank} does not start: {detail}"
                )
            else:
                self._start_managers()
            return
        failure = Failure(FailureKind.MANAGER, rank, max(iteration, self.iteration), detail)
        if self.phase is Phase.FENCING:
            assert self.recovery is not None
            if not self.recovery.fatal:
                self._rule(failure, self.recovery)
        elif self.phase in (Phase.REPAIRING, Phase.PREPARING):
            self._fatal_in_recovery(failure)
        else:
            self._fail(failure)

    def _start_managers(self) -> None:
        """Begin a new epoch: fresh memory for *all* ranks, so that all recover from the same source (I-5)."""
        assert self._fenced_for == self.generation, "trainers may still use the memory of the old epoch"
        self.epoch += 1
        self._waiting_for = set(self.ranks_of)
        for node in self.ranks_of:
            self._send(node, m.StartManagers(self.epoch))
        self._enter(Phase.STARTING)

    def _maybe_promote(self) -> None:
        if self.phase is not Phase.PREPARING or self.world is None or not self.world.ready:
            return
        assert self._fenced_for == self.generation, "I-4: an older generation is not proven dead"
        self._mark("prepare")
        self.active_world = self.world.take()
        self._summaries.clear()
        self._resumed.clear()
        self._finished.clear()
        for node in self.ranks_of:
            self._send(node, m.Promote(self.generation, self.active_world, self.epoch))
        self._record("promoted", generation=self.generation, world=self.active_world)
        self._enter(Phase.EXCHANGING)

    def _on_all_summaries(self) -> None:
        assert self.recovery is not None
        self._mark("attach")
        summaries = tuple(self._summaries[rank] for rank in range(self.world_size))
        self._out.append(AskDecision(self.generation, summaries))
        self._enter(Phase.DECIDING)

    def _no_decision(self, detail: str) -> None:
        """No common state in memory: go to the checkpoint; if this was the way there, give up."""
        assert self.recovery is not None
        if self.recovery.fatal or self.recovery.failure is None:
            self._stop(ExitCode.NO_DECISION, f"no state that all ranks can resume from: {detail}")
        else:
            self._fail(Failure(FailureKind.DECISION, 0, self.iteration, detail))

    def _on_all_resumed(self) -> None:
        assert self.recovery is not None
        assert self.world is not None
        first = self._resumed[0]
        for rank, resumed in self._resumed.items():
            if (resumed.iteration, resumed.source) != (first.iteration, first.source):
                detail = (
                    f"rank 0 resumed at iteration {first.iteration} ({first.source}), "
                    f"rank {rank} at {resumed.iteration} ({resumed.source})"
                )
                self._fail(Failure(FailureKind.DECISION, rank, self.iteration, detail))
                return
        self._mark("resume")
        recovery, self.recovery = self.recovery, None
        self.last_recovery = recovery.report(
            self.generation, first.iteration, first.source, self.iteration, self._now
        )
        self._trained = True
        self.iteration = first.iteration  # lower than before if a checkpoint was loaded
        self._record("started" if recovery.failure is None else "recovered", **self.last_recovery)
        self.hang.begin(self.generation)
        self._enter(Phase.TRAINING)
        if self._trains_since is None:
            self._trains_since = self._now
        if self.preinit is not None and recovery.failure is not None:
            self._change_levels(self.preinit.recovered(self._now))
        self._out += self.world.begin(self._now, urgent=False)
        self._maybe_finish()

    def _on_memory(self, message: m.ShadowReclaimed | m.Reclaimed | m.MemoryOf | m.FootprintOf) -> None:
        """Training took a shadow's memory, or an agent has measured the memory of a device."""
        assert self.world is not None
        assert self.preinit is not None
        rank = message.rank
        match message:
            case m.ShadowReclaimed(sid=sid, level=level, taken_by=generation):
                if (
                    generation == self.generation
                ):  # also if the shadow was given up for another reason meanwhile
                    self._limit(self.preinit.reclaimed(rank, level, self._now))
                self._out += self.world.reclaimed(rank, sid, self._now)
                if generation == self.generation:
                    self._out += self.world.allow(rank, self.preinit.level(rank), self._now)
            case m.Reclaimed():
                if message.whole:
                    self.preinit.footprint(rank, message.level, message.freed_bytes)
                self.preinit.measured(rank, MemoryView(message.free_bytes, message.total_bytes), 0)
            case m.FootprintOf(level=level, held_bytes=held_bytes, parked_bytes=parked_bytes):
                self.preinit.footprint(rank, level, held_bytes, parked_bytes)
            case m.MemoryOf(free_bytes=free, total_bytes=total, spare_bytes=spare, held_level=held):
                self.preinit.measured(rank, MemoryView(free, total, spare), held)

    def _takeover_refused(self, message: m.ActiveFailed) -> None:
        """What a shadow had parked was not to be had at its promotion, if so. Nothing is lost: it had not
        begun. The next trainers of this recovery park nothing (`Context.waits`), and later ones wait lower.

        Ranks that were refused at once are heard of one after the other, the last ones when their generation
        is over. That is a measurement all the same: without it their next takeover would be refused again."""
        if not message.refused_bytes or self.recovery is None:
            return
        assert self.preinit is not None
        self._record(
            "takeover_refused",
            rank=message.rank,
            generation=message.generation,
            parked_bytes=message.refused_bytes,
            detail=last_words(message.detail),
        )
        self.preinit.refused(message.rank)

    def _change_levels(self, changes: list[Change]) -> None:
        assert self.world is not None
        self._limit(changes)
        for change in changes:
            self._out += self.world.allow(change.rank, change.level, self._now)

    def _limit(self, changes: list[Change]) -> None:
        assert self.world is not None
        for change in changes:
            self._record("shadow_allowed", rank=change.rank, level=change.level, reason=change.reason)
            self.world.limit(change.rank, change.level)

    def _maybe_finish(self) -> None:
        if self.phase is Phase.TRAINING and len(self._finished) == self.world_size:
            self.iteration = max(self._finished.values())
            self._stop(ExitCode.FINISHED, f"training finished at iteration {self.iteration}")
