"""The job-wide coordinator: generations, recovery phases and decisions, without I/O (paper section 3.4).

One instance lives in the agent of node rank 0. It takes messages of the agents, beats and the time, and
returns `leto_shadow.actions`; it never looks at a clock or a socket, so the tests run it through thousands of
failure schedules in simulated time. Phases and legal messages: `leto_shadow.phases`.

Upheld here: I-4 (no promotion before every node has proven the older generations dead), I-5 (one decision
from *all* summaries, sent to all; all must resume at the same iteration from the same source), I-6 (a fatal
failure replaces the managers of *all* ranks, so that no rank mixes retained state with a checkpoint), I-7
(stores of dead worlds are closed; stale messages are rejected and counted).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from leto_shadow import messages as m
from leto_shadow.actions import Action, AskDecision, CloseStore, Done, Record, Send, UnexpectedEventError
from leto_shadow.classifier import Classifier, Failure, FailureKind, Verdict
from leto_shadow.config import JobPolicy, beat_s
from leto_shadow.exit_codes import KEEPS_MEMORY, ExitCode
from leto_shadow.hang import HangDetector
from leto_shadow.levels import NextWorld
from leto_shadow.phases import FOLLOWS, LEGAL, Phase
from leto_shadow.preinit import Change, MemoryView, PreinitController
from leto_shadow.recovery import Recovery
from leto_shadow.roster import Roster

__all__ = ["Coordinator"]


class Coordinator:
    """Drive with its event methods (`receive` to `tick`); carry out the actions that they return."""

    def __init__(self, nodes: int, policy: JobPolicy, now: float, needed: int = 0) -> None:
        """``nodes``: agents that will join; ``needed`` of them (0: all) train, the others are spares."""
        self.policy = policy
        self.phase = Phase.JOINING
        self.generation = 0
        self.epoch = 0
        self.active_world = 0
        self.iteration = 0
        self.recovery: Recovery | None = Recovery(now)
        self.last_recovery: dict[str, Any] | None = None
        self.stale: Counter[str] = Counter()
        self.ranks_of: dict[int, range] = {}
        self.world_size = 0
        self.world: NextWorld | None = None
        self.preinit: PreinitController | None = None
        self.hang = HangDetector(policy.hang)
        self.outcome: Done | None = None
        self._nodes = nodes
        self._roster = Roster(nodes, needed)
        self._spares: set[int] = set()
        self._gone: set[int] = set()
        self._classifier = Classifier(policy.limits)
        self._waiting_for: set[int] = set(range(nodes))
        self._summaries: dict[int, bytes] = {}
        self._resumed: dict[int, m.ResumedOf] = {}
        self._finished: dict[int, int] = {}
        self._heard = dict.fromkeys(range(nodes), now)
        self._silent_after = now  # no agent can have been silent for too long before
        self._look_at = now
        self._since = now
        self._now = now
        self._out: list[Action] = []
        self._fenced_for = 0
        self._manager_starts = 0
        self._trained = False
        self._blamed: tuple[float, Failure] | None = None  # a failure whose cause is still to be reported

    # --- events -----------------------------------------------------------------------------------

    def receive(self, node: int, message: m.FromAgent, now: float) -> list[Action]:
        """Take one message of an agent."""
        self._now = now
        self._heard[node] = now
        name = type(message).__name__
        if node in self._gone:
            self.stale[name] += 1  # back from the dead: its place is taken
            self._send(node, m.Shutdown(ExitCode.AGENT_LOST, "another node has taken the place of this one"))
            return self._flush()
        if self._is_stale(message):
            self.stale[name] += 1
            return self._flush()
        if self.phase is Phase.DONE:
            return self._flush()
        if self.phase not in LEGAL[type(message)]:
            raise UnexpectedEventError(
                f"{name} of node {node} in phase {self.phase.value}, generation {self.generation}: {message}"
            )
        if self.phase is Phase.STOPPING and not isinstance(message, m.Bye):
            if isinstance(message, m.Join) and self.outcome is not None:  # it came too late to be told
                self._send(node, m.Shutdown(self.outcome.exit_code, self.outcome.reason))
            return self._flush()
        self._dispatch(node, message)
        return self._flush()

    def beat(self, node: int, beat: m.Beat, now: float) -> list[Action]:
        """Take a sign of life with the progress of the node's trainers."""
        self._now = now
        self._heard[node] = now
        if self.phase is Phase.TRAINING:
            self.hang.observe(beat.progress)
        return self._flush()

    def store_ready(self, world: int, host: str, port: int, now: float) -> list[Action]:
        """The store asked for by `HostStore` listens."""
        self._now = now
        if self.world is None or self.phase in (Phase.STOPPING, Phase.DONE):
            return [CloseStore(world)]
        self._out += self.world.store_ready(world, host, port, now)
        return self._flush()

    def decided(self, generation: int, payload: bytes, error: str, now: float) -> list[Action]:
        """The decision function returned, or raised ``error``."""
        self._now = now
        if generation != self.generation or self.phase is not Phase.DECIDING:
            self.stale["decided"] += 1  # a failure overtook it
        elif error:
            self._no_decision(error)
        else:
            for node in self.ranks_of:
                self._send(node, m.Decide(self.generation, payload))
            self._enter(Phase.RESUMING)
        return self._flush()

    def rejoined(self, node: int, now: float) -> list[Action]:
        """An agent of a new session calls itself ``node``: its predecessor, and all it owned, is gone."""
        self._now = now
        self._agent_lost(node, "was replaced by a new process")
        return self._flush()

    def stop(self, exit_code: int, reason: str, now: float) -> list[Action]:
        """End the job from outside (a signal)."""
        self._now = now
        self._stop(exit_code, reason)
        return self._flush()

    def tick(self, now: float) -> list[Action]:
        """Let time pass: silence, hangs, deadlines."""
        self._now = now
        if self.phase is Phase.DONE:
            return []
        deadlines = self.policy.deadlines
        if now > self._silent_after and self._check_silence():
            return self._flush()
        if self.world is not None and self.phase is not Phase.STOPPING:
            self._out += self.world.tick(now)
            self._check_start_failures("its shadow is too slow")
            if self.world.store_overdue(now):
                self._stop(ExitCode.CANNOT_START, "the TCPStore of the next world does not open")
            if self.outcome is not None:
                return self._flush()
        if self._blamed is not None and now - self._blamed[0] > deadlines.culprit_s:
            self._fail(self._blamed[1])  # nobody else failed: it was its own fault after all
        if self.phase is Phase.TRAINING and now >= self._look_at:
            self._look_at = now + beat_s(self._nodes) / 2  # it looks at all ranks, and news come with beats
            self._check_progress()
            if self.preinit is not None:
                self._change_levels(self.preinit.tick(self._now))
        self._check_deadline()
        self._maybe_promote()
        return self._flush()

    # --- messages ---------------------------------------------------------------------------------

    def _is_stale(self, message: m.FromAgent) -> bool:
        generation = getattr(message, "generation", None)
        if generation is not None:
            if generation > self.generation:
                raise UnexpectedEventError(f"{message} is ahead of generation {self.generation}")
            if generation < self.generation:
                return True
        epoch = getattr(message, "epoch", None)
        if epoch is not None:
            if epoch > self.epoch:
                raise UnexpectedEventError(f"{message} is ahead of epoch {self.epoch}")
            return bool(epoch < self.epoch)
        return False

    def _dispatch(self, node: int, message: m.FromAgent) -> None:
        world = self.world
        match message:
            case m.Join():
                self._on_join(node, message)
            case m.Bye():
                self._on_bye(node, message.exit_code)
            case m.ManagersReady():
                if self._arrived(node):
                    self._manager_starts = 0
                    self._mark("managers")
                    self._enter(Phase.PREPARING)
                    self._maybe_promote()
            case m.ManagerFailed(rank=rank, detail=detail, iteration=iteration):
                self._on_manager_failed(rank, detail, iteration)
            case m.ShadowAt():
                assert world is not None
                self._out += world.at(message, self._now)
                self._maybe_promote()
            case m.ShadowFailed(rank=rank, sid=sid, detail=detail, secondary=secondary):
                assert world is not None
                if message.memory and not world.urgent and (level := world.told(rank, sid)):
                    assert self.preinit is not None
                    self._limit(self.preinit.did_not_fit(rank, level, self._now))
                self._out += world.failed(rank, sid, detail, self._now, secondary=secondary)
                self._check_start_failures(detail)
            case m.ShadowReclaimed() | m.Reclaimed() | m.MemoryOf() | m.FootprintOf():
                self._on_memory(message)
            case m.Fenced():
                if self._arrived(node):
                    self._on_fenced()
            case m.Repaired(lost_pages=lost):
                assert self.recovery is not None
                self.recovery.lost_pages += lost
                if self._arrived(node):
                    self._mark("repair")
                    self._enter(Phase.PREPARING)
                    self._maybe_promote()
            case m.RepairFailed(rank=rank, detail=detail):
                self._fatal_in_recovery(Failure(FailureKind.MANAGER, rank, self.iteration, detail))
            case m.SummaryOf(rank=rank, payload=payload):
                self._summaries[rank] = payload
                if len(self._summaries) == self.world_size:
                    self._on_all_summaries()
            case m.ResumedOf(rank=rank):
                self._resumed[rank] = message
                if len(self._resumed) == self.world_size:
                    self._on_all_resumed()
            case m.ActiveFailed():
                failure = Failure(
                    FailureKind.EXIT,
                    message.rank,
                    max(message.iteration, self.iteration),
                    message.detail,
                    message.operable,
                    message.detected_s,
                    message.drill,
                )
                if not message.secondary:
                    self._fail(failure)
                elif self._blamed is None:
                    self._blamed = (self._now, failure)
            case m.FinishedOf(rank=rank, iteration=iteration):
                self._finished[rank] = iteration
                self.hang.finished(rank)
                self._maybe_finish()

    def _on_join(self, node: int, join: m.Join) -> None:
        if join.protocol != m.PROTOCOL:
            self._stop(
                ExitCode.CANNOT_START,
                f"node {node} speaks protocol {join.protocol}, this coordinator {m.PROTOCOL}: "
                "install the same leto-shadow on all nodes",
            )
            return
        self._roster.joined[node] = join
        if not self._arrived(node):
            return
        found = self._roster.assign()
        self.ranks_of.update(found.ranks_of)
        self.world_size = sum(map(len, found.ranks_of.values()))
        for index, ranks in self.ranks_of.items():
            self._send(index, m.Welcome(ranks.start, self.world_size, beat_s(self._nodes)))
        self._spares = set(range(self._nodes)) - set(self.ranks_of)
        for index in sorted(self._spares):
            self._send(index, m.Welcome(0, self.world_size, beat_s(self._nodes), spare=True))
        self._record("job_started", world_size=self.world_size, nodes=self._nodes, spares=len(self._spares))
        node_of_rank = {rank: index for index, ranks in self.ranks_of.items() for rank in ranks}
        lowest = min(one.shadow_level for one in self._roster.joined.values())
        self.policy = replace(self.policy, shadow_level=min(self.policy.shadow_level, lowest))
        self.world = NextWorld(node_of_rank, self.policy)
        self.preinit = PreinitController(node_of_rank, self.policy.shadow_level, self.policy.preinit)
        self.epoch, self.generation = found.epoch, found.generation
        if found.adopts:
            self._go_on()
        else:
            if found.reason:
                self._record("memory_given_up", epoch=found.epoch, reason=found.reason)
            self._fenced_for = self.generation  # an agent joins when its predecessor's trainers are dead
            self._start_managers()
        self._out += self.world.begin(self._now, urgent=True)

    def _go_on(self) -> None:
        """The agents were started again and hold the memory of all ranks: recover in place."""
        failure = Failure(FailureKind.AGENT, -1, -1, "an agent died; the memory of all ranks outlived it")
        self.recovery = Recovery(self._now, failure)
        self._trained = True
        self._record("adopted", generation=self.generation, epoch=self.epoch)
        self._record(
            "recovery_begun", generation=self.generation, iteration=-1, rank=failure.rank, fatal=False
        )
        self._waiting_for = set(self.ranks_of)
        for node in self.ranks_of:
            self._send(node, m.Adopt(self.generation, self.epoch))
        self._enter(Phase.FENCING)

    def _on_bye(self, node: int, exit_code: int) -> None:
        if self.phase is Phase.STOPPING:
            self._waiting_for.discard(node)
            if not self._waiting_for:
                self._finish()
        else:
            # An agent that was told to end may be one of many that torchrun starts again, memory and all.
            self._agent_lost(node, "ended", for_good=exit_code == ExitCode.AGENT_LOST)

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

    # --- failure and recovery ---------------------------------------------------------------------

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
        if ruling.verdict is Verdict.ABORT:
            self._stop(ExitCode.FATAL_LIMIT, f"{ruling.reason}; last failure: {failure.detail}")
            return False
        if ruling.verdict is Verdict.FATAL:
            self._record(
                "fatal",
                rank=failure.rank,
                generation=self.generation,
                iteration=failure.iteration,
                reason=ruling.reason,
            )
        recovery.fatal |= ruling.verdict is Verdict.FATAL
        return True

    def _fail(self, failure: Failure) -> None:
        """A promoted generation is over: fence it and recover."""
        self.iteration = max(self.iteration, failure.iteration)
        self._blamed = None
        assert self.world is not None
        recovery = Recovery(self._now, failure)
        if not self._rule(failure, recovery):
            return
        self.recovery = recovery
        self.generation += 1
        self._begin_fence(failure)
        self._out += self.world.begin(self._now, urgent=True, crowded=True)

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
        for node in self.ranks_of:
            self._send(node, m.Fence(self.generation))
        self._enter(Phase.FENCING)

    def _on_fenced(self) -> None:
        assert self.recovery is not None
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
        if self.preinit is not None and recovery.failure is not None:
            self._change_levels(self.preinit.recovered(self._now))
        self._out += self.world.begin(self._now, urgent=False)
        self._maybe_finish()

    # --- memory (paper section 6) -----------------------------------------------------------------

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
            case m.FootprintOf(level=level, held_bytes=held_bytes):
                self.preinit.footprint(rank, level, held_bytes)
            case m.MemoryOf(free_bytes=free, total_bytes=total, spare_bytes=spare, held_level=held):
                self.preinit.measured(rank, MemoryView(free, total, spare), held)

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

    # --- time -------------------------------------------------------------------------------------

    def _check_silence(self) -> bool:
        """Return True if an agent is lost; otherwise note until when none can be."""
        agent_s = self.policy.deadlines.agent_s
        if self.phase in (Phase.JOINING, Phase.STOPPING):
            return False
        for node in sorted(set(range(self._nodes)) - self._gone):
            if self._now - self._heard[node] > agent_s:
                silence = self._now - self._heard[node]
                self._agent_lost(node, f"has been silent for {silence:.0f} s", for_good=True)
                return True
        self._silent_after = agent_s + min(
            heard for node, heard in self._heard.items() if node not in self._gone
        )
        return False

    def _check_progress(self) -> None:
        iteration = self.hang.min_iteration()
        if iteration is not None and iteration > self.iteration:
            self._classifier.progress(iteration)
            self.iteration = iteration
        hang = self.hang.check()
        if hang is not None:
            where = "all ranks wait for each other" if hang.collective else "its main thread stands still"
            detail = f"no progress for {hang.stalled_s:.1f} s in phase {hang.phase} ({where})"
            iteration = max(hang.iteration, self.iteration)
            self._fail(Failure(FailureKind.HANG, hang.rank, iteration, detail, True, hang.stalled_s))

    def _check_deadline(self) -> None:
        deadlines = self.policy.deadlines
        if self.phase is Phase.STOPPING:
            self._leave_the_silent()
        limit = {
            Phase.JOINING: deadlines.join_s,
            Phase.STARTING: deadlines.managers_s,
            Phase.FENCING: deadlines.fence_s,
            Phase.REPAIRING: deadlines.repair_s,
            Phase.EXCHANGING: deadlines.summary_s,
            Phase.DECIDING: deadlines.decide_s,
            Phase.RESUMING: deadlines.resume_s,
            Phase.STOPPING: deadlines.stop_s,
        }.get(self.phase)
        if limit is None or self._now - self._since <= limit:
            return  # PREPARING is bounded by the shadows' own deadlines
        missing = sorted(self._waiting_for)
        work = self.phase in (Phase.STARTING, Phase.FENCING, Phase.REPAIRING)
        if work and any(self._now - self._heard[node] > deadlines.agent_s / 2 for node in missing):
            # Its memory may be whole: to call it a failure of the manager would throw away that of all. It
            # speaks up soon, or is lost.
            return
        match self.phase:
            case Phase.JOINING:
                self._stop(
                    ExitCode.AGENT_LOST, f"the agents of nodes {missing} did not join in {limit:.0f} s"
                )
            case Phase.STARTING:
                rank = self.ranks_of[missing[0]].start
                self._on_manager_failed(rank, f"managers of nodes {missing} not up after {limit:.0f} s")
            case Phase.FENCING:
                self._stop(
                    ExitCode.CANNOT_FENCE,
                    f"trainers of nodes {missing} are not proven dead after {limit:.0f} s",
                )
            case Phase.REPAIRING:
                rank = self.ranks_of[missing[0]].start
                detail = f"localization on nodes {missing} takes more than {limit:.0f} s"
                self._fatal_in_recovery(Failure(FailureKind.MANAGER, rank, self.iteration, detail))
            case Phase.EXCHANGING:
                self._fail_silent(self._summaries, f"no summary within {limit:.0f} s of the promotion")
            case Phase.DECIDING:
                self._no_decision(f"the decision function has not returned within {limit:.0f} s")
            case Phase.RESUMING:
                self._fail_silent(self._resumed, f"not resumed within {limit:.0f} s of the decision")
            case Phase.STOPPING:
                self._finish()

    def _leave_the_silent(self) -> None:
        """At the end of an attempt, dead agents are not waited for: torchrun waits to start them again."""
        assert self.outcome is not None
        if self.outcome.exit_code not in KEEPS_MEMORY:
            return
        farewell_s = self.policy.deadlines.farewell_s
        self._waiting_for -= {
            node for node in self._waiting_for if self._now - self._heard[node] > farewell_s
        }
        if not self._waiting_for:
            self._finish()

    def _fail_silent(self, heard: dict[int, Any], detail: str) -> None:
        rank = min(set(range(self.world_size)) - set(heard))
        self._fail(Failure(FailureKind.RECOVERY, rank, self.iteration, detail))

    def _check_start_failures(self, detail: str) -> None:
        assert self.world is not None
        rank, failures = self.world.worst_rank()
        if self.world.urgent and failures >= self.policy.limits.start_failures:
            self._stop(
                ExitCode.CANNOT_START,
                f"the trainer of rank {rank} failed {failures} times before it was ready; last: {detail}",
            )

    def _agent_lost(self, node: int, what: str, *, for_good: bool = False) -> None:
        """``for_good``: nobody will start it again there with the memory that it had."""
        if self.phase in (Phase.STOPPING, Phase.DONE):
            return
        detail = f"the agent of node {node} {what}"
        if for_good and node in self._spares:
            self._record("spare_lost", lost=node, reason=detail)
            self._forget(node)
            return
        spare = self._spare_for(node) if for_good and self.phase is not Phase.JOINING else None
        if spare is None:
            self._stop(ExitCode.AGENT_LOST, detail, lost=node)
        else:
            self._replace(node, spare, detail)

    # --- spare nodes ------------------------------------------------------------------------------

    def _forget(self, node: int) -> None:
        self._gone.add(node)
        self._spares.discard(node)

    def _spare_for(self, node: int) -> int | None:
        """A spare that is heard and has as many ranks as ``node``."""
        patience_s = self.policy.deadlines.agent_s / 2
        return min(
            (
                spare
                for spare in self._spares
                if self._now - self._heard[spare] <= patience_s
                and self._roster.joined[spare].local_ranks == len(self.ranks_of[node])
            ),
            default=None,
        )

    def _replace(self, node: int, spare: int, detail: str) -> None:
        """The spare gets the ranks of the lost node; all ranks go on from a checkpoint (I-5).

        What is left of the lost node cannot be fenced from here. It cannot write memory that anybody will
        read (the managers of all ranks are replaced), and by its own agent's deadline, which is the same as
        ours, its trainers are dead.
        """
        assert self.world is not None
        ranks = self.ranks_of[node]
        self._forget(node)
        self._spares.discard(spare)
        failure = Failure(FailureKind.NODE, ranks.start, self.iteration, detail)
        recovery = self.recovery or Recovery(self._now)
        if recovery.failure is None:
            recovery = Recovery(self._now, failure)
        if not self._rule(failure, recovery):
            return
        del self.ranks_of[node]
        self.ranks_of[spare] = ranks
        self._send(spare, m.Welcome(ranks.start, self.world_size, beat_s(self._nodes)))
        self._record("node_replaced", lost=node, spare=spare, first_rank=ranks.start, ranks=len(ranks))
        self._blamed = None
        self.recovery = recovery
        self.generation += 1
        self.epoch += 1  # what the managers that are there now report is of the past
        self._begin_fence(failure)
        self._out += self.world.move(ranks, spare, self._now)
        self._out += self.world.begin(self._now, urgent=True, crowded=True)

    # --- helpers ----------------------------------------------------------------------------------

    def _arrived(self, node: int) -> bool:
        """Note that a node has done its part of this phase; return True if it was the last one."""
        if node not in self._waiting_for:
            raise UnexpectedEventError(f"node {node} answered twice in phase {self.phase.value}")
        self._waiting_for.discard(node)
        return not self._waiting_for

    def _enter(self, phase: Phase) -> None:
        if phase not in FOLLOWS[self.phase]:
            raise UnexpectedEventError(f"no way from phase {self.phase.value} to {phase.value}")
        self.phase = phase
        self._since = self._now
        if phase is Phase.PREPARING and self.world is not None and self.world.running:
            self._out += self.world.make_room(self._now)

    def _mark(self, name: str) -> None:
        assert self.recovery is not None
        self.recovery.mark(name, self._now)

    def _stop(self, exit_code: int, reason: str, lost: int | None = None) -> None:
        if self.phase in (Phase.STOPPING, Phase.DONE):
            return
        name = "finished" if exit_code == ExitCode.FINISHED else "job_failed"
        self._record(
            name,
            exit_code=int(exit_code),
            reason=reason,
            iteration=self.iteration,
            generation=self.generation,
        )
        self.outcome = Done(int(exit_code), reason)
        self._blamed = None
        self._waiting_for = set(range(self._nodes)) - self._gone - ({lost} if lost is not None else set())
        if self.phase is Phase.JOINING:
            self._waiting_for &= set(self._roster.joined)
        for node in range(self._nodes):
            self._send(node, m.Shutdown(int(exit_code), reason))
        self._enter(Phase.STOPPING)
        if not self._waiting_for:
            self._finish()

    def _finish(self) -> None:
        assert self.outcome is not None
        self._enter(Phase.DONE)
        self._out.append(self.outcome)

    def _send(self, node: int, message: m.ToAgent) -> None:
        self._out.append(Send(node, message))

    def _record(self, event: str, **fields: Any) -> None:
        self._out.append(Record(event, fields))

    def _flush(self) -> list[Action]:
        out, self._out = self._out, []
        return out
