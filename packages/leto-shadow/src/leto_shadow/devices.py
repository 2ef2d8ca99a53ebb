"""What recovery asks of the device under a rank: is it operable, and is a dead trainer's memory free yet?

Paper sections 2.2 (operability) and 3.4. One small interface per backend of the memory pool. On the host
backend both answers are immediate: processes that are gone have given their memory back, and a host that runs
the agent is operable. A device backend looks at its driver here (Xid class, ECC state, free memory measured
against a bound; case 4), and both calls have deadlines because drivers hang.
"""

from __future__ import annotations

from typing import Protocol

__all__ = ["WHAT_WORKS", "Device", "HostDevice", "open_device"]

WHAT_WORKS = (
    "`leto run` keeps retained memory on the host (--backend host); leto_rmp's cuda backend is not wired into"
    " `leto run` yet"
)
"""Said by every refusal, and by `leto doctor` where there is a GPU."""


class Device(Protocol):
    """The device of one rank, as far as recovery needs it."""

    def inoperable(self, rank: int) -> str | None:
        """Return why the device cannot go on without remediation, None if it can."""

    def wait_for_free_memory(self, rank: int, timeout_s: float) -> None:
        """Return when memory of dead trainers is measured to be free; `TimeoutError` past the bound."""


class HostDevice:
    """CPU and memfds."""

    def inoperable(self, rank: int) -> str | None:
        """The host runs this very code."""
        return None

    def wait_for_free_memory(self, rank: int, timeout_s: float) -> None:
        """The kernel frees a process's memory before its pidfd fires, and the fence has waited for that."""


def open_device(backend: str) -> Device:
    """Return the device that goes with a backend of the memory pool; `ValueError` if there is none."""
    if backend != "host":
        raise ValueError(f"--backend {backend} cannot be used: {WHAT_WORKS}")
    return HostDevice()
