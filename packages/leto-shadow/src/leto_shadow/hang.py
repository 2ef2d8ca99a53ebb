"""Hang detection: who stands still, for how long is that normal, and whose fault is it (paper section 3.4).

The input is the progress of every active rank's *main thread*, read by the agents from shared memory (case
16: a hung rank may hold the GIL and answer nothing). A rank that is `waiting` (inside a collective where
these are watched, else in a phase that has one) stands still because another one is late, so it is no culprit
while anybody works or stands behind it. The culprit is the stalled rank that is oldest by (iteration, phase).

A node that is cut off tells nothing of its ranks. Silence alone blames nobody: a network that stutters is no
hang of the training. But a rank that was last seen waiting may wait for ever while the others are past their
deadlines: it is taken to wait still.

Deadlines adapt: a phase may take `factor` times the longest dwell seen in it, within bounds; phases not
seen yet and the first iterations of a generation get a generous one. Waiting and working in a phase are
learned apart: how long others kept a rank waiting says nothing about how long its own work takes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from leto_shadow.config import HangPolicy
from leto_shadow.messages import RankProgress
from leto_shadow.progress import Phase

__all__ = ["Hang", "HangDetector"]

_FORGET = 0.05  # the longest dwell drifts towards newer ones, so that one outlier does not last for ever
_NOTICED_S, _NOTICED_FACTOR = 5.0, 2.0  # of a dwell: less is no reason why another rank gave up waiting


@dataclass(frozen=True)
class Hang:
    rank: int
    iteration: int
    phase: int
    stalled_s: float
    deadline_s: float
    collective: bool
    """All ranks were waiting for each other: the culprit is only the oldest of them."""

    @property
    def name(self) -> str:
        """Of the phase; its number where this version knows no name for it."""
        return Phase.word(self.phase) or str(self.phase)


@dataclass
class _Rank:
    last: RankProgress
    stalled_s: float
    first_iteration: int
    heard_s: float


class HangDetector:
    """Feed it every beat; ask `check` on every tick."""

    def __init__(self, policy: HangPolicy) -> None:
        self._policy = policy
        self._ranks: dict[int, _Rank] = {}
        self._dwell: dict[tuple[int, bool], float] = {}  # by (phase, waiting)
        self._generation = -1

    def begin(self, generation: int) -> None:
        """A generation starts to train: forget positions, keep what was learned about durations."""
        self._generation = generation
        self._ranks.clear()

    def finished(self, rank: int) -> None:
        """The rank has nothing left to do."""
        self._ranks.pop(rank, None)

    def observe(self, progress: Iterable[RankProgress], now: float) -> None:
        """Take the ranks' newest positions, heard now; those of another generation are ignored."""
        for new in progress:
            if new.generation != self._generation:
                continue
            known = self._ranks.get(new.rank)
            if known is None:
                self._ranks[new.rank] = _Rank(new, new.age_s, new.iteration, now)
                continue
            known.heard_s = now
            if new.counter > known.last.counter:
                if not self._warming_up(known):
                    self._learn(known.last, new.changed_s - known.last.changed_s)
                known.last = new
            if new.counter == known.last.counter:
                known.stalled_s = new.age_s

    def deadline_s(self, rank: int) -> float:
        """How long the rank may stand where it stands."""
        known = self._ranks[rank]
        phase, waiting = known.last.phase, known.last.waiting
        dwell = self._dwell.get((phase, waiting), self._dwell.get((phase, not waiting)))
        if dwell is None or self._warming_up(known):
            return self._policy.initial_s
        return min(max(self._policy.factor * dwell, self._policy.min_s), self._policy.max_s)

    def min_iteration(self) -> int | None:
        """Iteration of the rank that is furthest behind."""
        return min((known.last.iteration for known in self._ranks.values()), default=None)

    def check(self, now: float) -> Hang | None:
        """Return the hang and its culprit, if there is one now."""
        stalled = {
            rank: known for rank, known in self._ranks.items() if known.stalled_s > self.deadline_s(rank)
        }
        working = {rank: known for rank, known in stalled.items() if not known.last.waiting}
        if working:
            return self._hang(working, collective=False)
        if not stalled:
            return None
        if len(stalled) == len(self._ranks):
            return self._hang(stalled, collective=True)
        late = {rank: known for rank, known in self._ranks.items() if rank not in stalled}
        if all(known.last.waiting for known in late.values()):
            waited = {rank: known.stalled_s + now - known.heard_s for rank, known in late.items()}
            if any(waited_s <= self.deadline_s(rank) for rank, waited_s in waited.items()):
                return None  # they arrived later: their own deadline comes
            return self._hang(self._ranks, collective=True)
        if max(known.stalled_s for known in stalled.values()) > self._policy.max_s:
            busy = {rank: known for rank, known in late.items() if not known.last.waiting}
            return self._hang(busy, collective=False)
        return None

    def suspect(self, accuser: int) -> Hang | None:
        """Return whom ``accuser`` has waited for in vain, which ended for that reason; None if nobody stands
        still without waiting, for twice as long as its phase ever takes.

        A communicator's own timeout may come before the deadline of the rank that keeps the others waiting.
        But the accuser's connection may as well have been one to a file server, while the others work.
        """
        standing = {
            rank: known
            for rank, known in self._ranks.items()
            if rank != accuser and not known.last.waiting and known.stalled_s > self._noticed_s(known)
        }
        return self._hang(standing, collective=False) if standing else None

    def _hang(self, among: dict[int, _Rank], *, collective: bool) -> Hang:
        def age(rank: int) -> tuple[int, int, float]:
            last = among[rank].last
            return (last.iteration, last.phase, -among[rank].stalled_s)

        rank = min(among, key=age)
        known = among[rank]
        return Hang(
            rank,
            known.last.iteration,
            known.last.phase,
            known.stalled_s,
            self.deadline_s(rank),
            collective,
        )

    def _noticed_s(self, known: _Rank) -> float:
        """How long a rank may stand at work where it stands without being suspected when another one gives
        up. That is no deadline: a user's generous `min_s` is for who may work on."""
        dwell = self._dwell.get((known.last.phase, False), 0.0)
        return max(min(self._policy.min_s, _NOTICED_S), _NOTICED_FACTOR * dwell)

    def _warming_up(self, known: _Rank) -> bool:
        return known.last.iteration < known.first_iteration + self._policy.warmup_iterations

    def _learn(self, where: RankProgress, dwell_s: float) -> None:
        key = (where.phase, where.waiting)
        known = self._dwell.get(key, 0.0)
        self._dwell[key] = max(dwell_s, known - _FORGET * (known - dwell_s))
