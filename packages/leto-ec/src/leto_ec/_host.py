"""Encode, update and reconstruct on host memory; every argument is checked before a byte is written."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from leto_ec._arguments import every, integer, whole_words
from leto_ec._buffers import PageGroup, address, collect, refuse_overlap, strided, view
from leto_ec._code import Code
from leto_ec._repair import Reconstruction, Repair, repair
from leto_ec.errors import BufferMismatch, CodeError, InconsistentParity
from leto_ec.field import WORD_BYTES

__all__ = ["encode", "reconstruct", "update"]


def encode(code: Code, pages: Any, out: Any) -> Any:
    """See `ReedSolomon.encode`."""
    source = _pages(code, pages)
    if out is None:
        out = np.empty((code.parity, source.page_bytes), np.uint8)
        target = PageGroup(out, source.page_bytes)
    else:
        target = _rows(code, out, "out", source.page_bytes, writable=True)
        refuse_overlap(target, "out", [(source, "pages")])
    layer = (every(code.data)[: len(source)], source)
    code.engine.apply(code.coefficients, every(code.parity), [layer], None, target, code.threads)
    return out


def update(code: Code, parity: Any, index: int, changes: list[tuple[Any, str]], offset: int, out: Any) -> Any:
    """See `ReedSolomon.update`. `changes`: the delta, or the old and the new contents, with their names."""
    if out is None and len(changes) == 1 and _one_page(code, parity, index, changes[0][0], offset):
        return parity
    rows = _rows(code, parity, "parity", None, writable=out is None)
    page_bytes = rows.page_bytes
    first = integer(index, "index", 0, code.data - 1)
    start = integer(offset, "offset", 0, page_bytes)
    groups = [_change(code, buffer, what, first, start, page_bytes) for buffer, what in changes]
    count, length = len(groups[0]), groups[0].page_bytes
    if any((len(group), group.page_bytes) != (count, length) for group in groups[1:]):
        raise BufferMismatch(
            "old and new: as many bytes of as many pages are expected, found different sizes"
        )
    inputs = [(group, what) for group, (_, what) in zip(groups, changes, strict=True)]
    target = rows
    if out is not None:
        target = _rows(code, out, "out", page_bytes, writable=True)
        refuse_overlap(target, "out", [(rows, "parity"), *inputs])
    else:
        refuse_overlap(rows, "parity", inputs)
    indices = every(code.data)[first : first + count]
    if start == 0 and length == page_bytes:
        layers = [(indices, group) for group in groups]
        code.engine.apply(code.coefficients, every(code.parity), layers, rows, target, code.threads)
        return parity if out is None else out
    if out is not None:
        for before, after in zip(rows.rows, target.rows, strict=True):
            after[:] = before
    for group in groups:
        for piece, at in whole_words(group, start):
            span = target.window(at, at + piece.page_bytes)
            code.engine.apply(
                code.coefficients, every(code.parity), [(indices, piece)], span, span, code.threads
            )
    return parity if out is None else out


def _one_page(code: Code, parity: Any, index: Any, delta: Any, offset: Any) -> bool:
    """Do the commonest update, plain arrays and a whole page, at half the fixed cost.

    False, and nothing done, where anything is unusual or wrong: the general way then finds what.
    """
    if not (type(parity) is type(delta) is np.ndarray and type(index) is type(offset) is int):
        return False
    if not (parity.dtype == delta.dtype == np.uint8 and parity.ndim == 2 and offset == 0):
        return False
    count, size = parity.shape
    if count != code.parity or delta.shape != (size,) or size == 0 or size % WORD_BYTES:
        return False
    flags = parity.flags
    if not (flags.c_contiguous and flags.writeable and delta.flags.c_contiguous and 0 <= index < code.data):
        return False
    start, change = address(parity), address(delta)
    if start < change + size and change < start + count * size:
        return False
    rows = PageGroup(parity, size, strided(start, size, count))
    page = PageGroup([delta], size, np.array([change], np.int64))
    code.engine.combine(code.coefficients[:, index : index + 1], page, rows, rows, code.threads)
    return True


def reconstruct(
    code: Code,
    pages: Any,
    parity: Any,
    lost_data: Iterable[int],
    lost_parity: Iterable[int],
    verify: bool,
) -> Reconstruction:
    """See `ReedSolomon.reconstruct`."""
    group = _pages(code, pages)
    rows = _rows(code, parity, "parity", group.page_bytes)
    plan = repair(code.coefficients, len(group), lost_data, lost_parity, verify)
    lost_pages, lost_rows = group.take(plan.lost_data), rows.take(plan.lost_parity)
    _check_targets(group, rows, plan, lost_pages, lost_rows)
    if not len(plan.order):
        return plan.result

    # Of lost rows, a syndrome is what the surviving pages contribute: there is nothing to begin with.
    shape = (len(plan.order), group.page_bytes)
    syndromes = PageGroup(np.empty(shape, np.uint8), group.page_bytes)
    begin = rows.take([*plan.used, *plan.spare]).followed_by_absent(len(plan.lost_parity))
    kept = (plan.kept, group.take(plan.kept))
    code.engine.apply(code.coefficients, plan.order, [kept], begin, syndromes, code.threads)

    used, spare = len(plan.used), len(plan.spare)
    of_used = syndromes.take(range(used))
    if spare:
        spares = syndromes.take(range(used, used + spare))
        if used:
            code.engine.combine(plan.check, of_used, spares, spares, code.threads)
        wrong = tuple(row for row, check in zip(plan.spare, spares.rows, strict=True) if check.any())
        if wrong:
            raise InconsistentParity(wrong, spare)
    if plan.lost_data:
        code.engine.combine(plan.solver, of_used, None, lost_pages, code.threads)
    if plan.lost_parity:
        partial = syndromes.take(range(used + spare, len(plan.order)))
        code.engine.combine(plan.of_lost, lost_pages, partial, lost_rows, code.threads)
    return plan.result


def _pages(code: Code, pages: Any) -> PageGroup:
    group = collect(pages, "pages", absent=True)
    if len(group) > code.data:
        raise BufferMismatch(f"pages: at most {code.data} pages are expected, found {len(group)}")
    return group


def _rows(code: Code, rows: Any, what: str, page_bytes: int | None, *, writable: bool = False) -> PageGroup:
    group = collect(rows, what, page_bytes=page_bytes, writable=writable)
    if len(group) != code.parity:
        raise BufferMismatch(f"{what}: {code.parity} parity rows are expected, found {len(group)}")
    return group


def _change(code: Code, buffer: Any, what: str, first: int, start: int, page_bytes: int) -> PageGroup:
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


def _check_targets(
    group: PageGroup, rows: PageGroup, plan: Repair, lost_pages: PageGroup, lost_rows: PageGroup
) -> None:
    """Refuse lost pages or rows that cannot be written or that share memory with anything else."""
    targets = PageGroup([*lost_pages.rows, *lost_rows.rows], group.page_bytes)
    if not len(targets):
        return
    for index, row in zip(plan.lost_data, lost_pages.rows, strict=True):
        if row is None:
            raise BufferMismatch(f"pages[{index}]: memory to write the lost page to is expected, found None")
    if not all(row.flags.writeable for row in targets.rows):
        raise BufferMismatch("lost pages and rows must be writable memory, found read-only memory")
    survivors = [(group.take(plan.kept), "surviving pages"), (rows.take(plan.rows_kept), "surviving parity")]
    refuse_overlap(targets, "lost pages and rows", survivors)
