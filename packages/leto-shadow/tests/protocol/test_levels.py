"""One lost shadow demotes the world; a recovery waits for all at L3; repeated failures back off.

Case 7 (a new round meets through the old round's store): every world has a number and a store of its own, and
what is said of an older world is ignored.
"""

from __future__ import annotations

from typing import Any

from leto_shadow.actions import CloseStore, HostStore, Record, Send
from leto_shadow.config import Deadlines, JobPolicy, Limits
from leto_shadow.levels import NextWorld
from leto_shadow.messages import AdvanceShadow, DiscardShadow, ShadowAt, SpawnShadow, Survivor

POLICY = JobPolicy(
    deadlines=Deadlines(prepare_s=50.0, demote_s=5.0),
    limits=Limits(shadow_backoff_s=1.0, shadow_backoff_max_s=3.0),
)


class World:
    """A NextWorld of two ranks on two nodes, with the messages it sends."""

    def __init__(self, policy: JobPolicy = POLICY) -> None:
        self.next = NextWorld({0: 0, 1: 1}, policy)
        self.actions: list[Any] = []

    def do(self, actions: list[Any]) -> list[Any]:
        """Keep what was done, return the messages without the node."""
        self.actions = actions
        return [action.message for action in actions if isinstance(action, Send)]

    def at(self, rank: int, level: int, world: int | None = None, now: float = 0.0) -> list[Any]:
        sid = self.next.members[rank].sid
        world = self.next.world if world is None else world
        return self.do(self.next.at(ShadowAt(rank, sid, world, level), now))

    def bring_to_l3(self, *, urgent: bool = False, now: float = 0.0) -> None:
        self.do(self.next.begin(now, urgent=urgent))
        for rank in (0, 1):
            for level in (1, 2):
                self.at(rank, level, now=now)
        world = self.next.world
        assert HostStore(world) in self.actions
        told = self.do(self.next.store_ready(world, "host", 7, now))
        assert [(one.rank, one.level, one.store_port) for one in told] == [(0, 3, 7), (1, 3, 7)]
        assert [one.waits for one in told] == [not urgent] * 2
        for rank in (0, 1):
            self.at(rank, 3, now=now)
        assert self.next.ready


def test_all_ranks_reach_l3_together_or_none() -> None:
    world = World()
    spawned = world.do(world.next.begin(0.0, urgent=False))
    assert [type(one) for one in spawned] == [SpawnShadow, AdvanceShadow] * 2
    world.at(0, 1)
    assert world.at(0, 2) == [], "L3 is not asked for before all stand at L2"
    world.at(1, 1)
    world.at(1, 2)
    assert HostStore(1) in world.actions
    assert not world.next.ready


def test_who_is_waited_for_is_told_not_to_settle_down() -> None:
    """What it parked would be wanted at once, and refused where its predecessor's was."""
    World().bring_to_l3(urgent=True)
    World().bring_to_l3(urgent=False)


def test_a_lost_shadow_demotes_the_others_to_l2_in_a_new_world() -> None:
    world = World()
    world.bring_to_l3()
    sid = world.next.members[0].sid
    told = world.do(world.next.failed(0, sid, "killed", 10.0))
    assert world.next.world == 2
    assert CloseStore(1) in world.actions
    assert told == [AdvanceShadow(1, world.next.members[1].sid, 2, 2)]
    assert not world.next.ready
    assert world.at(1, 3, world=1) == [], "a late L3 of the old world means nothing"
    assert world.next.stale == 1
    assert not world.next.ready

    assert world.do(world.next.tick(10.5)) == [], "the replacement waits out its pause"
    again = world.do(world.next.tick(11.1))
    assert [type(one) for one in again] == [SpawnShadow, AdvanceShadow]
    world.at(1, 2, now=11.2)
    world.at(0, 1, now=12.0)
    world.at(0, 2, now=13.0)
    assert HostStore(2) in world.actions


def test_a_store_that_does_not_come_is_overdue_only_where_a_recovery_waits() -> None:
    """The helper hangs. Its first store may take as long as all that it imports."""
    world = World(JobPolicy(Deadlines(prepare_s=500.0, agent_s=30.0)))
    world.do(world.next.begin(0.0, urgent=True))
    for rank in (0, 1):
        for level in (1, 2):
            world.at(rank, level)
    assert HostStore(1) in world.actions
    assert [world.next.store_overdue(now) for now in (499.0, 501.0)] == [False, True]
    world.do(world.next.store_ready(1, "host", 7, 499.0))
    assert not world.next.store_overdue(2000.0)

    world.do(world.next.failed(0, world.next.members[0].sid, "killed", 1000.0))
    for level in (1, 2):
        world.at(0, level, now=1000.0)
    world.at(1, 2, now=1000.0)
    assert HostStore(2) in world.actions
    assert [world.next.store_overdue(now) for now in (1029.0, 1031.0)] == [False, True]
    world.next.urgent = False
    assert not world.next.store_overdue(9000.0), "training goes on, and needs no store"
    world.do(world.next.begin(9000.0, urgent=True))
    assert world.next.store_overdue(9000.0)


