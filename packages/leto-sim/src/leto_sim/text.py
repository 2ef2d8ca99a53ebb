"""Plain-text tables and percentages for the command line."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["percent", "table"]


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return aligned columns, the first one to the left."""
    widths = [max(len(r[i]) for r in [head, *rows]) for i in range(len(head))]
    lines = []
    for row in [head, ["-" * w for w in widths], *rows]:
        cells = [
            c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


def percent(value: float | None, digits: int = 2) -> str:
    """A fraction as a percentage; ``refused`` for None."""
    return "refused" if value is None or math.isnan(value) else f"{100 * value:.{digits}f} %"
