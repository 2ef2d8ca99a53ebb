"""Operations of the device: issued many times a millisecond, so made of little.

Role: `leto_rmu.ops.Op` for work on a lane. The places that an operation writes are for executors that tear;
they are found when somebody asks for them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any

from leto_rmu.cuda.lanes import Lanes
from leto_rmu.ops import Op

__all__ = ["LaneOp"]


class LaneOp(Op):
    """An operation whose work is put on a lane. ``places`` returns what `Op.writes` holds."""

    def __init__(
        self,
        lanes: Lanes,
        lane: str,
        name: str,
        group: int | None,
        chunk: int | None,
        iteration: int,
        work: Callable[[], None],
        places: Callable[[], Sequence[Any]],
        *,
        reads: Sequence[Hashable] = (),
        writes: Sequence[Hashable] = (),
    ) -> None:
        # An Op is frozen, and its `writes` is a property here: the fields are set one by one.
        self.__dict__.update(
            name=name,
            group=group,
            chunk=chunk,
            iteration=iteration,
            refs=(),
            apply=lambda: lanes.run(lane, work, reads, writes),
            _places=places,
        )

    @property
    def writes(self) -> tuple[Any, ...]:
        """Views of every byte that ``apply`` may change."""
        return tuple(self.__dict__["_places"]())

    @classmethod
    def of(
        cls,
        lanes: Lanes,
        lane: str,
        op: Op,
        *,
        reads: Sequence[Hashable] = (),
        writes: Sequence[Hashable] = (),
    ) -> LaneOp:
        """Another op, its work put on a lane."""
        return cls(
            lanes,
            lane,
            op.name,
            op.group,
            op.chunk,
            op.iteration,
            op.apply,
            lambda: op.writes,
            reads=reads,
            writes=writes,
        )
