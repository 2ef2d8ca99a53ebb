"""Errors of the Resilient Memory Pool.

Every error says what was expected, what was found and what to do. Errors of the manager travel over
its socket as a class name, a message and a few plain details, and are raised again in the client as
the same class; a name that the client does not know becomes a plain `RmpError`.
"""

from __future__ import annotations

# ruff: noqa: N818 - the names say what happened: WriterAlive, ManagerGone
from collections.abc import Mapping

__all__ = [
    "ConfigError",
    "CudaError",
    "CudaUnavailable",
    "DeadlineExceeded",
    "Detail",
    "IllegalMark",
    "InternalError",
    "LimitTooLow",
    "LocalizationFailed",
    "ManagerAlive",
    "ManagerGone",
    "ManagerStartFailed",
    "NotEnoughMemory",
    "NotWriter",
    "OtherManager",
    "OwnerAlive",
    "PeerRefused",
    "ProtocolError",
    "ProtocolMismatch",
    "RmpError",
    "SpecMismatch",
    "StaleGeneration",
    "StaleSocket",
    "UnknownName",
    "UnsafeDirectory",
    "WriterAlive",
    "error_from_wire",
]

Detail = int | str


class RmpError(Exception):
    """Base of all errors of this package; `details` holds the numbers named in the message."""

    def __init__(self, message: str, **details: Detail) -> None:
        super().__init__(message)
        self.message = message
        self.details: dict[str, Detail] = dict(details)


class ConfigError(RmpError, ValueError):
    """A pool configuration or an allocation specification that contradicts itself."""


class WriterAlive(RmpError):
    """The previous writer neither died nor released: a second writer is refused (I-4)."""


class OwnerAlive(RmpError):
    """The process that owns the manager lives: nobody else can take it over."""


class OtherManager(RmpError):
    """The manager found here belongs to another job, rank or launcher."""


class StaleGeneration(RmpError):
    """The generation is not newer than the newest one seen: the request comes from the past."""


class NotWriter(RmpError):
    """The request needs a role that this connection does not have."""


class SpecMismatch(RmpError):
    """An allocation of this name exists with another size, kind or layout."""


class UnknownName(RmpError, LookupError):
    """No allocation, section or page of this name."""


class LimitTooLow(RmpError):
    """A limit of the process or of the kernel is below what is needed; `limit`, `need`, `have`."""


class NotEnoughMemory(RmpError, MemoryError):
    """The memory asked for is not there; nothing of the request was allocated."""


class ProtocolMismatch(RmpError):
    """Client and manager speak different versions of the protocol."""


class ProtocolError(RmpError):
    """A frame that is too large, cannot be decoded, or comes out of turn."""


class PeerRefused(RmpError, PermissionError):
    """The process at the other end belongs to another user."""


class ManagerGone(RmpError, ConnectionError):
    """The manager is not there (any more)."""


class StaleSocket(ManagerGone):
    """The socket file is there, its manager is dead."""


class ManagerAlive(RmpError):
    """Another, living manager holds this directory."""


class ManagerStartFailed(RmpError):
    """The manager could not have its folder, ended, or went silent before it was ready; the message says why
    or holds its stderr."""


class UnsafeDirectory(RmpError, PermissionError):
    """The manager's directory is open to other users, not ours, or holds something unexpected."""


class DeadlineExceeded(RmpError, TimeoutError):
    """No answer in time. The outcome of the request is unknown: ask `status()` before repeating it."""


class IllegalMark(RmpError):
    """A page mark would make a transition that its state machine does not have."""


class InternalError(RmpError):
    """A defect of the manager, which goes on: its death would cost all memory. See its stderr."""


class CudaUnavailable(RmpError):
    """The cuda backend cannot be used here: no cuda-bindings, no driver, or no such device."""


class CudaError(RmpError):
    """A call of the CUDA driver failed; `code` and `call` say which."""


class LocalizationFailed(RmpError):
    """The kernel could not say whether a region is readable, or a healed page is still unreadable."""


_BY_NAME: Mapping[str, type[RmpError]] = {
    cls.__name__: cls
    for cls in (
        ConfigError,
        CudaError,
        CudaUnavailable,
        WriterAlive,
        OwnerAlive,
        OtherManager,
        StaleGeneration,
        NotWriter,
        SpecMismatch,
        UnknownName,
        LimitTooLow,
        NotEnoughMemory,
        ProtocolMismatch,
        ProtocolError,
        PeerRefused,
        ManagerGone,
        StaleSocket,
        ManagerAlive,
        ManagerStartFailed,
        UnsafeDirectory,
        DeadlineExceeded,
        IllegalMark,
        InternalError,
        LocalizationFailed,
    )
}


def error_from_wire(name: str, message: str, details: Mapping[str, Detail]) -> RmpError:
    """Return the error that the other process raised."""
    return _BY_NAME.get(name, RmpError)(message, **details)
