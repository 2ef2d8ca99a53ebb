"""The mark state machine: no page becomes healthy but through a remap and an acknowledgement."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

import pytest
from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule, run_state_machine_as_test

from leto_rmp import IllegalMark, PageMark, PageRef
from leto_rmp.marks import TRANSITIONS, MarkEvent, MarkTable

MUTANT = settings(
    database=None, derandomize=True, print_blob=False, report_multiple_bugs=False, phases=[Phase.generate]
)
REFS = [PageRef("a", section, index) for section in ("data", "tier1") for index in range(3)]  # type: ignore[arg-type]
some = st.lists(st.sampled_from(REFS), min_size=1, unique=True)


class Marks(RuleBasedStateMachine):
    """A model that keeps the contents: `True` where the bytes are what the writer put there."""

    transitions: ClassVar[Mapping[tuple[PageMark, MarkEvent], PageMark]] = TRANSITIONS

    def __init__(self) -> None:
        super().__init__()
        self.table = MarkTable(self.transitions)
        self.contents = dict.fromkeys(REFS, True)
        self.readable = dict.fromkeys(REFS, True)

    @rule(refs=some)
    def found_lost(self, refs: list[PageRef]) -> None:
        self.table.apply(MarkEvent.FOUND_LOST, refs)
        for ref in refs:
            self.contents[ref] = self.readable[ref] = False

    @rule()
    def remap(self) -> None:
        lost = self.table.refs(PageMark.LOST)
        self.table.apply(MarkEvent.REMAPPED, lost)
        for ref in lost:
            self.readable[ref] = True

    @rule(refs=some, crash=st.booleans())
    def reconstruct_and_acknowledge(self, refs: list[PageRef], crash: bool) -> None:
        """A trainer reconstructs what is marked and readable; it may die before it acknowledges."""
        if any(self.table.mark(ref) is not PageMark.REMAPPED for ref in refs):
            before = self.table.marks()
            with pytest.raises(IllegalMark):
                self.table.apply(MarkEvent.ACKNOWLEDGED, refs)
            assert self.table.marks() == before, "a refused event changes nothing"
            return
        for ref in refs:
            self.contents[ref] = True
        if not crash:
            self.table.apply(MarkEvent.ACKNOWLEDGED, refs)

    @rule(ref=st.sampled_from(REFS))
    def no_remap_without_loss(self, ref: PageRef) -> None:
        if self.table.mark(ref) is not PageMark.LOST:
            with pytest.raises(IllegalMark):
                self.table.apply(MarkEvent.REMAPPED, [ref])

    @invariant()
    def healthy_pages_hold_their_bytes(self) -> None:
        for ref in REFS:
            mark = self.table.mark(ref)
            if mark is PageMark.HEALTHY:
                assert self.contents[ref], f"{ref} is trusted and empty"
            assert (mark is PageMark.LOST) == (not self.readable[ref])

    @invariant()
    def only_marked_pages_are_listed(self) -> None:
        marks = self.table.marks()
        assert list(marks) == sorted(marks)
        assert all(mark is not PageMark.HEALTHY for mark in marks.values())


class RemapHeals(Marks):
    """Mutant: a remapped page counts as healthy at once."""

    transitions: ClassVar = {**TRANSITIONS, (PageMark.LOST, MarkEvent.REMAPPED): PageMark.HEALTHY}


class LossOfRemappedIsForgotten(Marks):
    """Mutant: a page that is lost again after its remap stays REMAPPED."""

    transitions: ClassVar = {**TRANSITIONS, (PageMark.REMAPPED, MarkEvent.FOUND_LOST): PageMark.REMAPPED}


TestMarks = Marks.TestCase
TestMarks.settings = settings(max_examples=60, stateful_step_count=30)


@pytest.mark.parametrize("mutant", [RemapHeals, LossOfRemappedIsForgotten])
def test_mutants_are_caught(mutant: type[Marks]) -> None:
    with pytest.raises(AssertionError):
        run_state_machine_as_test(mutant, settings=MUTANT)


def test_forget_drops_only_one_allocation() -> None:
    table = MarkTable()
    other = PageRef("b", "data", 0)
    table.apply(MarkEvent.FOUND_LOST, [REFS[0], other])
    table.forget("a")
    assert table.marks() == {other: PageMark.LOST}
