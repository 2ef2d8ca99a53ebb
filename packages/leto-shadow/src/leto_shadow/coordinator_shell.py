"""The coordinator's shell on node rank 0: its socket, the stores of the worlds, the decision function.

Everything that decides is in `leto_shadow.coordinator`; this module moves bytes and opens stores.
"""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Callable, Sequence
from typing import Any

from leto_shadow.actions import CloseStore, Done, HostStore, Record
from leto_shadow.config import JobPolicy
from leto_shadow.coordinator import Coordinator, Decider
from leto_shadow.hub import Hub, HubOutput
from leto_shadow.reactor import Reactor
from leto_shadow.stores import StoreHost
from leto_shadow.transport import CoordinatorSocket

__all__ = ["CoordinatorShell", "load_decider"]


def load_decider(name: str) -> Decider:
    """Return a decision function that imports ``module:function`` when it is first called.

    That the module exists is checked now (`ValueError`), because at the first recovery it would be too late.
    """
    module_name, _, attribute = name.partition(":")
    if not attribute:
        raise ValueError(f"--decide must be module:function, found {name!r}")
    try:
        found = importlib.util.find_spec(module_name)
    except ModuleNotFoundError as error:
        raise ValueError(f"--decide {name}: {error}") from error
    if found is None:
        raise ValueError(f"--decide {name}: there is no module {module_name!r}")

    def decide(summaries: Sequence[bytes]) -> bytes:
        function: Decider = getattr(importlib.import_module(module_name), attribute)
        decision = function(summaries)
        if not isinstance(decision, bytes):
            raise TypeError(f"{name} must return bytes, found {type(decision).__name__}")
        return decision

    return decide


class CoordinatorShell:
    """Runs a `Hub` in the agent's event loop."""

    def __init__(
        self,
        nodes: int,
        policy: JobPolicy,
        decide: Decider,
        socket: CoordinatorSocket,
        stores: StoreHost,
        reactor: Reactor,
        record: Callable[..., Any],
    ) -> None:
        self.hub = Hub(Coordinator(nodes, policy, decide, reactor.now))
        self.done: Done | None = None
        self._socket = socket
        self._stores = stores
        self._reactor = reactor
        self._record = record
        reactor.watch(socket.zap, lambda _events: socket.serve_zap())
        reactor.watch(socket.router, lambda _events: self._receive())

    def _receive(self) -> None:
        for node, data in self._socket.receive():
            self._carry(self.hub.receive(node, data, self._reactor.now))

    def tick(self) -> None:
        self._carry(self.hub.tick(self._reactor.now))

    def stop(self, exit_code: int, reason: str) -> None:
        self._carry(self.hub.stop(exit_code, reason, self._reactor.now))

    def _carry(self, output: HubOutput) -> None:
        for node, frame in output.frames:
            self._socket.send(node, frame)
        for action in output.local:
            match action:
                case HostStore(world=world):
                    self._host(world)
                case CloseStore(world=world):
                    self._stores.close(world)
                case Record(event=event, fields=fields):
                    self._record(event, **fields)
                case Done():
                    self.done = action

    def _host(self, world: int) -> None:
        try:
            port = self._stores.open(world)
        except (ImportError, OSError, RuntimeError) as error:
            self._carry(self.hub.store_failed(str(error), self._reactor.now))
        else:
            self._carry(self.hub.store_ready(world, self._stores.host, port, self._reactor.now))

    def snapshot(self) -> dict[str, Any]:
        """Return the job's state for `leto status`: plain values only."""
        coordinator = self.hub.coordinator
        world = coordinator.world
        recovery = coordinator.recovery
        return {
            "phase": coordinator.phase.value,
            "generation": coordinator.generation,
            "epoch": coordinator.epoch,
            "iteration": coordinator.iteration,
            "world": coordinator.active_world,
            "world_size": coordinator.world_size,
            "nodes": len(coordinator.ranks_of),
            "next_world": 0 if world is None else world.world,
            "shadow_levels": {}
            if world is None
            else {str(rank): member.level for rank, member in sorted(world.members.items())},
            "last_recovery": coordinator.last_recovery,
            "recovering_s": None if recovery is None else self._reactor.now - recovery.started,
            "stale": dict(coordinator.stale),
            "stale_frames": self.hub.stale_frames,
            "denied": self._socket.denied,
        }

    def close(self) -> None:
        """Release sockets and stores."""
        self._reactor.forget(self._socket.zap)
        self._reactor.forget(self._socket.router)
        self._stores.close_all()
        self._socket.close()
