"""The preinitialization controller: properties over any sequence of events, and one deliberately broken
variant each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leto_shadow.preinit import MemoryView, PreinitController, PreinitPolicy, _Rank

MIB = 1 << 20
POLICY = PreinitPolicy(reserve_mib=100, l2_mib=1000, l3_mib=2000, settle_s=5.0)
TOTAL = 80_000 * MIB


def view(free_mib: int, spare_mib: int = 0) -> MemoryView:
    return MemoryView(free_mib * MIB, TOTAL, spare_mib * MIB)


def controller(highest: int = 3) -> PreinitController:
    return PreinitController([0, 1], highest, POLICY)


# --- examples ---------------------------------------------------------------------------------------


def test_the_levels_of_figure_13() -> None:
    """Pressure rises, rises again and subsides, with a failure in each phase."""
    preinit = controller()
    assert [preinit.level(rank) for rank in (0, 1)] == [3, 3]

    (change,) = preinit.reclaimed(0, 3, 10.0)
    assert (change.rank, change.level) == (0, 1)
    preinit.measured(0, view(1500), 0)
    assert preinit.tick(14.9) == []
    (change,) = preinit.tick(15.0)
    assert (change.level, change.reason) == (2, "headroom of 1500 MiB")
    assert preinit.level(1) == 3, "the other rank's device has room"

    assert preinit.recovered(20.0) == []
    assert preinit.level(0) == 2, "the observed peak leaves no room for L3"
    assert preinit.ceiling(0) == 3

    preinit.reclaimed(0, 2, 30.0)
    preinit.measured(0, view(300), 0)
    assert preinit.tick(100.0) == [], "nothing above L1 fits or is allowed"
    assert preinit.level(0) == 1
    assert preinit.recovered(110.0) == []

    preinit.measured(0, view(900, spare_mib=5000), 1)  # a cache full of what is not needed any more
    (change,) = preinit.recovered(120.0)
    assert change.level == 3


def test_the_lowest_headroom_since_the_reclaim_counts() -> None:
    preinit = controller()
    preinit.reclaimed(0, 3, 0.0)
    for free in (5000, 900, 5000):
        preinit.measured(0, view(free), 0)
    assert preinit.tick(5.0) == []
    assert preinit.level(0) == 1


def test_nothing_is_decided_before_something_is_measured() -> None:
    preinit = controller()
    preinit.reclaimed(0, 3, 0.0)
    assert preinit.tick(60.0) == []
    preinit.measured(0, view(1500), 0)
    (change,) = preinit.tick(60.1)
    assert change.level == 2


def test_what_the_shadow_holds_is_headroom() -> None:
    preinit = controller()
    preinit.footprint(0, 3, 1800 * MIB)
    preinit.measured(0, view(100), 3)
    assert preinit.recovered(1.0) == [], "1,900 MiB: L3 and the reserve"
    preinit.measured(0, view(99), 3)
    (change,) = preinit.recovered(2.0)
    assert change.level == 2


def test_a_generation_that_was_not_measured_changes_nothing_but_is_looked_at_again() -> None:
    preinit = controller()
    preinit.reclaimed(0, 3, 0.0)
    assert preinit.recovered(1.0) == []
    assert preinit.level(0) == 1
    preinit.measured(0, view(50_000), 1)
    (change,) = preinit.tick(6.0)
    assert change.level == 3, "the ceiling was lifted by the recovery"


def test_a_shadow_that_does_not_fit_is_treated_like_one_that_was_reclaimed() -> None:
    preinit = controller()
    (change,) = preinit.did_not_fit(0, 3, 0.0)
    assert (change.level, preinit.ceiling(0)) == (1, 2)


def test_measured_footprints_replace_the_assumed_ones() -> None:
    preinit = controller()
    preinit.footprint(0, 2, 2500 * MIB)
    assert preinit.footprint_bytes(0, 3) == 2500 * MIB, "L3 takes no less than L2"
    preinit.footprint(0, 3, 600 * MIB)
    assert preinit.footprint_bytes(0, 2) == 600 * MIB
    preinit.footprint(0, 3, 0)
    preinit.footprint(0, 1, 9 * MIB)
    assert [preinit.footprint_bytes(0, level) for level in (1, 3)] == [0, 600 * MIB]


def test_what_is_parked_must_fit_too() -> None:
    preinit = controller()
    preinit.footprint(0, 3, 1500 * MIB, 400 * MIB)
    assert (preinit.footprint_bytes(0, 3), preinit.promotion_bytes(0, 3)) == (1500 * MIB, 1900 * MIB)
    preinit.measured(0, view(500), 3)
    assert preinit.recovered(1.0) == [], "2,000 MiB: L3, what its promotion takes, the reserve"
    preinit.measured(0, view(499), 3)
    (change,) = preinit.recovered(2.0)
    assert change.level == 2
    preinit.footprint(0, 3, 1500 * MIB)
    assert preinit.promotion_bytes(0, 3) == 1900 * MIB, "what a reclaim brought says nothing of it"
    preinit.footprint(0, 3, 1900 * MIB, 0)
    assert preinit.promotion_bytes(0, 3) == 1900 * MIB, "one that is promoted at once parks nothing"


def test_what_is_assumed_of_l3_is_with_what_is_parked() -> None:
    """Where the driver does not say what a process holds."""
    preinit = controller()
    preinit.footprint(0, 3, 0, 400 * MIB)
    assert (preinit.footprint_bytes(0, 3), preinit.promotion_bytes(0, 3)) == (1600 * MIB, 2000 * MIB)
    preinit.footprint(0, 2, 1900 * MIB)
    assert preinit.footprint_bytes(0, 3) == 1600 * MIB, "L2 holds the stacks, L3 does not"
    preinit.footprint(0, 2, 2100 * MIB)
    assert preinit.promotion_bytes(0, 3) == 2100 * MIB, "L3 needs no less than L2"
    preinit.footprint(0, 3, 1000 * MIB, 400 * MIB)
    assert preinit.footprint_bytes(0, 2) == 1400 * MIB


def test_a_takeover_that_was_refused_is_a_measurement() -> None:
    preinit = controller()
    preinit.footprint(0, 3, 1500 * MIB, 400 * MIB)
    preinit.measured(0, view(50_000), 3)
    preinit.refused(0)
    assert preinit.level(0) == 3, "the recovery goes on; it decides at its end"
    assert [(change.level, change.reason) for change in preinit.recovered(1.0)] == [
        (2, "headroom of 1899 MiB that a takeover was refused")
    ]
    assert preinit.ceiling(0) == 3
    preinit.measured(0, view(50_000), 2)
    (change,) = preinit.recovered(2.0)
    assert (change.level, change.reason.split()[-1]) == (3, "peak")
    preinit.refused(0)
    (change,) = preinit.recovered(3.0)
    assert change.level == 2, "also where nothing else was measured"


@pytest.mark.parametrize("highest", [0, 1, 2, 3])
def test_the_policys_highest_level_is_never_exceeded(highest: int) -> None:
    preinit = controller(highest)
    preinit.measured(0, view(70_000), 0)
    preinit.recovered(1.0)
    assert preinit.level(0) == highest
    preinit.reclaimed(0, 2, 2.0)
    assert preinit.level(0) == min(highest, 1)


def test_a_level_that_does_not_exist_is_refused() -> None:
    with pytest.raises(ValueError, match="found 4"):
        controller(4)


# --- properties -------------------------------------------------------------------------------------

Event = tuple[Any, ...]
RANKS = st.sampled_from([0, 1])
SIZES = st.integers(0, 6000)
EVENTS = st.lists(
    st.one_of(
        st.tuples(st.just("reclaim"), RANKS, st.integers(0, 9000)),
        st.tuples(st.just("measure"), RANKS, SIZES, st.integers(-3000, 3000)),
        st.tuples(st.just("footprint"), RANKS, st.sampled_from([2, 3]), st.integers(1, 5000)),
        st.tuples(st.just("park"), RANKS, st.integers(0, 5000), st.integers(0, 3000)),
        st.tuples(st.just("refuse"), RANKS),
        st.tuples(st.just("misfit"), RANKS),
        st.tuples(st.just("recover")),
        st.tuples(st.just("wait"), st.floats(0.0, 20.0)),
    ),
    max_size=60,
)


def run(events: list[Event], highest: int, check: Callable[[PreinitController, Event], None]) -> None:
    """Drive a controller as the coordinator does: what is reclaimed stands at the level that it was
    allowed."""
    preinit, now = controller(highest), 0.0
    for event in events:
        match event:
            case ("reclaim", rank, _):
                if preinit.level(rank) > 1:
                    preinit.reclaimed(rank, preinit.level(rank), now)
            case ("measure", rank, free, spare):
                preinit.measured(rank, view(free, spare), preinit.level(rank))
            case ("footprint", rank, level, held):
                preinit.footprint(rank, level, held * MIB)
            case ("park", rank, held, parked):
                preinit.footprint(rank, 3, held * MIB, parked * MIB)
            case ("refuse", rank):
                preinit.refused(rank)
            case ("misfit", rank):
                if preinit.level(rank) > 1:
                    preinit.did_not_fit(rank, preinit.level(rank), now)
            case ("recover",):
                preinit.recovered(now)
            case ("wait", seconds):
                now += seconds
                preinit.tick(now)
        check(preinit, event)


class Watch:
    """The rules that hold after every event."""

    def __init__(self) -> None:
        self.ceilings = {0: 3, 1: 3}
        self.levels: dict[int, int] = {}

    def __call__(self, preinit: PreinitController, event: Event) -> None:
        for rank in (0, 1):
            level, ceiling = preinit.level(rank), preinit.ceiling(rank)
            assert level <= ceiling <= preinit.highest, "above what is allowed"
            if event[0] != "recover":
                assert ceiling <= self.ceilings[rank], "a ceiling rose before a recovery"
                assert preinit.reclaims(rank) <= 2, "more reclaims than levels with GPU memory"
                if event[0] != "wait" and rank in self.levels:
                    assert level <= self.levels[rank], "a level rose without a decision"
            if event[:2] == ("reclaim", rank) and self.levels.get(rank, 0) > 1:
                assert ceiling < self.levels[rank], "the reclaimed level is still allowed"
            self.ceilings[rank], self.levels[rank] = ceiling, level
        assert 0 <= preinit.footprint_bytes(0, 2) <= preinit.promotion_bytes(0, 3)
        assert 0 <= preinit.footprint_bytes(0, 3) <= preinit.promotion_bytes(0, 3)


@given(EVENTS, st.sampled_from([0, 1, 2, 3]))
def test_levels_only_fall_between_recoveries(events: list[Event], highest: int) -> None:
    run(events, highest, Watch())


@given(st.integers(0, 6000), st.integers(1, 3000), st.integers(0, 3000), st.integers(0, 1500))
def test_the_chosen_level_is_the_highest_that_can_be_promoted(
    headroom: int, l2: int, more: int, parked: int
) -> None:
    parked = min(parked, l2 + more - 1)
    preinit = controller()
    preinit.footprint(0, 2, l2 * MIB)
    preinit.footprint(0, 3, (l2 + more - parked) * MIB, parked * MIB)
    preinit.measured(0, view(headroom), 0)
    preinit.recovered(0.0)
    needs = {1: 0, 2: l2 + POLICY.reserve_mib, 3: l2 + more + POLICY.reserve_mib}
    assert preinit.level(0) == max(level for level, need in needs.items() if level == 1 or need <= headroom)


# --- mutants ----------------------------------------------------------------------------------------


def return_to_the_same_level(patch: pytest.MonkeyPatch) -> None:
    lower = PreinitController._lower
    patch.setattr(
        PreinitController, "_lower", lambda s, rank, level, now, why: lower(s, rank, level + 1, now, why)
    )


def forget_the_ceiling(patch: pytest.MonkeyPatch) -> None:
    lower = PreinitController._lower

    def forgetful(self: PreinitController, rank: int, level: int, now: float, why: str) -> Any:
        changes = lower(self, rank, level, now, why)
        self._ranks[rank].ceiling = self.highest
        return changes

    patch.setattr(PreinitController, "_lower", forgetful)


def ignore_the_reserve(patch: pytest.MonkeyPatch) -> None:
    def fitting(self: PreinitController, one: Any, headroom: int) -> int:
        return min(max((x for x in (2, 3) if one.promotion(x) <= headroom), default=1), one.ceiling)

    patch.setattr(PreinitController, "_fitting", fitting)


def forget_what_is_parked(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(_Rank, "promotion", lambda self, level: self.footprint[level])


def forget_what_was_refused(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PreinitController, "refused", lambda self, rank: None)


def take_the_lowest_level_that_fits(patch: pytest.MonkeyPatch) -> None:
    fitting = PreinitController._fitting
    patch.setattr(PreinitController, "_fitting", lambda self, one, room: min(2, fitting(self, one, room)))


def believe_the_last_measurement(patch: pytest.MonkeyPatch) -> None:
    measured = PreinitController.measured

    def last(self: PreinitController, rank: int, seen: MemoryView, held: int) -> Any:
        self._ranks[rank].since_reclaim = self._ranks[rank].at_peak = None
        return measured(self, rank, seen, held)

    patch.setattr(PreinitController, "measured", last)


MUTANTS: dict[Callable[[pytest.MonkeyPatch], None], Callable[[], None]] = {
    return_to_the_same_level: test_levels_only_fall_between_recoveries,
    forget_the_ceiling: test_levels_only_fall_between_recoveries,
    ignore_the_reserve: lambda: test_the_chosen_level_is_the_highest_that_can_be_promoted(),
    forget_what_is_parked: lambda: test_the_chosen_level_is_the_highest_that_can_be_promoted(),
    forget_what_was_refused: test_a_takeover_that_was_refused_is_a_measurement,
    take_the_lowest_level_that_fits: lambda: test_the_chosen_level_is_the_highest_that_can_be_promoted(),
    believe_the_last_measurement: test_the_lowest_headroom_since_the_reclaim_counts,
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=[one.__name__ for one in MUTANTS])
def test_a_broken_controller_is_caught(
    mutant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        MUTANTS[mutant]()
