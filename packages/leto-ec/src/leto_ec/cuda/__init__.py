"""GPU memory (being built)."""

from __future__ import annotations

from typing import Any


def info() -> dict[str, Any]:
    return {}
