"""The demo on a terminal: a live panel where there is one, plain lines where not.

Role in the whole: shows iteration, loss, tokens a second, generation, shadow levels, and each failure and
recovery as it happens. Reads a :class:`Timeline`; decides nothing.
"""

from __future__ import annotations

from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from leto_megatron.compare import Comparison
from leto_shadow.timeline import FailureRow, Timeline

__all__ = ["Display", "failure_table", "verdict_table"]

_BARS = "▁▂▃▄▅▆▇█"
_LINES_KEPT = 12
_PLAIN_EVERY = 20


def sparkline(values: list[float], width: int = 48) -> str:
    """The values as a row of bars, averaged into at most `width` of them."""
    if not values:
        return ""
    step = max(1.0, len(values) / width)
    points = []
    at = 0.0
    while int(at) < len(values):
        part = values[int(at) : max(int(at) + 1, int(at + step))]
        points.append(sum(part) / len(part))
        at += step
    low, high = min(points), max(points)
    scale = (len(_BARS) - 1) / (high - low) if high > low else 0.0
    return "".join(_BARS[round((value - low) * scale)] for value in points)


class Display:
    """Context manager around the live panel; `update` redraws, `say` adds a line."""

    def __init__(self, console: Console, title: str, iterations: int) -> None:
        self.console = console
        self.title = title
        self.iterations = iterations
        self.stage = "reference run: stock Megatron-Core, no failures"
        self.reference_done = 0
        self.timeline = Timeline()
        self._lines: list[str] = []
        self._printed = -1
        self._live = (
            Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        )

    def __enter__(self) -> Self:
        if self._live is not None:
            self._live.start()
        self.update()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, *lines: str) -> None:
        """Add lines to the story; on a terminal they stay in the panel, otherwise they are printed."""
        self._lines += lines
        if self._live is None:
            for line in lines:
                self.console.print(line, highlight=False, markup=False, soft_wrap=True)

    def enter_stage(self, stage: str) -> None:
        """Name what runs now."""
        self.stage = stage
        self._printed = -1
        self.say(stage)

    def update(self, reference: tuple[int, float] | None = None) -> None:
        """Redraw. `reference`: iteration and loss of the reference run, while that runs."""
        if reference is not None:
            self.reference_done = reference[0] + 1
        if self._live is not None:
            self._live.update(self._panel(), refresh=True)
            return
        iteration, loss = (
            reference if reference is not None else (self.timeline.iteration, self.timeline.loss)
        )
        if loss is not None and iteration >= 0 and iteration // _PLAIN_EVERY != self._printed:
            self._printed = iteration // _PLAIN_EVERY
            self.console.print(
                f"          iteration {iteration} of {self.iterations}, loss {loss:.4f}", highlight=False
            )

    # --- the panel ------------------------------------------------------------------------------------

    def _panel(self) -> Panel:
        line = self.timeline
        bars = Table.grid(padding=(0, 1))
        bars.add_column(width=12)
        bars.add_column(width=40)
        bars.add_column()
        bars.add_row("reference", self._bar(self.reference_done), f"{self.reference_done}/{self.iterations}")
        done = line.iteration + 1
        bars.add_row("with Leto", self._bar(done), f"{done}/{self.iterations}")
        facts = Table.grid(padding=(0, 2))
        facts.add_row(
            _fact("state", line.state, "bold red" if line.state == "recovering" else "bold green"),
            _fact("generation", str(line.generation)),
            _fact("loss", "-" if line.loss is None else f"{line.loss:.4f}"),
            _fact("tokens/s", "-" if line.tokens_per_s is None else f"{line.tokens_per_s:,.0f}"),
            _fact("shadows", self._levels()),
        )
        losses = [sample.loss for sample in line.samples if sample.loss is not None]
        parts: list[Text | Table] = [bars, facts, Text(sparkline(losses), "cyan")]
        if line.failures:
            parts.append(failure_table(line.failures))
        parts.append(Text("\n".join(self._lines[-_LINES_KEPT:]), "dim", overflow="ellipsis"))
        return Panel(Group(*parts), title=self.title, subtitle=self.stage, border_style="blue")

    def _bar(self, done: int) -> ProgressBar:
        return ProgressBar(total=self.iterations, completed=min(done, self.iterations), width=40)

    def _levels(self) -> str:
        levels = sorted(self.timeline.levels.items())
        return "  ".join(f"rank {rank}: L{level}" for rank, level in levels) if levels else "-"


def _fact(name: str, value: str, style: str = "bold") -> Text:
    return Text.assemble((f"{name} ", "dim"), (value, style))


def failure_table(failures: list[FailureRow]) -> Table:
    """Failure, detected after, training again after, iterations lost; fits 80 columns."""
    table = Table(box=None, padding=(0, 1, 0, 0), header_style="dim")
    table.add_column("failure", no_wrap=True)
    for name in ("rank", "iter."):
        table.add_column(name, justify="right")
    for name in ("detected", "training\nagain", "iter.\nlost"):
        table.add_column(name, justify="right")
    table.add_column("source")
    for row in failures:
        table.add_row(
            row.title,
            str(row.rank),
            str(row.iteration),
            f"{row.detected_s:.2f} s",
            "..." if row.recovered_s is None else f"{row.recovered_s:.2f} s",
            "..." if row.iterations_lost is None else str(row.iterations_lost),
            row.source or "...",
        )
    return table


def verdict_table(comparison: Comparison) -> Table:
    """What was compared, and how much of it was equal."""
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="dim")
    table.add_column("compared bit for bit")
    table.add_column("equal", justify="right")
    table.add_column("of", justify="right")
    for kind, (same, total) in comparison.kinds.items():
        style = "" if same == total else "bold red"
        table.add_row(kind, f"{same:,}", f"{total:,}", style=style)
    return table
