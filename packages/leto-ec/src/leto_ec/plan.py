"""Plans: everything that a call has to check and look up, done once, to be run many times.

Public as `leto_ec.Plan` and `leto_ec.ReconstructPlan`. The same names, arguments and promises as
`leto_ec.cuda.Plan`, to which buffers on a GPU lead.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterable, Sequence
from typing import Any

from leto_ec import _host
from leto_ec._buffers import PageGroup, refuse_overlap
from leto_ec._code import Code
from leto_ec._mending import Mending
from leto_ec._repair import Reconstruction, repair
from leto_ec._where import on_device
from leto_ec._work import Work
from leto_ec.errors import BufferMismatch, CodeError, InconsistentParity
from leto_ec.field import WORD_BYTES

__all__ = ["Plan", "ReconstructPlan"]

Named = tuple[PageGroup, str]


class Plan:
    """One or several groups' encode or update, ready to run: `run` computes and does nothing else.

    Made by `Plan.encode`, `Plan.update` and `Plan.reconstruct`; for buffers on a GPU these return the plan of
    `leto_ec.cuda`, which has the same interface. A plan holds the addresses of the buffers and keeps the
    buffers alive; their contents may change between runs. One plan is run by one thread at a time.

    Attributes
    ----------
    kernel : str
        Name of the kernel in use.
    why : str
        The reason for that choice.
    """

    def __init__(self, code: Code, works: Sequence[Work], owners: Sequence[PageGroup]) -> None:
        self.kernel = code.engine.name
        self.why = code.why
        self._owners = [group.rows for group in owners]
        self._work = code.engine.joined(works)
        self._work.prepare()
        self._run = self._work.run

    def run(self, stream: Any = None) -> None:
        """Do the work; it is done when the call returns.

        Parameters
        ----------
        stream
            None: streams are for the plans of GPU buffers.

        Raises
        ------
        CodeError
            A stream was given.
        """
        if stream is not None:
            raise CodeError("stream: None is expected, because the buffers are in host memory")
        self._run()

    @classmethod
    def encode(cls, code: Code, groups: Sequence[Any], outs: Sequence[Any], *, stream: Any = None) -> Plan:
        """Plan the encoding of several groups of equal shape.

        Parameters
        ----------
        code : ReedSolomon
        groups
            Each is what `ReedSolomon.encode` takes as `pages`: (n, page_bytes), or a list with None for
            absent pages.
        outs
            For each group, its `parity` rows to write: (parity, page_bytes) or a list.
        stream
            For GPU buffers: see `leto_ec.cuda.Plan`.

        Raises
        ------
        BufferMismatch
        """
        if _on_device(groups=groups, outs=outs):
            plan: Plan = _device_plan().encode(code, groups, outs, stream=stream)
            return plan
        _no_stream(stream)
        pages = [_host.pages_of(code, group) for group in groups]
        rows = _each_rows(code, outs, "outs", pages)
        inputs = [(group, f"groups[{i}]") for i, group in enumerate(pages)]
        _refuse_overlap(rows, "outs[0]", inputs)
        works = [_host.encode_work(code, source, target) for source, target in zip(pages, rows, strict=True)]
        return cls(code, works, [*pages, *rows])

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
        """Plan the delta update of several groups: the same pages or bytes of each group change.

        Parameters are those of `ReedSolomon.update`, one of each for every group. A run of bytes must begin
        and end at a multiple of 4 in the page (`ReedSolomon.update` itself takes any).

        Raises
        ------
        CodeError
            Page indices out of range; neither `deltas` nor `olds` and `news`, or both.
        BufferMismatch
        """
        if (deltas is None) == (olds is None) or (olds is None) != (news is None):
            raise CodeError("update: either deltas, or both olds and news, is expected")
        more: dict[str, Any] = {"deltas": deltas, "olds": olds, "news": news, "outs": outs}
        if _on_device(parities=parities, **more):
            more |= {"index": index, "offset": offset, "stream": stream}
            plan: Plan = _device_plan().update(code, parities, **more)
            return plan
        _no_stream(stream)
        rows = _each_rows(code, parities, "parities", None, writable=outs is None)
        targets = rows if outs is None else _each_rows(code, outs, "outs", rows)
        named = [(name, buffers) for name, buffers in more.items() if buffers is not None and name != "outs"]
        for name, buffers in named:
            if len(buffers) != len(rows):
                raise BufferMismatch(
                    f"{name}: {len(rows)} are expected, as parities are, found {len(buffers)}"
                )
        changes = [
            _host.change_of(
                code, own, target, index, [(buffers[i], f"{name}[{i}]") for name, buffers in named], offset
            )
            for i, (own, target) in enumerate(zip(rows, targets, strict=True))
        ]
        if len({(len(change.groups[0][0]), change.length) for change in changes}) != 1:
            raise BufferMismatch("update: changes of as many pages and bytes are expected for all groups")
        if changes[0].start % WORD_BYTES or changes[0].length % WORD_BYTES:
            raise BufferMismatch(
                f"{named[0][0]}[0]: bytes that begin and end at a multiple of {WORD_BYTES} in the page "
                "are expected"
            )
        inputs = [group for change in changes for group in change.groups]
        if outs is not None:
            inputs += [(group, f"parities[{i}]") for i, group in enumerate(rows)]
        _refuse_overlap(targets, "rows of group 0", inputs)
        works = [work for change in changes for work in _host.change_work(code, change)]
        return cls(code, works, [*rows, *targets, *(group for group, _ in inputs)])

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
        lost: dict[str, Any] = {"lost_data": lost_data, "lost_parity": lost_parity}
        if _on_device(groups=groups, parities=parities):
            lost |= {"verify": verify, "stream": stream}
            plan: ReconstructPlan = _device_plan().reconstruct(code, groups, parities, **lost)
            return plan
        _no_stream(stream)
        pages = [_host.pages_of(code, group) for group in groups]
        rows = _each_rows(code, parities, "parities", pages, writable=False)
        lost_rows = [()] * len(pages) if lost_parity is None else list(lost_parity)
        if not len(pages) == len(lost_data) == len(lost_rows):
            raise BufferMismatch("reconstruct: as many groups, parities and lists of lost pages are expected")
        mendings = [
            Mending(code, group, own, repair(code.coefficients, len(group), data, of_rows, verify))
            for group, own, data, of_rows in zip(pages, rows, lost_data, lost_rows, strict=True)
        ]
        targets = [found for mending in mendings if (found := mending.targets) is not None]
        survivors = [named for mending in mendings for named in mending.survivors]
        _refuse_overlap(targets, "lost pages and rows", survivors)
        return ReconstructPlan(code, mendings, [*pages, *rows])


class ReconstructPlan(Plan):
    """A planned reconstruction. Where spare rows contradict the rest, `run` writes nothing to that group.

    Holds scratch memory of up to `parity` pages a group.
    """

    def __init__(self, code: Code, mendings: Sequence[Mending], owners: Sequence[PageGroup]) -> None:
        super().__init__(code, [], owners)
        self._mendings = mendings
        self._wrong: list[tuple[int, ...]] = [() for _ in mendings]
        for mending in mendings:
            mending.prepare()
        self._run = self._mend

    def _mend(self) -> None:
        for group, mending in enumerate(self._mendings):
            self._wrong[group] = mending.contradicting()
            if not self._wrong[group]:
                mending.write()

    def result(self) -> list[Reconstruction]:
        """Return a result for each group, of the last run.

        Raises
        ------
        InconsistentParity
            The survivors of a group contradict each other; nothing of that group was written.
        """
        for group, (mending, wrong) in enumerate(zip(self._mendings, self._wrong, strict=True)):
            if wrong:
                error = InconsistentParity(wrong, len(mending.plan.spare))
                if len(self._mendings) > 1:
                    error.add_note(f"in group {group}")
                raise error
        return [mending.plan.result for mending in self._mendings]


def _on_device(**named: Sequence[Any] | None) -> bool:
    """Whether these buffers, one for each group, are on a GPU; a mixture is refused."""
    return on_device(
        {f"{name}[{i}]": buffer for name, buffers in named.items() for i, buffer in enumerate(buffers or ())}
    )


def _device_plan() -> Any:
    return importlib.import_module("leto_ec.cuda").Plan  # not before a GPU buffer is seen: needs CuPy


def _no_stream(stream: Any) -> None:
    if stream is not None:
        raise CodeError("stream: None is expected, because the buffers are in host memory")


def _each_rows(
    code: Code, rows: Sequence[Any], what: str, like: list[PageGroup] | None, *, writable: bool = True
) -> list[PageGroup]:
    """Return the parity rows of each group, checked, with as many groups and bytes as `like`."""
    if not rows:
        raise BufferMismatch(f"{what}: at least one group is expected, found none")
    if like is not None and len(like) != len(rows):
        raise BufferMismatch(f"{what}: {len(like)} groups are expected, found {len(rows)}")
    if like is not None and len({len(group) for group in like}) != 1:
        raise BufferMismatch("groups: the same number of pages is expected in all groups")
    size = None if like is None else like[0].page_bytes
    found: list[PageGroup] = []
    for i, each in enumerate(rows):
        found.append(_host.rows_of(code, each, f"{what}[{i}]", size, writable=writable))
        size = found[0].page_bytes
    if like is not None and any(group.page_bytes != size for group in like):
        raise BufferMismatch(f"groups: pages of {size} bytes are expected in all groups")
    return found


def _refuse_overlap(outputs: Sequence[PageGroup], what: str, inputs: Sequence[Named]) -> None:
    """Refuse outputs that overlap one another or an input."""
    if outputs:
        refuse_overlap(PageGroup.joined(outputs, outputs[0].page_bytes), what, inputs)
