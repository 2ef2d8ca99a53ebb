"""The client: a trainer's, a shadow's or an agent's connection to one state manager.

Every request has a deadline. Memory is mapped once per process and section (`client_memory.py`). A
connection belongs to the process that made it: a forked child neither inherits the mappings nor may use
the client (I-4).
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import TypeVar

from leto_rmp import protocol as p
from leto_rmp.allocation import Allocation
from leto_rmp.client_memory import ClientMemory
from leto_rmp.config import AllocationSpec, PoolConfig
from leto_rmp.errors import ProtocolError, RmpError
from leto_rmp.gpu_memory import wait_free
from leto_rmp.layout import PageRef, check_spec, section_layouts
from leto_rmp.marks import PageMark
from leto_rmp.pinning import PIECE_BYTES, PinStatus
from leto_rmp.protocol import PROTOCOL_VERSION, Role
from leto_rmp.retreat import forget_writer, note_writer
from leto_rmp.status import ManagerStatus
from leto_rmp.transport import Transport

__all__ = ["Client"]

_BYTES_PER_S_MIN = 256 << 20
"""How fast a manager allocates and scans at least: deadlines grow with the bytes."""
_LONGEST_S = 86400.0
"""More than any memory takes; a socket's deadline overflows where nonsense is asked for."""
_HELPER_S = 120.0
"""What a manager may take longer where a helper process has to be started on a GPU."""

R = TypeVar("R", bound=p.Message)


