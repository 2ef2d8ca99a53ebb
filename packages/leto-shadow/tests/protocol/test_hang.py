"""Who is to blame when nothing moves, and how long is too long."""

from __future__ import annotations

from dataclasses import replace

import pytest

from leto_shadow.config import HangPolicy
from leto_shadow.hang import Hang, HangDetector
from leto_shadow.messages import RankProgress

FORWARD, REDUCE, UPDATE = 5, 7, 11
POLICY = HangPolicy(initial_s=100.0, min_s=2.0, max_s=60.0, factor=4.0)


class Ranks:
    """Feed a detector from a script of who does what when."""

    def __init__(self, count: int, policy: HangPolicy = POLICY) -> None:
        self.detector = HangDetector(policy)
        self.detector.begin(1)
        self.now = 0.0
        self.at = dict.fromkeys(range(count), (0, FORWARD, False, 0.0, 1))

    def move(self, rank: int, iteration: int, phase: int, waiting: bool = False) -> None:
        counter = self.at[rank][4]
        self.at[rank] = (iteration, phase, waiting, self.now, counter + 1)

    def look(self, generation: int = 1, silent: tuple[int, ...] = ()) -> None:
        """All ranks' agents tell where they are, but those of the ``silent`` ones."""
        self.detector.observe(
            (
                RankProgress(
                    rank, generation, iteration, phase, waiting, counter, changed, self.now - changed
                )
                for rank, (iteration, phase, waiting, changed, counter) in self.at.items()
                if rank not in silent
            ),
            self.now,
        )

    def check(self) -> Hang | None:
        return self.detector.check(self.now)

    def iterate(self, iterations: int, forward_s: float = 1.0) -> None:
        """All ranks in step, a few warm iterations."""
        for iteration in range(iterations):
            for phase, waiting, spent in (
                (FORWARD, False, forward_s),
                (REDUCE, True, 0.2),
                (UPDATE, False, 0.4),
            ):
                for rank in self.at:
                    self.move(rank, iteration, phase, waiting)
                self.look()
                self.now += spent
                self.look()


def test_the_culprit_is_who_stands_behind_not_who_waits() -> None:
    ranks = Ranks(3)
    ranks.iterate(4)
    ranks.move(1, 4, FORWARD)
    for rank in (0, 2):
        ranks.move(rank, 4, REDUCE, waiting=True)
    ranks.now += 3.9
    ranks.look()
    assert ranks.check() is None, "forward may take four times the second that it usually takes"
    ranks.now += 0.2
    ranks.look()
    hang = ranks.check()
    assert hang is not None
    assert (hang.rank, hang.iteration, hang.phase, hang.collective) == (1, 4, FORWARD, False)
    assert hang.deadline_s == 4.0


def test_of_two_that_stand_still_the_older_is_the_culprit() -> None:
    ranks = Ranks(3)
    ranks.iterate(4)
    ranks.move(0, 4, UPDATE)
    ranks.move(1, 4, FORWARD)
    ranks.move(2, 4, REDUCE, waiting=True)
    ranks.now += 10
    ranks.look()
    hang = ranks.check()
    assert hang is not None
    assert hang.rank == 1


def test_a_slow_rank_that_moves_is_no_hang_for_those_who_wait() -> None:
    ranks = Ranks(2)
    ranks.iterate(4)
    ranks.move(0, 4, REDUCE, waiting=True)
    for _ in range(15):
        ranks.now += 3.0
        ranks.move(1, 4, FORWARD)  # it reports progress within its phase
        ranks.look()
        assert ranks.check() is None


def test_when_all_wait_for_each_other_that_is_a_hang_too() -> None:
    ranks = Ranks(2)
    ranks.iterate(4)
    ranks.move(0, 4, REDUCE, waiting=True)
    ranks.now += 1
    ranks.move(1, 4, REDUCE, waiting=True)
    ranks.now += 1.5
    ranks.look()
    assert ranks.check() is None, "rank 1 came late and has time left"
    ranks.now += 10
    ranks.look()
    hang = ranks.check()
    assert hang is not None
    assert hang.collective
    assert hang.rank == 0


