"""The erasure code: encode, delta update, reconstruct (§4 of the paper; theory in `leto_ec.field`).

Upholds I-1 (any loss within tolerance is reconstructed to the exact bytes, anything beyond is refused)
and the code's part of I-6 (inconsistent parity is found where spare rows exist, and said so where none
do). Every argument is checked before the first byte is written.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from leto_ec import cauchy, field
from leto_ec._arguments import index_set, integer, whole_words
from leto_ec._buffers import PageGroup, collect, refuse_overlap, view
from leto_ec._engines import select
from leto_ec.errors import BufferMismatch, CodeError, InconsistentParity, ToleranceExceeded

__all__ = ["Reconstruction", "ReedSolomon"]


@dataclass(frozen=True)
class Reconstruction:
    """What `ReedSolomon.reconstruct` did.

    Attributes
    ----------
    verified : bool
        Spare parity rows confirmed the result. False when none was left (or none was asked): then
        silent corruption of a surviving page or row would not have been noticed.
    spares_checked : int
        Spare rows compared; corruption of up to so many surviving pages or rows is certain to show.
    data, parity : tuple of int
        Pages and rows that were rewritten.
    """

    verified: bool
    spares_checked: int
    data: tuple[int, ...]
    parity: tuple[int, ...]


class ReedSolomon:
    """Systematic Cauchy Reed-Solomon code over GF(2^32) with `data` pages and `parity` parity pages.

    Pages are a (n, page_bytes) uint8 buffer, contiguous within a page and with any stride between
    pages, or a list of n one-dimensional buffers. n < data is a shortened code: the missing pages at the
    end count as zero. Buffers may be numpy arrays, memoryviews, torch CPU tensors or anything that
    speaks DLPack; they are never copied. page_bytes is a multiple of 4. Objects are immutable and may be
    used by many threads at once.

    Parameters
    ----------
    data : int
        D, 1 to 65,535.
    parity : int
        H, 1 to 64: so many lost pages are tolerated.
    kernel : str
        "auto", "reference" or the name of a native kernel (see `leto_ec.info`).

    Raises
    ------
    CodeError
        Parameters out of range, or no such kernel on this machine.
    """

    def __init__(self, data: int, parity: int, kernel: str = "auto") -> None:
        self._data = integer(data, "data", 1, cauchy.MAX_DATA)
        self._parity = integer(parity, "parity", 1, cauchy.MAX_PARITY)
        self._engine = select(kernel)
        self._matrix = cauchy.generator(self._data, self._parity)

    def __repr__(self) -> str:
        return f"ReedSolomon(data={self._data}, parity={self._parity}, kernel={self.kernel!r})"

    @property
    def data(self) -> int:
        """D, the number of data pages of a full group."""
        return self._data

    @property
    def parity(self) -> int:
        """H, the number of parity rows."""
        return self._parity

    @property
    def kernel(self) -> str:
        """Name of the kernel in use."""
        return self._engine.name

    @property
    def coefficients(self) -> NDArray[np.uint32]:
        """The matrix c, shape (parity, data), read-only."""
        return self._matrix

    def encode(self, pages: Any, out: Any = None) -> Any:
        """Compute the parity of all pages.

        Parameters
        ----------
        pages
            n <= data pages.
        out
            `parity` rows to write into, separate from the pages; None allocates.

        Returns
        -------
        `out`, or a new uint8 array of shape (parity, page_bytes).

        Raises
        ------
        BufferMismatch
        """
        source = self._pages(pages)
        if out is None:
            out = np.empty((self._parity, source.page_bytes), np.uint8)
            target = PageGroup(out, source.page_bytes)
        else:
            target = self._rows(out, "out", source.page_bytes, writable=True)
            refuse_overlap(target, "out", [(source, "pages")])
        self._engine.combine(self._matrix[:, : len(source)], source, None, target)
        return out

    def update(self, parity: Any, *, index: int, delta: Any, offset: int = 0, out: Any = None) -> Any:
        """Bring parity up to date after data pages changed by `delta` (old ^ new): Q' = Q ^ RS_j(delta).

        Parameters
        ----------
        parity
            The `parity` rows Q; updated in place unless `out` is given.
        index
            Logical index j of the (first) page that changed.
        delta
            A one-dimensional buffer: the bytes that changed in page `index`, from byte `offset` on; or
            pages (two-dimensional or a list): whole pages index, index + 1, ...
        offset
            Byte offset within the page, any value; 0 for whole pages.
        out
            Rows for Q' out of place, separate from `parity` and `delta`; `parity` is then only read.

        Returns
        -------
        The object that now holds Q': `parity` or `out`.

        Raises
        ------
        CodeError
            Page indices out of range.
        BufferMismatch
        """
        rows = self._rows(parity, "parity", None, writable=out is None)
        page_bytes = rows.page_bytes
        first = integer(index, "index", 0, self._data - 1)
        start = integer(offset, "offset", 0, page_bytes)
        array = delta if isinstance(delta, (list, tuple)) else view(delta, "delta")
        if isinstance(array, np.ndarray) and array.ndim == 1:
            change = collect([array], "delta", whole_words=False)
        else:
            change = collect(array, "delta", page_bytes=page_bytes)
            if start:
                raise BufferMismatch(f"offset: 0 is expected with whole pages, found {start}")
        if first + len(change) > self._data:
            raise CodeError(
                f"delta: pages {first} to {first + len(change) - 1} are beyond the last page {self._data - 1}"
            )
        stop = start + change.page_bytes
        if stop > page_bytes:
            raise BufferMismatch(f"delta: bytes {start} to {stop} do not fit a page of {page_bytes} bytes")
        target = rows
        if out is not None:
            target = self._rows(out, "out", page_bytes, writable=True)
            refuse_overlap(target, "out", [(rows, "parity"), (change, "delta")])
        else:
            refuse_overlap(rows, "parity", [(change, "delta")])
        columns = self._matrix[:, first : first + len(change)]
        if start == 0 and stop == page_bytes:
            self._engine.combine(columns, change, rows, target)
            return parity if out is None else out
        if out is not None:
            for old, new in zip(rows.rows, target.rows, strict=True):
                new[:] = old
        for piece, at in whole_words(change, start):
            span = target.window(at, at + piece.page_bytes)
            self._engine.combine(columns, piece, span, span)
        return parity if out is None else out

    def reconstruct(
        self,
        pages: Any,
        parity: Any,
        *,
        lost_data: Iterable[int] = (),
        lost_parity: Iterable[int] = (),
        verify: bool = True,
    ) -> Reconstruction:
        """Rewrite lost data pages and parity rows in place, from those that survive.

        The contents of lost pages and rows are not read. Nothing is written before everything was
        checked, consistency of the survivors included. With nothing lost it is a scrub: it only verifies.

        Parameters
        ----------
        pages
            n <= data pages, lost ones included (they are written).
        parity
            All `parity` rows, lost ones included (they are written).
        lost_data, lost_parity
            Indices of lost pages and rows.
        verify
            Check the survivors with every spare parity row (surviving rows not needed to solve).

        Returns
        -------
        Reconstruction

        Raises
        ------
        ToleranceExceeded
            More pages are lost than rows survive.
        InconsistentParity
            The survivors contradict each other.
        CodeError
            Indices out of range or given twice.
        BufferMismatch
        """
        group = self._pages(pages)
        rows = self._rows(parity, "parity", group.page_bytes)
        data_lost = index_set(lost_data, "lost_data", len(group))
        rows_lost = index_set(lost_parity, "lost_parity", self._parity)
        if len(data_lost) > self._parity - len(rows_lost):
            raise ToleranceExceeded(len(data_lost), len(rows_lost), self._parity)
        missing = set(data_lost)
        kept = [index for index in range(len(group)) if index not in missing]
        rows_kept = [row for row in range(self._parity) if row not in set(rows_lost)]
        used, spare = rows_kept[: len(data_lost)], rows_kept[len(data_lost) :] if verify else []
        lost_pages, lost_rows = group.take(data_lost), rows.take(rows_lost)
        self._check_targets(group, kept, rows, rows_kept, lost_pages, lost_rows)

        # Syndromes: what the lost pages contribute to each row. One pass over the survivors gives those
        # of the rows used, of the spare rows, and the survivors' part of the lost rows.
        order = [*used, *spare, *rows_lost]
        if not order:
            return Reconstruction(False, 0, data_lost, rows_lost)
        scratch = np.zeros((len(order), group.page_bytes), np.uint8)
        for place, row in enumerate([*used, *spare]):
            scratch[place] = rows.rows[row]
        syndromes = PageGroup(scratch, group.page_bytes)
        if kept:
            columns = self._matrix[np.ix_(order, kept)]
            self._engine.combine(columns, group.take(kept), syndromes, syndromes)

        of_used = syndromes.take(range(len(used)))
        solver = cauchy.solver(used, data_lost, self._parity)
        if spare:
            self._check_spares(syndromes, used, spare, data_lost, solver)
        if data_lost:
            self._engine.combine(solver, of_used, None, lost_pages)
        if rows_lost:
            partial = syndromes.take(range(len(used) + len(spare), len(order)))
            self._engine.combine(self._matrix[np.ix_(rows_lost, data_lost)], lost_pages, partial, lost_rows)
        return Reconstruction(bool(spare), len(spare), data_lost, rows_lost)

    def _check_spares(
        self,
        syndromes: PageGroup,
        used: list[int],
        spare: list[int],
        lost: tuple[int, ...],
        solver: NDArray[np.uint32],
    ) -> None:
        """Refuse if a spare row's syndrome is not what the solution, not yet written, would give it.

        Spoils the syndromes of the spare rows; the rest is left as it is.
        """
        spares = syndromes.take(range(len(used), len(used) + len(spare)))
        if lost:
            of_lost = self._matrix[np.ix_(spare, lost)]
            through = np.bitwise_xor.reduce(field.multiply(of_lost[:, :, None], solver[None, :, :]), axis=1)
            self._engine.combine(through, syndromes.take(range(len(used))), spares, spares)
        wrong = tuple(row for row, check in zip(spare, spares.rows, strict=True) if check.any())
        if wrong:
            raise InconsistentParity(wrong, len(spare))

    def _check_targets(
        self,
        group: PageGroup,
        kept: list[int],
        rows: PageGroup,
        rows_kept: list[int],
        lost_pages: PageGroup,
        lost_rows: PageGroup,
    ) -> None:
        """Refuse lost pages or rows that cannot be written or that share memory with anything else."""
        targets = PageGroup([*lost_pages.rows, *lost_rows.rows], group.page_bytes)
        if not len(targets):
            return
        if not all(row.flags.writeable for row in targets.rows):
            raise BufferMismatch("lost pages and rows must be writable memory, found read-only memory")
        survivors = [(group.take(kept), "surviving pages"), (rows.take(rows_kept), "surviving parity")]
        refuse_overlap(targets, "lost pages and rows", survivors)

    def _pages(self, pages: Any) -> PageGroup:
        group = collect(pages, "pages")
        if len(group) > self._data:
            raise BufferMismatch(f"pages: at most {self._data} pages are expected, found {len(group)}")
        return group

    def _rows(self, rows: Any, what: str, page_bytes: int | None, *, writable: bool = False) -> PageGroup:
        group = collect(rows, what, page_bytes=page_bytes, writable=writable)
        if len(group) != self._parity:
            raise BufferMismatch(f"{what}: {self._parity} parity rows are expected, found {len(group)}")
        return group
