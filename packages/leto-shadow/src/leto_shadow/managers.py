"""State managers of one node, through leto_rmp: start, end, lose pages for drills, localize and remap.

The calls block, each with a deadline far below the heartbeat's, because they are short and rare. Repair runs
before any shadow is promoted, so nobody writes the memory meanwhile; ranks are repaired side by side
(`leto_shadow.repairs`).
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from leto_rmp import (
    AdoptedManager,
    Allocation,
    Client,
    Kind,
    ManagerProcess,
    PageMark,
    PageRef,
    PoolConfig,
    Role,
    spawn_manager,
)
from leto_shadow.drills import Lose

__all__ = ["ImpossibleLossError", "ManagerHost", "Repair", "check_loss", "choose_losses"]

_log = logging.getLogger("leto_shadow.managers")

_START_S = 30.0
_START_DRIVER_S = 45.0  # initialising a driver that nobody has used yet takes seconds


class ImpossibleLossError(ValueError):
    """Pages to lose that the manager does not have; the message says what there is."""


@dataclass(frozen=True)
class Repair:
    """What one repair of a rank has found and done.

    ``said``: a line for each loss that was carried out; ``skipped``: one for each that names what is not
    there. ``losing_s``: seconds that losing pages for drills took, which are no part of a real failure.
    """

    lost_pages: int
    said: tuple[str, ...] = ()
    skipped: tuple[str, ...] = ()
    losing_s: float = 0.0


class ManagerHost:
    """The managers of the local ranks; one at a time per rank."""

    def __init__(
        self,
        run_dir: Path,
        job_id: str,
        config: PoolConfig,
        launcher: int | None = None,
        grace_s: float = 0.0,
    ) -> None:
        """``launcher``: the process that would start a successor; without it there is no grace period."""
        self._run_dir = run_dir
        self._job_id = job_id
        self._config = config
        self._launcher = launcher
        self._grace_s = 0.0 if launcher is None else grace_s
        self._managers: dict[int, ManagerProcess | AdoptedManager] = {}

    def start(self, rank: int, epoch: int = 0, device: int = 0) -> ManagerProcess:
        """Start a fresh manager for ``rank``; raises what leto_rmp raises, e.g. `NotEnoughMemory`.

        ``device``: the GPU of the rank among those visible here; the host backend has none.
        """
        assert rank not in self._managers, "the predecessor must be gone"
        config, timeout_s = self._config, _START_S
        if config.backend != "host":
            config, timeout_s = replace(config, device=device), _START_DRIVER_S
        folder = self._run_dir / f"rank{rank}"
        manager = spawn_manager(
            folder,
            self._job_id,
            rank,
            config,
            owner_pid=os.getpid(),
            grace_s=self._grace_s,
            timeout_s=timeout_s,
            guardian_pid=self._launcher,
            job_epoch=epoch,
        )
        self._managers[rank] = manager
        return manager

    def device_uuid(self, rank: int, timeout_s: float) -> str:
        """Return the GPU that holds the rank's pages, as its manager says; empty on the host backend."""
        if self._config.backend == "host":
            return ""
        with Client.connect(self._managers[rank].socket_path, timeout_s=timeout_s) as client:
            return client.device_uuid

    def hold(self, rank: int, manager: AdoptedManager) -> None:
        """A manager was taken over from a dead agent."""
        self._managers[rank] = manager

    def fence(self, rank: int, generation: int, timeout_s: float) -> None:
        """Have the manager refuse generations below ``generation``; return when no older writer is left.

        I-4: it took the writer's pidfd itself, so this holds although the writer's agent is dead. Raises
        what leto_rmp raises: `WriterAlive` when the writer does not end.
        """
        manager = self._managers[rank]
        with Client.connect(manager.socket_path, timeout_s=timeout_s) as client:
            client.attach(Role.CONTROL, generation)
            client.fence(generation, wait_s=timeout_s)

    def leave_all(self) -> None:
        """Leave every manager to a successor of this agent; without one it ends by itself."""
        for manager in self._managers.values():
            manager.leave()
        self._managers.clear()

    def pids(self) -> set[int]:
        return {manager.pid for manager in self._managers.values()}

    def pidfd(self, rank: int) -> int | None:
        """Return the pidfd of the rank's manager, None if it has none."""
        manager = self._managers.get(rank)
        return None if manager is None else manager.pidfd

    def pid(self, rank: int) -> int | None:
        """Return the pid of the rank's manager, None if it has none."""
        manager = self._managers.get(rank)
        return None if manager is None else manager.pid

    def end_all(self) -> None:
        """End every manager."""
        for rank in list(self._managers):
            self.end(rank)

    def end(self, rank: int) -> str:
        """SIGKILL the manager if it lives, wait for its end, release what it left; say how it ended."""
        manager = self._managers.pop(rank)
        said = manager.stderr()
        fields = {"rank": rank, "role": "manager", "pid": manager.pid}
        for line in said.splitlines():  # nobody reads what it writes while it lives
            _log.warning("state manager of rank %d: %s", rank, line, extra={"fields": fields})
        status = manager.kill()
        with contextlib.suppress(OSError):  # made by a manager that died together with its agent, perhaps
            (self._run_dir / f"rank{rank}").rmdir()  # only if nobody has anything there
        if status is None:
            how = "ended"  # it was started by an agent that is dead
        else:
            how = f"killed by signal {-status}" if status < 0 else f"exit status {status}"
        return f"{how}: {said}" if said else how

    def check_loss(self, rank: int, generation: int, lose: Lose, timeout_s: float) -> None:
        """Raise `ImpossibleLossError` unless the rank's manager has what ``lose`` names; changes nothing."""
        manager = self._managers.get(rank)
        if manager is None:
            raise ImpossibleLossError(f"rank {rank} has no state manager now")
        with Client.connect(manager.socket_path, timeout_s=timeout_s) as client:
            client.attach(Role.CONTROL, generation)
            check_loss(client.allocations(), lose, client.config.tier1_pages)

    def repair(
        self,
        rank: int,
        generation: int,
        losses: tuple[tuple[str, Lose, int], ...],
        timeout_s: float,
        *,
        read: bool,
    ) -> Repair:
        """Lose pages for drills, then localize and remap; ``read``: device pages are read to find bad ones.

        A loss that names what is not there is skipped: a typing error must not cost the memory. The one
        method here that is called from several threads at once, for one rank each: it changes nothing of
        this object.
        """
        manager = self._managers[rank]
        said, skipped = [], []
        losing_s = 0.0
        with Client.connect(manager.socket_path, timeout_s=timeout_s) as client:
            client.attach(Role.CONTROL, generation)
            client.fence(generation, wait_s=timeout_s)  # I-4 once more, by the manager's own pidfd
            for drill_id, lose, seed in losses:
                try:
                    lost, poisoned = choose_losses(client, lose, seed)
                except ImpossibleLossError as error:
                    skipped.append(f"{drill_id}: loss skipped: {error}")
                    continue
                began = time.monotonic()
                if lost:
                    client.inject_lose(lost, seed)
                if poisoned:
                    client.inject_poison(poisoned, seed)
                losing_s += time.monotonic() - began
                said.append(f"{drill_id}: lost {len(lost)} pages, poisoned {len(poisoned)} parity pages")
            marks = client.localize(read=read)
            client.remap()
        lost_pages = sum(mark is PageMark.LOST for mark in marks.values())
        return Repair(lost_pages, tuple(said), tuple(skipped), losing_s)


