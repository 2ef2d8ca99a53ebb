"""Strategies and settings shared by the tests of leto-sim."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from leto_sim import System, gemini, jit_ckpt, leto, moevement


def systems() -> st.SearchStrategy[System]:
    """Any system of the six baselines and Leto over four of them, with times that a cluster could have."""

    @st.composite
    def build(draw: st.DrawFn) -> System:
        seconds = st.floats(0, 120)
        plus = draw(st.booleans())
        kind = draw(st.sampled_from(["gemini", "jit", "moevement"]))
        cold = draw(st.none() | seconds)
        ff = draw(st.none() | seconds)
        if kind == "gemini":
            base = gemini(
                initialize_s=draw(seconds),
                initialize_ff_s=ff,
                initialize_hof_cold_s=cold,
                checkpoint_stall_s=draw(st.floats(0, 20)),
                plus=plus,
                interval_max_iterations=64,
            )
        elif kind == "jit":
            base = jit_ckpt(
                initialize_s=draw(seconds), initialize_ff_s=ff, initialize_hof_cold_s=cold, plus=plus
            )
        else:
            base = moevement(
                initialize_s=draw(seconds),
                initialize_ff_s=ff,
                initialize_hof_cold_s=cold,
                checkpoint_stall_s=draw(st.floats(0, 5)),
                window_iterations=draw(st.integers(1, 8)),
                plus=plus,
            )
        if draw(st.booleans()):
            return leto(
                base,
                initialize_s=draw(seconds),
                overhead_fraction=draw(st.floats(0, 0.05)),
                initialize_cold_s=draw(st.none() | seconds),
            )
        return base

    return build()


@pytest.fixture(scope="session")
def any_system() -> st.SearchStrategy[System]:
    return systems()


@pytest.fixture
def pair() -> tuple[System, System]:
    """Gemini+ and Leto over it, with figures near the paper's."""
    base = gemini(initialize_s=30.0, checkpoint_stall_s=3.0, plus=True)
    return base, leto(base, initialize_s=14.0, overhead_fraction=0.006, interval_max_iterations=64)