def test_without_process_groups_nothing_is_demoted() -> None:
    world = World()
    world.do(world.next.begin(0.0, urgent=False))
    world.at(1, 1)
    world.at(1, 2)
    world.do(world.next.failed(0, world.next.members[0].sid, "killed", 1.0))
    assert world.next.world == 1
    assert world.next.members[1].level == 2


def test_a_shadow_that_keeps_its_dead_groups_is_replaced_and_not_blamed() -> None:
    world = World()
    world.bring_to_l3()
    world.do(world.next.failed(0, world.next.members[0].sid, "killed", 10.0))
    stuck = world.next.members[1].sid
    told = world.do(world.next.tick(16.0))
    assert DiscardShadow(1, stuck) in told
    (record,) = [one for one in world.actions if isinstance(one, Record) and one.event == "shadow_failed"]
    assert record.fields["collateral"]
    assert world.next.worst_rank() == (0, 1)
    assert world.next.world == 2, "nobody was told to form groups in world 2 yet"


def test_failures_in_the_background_back_off() -> None:
    world = World()
    now = 0.0
    pauses = []
    world.do(world.next.begin(now, urgent=False))
    for _ in range(5):
        world.do(world.next.failed(0, world.next.members[0].sid, "killed", now))
        died = now
        while 0 not in world.next.members:
            now += 0.25
            world.do(world.next.tick(now))
        pauses.append(now - died)
    assert pauses == [1.0, 2.0, 3.0, 3.0, 3.0]


def test_a_recovery_does_not_wait_out_a_pause() -> None:
    world = World()
    world.do(world.next.begin(0.0, urgent=False))
    world.do(world.next.failed(0, world.next.members[0].sid, "killed", 0.0))
    assert 0 not in world.next.members
    told = world.do(world.next.begin(0.1, urgent=True))
    assert [type(one) for one in told] == [SpawnShadow, AdvanceShadow]
    assert world.next.worst_rank()[1] == 0


def test_shadows_wait_at_the_configured_level_until_a_recovery_needs_more() -> None:
    world = World(JobPolicy(POLICY.deadlines, POLICY.limits, shadow_level=1))
    told = world.do(world.next.begin(0.0, urgent=False))
    assert {one.level for one in told if isinstance(one, AdvanceShadow)} == {1}
    for rank in (0, 1):
        world.at(rank, 1)
    told = world.do(world.next.begin(5.0, urgent=True))
    assert [(one.rank, one.level) for one in told] == [(0, 2), (1, 2)]


def test_no_shadows_at_level_0() -> None:
    world = World(JobPolicy(POLICY.deadlines, POLICY.limits, shadow_level=0))
    assert world.do(world.next.begin(0.0, urgent=False)) == []


def test_a_promoted_world_is_gone_and_its_late_messages_are_stale() -> None:
    """Case 7."""
    world = World()
    world.bring_to_l3(urgent=True)
    sid = world.next.members[0].sid
    assert world.next.take() == 1
    assert world.next.world == 2
    assert world.do(world.next.failed(0, sid, "killed", 1.0)) == []
    assert world.do(world.next.store_ready(1, "host", 7, 1.0)) == []
    assert world.actions == [CloseStore(1)]
    assert world.next.stale == 2


def test_a_slow_shadow_is_given_up() -> None:
    world = World()
    world.do(world.next.begin(0.0, urgent=True))
    sid = world.next.members[0].sid
    assert world.do(world.next.tick(50.0)) == []
    told = world.do(world.next.tick(51.0))
    assert DiscardShadow(0, sid) in told
    assert world.next.members[0].sid != sid


# --- survivors --------------------------------------------------------------------------------------


def test_a_rank_without_a_shadow_waits_for_its_survivor() -> None:
    world = World()
    begun = world.do(world.next.begin(0.0, urgent=True, hold=frozenset({0})))
    assert [(type(one), one.rank) for one in begun] == [(SpawnShadow, 1), (AdvanceShadow, 1)]
    assert world.do(world.next.tick(0.2)) == []
    assert world.do(world.next.fenced([0], [Survivor(0, 77)], 0.3)) == [], "it is on its way"
    assert world.do(world.next.tick(0.4)) == []
    assert world.do(world.next.survivor_at(0, 77, 2, 0.5)) == [], "it stands at L2 already"
    assert world.next.members[0].sid == 77
    level = {"rank": 0, "level": 2, "world": 1, "origin": "survivor"}
    assert Record("shadow_level", level) in world.actions
    world.at(1, 1)
    world.at(1, 2)
    assert HostStore(1) in world.actions