class _Channel:
    """The client's requests, for its memory."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def request(self, message: p.Message, expected: type[R], extra_s: float = 0.0) -> R:
        return self._client._request(message, expected, extra_s)

    def take_fds(self, announced: int) -> list[int]:
        return self._client._transport.take_fds(announced)


class Client:
    """A connection to a state manager. Use as a context manager, or call `close`."""

    def __init__(
        self, transport: Transport, welcome: p.Welcome, timeout_s: float, pin_piece_bytes: int = PIECE_BYTES
    ) -> None:
        self._transport = transport
        self._timeout_s = timeout_s
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._role: Role | None = None
        self._allocated_bytes = 0
        self.config: PoolConfig = welcome.config
        self.device_uuid = welcome.device_uuid
        """The GPU that holds the data pages (`GPU-...`); empty on the host backend."""
        self._memory = ClientMemory(self.config, self.device_uuid, _Channel(self), pin_piece_bytes)
        self.before_remap: list[Callable[[Sequence[PageRef]], None]] = []
        """Called with pages before they are replaced: unregister them (NCCL, own pinning) here."""
        self.after_remap: list[Callable[[Sequence[PageRef]], None]] = []
        """Called with the same pages afterwards, also if the replacement failed: register them again."""
        self.job_id = welcome.job_id
        self.rank = welcome.rank
        self.manager_pid = welcome.pid

    @classmethod
    def connect(
        cls,
        socket_path: str | os.PathLike[str],
        timeout_s: float = 60.0,
        pin_piece_bytes: int = PIECE_BYTES,
    ) -> Client:
        """Connect and compare protocol versions. `timeout_s` bounds this and every later request.

        On the cuda backend a writer pins host memory in pieces of about `pin_piece_bytes`; 0: not at all.
        Raises ManagerGone, StaleSocket, PeerRefused, ProtocolMismatch or DeadlineExceeded.
        """
        transport = Transport(socket_path, timeout_s)
        try:
            welcome = transport.request(p.Hello(protocol=PROTOCOL_VERSION), timeout_s)
            if not isinstance(welcome, p.Welcome):
                raise ProtocolError(f"expected Welcome, found {type(welcome).__name__}")
            return cls(transport, welcome, timeout_s, pin_piece_bytes)
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
            self._memory.maps_device = role is not Role.CONTROL
            if role is Role.WRITER:
                self._write()

    def become_writer(self, generation: int) -> None:
        """Become the writer of `generation`; mappings made ahead become writable in place (I-4).

        Raises WriterAlive while the previous writer has neither ended nor released, StaleGeneration
        unless the generation is newer than all before. Asking twice for the same is harmless.
        """
        with self._lock:
            self._request(p.BecomeWriter(generation=generation), p.Done)
            self._role = Role.WRITER
            self._write()

    def _write(self) -> None:
        """Pages that were replaced while we watched are mapped before anything can be written."""
        note_writer(self)
        self._memory.set_writable(True)
        self.refresh()

    def release(self) -> None:
        """Give up writing: every mapping of this client becomes read-only first, then others may write.

        The caller has unregistered the ranges that it pinned or registered itself. On the cuda backend all
        work of this process on the device is waited for, and our own pins are undone.
        """
        with self._lock:
            self._memory.set_writable(False)
            self._request(p.Release(), p.Done)
            self._role = Role.OBSERVER
            forget_writer(self)

    def fence(self, generation: int, wait_s: float = 0.0) -> None:
        """Refuse older generations from now on; return once no older writer can write any more.

        CONTROL only. Raises WriterAlive when the old writer lives after `wait_s`, by which time the
        fence is up all the same; StaleGeneration when a newer one has been seen.
        """
        self._request(p.Fence(generation=generation, wait_ms=round(wait_s * 1000)), p.Done, wait_s)

    def own(self, grace_s: float) -> None:
        """Become the owner, with whom the manager ends after `grace_s`. CONTROL only.

        Raises OwnerAlive unless the owner before is dead. Asking again changes the grace period.
        """
        self._request(p.Own(grace_ms=round(grace_s * 1000)), p.Done)

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
            self._described(reply)
            created = set(reply.created)
            found = {spec.name: self._memory.allocation(spec, spec.name in created) for spec in specs}
            self.refresh()
            return found

    def allocations(self) -> dict[str, Allocation]:
        """Return and map everything that the manager holds, in the order of its creation.

        A control client maps no device pages: their `Allocation` has sizes and groups, and no contents.
        """
        with self._lock:
            reply = self._request(p.Describe(), p.Described)
            self._described(reply)
            found = {spec.name: self._memory.allocation(spec, False) for spec in reply.specs}
            self.refresh()
            return found

    def free(self, names: Iterable[str]) -> None:
        """Forget allocations (writer only). Views stay valid; the memory goes with the last of them."""
        with self._lock:
            wanted = tuple(names)
            self._request(p.Free(names=wanted), p.Done)
            self._memory.drop(wanted)

    @property
    def layout_hash(self) -> str:
        """SHA-256 over the configuration and all specifications, as the manager has them now."""
        return self._request(p.Describe(), p.Described).layout_hash

    def _described(self, reply: p.Described) -> None:
        self._allocated_bytes = sum(self._layout_bytes(spec) for spec in reply.specs)
        self._memory.note(reply)

    def _layout_bytes(self, spec: AllocationSpec) -> int:
        return sum(layout.nbytes for layout in section_layouts(spec, self.config))

    def _scan_s(self, specs: Sequence[AllocationSpec] = ()) -> float:
        nbytes = self._allocated_bytes + sum(map(self._layout_bytes, specs))
        return min(nbytes / _BYTES_PER_S_MIN, _LONGEST_S)

    def refresh(self) -> tuple[PageRef, ...]:
        """Map device pages that were replaced by others (by whomever), at the same addresses; return them.

        Nothing of this process uses these pages meanwhile. A writer also zeroes what is fresh. Done by
        itself in `become_writer`, `allocate`, `localize` and `remap`; on the host backend nothing needs it.
        """
        if self.config.backend == "host":
            return ()
        with self._lock:
            changes, refs = self._memory.replaced()
            with self._replacing(refs):
                self._memory.follow(changes, refs)
            return tuple(refs)

    @contextmanager
    def _replacing(self, refs: Sequence[PageRef]) -> Iterator[None]:
        if not refs:
            yield
            return
        for hook in self.before_remap:
            hook(refs)
        try:
            yield
        finally:
            for hook in self.after_remap:
                hook(refs)

    @property
    def pinning(self) -> PinStatus:
        """How much host memory this client has pinned for the GPU, and what stays pageable (cuda backend)."""
        return self._memory.pin_status()

    def wait_free(self, nbytes: int, timeout_s: float) -> float:
        """Wait until so many bytes of the pool's GPU are free, measured; return the seconds it took.

        Needs no GPU context. Raises NotEnoughMemory past the bound, CudaUnavailable where NVML cannot tell.
        """
        return wait_free(self.device_uuid, nbytes, timeout_s)

    # -- page marks ----------------------------------------------------------------------------

    def marks(self) -> dict[PageRef, PageMark]:
        """Return the pages that are not healthy, in order."""
        return dict(self._request(p.Marks(), p.MarkList).marks)

    def localize(self, read: bool = True) -> dict[PageRef, PageMark]:
        """Have the manager look for unreadable pages; return the marks. CONTROL or writer.

        On the cuda backend the manager knows which pages have no handle any more, a writer adds those that
        its driver does not know, and with `read` a helper process reads every page on the device. Only
        reading shows a contained ECC error, and it costs the start of a process with a GPU context: pass
        False after failures that cannot have been one.
        """
        with self._lock:
            unmapped: tuple[PageRef, ...] = ()
            if self._role is Role.WRITER and self.config.backend != "host":
                self.refresh()
                unmapped = self._memory.unmapped()
            request = p.Localize(read=read, unmapped=unmapped)
            return dict(self._request(request, p.MarkList, self._pool_scan_s()).marks)

    def remap(self) -> dict[PageRef, PageMark]:
        """Replace LOST pages by zero pages, at the same address in every process; return the marks.

        CONTROL or writer. On the cuda backend GPU pages are replaced by fresh handles, which clients map in
        `refresh`, and the first writer to do so zeroes. A living writer may have pinned pages: it calls
        this itself (`before_remap` and `after_remap` are called, our own pins undone and made again); to
        others it is refused (WriterAlive). Whoever registered the pages otherwise unregisters them before.
        Where a handle holds several GPU pages, a helper process copies the others, and `refresh` returns
        them all: no thread of the writer may use them meanwhile. Raises LocalizationFailed when one of them
        cannot be read.
        """
        with self._lock:
            if self._role is not Role.WRITER or self.config.backend == "host":
                reply = self._request(p.Remap(), p.MarkList, self._pool_scan_s())
                self.refresh()
                return dict(reply.marks)
            lost = [ref for ref, mark in self.marks().items() if mark is PageMark.LOST]
            with self._replacing(self._memory.moving(lost)):
                self._memory.drain()  # what is beside a lost page is copied as it is now
                self._memory.set_pins_aside(lost)
                try:
                    reply = self._request(p.Remap(), p.MarkList, self._pool_scan_s())
                    self._memory.follow(*self._memory.replaced())
                finally:
                    self._memory.pin()
            return dict(reply.marks)

    def acknowledge(self, refs: Iterable[PageRef]) -> None:
        """Declare remapped pages reconstructed and verified: they become healthy. Writer only."""
        self._request(p.Acknowledge(refs=tuple(refs)), p.Done)

    def _pool_scan_s(self) -> float:
        return self.status().allocated_bytes / _BYTES_PER_S_MIN + self._helper_s()

    def _helper_s(self) -> float:
        return 0.0 if self.config.backend == "host" else _HELPER_S

    # -- fault injection -----------------------------------------------------------------------

    def inject_lose(self, refs: Iterable[PageRef], seed: int) -> str:
        """Lose pages as a failed device would; return how: "userfaultfd", "unmapped" (GPU) or "simulated".

        The bytes are overwritten (seeded) in every process first, so nothing can be read back. The
        pages are not marked: localization has to find them. CONTROL or writer.
        """
        return self._inject(refs, seed, poison=False)

    def inject_poison(self, refs: Iterable[PageRef], seed: int) -> str:
        """Poison pages as an uncorrectable error of host memory would; otherwise as `inject_lose`."""
        return self._inject(refs, seed, poison=True)

    def _inject(self, refs: Iterable[PageRef], seed: int, poison: bool) -> str:
        wanted = tuple(refs)
        extra_s = len(wanted) * self.config.page_bytes / _BYTES_PER_S_MIN + self._helper_s()
        return self._request(p.InjectLose(refs=wanted, seed=seed, poison=poison), p.Injected, extra_s).method

    def inject_flip(self, ref: PageRef, offset: int, mask: int | bytes) -> None:
        """XOR `mask` (one byte, or several) into a page at byte `offset`: silent corruption."""
        raw = bytes([mask]) if isinstance(mask, int) else bytes(mask)
        self._request(p.InjectFlip(ref=ref, offset=offset, mask=raw), p.Done, self._helper_s())

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
                # Gone, late or superseded: our mappings are read-only, which is what counts. But nobody knows
                # whether the manager has heard it, and `give_up_writing` must not say that it has.
                pass
            finally:
                self._memory.clear()
                self._transport.close()
