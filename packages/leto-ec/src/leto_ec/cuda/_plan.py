"""Plans: everything that a call has to look up, checked and put on the device once, to be run many times."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, Self

import cupy
import numpy as np

from leto_ec._arguments import integer
from leto_ec._code import Code
from leto_ec.cuda import _launch, _streams
from leto_ec.cuda._buffers import DeviceGroup, same_device
from leto_ec.cuda._checked import Named, change_of, each_rows, pages_of, refuse_overlap
from leto_ec.cuda._library import Kernels, kernels
from leto_ec.errors import BufferMismatch, CodeError

if TYPE_CHECKING:
    from leto_ec.cuda._reconstruct import ReconstructPlan

__all__ = ["Current", "Plan"]


class Plan:
    """One or several groups' encode or update, ready to run: `run` launches kernels and does nothing else.

    Made by `Plan.encode` and `Plan.update`. A plan holds the addresses of the buffers and keeps the buffers
    alive; their contents may change between runs. Plans may be captured into a CUDA graph. One plan runs on
    one stream at a time.

    Attributes
    ----------
    kernel : str
        "cuda-clmad" or "cuda-portable".
    why : str
        The reason for that choice.
    """

    def __init__(self, device: int, chosen: Kernels, torch: bool, owners: Sequence[Any]) -> None:
        self.kernel = chosen.choice.kernel
        self.why = chosen.choice.why
        self._device = device
        self._torch = torch
        self._tables = _launch.Tables(list(owners))
        self._launches: list[_launch.Launch] = []

    def run(self, stream: Any = None) -> None:
        """Put the work on `stream` (default: torch's current one if the buffers are torch's, else CuPy's)."""
        with self._current(stream):
            for launch in self._launches:
                launch()

    @classmethod
    def encode(cls, code: Code, groups: Sequence[Any], outs: Sequence[Any], *, stream: Any = None) -> Plan:
        """Plan the encoding of several groups of equal shape in one launch.

        Parameters
        ----------
        code : ReedSolomon
        groups
            Each is what `ReedSolomon.encode` takes as `pages`: (n, page_bytes), or a list with None for
            absent pages.
        outs
            For each group, its `parity` rows to write: (parity, page_bytes) or a list.
        stream
            Where the tables are uploaded. The first `run` must come after it on the same or a later stream.

        Raises
        ------
        BufferMismatch
        """
        pages = [pages_of(code, group) for group in groups]
        rows = each_rows(code, outs, "outs", pages)
        inputs = [(group, f"groups[{i}]") for i, group in enumerate(pages)]
        outputs = [(group, f"outs[{i}]") for i, group in enumerate(rows)]
        refuse_overlap(outputs, inputs)
        plan, chosen = cls._start(code, [*inputs, *outputs])
        indices = np.arange(len(pages[0]), dtype=np.int64)
        with plan._current(stream):
            plan._launches += _launch.product(
                chosen,
                plan._tables,
                code.parity,
                [(indices, [group.addresses for group in pages])],
                [np.zeros(code.parity, np.int64)] * len(rows),
                [group.addresses for group in rows],
                pages[0].page_bytes,
            )
        return plan

    @classmethod
    def update(
        cls,
        code: Code,
        parities: Sequence[Any],
        *,
        index: int,
        deltas: Sequence[Any] | None = None,
        olds: Sequence[Any] | None = None,
        news: Sequence[Any] | None = None,
        offset: int = 0,
        outs: Sequence[Any] | None = None,
        stream: Any = None,
    ) -> Plan:
        """Plan the delta update of several groups in one launch: the same pages or bytes of each group
        change.

        Parameters are those of `ReedSolomon.update`, one of each for every group. A run of bytes must begin
        and end at a multiple of 4 in the page and in memory (`ReedSolomon.update` itself takes any).

        Raises
        ------
        CodeError
            Page indices out of range; neither `deltas` nor `olds` and `news`, or both.
        BufferMismatch
        """
        if (deltas is None) == (olds is None) or (olds is None) != (news is None):
            raise CodeError("update: either deltas, or both olds and news, is expected")
        rows = each_rows(code, parities, "parities", None, writable=outs is None)
        page_bytes = rows[0].page_bytes
        targets = rows if outs is None else each_rows(code, outs, "outs", rows)
        first = integer(index, "index", 0, code.data - 1)
        start = integer(offset, "offset", 0, page_bytes)
        named = [("deltas", deltas)] if deltas is not None else [("news", news), ("olds", olds)]
        changes: list[list[DeviceGroup]] = []
        inputs: list[tuple[DeviceGroup, str]] = []
        for name, buffers in named:
            assert buffers is not None
            if len(buffers) != len(rows):
                raise BufferMismatch(
                    f"{name}: {len(rows)} are expected, as parities are, found {len(buffers)}"
                )
            groups = [
                change_of(buffer, f"{name}[{i}]", page_bytes, start) for i, buffer in enumerate(buffers)
            ]
            changes.append(groups)
            inputs += [(group, f"{name}[{i}]") for i, group in enumerate(groups)]
        count, length = len(changes[0][0]), changes[0][0].page_bytes
        if any((len(group), group.page_bytes) != (count, length) for group, _ in inputs):
            raise BufferMismatch("update: changes of as many pages and bytes are expected for all groups")
        if first + count > code.data:
            raise CodeError(f"update: pages to {first + count - 1} are beyond the last page {code.data - 1}")
        if start + length > page_bytes:
            raise BufferMismatch(
                f"update: bytes {start} to {start + length} do not fit a page of {page_bytes} bytes"
            )
        outputs = [(group, f"rows of group {i}") for i, group in enumerate(targets)]
        if outs is not None:
            inputs += [(group, f"parities[{i}]") for i, group in enumerate(rows)]
        refuse_overlap(outputs, inputs)
        plan, chosen = cls._start(code, [*inputs, *outputs])
        before = [group.window(start, start + length).addresses for group in rows]
        after = [group.window(start, start + length).addresses for group in targets]
        if outs is not None and length != page_bytes:
            for old, new in zip(rows, targets, strict=True):
                plan._launches += [_copier(new, old)]
        if length == 0:
            return plan
        with plan._current(stream):
            if count == 1:
                page = np.array([group.addresses[0] for group in changes[0]], np.int64)
                minus = np.zeros_like(page)
                if len(changes) == 2:
                    minus = np.array([group.addresses[0] for group in changes[1]], np.int64)
                coefficients = np.ascontiguousarray(code.coefficients[:, first])
                plan._launches += _launch.delta(
                    chosen, plan._tables, coefficients, page, minus, before, after, length
                )
            else:
                indices = np.arange(first, first + count, dtype=np.int64)
                layers = [(indices, [group.addresses for group in groups]) for groups in changes]
                plan._launches += _launch.product(
                    chosen, plan._tables, code.parity, layers, before, after, length
                )
        return plan

    @classmethod
    def reconstruct(
        cls,
        code: Code,
        groups: Sequence[Any],
        parities: Sequence[Any],
        *,
        lost_data: Sequence[Iterable[int]],
        lost_parity: Sequence[Iterable[int]] | None = None,
        verify: bool = True,
        stream: Any = None,
    ) -> ReconstructPlan:
        """Plan the reconstruction of several groups of equal shape; `lost_data[i]` belongs to group i.

        Raises
        ------
        ToleranceExceeded, CodeError, BufferMismatch
        """
        from leto_ec.cuda._reconstruct import ReconstructPlan  # it is a Plan: would be a cycle

        return ReconstructPlan.make(code, groups, parities, lost_data, lost_parity, verify, stream)

    @classmethod
    def _start(cls, code: Code, groups: Sequence[Named]) -> tuple[Self, Kernels]:
        device = same_device(groups)
        chosen = kernels(device, code.device_kernel)
        owners = [owner for group, _ in groups for owner in group.owners]
        return cls(device, chosen, any(group.torch for group, _ in groups), owners), chosen

    def _current(self, stream: Any) -> Current:
        return Current(self._device, _streams.resolve(stream, self._device, self._torch))


class Current:
    """Makes a device and a stream current."""

    def __init__(self, device: int, stream: Any) -> None:
        self._contexts = (cupy.cuda.Device(device), stream)

    def __enter__(self) -> None:
        for context in self._contexts:
            context.__enter__()

    def __exit__(self, *error: object) -> None:
        for context in reversed(self._contexts):
            context.__exit__(*error)


def _copier(target: DeviceGroup, source: DeviceGroup) -> _launch.Launch:
    def copy() -> None:
        stream = cupy.cuda.get_current_stream().ptr
        for to, since in zip(target.addresses.tolist(), source.addresses.tolist(), strict=True):
            cupy.cuda.runtime.memcpyAsync(
                to, since, source.page_bytes, cupy.cuda.runtime.memcpyDeviceToDevice, stream
            )

    return copy
