"""The one line by which a starting manager tells its parent that it listens, or why not."""

from __future__ import annotations

import msgspec

from leto_rmp.errors import Detail

__all__ = ["Readiness"]


class Readiness(msgspec.Struct, frozen=True, kw_only=True):
    """What the manager writes to `--ready-fd`, once: ready (no error), or why not."""

    pid: int
    socket_path: str = ""
    error: str = ""
    message: str = ""
    details: dict[str, Detail] = {}
