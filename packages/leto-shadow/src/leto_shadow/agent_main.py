"""The node agent: one per node, started by torchrun in the place of a trainer (paper section 3.4).

    python -m leto_shadow.agent_main --local-ranks N [options] script.py args...

Reads torchrun's RANK (the node), WORLD_SIZE (the number of nodes), MASTER_ADDR, MASTER_PORT and
TORCHELASTIC_RUN_ID; without them it is a job of one node. Exit codes: `leto_shadow.exit_codes`.

Everything a job makes lies in its run directory, ``<tmp>/leto-<uid>/<job_id>/`` (case 17); at the end logs
and events remain, sockets and processes do not (I-7).
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import zmq

from leto_rmp import LimitTooLow
from leto_shadow import control, linux, logs, metrics, oom_hook, telling
from leto_shadow.agent_core import AgentCore
from leto_shadow.agent_options import AgentOptions, parse
from leto_shadow.agent_place import (
    Place,
    UsageError,
    pool_config,
    prepare_run_dir,
    require_descriptors,
    require_nodes,
)
from leto_shadow.agent_shell import AgentShell
from leto_shadow.archive import keep_or_say
from leto_shadow.classify_hook import ClassifyHook
from leto_shadow.control_handler import ControlHandler
from leto_shadow.coordinator_shell import CoordinatorShell
from leto_shadow.devices import Device, open_device
from leto_shadow.drills import Drill, DrillError, load_drills
from leto_shadow.events import EventWriter, read_events
from leto_shadow.exit_codes import KEEPS_MEMORY, ExitCode
from leto_shadow.fired import fired_before
from leto_shadow.helper_process import HelperProcess
from leto_shadow.injector import Injector, begun_before
from leto_shadow.managers import ManagerHost
from leto_shadow.metrics import JobMetrics
from leto_shadow.metrics_server import MetricsServer
from leto_shadow.network import own_address, own_interface
from leto_shadow.processes import trainer_environment
from leto_shadow.reactor import Reactor
from leto_shadow.rendezvous import fetch_keys, publish_keys
from leto_shadow.retirement import why_not_ready
from leto_shadow.schedule import Schedule, ScheduleError, load_schedule, parse_schedule
from leto_shadow.succession import (
    LeftoversError,
    end_leftovers,
    find_managers,
    retired_before,
)
from leto_shadow.trainer_states import TrainerState
from leto_shadow.transport import AgentKeys, AgentSocket, CoordinatorSocket, make_keys

__all__ = ["main"]

_log = logging.getLogger("leto_shadow.agent")

_OF_THE_MACHINE = ("retired", "fit", "node_left")
_FAREWELL_S = 2.0
_LOOK_S = 0.25
_LEFTOVERS_S = 30.0
_ADOPT_S = 30.0
_INJECT_S = 10.0  # for a manager's answer before a schedule's loss of pages; nobody else waits for it


def _why_not_ready(device: Device) -> str:
    """Look at the devices before anybody counts on them; return why they cannot be used."""
    found = device.survey()
    while (facts := found()) is None:  # it has a deadline
        time.sleep(0.02)  # there is no poll set yet
    return why_not_ready(facts)


class _Signals:
    """SIGTERM and SIGINT as events of the poll set."""

    def __init__(self, reactor: Reactor) -> None:
        self.received = 0
        self._read, self._write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(self._write)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._note)
        reactor.watch(self._read, lambda _events: self._drain())

    def _note(self, number: int, _frame: object) -> None:
        self.received = self.received or number

    def _drain(self) -> None:
        os.read(self._read, 64)


def _tell(event: Mapping[str, Any]) -> None:
    """On the terminal, also where the log is full; with JSON lines every event that is written is one."""
    if (words := telling.told(event)) is not None:
        _log.info("%s", words)


class Agent:
    """All parts of one agent put together."""

    def __init__(
        self,
        options: AgentOptions,
        place: Place,
        run_dir: Path,
        drills: tuple[Drill, ...],
        schedule: Schedule | None = None,
    ) -> None:
        self.place = place
        self.run_dir = run_dir
        self.reactor = Reactor()
        self.coordinator: CoordinatorShell | None = None
        self._keys_store: object = None
        self._launcher: int | None = None
        hook, shadow_level, why = oom_hook.choose(options.backend, options.policy.shadow_level, os.environ)
        under_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        interface = own_interface(place.master) if place.nodes > 1 else None
        given = "GLOO_SOCKET_IFNAME" in os.environ
        self._gloo = {} if given or interface is None else {"GLOO_SOCKET_IFNAME": interface}
        self._keep = options.keep
        self._unwritten = 0
        self._metrics: JobMetrics | None = None
        self._json = options.log_format == "json"
        self._next_look = 0.0
        pool = pool_config(options)
        device = open_device(options.backend, options.local_ranks)
        # A start that fails late leaves no more behind than one that fails early.
        with contextlib.ExitStack() as undo:
            undo.callback(device.close)
            self._control = control.ControlServer(run_dir / f"agent-{place.node}.sock", self._on_request)
            undo.callback(self._control.close)
            self._events = EventWriter(run_dir / "events.jsonl")
            undo.callback(self._events.close)
            if why:
                self.record("shadows_limited", level=shadow_level, reason=why)
                _log.warning("node %d: %s", place.node, why)
            self._metrics_server = self._start_metrics(options, undo)
            self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
            undo.callback(self._context.destroy, linger=0)
            end_leftovers(run_dir, _LEFTOVERS_S)
            log = read_events(self._events.path) if under_torchrun else []
            since = linux.started_unix(place.parent) if under_torchrun else 0.0
            keys = self._find_keys(options, undo)
            core = AgentCore(
                place.node,
                options.local_ranks,
                socket.gethostname(),
                options.policy.deadlines,
                drills,
                self.reactor.now,
                shadow_level,
                succession=under_torchrun,
                coordinates=place.node == 0,
                cold_spares=options.cold_spares,
                fired=fired_before(log, since),
            )
            self._backend = options.backend
            self.shell = AgentShell(
                core,
                session=f"{place.node}-{os.getpid()}-{secrets.token_hex(8)}",
                socket=AgentSocket(self._context, place.node, keys),
                managers=ManagerHost(
                    run_dir,
                    place.job_id,
                    pool,
                    place.parent if under_torchrun else None,
                    options.policy.deadlines.grace_s,
                ),
                device=device,
                reactor=self.reactor,
                command=options.command,
                environment=self._trainer_environment,
                run_dir=run_dir,
                record=self.record,
                other_children=set() if self.coordinator is None else self.coordinator.children,
                hook=hook,
                succession=under_torchrun,
            )
            self._handler = ControlHandler(self.shell, self.coordinator, place.job_id, self.reactor)
            self._injector = self._make_injector(Schedule(()) if schedule is None else schedule, first=True)
            self._handler.run_schedule = self._run_schedule
            began = begun_before(log, place.node, self._injector.key, since)
            if began is not None:
                self._injector.resume(began)
                core.schedule_began(began)
            if under_torchrun and (retired := retired_before(log, place.parent, since)) is not None:
                core.retire_again(retired)
            elif place.nodes > options.active_nodes > 0 and (why := _why_not_ready(device)):
                core.retire_again(why, frozenset())
            if self._metrics_server is not None:
                self._handler.metrics_url = self._metrics_server.url
            self.reactor.watch(self._control.fileno(), lambda _events: self._accept())
            self.signals = _Signals(self.reactor)
            if under_torchrun:
                self._adopt(options.policy.deadlines.grace_s, undo)
                self.shell.inherit_progress()
                self._launcher = os.pidfd_open(place.parent)
                self.reactor.watch(self._launcher, lambda _events: self._on_launcher_gone())
            undo.pop_all()

    def _adopt(self, grace_s: float, undo: contextlib.ExitStack) -> None:
        """Take over what a dead agent of this torchrun left, before anybody hears of us."""
        found, problems = find_managers(self.run_dir, self.place.job_id, self.place.parent, grace_s, _ADOPT_S)
        for rank, manager in found.items():
            undo.callback(manager.leave)
            self.shell.hold(rank, manager)
        for problem in problems:
            _log.warning("node %d: %s", self.place.node, problem)

    def _make_injector(self, schedule: Schedule, *, first: bool = False) -> Injector:
        """``first``: the one that the job was started with, whose clock is the job's."""
        core = self.shell.agent

        def elapsed() -> float | None:
            return None if core.trains_since is None or not first else self.reactor.now - core.trains_since

        def training(rank: int) -> bool:
            trainer = core.active_of(rank)
            return trainer is not None and trainer.state is TrainerState.TRAINING and trainer.fired_at is None

        def standing(rank: int) -> bool:
            shadows = (one for one in core.trainers.values() if one.rank == rank and one.generation is None)
            return any(one.level >= core.shadow_level for one in shadows)

        return Injector(
            schedule,
            partial(self._handler.inject, patience_s=_INJECT_S),
            lambda: core.ranks,
            training,
            self.record,
            standing,
            core.fired,
            lambda what: self.shell.carry(core.fires(what, self.reactor.now)),
            elapsed,
        )

    def _run_schedule(self, text: bytes) -> control.Reply:
        """Begin a schedule in the middle of a job."""
        if self._injector.left:
            return control.Reply(False, f"a schedule with {self._injector.left} injections left is running")
        try:
            schedule = parse_schedule(text, world_size=self.shell.agent.world_size)
        except ScheduleError as error:
            return control.Reply(False, str(error))
        self._injector = self._make_injector(schedule)
        return control.Reply(True, f"{self._injector.left} injections")

    def _start_metrics(self, options: AgentOptions, undo: contextlib.ExitStack) -> MetricsServer | None:
        if options.metrics_port is None:
            return None
        if not metrics.available():
            raise UsageError(metrics.INSTALL)
        self._metrics = JobMetrics(self.place.job_id, self.place.node)
        where = f"--metrics-address {options.metrics_address} --metrics-port {options.metrics_port}"
        try:
            server = MetricsServer(self._metrics.registry, options.metrics_address, options.metrics_port)
        except OSError as error:
            raise UsageError(f"{where}: {error.strerror or error}") from error
        undo.callback(server.close)
        self.record("metrics_listening", address=server.address, port=server.port)
        _log.info("node %d: metrics at %s", self.place.node, server.url)
        return server

    def _look(self) -> None:
        """Let the metrics have a look, now and then."""
        if self._metrics is not None and self.reactor.now >= self._next_look:
            self._next_look = self.reactor.now + _LOOK_S
            self._metrics.look(self.shell.agent)

    def _on_request(self, request: control.Request) -> control.StatusReply | control.Reply:
        return self._handler(request)

    def where(self) -> dict[str, Any]:
        """What a log line of this agent says of its origin."""
        core = self.shell.agent
        return {"job": self.place.job_id, "node": self.place.node, "generation": core.generation}

    def record(self, event: str, **fields: Any) -> None:
        """Write one event of this node. A full disk costs the log, not the training."""
        if event in _OF_THE_MACHINE:  # its number may be another one in the next round
            fields["launcher"] = self.place.parent
        try:
            written = self._events.write(event, node=self.place.node, **fields)
        except (OSError, ValueError) as error:
            if not self._json:
                _tell({"event": event, **fields})
            if not self._unwritten:  # once, not with every iteration
                _log.error("event %r is not in the log, nor what follows for now: %s", event, error)
            self._unwritten += 1
            return
        if self._unwritten:
            _log.error("%d events are not in the log, which goes on", self._unwritten)
            self._unwritten = 0
        if self._metrics is not None:
            self._metrics.observe(written)
        if not self._json:
            _tell(written)
        if self._json and event != "metrics":  # of these there are too many, and they are in events.jsonl
            told = {name: value for name, value in written.items() if name not in ("t", "mono", "node")}
            _log.info("%s", event, extra={"fields": told})

    def _find_keys(self, options: AgentOptions, undo: contextlib.ExitStack) -> AgentKeys:
        if self.place.node == 0:
            return self._make_coordinator(options, undo)
        return fetch_keys(self.place.node, options.policy.deadlines.join_s, self._check_launcher)

    def _check_launcher(self) -> None:
        """Raise if torchrun, which started this process, is gone."""
        if os.getppid() != self.place.parent:
            raise UsageError("torchrun is gone")

    def _make_coordinator(self, options: AgentOptions, undo: contextlib.ExitStack) -> AgentKeys:
        place = self.place
        keys = make_keys(place.nodes)
        router = CoordinatorSocket(self._context, keys)
        host = "127.0.0.1" if place.nodes == 1 else own_address(place.master)
        address = f"tcp://{host}:{router.port}"
        mine, *others = [AgentKeys(address, keys.public, public, secret) for public, secret in keys.clients]
        if others:
            named = dict(enumerate(others, start=1))
            join_s = options.policy.deadlines.join_s
            self._keys_store = publish_keys(named, join_s, self._check_launcher)
        script = Path.cwd() if options.command[0] == "-m" else Path(options.command[0]).absolute().parent
        helper = HelperProcess(options.decide, script, self.run_dir / "logs" / "helper.log")
        undo.callback(helper.end)
        make_hook = None
        if (hook := options.classify_hook) is not None:
            log = self.run_dir / "logs" / "classify_hook.log"

            def make_hook(answered: Callable[[int, str, str], None], children: set[int]) -> ClassifyHook:
                return ClassifyHook(hook, script, log, self.reactor, answered, children)

        self.coordinator = CoordinatorShell(
            place.nodes,
            options.policy,
            router,
            helper,
            host,
            self.reactor,
            self.record,
            options.active_nodes,
            make_hook,
        )
        return mine

    def _trainer_environment(self, rank: int) -> dict[str, str]:
        core = self.shell.agent
        place = {"LETO_RANK": str(rank)} if rank >= 0 else {}  # a spare's trainer gets its rank later
        return trainer_environment(
            os.environ,
            {
                **place,
                "LETO_WORLD_SIZE": str(core.world_size),
                "LETO_LOCAL_RANK": str(rank - core.ranks.start if rank >= 0 else -1 - rank),
                "LETO_LOCAL_WORLD_SIZE": str(core.local_ranks),
                "LETO_NODE_RANK": str(self.place.node),
                "LETO_RUN_DIR": str(self.run_dir),
                "LETO_JOB_ID": self.place.job_id,
                "LETO_BACKEND": self._backend,
                logs.LOG_FORMAT_VARIABLE: "json" if self._json else "text",
                **self._gloo,
            },
        )

    def _accept(self) -> None:
        fd = self._control.accept()
        if fd is not None:
            self._watch_client(fd, zmq.POLLIN)

    def _watch_client(self, fd: int, events: int) -> None:
        def ready(_events: int) -> None:
            self.reactor.forget(fd)
            if self._control.serve(fd):
                self._watch_client(fd, zmq.POLLOUT if self._control.wants_to_write(fd) else zmq.POLLIN)

        self.reactor.watch(fd, ready, events)

    def run(self) -> int:
        """Run until the job is over; return the exit code."""
        self.shell.start()
        while True:
            self.reactor.turn(min(self.shell.pause_s, self._injector.due_s))
            self.shell.tick()
            if self.coordinator is not None:
                self.coordinator.tick()
            self._injector.tick()
            self._look()
            for fd in self._control.expire():
                self.reactor.forget(fd)
            if self.signals.received:
                self._on_signal(self.signals.received)
            if self.shell.exit is not None:
                return self._farewell(self.shell.exit.exit_code, self.shell.exit.reason)

    def _on_launcher_gone(self) -> None:
        """Without torchrun nobody owns this job any more (I-7)."""
        self._forget_launcher()
        self._stop(ExitCode.AGENT_LOST, "torchrun is gone")

    def _forget_launcher(self) -> None:
        if self._launcher is not None:
            self.reactor.forget(self._launcher)
            os.close(self._launcher)
            self._launcher = None

    def _on_signal(self, number: int) -> None:
        code = ExitCode.INTERRUPTED if number == signal.SIGINT else ExitCode.TERMINATED
        self._stop(code, f"stopped by {signal.Signals(number).name}")

    def _stop(self, code: ExitCode, reason: str) -> None:
        if self.coordinator is not None:
            self.coordinator.stop(code, reason)
        else:
            self.shell.carry(self.shell.agent.stop(code, reason, self.reactor.now))

    def _farewell(self, exit_code: int, reason: str) -> int:
        """Nothing is left on this node: see that the others know, within bounds."""
        deadline = self.reactor.now + (30.0 if self.coordinator is not None else _FAREWELL_S)
        while self.reactor.now < deadline:
            if self.coordinator is not None:
                if self.coordinator.done is not None:
                    break
                self.coordinator.tick()
            elif self.shell.link_idle:
                break
            self.reactor.turn(0.02)
            self.shell.tick()
        if exit_code != ExitCode.FINISHED:
            _log.error("node %d: %s (exit code %d)", self.place.node, reason, exit_code)
        if exit_code == ExitCode.NODE_UNFIT:
            self._leave_torchrun(exit_code, reason)
        return exit_code

    def _leave_torchrun(self, exit_code: int, reason: str) -> None:
        """Have torchrun end in the one way that leaves the rendezvous, and so the other nodes, alone."""
        self.record("node_left", exit_code=exit_code, reason=reason)
        if self._launcher is not None:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)  # we are ending already
            signal.pidfd_send_signal(self._launcher, signal.SIGTERM)

    def close(self) -> None:
        """Leave nothing behind but logs and events; and, if torchrun may start another agent, the memory."""
        succession = self._launcher is not None
        self._forget_launcher()
        if self._metrics_server is not None:
            self._metrics_server.close()
        ended = None if self.shell.exit is None else self.shell.exit.exit_code
        self.shell.close(keep_memory=succession and (ended is None or ended in KEEPS_MEMORY))
        if self.coordinator is not None:
            self.coordinator.close()
        self._control.close()
        self._context.term()
        self._events.close()
        if self._keep is not None:
            keep_or_say(self.run_dir, self._keep, self.place.job_id, self.place.node)