@pytest.mark.parametrize("waiting", [True, False], ids=["seen waiting", "seen working"])
def test_a_cut_cable_is_a_hang_wherever_the_rank_behind_it_was_seen_last(waiting: bool) -> None:
    ranks = Ranks(2)
    ranks.iterate(4)
    ranks.move(0, 4, REDUCE, waiting=True)
    ranks.move(1, 4, REDUCE if waiting else FORWARD, waiting)
    ranks.look()
    ranks.now += 1.9
    ranks.look(silent=(1,))
    assert ranks.check() is None
    hang = None
    while hang is None and ranks.now < 100.0:
        ranks.now += 0.2
        ranks.look(silent=(1,))
        hang = ranks.check()
    assert hang is not None
    assert hang.collective is waiting
    assert ranks.now < (20.0 if waiting else POLICY.max_s + 20.0)


def test_silence_alone_is_no_hang() -> None:
    """The network between agent and coordinator stutters, the training goes on."""
    ranks = Ranks(2)
    ranks.iterate(4)
    for iteration in range(4, 60):
        ranks.now += 0.5
        ranks.move(0, iteration, REDUCE, waiting=True)
        ranks.look(silent=(1,))
        assert ranks.check() is None


def test_a_rank_that_only_looks_busy_does_not_block_the_others_for_ever() -> None:
    ranks = Ranks(2)
    ranks.iterate(4)
    ranks.move(0, 4, REDUCE, waiting=True)
    for _ in range(200):
        ranks.now += 1.0
        ranks.move(1, 4, FORWARD)
        ranks.look()
        hang = ranks.check()
        if hang is not None:
            break
    assert hang is not None
    assert hang.rank == 1
    assert ranks.now < 80


def test_the_first_iteration_and_unknown_phases_get_time() -> None:
    ranks = Ranks(2)
    ranks.look()
    ranks.now = 99.0
    ranks.look()
    assert ranks.check() is None
    ranks.now = 101.0
    ranks.look()
    assert ranks.check() is not None


def test_deadlines_follow_what_phases_take() -> None:
    quick, slow = Ranks(1), Ranks(1)
    quick.iterate(5, forward_s=0.1)
    slow.iterate(5, forward_s=9.0)
    for ranks in (quick, slow):
        ranks.move(0, 5, FORWARD)
        ranks.look()
    assert quick.detector.deadline_s(0) == POLICY.min_s
    assert slow.detector.deadline_s(0) == pytest.approx(36.0)
    slow.iterate(0)
    for iteration in range(6, 200):  # the outlier fades when forward becomes quick
        slow.now += 0.5
        slow.move(0, iteration, FORWARD)
        slow.look()
    assert slow.detector.deadline_s(0) < 5.0


def test_what_was_learned_survives_a_recovery_but_positions_do_not() -> None:
    ranks = Ranks(1)
    ranks.iterate(5)
    ranks.detector.begin(2)
    ranks.look(generation=1)
    assert ranks.detector.min_iteration() is None, "progress of the old generation is ignored"
    ranks.look(generation=2)
    assert ranks.detector.deadline_s(0) == POLICY.initial_s, "the first iteration after a takeover"
    ranks.move(0, 6, FORWARD)
    ranks.look(generation=2)
    assert ranks.detector.deadline_s(0) == 4.0


def test_a_rank_that_hangs_in_a_waiting_phase_but_in_no_collective_is_the_culprit() -> None:
    """Where collectives are watched `waiting` is what was seen, whatever the phase; even of a rank ahead."""
    ranks = Ranks(3)
    ranks.iterate(4)
    ranks.move(0, 4, REDUCE, waiting=True)
    ranks.move(2, 4, FORWARD, waiting=True)
    ranks.move(1, 4, REDUCE, waiting=False)
    ranks.now += 10
    ranks.look()
    hang = ranks.check()
    assert hang is not None
    assert (hang.rank, hang.phase, hang.collective) == (1, REDUCE, False)

    ranks.move(1, 4, REDUCE, waiting=True)  # where they are not watched, the phase hides it
    ranks.now += 10
    ranks.look()
    hang = ranks.check()
    assert hang is not None
    assert hang.collective
    assert hang.rank != 1


