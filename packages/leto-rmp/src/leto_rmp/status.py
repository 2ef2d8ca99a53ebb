"""What a manager tells about itself. Plain structs, also used on the wire."""

from __future__ import annotations

import msgspec

from leto_rmp.config import PoolConfig

__all__ = ["AllocationStatus", "ClientStatus", "ManagerStatus", "WriterStatus"]


class WriterStatus(msgspec.Struct, frozen=True, kw_only=True):
    """The newest writer. `state`: "alive", "dead" (its pidfd fired) or "released"."""

    pid: int
    generation: int
    state: str


class ClientStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One connection; `role` is empty before it attached."""

    pid: int
    role: str
    generation: int


class AllocationStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One allocation; counts are pages, and protection groups (0 unless retained)."""

    name: str
    kind: str
    data_pages: int
    parity_pages: int
    groups: int


class ManagerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """State of one manager.

    `poison` is "userfaultfd" or "simulated" (with `poison_reason`): in a simulation the bytes of an
    injected page are overwritten all the same, but its unreadability is only noted by the manager.
    `localization` is "madvise" where the kernel finds unreadable pages, or "simulated"; on the cuda backend
    "handles and reader" comes before that. All of this is about host pages: GPU pages are "unmapped".
    """

    job_id: str
    rank: int
    job_epoch: int
    """Number of the set of managers to which this one belongs, as its owner gave it."""
    pid: int
    owner_pid: int
    """Process that owns this manager; it may be dead, and the grace period running."""
    guardian_pid: int
    """Process with which this manager ends at once; 0: none."""
    protocol: int
    config: PoolConfig
    layout_hash: str
    generation: int
    """Newest generation that was a writer; -1 before the first."""
    generation_min: int
    """Generations below this are refused."""
    writer: WriterStatus | None
    clients: tuple[ClientStatus, ...]
    allocations: tuple[AllocationStatus, ...]
    lost_pages: int
    remapped_pages: int
    poison: str
    poison_reason: str
    localization: str
    simulated_pages: int
    device: str
    """Name and identifier of the GPU that holds data pages; empty on the host backend."""
    uncleared_pages: int
    """Fresh GPU pages that no writer has mapped and zeroed yet."""
    handles: int
    kept_fds: int
    """Descriptors of GPU pages that are kept open; less than the handles where RLIMIT_NOFILE is low."""
    allocated_bytes: int
    refused: dict[str, int]
    """Refused requests, counted by the name of their error."""
