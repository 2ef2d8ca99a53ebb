"""Schedules of failures: when, on which rank, of which class; drawn from a seed (paper section 8.1).

Role: `leto inject plan` draws one, `leto run --injections` and `leto inject schedule` have the agents carry
it out (`leto_shadow.injector`). A schedule is data: the same file gives the same failures at the same times
after training has begun, in every run. Failures arrive as a Poisson process, so gaps are exponential around
the mean."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from itertools import accumulate
from pathlib import Path
from typing import Literal

import msgspec

from leto_shadow.drills import MAX_NUMBER

__all__ = [
    "CLASSES",
    "SCHEDULE_VERSION",
    "Injection",
    "Schedule",
    "ScheduleError",
    "dump_schedule",
    "load_schedule",
    "make_schedule",
    "parse_schedule",
]

SCHEDULE_VERSION = 1
CLASSES = ("kill", "hang", "lose", "ff")

_MAX_FILE_BYTES = 4 << 20
_MAX_INJECTIONS = 10_000
_SEED_BITS = 31


class ScheduleError(ValueError):
    """A schedule that cannot be read or makes no sense."""


class Injection(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One failure: ``at_s`` seconds after training began, on ``rank``.

    kind "kill": SIGKILL of the trainer. "hang": it keeps the interpreter lock. "lose": kill, and lose
    ``pages`` data pages of ``group`` in ``allocation``, chosen by ``seed``. "ff": kill, and the device is
    said to have had the Xid ``xid``, which makes the failure fatal (`leto_shadow.operability`); if a spare
    takes the node's place, its devices stay unfit for ``heals_s`` seconds (null: for ever)."""

    at_s: float
    rank: int
    kind: Literal["kill", "hang", "lose", "ff"]
    seed: int = 0
    allocation: str = "arena"
    group: int = 0
    pages: int | Literal["tolerance"] = 1
    xid: int = 79
    heals_s: float | None = 0.0


