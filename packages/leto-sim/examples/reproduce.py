"""Write the committed figures and numbers: python examples/reproduce.py [FOLDER] (default: docs/figures).

Deterministic: nothing here is measured, so the machine does not matter.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

from leto_sim.paper import reproduce_figures
from leto_sim.reproduce import figure_chart, parting, parting_chart
from leto_sim.svg import standalone

TARGET = Path(__file__).parents[1] / "docs" / "figures"


def results() -> dict[str, object]:
    """The reproduced percentages and the table of where the methods part."""
    cells = [
        {
            "model": c.cell.model,
            "mttf_min": c.cell.mttf_min,
            "hof_ratio": c.cell.hof_ratio,
            "system": c.system,
            "interval": c.interval,
            "paper": c.printed,
            "ours": round(c.predicted, 3),
        }
        for c in reproduce_figures()
    ]
    names = ("mttf_s", "recovery_over_mttf", "closed", "exact", "simulated", "standard_error")
    parts = {
        system: [
            {n: None if math.isnan(v) else round(v, 5) for n, v in zip(names, row, strict=True)}
            for row in parting(system, 0.5)
        ]
        for system in ("leto", "gemini+")
    }
    return {"figures_14_and_15": cells, "parting_deepseek_v4_hof_50": parts}


if __name__ == "__main__":
    target = Path(sys.argv[1]) if len(sys.argv) > 1 else TARGET
    target.mkdir(parents=True, exist_ok=True)
    for minutes in (10, 30, 60):
        (target / f"ettr-mttf-{minutes}-min.svg").write_text(
            standalone(figure_chart(minutes)), encoding="utf-8"
        )
    (target / "parting.svg").write_text(standalone(parting_chart()), encoding="utf-8")
    (target / "results.json").write_text(json.dumps(results(), indent=1) + "\n", encoding="utf-8")
    print(f"figures and results.json written to {target}")
