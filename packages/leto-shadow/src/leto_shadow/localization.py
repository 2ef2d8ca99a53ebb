"""Whether lost pages have to be looked for by reading them, from how the rank's trainer ended (paper 3.4).

On a GPU only reading a page shows a contained memory error, and that costs about a second and a GPU context.
The error reaches the trainer as a failed call: an exception of the framework, or an abort in a library. So a
trainer that was killed (by the kernel, an operator, a drill, or by the agent because it hung or because
another rank failed) or that stumbled over an exception of Python itself cannot have met one. In doubt pages
are read; and whoever fails again without having got further is read as well, so that an error that hides
behind a harmless ending is found one recovery later at the latest (I-6).
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

__all__ = ["Ending", "is_python_error", "must_read"]

_OF_PYTHON = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    NameError,
    NotImplementedError,
    OSError,
    SyntaxError,
    TypeError,
    ValueError,
)
"""What no failed call of a device raises; RuntimeError, which torch uses for them, is not among these."""


@dataclass(frozen=True)
class Ending:
    """How one active trainer ended."""

    status: int | None = None
    """Exit status, or minus the signal's number; None if unknown."""
    reported: bool = False
    """It reported an error before it ended."""
    python: bool = False
    """That error was one of Python itself (`is_python_error`)."""
    secondary: bool = False
    """That error was the loss of a peer, whose own ending counts for the peer's rank."""
    again: bool = False
    """The rank ended at this iteration before."""


def must_read(ending: Ending) -> bool:
    """Return whether the failure may have been a memory error that only reading shows."""
    if ending.again:
        return True
    if ending.reported:
        return not (ending.python or ending.secondary)
    return ending.status != -signal.SIGKILL


def is_python_error(error: BaseException) -> bool:
    """Return whether neither ``error`` nor any exception that led to it can come from a device.

    Exact types of Python only: a library may derive its own from them, and those are not known here.
    """
    seen: set[int] = set()
    pending: list[BaseException | None] = [error]
    while pending:
        one = pending.pop()
        if one is None or id(one) in seen:
            continue
        seen.add(id(one))
        if type(one).__module__ != "builtins" or not isinstance(one, _OF_PYTHON):
            return False
        pending += [one.__cause__, one.__context__]
    return True
