"""The erasure code: encode, delta update, reconstruct (§4 of the paper; theory in `leto_ec.field`).

Upholds I-1 (any loss within tolerance is reconstructed to the exact bytes, anything beyond is refused)
and the code's part of I-6 (inconsistent parity is found where spare rows exist, and said so where none
do). Every argument is checked before the first byte is written. The same functions serve host memory
(`leto_ec._host`) and GPU memory (`leto_ec.cuda`): where the buffers are decides.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable
from types import ModuleType
from typing import Any

import numpy as np
from numpy.typing import NDArray

from leto_ec import _host, cauchy
from leto_ec._arguments import integer
from leto_ec._engines import Engine, default_threads, is_device_kernel, select
from leto_ec._repair import Reconstruction
from leto_ec._where import on_device
from leto_ec.errors import CodeError

__all__ = ["Reconstruction", "ReedSolomon"]


class ReedSolomon:
    """Systematic Cauchy Reed-Solomon code over GF(2^32) with `data` pages and `parity` parity pages.

    Pages are a (n, page_bytes) uint8 buffer, contiguous within a page and with any stride between
    pages, or a list of n one-dimensional buffers, where None is a page of zeros. n < data is a shortened
    code: the missing pages at the end count as zero. page_bytes is a multiple of 4.

    Host buffers may be numpy arrays, memoryviews, torch CPU tensors or anything that speaks DLPack; GPU
    buffers CuPy arrays, torch CUDA tensors, or anything with `__cuda_array_interface__` or DLPack. They are
    never copied. All buffers of one call are on the host or on one GPU; on a GPU the work is put on `stream`
    (default: torch's current stream for torch tensors, else CuPy's) and the call returns at once, except
    that `reconstruct` waits for its verdict. Objects are immutable and may be used by many threads at once.

    Parameters
    ----------
    data : int
        D, 1 to 65,535.
    parity : int
        H, 1 to 64: so many lost pages are tolerated.
    kernel : str
        "auto", or the name of a kernel (see `leto_ec.info`). The name of a CUDA kernel ("cuda-clmad",
        "cuda-portable") chooses for GPU buffers and leaves the host's choice at "auto".
    threads : int or None
        Threads of one call on host memory, 1 to 256; None takes LETO_EC_THREADS, or 1. Results are the same
        for any number.

    Raises
    ------
    CodeError
        Parameters out of range, or no such kernel on this machine.
    """

    def __init__(self, data: int, parity: int, kernel: str = "auto", threads: int | None = None) -> None:
        self._data = integer(data, "data", 1, cauchy.MAX_DATA)
        self._parity = integer(parity, "parity", 1, cauchy.MAX_PARITY)
        self._threads = default_threads() if threads is None else integer(threads, "threads", 1, 256)
        self._device_kernel = kernel if is_device_kernel(kernel) else "auto"
        self._engine, self._why = select("auto" if is_device_kernel(kernel) else kernel)
        self._matrix = np.ascontiguousarray(cauchy.generator(self._data, self._parity))
        self._first = self._matrix.ctypes.data

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
        """Name of the kernel in use on host memory."""
        return self._engine.name

    @property
    def why(self) -> str:
        """The reason for that choice."""
        return self._why

    @property
    def device_kernel(self) -> str:
        """Name of the kernel asked for on GPU memory, or "auto"."""
        return self._device_kernel

    @property
    def threads(self) -> int:
        """Threads of one call on host memory."""
        return self._threads

    @property
    def engine(self) -> Engine:
        """What computes on host memory."""
        return self._engine

    @property
    def coefficients(self) -> NDArray[np.uint32]:
        """The matrix c, shape (parity, data), read-only."""
        return self._matrix

    def _column(self, index: int) -> tuple[int, int]:
        """Address of the coefficient of row 0 and a page, and words from one row's to the next row's."""
        return self._first + 4 * index, self._data

    def encode(self, pages: Any, out: Any = None, *, stream: Any = None) -> Any:
        """Compute the parity of all pages.

        Parameters
        ----------
        pages
            n <= data pages.
        out
            `parity` rows to write into, separate from the pages; None allocates.
        stream
            For GPU buffers: a CuPy or torch stream, or the address of a CUDA stream.

        Returns
        -------
        `out`, or a new uint8 array of shape (parity, page_bytes): numpy on the host, torch for torch CUDA
        tensors, else CuPy.

        Raises
        ------
        BufferMismatch
        """
        if on_device({"pages": pages, "out": out}):
            return _device().encode(self, pages, out, stream)
        _no_stream(stream)
        return _host.encode(self, pages, out)

    def update(
        self,
        parity: Any,
        *,
        index: int,
        delta: Any = None,
        old: Any = None,
        new: Any = None,
        offset: int = 0,
        out: Any = None,
        stream: Any = None,
    ) -> Any:
        """Bring parity up to date after data pages changed by `delta` = old ^ new: Q' = Q ^ RS_j(delta).

        Parameters
        ----------
        parity
            The `parity` rows Q; updated in place unless `out` is given.
        index
            Logical index j of the (first) page that changed.
        delta
            A one-dimensional buffer: the bytes that changed in page `index`, from byte `offset` on; or
            pages (two-dimensional or a list): whole pages index, index + 1, ...
        old, new
            The contents before and after the change, in the place of `delta`; neither is changed.
        offset
            Byte offset within the page, any value; 0 for whole pages.
        out
            Rows for Q' out of place, separate from `parity` and the rest; `parity` is then only read.
        stream
            For GPU buffers: a CuPy or torch stream, or the address of a CUDA stream.

        Returns
        -------
        The object that now holds Q': `parity` or `out`.

        Raises
        ------
        CodeError
            Page indices out of range; neither `delta` nor `old` and `new`, or both.
        BufferMismatch
        """
        plain = out is None and old is None and new is None and stream is None
        if plain and _host.update_page(self, parity, index, delta, offset):
            return parity
        if (delta is None) == (old is None) or (old is None) != (new is None):
            raise CodeError("update: either delta, or both old and new, is expected")
        changes = [(delta, "delta")] if old is None else [(old, "old"), (new, "new")]
        if on_device({"parity": parity, "out": out, "delta": delta, "old": old, "new": new}):
            return _device().update(self, parity, index, changes, offset, out, stream)
        _no_stream(stream)
        return _host.update(self, parity, index, changes, offset, out)

    def reconstruct(
        self,
        pages: Any,
        parity: Any,
        *,
        lost_data: Iterable[int] = (),
        lost_parity: Iterable[int] = (),
        verify: bool = True,
        stream: Any = None,
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
        stream
            For GPU buffers: a CuPy or torch stream, or the address of a CUDA stream. Waits for it where
            there is something to verify.

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
        if on_device({"pages": pages, "parity": parity}):
            return _reconstructed(
                _device().reconstruct(self, pages, parity, lost_data, lost_parity, verify, stream)
            )
        _no_stream(stream)
        return _host.reconstruct(self, pages, parity, lost_data, lost_parity, verify)


def _device() -> ModuleType:
    return importlib.import_module("leto_ec.cuda._operations")  # not before a GPU buffer is seen: needs CuPy


def _reconstructed(result: Any) -> Reconstruction:
    assert isinstance(result, Reconstruction)
    return result


def _no_stream(stream: Any) -> None:
    if stream is not None:
        raise CodeError("stream: None is expected, because the buffers are in host memory")
