"""Collectives that are aborted under a living trainer, and return as if nothing had happened (I-6).

NCCL's do: an aborted kernel returns any bits without an error, and tells its peers that data is there which
it has not sent. gloo's raise, so a stand-in plays NCCL's here: two of three ranks are told that their world
is over, each at any place of an iteration, and their communicators are aborted right after; the third one is
told nothing. What is recovered from must be exact, whatever the ranks had believed.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from rmu_lab import LabMemory, Pool, World, Wrong

from leto_rmu import Action, Decision, Hyper, ResumableUpdater, SyncResult, decide
from leto_rmu.jobstate import JobRecord
from leto_rmu.marker import Phase
from leto_rmu.optimizers import with_beginnings

pytestmark = pytest.mark.timeout(900)

RANKS = 3
AT = 1  # the iteration in which communicators are aborted
PLACES = (
    "before reduce",
    "in reduce",
    "after reduce",
    "in sync",
    "after sync",
    "in barrier",
    "after barrier",
)
DEADLINE_S = 150.0


class Over(Exception):  # noqa: N818 - as `leto_shadow.context.Retired`
    """This rank was told that its world is over."""


class Broken(Exception):  # noqa: N818
    """A rank has left: what a barrier of gloo says then."""


class Meeting:
    """One collective: who has come, and whether one of them was aborted before it had done its part."""

    def __init__(self) -> None:
        self.arrived: set[int] = set()
        self.broken = False


class Net:
    """The collectives of a world. ``places``: where each rank is told, and aborts; None: never."""

    looks = True
    barrier_raises = True

    def __init__(self, places: Sequence[str | None]) -> None:
        self.places = places
        self.said: set[int] = set()
        self.aborted: set[int] = set()
        self.left: set[int] = set()
        self._changed = threading.Condition()
        self._meetings: dict[tuple[int, str], Meeting] = {}

    def at(self, rank: int, iteration: int, place: str) -> None:
        """The rank comes to a place of an iteration: is it told there?"""
        if iteration == AT and self.places[rank] == place:
            with self._changed:
                self.said.add(rank)  # before the abort
                self.aborted.add(rank)
                self._changed.notify_all()

    def leave(self, rank: int) -> None:
        with self._changed:
            self.left.add(rank)
            self._changed.notify_all()

    def _arrive(self, rank: int, iteration: int, name: str) -> Meeting:
        meeting = self._meetings.setdefault((iteration, name), Meeting())
        meeting.arrived.add(rank)
        self._changed.notify_all()
        return meeting

    def _wait(self, meeting: Meeting, over: Callable[[], bool]) -> None:
        met = self._changed.wait_for(lambda: len(meeting.arrived) == RANKS or over(), DEADLINE_S)
        assert met, "a rank waits for ever"

    def collective(self, rank: int, iteration: int, name: str) -> bool:
        """Whether what it returns is true; it never raises."""
        self.at(rank, iteration, f"before {name}")
        with self._changed:
            meeting = self._arrive(rank, iteration, name)
            self.at(rank, iteration, f"in {name}")
            if rank in self.aborted:
                meeting.broken = True
                self._changed.notify_all()
            self._wait(meeting, lambda: meeting.broken or bool(self.left))
            true = not meeting.broken and len(meeting.arrived) == RANKS
        self.at(rank, iteration, f"after {name}")
        return true

    def barrier(self, rank: int, iteration: int) -> None:
        if self.looks and rank in self.said:
            raise Over
        with self._changed:
            meeting = self._arrive(rank, iteration, "barrier")
            self.at(rank, iteration, "in barrier")
            if not self.barrier_raises and rank in self.aborted:
                meeting.broken = True
                self._changed.notify_all()
            self._wait(meeting, lambda: meeting.broken or bool(self.left))
            if len(meeting.arrived) < RANKS and not meeting.broken:
                raise Broken
        self.at(rank, iteration, "after barrier")


class Rank(World):
    """One rank: own gradients, a norm that all ranks agree on."""

    net: Net

    def __init__(self, number: int, **options: Any) -> None:
        super().__init__(seed=100 + number, model_bytes=0, **options)
        self.number = number
        self.arena(AT + 3)

    def live(self, up: ResumableUpdater) -> None:
        """Until the world is over, or three iterations are done."""
        up._barrier = lambda: self.net.barrier(self.number, up.iteration)
        up.said = lambda: self.number in self.net.said  # type: ignore[attr-defined]
        try:
            while (t := up.iteration) < AT + 2:
                self.begin(up)
                true = self.net.collective(self.number, t, "reduce")
                if not true:
                    up.grads.fill_(7.0)
                job = self.job(t + 1) if true else b"a loss that never was"
                up.step(self.hypers(t), job, lambda t=t: self._sync(t))  # type: ignore[misc]
        except (Over, Broken, Wrong):  # what is wrong is found when all have ended
            pass
        finally:
            self.net.leave(self.number)

    def _sync(self, t: int) -> SyncResult:
        true = self.net.collective(self.number, t, "sync")
        return self.sync(t) if true else SyncResult(clip=0.125, grad_norm=-1.0)


def run(net: Net, ranks: list[Rank]) -> tuple[Action, list[str]]:
    """Live, recover together, train on; raise Wrong unless all is exact. What was decided, and found."""
    memories: list[LabMemory] = []
    threads = []
    for rank in ranks:
        rank.net = net
        memory, up = rank.start()
        memories.append(memory)
        threads.append(threading.Thread(target=rank.live, args=(up,), daemon=True))
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(DEADLINE_S)
        assert not thread.is_alive()
    ups = [rank.updater(memory) for rank, memory in zip(ranks, memories, strict=True)]
    found = [f"{position.phase}({position.iteration})" for position in (up.position() for up in ups)]
    raw = decide([up.summary() for up in ups])
    decision = Decision.decode(raw)
    if decision.action not in (Action.RESTART, Action.FINISH):
        raise Wrong(decision.reason)
    for rank, memory, up in zip(ranks, memories, ups, strict=True):
        assert up.recover(raw).iteration == decision.iteration
        rank.check(memory, up)
        rank.train(up, decision.iteration + 1)
        rank.check(memory, up)
    return decision.action, found


def sweep(net: type[Net], kind: type[ResumableUpdater], **options: Any) -> set[tuple[Action, str]]:
    """Every pair of places at which two ranks are told. What was decided, and where the third rank was."""
    seen = set()
    ranks = [Rank(number, updater=kind, **options) for number in range(RANKS)]
    for one, other in itertools.combinations_with_replacement((None, *PLACES), 2):
        action, found = run(net((None, one, other)), ranks)
        seen.add((action, found[0]))
    return seen


def test_what_broken_collectives_leave_is_never_used() -> None:
    seen = sweep(Net, ResumableUpdater, scheme="slots", pool=Pool(data_pages=8))
    assert {(Action.RESTART, f"PROTECTED({AT})"), (Action.RESTART, f"PROTECTED({AT + 1})")} <= seen


# --- mutants ------------------------------------------------------------------------------------------


class Blind(Net):
    """Nobody looks whether the world is over before the barrier."""

    looks = False


class LikeNccl(Net):
    """A barrier that is aborted returns."""

    barrier_raises = False


class BarrierFirst(ResumableUpdater):
    """The barrier comes before the global synchronization: nothing vouches for its result."""

    def step(self, hypers: Sequence[Hyper], job_state: bytes, sync: Callable[[], SyncResult]) -> SyncResult:
        cell, t = self.cell, self.iteration
        assert self._record is not None
        hypers = with_beginnings(self.plan.check_hypers(hypers), self._record.hypers, cell.steps, True)
        record = JobRecord(t + 1, job_state, hypers)
        self.executor.run_all(self.protect_ops(cell, record))
        self._barrier()
        result = sync()
        self.executor.run(self._rank(Phase.SYNCED, t, cell.steps, result))
        self.update(hypers, result)
        self.commit(record)
        return result


class LooksAgain(BarrierFirst):
    """And each rank looks for itself when it has the result: too little, a peer's abort is not seen."""

    def step(self, hypers: Sequence[Hyper], job_state: bytes, sync: Callable[[], SyncResult]) -> SyncResult:
        def looking() -> SyncResult:
            result = sync()
            if hasattr(self, "said") and self.said():  # not where it trains on alone
                raise Over
            return result

        return super().step(hypers, job_state, looking)


@pytest.mark.parametrize(
    ("net", "kind"),
    [(Blind, ResumableUpdater), (LikeNccl, ResumableUpdater), (Net, BarrierFirst), (Net, LooksAgain)],
    ids=lambda one: one.__name__,
)
def test_mutants_are_caught(net: type[Net], kind: type[ResumableUpdater]) -> None:
    with pytest.raises(Wrong):
        sweep(net, kind)