def check_loss(allocations: Mapping[str, Allocation], lose: Lose, tier1_pages: int) -> None:
    """Raise `ImpossibleLossError`, which says what there is, unless ``lose`` names a group of these, and no
    more pages than it has."""
    if lose.allocation not in allocations:
        raise ImpossibleLossError(
            f"there is no allocation {lose.allocation!r}; there are {sorted(allocations)}"
        )
    allocation = allocations[lose.allocation]
    if allocation.kind is not Kind.RETAINED:
        retained = sorted(name for name, one in allocations.items() if one.kind is Kind.RETAINED)
        raise ImpossibleLossError(
            f"allocation {lose.allocation!r} is {allocation.kind.value} and has no protection groups; "
            f"retained are {retained}"
        )
    count = len(allocation.groups)
    if not 0 <= lose.group < count:
        raise ImpossibleLossError(
            f"allocation {lose.allocation!r} has no group {lose.group}; there are {count}, counted from 0"
        )
    for what, wanted, there in (
        ("data", lose.pages, len(allocation.groups[lose.group].pages)),
        ("tier-1 parity", lose.tier1, tier1_pages),
    ):
        if isinstance(wanted, int) and wanted > there:
            raise ImpossibleLossError(
                f"group {lose.group} of {lose.allocation!r} has {there} {what} pages; {wanted} were to be "
                "lost"
            )


def choose_losses(client: Client, lose: Lose, seed: int) -> tuple[list[PageRef], list[PageRef]]:
    """Choose (data pages to lose, tier-1 pages to poison) of one group, reproducibly from ``seed``.

    "tolerance" is what the group's tier-1 rows make good: all of them minus the rows that tier 2 cannot
    restore once ``lose.tier1`` of them are poisoned. Raises `ImpossibleLossError`.
    """
    allocations = client.allocations()
    config = client.config
    check_loss(allocations, lose, config.tier1_pages)
    allocation = allocations[lose.allocation]
    rng = random.Random(seed)
    group = allocation.groups[lose.group]
    rows = config.tier1_pages
    broken = lose.tier1 if lose.tier1 > config.tier2_pages else 0
    wanted = rows - broken if lose.pages == "tolerance" else lose.pages
    pages = rng.sample(list(group.pages), min(wanted, len(group.pages)))
    parity = rng.sample(range(rows), min(lose.tier1, rows))
    first_row = lose.group * rows
    return (
        [PageRef(lose.allocation, "data", index) for index in sorted(pages)],
        [PageRef(lose.allocation, "tier1", first_row + row) for row in sorted(parity)],
    )
