"""Peers of cpu_bench.py that are C libraries, Jerasure and ISA-L, through ctypes where they are installed.

Debian has them as libjerasure2 and libisal2. Jerasure with w = 32 is the same code as ours, byte for byte,
which is checked; w = 16 is the same matrix in a smaller field. ISA-L's field has 256 elements: pages and rows
are 255 at most, so it cannot have 1024 + 16, and its products are of 8 bits instead of 32.

Each peer is used as its manual says, with everything that can be prepared prepared beforehand.
"""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

__all__ = ["Isal", "Jerasure", "Memory", "libraries"]

Pages = np.ndarray
Work = Callable[[], object]
ISAL_MOST = 255


def addresses(pages: Pages) -> ctypes.Array[ctypes.c_void_p]:
    """One pointer a page."""
    return (ctypes.c_void_p * len(pages))(*(page.ctypes.data for page in pages))


class Jerasure:
    """The coding matrix cauchy_original over GF(2^w)."""

    def __init__(self, library: ctypes.CDLL, w: int, pages: Pages, parity: Pages) -> None:
        self.who = f"Jerasure 2.0, w = {w}"
        self.w, self.pages, self.parity = w, pages, parity
        self._library = library
        self._multiply = getattr(library, f"galois_w{w}_region_multiply")
        library.cauchy_original_coding_matrix.restype = ctypes.c_void_p
        self._matrix = library.cauchy_original_coding_matrix(len(pages), len(parity), w)
        self._table = (ctypes.c_int * (len(pages) * len(parity))).from_address(self._matrix)
        self._data, self._rows = addresses(pages), addresses(parity)

    def encode(self) -> None:
        shape = (len(self.pages), len(self.parity), self.w)
        self._library.jerasure_matrix_encode(
            *shape, ctypes.c_void_p(self._matrix), self._data, self._rows, self.pages.shape[1]
        )

    def repair(self, lost: int) -> Work:
        """Return what restores the first `lost` pages."""
        erased = (ctypes.c_int * (lost + 1))(*range(lost), -1)
        arguments = (len(self.pages), len(self.parity), self.w, ctypes.c_void_p(self._matrix), 0, erased)

        def work() -> None:
            status = self._library.jerasure_matrix_decode(
                *arguments, self._data, self._rows, self.pages.shape[1]
            )
            assert status == 0

        return work

    def update(self, rows: Pages, first: int, deltas: Pages) -> Work:
        """Return what changes parity rows by the deltas of pages from `first` on."""
        size, count = self.pages.shape[1], len(self.pages)
        calls = [
            (ctypes.c_void_p(delta.ctypes.data), self._table[row * count + first + k], size, address, 1)
            for k, delta in enumerate(deltas)
            for row, address in enumerate(map(ctypes.c_void_p, addresses(rows)))
        ]

        def work() -> None:
            for arguments in calls:
                self._multiply(*arguments)

        return work


