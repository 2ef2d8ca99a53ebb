"""Which device pages got another handle, and which were not zeroed yet (paper section 4.2: remapping).

Clients map ahead, so a page that is lost or replaced later has to be mapped anew in every one of them:
they ask for what changed since the epoch they know. A fresh GPU page has undefined contents, and the
manager has no context to clear it: it stays *uncleared* until a writer has mapped and zeroed it. A page
that is uncleared cannot be acknowledged, so a writer that missed a replacement cannot declare a page
healthy that it never touched. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from leto_rmp.layout import PageRef, PageRun, page_runs

__all__ = ["Replacements"]


class Replacements:
    """The table of one pool."""

    def __init__(self) -> None:
        self.epoch = 0
        """Grows with every page that loses its handle or gets another one."""
        self._changed: dict[PageRef, int] = {}
        self._uncleared: dict[str, set[PageRef]] = {}

    def replaced(self, refs: Iterable[PageRef]) -> None:
        """Note that these pages have another handle, or none: clients may have mapped the old one."""
        for ref in refs:
            self.epoch += 1
            self._changed[ref] = self.epoch

    def fresh(self, refs: Iterable[PageRef]) -> None:
        """Note that the contents of these pages are undefined until a writer has zeroed them."""
        for ref in refs:
            self._uncleared.setdefault(ref.allocation, set()).add(ref)

    def since(self, epoch: int) -> tuple[PageRun, ...]:
        """Return the pages whose handles changed after `epoch`."""
        return page_runs(ref for ref, changed in self._changed.items() if changed > epoch)

    def uncleared(self) -> tuple[PageRun, ...]:
        """Return the pages that nobody has zeroed yet."""
        return page_runs(ref for refs in self._uncleared.values() for ref in refs)

    def is_uncleared(self, ref: PageRef) -> bool:
        """Return whether this page's contents are undefined."""
        return ref in self._uncleared.get(ref.allocation, ())

    def cleared(self, runs: Sequence[PageRun], epoch: int) -> None:
        """Note what a writer that knew `epoch` has zeroed; what changed after that stays uncleared."""
        for run in runs:
            refs = self._uncleared.get(run.allocation, set())
            for index in range(run.first, run.first + run.count):
                ref = PageRef(run.allocation, run.section, index)
                if self._changed.get(ref, 0) <= epoch:
                    refs.discard(ref)

    def forget(self, allocation: str) -> None:
        """Drop what is known of an allocation that was freed."""
        self._uncleared.pop(allocation, None)
        self._changed = {ref: epoch for ref, epoch in self._changed.items() if ref.allocation != allocation}
