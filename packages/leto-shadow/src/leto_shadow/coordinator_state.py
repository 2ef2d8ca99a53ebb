"""What the coordinator knows, and the few ways to change it: phases, answers that are awaited, the end.

The lowest layer of `leto_shadow.coordinator`, which lists the invariants.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from leto_shadow import messages as m
from leto_shadow.actions import Action, Done, Record, Send, UnexpectedEventError
from leto_shadow.classifier import Classifier, Failure, Ruling
from leto_shadow.config import JobPolicy
from leto_shadow.exit_codes import KEEPS_MEMORY, ExitCode
from leto_shadow.hang import HangDetector
from leto_shadow.levels import NextWorld
from leto_shadow.phases import FOLLOWS, Phase
from leto_shadow.preinit import PreinitController
from leto_shadow.recovery import Recovery
from leto_shadow.roster import Roster

__all__ = ["CoordinatorState"]


class CoordinatorState:
    """State and helpers; no event of its own."""

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
        self._retired: set[int] = set()
        """Nodes that live and can have no ranks, because their devices are not operable."""
        self._leaving: set[int] = set()
        """Nodes that were asked to retire, until their ranks are given to others."""
        self._fit_early: set[int] = set()
        """Those of them whose devices are operable again already."""
        self._gone: set[int] = set()
        self._turned_away: set[int] = set()
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
        self._fired: set[str] = set()
        """Drills and injections that have struck (`leto_shadow.fired`)."""
        self._trains_since: float | None = None
        """When the job trained for the first time, in an earlier attempt perhaps."""
        self._set_up_failures: list[Failure] = []  # that resemble each other, one after the other
        self._blamed: tuple[float, Failure] | None = None  # a failure whose cause is still to be reported
        self._verdicts = 0
        self._asked: dict[int, tuple[Recovery, Failure, Ruling, float]] = {}  # the hook has not answered yet

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
        self._asked.clear()
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

    def _send(self, node: int, message: m.ToAgent) -> None:
        self._out.append(Send(node, message))

    def _record(self, event: str, **fields: Any) -> None:
        self._out.append(Record(event, fields))

    def _flush(self) -> list[Action]:
        out, self._out = self._out, []
        return out
