"""The next world: one shadow per rank, brought to L3 and replaced when lost (paper sections 3.3 and 6).

L1 and L2 belong to one process. L3 (process groups formed and warmed) is a property of the *world*: process
groups with a dead member are useless, so losing one shadow demotes all others to L2 under a new world id. A
shadow that does not give up its groups within a deadline is killed and replaced: nothing of value is lost.

While training goes on, a failed shadow is replaced after a growing pause and the active trainers notice
nothing. While a recovery waits (`urgent`), shadows are replaced at once, all go to L3 (the deferred
initialization of section 3.4), and repeated failures are reported to the coordinator, which gives up.

A trainer that survived a failure and has retired (`leto_shadow.agent_survivors`) is in reserve until its rank
has no shadow: at once if it has none now, or while a recovery waits for one that stands lower; otherwise once
the one that it has is promoted. Until a fence has told which trainers survive, no process is started for a
rank whose trainer may.

What a report costs does not depend on the number of ranks: sets say which ranks stand where, and nothing but
a change of all of them looks at all of them (docs/benchmarks/shadow-scale.md).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from leto_shadow.actions import Action, CloseStore, HostStore, Record, Send
from leto_shadow.config import JobPolicy
from leto_shadow.messages import AdvanceShadow, DiscardShadow, ShadowAt, SpawnShadow, Survivor
from leto_shadow.preinit import NO_GPU_LEVEL

__all__ = ["Member", "NextWorld"]


@dataclass
class Member:
    """One shadow process as the coordinator knows it."""

    sid: int
    since: float
    told: int = 0
    """Highest level asked for in the current world."""
    level: int = 0
    demoting: bool = False
    """It was at or on its way to L3 in a world that is gone, and has not confirmed L2 yet."""
    survivor: bool = False
    """It was an active trainer of an earlier generation."""

    @property
    def origin(self) -> str:
        """Where it comes from, for the event log."""
        return "survivor" if self.survivor else "new"


class NextWorld:
    """The shadows of the world that will be promoted next."""

    def __init__(self, node_of_rank: Mapping[int, int], policy: JobPolicy) -> None:
        self._node_of_rank = dict(node_of_rank)
        self._policy = policy
        self._next_sid = 1
        self.world = 1
        self.members: dict[int, Member] = {}
        self.urgent = False
        self.running = False
        self._store: tuple[str, int] | None = None
        self._store_asked = False
        self._store_asked_at = 0.0
        self._store_came = False
        """A store has opened before: the helper has imported all that it needs, and has only to answer."""
        self._failures: dict[int, int] = {}
        self._not_before: dict[int, float] = {}
        self._unasked = set(self._node_of_rank)
        """Ranks without a shadow, or with one that has not been asked for all that it may be asked for."""
        self._behind: set[int] = set()
        """Ranks that have not reached what they were told."""
        self._at: dict[int, set[int]] = {2: set(), 3: set()}
        """Ranks that stand at that level or above, and are not on their way down."""
        self._told_l3: set[int] = set()
        self._reserve: dict[int, Member] = {}
        """Survivors that belong to no world yet; level 0: not a shadow again yet."""
        self._held: set[int] = set()
        """Ranks whose trainer may survive the fence that is under way."""
        self.stale = 0
        self._crowded = False
        self._limits: dict[int, int] = {}
        """Ranks whose device has no room for the level that the policy asks for, and the level it has room
        for."""

    def target(self, rank: int) -> int:
        """Level that the shadow of ``rank`` is to reach now. L3 is for all ranks or for none."""
        if not self.running:
            return 0
        if self._common:
            return 3
        level = min(self._limits.get(rank, self._policy.shadow_level), 2)
        return max(level, 1) if self.urgent else level

    @property
    def _common(self) -> bool:
        """Whether all ranks are to stand at L3."""
        fits = self._policy.shadow_level == 3 and not self._limits
        return self.running and (fits or (self.urgent and not self._crowded))

    def allow(self, rank: int, level: int, now: float) -> list[Action]:
        """Let the shadow of ``rank`` wait at ``level`` while training goes on (`leto_shadow.preinit`).

        One that stands higher is replaced: a process cannot give its GPU context back.
        """
        self.limit(rank, level)
        member = self.members.get(rank)
        if self.urgent or member is None or member.told <= max(level, 1):
            return self.advance(now)
        discard = Send(self._node_of_rank[rank], DiscardShadow(rank, member.sid))
        return [discard, *self.reclaimed(rank, member.sid, now)]

    def limit(self, rank: int, level: int) -> None:
        """Note the level, and do nothing yet."""
        if level < self._policy.shadow_level:
            self._limits[rank] = level
        else:
            self._limits.pop(rank, None)
        self._unasked.add(rank)

    def told(self, rank: int, sid: int) -> int:
        """Level that shadow ``sid`` was last asked for; 0 if it is not the shadow of ``rank`` any more."""
        member = self.members.get(rank)
        return member.told if member is not None and member.sid == sid else 0

    @property
    def ready(self) -> bool:
        """True when every rank has a shadow at L3 in this one world."""
        return len(self._at[3]) == len(self._node_of_rank)

    def begin(
        self, now: float, *, urgent: bool, crowded: bool = False, hold: frozenset[int] = frozenset()
    ) -> list[Action]:
        """Start or go on preparing; with ``urgent`` a recovery is waiting for this world.

        ``crowded``: trainers that are being fenced may still hold their memory. Shadows that wait at a lower
        level for want of memory go no further before `make_room`. ``hold``: no process is started for these
        ranks before `fenced`.
        """
        self.running = True
        self._held = set(hold)
        self.urgent, self._crowded = urgent, crowded
        if urgent:
            self._failures.clear()
        self._unasked = set(self._node_of_rank)
        return self.advance(now)

    def make_room(self, now: float) -> list[Action]:
        """The dead are gone and their memory is free: what waited for that goes on."""
        self._crowded = False
        self._unasked = set(self._node_of_rank)
        return self.advance(now)

    def can_use_survivors(self) -> frozenset[int]:
        """Ranks where a trainer that retires may stay: it keeps what a shadow at L2 has, and cannot give it
        back."""
        if self._policy.shadow_level <= NO_GPU_LEVEL:
            return frozenset()
        return frozenset(
            rank for rank in self._node_of_rank if self._limits.get(rank, NO_GPU_LEVEL + 1) > NO_GPU_LEVEL
        )

    def fenced(self, ranks: Iterable[int], survivors: Iterable[Survivor], now: float) -> list[Action]:
        """A node has fenced its ``ranks``: these trainers survive, the others are gone."""
        out: list[Action] = []
        self._held.difference_update(ranks)
        for one in survivors:
            member, waiting = self.members.get(one.rank), self._reserve.get(one.rank)
            if one.sid in {known.sid for known in (member, waiting) if known is not None}:
                continue  # a fence after another one tells it again
            if waiting is None:
                self._reserve[one.rank] = Member(one.sid, now, level=one.level, survivor=True)
                out += self._prefer_survivor(one.rank)
            else:
                out.append(Send(self._node_of_rank[one.rank], DiscardShadow(one.rank, one.sid)))
        return out + self.advance(now)

    def survivor_at(self, rank: int, sid: int, level: int, now: float) -> list[Action]:
        """A survivor has become a shadow."""
        waiting = self._reserve.get(rank)
        if waiting is None or waiting.sid != sid:
            self.stale += 1
            return []
        waiting.level = level
        return self._prefer_survivor(rank) + self.advance(now)

    def _prefer_survivor(self, rank: int) -> list[Action]:
        """A recovery does not wait for a process just started where a survivor stands higher."""
        member, waiting = self.members.get(rank), self._reserve[rank]
        if not self.urgent or member is None or member.told == 3 or member.level >= waiting.level:
            return []
        self._take_out(rank, member.sid)
        return [Send(self._node_of_rank[rank], DiscardShadow(rank, member.sid))]

    def take(self) -> int:
        """Hand the world over for promotion; its store now belongs to the caller."""
        assert self.ready, "a world is promoted only when all its shadows are at L3"
        world = self.world
        self.members = {}
        self.world += 1
        self._store, self._store_asked = None, False
        self.running = False
        self.urgent = False
        self._failures.clear()
        self._not_before.clear()
        self._unasked = set(self._node_of_rank)
        for ranks in (self._behind, self._told_l3, *self._at.values()):
            ranks.clear()
        return world

    def worst_rank(self) -> tuple[int, int]:
        """Return (rank, failures) of the rank whose shadows failed most since a recovery began to wait."""
        first = next(iter(self._node_of_rank))
        return max(self._failures.items(), key=lambda item: (item[1], -item[0]), default=(first, 0))

    def store_overdue(self, now: float) -> bool:
        """True when a recovery waits for a store that does not come: the helper hangs, or never began.

        Training that goes on has no need of it, and is not ended for a helper that may come back.
        """
        if not self.urgent or not self._store_asked or self._store is not None:
            return False
        deadlines = self._policy.deadlines
        return now - self._store_asked_at > (deadlines.agent_s if self._store_came else deadlines.prepare_s)

    def at(self, message: ShadowAt, now: float) -> list[Action]:
        """A shadow reports a level; a report from a replaced process or a former world is dropped."""
        member = self.members.get(message.rank)
        if member is None or member.sid != message.sid:
            self.stale += 1
            return []
        if message.level == 3 or member.demoting:
            if message.world != self.world:
                self.stale += 1
                return []
            member.demoting = False
            self._note(message.rank)
        if message.level > member.told:
            self.stale += 1
            return []
        member.level = message.level
        if member.level == member.told:
            member.since = now
        self._note(message.rank)
        return [self._told_level(message.rank, message.level, member), *self.advance(now)]

    def _told_level(self, rank: int, level: int, member: Member) -> Record:
        fields = {"rank": rank, "level": level, "world": self.world, "origin": member.origin}
        return Record("shadow_level", fields)

    def store_ready(self, world: int, host: str, port: int, now: float) -> list[Action]:
        """The store of ``world`` listens; one that came too late for its world is closed again."""
        if world != self.world or not self._store_asked:
            self.stale += 1
            return [CloseStore(world)]
        self._store, self._store_came = (host, port), True
        return self.advance(now)

    def move(self, ranks: range, node: int, now: float) -> list[Action]:
        """Another node has these ranks now; the shadows that they had are gone with their node."""
        out: list[Action] = []
        for rank in ranks:
            self._node_of_rank[rank] = node
            self._reserve.pop(rank, None)
            self._held.discard(rank)
        for rank in ranks:
            member = self.members.get(rank)
            if member is not None:
                out += self.failed(rank, member.sid, "its node is gone", now, secondary=True)
        return out

    def failed(
        self, rank: int, sid: int, detail: str, now: float, *, secondary: bool = False
    ) -> list[Action]:
        """A shadow died or was given up: replace it and, if process groups broke with it, demote the rest."""
        if self._drop_reserve(rank, sid):
            return self.advance(now)
        member = self._take_out(rank, sid)
        if member is None:
            return []
        collateral = member.demoting or secondary
        if not collateral:
            self._failures[rank] = self._failures.get(rank, 0) + 1
            pause = self._policy.limits.shadow_backoff_s * 2.0 ** (self._failures[rank] - 1)
            self._not_before[rank] = now + min(pause, self._policy.limits.shadow_backoff_max_s)
        out: list[Action] = [
            Record(
                "shadow_failed",
                {
                    "rank": rank,
                    "world": self.world,
                    "level": member.level,
                    "failures": self._failures.get(rank, 0),
                    "collateral": collateral,
                    "detail": detail,
                },
            )
        ]
        return out + self._go_on_without(member, now)

    def reclaimed(self, rank: int, sid: int, now: float) -> list[Action]:
        """A shadow was ended for its memory: no failure of its own, but its world is gone all the same."""
        if self._drop_reserve(rank, sid):
            return self.advance(now)
        member = self._take_out(rank, sid)
        return [] if member is None else self._go_on_without(member, now)

    def _drop_reserve(self, rank: int, sid: int) -> bool:
        """A survivor is gone before it was anybody's shadow; False if it is none."""
        waiting = self._reserve.get(rank)
        if waiting is None or waiting.sid != sid:
            return False
        del self._reserve[rank]
        return True

    def _take_out(self, rank: int, sid: int) -> Member | None:
        """Forget the shadow of a rank; None, and counted as stale, if it is not the one meant."""
        member = self.members.get(rank)
        if member is None or member.sid != sid:
            self.stale += 1
            return None
        del self.members[rank]
        self._note(rank)
        self._unasked.add(rank)
        return member

    def _go_on_without(self, member: Member, now: float) -> list[Action]:
        """Demote the others if process groups broke with it, and prepare the next one."""
        lost = member.told == 3 or self._told_l3
        return (self._renew(now) if lost else []) + self.advance(now)

    def tick(self, now: float) -> list[Action]:
        """Give up shadows that are too slow, replace those whose pause is over."""
        out: list[Action] = []
        deadlines = self._policy.deadlines
        for rank in sorted(self._behind) if self._behind else ():
            member = self.members[rank]
            limit = deadlines.demote_s if member.demoting else deadlines.prepare_s
            if now - member.since > limit:
                what = "gave up its process groups" if member.demoting else f"reached L{member.told}"
                out.append(Send(self._node_of_rank[rank], DiscardShadow(rank, member.sid)))
                out += self.failed(rank, member.sid, f"has not {what} within {limit:.0f} s", now)
                break  # the others get their new requests first
        return out + self.advance(now)

    def advance(self, now: float) -> list[Action]:
        """Ask for whatever is missing and may be asked for now."""
        out: list[Action] = []
        if not self.running:
            return out
        # A set keeps the room that it once had, and going through it costs that much: hence a new one.
        unasked, self._unasked = self._unasked, set()
        for rank in sorted(unasked):
            node, member, target = self._node_of_rank[rank], self.members.get(rank), self.target(rank)
            if target == 0:
                continue
            if member is None:
                waiting = self._reserve.get(rank)
                if rank in self._held or (waiting is not None and not waiting.level):
                    self._unasked.add(rank)
                    continue
                member = self._from_reserve(rank, target, now, out)
            if member is None:
                if not self.urgent and now < self._not_before.get(rank, 0.0):
                    self._unasked.add(rank)
                    continue
                member = self.members[rank] = Member(self._next_sid, now)
                self._next_sid += 1
                out.append(Send(node, SpawnShadow(rank, member.sid, self.world)))
            if member.told < min(target, 2):
                member.told, member.since = min(target, 2), now
                out.append(Send(node, AdvanceShadow(rank, member.sid, self.world, member.told)))
            self._note(rank)
        if self._common and len(self._at[2]) == len(self._node_of_rank):
            if not self._store_asked:
                self._store_asked, self._store_asked_at = True, now
                out.append(HostStore(self.world))
            elif self._store is not None and len(self._told_l3) < len(self._node_of_rank):
                waits = not self.urgent
                for rank, member in self.members.items():
                    if member.told < 3:
                        member.told, member.since = 3, now
                        self._note(rank)
                        advance = AdvanceShadow(rank, member.sid, self.world, 3, *self._store, waits)
                        out.append(Send(self._node_of_rank[rank], advance))
        return out

    def _from_reserve(self, rank: int, target: int, now: float, out: list[Action]) -> Member | None:
        """Make the survivor of a rank its shadow; None if there is none, or none that may stand where it
        does."""
        member = self._reserve.pop(rank, None)
        if member is None:
            return None
        if not self.urgent and target <= NO_GPU_LEVEL:  # it holds more than it may, and cannot give it back
            out.append(Send(self._node_of_rank[rank], DiscardShadow(rank, member.sid)))
            return None
        member.told, member.since = member.level, now
        self.members[rank] = member
        out.append(self._told_level(rank, member.level, member))
        return member

    def _note(self, rank: int) -> None:
        """Keep the sets true after a change of this rank's member."""
        member = self.members.get(rank)
        steady = member is not None and not member.demoting
        for ranks, belongs in (
            (self._behind, member is not None and member.level < member.told),
            (self._told_l3, member is not None and member.told == 3),
            (self._at[2], steady and member is not None and member.level >= 2),
            (self._at[3], steady and member is not None and member.level == 3),
        ):
            (ranks.add if belongs else ranks.discard)(rank)

    def _renew(self, now: float) -> list[Action]:
        out: list[Action] = []
        if self._store is not None:
            out.append(CloseStore(self.world))
        self._store, self._store_asked = None, False
        self.world += 1
        for rank, member in sorted(self.members.items()):
            if member.told == 3:
                member.told, member.since, member.demoting = 2, now, True
                member.level = min(member.level, 1)
                self._note(rank)
                out.append(
                    Send(self._node_of_rank[rank], AdvanceShadow(rank, member.sid, self.world, member.told))
                )
        out.append(Record("world_renewed", {"world": self.world}))
        return out
