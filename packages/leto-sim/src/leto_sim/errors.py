"""Every error that leto_sim raises on purpose, so that a caller can tell a bad input from a bug.

Role: leaf module, imported by all others. Each message says what was expected, what was found and what
to do about it.
"""

from __future__ import annotations

__all__ = [
    "MissingDependencyError",
    "ProfileError",
    "RecoveryTooSlowError",
    "ReportError",
    "SimError",
    "TraceError",
]


class SimError(Exception):
    """Root of the package's errors; the command line prints it and exits with status 2."""


class ProfileError(SimError, ValueError):
    """A profile field is missing, unknown, of the wrong type or outside its range.

    Attributes: ``field`` (dotted path, e.g. ``parallelism.data``), ``value`` (as found; None when missing)
    and ``expected`` (the range or type in words).
    """

    def __init__(self, field: str, value: object, expected: str, source: str = "profile") -> None:
        self.field = field
        self.value = value
        self.expected = expected
        found = "missing" if value is None else f"found {value!r}"
        super().__init__(f"{source}: {field}: {found}, expected {expected}")


class RecoveryTooSlowError(SimError, ValueError):
    """The closed form was asked for a recovery time that is not below the MTTF (assumption 1, appendix
    C.3).
    """

    def __init__(self, recovery_s: float, mttf_s: float) -> None:
        self.recovery_s = recovery_s
        self.mttf_s = mttf_s
        super().__init__(
            f"expected a recovery time below the mean time to failure, found {recovery_s:.4g} s against "
            f"{mttf_s:.4g} s: the closed form has no answer there, the exact chain and the simulation have"
        )


class TraceError(SimError, ValueError):
    """A failure trace cannot be read: names the file, the line and the value."""


class ReportError(SimError, ValueError):
    """A report of a measured run lacks something that the comparison needs."""


class MissingDependencyError(SimError, ImportError):
    """An optional dependency (torch, megatron-core, matplotlib) is absent; says what to install."""