def test_long_waits_in_a_phase_do_not_lengthen_the_deadline_of_work_in_it() -> None:
    ranks = Ranks(2)
    ranks.iterate(4)
    ranks.move(0, 4, FORWARD, waiting=True)  # a pipeline's first ranks wait long for the others
    ranks.look()
    ranks.now += 14
    ranks.move(0, 4, FORWARD)
    ranks.look()
    assert ranks.detector.deadline_s(0) == 4.0
    ranks.move(0, 4, FORWARD, waiting=True)
    ranks.look()
    assert ranks.detector.deadline_s(0) == pytest.approx(56.0)
    ranks.move(0, 4, UPDATE, waiting=True)
    ranks.look()
    assert ranks.detector.deadline_s(0) == POLICY.min_s, "not seen waiting there: as for work"


def test_who_waited_in_vain_accuses_the_rank_that_stands_still() -> None:
    """Nobody is past a deadline: in a generation's first iterations a communicator may give up before."""
    ranks = Ranks(4)
    ranks.look()
    ranks.move(0, 0, FORWARD, waiting=True)
    ranks.move(1, 0, REDUCE, waiting=True)
    ranks.move(2, 0, REDUCE)
    ranks.now += POLICY.min_s + 1.0
    ranks.move(3, 0, FORWARD)
    ranks.look()
    assert ranks.check() is None
    hang = ranks.detector.suspect(0)
    assert hang is not None
    assert (hang.rank, hang.stalled_s, hang.collective) == (2, POLICY.min_s + 1.0, False)
    ranks.now += POLICY.min_s + 1.0
    ranks.look()
    hang = ranks.detector.suspect(0)
    assert hang is not None
    assert hang.rank == 3, "it stands behind rank 2"


@pytest.mark.parametrize("others", ["wait", "moved"])
def test_an_accuser_that_everybody_else_waits_for_or_works_beside_is_the_culprit_itself(others: str) -> None:
    ranks = Ranks(3)
    ranks.look()
    ranks.now += POLICY.initial_s / 2
    for rank in (1, 2):
        ranks.move(rank, 0, FORWARD, waiting=others == "wait")
    ranks.now += POLICY.min_s + 1.0 if others == "wait" else POLICY.min_s - 1.0
    ranks.look()
    assert ranks.detector.suspect(0) is None
    assert ranks.detector.suspect(1) is not None, "rank 0 has stood still, and does not wait"


@pytest.mark.parametrize("min_s", [POLICY.min_s, 300.0])
def test_who_works_for_about_as_long_as_its_phase_takes_is_not_suspected(min_s: float) -> None:
    """The accuser's connection may have been one to a file server: that makes no hang of a long phase. But a
    user's patience with long phases makes no culprit of who waited."""
    ranks = Ranks(2, replace(POLICY, min_s=min_s, max_s=max(min_s, POLICY.max_s)))
    ranks.iterate(4, forward_s=20.0)
    for rank in (0, 1):
        ranks.move(rank, 4, FORWARD)
    ranks.now += 39.0
    ranks.look()
    assert ranks.detector.suspect(0) is None
    ranks.now += 2.0
    ranks.look()
    hang = ranks.detector.suspect(0)
    assert hang is not None
    assert (hang.rank, hang.stalled_s) == (1, 41.0)
    assert ranks.check() is None, "its deadline is longer"


def test_a_finished_rank_is_not_watched() -> None:
    ranks = Ranks(2)
    ranks.iterate(4)
    ranks.detector.finished(0)
    ranks.at.pop(0)
    ranks.move(1, 4, UPDATE)
    ranks.look()
    assert ranks.check() is None
    assert ranks.detector.min_iteration() == 4
