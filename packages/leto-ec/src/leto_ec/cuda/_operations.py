"""Encode, update and reconstruct on GPU memory: plans that are made, run once and dropped."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import Any

import cupy

from leto_ec._arguments import integer
from leto_ec._code import Code
from leto_ec._repair import Reconstruction
from leto_ec.cuda import _streams
from leto_ec.cuda._buffers import collect, view
from leto_ec.cuda._checked import pages_of, rows_of
from leto_ec.cuda._plan import Plan
from leto_ec.errors import BufferMismatch
from leto_ec.field import WORD_BYTES

__all__ = ["encode", "reconstruct", "update"]


def encode(code: Code, pages: Any, out: Any, stream: Any) -> Any:
    """See `ReedSolomon.encode`."""
    if out is None:
        group = pages_of(code, pages)
        shape = (code.parity, group.page_bytes)
        if group.torch:
            torch = sys.modules["torch"]
            out = torch.empty(shape, dtype=torch.uint8, device=f"cuda:{group.device}")
        else:
            with cupy.cuda.Device(group.device), _streams.resolve(stream, group.device, False):
                out = cupy.empty(shape, cupy.uint8)
    Plan.encode(code, [pages], [out], stream=stream).run(stream)
    return out


def update(
    code: Code,
    parity: Any,
    index: int,
    changes: list[tuple[Any, str]],
    offset: int,
    out: Any,
    stream: Any,
) -> Any:
    """See `ReedSolomon.update`. `changes`: the delta, or the old and the new contents, with their names."""
    rows = rows_of(code, parity, "parity", None, out is None)
    start = integer(offset, "offset", 0, rows.page_bytes)
    buffers = [buffer for buffer, _ in changes]
    kept: list[Any] = []
    if any(_is_run(buffer, what) for buffer, what in changes):
        lengths = {collect([buffer], what, whole_words=False).page_bytes for buffer, what in changes}
        if len(lengths) != 1:
            raise BufferMismatch("old and new: the same number of bytes is expected in both")
        (length,) = lengths
        if start + length > rows.page_bytes:
            raise BufferMismatch(
                f"{changes[0][1]}: bytes {start} to {start + length} do not fit a page of "
                f"{rows.page_bytes} bytes"
            )
        head = start % WORD_BYTES
        addresses = [view(buffer, what).address for buffer, what in changes]
        if head or length % WORD_BYTES or any(address % WORD_BYTES for address in addresses):
            # Filled up to whole words with zero bytes, which change nothing.
            size = -(-(head + length) // WORD_BYTES) * WORD_BYTES
            with cupy.cuda.Device(rows.device):
                on = _streams.resolve(stream, rows.device, rows.torch)
                with on:
                    filled = cupy.zeros((len(buffers), size), cupy.uint8)
                    for place, address in enumerate(addresses):
                        cupy.cuda.runtime.memcpyAsync(
                            filled[place].data.ptr + head,
                            address,
                            length,
                            cupy.cuda.runtime.memcpyDeviceToDevice,
                            on.ptr,
                        )
            kept = list(filled)
            buffers, start = kept, start - head
    names = ("deltas",) if len(changes) == 1 else ("olds", "news")
    arguments: dict[str, Any] = {name: [buffer] for name, buffer in zip(names, buffers, strict=True)}
    outs = None if out is None else [out]
    plan = Plan.update(code, [parity], index=index, offset=start, outs=outs, stream=stream, **arguments)
    if rows.torch and stream is None:
        stream = sys.modules["torch"].cuda.current_stream(rows.device)
    plan.run(stream)
    return parity if out is None else out


def reconstruct(
    code: Code,
    pages: Any,
    parity: Any,
    lost_data: Iterable[int],
    lost_parity: Iterable[int],
    verify: bool,
    stream: Any,
) -> Reconstruction:
    """See `ReedSolomon.reconstruct`."""
    lost: dict[str, Any] = {"lost_data": [lost_data], "lost_parity": [lost_parity]}
    plan = Plan.reconstruct(code, [pages], [parity], **lost, verify=verify, stream=stream)
    plan.run(stream)
    return plan.result()[0]


def _is_run(buffer: Any, what: str) -> bool:
    return not isinstance(buffer, (list, tuple)) and len(view(buffer, what).shape) == 1
