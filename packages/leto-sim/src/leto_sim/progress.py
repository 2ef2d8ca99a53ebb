"""A progress bar for long sweeps, on a terminal's stderr only.

Role: leaf module; writes nothing to a pipe or a file, so that output stays machine-readable.
"""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import TextIO

__all__ = ["Progress"]


class Progress:
    """Context manager: ``with Progress(total, "sweep") as p: p.advance(n)``.

    Redraws at most ten times a second.
    """

    def __init__(self, total: int, label: str, stream: TextIO | None = None, width: int = 40) -> None:
        self.total = max(1, total)
        self.label = label
        self.stream = sys.stderr if stream is None else stream
        self.width = width
        self.done = 0
        self.shown = self.stream.isatty()
        self._began = self._drawn = time.monotonic()

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.shown and self.done:
            self._draw()
            self.stream.write("\n")
            self.stream.flush()

    def advance(self, count: int = 1) -> None:
        """Count ``count`` more units as done."""
        self.done = min(self.total, self.done + count)
        now = time.monotonic()
        if self.shown and now - self._drawn >= 0.1:
            self._drawn = now
            self._draw()

    def _draw(self) -> None:
        share = self.done / self.total
        bar = "#" * int(share * self.width)
        seconds = time.monotonic() - self._began
        left = f", {seconds / share - seconds:.0f} s left" if 0 < share < 1 else f", {seconds:.1f} s"
        self.stream.write(f"\r{self.label} [{bar:<{self.width}}] {self.done}/{self.total}{left}   ")
        self.stream.flush()
