"""What each request does: roles, fencing and the pool put together (paper section 4.2, I-4).

A request either answers at once or, for `Fence`, when the old writer is gone; everything that can be
refused is refused with an error that the client raises. No sockets are touched here.
"""

from __future__ import annotations

import os
import traceback
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from leto_rmp import protocol as p
from leto_rmp.backend import Handle
from leto_rmp.connection import Connection
from leto_rmp.errors import (
    InternalError,
    NotWriter,
    ProtocolError,
    ProtocolMismatch,
    RmpError,
    WriterAlive,
)
from leto_rmp.fencing import WriterFence
from leto_rmp.marks import PageMark
from leto_rmp.ownership import Ownership, Party
from leto_rmp.pool import Pool
from leto_rmp.protocol import PROTOCOL_VERSION, Message, Request, Role
from leto_rmp.status import ClientStatus, ManagerStatus, WriterStatus

__all__ = ["Identity", "Outcome", "Service"]


@dataclass(frozen=True)
class Identity:
    """Whose memory this manager owns."""

    job_id: str
    rank: int
    job_epoch: int = 0


@dataclass(frozen=True)
class Outcome:
    """A reply with the handles that go with it; or none yet: `waits_for` is the fenced generation."""

    reply: Message | None
    handles: Sequence[Handle] = ()
    waits_for: int | None = None