class Schedule(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Injections in order of time, and what they were drawn from.

    clock "wall": seconds since training began. "ready": of these, only the seconds in which all ranks of a
    node train and their shadows stand at the level where they wait, so that every failure meets standing
    shadows, at an instant that the seed alone has chosen."""

    injections: tuple[Injection, ...]
    version: int = SCHEDULE_VERSION
    seed: int | None = None
    mttf_s: float | None = None
    duration_s: float | None = None
    gap_s: float = 0.0
    classes: dict[str, float] = {}
    clock: Literal["wall", "ready"] = "wall"

    @property
    def key(self) -> str:
        """Name of these injections, the same wherever the schedule is read."""
        return hashlib.sha256(msgspec.json.encode(self.injections)).hexdigest()[:12]


def make_schedule(
    seed: int,
    mttf_s: float,
    ranks: int,
    classes: Mapping[str, float],
    *,
    duration_s: float | None = None,
    count: int | None = None,
    gap_s: float = 0.0,
    clock: Literal["wall", "ready"] = "wall",
) -> Schedule:
    """Draw failures with a mean of ``mttf_s`` seconds between them, until ``duration_s`` or ``count`` of
    them.

    Every draw of one failure is made whatever the others are, so a longer schedule of the same seed begins
    with the shorter one. ``gap_s``: least time between two, as a recovery that is to be measured from a
    standing shadow needs it; the mean stays ``mttf_s``. ``clock``: as of `Schedule`. Raises `ScheduleError`.
    """
    unknown = set(classes) - set(CLASSES)
    if unknown or not classes or min(classes.values()) < 0 or not sum(classes.values()) > 0:
        raise ScheduleError(
            f"classes must be some of {', '.join(CLASSES)} with weights, found {dict(classes)}"
        )
    if not mttf_s > 0 or ranks < 1 or (duration_s is None) == (count is None):
        raise ScheduleError("a schedule needs a positive MTTF, ranks, and either a duration or a count")
    if not 0 <= gap_s < mttf_s:
        raise ScheduleError(f"the least gap must be below the MTTF of {mttf_s:g} s, found {gap_s:g}")
    rng = random.Random(f"leto-schedule-{seed}")
    names = [name for name in CLASSES if classes.get(name)]
    steps = list(accumulate(classes[name] for name in names))
    found: list[Injection] = []
    at_s = 0.0
    while count is None or len(found) < count:
        at_s = round(at_s + gap_s + rng.expovariate(1.0 / (mttf_s - gap_s)), 3)
        rank, draw, salt = rng.randrange(ranks), rng.random(), rng.getrandbits(_SEED_BITS)
        if duration_s is not None and at_s >= duration_s:
            break
        if len(found) == _MAX_INJECTIONS:
            raise ScheduleError(
                f"more than {_MAX_INJECTIONS} injections: a shorter duration, or a longer MTTF"
            )
        kind = next(name for name, step in zip(names, steps, strict=True) if draw * steps[-1] < step)
        found.append(Injection(at_s, rank, kind, salt))  # type: ignore[arg-type]
    return Schedule(tuple(found), SCHEDULE_VERSION, seed, mttf_s, duration_s, gap_s, dict(classes), clock)


def _check(one: Injection, world_size: int | None) -> str | None:
    if not 0 <= one.at_s < 1e9:
        return f"at_s must be 0 to 1e9 seconds, found {one.at_s:g}"
    if one.rank < 0 or (world_size is not None and one.rank >= world_size):
        limit = "" if world_size is None else f" (this job has ranks 0 to {world_size - 1})"
        return f"there is no rank {one.rank}{limit}"
    for name, value in (("seed", one.seed), ("group", one.group), ("xid", one.xid)):
        if not 0 <= value <= MAX_NUMBER:
            return f"{name} must be 0 to {MAX_NUMBER}, found {value}"
    if one.heals_s is not None and not 0 <= one.heals_s < 1e9:
        return f"heals_s must be 0 to 1e9 seconds, or null, found {one.heals_s:g}"
    if isinstance(one.pages, int) and not 1 <= one.pages <= MAX_NUMBER:
        return f"pages must be at least 1, found {one.pages}"
    return None


def parse_schedule(text: bytes | str, *, source: str = "schedule", world_size: int | None = None) -> Schedule:
    """Parse and check a schedule. Raises `ScheduleError` with the place of the mistake."""
    try:
        schedule = msgspec.json.decode(text, type=Schedule)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise ScheduleError(f"{source}: {error}") from error
    if schedule.version != SCHEDULE_VERSION:
        raise ScheduleError(f"{source}: version {schedule.version}, expected {SCHEDULE_VERSION}")
    if len(schedule.injections) > _MAX_INJECTIONS:
        raise ScheduleError(f"{source}: more than {_MAX_INJECTIONS} injections")
    before = 0.0
    for number, one in enumerate(schedule.injections):
        problem = _check(one, world_size)
        if problem is None and one.at_s < before:
            problem = f"at_s {one.at_s:g} comes after {before:g}: they must be in order of time"
        if problem is not None:
            raise ScheduleError(f"{source}: injection {number}: {problem}")
        before = one.at_s
    return schedule


def load_schedule(path: str | Path, *, world_size: int | None = None) -> Schedule:
    """Read a schedule file. Raises `ScheduleError`."""
    path = Path(path)
    if path.exists() and not path.is_file():
        raise ScheduleError(f"{path}: a schedule must be a regular file")
    try:
        with open(path, "rb") as file:
            text = file.read(_MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ScheduleError(f"{path}: cannot read the schedule: {error.strerror}") from error
    if len(text) > _MAX_FILE_BYTES:
        raise ScheduleError(f"{path}: more than {_MAX_FILE_BYTES} bytes")
    return parse_schedule(text, source=str(path), world_size=world_size)


def dump_schedule(schedule: Schedule) -> bytes:
    """JSON text of a schedule, which `parse_schedule` reads back."""
    return msgspec.json.format(msgspec.json.encode(schedule), indent=1) + b"\n"
