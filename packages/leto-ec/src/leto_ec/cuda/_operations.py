"""GPU operations (being built)."""

from __future__ import annotations

from typing import Any

from leto_ec.errors import BufferMismatch


def _not_yet(*_: Any) -> Any:
    raise BufferMismatch("buffers in host memory are expected, found GPU memory")


encode = update = reconstruct = _not_yet
