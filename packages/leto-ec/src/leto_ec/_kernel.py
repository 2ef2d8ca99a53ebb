"""An engine made of one native kernel: which way of its to take for a shape, and the tables that it reads."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from leto_ec import _blocks
from leto_ec._arguments import every
from leto_ec._buffers import PageGroup, address
from leto_ec._native import Library, library
from leto_ec._work import Engine, Layer, Work

__all__ = ["Kernel", "NativeWork"]

BASES = (_blocks.dyadic, _blocks.fft)  # enum leto_ec_basis
FFT = 1


class NativeWork:
    """Pieces of work for the library: rows of `table` are its struct leto_ec_work."""

    KERNEL, THREADS, BLOCKS, ROWS, COLUMNS, BYTES, COEFFICIENTS, PREPARED, FINAL, INPUTS, BASE, OUTPUTS = (
        range(12)
    )

    def __init__(self, kernel: Kernel, pieces: list[tuple[int, ...]], kept: list[Any]) -> None:
        """`kept` is what the addresses in the pieces point to, kept alive."""
        self.kernel, self.kept = kernel, kept
        self.table = np.array(pieces, np.int64).reshape(len(pieces), 12)
        self._run, self._arguments = kernel.handle.leto_ec_run, (address(self.table), len(pieces))

    def prepare(self) -> None:
        """Prepare the coefficients of combinations, which the library otherwise does in each run."""
        for piece in self.table:
            if piece[self.BLOCKS] == 0 and piece[self.PREPARED] == 0:
                tables = self.kernel.tables(
                    *(int(piece[k]) for k in (self.ROWS, self.COLUMNS, self.COEFFICIENTS))
                )
                if tables is not None:
                    piece[self.PREPARED] = address(tables)
                    self.kept.append(tables)

    def run(self) -> None:
        """Do all pieces, one after the other."""
        status = self._run(*self._arguments)
        if status != 0:
            self.kernel.check(status)


class Kernel(Engine):
    """One kernel of a library."""

    def __init__(self, name: str, source: Library | None = None) -> None:
        handle = (source or library()).handle
        assert handle is not None
        self.name = name
        self.handle = handle
        index = 0
        while handle.leto_ec_kernel_name(index) not in (name.encode(), None):
            index += 1
        self._index = index
        self._basis = int(handle.leto_ec_kernel_basis(index))
        self._block_bytes = int(handle.leto_ec_kernel_block_bytes(index))
        self._block_cost = int(handle.leto_ec_kernel_block_cost(index))
        self._product_cost = int(handle.leto_ec_kernel_product_cost(index))
        self._update = handle.leto_ec_update
        self._prepared = np.zeros((0, self._block_bytes), np.uint8)  # of cosets 0, 1, 2, ...
        self._lock = threading.Lock()

    def combination(
        self,
        coefficients: NDArray[np.uint32],
        inputs: PageGroup,
        base: PageGroup | None,
        outputs: PageGroup,
        threads: int = 1,
    ) -> Work:
        """See `Engine.combination`."""
        building = _Building(self, outputs.page_bytes, threads)
        building.combination(coefficients, inputs, base, outputs)
        return building.work()

    def encoding(
        self,
        matrix: NDArray[np.uint32],
        rows: NDArray[np.int64],
        layers: list[Layer],
        base: PageGroup | None,
        outputs: PageGroup,
        threads: int = 1,
    ) -> Work:
        """See `Engine.encoding`. By blocks where that costs less, else row by row."""
        building = _Building(self, outputs.page_bytes, threads)
        parity = len(matrix)
        count = sum(len(indices) for indices, _ in layers)
        blocks = sum(
            int(indices[-1] + parity >> _blocks.SHIFT) - int(indices[0] + parity >> _blocks.SHIFT) + 1
            for indices, _ in layers
            if len(indices)
        )
        parts = range(int(rows.max()) >> _blocks.SHIFT, -1, -1) if parity > _blocks.BLOCK else (0,)
        by_rows: list[NDArray[np.int64]] = []
        for part in parts:
            here = (
                np.flatnonzero(rows >> _blocks.SHIFT == part) if parity > _blocks.BLOCK else every(len(rows))
            )
            if self.row_by_row(len(here), count, blocks):
                by_rows.append(here)
            else:
                building.slice(part, here, matrix, rows, layers, base, outputs)
        if len(by_rows) == len(parts):
            building.rows(every(len(rows)), matrix, rows, layers, base, outputs)
        elif by_rows:
            building.rows(np.sort(np.concatenate(by_rows)), matrix, rows, layers, base, outputs)
        return building.work()

    def row_by_row(self, rows: int, pages: int, blocks: int) -> bool:
        """Whether `rows` rows of one slice of a product cost less one by one than by so many blocks."""
        return blocks * self._block_cost + self._product_cost >= pages * rows

    def joined(self, works: Sequence[Work]) -> Work:
        """All of them in one call of the library."""
        if len(works) == 1:
            return works[0]
        pieces: list[tuple[int, ...]] = []
        kept: list[Any] = []
        for work in works:
            assert isinstance(work, NativeWork)
            pieces += map(tuple, work.table.tolist())
            kept += work.kept
        return NativeWork(self, pieces, kept)

    def update_page(
        self, column: int, step: int, parity: tuple[int, int, int], delta: int, page_bytes: int, threads: int
    ) -> bool:
        """See `Engine.update_page`."""
        first, stride, rows = parity
        status = self._update(self._index, threads, rows, page_bytes, column, step, delta, first, stride)
        if status != 0:
            self.check(status)
        return True

    @property
    def index(self) -> int:
        """Number of the kernel in its library."""
        return self._index

    @property
    def basis(self) -> int:
        """What the coefficients of a block are: enum leto_ec_basis."""
        return self._basis

    def tables(self, rows: int, columns: int, coefficients: int) -> NDArray[np.uint8] | None:
        """Return the prepared coefficients at an address; None: this kernel takes them as they are."""
        size = self.handle.leto_ec_matrix_bytes(self._index, rows, columns)
        if size == 0:
            return None
        tables = np.empty(size, np.uint8)
        self.check(
            self.handle.leto_ec_prepare_matrix(self._index, rows, columns, coefficients, address(tables))
        )
        return tables

    def cosets(self, count: int) -> NDArray[np.uint8]:
        """Return the prepared coefficients of at least the first `count` cosets."""
        if len(self._prepared) < count:
            with self._lock:
                have = len(self._prepared)
                if have < count:
                    more = np.arange(have, max(count, min(2 * have, 4104), 8))
                    coefficients = np.ascontiguousarray(BASES[self._basis](more))
                    fresh = np.empty((len(more), self._block_bytes), np.uint8)
                    status = self.handle.leto_ec_prepare(
                        self._index, len(more), coefficients.ctypes.data, fresh.ctypes.data
                    )
                    self.check(status)
                    self._prepared = np.concatenate([self._prepared, fresh])
        return self._prepared

    def check(self, status: int) -> None:
        """Raise what a status of the library means."""
        if status == 1:
            raise MemoryError("leto_ec: no memory for the accumulators of a strip")
        if status != 0:
            raise RuntimeError(f"leto_ec: kernel {self.name} returned {status}: a bug, please report it")


class _Building:
    """Work that is being put together: all of one kernel and one size of pages."""

    def __init__(self, kernel: Kernel, page_bytes: int, threads: int) -> None:
        self._kernel, self._page_bytes, self._threads = kernel, page_bytes, threads
        self._pieces: list[tuple[int, ...]] = []
        self._kept: list[Any] = []

    def work(self) -> NativeWork:
        return NativeWork(self._kernel, self._pieces, self._kept)

    def _at(self, array: NDArray[Any]) -> int:
        self._kept.append(array)
        return address(array)

    def combination(
        self,
        coefficients: NDArray[np.uint32],
        inputs: PageGroup,
        base: PageGroup | None,
        outputs: PageGroup,
    ) -> None:
        rows, columns = coefficients.shape
        assert (rows, columns) == (len(outputs), len(inputs))
        matrix = self._at(np.ascontiguousarray(coefficients, np.uint32))
        after = self._at(outputs.addresses)
        before = after if base is outputs else 0 if base is None else self._at(base.addresses)
        shape = (self._kernel.index, self._threads, 0, rows, columns, self._page_bytes)
        self._pieces.append((*shape, matrix, 0, 0, self._at(inputs.addresses), before, after))

    def rows(
        self,
        here: NDArray[np.int64],
        matrix: NDArray[np.uint32],
        rows: NDArray[np.int64],
        layers: list[Layer],
        base: PageGroup | None,
        outputs: PageGroup,
    ) -> None:
        """The rows `here` (which of `rows`, ascending), one by one."""
        columns = layers[0][0] if len(layers) == 1 else np.concatenate([indices for indices, _ in layers])
        inputs = PageGroup.joined([group for _, group in layers], outputs.page_bytes)
        if len(here) < len(rows):
            base = None if base is None else outputs.take(here) if base is outputs else base.take(here)
            rows, outputs = rows[here], outputs.take(here)
        first, count = int(columns[0]) if len(columns) else 0, len(columns)
        if count == 0 or (len(layers) == 1 and int(columns[-1]) - first == count - 1):
            block = matrix[:, first : first + count]
        else:
            block = matrix[:, columns]
        if len(rows) != len(matrix) or rows is not every(len(rows)):
            block = block[rows]
        self.combination(block, inputs, base, outputs)

    def slice(
        self,
        part: int,
        here: NDArray[np.int64],
        matrix: NDArray[np.uint32],
        rows: NDArray[np.int64],
        layers: list[Layer],
        base: PageGroup | None,
        outputs: PageGroup,
    ) -> None:
        """One slice of rows (`here`: which of `rows` are in it) by blocks."""
        parity = len(matrix)
        starts = base
        if self._kernel.basis == FFT and any(
            len(indices) and (indices[0] + parity) >> _blocks.SHIFT == part for indices, _ in layers
        ):
            # Rows and pages share this block: its coset is 0, where the FFT has no scale. Row by row, then
            # the rest.
            shared = [np.searchsorted(indices, (part + 1 << _blocks.SHIFT) - parity) for indices, _ in layers]
            first = [
                (indices[:n], group.take(range(n)))
                for (indices, group), n in zip(layers, shared, strict=True)
            ]
            self.rows(here, matrix, rows, first, base, outputs)
            layers = [
                (indices[n:], group.take(range(n, len(group))))
                for (indices, group), n in zip(layers, shared, strict=True)
            ]
            starts = outputs
        pages: list[NDArray[np.int64]] = []
        numbers: list[NDArray[np.int64]] = []
        for indices, group in layers:
            if not len(indices):
                continue
            points = indices + parity
            begin, end = int(points[0]) >> _blocks.SHIFT, (int(points[-1]) >> _blocks.SHIFT) + 1
            table = np.zeros((end - begin) << _blocks.SHIFT, np.int64)
            table[points - (begin << _blocks.SHIFT)] = group.addresses
            pages.append(table)
            numbers.append(np.arange(begin, end) ^ part)
        if not numbers:
            return  # all pages were in the shared block
        order, inputs = np.concatenate(numbers), np.concatenate(pages)
        prepared = self._kernel.cosets(int(order.max()) + 1)
        ascending = part == 0 and len(layers) == 1
        factors = prepared[order[0] : order[-1] + 1] if ascending else prepared[order]
        places = rows[here] - (part << _blocks.SHIFT)
        before, after = np.zeros(_blocks.BLOCK, np.int64), np.zeros(_blocks.BLOCK, np.int64)
        after[places] = outputs.addresses[here]
        if starts is not None:
            before[places] = starts.addresses[here]
        blocks = len(order)
        shape = (
            self._kernel.index,
            self._threads,
            blocks,
            _blocks.BLOCK,
            blocks << _blocks.SHIFT,
            self._page_bytes,
        )
        tables = (0, self._at(factors), self._at(prepared), self._at(inputs))
        self._pieces.append((*shape, *tables, 0 if starts is None else self._at(before), self._at(after)))
