"""Random configurations, interleavings, crashes of recovery too, losses of every kind (I-1, I-2)."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from replay import PATTERNS, Case, run

pytestmark = pytest.mark.timeout(900)  # on a busy machine; usually a tenth of that

crash = st.tuples(st.integers(0, 150), st.booleans(), st.sampled_from(PATTERNS))
later = st.tuples(st.integers(0, 60), st.booleans(), st.sampled_from(("none", "none", *PATTERNS)))
cases = st.builds(
    Case,
    seed=st.integers(0, 2**32 - 1),
    tier1=st.one_of(st.integers(1, 8), st.just(16)),
    tier2=st.integers(0, 2),
    chunks_per_group=st.integers(1, 5),
    runs=st.integers(1, 4),
    numels=st.lists(st.integers(1, 700), min_size=1, max_size=6).map(tuple),
    sgd=st.booleans(),
    scheme=st.sampled_from(["undo", "slots", "slots"]),
    align=st.booleans(),
    grad_dtype=st.sampled_from(["float32", "bfloat16", "float16"]),
    before=st.integers(0, 2),
    no_op=st.sampled_from([False, False, False, True]),
    crashes=st.builds(lambda a, b: (a, *b), crash, st.lists(later, max_size=2)),
)
unhurried = [HealthCheck.too_slow, HealthCheck.data_too_large]


@pytest.mark.slow
@settings(max_examples=200, deadline=None, suppress_health_check=unhurried, print_blob=True)
@given(cases)
def test_any_crash_ends_exact_or_refused(case: Case) -> None:
    run(case)


@pytest.mark.nightly
@settings(max_examples=20000, deadline=None, suppress_health_check=unhurried, print_blob=True)
@given(cases)
def test_any_crash_ends_exact_or_refused_for_a_night(case: Case) -> None:
    run(case)


@pytest.mark.slow
@pytest.mark.parametrize(("scheme", "runs"), [("undo", 5), ("slots", 1)])
@settings(max_examples=15, deadline=None, suppress_health_check=unhurried, print_blob=True)
@given(
    seed=st.integers(0, 2**32 - 1),
    stop=st.integers(0, 400),
    losses=st.sampled_from(["run over two groups", "physical run"]),
)
def test_sixteen_contiguous_pages_at_the_papers_tolerance(
    scheme: str, runs: int, seed: int, stop: int, losses: str
) -> None:
    """H1 = 16, chunks of 15 pages, groups of four of them: a run over a border is always survived."""
    aligned = scheme == "slots"
    case = Case(
        seed,
        16,
        1,
        4,
        runs,
        (3000, 1501),
        False,
        scheme,
        aligned,
        "bfloat16",
        1,
        False,
        ((stop, True, losses),),
    )
    assert run(case) != "None"
