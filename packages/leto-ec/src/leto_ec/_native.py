"""The native kernels: a plain C library without any Python ABI, loaded with ctypes.

ctypes releases the GIL during a call, and the library keeps no state, so threads may call it at will.
The interface is native/leto_ec.h; ABI below must equal the number there, so that a stale library is
found out instead of trusted.
"""

from __future__ import annotations

import ctypes
import sys
import threading
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from leto_ec import _blocks
from leto_ec._arguments import every
from leto_ec._buffers import PageGroup, address

__all__ = ["Kernel", "Library", "library", "load"]

ABI = 2
LIBRARY = Path(__file__).with_name("_kernels.dll" if sys.platform == "win32" else "_kernels.so")
BASES = (_blocks.dyadic, _blocks.fft)  # enum leto_ec_basis
FFT = 1

Layer = tuple[NDArray[np.int64], PageGroup]


@dataclass(frozen=True)
class Library:
    """The loaded library, or why there is none."""

    handle: ctypes.CDLL | None = None
    path: str | None = None
    kernels: tuple[str, ...] = ()  # usable here, fastest first
    unsupported: tuple[str, ...] = ()
    problem: str = ""


def load(path: Path) -> Library:
    """Load a library of kernels; whatever is wrong with it is told in `problem`."""
    if not path.exists():
        return Library(problem=f"no native library was built: {path.name} is missing")
    try:
        handle = ctypes.CDLL(str(path))
        handle.leto_ec_abi.restype = ctypes.c_uint32
        handle.leto_ec_abi.argtypes = ()
        found = int(handle.leto_ec_abi())
    except (OSError, AttributeError) as error:
        return Library(problem=f"the native library {path} cannot be loaded: {error}")
    if found != ABI:
        return Library(problem=f"the native library {path} has interface {found}, not {ABI}: build it again")
    index, size, pointer, name = ctypes.c_uint32, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_char_p
    for function, result, *arguments in (
        ("kernel_name", name, index),
        ("kernel_supported", ctypes.c_int, index),
        ("kernel_basis", ctypes.c_int, index),
        ("kernel_block_bytes", size, index),
        ("kernel_block_cost", size, index),
        ("prepare", ctypes.c_int, name, size, pointer, pointer),
        # kernel, blocks, bytes, prepared, final, inputs, base or null, outputs, threads
        ("product", ctypes.c_int, name, size, size, pointer, pointer, pointer, pointer, pointer, size),
        # kernel, rows, columns, bytes, coefficients, inputs, base or null, outputs, threads
        ("combine", ctypes.c_int, name, size, size, size, pointer, pointer, pointer, pointer, size),
    ):
        entry = getattr(handle, f"leto_ec_{function}")
        entry.restype, entry.argtypes = result, arguments
    kernels: list[str] = []
    unsupported: list[str] = []
    number = 0
    while (found_name := handle.leto_ec_kernel_name(number)) is not None:
        (kernels if handle.leto_ec_kernel_supported(number) else unsupported).append(found_name.decode())
        number += 1
    return Library(handle, str(path), tuple(kernels), tuple(unsupported))


@lru_cache(maxsize=1)
def library() -> Library:
    """Return this installation's library; loaded once."""
    return load(LIBRARY)


