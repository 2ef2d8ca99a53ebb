"""Nodes that join, leave, come back with the memory of a dead agent, or take the place of another one.

Third layer of `leto_shadow.coordinator`. Upheld here: I-4 (a generation newer than all that ever wrote the
memory found), I-5 (memory is used if it is that of all ranks, of one epoch; otherwise all of it is given up).
"""

from __future__ import annotations

from dataclasses import replace

from leto_shadow import messages as m
from leto_shadow.classifier import Failure, FailureKind
from leto_shadow.config import beat_s
from leto_shadow.coordinator_recovery import CoordinatorRecovery
from leto_shadow.exit_codes import ExitCode
from leto_shadow.levels import NextWorld
from leto_shadow.phases import Phase
from leto_shadow.preinit import PreinitController
from leto_shadow.recovery import Recovery

__all__ = ["CoordinatorNodes"]


class CoordinatorNodes(CoordinatorRecovery):
    """Who takes part; see `leto_shadow.roster`."""

    def _on_join(self, node: int, join: m.Join) -> None:
        if join.protocol != m.PROTOCOL:
            self._stop(
                ExitCode.CANNOT_START,
                f"node {node} speaks protocol {join.protocol}, this coordinator {m.PROTOCOL}: "
                "install the same leto-shadow on all nodes",
            )
            return
        self._roster.joined[node] = join
        self._fired.update(join.fired)
        if join.trained_s is not None:
            since = self._now - join.trained_s
            self._trains_since = since if self._trains_since is None else min(since, self._trains_since)
        if not self._arrived(node):
            return
        found = self._roster.assign()
        self.ranks_of.update(found.ranks_of)
        self.world_size = sum(map(len, found.ranks_of.values()))
        for index, ranks in self.ranks_of.items():
            self._welcome(index, ranks.start)
        without = set(range(self._nodes)) - set(self.ranks_of)
        self._retired = {index for index in without if self._roster.joined[index].unfit}
        self._spares = without - self._retired
        for index in sorted(self._spares):
            self._welcome(index, 0, spare=True)
        self._record("job_started", world_size=self.world_size, nodes=self._nodes, spares=len(self._spares))
        node_of_rank = {rank: index for index, ranks in self.ranks_of.items() for rank in ranks}
        lowest = min(one.shadow_level for one in self._roster.joined.values())
        self.policy = replace(self.policy, shadow_level=min(self.policy.shadow_level, lowest))
        self.world = NextWorld(node_of_rank, self.policy)
        self.preinit = PreinitController(node_of_rank, self.policy.shadow_level, self.policy.preinit)
        self.epoch, self.generation = found.epoch, found.generation
        self.iteration = self._roster.reached()
        for index in sorted(self._retired):
            reason = self._roster.joined[index].unfit
            self._record("spare_unfit", spare=index, reason=reason)
            self._send(index, m.Retire(self.generation, reason))
        if found.adopts:
            self._go_on()
        else:
            if found.reason:
                self._record("memory_given_up", epoch=found.epoch, reason=found.reason)
            self._fenced_for = self.generation  # an agent joins when its predecessor's trainers are dead
            self._start_managers()
        self._out += self.world.begin(self._now, urgent=True)

    def _welcome(self, node: int, first_rank: int, *, spare: bool = False) -> None:
        """Give a node its ranks, or the place of a spare, and tell it what has struck already."""
        trained_s = None if self._trains_since is None else self._now - self._trains_since
        fired = tuple(sorted(self._fired))
        beat = beat_s(self._nodes)
        self._send(node, m.Welcome(first_rank, self.world_size, beat, spare, fired, trained_s))

    def _go_on(self) -> None:
        """The agents were started again and hold the memory of all ranks: recover in place."""
        failure = Failure(FailureKind.AGENT, -1, -1, "an agent died; the memory of all ranks outlived it")
        self.recovery = Recovery(self._now, failure)
        self._trained = True
        self._record("adopted", generation=self.generation, epoch=self.epoch)
        self._record(
            "recovery_begun", generation=self.generation, iteration=-1, rank=failure.rank, fatal=False
        )
        self._waiting_for = set(self.ranks_of)
        for node in self.ranks_of:
            self._send(node, m.Adopt(self.generation, self.epoch))
        self._enter(Phase.FENCING)

    def _on_bye(self, node: int, exit_code: int) -> None:
        if self.phase is Phase.STOPPING:
            self._waiting_for.discard(node)
            if not self._waiting_for:
                self._finish()
        else:
            # An agent that was told to end may be one of many that torchrun starts again, memory and all.
            for_good = exit_code in (ExitCode.AGENT_LOST, ExitCode.NODE_UNFIT)
            self._agent_lost(node, "ended", for_good=for_good)

    def _agent_lost(self, node: int, what: str, *, for_good: bool = False) -> None:
        """``for_good``: nobody will start it again there with the memory that it had."""
        if self.phase in (Phase.STOPPING, Phase.DONE):
            return
        detail = f"the agent of node {node} {what}"
        if for_good and node in self._spares | self._retired:
            self._record("spare_lost", lost=node, reason=detail)
            self._forget(node)
            return
        spare = self._spare_for(node) if for_good and self.phase is not Phase.JOINING else None
        if spare is None:
            self._stop(ExitCode.AGENT_LOST, detail, lost=node)
        else:
            self._replace(node, spare, detail)

    def _check_silence(self) -> bool:
        """Return True if an agent is lost; otherwise note until when none can be."""
        agent_s = self.policy.deadlines.agent_s
        if self.phase in (Phase.JOINING, Phase.STOPPING):
            return False
        for node in sorted(set(range(self._nodes)) - self._gone):
            if self._now - self._heard[node] > agent_s:
                silence = self._now - self._heard[node]
                self._agent_lost(node, f"has been silent for {silence:.0f} s", for_good=True)
                return True
        self._silent_after = agent_s + min(
            heard for node, heard in self._heard.items() if node not in self._gone
        )
        return False

    def _turn_away(self, node: int) -> None:
        """It is back from the dead, and its place is taken. It is told once; the link sees that it hears."""
        if node not in self._turned_away:
            self._turned_away.add(node)
            self._send(node, m.Shutdown(ExitCode.AGENT_LOST, "another node has taken the place of this one"))

    @property
    def spares(self) -> tuple[list[int], list[int]]:
        """Nodes without ranks: those that can take a place, and those whose devices are not operable."""
        return sorted(self._spares), sorted(self._retired)

    def _forget(self, node: int) -> None:
        self._gone.add(node)
        self._spares.discard(node)
        self._retired.discard(node)

    def _spare_for(self, node: int) -> int | None:
        """A spare that is heard and has as many ranks as ``node``."""
        patience_s = self.policy.deadlines.agent_s / 2
        return min(
            (
                spare
                for spare in self._spares
                if self._now - self._heard[spare] <= patience_s
                and self._roster.joined[spare].local_ranks == len(self.ranks_of[node])
            ),
            default=None,
        )

    def _replace(self, node: int, spare: int, detail: str) -> None:
        """The spare gets the ranks of the lost node; all ranks go on from a checkpoint (I-5).

        What is left of the lost node cannot be fenced from here. It cannot write memory that anybody will
        read (the managers of all ranks are replaced), and by its own agent's deadline, which is the same as
        ours, its trainers are dead.
        """
        assert self.world is not None
        self._note_progress()
        ranks = self.ranks_of[node]
        self._forget(node)
        self._spares.discard(spare)
        failure = Failure(FailureKind.NODE, ranks.start, self.iteration, detail)
        recovery = self.recovery or Recovery(self._now)
        if recovery.failure is None:
            recovery = Recovery(self._now, failure)
        if not self._rule(failure, recovery):
            return
        del self.ranks_of[node]
        self.ranks_of[spare] = ranks
        self._welcome(spare, ranks.start)
        self._record(
            "node_replaced", lost=node, spare=spare, first_rank=ranks.start, ranks=len(ranks), unfit=[]
        )
        self._blamed = None
        self.recovery = recovery
        self.generation += 1
        self.epoch += 1  # what the managers that are there now report is of the past
        self._begin_fence(failure)
        self._out += self.world.move(ranks, spare, self._now)
        self._out += self.world.begin(self._now, urgent=True, crowded=True)

    def _start_managers(self) -> None:
        """All trainers are dead: the moment to leave devices that are not operable."""
        unfit = frozenset() if self.recovery is None else self.recovery.unfit
        leaving = {node for node, ranks in self.ranks_of.items() if unfit & set(ranks)}
        self._leaving = set(sorted(leaving)[: len(self._spares)])
        for node in sorted(leaving - self._leaving):
            self._record("no_spare", lost=node, unfit=sorted(unfit & set(self.ranks_of[node])))
        if self.phase is not Phase.FENCING or not self._leaving:
            super()._start_managers()
            return
        self._waiting_for = set(self._leaving)
        for node in sorted(self._leaving):
            bad = min(unfit & set(self.ranks_of[node]))
            self._send(node, m.Retire(self.generation, f"the device of rank {bad} is not operable"))

    def _on_retired(self, node: int) -> None:
        """A node has nothing left of its ranks. They go to spares when all that leave their places have."""
        if self.phase is not Phase.FENCING or node not in self._leaving or node not in self._waiting_for:
            self.stale["Retired"] += 1
            return
        if not self._arrived(node):
            return
        leaving, self._leaving = self._leaving, set()
        for one in sorted(leaving):
            self._leave_device(one)
        super()._start_managers()

    def _leave_device(self, node: int) -> None:
        """A spare gets the ranks of a node with a device that is not operable.

        Unlike in `_replace`, the agent of the node lives and has fenced. Without a spare it keeps its place.
        """
        assert self.world is not None
        assert self.recovery is not None
        ranks, spare = self.ranks_of[node], self._spare_for(node)
        bad = sorted(self.recovery.unfit & set(ranks))
        to = node if spare is None else spare
        self._welcome(to, ranks.start)
        if spare is None:
            self._record("no_spare", lost=node, unfit=bad)
        else:
            del self.ranks_of[node]
            self.ranks_of[spare] = ranks
            self._spares.discard(spare)
            self._retired.add(node)
            self._record(
                "node_replaced", lost=node, spare=spare, first_rank=ranks.start, ranks=len(ranks), unfit=bad
            )
        self._out += self.world.move(ranks, to, self._now)
        if node in self._fit_early and spare is not None:
            self._on_fit(node)
        self._fit_early.discard(node)

    def _on_spare_unfit(self, node: int, reason: str) -> None:
        """A spare cannot go on with the devices that it has: no place for it."""
        if node not in self._spares:
            self.stale["SpareUnfit"] += 1  # it has ranks by now; what its devices cannot do, will show
            return
        self._spares.discard(node)
        self._retired.add(node)
        self._record("spare_unfit", spare=node, reason=reason)

    def _on_fit(self, node: int) -> None:
        """A node that had to give up its ranks can be a spare."""
        if node in self._leaving:
            self._fit_early.add(node)
            return
        if node not in self._retired:
            self.stale["Fit"] += 1
            return
        self._retired.discard(node)
        self._spares.add(node)
        self._welcome(node, 0, spare=True)
        self._record("spare_back", spare=node)
