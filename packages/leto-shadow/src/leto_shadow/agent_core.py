"""The node agent without I/O: managers and trainers of one node, for the coordinator (paper section 3.4).

It takes messages of the coordinator and of trainers, ends of processes and the time, and returns values that
the shell (`leto_shadow.agent_main`) carries out. It is built in layers: `agent_state`, `agent_spares`,
`agent_memory`, `agent_survivors`, `agent_processes`, and here the coordinator's messages, an operator's
wishes and time.

Upheld here: I-4 (`Fenced` is sent only when every promoted process of an older generation is gone, with its
whole process tree, or has provably given up writing), I-7 (at shutdown `Bye` and the end come only when no
process is left); messages of an older generation are dropped and counted (case 7).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from leto_shadow import messages as m
from leto_shadow import wire
from leto_shadow.agent_actions import (
    AgentAction,
    CheckDevices,
    FenceManager,
    KillTrainer,
    RepairRank,
    Tell,
)
from leto_shadow.agent_processes import AgentProcesses
from leto_shadow.agent_state import KILL_AGAIN_S
from leto_shadow.drills import Lose
from leto_shadow.exit_codes import ExitCode
from leto_shadow.fired import of_drill
from leto_shadow.node_managers import ManagerStatus
from leto_shadow.operability import DeviceFacts
from leto_shadow.retirement import SPARE_CHECK_S, Retirement, why_not_ready
from leto_shadow.trainer_states import TrainerState

__all__ = ["AgentCore", "ManagerStatus"]

_ENDING_S = 0.02  # after its channel, where no GPU is


class AgentCore(AgentProcesses):
    """State of one node. ``drills`` are those of the whole job; each rank gets its own unfired ones.

    ``succession``: if this agent fails, another one may be started in its place and take over its managers.
    ``coordinates``: its process runs the job's coordinator as well, and stays as long as the job.
    """

    def hold(self, held: m.Held, socket: str) -> None:
        """A dead agent's manager was found and taken over; before `start`."""
        self._held.append(held)
        self.managers.hold(held.rank, held.epoch, socket)

    def reached(self, iterations: Mapping[int, int]) -> None:
        """Trainers of dead agents had come so far, by rank; before `start`."""
        self._reached.update(iterations)

    def retire_again(self, reason: str, after_xid: frozenset[str] | None = None) -> None:
        """The devices cannot be used: the agent before had to give up its ranks, and they were not repaired
        (then nobody knows any more what was wrong), or they were just looked at; before `start`."""
        self._unfit_before, self._xids_before = reason, after_xid

    def start(self) -> list[AgentAction]:
        """Report in."""
        return [
            Tell(
                m.Join(
                    self.node,
                    self.local_ranks,
                    self._host,
                    shadow_level=self.shadow_level,
                    held=tuple(self._held),
                    reached=tuple(sorted(self._reached.items())),
                    unfit=self._unfit_before,
                    fired=tuple(sorted(self.fired)),
                    trained_s=None if self.trains_since is None else self._now - self.trains_since,
                )
            )
        ]

    def receive(self, message: m.ToAgent | m.Beat, now: float) -> list[AgentAction]:
        """Take one message of the coordinator."""
        self._now = self._heard = now
        if self.ending is not None or isinstance(message, m.Beat):
            return self._flush()
        if getattr(message, "generation", self.generation) < self.generation or (
            getattr(message, "epoch", self.epoch) < self.epoch
        ):
            self.stale[type(message).__name__] += 1
            return self._flush()
        match message:
            case m.Welcome(first_rank=first, world_size=world_size, beat_s=beat_s, spare=spare):
                self.beat_s = beat_s
                self._note_fired(message)
                self.ranks = range(0) if spare else range(first, first + self.local_ranks)
                self.world_size = world_size
                self._out += self.managers.settle(self.ranks)
                if self.ranks:
                    self.retirement = None
                self._is_spare = spare
                self._warm_up()
            case m.StartManagers(epoch=epoch):
                self._start_managers(epoch)
            case m.Adopt():
                self._adopt(message)
            case m.SpawnShadow():
                self._spawn(message)
            case m.AdvanceShadow():
                self._advance(message)
            case m.DiscardShadow(sid=sid):
                trainer = self.trainers.get(sid)
                if trainer is not None:
                    trainer.discarded = True
                    self._kill(trainer)
            case m.Fence(generation=generation):
                self.generation = generation
                self._fence_owed = True
                self._repairing.clear()
                self._end_older(message)
                self._maybe_fenced()
            case m.Repair():
                self._repair(message)
            case m.Promote():
                self._promote(message)
            case m.Decide(generation=generation, payload=payload):
                for trainer in self.trainers.values():
                    if trainer.generation == generation and trainer.state is TrainerState.EXCHANGED:
                        trainer.state = TrainerState.RESUMING
                        self._tell_trainer(trainer, wire.Decision(payload, generation))
            case m.Retire(generation=generation, reason=reason):
                self._retire(generation, reason)
            case m.Shutdown(exit_code=exit_code, reason=reason):
                self._shut_down(exit_code, reason)
        return self._flush()

    def _note_fired(self, welcome: m.Welcome) -> None:
        """Ranks of another node may come with this: what struck there has struck."""
        self.fired.update(welcome.fired)
        self._drills = {one: drill for one, drill in self._drills.items() if of_drill(one) not in self.fired}
        if welcome.trained_s is not None:
            self.trains_since = self._now - welcome.trained_s

    def fires(self, what: str, now: float) -> list[AgentAction]:
        """An injection is about to be carried out."""
        self._now = now
        self._fires(what)
        return self._flush()

    def schedule_began(self, began: float) -> None:
        """A dead agent's schedule had begun then; before `start`."""
        self.trains_since = began

    def _start_managers(self, epoch: int) -> None:
        assert not self._older(), "managers are replaced only after the fence"
        self.epoch = epoch
        self._losses.clear()  # what a drill wanted to lose is gone with its manager
        self._suspects.clear()
        self._out += self.managers.replace(epoch, self.ranks)

    def _retire(self, generation: int, reason: str) -> None:
        """Another node gets our ranks: end what is left of them, and see whether the devices recover."""
        assert not self._older(), "a node retires only after the fence"
        self.generation, self._retired_owed = generation, True
        if self.retirement is not None:
            self._maybe_retired()  # it is asked again, in a newer generation
            return
        if self._unfit_before:
            self.retirement = Retirement(reason, self._now, self._xids_before)
        else:
            seen = self._last_unfit.values()
            self.retirement = Retirement.begin(reason, self._now, seen, self._injected_until)
        self._last_unfit.clear()
        self._note("retired", ranks=list(self.ranks), reason=reason)
        self.ranks = range(0)
        for trainer in self._alive():
            trainer.discarded = True
            self._kill(trainer)
        self._losses.clear()
        self._out += self.managers.settle(self.ranks)
        self._maybe_retired()

    def _look_at_devices(self) -> None:
        retired = self.retirement
        if retired is None:
            self._look_ahead()
            return
        if self.ending is not None or not self._nothing_left:
            return  # it gives its place away first, however little time there is for a repair
        if retired.due(self._now):
            retired.look()
            self._out.append(CheckDevices())
        elif not retired.asked and self._now < retired.injected_until:
            self._maybe_leave(retired)

    def _look_ahead(self) -> None:
        """A spare sees now and then whether it could take a place."""
        waits = self._is_spare and self.ending is None and not self._looks_ahead
        if waits and self._now >= self._next_look_ahead:
            self._looks_ahead = True
            self._out.append(CheckDevices(anew=False))

    def _looked_ahead(self, found: Sequence[DeviceFacts]) -> None:
        self._looks_ahead, self._next_look_ahead = False, self._now + SPARE_CHECK_S
        reason = why_not_ready(found) if self._is_spare else ""
        if not reason:
            return
        self._is_spare = False
        self.retirement = Retirement(reason, self._now, frozenset())
        self._note("retired", ranks=[], reason=reason)
        self._tell(m.SpareUnfit(reason))
        for trainer in self._alive():  # so that its devices can be reset
            trainer.discarded = True
            self._kill(trainer)

    def _maybe_leave(self, retired: Retirement) -> None:
        """Nobody has repaired the devices: after a while the node leaves the job."""
        heal_s = self._deadlines.heal_s
        if self._now - retired.since > heal_s and not self.coordinates:
            found = retired.found or retired.reason
            self._shut_down(ExitCode.NODE_UNFIT, f"not repaired within {heal_s:.0f} s: {found}")

    def devices_checked(self, found: Sequence[DeviceFacts], now: float) -> list[AgentAction]:
        """What was seen of the node's devices; nothing where there is nothing to judge."""
        self._now = now
        retired = self.retirement
        if self.ending is not None:
            pass
        elif retired is None:
            self._looked_ahead(found)
        elif retired.checked(found, now):
            self.retirement, self._unfit_before = None, ""
            self._note("fit", after_s=now - retired.since)
            self._tell(m.Fit(self.node))
        else:
            self._maybe_leave(retired)
        return self._flush()

    def _adopt(self, message: m.Adopt) -> None:
        self.generation, self.epoch = message.generation, message.epoch
        self._fence_owed = True
        self._suspects.update(self.ranks)  # nobody saw how the trainers ended
        self._unfenced = set(self.ranks)
        for rank in self.ranks:
            if self.managers[rank].status is ManagerStatus.UP:
                self._out.append(FenceManager(rank, message.epoch, message.generation))
            else:
                self._tell(m.ManagerFailed(rank, message.epoch, "it ended before it was taken over"))
                self._unfenced.discard(rank)
        self._maybe_fenced()

    def _advance(self, message: m.AdvanceShadow) -> None:
        trainer = self.trainers.get(message.sid)
        if trainer is None or trainer.state not in (TrainerState.STARTING, TrainerState.SHADOW):
            return  # it failed, and the report of that is on its way
        trainer.world, trainer.asked = message.world, message.level
        trainer.level = min(trainer.level, message.level)
        where = (message.store_host, message.store_port)
        self._tell_trainer(trainer, wire.Advance(message.level, message.world, *where, message.waits))

    def _repair(self, message: m.Repair) -> None:
        if not self.managers.all_up(self.epoch, self.ranks):
            return  # ManagerFailed has been sent; it makes this failure fatal
        self._repairing = set(self.ranks)
        self._lost_pages = 0
        for rank in self.ranks:
            losses = tuple(self._losses.pop(rank, ()))
            read = rank in self._suspects
            self._out.append(RepairRank(rank, message.generation, message.epoch, losses, read))
        self._suspects.clear()

    def _promote(self, message: m.Promote) -> None:
        self.generation = message.generation
        assert not self._older(), "I-4: an older generation is alive on this node"
        shadows = {
            t.rank: t for t in self._alive() if t.generation is None and not t.discarded and not t.reserved
        }
        for rank in self.ranks:
            trainer, manager = shadows.get(rank), self.managers[rank]
            if trainer is None:
                # Its ShadowFailed crossed the promotion on the wire.
                self._active_failed(rank, self.generation, "the shadow died before it was promoted")
                continue
            trainer.generation = message.generation
            ready = trainer.state is TrainerState.SHADOW and trainer.level == 3
            if not ready or trainer.world != message.world or manager.status is not ManagerStatus.UP:
                trainer.error = trainer.error or "the shadow or its manager was lost at promotion"
                self._kill(trainer, failed=True)
                continue
            trainer.state = TrainerState.PROMOTED
            drills = tuple(drill for drill in self._drills.values() if drill.rank == rank)
            self._tell_trainer(
                trainer,
                wire.Promote(
                    message.generation, manager.socket, message.world, drills, self._hints.get(rank, {})
                ),
            )

    def inject_lose(self, rank: int, lose: Lose, seed: int, now: float) -> list[AgentAction]:
        """Kill the active trainer of ``rank`` and lose pages before the localization that follows."""
        self._losses.setdefault(rank, []).append(("inject", lose, seed))
        return self.inject_kill(rank, now)

    def inject_hang(self, rank: int, now: float) -> list[AgentAction]:
        """Have the active trainer keep its GIL for ever."""
        self._now = now
        trainer = self.active_of(rank)
        if trainer is not None:
            trainer.fired_at = now
            self._tell_trainer(trainer, wire.Inject("hang"))
        return self._flush()

    def inject_fatal(self, rank: int, xid: int, now: float, heals_s: float | None = 0.0) -> list[AgentAction]:
        """Kill the active trainer, and have its device report an Xid that it did not have.

        ``heals_s``: so long the device cannot be used (None: never again), if the node loses its place.
        """
        self._injected_until = math.inf if heals_s is None else now + heals_s
        trainer = self.active_of(rank)
        if trainer is not None:
            trainer.facts = DeviceFacts("injected", xids=(xid,), injected=True)
        return self.inject_kill(rank, now)

    def inject_kill(self, rank: int, now: float) -> list[AgentAction]:
        """Kill the active trainer as an accident would: the agent learns of it through its pidfd."""
        self._now = now
        trainer = self.active_of(rank)
        if trainer is not None:
            trainer.fired_at = now
            self._out.append(KillTrainer(trainer.sid))
        return self._flush()

    def tick(self, now: float) -> list[AgentAction]:
        """Let time pass: overdue exits, a silent coordinator."""
        self._now = now
        for trainer in self.trainers.values():
            if trainer.kill_at is not None and now >= trainer.kill_at and not self._overdue(trainer):
                trainer.kill_at = now + KILL_AGAIN_S
                self._out.append(KillTrainer(trainer.sid))
        for trainer in self._alive():
            if trainer.hung_up_at is not None and now - trainer.hung_up_at >= _ENDING_S:
                self._report_hung_up(trainer)
        self._look_at_devices()
        self._warm_up()
        if self.ending is None and now - self._heard > self._deadlines.agent_s:
            self._shut_down(
                ExitCode.AGENT_LOST, f"the coordinator has been silent for {now - self._heard:.0f} s"
            )
        return self._flush()

    def stop(self, exit_code: int, reason: str, now: float) -> list[AgentAction]:
        """End this node from here (a signal, a lost coordinator)."""
        self._now = now
        if self.ending is None:
            self._shut_down(exit_code, reason)
        return self._flush()
