"""Advice: verdicts at the extremes, ranges that contain the truth, and named mistakes."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from leto_sim import Question, Range, SimError, advise, evaluate, load_profile


def question(**change: object) -> Question:
    base: dict = {
        "gpus": 16_384,
        "iteration_s": Range(20.0, 20.0),
        "parameters": 671e9,
        "mttf_s": Range(500.0, 700.0),
        "draws": 60,
    }
    return Question(**{**base, **change})


def test_often_failing_clusters_with_many_hofs_should() -> None:
    a = advise(question(hof_ratio=Range(0.7, 0.9)))
    assert a.verdict == "yes"
    assert a.share_better == 1.0
    assert a.gain[0] > 0.02
    assert a.break_even_hof is not None
    assert a.break_even_hof < 0.2


def test_the_paper_lies_within_the_predicted_range() -> None:
    a = advise(question(hof_ratio=Range(1.0, 1.0), draws=200))
    low, _, high = a.leto_ettr
    assert low - 0.005 <= 0.954 <= high + 0.005
    low, _, high = a.fallback_ettr
    assert low - 0.005 <= 0.853 <= high + 0.005


def test_without_hofs_it_costs_its_overhead() -> None:
    a = advise(question(hof_ratio=Range(0.0, 0.0), leto_overhead=Range(0.02, 0.02)))
    assert a.verdict == "no"
    assert a.gain[1] == pytest.approx(-0.02 * a.fallback_ettr[1], rel=0.1)


def test_where_failures_are_rare_it_hardly_matters() -> None:
    rare = question(gpus=64, parameters=7e9, mttf_s=Range(7e5, 9e5), leto_overhead=Range(0.001, 0.003))
    assert advise(rare).verdict == "it hardly matters"
    assert advise(rare).gain[2] < 0  # but it costs more than it saves, and the range says so


def test_a_high_overhead_never_pays() -> None:
    a = advise(question(leto_overhead=Range(0.5, 0.5)))
    assert a.verdict == "no"
    assert a.break_even_hof is None


def test_replicated_state_falls_back_on_jit_ckpt() -> None:
    a = advise(question(fallback="jit-ckpt+", hof_ratio=Range(0.9, 0.9)))
    assert a.gain[1] > 0
    assert "checkpoint_fixed_s" not in a.middle


def test_advice_is_reproducible_and_names_the_input_that_decides() -> None:
    q = question(hof_ratio=Range(0.05, 0.95))
    assert advise(q) == advise(q)
    assert advise(q).most_uncertain == "hof_ratio"
    assert advise(question(hof_ratio=Range(0.05, 0.95), seed=1)).gain != advise(q).gain


@settings(max_examples=20)
@given(st.floats(1, 40), st.floats(300, 1e5), st.floats(0, 1))
def test_percentiles_are_ordered_and_in_range(t: float, m: float, h: float) -> None:
    a = advise(question(iteration_s=Range(t, t), mttf_s=Range(m, m * 2), hof_ratio=Range(h, h), draws=20))
    for triple in (a.fallback_ettr, a.leto_ettr):
        assert 0 <= triple[0] <= triple[1] <= triple[2] <= 1
    assert a.gain[0] <= a.gain[1] <= a.gain[2]


def test_a_given_stall_replaces_the_inferred_one() -> None:
    a = advise(question(checkpoint_stall_s=Range(1.2, 1.2), fallback_initialize_s=Range(30.5, 30.5)))
    assert a.middle["checkpoint_stall_s"] == 1.2
    v3 = load_profile("deepseek-v3-16k").systems()["gemini+"]
    assert a.fallback_ettr[1] == pytest.approx(evaluate(v3, 20.0, 600.0, 0.5).ettr, abs=0.02)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gpus": 0}, "gpus >= 1"),
        ({"hof_ratio": Range(0.5, 1.5)}, r"HOF share in \[0, 1\], found 0.5:1.5"),
        ({"fallback": "bamboo"}, "found 'bamboo'"),
        ({"mttf_s": Range(0.0, 1.0)}, "above 0 s"),
    ],
)
def test_bad_questions_are_refused(change: dict, message: str) -> None:
    with pytest.raises(SimError, match=message):
        question(**change)


def test_bad_ranges_are_refused() -> None:
    with pytest.raises(SimError, match="low <= high"):
        Range(2.0, 1.0)
    with pytest.raises(SimError, match="low > 0"):
        Range(0.0, 1.0, log=True)
