"""Drills: failures that a run inflicts on itself, at a named point, exactly once.

Role: a drill file turns "kill rank 1 in the middle of the update of iteration 7" into data. The agent hands
each trainer its unfired drills at promotion (`wire.Promote`); the trainer fires them at named points
(`Context.point`, or inside the updater through `Context.update_drill`); the agent carries out what only it
can do (kill a manager, lose pages). Paper: section 8 (failure injection). The rule that a fired drill never
fires again is what lets a recovered run pass the same point and finish.

A drill file is a JSON list:

    [{"id": "torn", "kind": "kill", "rank": 1, "iteration": 7, "point": "update", "group": 0, "chunk": 2,
      "op": "update", "lose": {"allocation": "arena", "group": 0, "pages": "tolerance", "tier1": 1}}]
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec

__all__ = [
    "MAX_NUMBER",
    "Drill",
    "DrillError",
    "DrillKind",
    "Lose",
    "dump_drills",
    "load_drills",
    "parse_drills",
]

MAX_NUMBER = 2**63 - 1
"""Largest number in a drill; larger ones could not travel to the trainer or the state manager."""

DrillKind = Literal["kill", "hang", "kill_manager"]

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:-]{0,63}")
_MAX_FILE_BYTES = 1 << 20


class DrillError(ValueError):
    """A drill file that cannot be read or makes no sense; the message names the drill and the fix."""


class Lose(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Pages that the agent loses through the state manager after the trainer is dead, before localization.

    allocation: name of the allocation in the pool. group: protection group in it. pages: number of data
    pages, or "tolerance" for as many as the tier-1 parity of the group makes good. tier1: number of tier-1
    parity pages that are poisoned besides (they take from that tolerance).
    """

    allocation: str
    group: int = 0
    pages: int | Literal["tolerance"] = "tolerance"
    tier1: int = 0


class Drill(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One failure to inflict: at `point` of `iteration`, on `rank`, once.

    kind "kill": the trainer SIGKILLs itself. "hang": its main thread spins in C and keeps the GIL.
    "kill_manager": the agent kills the rank's state manager (a fatal failure).
    point: name that the trainer passes to `Context.point`, or "update" for a point inside the optimizer's
    update. group, chunk, op: narrow an "update" drill to one operation (`op` is the updater's operation
    name). Left out (None), they match anything. seed: chooses what a torn write leaves behind and which pages
    are lost.
    """

    id: str
    kind: DrillKind
    rank: int
    iteration: int
    point: str = "forward"
    group: int | None = None
    chunk: int | None = None
    op: str | None = None
    seed: int = 0
    lose: Lose | None = None

    def matches(self, point: str, iteration: int, rank: int, **where: int | str | None) -> bool:
        """Whether this drill is due at `point` of `iteration` on `rank`.

        where: position inside the point (group, chunk, op). A field that the drill leaves open matches
        anything; a field that the drill sets must be given and be equal.
        """
        if (self.point, self.iteration, self.rank) != (point, iteration, rank):
            return False
        wanted = {"group": self.group, "chunk": self.chunk, "op": self.op}
        return all(value is None or where.get(name) == value for name, value in wanted.items())


def _check(drill: Drill, number: int, world_size: int | None) -> None:
    """Raise DrillError if one drill is impossible."""
    label = f"drill {number} ({drill.id!r})"
    if not _NAME.fullmatch(drill.id):
        raise DrillError(
            f"{label}: id must be 1 to 64 letters, digits or _.:- and start with a letter or digit"
        )
    if not _NAME.fullmatch(drill.point):
        raise DrillError(
            f"{label}: point {drill.point!r} is no valid name; use for example 'forward' or 'update'"
        )
    if drill.rank < 0 or (world_size is not None and drill.rank >= world_size):
        limit = "" if world_size is None else f" (this job has ranks 0 to {world_size - 1})"
        raise DrillError(f"{label}: there is no rank {drill.rank}{limit}")
    lose = drill.lose
    numbers: dict[str, int | str | None] = {
        "rank": drill.rank,
        "iteration": drill.iteration,
        "group": drill.group,
        "chunk": drill.chunk,
        "seed": drill.seed,
    }
    if lose is not None:
        numbers |= {"lose.group": lose.group, "lose.pages": lose.pages, "lose.tier1": lose.tier1}
    for name, value in numbers.items():
        if isinstance(value, int) and not 0 <= value <= MAX_NUMBER:
            found = "a negative number" if value < 0 else "a larger one"
            raise DrillError(f"{label}: {name} must be 0 to {MAX_NUMBER}, found {found}")
    if drill.point != "update" and not (drill.group is None and drill.chunk is None and drill.op is None):
        raise DrillError(
            f"{label}: group, chunk and op narrow the point 'update' only, found point {drill.point!r}"
        )
    if drill.kind == "kill_manager" and drill.lose is not None:
        raise DrillError(f"{label}: a manager that dies loses all its pages; leave 'lose' out")
    if drill.kind == "kill_manager" and drill.point == "update":
        raise DrillError(
            f"{label}: kill_manager works at a trainer's point such as 'forward', not inside the update"
        )
    if lose is not None and not lose.allocation:
        raise DrillError(f"{label}: lose.allocation must name an allocation, for example 'arena'")


def parse_drills(
    text: bytes | str, *, source: str = "drills", world_size: int | None = None
) -> tuple[Drill, ...]:
    """Parse and check a JSON list of drills.

    source: name for error messages. world_size: if known, ranks are checked against it.
    Raises DrillError with the place of the mistake.
    """
    try:
        drills = msgspec.json.decode(text, type=tuple[Drill, ...])
    except msgspec.ValidationError as error:
        raise DrillError(f"{source}: {error}") from error
    except (msgspec.DecodeError, UnicodeError) as error:
        raise DrillError(f"{source}: not valid JSON: {error}") from error
    seen: set[str] = set()
    for number, drill in enumerate(drills):
        try:
            _check(drill, number, world_size)
        except DrillError as error:
            raise DrillError(f"{source}: {error}") from None
        if drill.id in seen:
            raise DrillError(f"{source}: drill {number}: the id {drill.id!r} is used twice; ids must differ")
        seen.add(drill.id)
    return drills


def load_drills(path: str | Path, *, world_size: int | None = None) -> tuple[Drill, ...]:
    """Read a drill file. Raises DrillError if it is missing, no regular file, too large, not JSON, or makes
    no sense."""
    path = Path(path)
    try:
        # Not blocking: the other end of a FIFO may never come.
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise DrillError(f"{path}: a drill file must be a regular file, not a pipe or a device")
            text = file.read(_MAX_FILE_BYTES + 1)
    except IsADirectoryError as error:
        raise DrillError(f"{path}: a drill file must be a regular file, not a folder") from error
    except OSError as error:
        raise DrillError(f"{path}: cannot read the drill file: {error.strerror}") from error
    if len(text) > _MAX_FILE_BYTES:
        raise DrillError(f"{path}: more than the {_MAX_FILE_BYTES} bytes allowed for a drill file")
    return parse_drills(text, source=str(path), world_size=world_size)


def dump_drills(drills: Sequence[Drill]) -> bytes:
    """JSON text of `drills`, which `parse_drills` reads back."""
    return msgspec.json.format(msgspec.json.encode(list(drills)), indent=1)
