"""Plans of a reconstruction: verified on the device before the first byte is written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import cupy
import numpy as np

from leto_ec._code import Code
from leto_ec._repair import Reconstruction, Repair, repair
from leto_ec.cuda import _launch
from leto_ec.cuda._buffers import DeviceGroup
from leto_ec.cuda._checked import Named, each_rows, pages_of, refuse_overlap
from leto_ec.cuda._library import Kernels
from leto_ec.cuda._plan import Plan
from leto_ec.errors import BufferMismatch, InconsistentParity

__all__ = ["ReconstructPlan"]


class ReconstructPlan(Plan):
    """A planned reconstruction. `run` launches it; where spare rows contradict the rest, it writes nothing.

    `result` waits for the stream and says how it went. Holds scratch memory of up to `parity` pages a group.
    """

    _plans: list[Repair]
    _found: list[Any]
    _last: Any

    def run(self, stream: Any = None) -> None:
        """Put the work on `stream`; see `Plan.run`."""
        super().run(stream)
        self._last = stream

    def result(self) -> list[Reconstruction]:
        """Wait for the last run, and return a result for each group.

        Raises
        ------
        InconsistentParity
            The survivors of a group contradict each other; nothing of that group was written.
        """
        if any(plan.spare for plan in self._plans):
            with self._current(self._last):
                for group, (plan, found) in enumerate(zip(self._plans, self._found, strict=True)):
                    if found is None:
                        continue
                    flags = found.get()
                    if flags[0]:
                        rows = tuple(row for row, flag in zip(plan.spare, flags[1:], strict=True) if flag)
                        error = InconsistentParity(rows, len(plan.spare))
                        if len(self._plans) > 1:
                            error.add_note(f"in group {group}")
                        raise error
        return [plan.result for plan in self._plans]

    @classmethod
    def make(
        cls,
        code: Code,
        groups: Sequence[Any],
        parities: Sequence[Any],
        lost_data: Sequence[Iterable[int]],
        lost_parity: Sequence[Iterable[int]] | None,
        verify: bool,
        stream: Any,
    ) -> ReconstructPlan:
        pages = [pages_of(code, group) for group in groups]
        rows = each_rows(code, parities, "parities", pages, writable=False)
        lost_rows = [()] * len(pages) if lost_parity is None else list(lost_parity)
        if not len(pages) == len(lost_data) == len(lost_rows):
            raise BufferMismatch("reconstruct: as many groups, parities and lists of lost pages are expected")
        plans = [
            repair(code.coefficients, len(group), data, of_rows, verify)
            for group, data, of_rows in zip(pages, lost_data, lost_rows, strict=True)
        ]
        outputs: list[Named] = []
        inputs: list[Named] = []
        for group, own, plan in zip(pages, rows, plans, strict=True):
            _check_lost(group, plan)
            lost = [*group.take(plan.lost_data).addresses, *own.take(plan.lost_parity).addresses]
            if lost:
                targets = DeviceGroup(
                    np.array(lost), group.page_bytes, group.device, group.owners, group.torch
                )
                outputs.append((targets, "lost pages and rows"))
            inputs.append((group.take(plan.kept), "surviving pages"))
            inputs.append((own.take(plan.rows_kept), "surviving parity"))
        refuse_overlap(outputs, inputs)
        everything = [(group, "groups") for group in pages] + [(group, "parities") for group in rows]
        result, chosen = cls._start(code, everything)
        result._plans, result._found, result._last = plans, [], stream
        with result._current(stream):
            result._build(chosen, code, pages, rows)
        return result

    def _build(self, chosen: Kernels, code: Code, pages: list[DeviceGroup], rows: list[DeviceGroup]) -> None:
        page_bytes = pages[0].page_bytes
        indices = np.arange(len(pages[0]), dtype=np.int64)
        kept: list[Any] = []
        before: list[Any] = []
        after: list[Any] = []
        places: list[dict[int, int]] = []
        for group, own, plan in zip(pages, rows, self._plans, strict=True):
            survivors = np.zeros(len(group), np.int64)
            survivors[plan.kept] = group.addresses[plan.kept]
            kept.append(survivors)
            scratch = cupy.empty((max(len(plan.order), 1), page_bytes), cupy.uint8)
            self._tables.kept.append(scratch)
            where = {int(row): scratch.data.ptr + i * page_bytes for i, row in enumerate(plan.order)}
            places.append(where)
            starts, ends = np.zeros(code.parity, np.int64), np.zeros(code.parity, np.int64)
            for row, address in where.items():
                ends[row] = address
                starts[row] = 0 if row in plan.lost_parity else own.addresses[row]
            before.append(starts)
            after.append(ends)
        if not any(len(plan.order) for plan in self._plans):
            self._found = [None] * len(self._plans)
            return
        self._launches += _launch.product(
            chosen, self._tables, code.parity, [(indices, kept)], before, after, page_bytes
        )
        for group, own, plan, where in zip(pages, rows, self._plans, places, strict=True):
            used, spare = _at(where, plan.used), _at(where, plan.spare)
            found = None
            if plan.spare:
                found = cupy.zeros(1 + len(plan.spare), cupy.uint32)
                self._tables.kept.append(found)
                self._launches.append(_clearing(found))
                self._launches.append(
                    _launch.verify(chosen, self._tables, plan.check, used, spare, page_bytes, found)
                )
            self._found.append(found)
            lost_pages = group.addresses[list(plan.lost_data)]
            if plan.lost_data:
                nothing = np.zeros(len(plan.lost_data), np.int64)
                solve = (plan.solver, used, nothing, lost_pages)
                self._launches.append(_launch.combine(chosen, self._tables, *solve, page_bytes, found))
            if plan.lost_parity:
                partial, lost_rows = _at(where, plan.lost_parity), own.addresses[list(plan.lost_parity)]
                again = (plan.of_lost, lost_pages, partial, lost_rows)
                self._launches.append(_launch.combine(chosen, self._tables, *again, page_bytes, found))


def _at(places: dict[int, int], rows: Iterable[int]) -> Any:
    return np.array([places[row] for row in rows], np.int64)


def _clearing(array: Any) -> _launch.Launch:
    def clear() -> None:
        array.data.memset_async(0, array.nbytes)

    return clear


def _check_lost(group: DeviceGroup, plan: Repair) -> None:
    for index in plan.lost_data:
        if group.addresses[index] == 0:
            raise BufferMismatch(f"pages[{index}]: memory to write the lost page to is expected, found None")
