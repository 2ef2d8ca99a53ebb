"""Encode, update and reconstruct on host memory; every argument is checked before a byte is written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from leto_ec._arguments import every, integer, whole_words
from leto_ec._buffers import PageGroup, address, collect, refuse_overlap, view
from leto_ec._code import Code
from leto_ec._mending import Mending
from leto_ec._repair import Reconstruction, repair
from leto_ec._work import Work
from leto_ec.errors import BufferMismatch, CodeError, InconsistentParity
from leto_ec.field import WORD_BYTES

__all__ = [
    "Change",
    "change_of",
    "change_work",
    "encode",
    "encode_work",
    "pages_of",
    "reconstruct",
    "rows_of",
    "update",
    "update_page",
]


def encode(code: Code, pages: Any, out: Any) -> Any:
    """See `ReedSolomon.encode`."""
    source = pages_of(code, pages)
    if out is None:
        out = np.empty((code.parity, source.page_bytes), np.uint8)
        target = PageGroup(out, source.page_bytes)
    else:
        target = rows_of(code, out, "out", source.page_bytes, writable=True)
        refuse_overlap(target, "out", [(source, "pages")])
    encode_work(code, source, target).run()
    return out


def encode_work(code: Code, source: PageGroup, target: PageGroup) -> Work:
    """Encode `source` into `target`."""
    layer = (every(code.data)[: len(source)], source)
    return code.engine.encoding(code.coefficients, every(code.parity), [layer], None, target, code.threads)


@dataclass(frozen=True)
class Change:
    """A checked update: pages from `first` on change by the sum of `groups`, from byte `start` on."""

    rows: PageGroup
    target: PageGroup  # `rows` itself, if in place
    first: int
    start: int
    groups: list[tuple[PageGroup, str]]  # the delta, or what was and what is, with their names

    @property
    def length(self) -> int:
        """Bytes of each page that change."""
        return self.groups[0][0].page_bytes


def change_of(
    code: Code,
    rows: PageGroup,
    target: PageGroup,
    index: int,
    changes: Sequence[tuple[Any, str]],
    offset: int,
) -> Change:
    """Check an update, but for overlap."""
    first = integer(index, "index", 0, code.data - 1)
    start = integer(offset, "offset", 0, rows.page_bytes)
    groups = [(_changed(code, buffer, what, first, start, rows.page_bytes), what) for buffer, what in changes]
    if len({(len(group), group.page_bytes) for group, _ in groups}) != 1:
        raise BufferMismatch(
            "old and new: as many bytes of as many pages are expected, found different sizes"
        )
    return Change(rows, target, first, start, groups)


def change_work(code: Code, change: Change) -> list[Work]:
    """Return the parts of an update.

    A partial word at either end is copied now: what happens to it later does not count.
    """
    engine, matrix, all_rows = code.engine, code.coefficients, every(code.parity)
    groups = [group for group, _ in change.groups]
    rows, target = change.rows, change.target
    indices = every(code.data)[change.first : change.first + len(groups[0])]
    if change.start == 0 and change.length == rows.page_bytes:
        layers = [(indices, group) for group in groups]
        return [engine.encoding(matrix, all_rows, layers, rows, target, code.threads)]
    works: list[Work] = []
    if target is not rows:  # a copy: rows plus nothing
        nothing = PageGroup([], rows.page_bytes, np.zeros(0, np.int64))
        works.append(engine.combination(matrix[:, :0], nothing, rows, target, code.threads))
    pieces = [whole_words(group, change.start) for group in groups]
    for parts in zip(*pieces, strict=True):  # cut alike, because they begin and end alike
        at = parts[0][1]
        span = target.window(at, at + parts[0][0].page_bytes)
        layers = [(indices, piece) for piece, _ in parts]
        works.append(engine.encoding(matrix, all_rows, layers, span, span, code.threads))
    return works


def update(code: Code, parity: Any, index: int, changes: list[tuple[Any, str]], offset: int, out: Any) -> Any:
    """See `ReedSolomon.update`. `changes`: the delta, or the old and the new contents, with their names."""
    rows = rows_of(code, parity, "parity", None, writable=out is None)
    change = change_of(code, rows, rows, index, changes, offset)
    if out is None:
        refuse_overlap(rows, "parity", change.groups)
    else:
        target = rows_of(code, out, "out", rows.page_bytes, writable=True)
        refuse_overlap(target, "out", [(rows, "parity"), *change.groups])
        change = change_of(code, rows, target, index, changes, offset)
    for work in change_work(code, change):
        work.run()
    return parity if out is None else out


def update_page(code: Code, parity: Any, index: Any, delta: Any, offset: Any) -> bool:
    """Do the commonest update, of a whole page of plain arrays in place, at a fraction of the fixed cost.

    False, and nothing done, where anything is unusual or wrong: the general way then finds what.
    """
    if not (type(parity) is type(delta) is np.ndarray and type(index) is type(offset) is int):
        return False
    shape = parity.shape
    if not (len(shape) == 2 and parity.dtype == delta.dtype == np.uint8 and offset == 0):
        return False
    count, size = shape
    if count != code.parity or delta.shape != (size,) or size == 0 or size % WORD_BYTES:
        return False
    flags = parity.flags
    if not (flags.c_contiguous and flags.writeable and delta.flags.c_contiguous and 0 <= index < code.data):
        return False
    start, change = address(parity), address(delta)
    if start < change + size and change < start + count * size:
        return False
    column, step = code._column(index)
    return code.engine.update_page(column, step, (start, size, count), change, size, code.threads)


def reconstruct(
    code: Code,
    pages: Any,
    parity: Any,
    lost_data: Iterable[int],
    lost_parity: Iterable[int],
    verify: bool,
) -> Reconstruction:
    """See `ReedSolomon.reconstruct`."""
    group = pages_of(code, pages)
    rows = rows_of(code, parity, "parity", group.page_bytes)
    plan = repair(code.coefficients, len(group), lost_data, lost_parity, verify)
    mending = Mending(code, group, rows, plan)
    mending.check_targets()
    wrong = mending.contradicting()
    if wrong:
        raise InconsistentParity(wrong, len(plan.spare))
    mending.write()
    return plan.result


def pages_of(code: Code, pages: Any) -> PageGroup:
    """Return the pages of one group, checked."""
    group = collect(pages, "pages", absent=True)
    if len(group) > code.data:
        raise BufferMismatch(f"pages: at most {code.data} pages are expected, found {len(group)}")
    return group


def rows_of(code: Code, rows: Any, what: str, page_bytes: int | None, *, writable: bool = False) -> PageGroup:
    """Return the parity rows of one group, checked."""
    group = collect(rows, what, page_bytes=page_bytes, writable=writable)
    if len(group) != code.parity:
        raise BufferMismatch(f"{what}: {code.parity} parity rows are expected, found {len(group)}")
    return group


def _changed(code: Code, buffer: Any, what: str, first: int, start: int, page_bytes: int) -> PageGroup:
    array = buffer if isinstance(buffer, (list, tuple)) else view(buffer, what)
    if isinstance(array, np.ndarray) and array.ndim == 1:
        change = collect([array], what, whole_words=False)
    else:
        change = collect(array, what, page_bytes=page_bytes, absent=True)
        if start:
            raise BufferMismatch(f"offset: 0 is expected with whole pages, found {start}")
    if first + len(change) > code.data:
        raise CodeError(
            f"{what}: pages {first} to {first + len(change) - 1} are beyond the last page {code.data - 1}"
        )
    stop = start + change.page_bytes
    if stop > page_bytes:
        raise BufferMismatch(f"{what}: bytes {start} to {stop} do not fit a page of {page_bytes} bytes")
    return change
