"""Which observations make a device unfit: golden rows, properties, and mutants that both must catch."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from leto_shadow import operability
from leto_shadow.operability import CLASS_OF, XIDS, Class, DeviceFacts, Judgement, NvidiaAction, judge

FATAL = (46, 48, 62, 64, 74, 78, 79, 95, 109, 110, 119, 120, 136, 140, 142, 143, 155, 156, 158)
FATAL += (144, 145, 146, 149, 150, 151, 159)
ON_ITS_WORD = {48, 74, 144, 145, 146, 149, 150, 159}
"""Fatal unless the driver says that it needs nothing now."""
OPERABLE = (8, 11, 13, 14, 25, 31, 32, 37, 38, 39, 43, 44, 45, 54, 60, 63, 66, 68, 69, 80, 92, 93, 94, 106)
OPERABLE += (121, 137, 141, 154, 157)

xids = st.lists(st.one_of(st.sampled_from(sorted(XIDS)), st.integers(1, 400)), max_size=6).map(tuple)
counts = st.one_of(st.none(), st.integers(0, 5))
answers = st.builds(
    DeviceFacts,
    device=st.sampled_from(["", "GPU-1"]),
    xids=xids,
    ecc_corrected=counts,
    ecc_uncorrected=counts,
    remap_pending=st.booleans(),
    remap_failed=st.booleans(),
    retirement_pending=st.booleans(),
    recovery=st.one_of(st.none(), st.integers(0, 6)),
)
silence = st.builds(DeviceFacts, answers=st.just(False), timed_out=st.booleans(), error=st.just("because"))
facts = st.one_of(answers, silence)


def check(judge: Callable[[DeviceFacts], Judgement], given: DeviceFacts) -> None:
    """What holds of every judgement; the oracle shares no code with the tables' reader."""
    found = judge(given)
    reported = set(given.xids)
    fatal = not given.answers or given.remap_failed or given.recovery not in (None, 0, 4)
    fatal = fatal or any(number in FATAL for number in reported - ON_ITS_WORD)
    if given.recovery is None:
        fatal = fatal or bool(reported & ON_ITS_WORD - {48})
        fatal = fatal or (48 in reported and not reported & {94, 63})
    assert found.operable is not fatal, given
    assert found.verdict is (Class.FF if fatal else Class.HOF)
    if fatal:
        assert found.reasons
    assert all(reason.startswith(given.device) for reason in found.reasons)
    assert judge(replace_xids(given, tuple(reversed(given.xids * 2)))).verdict is found.verdict, (
        "neither their order nor how often they came says anything"
    )
    worse = replace_xids(given, (*given.xids, 79))
    assert not judge(worse).operable, "nothing outweighs a fatal Xid"
    named = " ".join(judge(worse).reasons)
    assert "Xid 79" in named
    if given.timed_out:
        assert "did not answer in time: because" in found.reasons[0]


def replace_xids(given: DeviceFacts, numbers: tuple[int, ...]) -> DeviceFacts:
    return msgspec.structs.replace(given, xids=numbers)


@given(facts)
def test_a_judgement_follows_from_the_facts(given: DeviceFacts) -> None:
    check(judge, given)


@pytest.mark.parametrize("number", FATAL)
def test_xids_that_need_a_reset_or_more_are_fatal(number: int) -> None:
    found = judge(DeviceFacts("GPU-1", xids=(number,)))
    assert not found.operable
    row = XIDS[number]
    assert found.reasons == (f"GPU-1: Xid {number}: {row.name} ({row.action.value})",)


@pytest.mark.parametrize("number", OPERABLE)
def test_xids_of_programs_and_contained_errors_are_operable(number: int) -> None:
    assert judge(DeviceFacts(xids=(number,))).operable


def test_the_golden_rows_are_all_rows_with_a_class_of_their_own() -> None:
    fatal = {n for n, row in XIDS.items() if CLASS_OF[row.action] is Class.FF}
    assert fatal == set(FATAL)
    assert not set(OPERABLE) & fatal
    assert set(CLASS_OF) == set(NvidiaAction)


def test_memory_errors_contained_and_not() -> None:
    assert judge(DeviceFacts(xids=(48, 63, 94, 45), ecc_uncorrected=1, remap_pending=True)).operable
    assert not judge(DeviceFacts(xids=(48, 94, 95))).operable
    assert judge(DeviceFacts(xids=(48, 63))).operable, "drain and reset: later"
    assert not judge(DeviceFacts(xids=(48, 64))).operable
    assert judge(DeviceFacts(retirement_pending=True)).operable
    assert not judge(DeviceFacts(remap_failed=True)).operable


@pytest.mark.parametrize("number", sorted(ON_ITS_WORD))
@pytest.mark.parametrize(
    ("recovery", "operable"), [(None, False), (0, True), (1, False), (4, True), (9, False)]
)
def test_what_an_xid_leaves_open_the_driver_decides(number: int, recovery: int, operable: bool) -> None:
    assert judge(DeviceFacts(xids=(number,), recovery=recovery)).operable is operable
    assert not judge(DeviceFacts(xids=(number, 79), recovery=recovery)).operable


def test_an_unknown_xid_is_told() -> None:
    found = judge(DeviceFacts(xids=(399,)))
    assert found.operable
    assert found.reasons == ("Xid 399: not in the catalogue's list of actions",)


def only_the_last(given: DeviceFacts) -> Judgement:
    return judge(replace_xids(given, given.xids[-1:]))


def contained_outweighs_all(given: DeviceFacts) -> Judgement:
    return Judgement(Class.HOF) if 94 in given.xids else judge(given)


def silence_is_health(given: DeviceFacts) -> Judgement:
    return Judgement(Class.HOF) if given.timed_out else judge(given)


def table_with(number: int, action: NvidiaAction) -> Callable[[DeviceFacts], Judgement]:
    def mutant(given: DeviceFacts) -> Judgement:
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(operability.XIDS, number, replace(XIDS[number], action=action))
            return judge(given)

    return mutant


MUTANTS: dict[str, Any] = {
    "only the last Xid": only_the_last,
    "contained outweighs all": contained_outweighs_all,
    "silence is health": silence_is_health,
    "95 as 94": table_with(95, NvidiaAction.RESTART_APP),
    "94 as 95": table_with(94, NvidiaAction.RESET_GPU),
}


@pytest.mark.parametrize("mutant", MUTANTS.values(), ids=MUTANTS)
def test_mutants_are_caught(mutant: Callable[[DeviceFacts], Judgement]) -> None:
    rng = random.Random(3)
    numbers = sorted(XIDS)
    caught = 0
    for _ in range(500):
        chosen = tuple(rng.choice((48, 94, 95, *numbers)) for _ in range(rng.randrange(4)))
        answered = rng.random() < 0.8
        given = DeviceFacts("GPU-1", answered, not answered, "" if answered else "because", chosen)
        check(judge, given)
        try:
            check(mutant, given)
        except AssertionError:
            caught += 1
    assert caught
