"""Bisection finds exactly the unreadable pages, with few probes."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from leto_rmp.localize import find_lost

MUTANT = settings(
    database=None, derandomize=True, print_blob=False, report_multiple_bugs=False, phases=[Phase.generate]
)
Finder = Callable[[int, Callable[[int, int], bool], int], list[int]]


@st.composite
def cases(draw: st.DrawFn) -> tuple[int, set[int], int]:
    pages = draw(st.integers(0, 300))
    lost = draw(st.sets(st.integers(0, max(0, pages - 1)), max_size=20)) if pages else set()
    return pages, lost, draw(st.integers(1, 64))


def check(finder: Finder, case: tuple[int, set[int], int]) -> None:
    pages, lost, region = case
    probed: list[tuple[int, int]] = []

    def probe(first: int, count: int) -> bool:
        assert 0 <= first < first + count <= pages
        assert count <= region
        probed.append((first, count))
        return not any(first <= index < first + count for index in lost)

    assert finder(pages, probe, region) == sorted(lost)
    assert len(probed) <= math.ceil(pages / region) + len(lost) * 2 * math.ceil(math.log2(max(2, region)))
    assert len(probed) == len(set(probed)), "a region is probed once"


@given(cases())
def test_finds_exactly_the_lost_pages(case: tuple[int, set[int], int]) -> None:
    check(find_lost, case)


def stops_at_the_first(pages: int, probe: Callable[[int, int], bool], region: int) -> list[int]:
    """Mutant."""
    return find_lost(pages, probe, region)[:1]


def every_page_alone(pages: int, probe: Callable[[int, int], bool], region: int) -> list[int]:
    """Mutant: right and slow."""
    return [index for index in range(pages) if not probe(index, 1)]


@pytest.mark.parametrize("mutant", [stops_at_the_first, every_page_alone])
def test_mutants_are_caught(mutant: Finder) -> None:
    @MUTANT
    @given(cases())
    def run(case: tuple[int, set[int], int]) -> None:
        check(mutant, case)

    with pytest.raises(AssertionError):
        run()