class Kernel:
    """One kernel of a library: an engine (see `_engines.Engine`)."""

    def __init__(self, name: str, source: Library | None = None) -> None:
        handle = (source or library()).handle
        assert handle is not None
        self.name = name
        self._handle = handle
        self._encoded = name.encode()
        index = 0
        while handle.leto_ec_kernel_name(index) not in (self._encoded, None):
            index += 1
        self._basis = int(handle.leto_ec_kernel_basis(index))
        self._block_bytes = int(handle.leto_ec_kernel_block_bytes(index))
        self._block_cost = int(handle.leto_ec_kernel_block_cost(index))
        self._prepared = np.zeros((0, self._block_bytes), np.uint8)  # of cosets 0, 1, 2, ...
        self._lock = threading.Lock()

    def combine(
        self,
        coefficients: NDArray[np.uint32],
        inputs: PageGroup,
        base: PageGroup | None,
        outputs: PageGroup,
        threads: int = 1,
    ) -> None:
        """Write outputs[r] = base[r] ^ sum over k of coefficients[r, k] * inputs[k]."""
        rows, columns = coefficients.shape
        assert (rows, columns) == (len(outputs), len(inputs))
        matrix = np.ascontiguousarray(coefficients, np.uint32)
        after = address(outputs.addresses)
        status = self._handle.leto_ec_combine(
            self._encoded,
            rows,
            columns,
            outputs.page_bytes,
            address(matrix),
            address(inputs.addresses),
            after if base is outputs else None if base is None else address(base.addresses),
            after,
            threads,
        )
        self._check(status)

    def apply(
        self,
        matrix: NDArray[np.uint32],
        rows: NDArray[np.int64],
        layers: list[Layer],
        base: PageGroup | None,
        outputs: PageGroup,
        threads: int = 1,
    ) -> None:
        """Write outputs[i] = base[i] ^ sum over pages j of matrix[rows[i], j] * page j.

        By blocks where that takes fewer multiplications, else row by row.
        """
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
            if blocks * self._block_cost >= count * len(here):
                by_rows.append(here)
            else:
                self._slice(part, here, matrix, rows, layers, base, outputs, threads)
        if len(by_rows) == len(parts):
            self._rows(every(len(rows)), matrix, rows, layers, base, outputs, threads)
        elif by_rows:
            self._rows(np.sort(np.concatenate(by_rows)), matrix, rows, layers, base, outputs, threads)

    def _rows(
        self,
        here: NDArray[np.int64],
        matrix: NDArray[np.uint32],
        rows: NDArray[np.int64],
        layers: list[Layer],
        base: PageGroup | None,
        outputs: PageGroup,
        threads: int,
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
        self.combine(block, inputs, base, outputs, threads)

    def _slice(
        self,
        part: int,
        here: NDArray[np.int64],
        matrix: NDArray[np.uint32],
        rows: NDArray[np.int64],
        layers: list[Layer],
        base: PageGroup | None,
        outputs: PageGroup,
        threads: int,
    ) -> None:
        """One slice of rows (`here`: which of `rows` are in it) by blocks."""
        parity = len(matrix)
        starts = base
        if self._basis == FFT and any(
            len(indices) and (indices[0] + parity) >> _blocks.SHIFT == part for indices, _ in layers
        ):
            # Rows and pages share this block: its coset is 0, where the FFT has no scale. Row by row, then
            # the rest.
            shared = [np.searchsorted(indices, (part + 1 << _blocks.SHIFT) - parity) for indices, _ in layers]
            first = [
                (indices[:n], group.take(range(n)))
                for (indices, group), n in zip(layers, shared, strict=True)
            ]
            self._rows(here, matrix, rows, first, base, outputs, threads)
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
        order = np.concatenate(numbers) if numbers else np.zeros(0, np.int64)
        inputs = np.concatenate(pages) if pages else np.zeros(0, np.int64)
        prepared = self._cosets(int(order.max(initial=0)) + 1)
        ascending = part == 0 and len(layers) == 1 and len(order) > 0
        factors = prepared[order[0] : order[-1] + 1] if ascending else prepared[order]
        places = rows[here] - (part << _blocks.SHIFT)
        before, after = np.zeros(_blocks.BLOCK, np.int64), np.zeros(_blocks.BLOCK, np.int64)
        after[places] = outputs.addresses[here]
        if starts is not None:
            before[places] = starts.addresses[here]
        status = self._handle.leto_ec_product(
            self._encoded,
            len(order),
            outputs.page_bytes,
            factors.ctypes.data,
            prepared.ctypes.data,
            address(inputs),
            None if starts is None else address(before),
            address(after),
            threads,
        )
        self._check(status)

    def _cosets(self, count: int) -> NDArray[np.uint8]:
        """Return the prepared coefficients of at least the first `count` cosets."""
        if len(self._prepared) < count:
            with self._lock:
                have = len(self._prepared)
                if have < count:
                    more = np.arange(have, max(count, min(2 * have, 4104), 8))
                    coefficients = np.ascontiguousarray(BASES[self._basis](more))
                    fresh = np.empty((len(more), self._block_bytes), np.uint8)
                    status = self._handle.leto_ec_prepare(
                        self._encoded, len(more), coefficients.ctypes.data, fresh.ctypes.data
                    )
                    self._check(status)
                    self._prepared = np.concatenate([self._prepared, fresh])
        return self._prepared

    def _check(self, status: int) -> None:
        if status == 1:
            raise MemoryError("leto_ec: no memory for the accumulators of a strip")
        if status != 0:
            raise RuntimeError(f"leto_ec: kernel {self.name} returned {status}: a bug, please report it")
