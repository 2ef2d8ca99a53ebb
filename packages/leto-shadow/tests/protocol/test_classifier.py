"""Hardware-operable or fatal, and an end to every series of failures."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leto_shadow.classifier import Classifier, Failure, FailureKind, Verdict, last_words
from leto_shadow.config import Limits
from leto_shadow.operability import DeviceFacts

LIMITS = Limits(hofs_per_rank=3, hofs_same_iteration=2, fatals=2, window_s=100.0)
BAD = DeviceFacts("GPU-1", xids=(79,))


def fail(rank: int = 0, iteration: int = 0, kind: FailureKind = FailureKind.EXIT, **more: Any) -> Failure:
    return Failure(kind, rank, iteration, "killed", **more)


def test_a_failure_is_operable_unless_something_says_otherwise() -> None:
    classifier = Classifier(LIMITS)
    assert classifier.classify(fail(), 0.0).verdict is Verdict.HOF
    classifier.progress(10)
    assert classifier.classify(fail(iteration=10, kind=FailureKind.HANG), 0.0).verdict is Verdict.HOF


@pytest.mark.parametrize(
    ("failure", "reason"),
    [
        (fail(kind=FailureKind.MANAGER), "state manager is gone"),
        (fail(kind=FailureKind.DECISION), "no common state"),
        (fail(facts=BAD), "not operable"),
        (fail(facts=BAD, drill=True), "not operable"),
    ],
)
def test_fatal_at_once(failure: Failure, reason: str) -> None:
    ruling = Classifier(LIMITS).classify(failure, 0.0)
    assert ruling.verdict is Verdict.FATAL
    assert reason in ruling.reason


def test_too_many_on_one_rank_in_the_window_are_fatal() -> None:
    classifier = Classifier(LIMITS)
    for count in range(4):
        classifier.progress(10 * count)
        verdict = classifier.classify(fail(rank=1, iteration=10 * count), 10.0 * count).verdict
    assert verdict is Verdict.FATAL
    classifier.progress(100)
    assert classifier.classify(fail(rank=1, iteration=100), 50.0).verdict is Verdict.HOF, "counted anew"


def test_failures_outside_the_window_are_forgotten() -> None:
    classifier = Classifier(LIMITS)
    for count in range(20):
        classifier.progress(10 * count)
        assert classifier.classify(fail(iteration=10 * count), 60.0 * count).verdict is Verdict.HOF


def test_the_same_iteration_again_and_again_is_fatal_then_the_end() -> None:
    classifier = Classifier(LIMITS)
    verdicts = [classifier.classify(fail(rank=n % 4, iteration=7), 0.0).verdict for n in range(5)]
    assert verdicts == [Verdict.HOF, Verdict.HOF, Verdict.FATAL, Verdict.FATAL, Verdict.ABORT]


def test_reaching_the_same_iteration_again_is_no_progress() -> None:
    classifier = Classifier(LIMITS)
    classifier.classify(fail(iteration=7), 0.0)
    classifier.classify(fail(iteration=7), 0.0)
    classifier.progress(7)  # all ranks are in iteration 7: none of them finished it
    assert classifier.classify(fail(iteration=7), 0.0).verdict is Verdict.FATAL
    classifier.progress(8)
    assert classifier.classify(fail(iteration=8), 0.0).verdict is Verdict.HOF


def test_drills_do_not_count() -> None:
    classifier = Classifier(LIMITS)
    for _ in range(20):
        assert classifier.classify(fail(iteration=3, drill=True), 0.0).verdict is Verdict.HOF
    assert classifier.classify(fail(iteration=3), 0.0).verdict is Verdict.HOF


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(FailureKind), st.booleans()), min_size=20))
def test_every_series_without_progress_ends(failures: list[tuple[int, FailureKind, bool]]) -> None:
    classifier = Classifier(LIMITS)
    verdicts = [
        classifier.classify(
            fail(rank=rank, iteration=5, kind=kind, facts=None if operable else BAD), 0.0
        ).verdict
        for rank, kind, operable in failures
    ]
    bound = LIMITS.hofs_same_iteration + LIMITS.fatals
    assert Verdict.ABORT in verdicts[: bound + 1]


CUDA_ERROR = """trainer failed:
Traceback (most recent call last):
  File "a", line 1, in f
    f()
torch.AcceleratorError: CUDA error: an illegal memory access was encountered
Search for `cudaErrorIllegalAddress' for more information.
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.

(exit status 1, log a.log)"""
CHAINED = """Traceback (most recent call last):
  f()
KeyError: 1

During handling of the above exception, another exception occurred:

Traceback (most recent call last):
  g()
ValueError: two
lines"""


@pytest.mark.parametrize(
    ("detail", "words"),
    [
        ("killed by SIGKILL", "killed by SIGKILL"),
        ("it stands still\n(exit status 1, log a.log)", "it stands still"),
        (CUDA_ERROR, "torch.AcceleratorError: CUDA error: an illegal memory access was encountered"),
        (CHAINED, "ValueError: two"),
        ("Traceback (most recent call last):\n  cut off", "cut off"),
        ("", ""),
    ],
    ids=["killed", "status", "CUDA", "chained", "cut off", "nothing"],
)
def test_last_words_name_the_exception(detail: str, words: str) -> None:
    assert last_words(detail) == words
