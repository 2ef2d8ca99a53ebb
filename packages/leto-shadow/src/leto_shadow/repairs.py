"""The repairs of one recovery on one node: all local ranks side by side (paper section 3.4).

Each rank has a state manager of its own, whose work a repair waits for: one after the other, the ranks of a
node would add up. So there is a thread for each, and it talks to its rank's manager and to nothing else: it
starts no process (the kernel ends children with the *thread* that forked), asks no device, writes no event.
What it found is handed to the agent's own thread, which stays in `Repairs.run` until the last one has ended:
no repair runs beside anything else of the agent, so a recovery that is superseded, a manager that is replaced
or the end of the agent never meets one. Every request has a deadline, those of the manager's client.

A rank is repaired once the memory of its dead trainers is measured to be free (case 4), whatever the others
still wait for: fresh pages need it.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from leto_rmp import RmpError
from leto_shadow.agent_actions import RepairRank
from leto_shadow.devices import Device
from leto_shadow.managers import ManagerHost, Repair

__all__ = ["Done", "Repairs"]

_log = logging.getLogger("leto_shadow.agent")

_REPAIR_S = 10.0


@dataclass(frozen=True)
class Done:
    """What became of one action; ``error``: why it could not be done."""

    action: RepairRank
    lost_pages: int = 0
    error: str | None = None


Ended = tuple[RepairRank, Repair | BaseException, float]


class Repairs:
    """Carries out `RepairRank` actions. ``record(event, **fields)`` is called by the caller's thread only."""

    def __init__(self, device: Device, managers: ManagerHost, record: Callable[..., Any]) -> None:
        self._device = device
        self._managers = managers
        self._record = record

    def run(self, actions: Sequence[RepairRank]) -> list[Done]:
        """Repair these ranks; return when the last one is done, in the order of their ends."""
        by_rank = {action.rank: action for action in actions}
        assert len(by_rank) == len(actions), "two repairs of one rank follow each other"
        ended: queue.SimpleQueue[Ended] = queue.SimpleQueue()
        threads: list[threading.Thread] = []
        done: list[Done] = []
        try:
            for rank, measured in self._device.wait_for_free_memory(list(by_rank), _REPAIR_S):
                action = by_rank[rank]
                if isinstance(measured, OSError):
                    done.append(_failed(action, measured))
                    continue
                if measured:
                    self._record("memory_free", rank=rank, generation=action.generation, **measured)
                thread = threading.Thread(
                    target=self._repair, args=(action, ended), name=f"leto-repair-{rank}", daemon=True
                )
                thread.start()
                threads.append(thread)
        finally:
            found = [self._note(*ended.get()) for _ in threads]
            for thread in threads:
                thread.join()
        for one in found:
            if isinstance(one, BaseException):
                raise one
            done.append(one)
        return done

    def _repair(self, action: RepairRank, ended: queue.SimpleQueue[Ended]) -> None:
        """The thread of one rank."""
        began = time.monotonic()
        found: Repair | BaseException
        try:
            found = self._managers.repair(
                action.rank, action.generation, action.losses, _REPAIR_S, read=action.read
            )
        except BaseException as error:  # noqa: BLE001 - judged, or raised again, by the agent's thread
            found = error
        ended.put((action, found, time.monotonic() - began))

    def _note(
        self, action: RepairRank, found: Repair | BaseException, seconds: float
    ) -> Done | BaseException:
        """Record what one thread found; an error that nobody expects is for the caller to raise."""
        if isinstance(found, (RmpError, OSError, ValueError)):
            return _failed(action, found)
        if isinstance(found, BaseException):
            return found
        where = {"rank": action.rank, "generation": action.generation}
        self._record("localized", **where, lost_pages=found.lost_pages, seconds=seconds - found.losing_s)
        for line in found.said:
            self._record("pages_lost", **where, detail=line, seconds=found.losing_s)
        for line in found.skipped:
            self._record("loss_skipped", **where, detail=line)
            _log.warning("rank %d: %s", action.rank, line, extra={"fields": {"rank": action.rank}})
        return Done(action, found.lost_pages)


def _failed(action: RepairRank, problem: Exception) -> Done:
    return Done(action, error=f"{type(problem).__name__}: {problem}")