class Service:
    """Carries out requests of connections."""

    def __init__(
        self, identity: Identity, pool: Pool, ownership: Ownership, gone: Callable[[int], bool]
    ) -> None:
        self.identity = identity
        self.ownership = ownership
        self.pool = pool
        self.fence = WriterFence(gone)
        self.refused: Counter[str] = Counter()
        self.connections: Iterable[Connection] = ()
        self.on_writer: Callable[[int | None, int], None] = lambda old, new: None
        """Called with (pidfd of the previous writer, pidfd of the new one)."""
        self.on_owner: Callable[[int, int], None] = lambda old, new: None
        """The same for owners."""

    def failure(self, error: RmpError, request_id: int = 0) -> p.Failure:
        """Count a refusal and return it as a message."""
        name = type(error).__name__
        self.refused[name] += 1
        return p.Failure(id=request_id, error=name, message=error.message, details=error.details)

    def handle(self, connection: Connection, request: Request) -> Outcome:
        """Carry out one request; refusals become Failure replies."""
        try:
            return self._dispatch(connection, request)
        except RmpError as error:
            return Outcome(self.failure(error, request.id))
        except Exception as error:  # noqa: BLE001 - our death would cost all memory: report and go on
            traceback.print_exc()
            defect = InternalError(f"{type(request).__name__} failed in the manager: {error!r}")
            return Outcome(self.failure(defect, request.id))

    def _dispatch(self, connection: Connection, request: Request) -> Outcome:
        if isinstance(request, p.Hello):
            return Outcome(self._hello(connection, request))
        if not connection.welcomed:
            raise ProtocolError("the first request of a connection must be Hello")
        if isinstance(request, p.Attach):
            return Outcome(self._attach(connection, request))
        if isinstance(request, p.Status):
            return Outcome(p.StatusReply(id=request.id, status=self.status()))
        if connection.role is None:
            raise ProtocolError("attach first: this connection has no role yet")
        return self._attached(connection, request)

    def _hello(self, connection: Connection, request: p.Hello) -> Message:
        if request.protocol != PROTOCOL_VERSION:
            connection.closing = True
            raise ProtocolMismatch(
                f"this manager speaks protocol {PROTOCOL_VERSION}, the client {request.protocol}: install "
                "the same leto-rmp on both sides",
                expected=PROTOCOL_VERSION,
                found=request.protocol,
            )
        connection.welcomed = True
        return p.Welcome(
            id=request.id,
            protocol=PROTOCOL_VERSION,
            job_id=self.identity.job_id,
            rank=self.identity.rank,
            pid=os.getpid(),
            config=self.pool.config,
            device_uuid=self.pool.backend.device_uuid,
        )

    def _attach(self, connection: Connection, request: p.Attach) -> Message:
        if connection.role not in (None, request.role):
            raise ProtocolError(
                f"this connection is attached as {connection.role}: use one connection per role"
            )
        if request.role is Role.WRITER:
            self._admit(connection, request.generation)
        connection.role = request.role
        connection.generation = request.generation
        return p.Done(id=request.id)

    def _admit(self, connection: Connection, generation: int) -> None:
        if self.fence.holds(connection) and connection.written_generation == generation:
            return
        pidfd = os.dup(connection.pidfd)  # outlives the connection: the record must see the death
        try:
            previous = self.fence.admit(connection, connection.pid, generation, pidfd)
        except RmpError:
            os.close(pidfd)
            raise
        connection.role, connection.generation = Role.WRITER, generation
        connection.written_generation = generation
        self.on_writer(previous.pidfd if previous is not None else None, pidfd)

    def _own(self, connection: Connection, grace_ms: int) -> None:
        party = Party(connection.pid, os.dup(connection.pidfd))  # outlives the connection
        try:
            previous = self.ownership.take(party, max(0, grace_ms) / 1000)
        except RmpError:
            os.close(party.pidfd)
            raise
        if previous is None:
            os.close(party.pidfd)
        else:
            self.on_owner(previous.pidfd, party.pidfd)

    def _attached(self, connection: Connection, request: Request) -> Outcome:
        pool = self.pool
        match request:
            case p.BecomeWriter():
                if connection.role is Role.CONTROL:
                    raise NotWriter("a control connection cannot become the writer: attach as observer")
                self._admit(connection, request.generation)
                return Outcome(p.Done(id=request.id))
            case p.Release():
                self.fence.release(connection, connection.written_generation)
                connection.role = Role.OBSERVER
                return Outcome(p.Done(id=request.id))
            case p.Fence():
                self._need_control(connection)
                self.fence.fence(request.generation)
                return self.fence_outcome(request.id, request.generation) or Outcome(
                    None, waits_for=request.generation
                )
            case p.Own():
                self._need_control(connection)
                self._own(connection, request.grace_ms)
                return Outcome(p.Done(id=request.id))
            case p.Allocate():
                missing = pool.missing(request.specs)
                if missing:
                    self._need_writer(connection)
                    pool.create(missing)
                return Outcome(self._described(request.id, [spec.name for spec in missing]))
            case p.Free():
                self._need_writer(connection)
                pool.free(request.names)
                return Outcome(p.Done(id=request.id))
            case p.Describe():
                return Outcome(self._described(request.id, []))
            case p.Export():
                count = min(request.count, p.FDS_PER_MESSAGE_MAX)
                handles = pool.handles(request.allocation, request.section, request.first, count)
                present = [handle for handle in handles if handle is not None]
                absent = tuple(i for i, handle in enumerate(handles, request.first) if handle is None)
                return Outcome(p.Handles(id=request.id, count=len(present), absent=absent), present)
            case p.Marks():
                return Outcome(self._marks(request.id))
            case p.Localize():
                self._need_control(connection)
                pool.localize(request.read, request.unmapped)
                return Outcome(self._marks(request.id))
            case p.Remap():
                self._need_control(connection)
                self._need_unpinned(connection)
                pool.remap()
                return Outcome(self._marks(request.id))
            case p.Refresh():
                return Outcome(
                    p.Changes(
                        id=request.id,
                        epoch=pool.epoch,
                        replaced=pool.replaced_since(request.epoch),
                        uncleared=pool.uncleared(),
                    )
                )
            case p.Cleared():
                self._need_writer(connection)
                pool.cleared(request.runs, request.epoch)
                return Outcome(p.Done(id=request.id))
            case p.Acknowledge():
                self._need_writer(connection)
                pool.acknowledge(request.refs)
                return Outcome(p.Done(id=request.id))
            case p.InjectLose():
                self._need_control(connection)
                method = pool.inject_lose(request.refs, request.seed, poison=request.poison)
                return Outcome(p.Injected(id=request.id, method=method))
            case p.InjectFlip():
                self._need_control(connection)
                pool.inject_flip(request.ref, request.offset, request.mask)
                return Outcome(p.Done(id=request.id))
            case _:
                raise ProtocolError(f"{type(request).__name__} is not expected here")

    def _need_writer(self, connection: Connection) -> None:
        self.fence.check_writer(connection, connection.written_generation)

    def _need_control(self, connection: Connection) -> None:
        """Localizing, remapping and injecting are for agents and for the current writer."""
        if connection.role is not Role.CONTROL:
            self._need_writer(connection)

    def _need_unpinned(self, connection: Connection) -> None:
        """A page that a living writer has pinned is replaced at that writer's own request only (case 14)."""
        writer = self.fence.writer
        if not self.pool.backend.clients_pin or writer is None or self.fence.holds(connection):
            return
        if self.fence.alive():
            raise WriterAlive(
                f"process {writer.pid}, writer of generation {writer.generation}, may have pinned or "
                "registered the pages that would be replaced: let it call remap() itself, or end it first",
                pid=writer.pid,
                generation=writer.generation,
            )

    def fence_outcome(self, request_id: int, generation: int) -> Outcome | None:
        """Return the answer to a Fence, or None while an older writer may still be writing."""
        writer = self.fence.writer
        if writer is not None and writer.generation < generation and self.fence.alive():
            return None
        return Outcome(p.Done(id=request_id))

    def fence_late(self, request_id: int, generation: int) -> p.Failure:
        """Return the answer to a Fence whose time is over."""
        writer = self.fence.writer
        assert writer is not None, "a fence only waits for a writer"
        error = WriterAlive(
            f"process {writer.pid}, writer of generation {writer.generation}, neither ended nor released in "
            f"time; generation {generation} cannot write yet. End the process",
            pid=writer.pid,
            generation=writer.generation,
        )
        return self.failure(error, request_id)

    def _described(self, request_id: int, created: Sequence[str]) -> Message:
        return p.Described(
            id=request_id,
            specs=self.pool.specs,
            incarnations=self.pool.incarnations,
            created=tuple(created),
            layout_hash=self.pool.layout_hash,
        )

    def _marks(self, request_id: int) -> Message:
        return p.MarkList(id=request_id, marks=tuple(self.pool.marks().items()))

    def _writer_status(self) -> WriterStatus | None:
        writer = self.fence.writer
        if writer is None:
            return None
        return WriterStatus(pid=writer.pid, generation=writer.generation, state=self.fence.state())

    def status(self) -> ManagerStatus:
        """Return the whole status."""
        pool, fence = self.pool, self.fence
        marks = list(pool.marks().values())
        return ManagerStatus(
            job_id=self.identity.job_id,
            rank=self.identity.rank,
            job_epoch=self.identity.job_epoch,
            pid=os.getpid(),
            owner_pid=self.ownership.owner.pid,
            guardian_pid=0 if self.ownership.guardian is None else self.ownership.guardian.pid,
            protocol=PROTOCOL_VERSION,
            config=pool.config,
            layout_hash=pool.layout_hash,
            generation=fence.newest,
            generation_min=fence.generation_min,
            writer=self._writer_status(),
            clients=tuple(
                ClientStatus(pid=c.pid, role=c.role or "", generation=c.generation) for c in self.connections
            ),
            allocations=pool.allocation_status(),
            lost_pages=marks.count(PageMark.LOST),
            remapped_pages=marks.count(PageMark.REMAPPED),
            poison=pool.backend.poison_method,
            poison_reason=pool.backend.poison_reason,
            localization=pool.backend.localization,
            simulated_pages=pool.backend.simulated_pages(),
            device=f"{pool.backend.device_name} {pool.backend.device_uuid}".strip(),
            uncleared_pages=sum(run.count for run in pool.uncleared()),
            handles=pool.handle_count(),
            kept_fds=pool.backend.exported_handles(),
            allocated_bytes=pool.allocated_bytes(),
            refused=dict(self.refused),
        )
