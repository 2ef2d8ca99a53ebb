"""What an agent knows, and the few ways to change it: kill, fence, end.

The lowest layer of `leto_shadow.agent_core`, which lists the invariants.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection
from typing import Any

from leto_shadow import messages as m
from leto_shadow import wire
from leto_shadow.agent_actions import (
    AgentAction,
    Exit,
    KillTrainer,
    Note,
    Tell,
    TellTrainer,
)
from leto_shadow.config import BEAT_S, Deadlines
from leto_shadow.drills import Drill, Lose
from leto_shadow.exit_codes import KEEPS_MEMORY
from leto_shadow.fired import of_drill
from leto_shadow.node_managers import NodeManagers
from leto_shadow.operability import DeviceFacts
from leto_shadow.reclaim import ReclaimDesk
from leto_shadow.retirement import Retirement
from leto_shadow.trainer_states import TrainerRecord, TrainerState

__all__ = ["KILL_AGAIN_S", "AgentState"]

KILL_AGAIN_S = 1.0


class AgentState:
    """State of one node. ``drills`` are those of the whole job; each rank gets its own unfired ones.

    ``succession``: if this agent fails, another one may be started in its place and take over its managers.
    ``coordinates``: its process runs the job's coordinator as well, and stays as long as the job.
    ``fired``: drills and injections that have struck, as far as is known here (`leto_shadow.fired`).
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
        coordinates: bool = False,
        cold_spares: bool = False,
        fired: Collection[str] = (),
    ) -> None:
        self.node = node
        self.coordinates = coordinates
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
        self.fired = set(fired)
        self._drills = {drill.id: drill for drill in drills if of_drill(drill.id) not in self.fired}
        self.trains_since: float | None = None
        """When the job trained for the first time; None if it has not, or nobody said so."""
        self._losses: dict[int, list[tuple[str, Lose, int]]] = {}
        self._hints: dict[int, dict[str, float]] = {}
        """By rank, what its trainers have left for later ones."""
        self._heard = now
        self._now = now
        self._succession = succession
        self._is_spare = False
        self._cold_spares = cold_spares
        self._last_spare_sid = 0
        self._spare_failures: dict[int, tuple[int, float]] = {}
        self.retirement: Retirement | None = None
        self._unfit_before = ""
        self._xids_before: frozenset[str] | None = None
        self._looks_ahead = False
        self._next_look_ahead = now
        self._retired_owed = False
        self._held: list[m.Held] = []
        self._reached: dict[int, int] = {}
        self._unfenced: set[int] = set()
        self._fence_owed = False
        self._repairing: set[int] = set()
        self._lost_pages = 0
        self._suspects: set[int] = set()  # ranks whose trainer may have met a memory error
        self._ended_at: dict[int, int] = {}
        self._last_unfit: dict[int, DeviceFacts] = {}
        self._injected_until = -math.inf
        self._unfit: dict[int, DeviceFacts] = {}  # of trainers that have ended, until the fence reports them
        self._reports_progress = False  # a script that never does is not watched for hangs
        self._reclaims = ReclaimDesk()
        self._out: list[AgentAction] = []

    def beat(self, clock_s: float, lost_since: Callable[[float], float] = lambda _moment: 0.0) -> m.Beat:
        """Return the sign of life to send; ``clock_s`` is on the clock of the trainers' progress pages.

        ``lost_since`` says how many seconds after a moment of that clock do not count, since this agent was
        away: what stops it, a frozen container for one, stops its trainers as well, and that is no hang.
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
                    max(0.0, clock_s - since - lost_since(since)),
                )
                for t, since in ((t, max(t.changed_s, t.excused_s)) for t in self.trainers.values())
                if t.generation == self.generation
                and t.state is TrainerState.TRAINING
                and self._reports_progress
            ),
        )

    def active_of(self, rank: int) -> TrainerRecord | None:
        """The promoted trainer of a local rank, if it lives."""
        return next((t for t in self._alive() if t.rank == rank and t.generation is not None), None)

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

    def _alive(self) -> list[TrainerRecord]:
        return list(self.trainers.values())

    def _older(self) -> list[TrainerRecord]:
        return [t for t in self._alive() if t.generation is not None and t.generation < self.generation]

    def _kill(self, trainer: TrainerRecord, *, failed: bool = False) -> None:
        trainer.state = TrainerState.FAILED if failed else TrainerState.KILLED
        trainer.kill_at = self._now + KILL_AGAIN_S
        self._out.append(KillTrainer(trainer.sid))

    def _maybe_fenced(self) -> None:
        if self._fence_owed and not self._older() and not self._unfenced:
            self._fence_owed = False
            unfit = tuple(m.Unfit(rank, facts) for rank, facts in sorted(self._unfit.items()))
            self._last_unfit, self._unfit = self._unfit, {}
            self._tell(m.Fenced(self.generation, unfit, self._survivors()))

    def _survivors(self) -> tuple[m.Survivor, ...]:
        raise NotImplementedError  # `leto_shadow.agent_survivors`

    @property
    def _nothing_left(self) -> bool:
        return not self.trainers and self.managers.settled(keep=False)

    def _maybe_retired(self) -> None:
        if self._retired_owed and self._nothing_left:
            self._retired_owed = False
            self._tell(m.Retired(self.generation))

    def _active_failed(
        self,
        rank: int,
        generation: int,
        detail: str,
        trainer: TrainerRecord | None = None,
    ) -> None:
        iteration, detected_s, secondary, drill = 0, 0.0, False, False
        facts = None if trainer is None else trainer.facts
        if trainer is not None:
            iteration, secondary, drill = trainer.iteration, trainer.secondary, trainer.fired_at is not None
            since = trainer.fired_at if trainer.fired_at is not None else self._now
            detected_s = self._now - since
        reported = trainer is not None and trainer.reported
        refused = trainer.parked_bytes if trainer is not None and trainer.memory else 0
        self._tell(
            m.ActiveFailed(
                rank, generation, iteration, detail, facts, detected_s, secondary, drill, reported, refused
            )
        )

    def _fires(self, what: str) -> None:
        """A drill or an injection strikes: others must know, even if this node is lost in the same moment."""
        self.fired.add(what)
        self._tell(m.Fired(what))

    def _tell(self, message: m.FromAgent) -> None:
        self._out.append(Tell(message))

    def _tell_trainer(self, trainer: TrainerRecord, message: wire.AgentMessage) -> None:
        self._out.append(TellTrainer(trainer.sid, message))

    def _note(self, event: str, **fields: Any) -> None:
        self._out.append(Note(event, fields))

    def _flush(self) -> list[AgentAction]:
        out, self._out = self._out, []
        return out