def test_a_survivor_at_l1_is_advanced_like_any_other() -> None:
    world = World()
    world.do(world.next.begin(0.0, urgent=True, hold=frozenset({0})))
    told = world.do(world.next.fenced([0], [Survivor(0, 77, 1)], 0.3))
    assert told == [AdvanceShadow(0, 77, 1, 2)]


def test_nobody_survived_so_a_process_is_started_after_the_fence() -> None:
    world = World()
    world.do(world.next.begin(0.0, urgent=True, hold=frozenset({0})))
    assert [type(one) for one in world.do(world.next.fenced([0], [], 0.3))] == [SpawnShadow, AdvanceShadow]


def test_a_survivor_waits_behind_the_shadow_that_its_rank_has() -> None:
    world = World()
    world.bring_to_l3(urgent=True)
    ready = world.next.members[0].sid
    assert world.do(world.next.fenced([0], [Survivor(0, 77, 2)], 1.0)) == []
    assert world.do(world.next.fenced([0], [Survivor(0, 77, 2)], 1.0)) == [], "told again by another fence"
    assert world.next.members[0].sid == ready
    world.next.take()
    begun = world.do(world.next.begin(2.0, urgent=False))
    assert [(type(one), one.rank) for one in begun] == [(SpawnShadow, 1), (AdvanceShadow, 1)]
    assert world.next.members[0].sid == 77


def test_a_recovery_prefers_a_survivor_to_a_process_that_has_just_been_started() -> None:
    world = World()
    world.do(world.next.begin(0.0, urgent=False))
    cold, warm = (world.next.members[rank].sid for rank in (0, 1))
    world.at(1, 1)
    world.at(1, 2)
    world.do(world.next.begin(1.0, urgent=True, hold=frozenset({0, 1})))
    assert world.do(world.next.fenced([0, 1], [Survivor(0, 77), Survivor(1, 78, 2)], 1.1)) == []
    assert world.do(world.next.survivor_at(0, 77, 2, 1.2)) == [DiscardShadow(0, cold)]
    assert [world.next.members[rank].sid for rank in (0, 1)] == [77, warm], "at L2 as well, it stays"
    assert HostStore(1) in world.actions
    assert world.next.stale == 0


def test_while_training_goes_on_a_survivor_disturbs_no_shadow() -> None:
    world = World()
    world.do(world.next.begin(0.0, urgent=False))
    cold = world.next.members[0].sid
    assert world.do(world.next.fenced([0], [Survivor(0, 77, 2)], 1.1)) == []
    assert world.next.members[0].sid == cold


def test_a_survivor_that_is_lost_in_reserve_is_no_failure_of_a_shadow() -> None:
    world = World()
    world.bring_to_l3()
    world.do(world.next.fenced([0], [Survivor(0, 77)], 1.0))
    assert world.do(world.next.failed(0, 77, "it has not become a shadow", 2.0)) == []
    assert world.next.ready
    assert world.next.worst_rank() == (0, 0)
    world.next.take()
    begun = world.do(world.next.begin(3.0, urgent=False))
    assert [type(one) for one in begun] == [SpawnShadow, AdvanceShadow] * 2


def test_of_two_survivors_of_a_rank_one_stays() -> None:
    world = World()
    world.bring_to_l3()
    world.do(world.next.fenced([0], [Survivor(0, 77)], 1.0))
    assert world.do(world.next.fenced([0], [Survivor(0, 78)], 2.0)) == [DiscardShadow(0, 78)]


def test_a_survivor_does_not_stay_where_only_l1_has_room() -> None:
    world = World()
    assert world.next.can_use_survivors() == {0, 1}
    world.bring_to_l3()
    world.do(world.next.fenced([0], [Survivor(0, 77, 2)], 1.0))
    world.next.take()
    world.next.limit(0, 1)
    assert world.next.can_use_survivors() == {1}
    begun = world.do(world.next.begin(2.0, urgent=False))
    assert begun[:2] == [DiscardShadow(0, 77), SpawnShadow(0, world.next.members[0].sid, 2)]


def test_a_survivor_of_a_lost_node_is_not_waited_for() -> None:
    world = World()
    world.do(world.next.begin(0.0, urgent=True, hold=frozenset({1})))
    world.do(world.next.fenced([1], [Survivor(1, 77)], 0.3))
    world.next.move(range(1, 2), 2, 1.0)
    told = world.next.begin(1.0, urgent=True)
    assert [(one.node, one.message.rank) for one in told] == [(2, 1), (2, 1)]