def main(argv: list[str] | None = None) -> int:
    """Run one agent; return its exit code."""
    options = parse(sys.argv[1:] if argv is None else argv)
    logs.set_up(options.log_format, dict)
    try:
        place = Place.read(os.environ, options.job_id)
        drills = load_drills(options.drills) if options.drills is not None else ()
        schedule = load_schedule(options.injections) if options.injections is not None else None
        require_nodes(options.active_nodes, place)
        require_descriptors(options.local_ranks, place)
        run_dir = prepare_run_dir(options.run_dir, place.job_id)
        linux.become_subreaper()
        agent = Agent(options, place, run_dir, drills, schedule)
        logs.set_up(options.log_format, agent.where)
    except (UsageError, DrillError, ValueError, control.ControlError, LimitTooLow, OSError) as error:
        _log.error("cannot start: %s", error)
        return ExitCode.USAGE
    except LeftoversError as error:
        _log.error("cannot start: %s (exit code %d)", error, ExitCode.CANNOT_FENCE)
        return ExitCode.CANNOT_FENCE
    started = time.monotonic()
    try:
        return agent.run()
    except Exception as error:  # noqa: BLE001 - the last resort: say what happened, then clean up
        traceback.print_exc()
        agent.record(
            "internal_error", error=f"{type(error).__name__}: {error}", after_s=time.monotonic() - started
        )
        return ExitCode.INTERNAL
    finally:
        agent.close()


if __name__ == "__main__":
    sys.exit(main())
