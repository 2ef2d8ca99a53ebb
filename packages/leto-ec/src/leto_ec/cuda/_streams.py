"""The caller's stream, in whatever form it comes."""

from __future__ import annotations

import sys
from typing import Any

import cupy

from leto_ec.errors import CodeError

__all__ = ["resolve"]


def resolve(stream: Any, device: int, torch: bool) -> Any:
    """Return a CuPy stream on `device` for `stream`; None takes torch's current stream for torch tensors,
    else CuPy's.

    Raises
    ------
    CodeError
        Not a stream.
    """
    if stream is None:
        if torch:
            address = sys.modules["torch"].cuda.current_stream(device).cuda_stream
        else:
            return cupy.cuda.get_current_stream()
    elif isinstance(stream, int) and not isinstance(stream, bool):
        address = stream
    elif isinstance(getattr(stream, "cuda_stream", None), int):
        address = stream.cuda_stream
    elif isinstance(stream, cupy.cuda.Stream):
        return stream
    elif isinstance(getattr(stream, "ptr", None), int):
        address = stream.ptr
    elif hasattr(stream, "__cuda_stream__"):
        address = stream.__cuda_stream__()[1]
    else:
        raise CodeError(
            f"stream: a CuPy or torch stream or the address of one is expected, found {type(stream).__name__}"
        )
    if address == 0:
        return cupy.cuda.Stream.null
    if hasattr(cupy.cuda.Stream, "from_external"):  # CuPy 14 and later
        return cupy.cuda.Stream.from_external(_Foreign(address))
    return cupy.cuda.ExternalStream(address, device)


class _Foreign:
    """A stream of which the address is known, as the CUDA stream protocol has it."""

    def __init__(self, address: int) -> None:
        self._address = address

    def __cuda_stream__(self) -> tuple[int, int]:
        return 0, self._address
