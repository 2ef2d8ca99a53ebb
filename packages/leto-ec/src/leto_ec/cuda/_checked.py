"""Arguments of GPU operations, checked before anything is launched."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from leto_ec import _buffers as _host_buffers
from leto_ec._code import Code
from leto_ec.cuda._buffers import DeviceGroup, collect, view
from leto_ec.errors import BufferMismatch
from leto_ec.field import WORD_BYTES

__all__ = ["Named", "change_of", "each_rows", "pages_of", "refuse_overlap", "rows_of"]

Named = tuple[DeviceGroup, str]


def pages_of(code: Code, pages: Any) -> DeviceGroup:
    """Return the pages of one group, checked."""
    group = collect(pages, "pages", absent=True)
    if len(group) > code.data:
        raise BufferMismatch(f"pages: at most {code.data} pages are expected, found {len(group)}")
    return group


def rows_of(code: Code, rows: Any, what: str, page_bytes: int | None, writable: bool) -> DeviceGroup:
    """Return the parity rows of one group, checked."""
    group = collect(rows, what, page_bytes=page_bytes, writable=writable)
    if len(group) != code.parity:
        raise BufferMismatch(f"{what}: {code.parity} parity rows are expected, found {len(group)}")
    return group


def change_of(buffer: Any, what: str, page_bytes: int, start: int) -> DeviceGroup:
    """Return the changed pages, or the changed bytes as one short page, checked."""
    if not isinstance(buffer, (list, tuple)) and len(view(buffer, what).shape) == 1:
        change = collect([buffer], what, whole_words=False)
        if start % WORD_BYTES or change.page_bytes % WORD_BYTES or change.addresses[0] % WORD_BYTES:
            raise BufferMismatch(
                f"{what}: bytes that begin and end at a multiple of {WORD_BYTES} are expected, "
                "in the page and in memory"
            )
        return change
    if start:
        raise BufferMismatch(f"offset: 0 is expected with whole pages, found {start}")
    return collect(buffer, what, page_bytes=page_bytes, absent=True)


def each_rows(
    code: Code, rows: Sequence[Any], what: str, like: list[DeviceGroup] | None, writable: bool = True
) -> list[DeviceGroup]:
    if not rows:
        raise BufferMismatch(f"{what}: at least one group is expected, found none")
    if like is not None and len(like) != len(rows):
        raise BufferMismatch(f"{what}: {len(like)} groups are expected, found {len(rows)}")
    size = None if like is None else like[0].page_bytes
    found = []
    for i, each in enumerate(rows):
        found.append(rows_of(code, each, f"{what}[{i}]", size, writable))
        size = found[0].page_bytes
    if like is not None and any(group.page_bytes != size for group in like):
        raise BufferMismatch(f"groups: pages of {size} bytes are expected in all groups")
    if like is not None and len({len(group) for group in like}) != 1:
        raise BufferMismatch("groups: the same number of pages is expected in all groups")
    return found


def refuse_overlap(
    outputs: Sequence[tuple[DeviceGroup, str]], inputs: Sequence[tuple[DeviceGroup, str]]
) -> None:
    """Refuse outputs that overlap one another or an input."""
    if not outputs:
        return
    together = DeviceGroup(
        np.concatenate([group.addresses for group, _ in outputs]),
        outputs[0][0].page_bytes,
        outputs[0][0].device,
        (),
        False,
    )
    _host_buffers.refuse_overlap(together, outputs[0][1], list(inputs))
