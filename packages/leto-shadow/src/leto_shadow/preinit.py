"""The preinitialization controller: how far may the shadow of each rank go? Pure (paper section 6, figure
13).

A shadow's GPU memory is worth something only until training needs it. The allocator hook
(`leto_shadow.oom_hook`) takes it back at the moment an out-of-memory error would surface; this controller
decides at which level the next shadow waits, so that the same state is not rebuilt and thrown away again:

* After a reclaim the shadow returns without GPU state (L1) at once and, when memory has been quiet for
  ``settle_s``, rises to the highest level that fits the *measured* headroom, but stays below the level that
  was reclaimed. Until the next recovery that ceiling only falls: at most two reclaims a rank and generation.
* After a recovery the ceiling is lifted, and the peak that the generation before was observed to need says
  which level will fit.
* A level fits where its shadow could be promoted: what it has given back while it waits (parked) and must
  take again then is counted as if it were held. A takeover that was refused for want of it is a measurement:
  there was less.

It decides nothing about correctness: whatever it answers, the hook keeps the shadow from causing an OOM.

Terms, in bytes of one device: *headroom*, what would be free if the rank had no shadow; *spare*, what the
training process holds in its cache beyond the most it ever needed, so that a successor will not take it;
*parked*, what a shadow at L3 does not hold but needs again when it is promoted.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

__all__ = ["LEVELS", "NO_GPU_LEVEL", "Change", "MemoryView", "PreinitController", "PreinitPolicy"]

LEVELS = (0, 1, 2, 3)
NO_GPU_LEVEL = 1
"""Highest level at which a shadow holds no GPU memory; nothing can be reclaimed from it."""

_MIB = 1 << 20


@dataclass(frozen=True)
class PreinitPolicy:
    """What the controller assumes until it has measured, in MiB; `settle_s` in seconds."""

    reserve_mib: int = 256
    """Memory that must stay free beside a shadow: what libraries take past the allocator."""
    l2_mib: int = 1024
    """Footprint of a shadow at L2 (context, modules, cuBLAS), until one has been measured."""
    l3_mib: int = 2048
    """What a shadow at L3 needs for its promotion (communicators besides, and what it has parked), until
    that has been measured."""
    settle_s: float = 5.0
    """Quiet time after a reclaim before the shadow may take GPU memory again."""


@dataclass(frozen=True)
class MemoryView:
    """One measurement of a rank's device, made by its active trainer.

    free_bytes, total_bytes: what the driver says. spare_bytes: reserved by the allocator now minus the most
    that was ever in use at once (negative if the cache was flushed since that peak).
    """

    free_bytes: int
    total_bytes: int
    spare_bytes: int = 0


@dataclass(frozen=True)
class Change:
    """The level at which the shadow of ``rank`` waits from now on; ``reason`` is for the event log."""

    rank: int
    level: int
    reason: str


@dataclass
class _Rank:
    ceiling: int
    level: int
    footprint: dict[int, int]
    parked: int = 0
    """Needed beside the footprint of L3 when a shadow is promoted from there."""
    l3_measured: bool = False
    decide_at: float | None = None
    """A level is to be chosen then, from what has been measured since the reclaim."""
    since_reclaim: int | None = None
    """Lowest headroom measured since the last reclaim."""
    at_peak: int | None = None
    """Lowest headroom of this generation as its successor will find it: without spare."""
    refused: bool = False
    """A shadow found less at its promotion than it needed, since the last recovery."""
    reclaims: int = field(default=0)

    def promotion(self, level: int) -> int:
        return self.footprint[level] + (self.parked if level == 3 else 0)


class PreinitController:
    """Levels of the shadows of ``ranks``, none above ``highest``. Events return what changed."""

    def __init__(self, ranks: Iterable[int], highest: int, policy: PreinitPolicy | None = None) -> None:
        if highest not in LEVELS:
            raise ValueError(f"highest must be one of {LEVELS}, found {highest}")
        self.policy = policy = policy or PreinitPolicy()
        self.highest = highest
        footprint = {0: 0, 1: 0, 2: policy.l2_mib * _MIB, 3: max(policy.l2_mib, policy.l3_mib) * _MIB}
        self._undecided: set[int] = set()
        """Ranks with a `decide_at`: the only ones that a tick looks at."""
        self._ranks = {rank: _Rank(highest, highest, dict(footprint)) for rank in ranks}

    # --- answers ----------------------------------------------------------------------------------

    def level(self, rank: int) -> int:
        """Level at which the shadow of ``rank`` is to wait now; never above `ceiling`."""
        return self._ranks[rank].level

    def ceiling(self, rank: int) -> int:
        """Level that the shadow of ``rank`` cannot exceed before the next recovery."""
        return self._ranks[rank].ceiling

    def reclaims(self, rank: int) -> int:
        """Reclaims of ``rank`` since the last recovery; at most two."""
        return self._ranks[rank].reclaims

    def footprint_bytes(self, rank: int, level: int) -> int:
        """GPU memory that a shadow of ``rank`` takes at ``level``: measured, or the policy's assumption."""
        return self._ranks[rank].footprint[level]

    def promotion_bytes(self, rank: int, level: int) -> int:
        """GPU memory that a shadow of ``rank`` must find to wait at ``level`` and be promoted from there:
        its footprint, and at L3 what it has parked."""
        return self._ranks[rank].promotion(level)

    # --- events -----------------------------------------------------------------------------------

    def measured(self, rank: int, view: MemoryView, held_level: int) -> list[Change]:
        """Take a measurement made while the shadow had reached ``held_level``.

        A shadow on its way up holds more than that, so the headroom is never overestimated by it.
        """
        one = self._ranks[rank]
        headroom = view.free_bytes + one.footprint[held_level]
        if one.decide_at is not None:
            one.since_reclaim = headroom if one.since_reclaim is None else min(one.since_reclaim, headroom)
        later = headroom + view.spare_bytes
        one.at_peak = later if one.at_peak is None else min(one.at_peak, later)
        return []

    def reclaimed(self, rank: int, level: int, now: float) -> list[Change]:
        """The shadow of ``rank`` was ended because training needed the memory; it was at, or on its way to,
        ``level``."""
        one = self._ranks[rank]
        one.reclaims += 1
        return self._lower(rank, level, now, f"reclaimed at L{level}")

    def did_not_fit(self, rank: int, level: int, now: float) -> list[Change]:
        """The shadow of ``rank`` ran out of memory itself on its way to ``level``."""
        return self._lower(rank, level, now, f"L{level} did not fit")

    def footprint(self, rank: int, level: int, held_bytes: int, parked_bytes: int | None = None) -> None:
        """Learn what a shadow of ``rank`` holds at ``level``: what the driver says of its process, or what
        came back when it was ended; 0: nobody can say. ``parked_bytes``: what it has given back there until
        it is promoted; None: as before."""
        one = self._ranks[rank]
        if level <= NO_GPU_LEVEL:
            return
        if level == 3 and parked_bytes is not None:
            if not one.l3_measured:  # the assumption is of both
                one.footprint[3] = max(0, one.promotion(3) - parked_bytes)
            one.parked = parked_bytes
        if held_bytes <= 0:
            return
        one.footprint[level] = held_bytes
        # A level never needs less than the one below it; the new number corrects the other one.
        if level == 2:
            one.footprint[3] = max(one.footprint[3], held_bytes - one.parked)
        else:
            one.footprint[2], one.l3_measured = min(one.footprint[2], one.promotion(3)), True

    def refused(self, rank: int) -> None:
        """A shadow of ``rank`` was promoted from L3 and did not get back what it had parked: there was less
        room than it needed. So the recovery that goes on without it ends with a shadow that waits lower."""
        one = self._ranks[rank]
        found = self.promotion_bytes(rank, 3) - 1
        one.at_peak = found if one.at_peak is None else min(one.at_peak, found)
        one.refused = True

    def tick(self, now: float) -> list[Change]:
        """Choose the level of ranks whose memory has been quiet long enough and has been measured."""
        out = []
        for rank in sorted(self._undecided) if self._undecided else ():
            one = self._ranks[rank]
            if one.decide_at is None or now < one.decide_at or one.since_reclaim is None:
                continue
            headroom = one.since_reclaim
            self._decide_at(rank, None)
            out += self._set(rank, self._fitting(one, headroom), f"headroom of {headroom // _MIB} MiB")
        return out

    def recovered(self, now: float) -> list[Change]:
        """A generation ended and its successor trains: the observed peak decides, ceilings are lifted."""
        out = []
        for rank, one in self._ranks.items():
            at_peak, was_at, refused = one.at_peak, one.level, one.refused
            one.ceiling = self.highest
            one.at_peak, one.refused = None, False
            one.reclaims = 0
            self._decide_at(rank, None)
            if at_peak is None:  # no device, or it failed at once: stay, and look again when it is measured
                if was_at < self.highest:
                    self._decide_at(rank, now + self.policy.settle_s)
            else:
                level = self._fitting(one, at_peak)
                seen = "that a takeover was refused" if refused else "at the observed peak"
                out += self._set(rank, level, f"headroom of {at_peak // _MIB} MiB {seen}")
        return out

    # --- helpers ----------------------------------------------------------------------------------

    def _lower(self, rank: int, level: int, now: float, reason: str) -> list[Change]:
        one = self._ranks[rank]
        one.ceiling = min(one.ceiling, max(level - 1, NO_GPU_LEVEL))
        self._decide_at(rank, now + self.policy.settle_s if one.ceiling > NO_GPU_LEVEL else None)
        return self._set(rank, min(NO_GPU_LEVEL, self.highest), reason)

    def _decide_at(self, rank: int, when: float | None) -> None:
        one = self._ranks[rank]
        one.decide_at, one.since_reclaim = when, None
        (self._undecided.discard if when is None else self._undecided.add)(rank)

    def _fitting(self, one: _Rank, headroom: int) -> int:
        beside = self.policy.reserve_mib * _MIB
        fitting = [
            level for level in LEVELS if level > NO_GPU_LEVEL and one.promotion(level) + beside <= headroom
        ]
        return min(max(fitting, default=NO_GPU_LEVEL), one.ceiling)

    def _set(self, rank: int, level: int, reason: str) -> list[Change]:
        one = self._ranks[rank]
        assert level <= one.ceiling <= self.highest, "a shadow never returns above the allowed level"
        if level == one.level:
            return []
        one.level = level
        return [Change(rank, level, reason)]
