"""What the code refuses, and why: every error leaves every caller's buffer untouched (I-1, I-6)."""

from __future__ import annotations

__all__ = ["BufferMismatch", "CodeError", "InconsistentParity", "ToleranceExceeded"]


class CodeError(ValueError):
    """A request that the code cannot carry out; the base of all errors of this package.

    Raised itself for parameters and indices out of range and for an unknown kernel.
    """


class ToleranceExceeded(CodeError):  # noqa: N818 (named after what it says)
    """More pages are lost than the surviving parity can replace.

    Attributes
    ----------
    lost_data, lost_parity, parity : int
        Pages reported lost, parity rows reported lost, parity rows of the code.
    """

    def __init__(self, lost_data: int, lost_parity: int, parity: int) -> None:
        self.lost_data = lost_data
        self.lost_parity = lost_parity
        self.parity = parity
        super().__init__(
            f"{lost_data} data pages are lost, but only {parity - lost_parity} of {parity} parity rows "
            "survive, and no more pages than that can be reconstructed. Fall back to a checkpoint."
        )


class InconsistentParity(CodeError):  # noqa: N818 (named after what it says)
    """Surviving data and parity contradict each other, so that nothing reconstructed could be trusted.

    Attributes
    ----------
    rows : tuple of int
        The spare parity rows that contradict the rest. The culprit may be any surviving page or row.
    """

    def __init__(self, rows: tuple[int, ...], spares: int) -> None:
        self.rows = rows
        super().__init__(
            f"{len(rows)} of {spares} spare parity rows contradict the surviving pages (rows "
            f"{', '.join(map(str, rows))}): data and parity are not of one consistent state. "
            "Nothing was written; use another parity buffer or a checkpoint."
        )


class BufferMismatch(CodeError):  # noqa: N818 (named after what it says)
    """A buffer of the wrong size, element type, layout, device or alignment, read-only, or overlapping."""
