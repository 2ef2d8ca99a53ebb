"""Numbers that the paper prints, and what this simulator makes of them.

Role: the reproduction, as data and functions that the tests, the figures and ``leto-sim reproduce`` share.
Percentages of figures 14 and 15 are read from extracted text in which the bars' labels are rotated and out
of order; `docs/inference.md` says how they were put in place and which statements of the text they satisfy.
"""

from __future__ import annotations

from dataclasses import dataclass

from leto_sim.ettr import ettr
from leto_sim.interval import young_interval
from leto_sim.predict import evaluate
from leto_sim.profile import load_profile

__all__ = [
    "FIGURE_CELLS",
    "MODELS",
    "TABLE_3",
    "TABLE_4_INTERVALS",
    "TABLE_6",
    "Cell",
    "FigureCell",
    "illustrative_loss",
    "reproduce_figures",
    "reproduce_table_3",
    "table_4_stall_range_s",
    "table_6_errors",
]


@dataclass(frozen=True)
class FigureCell:
    """One pair of bars of figures 14 (10 minutes) and 15 (30, 60): ETTR in percent."""

    model: str
    mttf_min: int
    hof_ratio: float
    leto: float
    gemini_plus: float


MODELS = ("deepseek-v2-1k", "deepseek-v3-16k", "deepseek-v4-128k")

_BARS = {  # model: {MTTF in minutes: (Gemini+, Leto at HOF 0, 50, 100 %)}
    "deepseek-v2-1k": {
        10: (84.7, 84.4, 88.6, 96.0),
        30: (92.7, 92.3, 94.4, 98.1),
        60: (95.2, 94.9, 96.2, 98.6),
    },
    "deepseek-v3-16k": {
        10: (85.3, 85.0, 88.8, 95.4),
        30: (93.5, 93.2, 94.9, 98.1),
        60: (96.0, 95.6, 96.7, 98.8),
    },
    "deepseek-v4-128k": {
        10: (83.0, 82.7, 87.3, 95.0),
        30: (92.4, 92.1, 94.2, 98.0),
        60: (95.2, 94.9, 96.2, 98.7),
    },
}

FIGURE_CELLS: tuple[FigureCell, ...] = tuple(
    FigureCell(model, minutes, ratio, row[1 + i], row[0])
    for model in MODELS
    for minutes, row in _BARS[model].items()
    for i, ratio in enumerate((0.0, 0.5, 1.0))
)
"""All 27 pairs of bars of figures 14 and 15."""

TABLE_3: dict[str, tuple[float, float, float, float]] = {
    "gemini (interval 11)": (127, 59, 68, 74.1),
    "gemini+ (interval 11)": (88, 35, 53, 80.5),
    "leto (interval 11)": (19, 15, 5, 91.0),
    "leto (interval 32)": (16, 13, 3, 94.2),
}
"""Recovery, initialisation, recomputation in seconds and ETTR in percent, Kimi-MoE, a HOF every 10 minutes.
"""

TABLE_4_INTERVALS: dict[str, tuple[int, int, int]] = {
    "Qwen": (22, 37, 53),
    "OLMoE": (5, 9, 12),
    "DeepSeek-MoE": (15, 25, 36),
    "GPT-MoE": (12, 21, 29),
    "Kimi-MoE": (11, 19, 27),
}
"""Tuned checkpoint intervals of Gemini and Gemini+ at an MTTF of 10, 30 and 60 minutes."""

TABLE_6: dict[str, tuple[float, float, float]] = {
    "Qwen": (3.464, 3.556, -2.6),
    "OLMoE": (11.939, 12.002, -0.5),
    "DeepSeek-MoE": (5.742, 5.927, -3.1),
    "GPT-MoE": (5.198, 5.363, -3.1),
    "Kimi-MoE": (9.246, 9.097, 1.6),
}
"""Predicted and measured iteration time in seconds, and the printed error in percent."""


def illustrative_loss(recovery_s: float = 88.0, mttf_hours: float = 0.23) -> float:
    """Share of wall-clock time lost in section 2.3: 88 s of recovery per failure, one every 0.23 hours."""
    return 1 - float(ettr(1.0, 1.0, recovery_s, mttf_hours * 3600))


@dataclass(frozen=True)
class Cell:
    """A printed figure beside ours, both ETTR in percent."""

    cell: FigureCell
    system: str
    printed: float
    predicted: float
    interval: int

    @property
    def difference(self) -> float:
        """Ours minus the paper's, in percentage points."""
        return self.predicted - self.printed


def reproduce_figures() -> list[Cell]:
    """Return all 54 bars of figures 14 and 15 from the bundled, inferred profiles and the closed form."""
    out = []
    for cell in FIGURE_CELLS:
        profile = load_profile(cell.model)
        systems = profile.systems()
        iteration_s = float(profile.data["job"]["iteration_s"])
        for name, printed in (("leto", cell.leto), ("gemini+", cell.gemini_plus)):
            e = evaluate(systems[name], iteration_s, cell.mttf_min * 60.0, cell.hof_ratio)
            out.append(Cell(cell, name, printed, 100 * e.ettr, e.interval))
    return out


def reproduce_table_3() -> dict[str, tuple[float, float, float, float]]:
    """Return table 3 from the profile ``kimi-moe-64``: the same four columns, the initialisation as given."""
    profile = load_profile("kimi-moe-64")
    systems = profile.systems()
    iteration_s = float(profile.data["job"]["iteration_s"])
    out = {}
    for row in TABLE_3:
        name, _, rest = row.partition(" ")
        e = evaluate(systems[name], iteration_s, 600.0, 1.0, int(rest.strip("()").split()[1]))
        start_s = systems[name].detection_s + systems[name].initialize_hof_s
        out[row] = (e.recovery_hof_s, start_s, e.recovery_hof_s - start_s, 100 * e.ettr)
    return out


def table_6_errors() -> dict[str, float]:
    """Return (predicted - measured) / measured in percent, from the printed times."""
    return {
        name: 100 * (predicted - measured) / measured for name, (predicted, measured, _) in TABLE_6.items()
    }


def table_4_stall_range_s(model: str) -> tuple[float, float]:
    """Return the checkpoint stalls T_ckpt for which Young's formula rounds to all three intervals of table 4.

    Inverts I = sqrt(2 T_ckpt MTTF) / T_iter at I - 1/2 and I + 1/2, with the iteration time measured in table
    6. The range is empty (low > high) if the table did not follow the formula.
    """
    iteration_s = TABLE_6[model][1]
    low, high = 0.0, float("inf")
    for interval, mttf_s in zip(TABLE_4_INTERVALS[model], (600.0, 1800.0, 3600.0), strict=True):
        low = max(low, ((interval - 0.5) * iteration_s) ** 2 / (2 * mttf_s))
        high = min(high, ((interval + 0.5) * iteration_s) ** 2 / (2 * mttf_s))
    assert (
        low > high or abs(young_interval(low, 600.0, iteration_s) - TABLE_4_INTERVALS[model][0]) <= 0.5 + 1e-9
    )
    return low, high
