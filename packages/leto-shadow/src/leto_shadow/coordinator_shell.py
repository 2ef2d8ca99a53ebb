"""The coordinator's shell on node rank 0: its socket and its helper process.

Everything that decides is in `leto_shadow.coordinator`; this module moves bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import zmq

from leto_shadow.actions import AskDecision, AskHook, CloseStore, Done, HostStore, Record
from leto_shadow.classify_hook import ClassifyHook
from leto_shadow.config import JobPolicy, beat_s
from leto_shadow.coordinator import Coordinator
from leto_shadow.exit_codes import ExitCode
from leto_shadow.helper_messages import (
    CloseWorldStore,
    Decided,
    DecideOn,
    HelperMessage,
    HelperRequest,
    OpenWorldStore,
    Ready,
    StoreOpened,
    Unusable,
)
from leto_shadow.helper_process import HelperProcess
from leto_shadow.hub import Hub, HubOutput
from leto_shadow.reactor import Reactor
from leto_shadow.transport import CoordinatorSocket

__all__ = ["CoordinatorShell"]


class CoordinatorShell:
    """Runs a `Hub` in the agent's event loop. ``host`` is the address under which stores are reached."""

    def __init__(
        self,
        nodes: int,
        policy: JobPolicy,
        socket: CoordinatorSocket,
        helper: HelperProcess,
        host: str,
        reactor: Reactor,
        record: Callable[..., Any],
        needed: int = 0,
        hook: Callable[[Callable[[int, str, str], None], set[int]], ClassifyHook] | None = None,
    ) -> None:
        self.hub = Hub(Coordinator(nodes, policy, reactor.now, needed), beat_s(nodes))
        self.done: Done | None = None
        self.children = {helper.pid}
        """Processes of the coordinator's own; the set changes while hooks run."""
        self._hook = None if hook is None else hook(self._hook_answered, self.children)
        self._socket = socket
        self._helper = helper
        self._host = host
        self._reactor = reactor
        self._record = record
        reactor.watch(socket.zap, lambda _events: socket.serve_zap())
        reactor.watch(socket.router, lambda _events: self._receive())
        self._watch_helper()

    def tick(self) -> None:
        self._carry(self.hub.tick(self._reactor.now))
        if self._hook is not None:
            self._hook.keep(self.hub.coordinator.asks_hook)

    def _hook_answered(self, number: int, answer: str, error: str) -> None:
        self._carry(self.hub.hook_answered(number, answer, error, self._reactor.now))

    def stop(self, exit_code: int, reason: str) -> None:
        self._carry(self.hub.stop(exit_code, reason, self._reactor.now))

    def _receive(self) -> None:
        for node, data in self._socket.receive():
            self._carry(self.hub.receive(node, data, self._reactor.now))

    def _ask(self, request: HelperRequest) -> None:
        self._helper.ask(request)
        if self._helper.unsent:
            self._watch_helper()

    def _watch_helper(self) -> None:
        events = zmq.POLLIN | zmq.POLLOUT if self._helper.unsent else zmq.POLLIN
        self._reactor.watch(self._helper.fd, lambda _events: self._hear_helper(), events)

    def _hear_helper(self) -> None:
        if self._helper.unsent:
            self._helper.flush()
            self._watch_helper()
        messages = self._helper.read()
        if messages is None:
            self._reactor.forget(self._helper.fd)
            self.stop(ExitCode.AGENT_LOST, f"the helper process died: {self._helper.how()}")
            return
        for message in messages:
            self._take(message)

    def _take(self, message: HelperMessage) -> None:
        now = self._reactor.now
        match message:
            case Ready():
                pass
            case Unusable(error=error):
                self.stop(ExitCode.CANNOT_START, error)
            case StoreOpened(world=world, port=port, error=error):
                if error:
                    self.stop(ExitCode.CANNOT_START, f"no TCPStore on node rank 0: {error}")
                else:
                    self._carry(self.hub.store_ready(world, self._host, port, now))
            case Decided(generation=generation, payload=payload, error=error):
                self._carry(self.hub.decided(generation, payload, error, now))

    def _carry(self, output: HubOutput) -> None:
        for node, frame in output.frames:
            self._socket.send(node, frame)
        for action in output.local:
            match action:
                case HostStore(world=world):
                    self._ask(OpenWorldStore(world, self._host))
                case CloseStore(world=world):
                    self._ask(CloseWorldStore(world))
                case AskDecision(generation=generation, summaries=summaries):
                    self._ask(DecideOn(generation, summaries))
                case AskHook(number=number, question=question):
                    assert self._hook is not None, "no hook is asked where there is none"
                    self._hook.ask(number, question)
                case Record(event=event, fields=fields):
                    self._record(event, **fields)
                case Done():
                    self.done = action

    def snapshot(self) -> dict[str, Any]:
        """Return the job's state for `leto status`: plain values only."""
        coordinator = self.hub.coordinator
        world = coordinator.world
        recovery = coordinator.recovery
        return {
            "phase": coordinator.phase.value,
            "generation": coordinator.generation,
            "epoch": coordinator.epoch,
            "iteration": coordinator.hang.min_iteration() or coordinator.iteration,
            "world": coordinator.active_world,
            "world_size": coordinator.world_size,
            "nodes": len(coordinator.ranks_of),
            "spares": coordinator.spares[0],
            "unfit": coordinator.spares[1],
            "next_world": 0 if world is None else world.world,
            "shadow_levels": {}
            if world is None
            else {str(rank): member.level for rank, member in sorted(world.members.items())},
            "last_recovery": coordinator.last_recovery,
            "recovering_s": None if recovery is None else self._reactor.now - recovery.started,
            "stale": dict(coordinator.stale),
            "stale_frames": self.hub.stale_frames,
            "denied": self._socket.denied,
            "impostors": self._socket.impostors,
            "malformed": self.hub.malformed,
        }

    def close(self) -> None:
        """Release sockets, end the helper and with it all stores."""
        self._reactor.forget(self._socket.zap)
        self._reactor.forget(self._socket.router)
        self._reactor.forget(self._helper.fd)
        self._helper.end()
        if self._hook is not None:
            self._hook.close()
        self._socket.close()
