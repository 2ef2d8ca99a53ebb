"""Drills inside the update: a torn write and a SIGKILL at a named operation.

Role in the whole: the demo's second failure. The update of an iteration runs on an executor that, when the
drill's operation comes, leaves a random part of its bytes written and kills this process.
"""

from __future__ import annotations

from leto_rmu import Executor, Op
from leto_rmu.faults import TearAndKill
from leto_shadow import Context
from leto_shadow.drills import Drill

__all__ = ["DrillExecutor"]


class DrillExecutor(Executor):
    """Apply every operation; where a drill of this iteration strikes, tear it and die, or hang before it."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._iteration = -1
        self._drill: Drill | None = None
        self._tear: TearAndKill | None = None

    def arm(self, iteration: int) -> bool:
        """Look up the drill of an iteration's update; one at most strikes in it. Return whether one does."""
        self._iteration = iteration
        self._drill = drill = self._ctx.update_drill(iteration)
        self._tear = None
        if drill is not None and drill.kind == "kill":
            # Announced before the deed, so that the resumed run passes the same place unharmed.
            self._tear = TearAndKill(
                match=self._strikes, seed=drill.seed, before=lambda: self._ctx.drill_fired(drill.id)
            )
        return drill is not None

    def run(self, op: Op) -> None:
        """Apply one operation, unless this is where the drill strikes."""
        if self._tear is not None:
            self._tear.in_flight = self.in_flight
            self._tear.run(op)
            return
        if self._drill is not None:
            self._ctx.point("update", self._iteration, group=op.group, chunk=op.chunk, op=op.name)
        op.apply()

    def _strikes(self, op: Op) -> bool:
        where = {"group": op.group, "chunk": op.chunk, "op": op.name}
        return self._drill is not None and self._drill.matches(
            "update", self._iteration, self._ctx.rank, **where
        )
