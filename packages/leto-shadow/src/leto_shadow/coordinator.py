"""The job-wide coordinator: generations, recovery phases and decisions, without I/O (paper section 3.4).

One instance lives in the agent of node rank 0. It takes messages of the agents, beats and the time, and
returns `leto_shadow.actions`; it never looks at a clock or a socket, so the tests run it through thousands of
failure schedules in simulated time. Phases and legal messages: `leto_shadow.phases`. It is built in layers:
`coordinator_state`, `coordinator_recovery`, `coordinator_nodes`, and here events, messages and time.

Upheld here: I-4 (no promotion before every node has proven the older generations dead), I-5 (one decision
from *all* summaries, sent to all; all must resume at the same iteration from the same source), I-6 (a fatal
failure replaces the managers of *all* ranks, so that no rank mixes retained state with a checkpoint), I-7
(stores of dead worlds are closed; stale messages are rejected and counted).
"""

from __future__ import annotations

from typing import Any

from leto_shadow import messages as m
from leto_shadow.actions import Action, CloseStore, UnexpectedEventError
from leto_shadow.classifier import Failure, FailureKind
from leto_shadow.config import beat_s
from leto_shadow.coordinator_nodes import CoordinatorNodes
from leto_shadow.exit_codes import ExitCode
from leto_shadow.hang import Hang
from leto_shadow.phases import LEGAL, Phase

__all__ = ["Coordinator"]


class Coordinator(CoordinatorNodes):
    """Drive with its event methods (`receive` to `tick`); carry out the actions that they return."""

    # --- events -----------------------------------------------------------------------------------

    def receive(self, node: int, message: m.FromAgent, now: float) -> list[Action]:
        """Take one message of an agent."""
        self._now = now
        self._heard[node] = now
        name = type(message).__name__
        if isinstance(message, m.Fired):
            self._fired.add(message.what)  # whatever became of the node since
        if node in self._gone:
            self.stale[name] += 1
            self._turn_away(node)
            return self._flush()
        if self._is_stale(message):
            self.stale[name] += 1
            if isinstance(message, m.ActiveFailed):
                self._takeover_refused(message)  # beside one of another rank, which has ended its generation
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
        if node in self._gone:  # its trainers may wait for ever for peers that are dead, and say nothing
            self.stale["Beat"] += 1
            self._turn_away(node)
            return self._flush()
        if self.phase is Phase.TRAINING:
            self.hang.observe(beat.progress, now)
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

    def hook_answered(self, number: int, answer: str, error: str, now: float) -> list[Action]:
        """The operator's hook said "hof", "ff" or "default" of a verdict; or ``error``: why not."""
        self._now = now
        self._hook_said(number, answer, error)
        return self._flush()

    @property
    def asks_hook(self) -> frozenset[int]:
        """Verdicts that the hook is expected to answer still."""
        return frozenset(self._asked)

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
                # Whatever stopped it, the memory of all ranks is whole: another agent may take it over.
                self._stop(ExitCode.AGENT_LOST, "the helper process opens no TCPStore for the next world")
            if self.outcome is not None:
                return self._flush()
        for number, (_, _, _, since) in list(self._asked.items()):
            if now - since > deadlines.classify_s:
                self._hook_said(number, "", f"no answer within {deadlines.classify_s:g} s")
        if self._blamed is not None and now - self._blamed[0] > deadlines.culprit_s:
            self._fail(self._culprit(self._blamed[1]))
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
            case m.Fired():
                pass  # noted already
            case m.Retired():
                self._on_retired(node)
            case m.SpareUnfit(reason=reason):
                self._on_spare_unfit(node, reason)
            case m.Fit():
                self._on_fit(node)
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
            case m.SurvivorAt(rank=rank, sid=sid, level=level):
                assert world is not None
                self._out += world.survivor_at(rank, sid, level, self._now)
            case m.Fenced(survivors=survivors):
                assert world is not None
                self._out += world.fenced(self.ranks_of[node], survivors, self._now)
                if self._judge_devices(message) and self._arrived(node):
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
                    message.facts,
                    message.detected_s,
                    message.drill,
                    message.reported and not message.secondary,
                )
                self._takeover_refused(message)
                if not message.secondary:
                    self._fail(failure)
                elif self._blamed is None:
                    self._blamed = (self._now, failure)
            case m.FinishedOf(rank=rank, iteration=iteration):
                self._finished[rank] = iteration
                self.hang.finished(rank)
                self._maybe_finish()

    # --- time -------------------------------------------------------------------------------------

    def _check_progress(self) -> None:
        self._note_progress()
        hang = self.hang.check(self._now)
        if hang is not None:
            self._fail(self._hung(hang))

    def _hung(self, hang: Hang, why: str = "") -> Failure:
        where = "all ranks wait for each other" if hang.collective else "its main thread stands still"
        detail = f"no progress for {hang.stalled_s:.1f} s in phase {hang.name} ({where}){why}"
        iteration = max(hang.iteration, self.iteration)
        return Failure(FailureKind.HANG, hang.rank, iteration, detail, None, hang.stalled_s)

    def _culprit(self, blamed: Failure) -> Failure:
        """No peer of a rank that lost one has ended: one that hangs is to blame, or else it is itself."""
        hang = self.hang.suspect(blamed.rank) if self.phase is Phase.TRAINING else None
        if hang is None:
            return blamed
        return self._hung(hang, f"; rank {blamed.rank} gave up waiting: {blamed.words}")

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
        if self.phase is Phase.FENCING and not missing:
            return  # all are fenced; the operator's hook is asked, which has a deadline of its own
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
