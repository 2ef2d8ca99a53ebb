"""The agent's shell: carries out what `leto_shadow.agent_core` decides, and tells it what happens.

One thread, one poll set. Owns every process of the node: pidfds say when one ends, and nothing is reported as
ended before its whole tree is gone (I-4, I-7).
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import zmq

from leto_rmp import AdoptedManager, RmpError
from leto_shadow import agent_actions as todo
from leto_shadow import linux, wire
from leto_shadow import messages as m
from leto_shadow.agent_core import AgentCore
from leto_shadow.devices import Device
from leto_shadow.drills import Lose
from leto_shadow.exit_codes import KEEPS_MEMORY
from leto_shadow.link import Link, decode_frame, encode_frame
from leto_shadow.managers import ImpossibleLossError, ManagerHost
from leto_shadow.oom_protocol import Ask, encode_answer
from leto_shadow.operability import DeviceFacts, judge
from leto_shadow.processes import TrainerProcess
from leto_shadow.reactor import Reactor
from leto_shadow.repairs import Repairs
from leto_shadow.succession import find_progress, progress_file, trainer_tag
from leto_shadow.trainer_states import TrainerRecord, TrainerState
from leto_shadow.transport import AgentSocket

__all__ = ["AgentShell"]

_SETTLE_S = 0.5  # after a process is gone: how long the driver may take to count its memory as free
_log = logging.getLogger("leto_shadow.agent")

_MANAGER_S = 10.0
_FENCE_S = 10.0
ASK_S = 10.0  # for a look at a manager on an operator's behalf: below the patience of `control.ask`


def _role(record: TrainerRecord) -> str:
    if record.rank < 0:
        return "spare"
    return "shadow" if record.generation is None else "active"


class AgentShell:
    """Event loop half of one agent. ``record(event, **fields)`` writes the event log."""

    def __init__(
        self,
        agent: AgentCore,
        session: str,
        socket: AgentSocket,
        managers: ManagerHost,
        device: Device,
        reactor: Reactor,
        command: Sequence[str],
        environment: Callable[[int], dict[str, str]],
        run_dir: Path,
        record: Callable[..., Any],
        other_children: set[int],
        hook: Path | None = None,
        *,
        succession: bool = False,
    ) -> None:
        self.agent = agent
        self._succession = succession
        self._inherited: list[Path] = []
        self._leaving = False
        self.exit: todo.Exit | None = None
        self._link = Link(session)
        self._socket = socket
        self._managers = managers
        self._device = device
        self._repairs = Repairs(device, managers, record)
        self._reactor = reactor
        self._command = command
        self._environment = environment
        self._run_dir = run_dir
        self._record = record
        self._other_children = other_children
        self._hook = hook
        self._trainers: dict[int, TrainerProcess] = {}
        self._collected: set[int] = set()
        self._queue: deque[todo.AgentAction] = deque()
        self._carrying = False
        self._next_beat = 0.0
        self._checking: Callable[[], tuple[DeviceFacts, ...] | None] | None = None
        reactor.watch(socket.dealer, lambda _events: self._receive())

    @property
    def link_idle(self) -> bool:
        """True when the coordinator has acknowledged everything."""
        return self._link.idle

    # --- what happens -----------------------------------------------------------------------------

    def start(self) -> None:
        self.carry(self.agent.start())

    def _receive(self) -> None:
        for data in self._socket.receive():
            for payload in self._link.receive(decode_frame(data)):
                self.carry(self.agent.receive(m.decode_to_agent(payload), self._reactor.now))

    def tick(self) -> None:
        """Read progress, finish collecting the dead, repeat frames, beat."""
        now = self._reactor.now
        self._report_gone()
        self._read_progress()
        self._hear_of_devices()
        self._forget_inherited()
        self.carry(self.agent.tick(now))
        for frame in self._link.poll(now):
            self._socket.send(encode_frame(frame))
        if now >= self._next_beat and not self.agent.done:
            self._next_beat = now + self.agent.beat_s
            beat = m.encode(self.agent.beat(self._reactor.moment, self._reactor.lost_since))
            self._socket.send(encode_frame(self._link.bare(beat)))

    def _hear_of_devices(self) -> None:
        if self._checking is not None and (found := self._checking()) is not None:
            self._checking = None
            self.carry(self.agent.devices_checked(found, self._reactor.now))

    def _read_progress(self) -> None:
        for sid, process in self._trainers.items():
            progress = process.progress()
            if progress is not None:
                self.agent.progress(
                    sid,
                    phase=int(progress.phase),
                    waiting=progress.waiting,
                    iteration=progress.iteration,
                    counter=progress.counter,
                    changed_s=progress.monotonic_ns / 1e9,
                )

    @property
    def pause_s(self) -> float:
        """How long the loop may wait for events."""
        if self.agent.awaits_survivors:
            return 0.005
        return 0.01 if self._collected or self.agent.watches_an_end else 0.05

    def _on_channel(self, sid: int, events: int) -> None:
        process = self._trainers[sid]
        if events & zmq.POLLOUT:
            process.flush()
        if events & (zmq.POLLIN | zmq.POLLERR):
            fd = process.channel_fd
            self._take(process)
            if process.channel_fd is None:
                self._reactor.forget(fd)
                self._on_hang_up(process)
        self._watch_channel(process)

    def _on_hang_up(self, process: TrainerProcess) -> None:
        # Of others it is no news, and a device that is busy with their ends may take its time to answer.
        if self.agent.is_active(process.sid):
            facts = self._device.facts(process.rank)
            self.carry(self.agent.trainer_hung_up(process.sid, facts, self._reactor.now))

    def _take(self, process: TrainerProcess) -> bool:
        try:
            messages = process.read()
        except wire.FrameError as error:
            messages = [wire.Failed("protocol", f"garbage on the agent's channel: {error}")]
            self._reactor.forget(process.channel_fd)
            process.hang_up()
        for message in messages:
            self.carry(self.agent.trainer_says(process.sid, message, self._reactor.now))
            if isinstance(message, wire.LevelReached):
                self._record_footprint(process, message)
        return bool(messages)

    def _record_footprint(self, process: TrainerProcess, reached: wire.LevelReached) -> None:
        level, parked = reached.level, reached.parked_bytes
        measured = self._device.footprint(process.rank, process.pid)
        if measured or parked:
            more = {**measured, "parked_bytes": parked}
            self._record("shadow_memory", rank=process.rank, pid=process.pid, level=level, **more)
        if "bytes" in measured or parked:
            held = int(measured.get("bytes", 0))
            self.carry(self.agent.footprint(process.sid, level, held, self._reactor.now))

    def _watch_channel(self, process: TrainerProcess) -> None:
        fd = process.channel_fd
        if fd is not None:
            events = zmq.POLLIN | (zmq.POLLOUT if process.wants_to_write else 0)
            self._reactor.watch(fd, lambda ready: self._on_channel(process.sid, ready), events)

    def _on_hook(self, sid: int) -> None:
        process = self._trainers[sid]
        fd = process.hook_fd
        try:
            messages = process.read_hook()
        except ValueError as error:
            messages = []
            self._record("hook_lost", rank=process.rank, detail=str(error))
        if process.hook_fd is None and fd is not None:
            self._reactor.forget(fd)
        for message in messages:
            if isinstance(message, Ask):
                self.carry(self.agent.hook_asks(sid, message, self._reactor.now))
            else:
                self.carry(self.agent.hook_reports(sid, message, self._reactor.now))

    def _on_trainer_end(self, sid: int) -> None:
        process = self._trainers[sid]
        if process.hook_fd is not None:
            self._on_hook(sid)
        if process.hook_fd is not None:
            self._reactor.forget(process.hook_fd)
        self._read_progress()  # where it stood when it died
        self._reactor.forget(process.pidfd)
        fd = process.channel_fd
        while self._take(process):
            pass  # its last words come before its end
        if fd is not None:
            self._reactor.forget(fd)
        process.hang_up()
        process.collect()
        self._collected.add(sid)  # reported at the end of this turn, together with others that end now

    def _report_gone(self) -> None:
        """Report the trainers of which nothing is left. Their devices are looked at first, all at once: a
        fence waits for that."""
        ended = [self._trainers[sid] for sid in sorted(self._collected)]
        gone = [process for process in ended if process.leftovers_gone(self._owned())]
        if not gone:
            return
        for process in gone:
            self._device.ended(process.rank, process.pid)
        facts = self._device.facts_of([process.rank for process in gone])
        for process in gone:
            self._report_one_gone(process, facts.get(process.rank))

    def _report_one_gone(self, process: TrainerProcess, facts: DeviceFacts | None) -> None:
        sid = process.sid  # it may have got another one since it ended
        self._collected.discard(sid)
        del self._trainers[sid]
        explained = bool(self.agent.trainers[sid].error)
        how, clean = process.how(with_output=not explained), process.status == 0
        self._close(process)
        self.carry(self.agent.trainer_gone(sid, how, clean, self._reactor.now, facts, status=process.status))

    def _close(self, process: TrainerProcess) -> None:
        """If another agent may be started in our place, it will want to know how far they had come."""
        ending = self.agent.ending
        kept = process.close(
            keep_progress=self._leaving or (ending is not None and ending.exit_code in KEEPS_MEMORY)
        )
        if kept is not None:
            self._inherited.append(kept)

    def _owned(self) -> set[int]:
        """Children that have an owner who collects them."""
        trainers = {one.pid for one in self._trainers.values()}
        return trainers | self._managers.pids() | self._device.pids | self._other_children

    def _on_manager_end(self, rank: int, epoch: int, pidfd: int) -> None:
        self._read_progress()
        self._reactor.forget(pidfd)
        how = self._managers.end(rank)
        self.carry(self.agent.manager_gone(rank, epoch, how, self._reactor.now))

    # --- what to do -------------------------------------------------------------------------------

    def carry(self, actions: Sequence[todo.AgentAction]) -> None:
        """Carry out actions in order, those that they lead to behind them."""
        self._queue.extend(actions)
        if self._carrying:
            return
        self._carrying = True
        try:
            while self._queue:
                self._carry_one(self._queue.popleft())
        finally:
            self._carrying = False

    def _carry_one(self, action: todo.AgentAction) -> None:
        match action:
            case todo.Tell(message=message):
                frame = self._link.send(m.encode(message), self._reactor.now)
                self._socket.send(encode_frame(frame))
            case todo.Note(event=event, fields=fields):
                self._record(event, **fields)
            case todo.SpawnTrainer(sid=sid, rank=rank):
                self._spawn(sid, rank)
            case todo.RenameTrainer():
                self._rename(action)
            case todo.KillTrainer(sid=sid):
                process = self._trainers.get(sid)
                if process is not None and sid not in self._collected:
                    process.kill()
            case todo.TellTrainer(sid=sid, message=said):
                process = self._trainers.get(sid)
                if process is not None:
                    process.send(said)
                    self._watch_channel(process)
            case todo.CheckReleased(sid=sid):
                self._check_released(sid)
            case todo.AnswerHook(sid=sid, sequence=sequence, verdict=verdict):
                process = self._trainers.get(sid)
                if process is not None:
                    process.answer_hook(encode_answer(sequence, verdict, _SETTLE_S))
            case todo.CheckDevices(anew=anew):
                self._checking = self._device.recheck() if anew else self._device.survey()
            case todo.StartManager(rank=rank, epoch=epoch):
                self._start_manager(rank, epoch)
            case todo.KillManager(rank=rank, epoch=epoch):
                self._kill_manager(rank, epoch)
            case todo.RepairRank():
                self._repair(action)
            case todo.FenceManager(rank=rank, epoch=epoch, generation=generation):
                self._fence_manager(rank, epoch, generation)
            case todo.Exit():
                self.exit = action

    def _check_released(self, sid: int) -> None:
        process = self._trainers.get(sid)
        if process is None or sid in self._collected:
            return  # it ended, and that is proof enough
        error = linux.why_it_may_write(process.pid)
        if error is None and (orphans := process.orphans(self._owned())):
            error = f"processes {orphans}, which it started, run on without it"
        facts = self._device.facts(process.rank)
        if error is None and facts is not None and not (found := judge(facts)).operable:
            error = f"its device is not operable: {'; '.join(found.reasons)}"
        self._queue.extend(self.agent.released(sid, error, self._reactor.now))

    def _spawn(self, sid: int, rank: int) -> None:
        log = self._log_of(rank)
        tag = trainer_tag(self._run_dir, sid)
        try:
            process = TrainerProcess(
                sid,
                rank,
                self._command,
                self._environment(rank),
                log,
                tag,
                self._hook,
                self._progress_of(rank, sid),
            )
        except OSError as error:
            how = f"cannot start: {error}"
            self._queue.extend(self.agent.trainer_gone(sid, how, False, self._reactor.now))
            return
        self._trainers[sid] = process
        self._reactor.watch(process.pidfd, lambda _events: self._on_trainer_end(process.sid))
        self._watch_channel(process)
        if process.hook_fd is not None:
            self._reactor.watch(process.hook_fd, lambda _events: self._on_hook(process.sid))
        self._queue.extend(self.agent.trainer_spawned(sid, process.pid, self._reactor.now))

    def _log_of(self, rank: int) -> Path:
        name = f"rank{rank}" if rank >= 0 else f"spare{self.agent.node}-{-1 - rank}"
        return self._run_dir / "logs" / f"{name}.log"

    def _progress_of(self, rank: int, sid: int) -> Path | None:
        """Where a trainer's progress outlives us, if there can be somebody whom it tells something."""
        return progress_file(self._run_dir, rank, sid) if self._succession else None

    def _rename(self, action: todo.RenameTrainer) -> None:
        """A spare's trainer has a rank now, and is told."""
        process = self._trainers.pop(action.old)
        self._trainers[action.sid] = process
        if action.old in self._collected:  # it has ended; what is reported is the end of its new name
            self._collected.discard(action.old)
            self._collected.add(action.sid)
        log = self._log_of(action.rank)
        process.take_rank(action.sid, action.rank, log, self._progress_of(action.rank, action.sid))
        process.send(wire.TakeRank(action.rank, str(log)))
        self._watch_channel(process)

    def _start_manager(self, rank: int, epoch: int) -> None:
        try:
            manager = self._managers.start(rank, epoch, device=rank - self.agent.ranks.start)
            self._device.use(rank, self._managers.device_uuid(rank, _MANAGER_S))
        except (RmpError, OSError) as error:
            if self._managers.pid(rank) is not None:
                self._managers.end(rank)
            self._queue.extend(self.agent.manager_gone(rank, epoch, str(error), self._reactor.now))
            return
        self._watch_manager(rank, epoch, manager.pidfd)
        self._record("manager_started", rank=rank, epoch=epoch, pid=manager.pid)
        path = str(manager.socket_path)
        self._queue.extend(self.agent.manager_up(rank, epoch, path, self._reactor.now))

    def inherit_progress(self) -> None:
        """See how far the trainers of dead agents had come; before `start`."""
        reached, self._inherited = find_progress(self._run_dir)
        self.agent.reached(reached)

    def _forget_inherited(self) -> None:
        """Once all ranks train, how far their predecessors had come is of no use any more."""
        active = {t.rank for t in self.agent.trainers.values() if t.state is TrainerState.TRAINING}
        if self._inherited and active and active >= set(self.agent.ranks):
            for path in self._inherited:
                path.unlink(missing_ok=True)
            self._inherited.clear()

    def hold(self, rank: int, manager: AdoptedManager) -> None:
        """A manager was taken over from a dead agent; before `start`."""
        status = manager.status
        self._managers.hold(rank, manager)
        self._watch_manager(rank, status.job_epoch, manager.pidfd)
        self._record("manager_adopted", rank=rank, epoch=status.job_epoch, pid=manager.pid)
        held = m.Held(rank, status.job_epoch, max(status.generation, status.generation_min - 1))
        self.agent.hold(held, str(manager.socket_path))

    def _watch_manager(self, rank: int, epoch: int, pidfd: int) -> None:
        self._reactor.watch(pidfd, lambda _events: self._on_manager_end(rank, epoch, pidfd))

    def _fence_manager(self, rank: int, epoch: int, generation: int) -> None:
        error = None
        try:
            self._managers.fence(rank, generation, _FENCE_S)
            self._device.use(rank, self._managers.device_uuid(rank, _MANAGER_S))
        except (RmpError, OSError, KeyError) as problem:
            error = f"{type(problem).__name__}: {problem}"
        self._queue.extend(self.agent.manager_fenced(rank, epoch, error, self._reactor.now))

    def _kill_manager(self, rank: int, epoch: int) -> None:
        pidfd = self._managers.pidfd(rank)
        if pidfd is not None:
            self._on_manager_end(rank, epoch, pidfd)

    def _repair(self, first: todo.RepairRank) -> None:
        """Carry it out together with those of other ranks that follow it at once."""
        together = {first.rank: first}
        while self._queue and isinstance(following := self._queue[0], todo.RepairRank):
            same = (following.generation, following.epoch) == (first.generation, first.epoch)
            if not same or following.rank in together:
                break
            together[following.rank] = following
            self._queue.popleft()
        for done in self._repairs.run(list(together.values())):
            action = done.action
            self._queue.extend(
                self.agent.repair_done(
                    action.rank,
                    action.generation,
                    action.epoch,
                    done.lost_pages,
                    done.error,
                    self._reactor.now,
                )
            )

    # --- an operator's questions -------------------------------------------------------------------

    def manager_pid(self, rank: int) -> int | None:
        """Pid of the rank's state manager, None while it has none."""
        return self._managers.pid(rank)

    def why_not_lose(self, rank: int, lose: Lose, timeout_s: float = ASK_S) -> str | None:
        """Why these pages of a local rank cannot be lost; None if they can."""
        try:
            self._managers.check_loss(rank, self.agent.generation, lose, timeout_s)
        except ImpossibleLossError as error:
            return str(error)
        except (RmpError, OSError) as error:
            return f"the state manager of rank {rank} does not say what it has: {error}"
        return None

    # --- the end ----------------------------------------------------------------------------------

    def snapshot(self) -> list[dict[str, Any]]:
        """Return one plain dict per living trainer of this node."""
        return [
            {
                "rank": record.rank,
                "role": _role(record),
                "survived": record.survived,
                "state": record.state.value,
                "level": record.level,
                "world": record.world,
                "generation": record.generation,
                "iteration": record.iteration,
                "phase": record.phase,
                "pid": record.pid,
            }
            for record in self.agent.trainers.values()
        ]

    def close(self, timeout_s: float = 10.0, *, keep_memory: bool = False) -> None:
        """Leave nothing behind, whatever state this agent is in: kill, wait, remove.

        ``keep_memory``: but the managers, for an agent that may be started in the place of this one.
        """
        self._reactor.forget(self._socket.dealer)
        self._leaving = keep_memory
        deadline = time.monotonic() + timeout_s
        for process in self._trainers.values():
            process.kill()
        for sid, process in self._trainers.items():
            if sid not in self._collected:
                process.collect()
            while not process.leftovers_gone(self._owned()) and time.monotonic() < deadline:
                time.sleep(0.01)  # the kernel offers no event for the end of a process that we did not start
            self._close(process)
        self._trainers.clear()
        if keep_memory:
            self._managers.leave_all()
        else:
            for path in self._inherited:
                path.unlink(missing_ok=True)
        self._managers.end_all()
        self._device.close()
        self._socket.close()
        with contextlib.suppress(OSError):
            (self._run_dir / "logs").rmdir()  # only if nothing was ever logged
