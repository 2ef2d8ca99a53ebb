"""A reconstruction on host memory: everything that it runs, built once."""

from __future__ import annotations

import numpy as np

from leto_ec._buffers import PageGroup, refuse_overlap
from leto_ec._code import Code
from leto_ec._repair import Repair
from leto_ec._work import Work
from leto_ec.errors import BufferMismatch

__all__ = ["Mending"]


class Mending:
    """One group's reconstruction, ready to be done; first `contradicting`, then, if nothing is, `write`.

    Holds memory of a page for every row whose syndrome is needed.
    """

    def __init__(self, code: Code, group: PageGroup, rows: PageGroup, plan: Repair) -> None:
        self._group, self._rows, self.plan = group, rows, plan
        self._lost_pages, self._lost_rows = group.take(plan.lost_data), rows.take(plan.lost_parity)
        self._look: list[Work] = []
        self._write: list[Work] = []
        self._syndromes = np.empty((len(plan.order), group.page_bytes), np.uint8)
        if len(plan.order):
            self._build(code)

    def _build(self, code: Code) -> None:
        plan, engine, threads = self.plan, code.engine, code.threads
        # Of lost rows, a syndrome is what the surviving pages contribute: there is nothing to begin with.
        syndromes = PageGroup(self._syndromes, self._group.page_bytes)
        begin = self._rows.take([*plan.used, *plan.spare]).followed_by_absent(len(plan.lost_parity))
        kept = (plan.kept, self._group.take(plan.kept))
        self._look.append(engine.encoding(code.coefficients, plan.order, [kept], begin, syndromes, threads))
        used, spare = len(plan.used), len(plan.spare)
        of_used, spares = syndromes.take(range(used)), syndromes.take(range(used, used + spare))
        if used and spare:
            self._look.append(engine.combination(plan.check, of_used, spares, spares, threads))
        if plan.lost_data:
            self._write.append(engine.combination(plan.solver, of_used, None, self._lost_pages, threads))
        if plan.lost_parity:
            partial = syndromes.take(range(used + spare, len(plan.order)))
            self._write.append(
                engine.combination(plan.of_lost, self._lost_pages, partial, self._lost_rows, threads)
            )

    def check_targets(self) -> None:
        """Refuse lost pages or rows that cannot be written or that share memory with anything else."""
        targets = self.targets
        if targets is not None:
            refuse_overlap(targets, "lost pages and rows", self.survivors)

    @property
    def targets(self) -> PageGroup | None:
        """The lost pages and rows; None if there are none.

        Raises
        ------
        BufferMismatch
            They cannot be written.
        """
        targets = PageGroup([*self._lost_pages.rows, *self._lost_rows.rows], self._group.page_bytes)
        if not len(targets):
            return None
        for index, row in zip(self.plan.lost_data, self._lost_pages.rows, strict=True):
            if row is None:
                raise BufferMismatch(
                    f"pages[{index}]: memory to write the lost page to is expected, found None"
                )
        if not all(row.flags.writeable for row in targets.rows):
            raise BufferMismatch("lost pages and rows must be writable memory, found read-only memory")
        return targets

    @property
    def survivors(self) -> list[tuple[PageGroup, str]]:
        """What is read, with its names."""
        return [
            (self._group.take(self.plan.kept), "surviving pages"),
            (self._rows.take(self.plan.rows_kept), "surviving parity"),
        ]

    def prepare(self) -> None:
        """Look up beforehand what would otherwise be looked up each time."""
        for work in (*self._look, *self._write):
            work.prepare()

    def contradicting(self) -> tuple[int, ...]:
        """Compute the syndromes, and return the spare rows that contradict the rest."""
        for work in self._look:
            work.run()
        spares = self._syndromes[len(self.plan.used) :][: len(self.plan.spare)]
        return tuple(row for row, rest in zip(self.plan.spare, spares, strict=True) if rest.any())

    def write(self) -> None:
        """Write the lost pages and rows, from the syndromes."""
        for work in self._write:
            work.run()
