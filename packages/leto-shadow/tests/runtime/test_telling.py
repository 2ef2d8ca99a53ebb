"""What `leto run` says on its terminal while training goes on."""

from __future__ import annotations

from typing import Any

import pytest

from leto_shadow.telling import told

STARTED: dict[str, Any] = {"event": "started", "iteration": 0, "source": "fresh", "breakdown": {"total": 9.0}}
FAILURE: dict[str, Any] = {
    "event": "failure",
    "kind": "exit",
    "rank": 1,
    "iteration": 405,
    "detail": "killed by SIGKILL",
}
RECOVERED: dict[str, Any] = {
    "event": "recovered",
    "iteration": 406,
    "source": "in-place",
    "lost_pages": 0,
    "iterations_lost": 0,
    "breakdown": {"total": 0.0954},
}
REPLACED: dict[str, Any] = {"event": "node_replaced", "lost": 2, "spare": 5, "first_rank": 16, "ranks": 8}


@pytest.mark.parametrize(
    ("event", "words"),
    [
        (STARTED, "training begins at iteration 0, from the beginning"),
        (
            {**STARTED, "iteration": 7, "source": "in-place"},
            "training begins at iteration 7, in place",
        ),
        (FAILURE, "rank 1, iteration 405: trainer died (killed by SIGKILL)"),
        ({**FAILURE, "kind": "hang", "detail": ""}, "rank 1, iteration 405: trainer hung"),
        ({**FAILURE, "kind": "other"}, "rank 1, iteration 405: other (killed by SIGKILL)"),
        ({**FAILURE, "detail": "x" * 999}, f"rank 1, iteration 405: trainer died ({'x' * 300})"),
        (RECOVERED, "training goes on at iteration 406, in place, 0.10 s later: no iteration is lost"),
        (
            {**RECOVERED, "lost_pages": 16},
            "training goes on at iteration 406, in place, 0.10 s later: "
            "16 lost pages repaired, no iteration is lost",
        ),
        (
            {**RECOVERED, "iteration": 400, "source": "checkpoint", "iterations_lost": 6},
            "training goes on at iteration 400, from a checkpoint, 0.10 s later: "
            "6 iterations to be computed again",
        ),
        (
            {"event": "fatal", "rank": 3, "iteration": 5, "reason": "it fails again and again"},
            "rank 3: its memory is not trusted any more (it fails again and again)",
        ),
        (REPLACED, "node 2 is left: node 5, a spare, takes ranks 16 to 23"),
        ({**REPLACED, "ranks": 1}, "node 2 is left: node 5, a spare, takes rank 16"),
        ({"event": "no_spare", "lost": 4, "unfit": [9]}, "node 4 should be left, but there is no spare"),
        (
            {**RECOVERED, "lost_pages": 1, "iterations_lost": 1, "source": "checkpoint"},
            "training goes on at iteration 406, from a checkpoint, 0.10 s later: "
            "1 lost page repaired, 1 iteration to be computed again",
        ),
        (
            {**FAILURE, "kind": "node", "detail": "node 1 is gone"},
            "rank 1, iteration 405: node lost (node 1 is gone)",
        ),
        ({"event": "adopted"}, "an agent died and was started again; the memory of all ranks is there"),
        (
            {"event": "memory_given_up", "reason": "rank 1 has none"},
            "an agent died and was started again; memory could not be kept: rank 1 has none",
        ),
        ({"event": "metrics", "iteration": 4}, None),
        ({}, None),
    ],
)
def test_words(event: dict[str, Any], words: str | None) -> None:
    assert told(event) == words
