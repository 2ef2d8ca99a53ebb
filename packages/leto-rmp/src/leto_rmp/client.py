"""The client: a trainer's, a shadow's or an agent's connection to one state manager.

Every request has a deadline. Memory is mapped once per process and section, in batches of at most
253 handles whose descriptors are closed after mapping. A connection belongs to the process that made
it: a forked child neither inherits the mappings nor may use the client (I-4).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from leto_rmp import protocol as p
from leto_rmp.allocation import Allocation
from leto_rmp.backend import open_mapper
from leto_rmp.config import AllocationSpec, PoolConfig
from leto_rmp.errors import ProtocolError, RmpError
from leto_rmp.layout import PageRef, SectionLayout, SectionName, check_spec, section_layouts
from leto_rmp.limits import fd_room, require_fds
from leto_rmp.mapping import MappedRange
from leto_rmp.marks import PageMark
from leto_rmp.protocol import FDS_PER_MESSAGE_MAX, PROTOCOL_VERSION, Role
from leto_rmp.status import ManagerStatus
from leto_rmp.transport import Transport

__all__ = ["Client"]

_BYTES_PER_S_MIN = 256 << 20
"""How fast a manager allocates and scans at least: deadlines grow with the bytes."""
_FD_SLACK = 8

R = TypeVar("R", bound=p.Message)
Ranges = dict[SectionName, MappedRange]


class Client:
    """A connection to a state manager. Use as a context manager, or call `close`."""

    def __init__(self, transport: Transport, welcome: p.Welcome, timeout_s: float) -> None:
        self._transport = transport
        self._timeout_s = timeout_s
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._role: Role | None = None
        self._writable = False
        self._ranges: dict[str, Ranges] = {}
        self._incarnations: dict[str, int] = {}
        self._allocated_bytes = 0
        self._mapper = open_mapper(welcome.config.backend)
        self.config: PoolConfig = welcome.config
        self.job_id = welcome.job_id
        self.rank = welcome.rank
        self.manager_pid = welcome.pid

    @classmethod
    def connect(cls, socket_path: str | os.PathLike[str], timeout_s: float = 10.0) -> Client:
        """Connect and compare protocol versions. `timeout_s` bounds this and every later request.

        Raises ManagerGone, StaleSocket, PeerRefused, ProtocolMismatch or DeadlineExceeded.
        """
        transport = Transport(socket_path, timeout_s)
        try:
            welcome = transport.request(p.Hello(protocol=PROTOCOL_VERSION), timeout_s)
            if not isinstance(welcome, p.Welcome):
                raise ProtocolError(f"expected Welcome, found {type(welcome).__name__}")
            return cls(transport, welcome, timeout_s)
        except BaseException:
            transport.close()
            raise

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def socket_path(self) -> Path:
        """The manager's socket."""
        return self._transport.path

    @property
    def role(self) -> Role | None:
        """The role, None before `attach`."""
        return self._role

    def _request(self, message: p.Message, expected: type[R], extra_s: float = 0.0) -> R:
        if os.getpid() != self._pid:
            raise RmpError(f"this client belongs to process {self._pid}: a forked child connects for itself")
        with self._lock:
            reply = self._transport.request(message, self._timeout_s + extra_s)
        if not isinstance(reply, expected):
            self._transport.close("the manager answered out of turn")
            raise ProtocolError(f"expected {expected.__name__}, found {type(reply).__name__}")
        return reply

    # -- roles ---------------------------------------------------------------------------------

    def attach(self, role: Role, generation: int) -> None:
        """Take a role. WRITER is `become_writer` at once; OBSERVER maps ahead; CONTROL is for agents."""
        with self._lock:
            self._request(p.Attach(role=role, generation=generation), p.Done)
            self._role = role
            if role is Role.WRITER:
                self._set_writable(True)

    def become_writer(self, generation: int) -> None:
        """Become the writer of `generation`; mappings made ahead become writable in place (I-4).

        Raises WriterAlive while the previous writer has neither ended nor released, StaleGeneration
        unless the generation is newer than all before. Asking twice for the same is harmless.
        """
        with self._lock:
            self._request(p.BecomeWriter(generation=generation), p.Done)
            self._role = Role.WRITER
            self._set_writable(True)

    def release(self) -> None:
        """Give up writing: every mapping of this client becomes read-only first, then others may write.

        The caller has synchronised what still runs and unregistered pinned ranges before.
        """
        with self._lock:
            self._set_writable(False)
            self._request(p.Release(), p.Done)
            self._role = Role.OBSERVER

    def fence(self, generation: int, wait_s: float = 0.0) -> None:
        """Refuse older generations from now on; return once no older writer can write any more.

        CONTROL only. Raises WriterAlive when the old writer lives after `wait_s`, by which time the
        fence is up all the same; StaleGeneration when a newer one has been seen.
        """
        self._request(p.Fence(generation=generation, wait_ms=round(wait_s * 1000)), p.Done, wait_s)

    def _set_writable(self, writable: bool) -> None:
        for ranges in self._ranges.values():
            for mapped in ranges.values():
                mapped.protect(writable)
        self._writable = writable

    # -- memory --------------------------------------------------------------------------------

    def allocate(self, specs: Sequence[AllocationSpec]) -> dict[str, Allocation]:
        """Create or re-attach allocations by name, all or nothing, and map them.

        New pages are zero. Raises SpecMismatch when one exists with another size, kind or layout,
        NotWriter when one would have to be created by an observer, NotEnoughMemory, LimitTooLow.
        """
        for spec in specs:
            check_spec(spec, self.config)
        with self._lock:
            message = p.Allocate(specs=tuple(specs))
            reply = self._request(message, p.Described, self._scan_s(specs))
            self._note(reply)
            created = set(reply.created)
            return {spec.name: self._allocation(spec, spec.name in created) for spec in specs}

    def allocations(self) -> dict[str, Allocation]:
        """Return and map everything that the manager holds, in the order of its creation."""
        with self._lock:
            reply = self._request(p.Describe(), p.Described)
            self._note(reply)
            return {spec.name: self._allocation(spec, False) for spec in reply.specs}

    def free(self, names: Iterable[str]) -> None:
        """Forget allocations (writer only). Views stay valid; the memory goes with the last of them."""
        with self._lock:
            wanted = tuple(names)
            self._request(p.Free(names=wanted), p.Done)
            for name in wanted:
                self._ranges.pop(name, None)

    @property
    def layout_hash(self) -> str:
        """SHA-256 over the configuration and all specifications, as the manager has them now."""
        return self._request(p.Describe(), p.Described).layout_hash

    def _note(self, reply: p.Described) -> None:
        """Forget mappings of allocations that were freed, by whomever."""
        self._allocated_bytes = sum(self._layout_bytes(spec) for spec in reply.specs)
        self._incarnations, old = (
            dict(zip((spec.name for spec in reply.specs), reply.incarnations, strict=True)),
            self._incarnations,
        )
        for name in list(self._ranges):
            if self._incarnations.get(name) != old[name]:
                del self._ranges[name]

    def _layout_bytes(self, spec: AllocationSpec) -> int:
        return sum(layout.nbytes for layout in section_layouts(spec, self.config))

    def _scan_s(self, specs: Sequence[AllocationSpec] = ()) -> float:
        return (self._allocated_bytes + sum(map(self._layout_bytes, specs))) / _BYTES_PER_S_MIN

    def _allocation(self, spec: AllocationSpec, created: bool) -> Allocation:
        if spec.name not in self._ranges:
            layouts = section_layouts(spec, self.config)
            self._ranges[spec.name] = {layout.section: self._map(layout) for layout in layouts}
        return Allocation(spec, self.config, dict(self._ranges[spec.name]), created)

    def _map(self, layout: SectionLayout) -> MappedRange:
        mapped = self._mapper.reserve(layout, self._writable)
        sizes = layout.handle_pages
        batch = min(FDS_PER_MESSAGE_MAX, len(sizes))
        room = fd_room(batch + _FD_SLACK) - _FD_SLACK
        if room < 1:
            require_fds(1 + _FD_SLACK, f"mapping {layout.allocation!r}")
        batch = max(1, min(batch, room))
        first = 0
        while first < len(sizes):
            count = min(batch, len(sizes) - first)
            request = p.Export(allocation=layout.allocation, section=layout.section, first=first, count=count)
            reply = self._request(request, p.Handles)
            if not 0 < reply.count <= count:
                raise ProtocolError(f"asked for {count} handles, found {reply.count} announced")
            fds = self._transport.take_fds(reply.count)
            try:
                for fd, pages in zip(fds, sizes[first : first + len(fds)], strict=True):
                    mapped.place(fd, pages * layout.page_bytes)
            finally:
                for fd in fds:
                    os.close(fd)
            first += len(fds)
        assert mapped.complete, "the handles cover the section"
        return mapped

    # -- page marks ----------------------------------------------------------------------------

    def marks(self) -> dict[PageRef, PageMark]:
        """Return the pages that are not healthy, in order."""
        return dict(self._request(p.Marks(), p.MarkList).marks)

    def localize(self) -> dict[PageRef, PageMark]:
        """Have the manager look for unreadable pages; return the marks. CONTROL or writer."""
        return dict(self._request(p.Localize(), p.MarkList, self._pool_scan_s()).marks)

    def remap(self) -> dict[PageRef, PageMark]:
        """Replace LOST pages by zero pages, at the same address in every process; return the marks.

        Whoever registered the pages (pinning, NCCL) unregisters them before. CONTROL or writer.
        """
        return dict(self._request(p.Remap(), p.MarkList, self._pool_scan_s()).marks)

    def acknowledge(self, refs: Iterable[PageRef]) -> None:
        """Declare remapped pages reconstructed and verified: they become healthy. Writer only."""
        self._request(p.Acknowledge(refs=tuple(refs)), p.Done)

    def _pool_scan_s(self) -> float:
        return self.status().allocated_bytes / _BYTES_PER_S_MIN

    # -- fault injection -----------------------------------------------------------------------

    def inject_lose(self, refs: Iterable[PageRef], seed: int) -> str:
        """Lose pages as a failed device would; return how: "userfaultfd" or "simulated".

        The bytes are overwritten (seeded) in every process first, so nothing can be read back. The
        pages are not marked: localization has to find them. CONTROL or writer.
        """
        return self._inject(refs, seed, poison=False)

    def inject_poison(self, refs: Iterable[PageRef], seed: int) -> str:
        """Poison pages as an uncorrectable error of host memory would; otherwise as `inject_lose`."""
        return self._inject(refs, seed, poison=True)

    def _inject(self, refs: Iterable[PageRef], seed: int, poison: bool) -> str:
        wanted = tuple(refs)
        extra_s = len(wanted) * self.config.page_bytes / _BYTES_PER_S_MIN
        return self._request(p.InjectLose(refs=wanted, seed=seed, poison=poison), p.Injected, extra_s).method

    def inject_flip(self, ref: PageRef, offset: int, mask: int | bytes) -> None:
        """XOR `mask` (one byte, or several) into a page at byte `offset`: silent corruption."""
        raw = bytes([mask]) if isinstance(mask, int) else bytes(mask)
        self._request(p.InjectFlip(ref=ref, offset=offset, mask=raw), p.Done)

    # -- the rest ------------------------------------------------------------------------------

    def status(self) -> ManagerStatus:
        """Return what the manager tells about itself."""
        return self._request(p.Status(), p.StatusReply).status

    def close(self) -> None:
        """Release the writer's role if held, and disconnect. Closing twice is harmless.

        Pages are unmapped as soon as no view of them is left; views that are left stay readable,
        and become read-only if this client was the writer.
        """
        if os.getpid() != self._pid:
            self._transport.close()
            return
        with self._lock:
            try:
                if self._role is Role.WRITER:
                    self.release()
            except RmpError:
                pass  # gone, late or superseded: our mappings are read-only, which is what counts
            finally:
                self._ranges.clear()
                self._transport.close()
