"""Infer the simulation parameters behind figures 14 and 15: python examples/infer_parameters.py [FILE].

Reads nothing but the printed percentages (`leto_sim.paper.FIGURE_CELLS`) and the closed form. For each
assumed start-up time of Leto and limit of its checkpoint interval (both the same for the three models), it
searches the others: a start-up time of Gemini+ shared by the models, and for each model the iteration time,
the checkpoint stall and the overhead omega. Writes, for each start-up time of Leto, the smallest largest
error over all 54 bars and the parameters that reach it. The bundled profiles are the row of 15 s, rounded.

About two minutes on one core; seeded, so it repeats.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from leto_sim.ettr import effective_iteration_s, lost_iterations
from leto_sim.paper import FIGURE_CELLS, MODELS

TARGET = Path(__file__).parents[1] / "docs" / "inference.json"
LETO_START_S = (6.0, 8.0, 10.0, 12.0, 14.0, 15.0, 16.0, 18.0, 20.0)
INTERVAL_MAX = (32, 48, 64, 96, 128)
# Where the search begins: stall and the sum of Leto's start and half an iteration, both read off the bars by
# hand from ETTR(M) = a - b / M and the square-root law of Young's interval.
BEGIN = {MODELS[0]: (2.4, 18.9), MODELS[1]: (1.25, 24.3), MODELS[2]: (1.9, 27.0)}


def bars(model: str, t: Any, stall: Any, omega: Any, leto_s: float, gemini_s: float, limit: int) -> Any:
    """Predicted ETTR in percent, shape (18, draws), in the order of the printed ones."""
    rows = []
    for cell in (c for c in FIGURE_CELLS if c.model == model):
        mttf_s, h = cell.mttf_min * 60.0, cell.hof_ratio
        interval = np.maximum(1, np.floor(np.sqrt(2 * stall * mttf_s) / t + 0.5))
        if h == 1:
            leto_interval: Any = limit
        else:
            leto_interval = np.clip(np.floor(np.sqrt(2 * stall * mttf_s / (1 - h)) / t + 0.5), 1, limit)
        effective = effective_iteration_s(t, leto_interval, stall, omega)
        hof = leto_s + effective / 2
        ff = gemini_s + lost_iterations(leto_interval) * effective
        rows.append(100 * t / effective * (1 - (h * hof + (1 - h) * ff) / mttf_s))
        effective = effective_iteration_s(t, interval, stall)
        rows.append(100 * t / effective * (1 - (gemini_s + lost_iterations(interval) * effective) / mttf_s))
    return np.stack(rows)


def fit(
    model: str, leto_s: float, gemini_s: float, limit: int, rng: np.random.Generator
) -> tuple[float, Any]:
    """Smallest largest error in percentage points, and (iteration s, stall s, omega) that reach it."""
    printed = np.array([v for c in FIGURE_CELLS if c.model == model for v in (c.leto, c.gemini_plus)])
    stall, reach = BEGIN[model]
    centre = np.array([max(2.0, 2 * (reach - leto_s)), stall, 0.0037])
    width = np.array([2.0, 0.15 * stall, 0.0008])
    best: tuple[float, Any] = (np.inf, centre)
    for _ in range(5):
        draw = np.maximum(
            centre[:, None] + width[:, None] * rng.normal(size=(3, 4000)), [[0.5], [0.05], [1e-4]]
        )
        error = np.abs(
            bars(model, draw[0], draw[1], draw[2], leto_s, gemini_s, limit) - printed[:, None]
        ).max(axis=0)
        k = int(error.argmin())
        if error[k] < best[0]:
            best = (float(error[k]), draw[:, k])
        centre, width = best[1], width / 2
    return best


def infer() -> list[dict[str, Any]]:
    """One row for each start-up time of Leto: the best of all limits and start-up times of Gemini+."""
    rng = np.random.default_rng(14)
    rows = []
    for leto_s in LETO_START_S:
        candidates = []
        for limit in INTERVAL_MAX:
            for gemini_s in np.arange(2 * leto_s - 3, 2 * leto_s + 4, 0.5).tolist():
                found = {m: fit(m, leto_s, gemini_s, limit, rng) for m in MODELS}
                candidates.append((max(e for e, _ in found.values()), limit, gemini_s, found))
        error, limit, gemini_s, found = min(candidates, key=lambda c: c[0])
        rows.append(
            {
                "leto_start_s": leto_s,
                "largest_error_pp": round(error, 3),
                "interval_max": limit,
                "gemini_plus_start_s": gemini_s,
                "models": {
                    m: dict(zip(("iteration_s", "stall_s", "omega"), np.round(v, 4).tolist(), strict=True))
                    for m, (_, v) in found.items()
                },
            }
        )
        print(rows[-1], file=sys.stderr)
    return rows


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET
    target.write_text(json.dumps(infer(), indent=1) + "\n", encoding="utf-8")
    print(f"{target} written")