class Isal:
    """A Cauchy matrix over GF(2^8), of as many pages as there can be."""

    def __init__(self, library: ctypes.CDLL, pages: Pages, parity: Pages) -> None:
        self.pages, self.parity = pages[: ISAL_MOST - len(parity)], parity
        self.who = "ISA-L 2.30"
        self._library = library
        count = len(self.pages)
        self._matrix = np.zeros((count + len(parity), count), np.uint8)
        library.gf_gen_cauchy1_matrix(ctypes.c_void_p(self._matrix.ctypes.data), len(self._matrix), count)
        self._tables = self._prepare(self._matrix[count:])
        self._data, self._rows = addresses(self.pages), addresses(parity)

    def _prepare(self, rows: np.ndarray) -> np.ndarray:
        rows = np.ascontiguousarray(rows)
        tables = np.zeros((*rows.shape, 32), np.uint8)
        self._library.ec_init_tables(
            rows.shape[1],
            rows.shape[0],
            ctypes.c_void_p(rows.ctypes.data),
            ctypes.c_void_p(tables.ctypes.data),
        )
        return tables

    def _product(self, tables: np.ndarray, data: object, rows: object) -> None:
        self._library.ec_encode_data(
            self.pages.shape[1],
            tables.shape[1],
            tables.shape[0],
            ctypes.c_void_p(tables.ctypes.data),
            data,
            rows,
        )

    def encode(self) -> None:
        self._product(self._tables, self._data, self._rows)

    def repair(self, lost: int) -> Work:
        count = len(self.pages)
        kept = [*range(lost, count), *range(count, count + lost)]
        square, inverse = np.ascontiguousarray(self._matrix[kept]), np.zeros((count, count), np.uint8)
        status = self._library.gf_invert_matrix(
            ctypes.c_void_p(square.ctypes.data), ctypes.c_void_p(inverse.ctypes.data), count
        )
        assert status == 0
        tables = self._prepare(inverse[:lost])
        survivors = (ctypes.c_void_p * count)(*self._data[lost:], *self._rows[:lost])
        restored = (ctypes.c_void_p * lost)(*self._data[:lost])
        return lambda: self._product(tables, survivors, restored)

    def update(self, rows: Pages, first: int, deltas: Pages) -> Work:
        tables = ctypes.c_void_p(self._tables.ctypes.data)
        shape = (self.pages.shape[1], len(self.pages), len(self.parity))
        targets = addresses(rows)

        def work() -> None:
            for k, delta in enumerate(deltas):
                self._library.ec_encode_data_update(
                    *shape, first + k, tables, ctypes.c_void_p(delta.ctypes.data), targets
                )

        return work


def libraries() -> Iterator[tuple[str, ctypes.CDLL | str]]:
    """Yield the name of each C peer with its library, or with a line that says why it is missing."""
    for name, file, package in (
        ("Jerasure", "libJerasure.so.2", "libjerasure2"),
        ("ISA-L", "libisal.so.2", "libisal2"),
    ):
        try:
            yield name, ctypes.CDLL(file)
        except OSError:
            yield name, f"{name} is not measured: {file} is not here (Debian: {package})"


class Memory:
    """memory.c: what reading and XOR alone cost."""

    def __init__(self) -> None:
        self.problem = ""
        if shutil.which("cc") is None:
            self.problem = "memory alone is not measured: no C compiler cc is here"
            return
        with tempfile.TemporaryDirectory() as folder:
            target = Path(folder, "memory.so")
            source = Path(__file__).with_name("memory.c")
            command = ["cc", "-O3", "-march=native", "-shared", "-fPIC", str(source), "-o", str(target)]
            subprocess.run(command, check=True, timeout=60)
            self._library = ctypes.CDLL(str(target))
        self._library.read_pages.restype = ctypes.c_uint64

    def read(self, pages: Pages) -> Work:
        table = addresses(pages)
        count, size = (ctypes.c_size_t(n) for n in pages.shape)
        return lambda: self._library.read_pages(table, count, size)

    def xor(self, rows: Pages, delta: np.ndarray, strip: int = 4096) -> Work:
        """Return what XORs delta into all rows, `strip` bytes of each at a time."""
        table = addresses(rows)
        count, size, at_once = (ctypes.c_size_t(n) for n in (*rows.shape, strip))
        change = ctypes.c_void_p(delta.ctypes.data)
        return lambda: self._library.xor_rows(table, count, size, change, at_once)

    def xor_past(self, rows: Pages, delta: np.ndarray) -> Work | None:
        """The same with stores past the cache; None where this processor's are not known."""
        table = addresses(rows)
        count, size, strip = (ctypes.c_size_t(n) for n in (*rows.shape, 4096))
        change = ctypes.c_void_p(delta.ctypes.data)
        if not self._library.xor_rows_past(table, ctypes.c_size_t(0), size, change, strip):
            return None
        return lambda: self._library.xor_rows_past(table, count, size, change, strip)
