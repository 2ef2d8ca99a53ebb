"""Resilient Memory Pool: memory that outlives the process that writes it.

Role in the whole: each rank has one state manager process that owns the retained memory; trainers
attach to it, and after a failure the promoted shadow attaches to the same bytes (paper section 4).
The names below are the public interface; `Client` and `Allocation` need numpy and are loaded on
first use, so that a manager starts without it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from leto_rmp._version import __version__
from leto_rmp.config import AllocationSpec, Interleave, Kind, PoolConfig
from leto_rmp.errors import (
    ConfigError,
    DeadlineExceeded,
    IllegalMark,
    InternalError,
    LimitTooLow,
    LocalizationFailed,
    ManagerAlive,
    ManagerGone,
    ManagerStartFailed,
    NotEnoughMemory,
    NotWriter,
    OtherManager,
    OwnerAlive,
    PeerRefused,
    ProtocolError,
    ProtocolMismatch,
    RmpError,
    SpecMismatch,
    StaleGeneration,
    StaleSocket,
    UnknownName,
    UnsafeDirectory,
    WriterAlive,
)
from leto_rmp.layout import PageRef, ProtectionGroup, layout_hash, page_count, protection_groups
from leto_rmp.marks import PageMark
from leto_rmp.protocol import Role
from leto_rmp.status import ManagerStatus

if TYPE_CHECKING:
    from leto_rmp.adopt import AdoptedManager, adopt_manager
    from leto_rmp.allocation import Allocation
    from leto_rmp.client import Client
    from leto_rmp.retreat import give_up_writing, mapped_bytes
    from leto_rmp.spawn import ManagerProcess, spawn_manager

__all__ = [
    "AdoptedManager",
    "Allocation",
    "AllocationSpec",
    "Client",
    "ConfigError",
    "DeadlineExceeded",
    "IllegalMark",
    "Interleave",
    "InternalError",
    "Kind",
    "LimitTooLow",
    "LocalizationFailed",
    "ManagerAlive",
    "ManagerGone",
    "ManagerProcess",
    "ManagerStartFailed",
    "ManagerStatus",
    "NotEnoughMemory",
    "NotWriter",
    "OtherManager",
    "OwnerAlive",
    "PageMark",
    "PageRef",
    "PeerRefused",
    "PoolConfig",
    "ProtectionGroup",
    "ProtocolError",
    "ProtocolMismatch",
    "RmpError",
    "Role",
    "SpecMismatch",
    "StaleGeneration",
    "StaleSocket",
    "UnknownName",
    "UnsafeDirectory",
    "WriterAlive",
    "__version__",
    "adopt_manager",
    "give_up_writing",
    "layout_hash",
    "mapped_bytes",
    "page_count",
    "protection_groups",
    "spawn_manager",
]

_LAZY = {
    "AdoptedManager": "leto_rmp.adopt",
    "adopt_manager": "leto_rmp.adopt",
    "Allocation": "leto_rmp.allocation",
    "Client": "leto_rmp.client",
    "give_up_writing": "leto_rmp.retreat",
    "mapped_bytes": "leto_rmp.retreat",
    "ManagerProcess": "leto_rmp.spawn",
    "spawn_manager": "leto_rmp.spawn",
}


def __getattr__(name: str) -> object:
    """Import the modules that a manager does not need when they are first asked for."""
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
