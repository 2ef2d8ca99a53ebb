"""What a trainer knows and may ask of its agent.

Role: the one object that `Trainer`'s methods receive. It wraps the wire (messages), the progress counter and
the drill points; it holds no training state. Paper: sections 3.4 (recovery) and 6 (levels).

Upheld here: values exist only from the step on that defines them (asking `generation` before promotion is an
error, not a default), and a drill is on the wire before it fires, so that it can never fire twice.
"""

from __future__ import annotations

import collections
import datetime
import itertools
import os
import queue
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NoReturn

from leto_shadow import oom_hook, wire
from leto_shadow.collectives import watch_collectives
from leto_shadow.drills import Drill
from leto_shadow.progress import Phase, ProgressWriter

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store  # torch.distributed.Store, exported for type checkers
    from torch.distributed import ProcessGroup

__all__ = ["Context", "ContextError", "Place", "Retired", "hold_gil_for_ever"]

Inbox = queue.SimpleQueue[wire.AgentMessage]

_REPORT_S = 120.0
"""How long a report may wait for a busy agent; a dead one ends this process at once by other means."""


_MEASURE_S = 1.0


class ContextError(RuntimeError):
    """A `Context` was used before the step that makes the answer known, or outside its rules."""


class Retired(BaseException):
    """The generation of this trainer is over, and it is to become a shadow again: raised by every call of the
    context, to leave `Trainer.train`. No `Exception`: what handles errors must let it pass."""


@dataclass(frozen=True)
class Place:
    """Where a trainer stands in the job. Read from the environment that the agent sets; fixed for its life,
    except that a trainer of a spare node has rank -1 at first."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node_rank: int
    run_dir: Path
    job_id: str
    args: tuple[str, ...] = field(default=())
    backend: str = "host"

    @classmethod
    def from_environment(cls, environ: Mapping[str, str], args: Sequence[str] = ()) -> Place:
        """Read the `LETO_*` variables. Raises ContextError that names what is missing or no number."""

        def text(name: str) -> str:
            try:
                return environ[name]
            except KeyError:
                raise ContextError(
                    f"the environment lacks {name}; start trainers through `leto run`"
                ) from None

        def number(name: str) -> int:
            value = text(name)
            if not value.isdecimal():
                raise ContextError(f"{name} must be a whole number, found {value!r}")
            return int(value)

        place = cls(
            rank=number("LETO_RANK") if "LETO_RANK" in environ else -1,
            world_size=number("LETO_WORLD_SIZE"),
            local_rank=number("LETO_LOCAL_RANK"),
            local_world_size=number("LETO_LOCAL_WORLD_SIZE"),
            node_rank=number("LETO_NODE_RANK"),
            run_dir=Path(text("LETO_RUN_DIR")),
            job_id=text("LETO_JOB_ID"),
            args=tuple(args),
            backend=environ.get("LETO_BACKEND", "host"),
        )
        if not (
            place.rank < place.world_size and place.local_rank < place.local_world_size <= place.world_size
        ):
            raise ContextError(f"the ranks in the environment contradict each other: {place}")
        return place


def hold_gil_for_ever() -> NoReturn:
    """Loop in C without ever giving up the GIL or looking at signals: what a real hang looks like (case
    16)."""
    collections.deque(itertools.repeat(None), maxlen=0)
    raise AssertionError("an endless iterator has ended")


class Context:
    """A trainer's view of its job.

    Always known: `rank`, `world_size`, `local_rank`, `local_world_size`, `node_rank`, `run_dir`, `job_id`,
    `args` (the script's own arguments), `backend` (of the memory pool: "host", or "cuda": then the rank's
    pages are on the visible GPU number `local_rank`). From level 3 on: `world_id`, `store`. After promotion:
    `generation`, `manager_socket`, `hints`.
    """

    def __init__(
        self, place: Place, channel: wire.Channel[wire.AgentMessage], inbox: Inbox, progress: ProgressWriter
    ) -> None:
        self._rank = place.rank
        self.world_size = place.world_size
        self.local_rank = place.local_rank
        self.local_world_size = place.local_world_size
        self.node_rank = place.node_rank
        self.run_dir = place.run_dir
        self.job_id = place.job_id
        self.args = list(place.args)
        self.backend = place.backend
        self.iteration = 0
        """Iteration last named to `progress`."""
        self._channel = channel
        self._inbox = inbox
        self._progress = progress
        self._advance: wire.Advance | None = None
        self._store: Store | None = None
        self._promotion: wire.Promote | None = None
        self._drills: dict[str, Drill] = {}
        self._measure_at = 0.0
        self._parked_bytes = 0
        self._hinted: set[str] = set()
        self._retiring: int | None = None
        """Generation that this trainer was asked to leave; set by the reader thread."""

    def where(self) -> dict[str, object]:
        """What a log line of this trainer says of its origin (`leto run --log-format json`)."""
        generation = None if self._promotion is None else self._promotion.generation
        return {
            "job": self.job_id,
            "node": self.node_rank,
            "rank": self._rank,
            "role": "shadow" if generation is None else "active",
            "generation": generation,
            "iteration": self.iteration,
            "pid": os.getpid(),
        }

    @property
    def rank(self) -> int:
        """Number of this trainer, 0 to `world_size` - 1."""
        if self._rank < 0:
            raise ContextError(
                "a trainer of a spare node has no rank yet: lower Trainer.spare_level to what needs none"
            )
        return self._rank

    # --- known from level 3 on ------------------------------------------------------------------------------

    @property
    def world_id(self) -> int:
        """Number of the world this trainer belongs to; never used twice in a job."""
        if self._advance is None:
            raise ContextError("world_id is known from level 3 on (Trainer.connect)")
        return self._advance.world_id

    @property
    def waits(self) -> bool:
        """Whether this trainer is to stand at level 3 until something fails. False: the job waits for it, and
        it is promoted as soon as the shadows of all ranks have come so far."""
        if self._advance is None:
            raise ContextError("whether a shadow will wait is known from level 3 on (Trainer.connect)")
        return self._advance.waits

    def parked(self, nbytes: int) -> None:
        """Say in `Trainer.connect` that this shadow has given back so much memory of its device, which it
        needs again as soon as it is promoted.

        It waits at level 3 only where there is room for what it holds and for this (`leto_shadow.preinit`).
        Give memory back only where it `waits`: what is promoted at once would give back what it needs now,
        and a takeover that was refused would be refused again.
        nbytes: 0 or more; the last call of a `connect` counts. Raises ValueError if it is negative.
        """
        if self._advance is None:
            raise ContextError("memory is parked at level 3 (Trainer.connect)")
        if nbytes < 0:
            raise ValueError(f"expected 0 bytes or more, found {nbytes}")
        self._parked_bytes = nbytes

    @property
    def store(self) -> Store:
        """The key-value store of this world (torch), connected on first use.

        Keys are private to the world, so that none of an earlier world can be read (case 7).
        """
        if self._advance is None:
            raise ContextError("the store is known from level 3 on (Trainer.connect)")
        if self._store is None:
            self._store = self._connect_store(self._advance)
        return self._store

    def init_process_group(
        self, backend: str = "gloo", *, timeout_s: float = 600.0, warm: bool = True
    ) -> None:
        """Form torch's default process group of this world through its store.

        timeout_s: limit for forming it and for each collective on it. warm: run one all-reduce, so that the
        first one after promotion finds its connections. On one node gloo is kept on the loopback interface
        unless GLOO_SOCKET_IFNAME says otherwise.
        """
        import torch
        import torch.distributed as dist

        if backend == "gloo":
            self.watch_collectives()
        if self.local_world_size == self.world_size:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        dist.init_process_group(
            backend,
            store=self.store,
            rank=self.rank,
            world_size=self.world_size,
            timeout=datetime.timedelta(seconds=timeout_s),
        )
        if warm:
            device = torch.device("cuda", self.local_rank) if backend == "nccl" else torch.device("cpu")
            dist.all_reduce(torch.zeros(1, device=device))

    # --- known after promotion ------------------------------------------------------------------------------

    @property
    def generation(self) -> int:
        """Generation of this active trainer; goes to `leto_rmp.Client.become_writer`."""
        return self._promoted("generation").generation

    @property
    def manager_socket(self) -> str:
        """Path of the socket of this rank's state manager."""
        return self._promoted("manager_socket").manager_socket

    @property
    def hints(self) -> dict[str, float]:
        """What earlier trainers of this rank have left by `hint`, since its node's agent was started."""
        return dict(self._promoted("hints").hints)

    def exchange(self, summary: bytes, timeout_s: float = 600.0) -> bytes:
        """Send what this rank can recover from; return the decision that all ranks get. Call it once, before
        resuming.

        Raises TimeoutError if there is no decision in time (a rank never sent its summary).
        """
        generation = self.generation
        self.progress(Phase.EXCHANGE, self.iteration)
        self._channel.send(wire.Summary(summary, generation))
        try:
            with self._progress.waiting():
                message = self._inbox.get(timeout=timeout_s)
        except queue.Empty:
            raise TimeoutError(f"no decision on generation {generation} within {timeout_s:g} s") from None
        self._check()
        if not isinstance(message, wire.Decision):
            raise ContextError(f"expected a Decision, the agent sent {type(message).__name__}")
        if message.generation != generation:
            raise ContextError(f"the decision is of generation {message.generation}, expected {generation}")
        self.progress(Phase.RECOVER, self.iteration)
        return message.payload

    def resumed(
        self, iteration: int, source: Literal["fresh", "in-place", "checkpoint"], **breakdown: float
    ) -> None:
        """Report that training goes on at `iteration`. breakdown: seconds by part of the recovery."""
        self._check()
        oom_hook.check_allocator()
        seconds = {name: float(value) for name, value in breakdown.items()}
        self.iteration = iteration
        self._channel.send(wire.Resumed(iteration, source, seconds, self.generation), _REPORT_S)

    def metrics(self, iteration: int, **values: float) -> None:
        """Report numbers of a finished iteration (loss, lr, tokens, ...); they land in the event log."""
        self._check()
        numbers = {name: float(value) for name, value in values.items()}
        self._channel.send(wire.Metrics(iteration, numbers, self.generation), _REPORT_S)
        self._report_memory()

    def hint(self, **values: float) -> None:
        """Leave numbers for the trainer that will take this one's place (`hints`): what makes its start
        quicker. They may be lost, so the job's results must not depend on them. Call it after `resumed`.

        Names are kept for the whole job, what earlier trainers left included: use the same ones again.
        Raises ValueError if there are more than 32 of a rank, and what float() raises for a value that is no
        number; nothing is left then.
        """
        self._check()
        numbers = {name: float(value) for name, value in values.items()}
        names = {*self.hints, *self._hinted, *numbers}
        if len(names) > wire.HINTS_MAX:
            raise ValueError(
                f"expected at most {wire.HINTS_MAX} names of hints of a rank, found {len(names)}: "
                f"{', '.join(sorted(names)[:4])} ..."
            )
        self._channel.send(wire.Hint(numbers, self.generation), _REPORT_S)
        self._hinted.update(numbers)

    def progress(self, phase: Phase | str, iteration: int) -> None:
        """Publish that the main thread enters `phase`; costs a microsecond or two and never blocks.

        phase: a `Phase` or its name in any case, for example "forward". Raises KeyError for an unknown name.
        """
        self._check()
        phase = phase if isinstance(phase, Phase) else Phase[phase.upper()]
        self.iteration = iteration
        self._progress.set(phase, iteration)

    def barrier(self, group: ProcessGroup | None = None) -> None:
        """Return when every rank has called it, each with its world intact: the barrier of an update.

        group: of all ranks, carried by gloo; None: the default group. Call it, or have the updater call it
        (``ResumableUpdater(..., barrier=ctx.barrier)``), when all that came before has ended, on the device
        too. Publishes the phases "barrier" and "update".

        Here a trainer that is to retire leaves, and with it all the others, before anything that an aborted
        collective has left behind can be committed. So it must be a barrier that fails when a rank leaves:
        one of NCCL would return when it is aborted itself. Raises ContextError for such a group.
        """
        import torch.distributed as dist

        self.progress(Phase.BARRIER, self.iteration)
        if (backend := dist.get_backend(group)) != "gloo":
            raise ContextError(
                f"expected a group of gloo, found {backend}, whose barrier may return although a rank is "
                'gone: pass dist.new_group(backend="gloo")'
            )
        dist.barrier(group=group)
        self.progress(Phase.UPDATE, self.iteration)

    def watch_collectives(self) -> None:
        """Let the hang detector see when the main thread stands in a collective of torch.distributed.

        `init_process_group` does this for gloo. Call it earlier, before the import, where a library keeps the
        functions of torch.distributed under names of its own (Megatron-Core does).
        """
        watch_collectives(self._progress)

    # --- drills ---------------------------------------------------------------------------------------------

    def point(self, name: str, iteration: int, **where: int | str | None) -> None:
        """Mark a place where a drill may strike; returns at once if none is due.

        where: group, chunk and op for points inside the update.
        """
        self._check()
        for drill in list(self._drills.values()):
            if drill.matches(name, iteration, self.rank, **where):
                self._fire(drill)

    def update_drill(self, iteration: int) -> Drill | None:
        """Return the unfired drill that wants to strike inside the update of `iteration` on this rank, if
        any.

        Whoever runs the update (its executor) fires it: `drill_fired(id)` first, then the deed.
        """
        for drill in self._drills.values():
            if (drill.point, drill.iteration, drill.rank) == ("update", iteration, self.rank):
                return drill
        return None

    def drill_fired(self, drill_id: str) -> None:
        """Tell the agent that a drill strikes now; returns when the kernel holds the message, so a SIGKILL
        may follow."""
        self._check()
        drill = self._drills.pop(drill_id, None)
        if drill is None:
            raise ContextError(f"no unfired drill has the id {drill_id!r}")
        self._channel.send(wire.DrillFired(drill_id, drill.iteration))

    def _fire(self, drill: Drill) -> None:
        self.drill_fired(drill.id)
        print(
            f"leto: drill {drill.id}: {drill.kind} at {drill.point} of iteration {drill.iteration}",
            flush=True,
        )
        if drill.kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif drill.kind == "hang":
            sys.stdout.flush()
            hold_gil_for_ever()
        # kill_manager: the agent acts, and then ends this process; waiting keeps the iteration of the failure
        # exact
        deadline = time.monotonic() + 120.0
        while (left_s := deadline - time.monotonic()) > 0:
            signal.sigtimedwait((), left_s)
        raise ContextError(f"drill {drill.id!r} fired, but the agent did not end this trainer within 120 s")

    def _report_memory(self) -> None:
        """Tell the preinitialization controller how much memory training leaves, at most once a second."""
        now = time.monotonic()
        if now < self._measure_at:
            return
        self._measure_at = now + _MEASURE_S
        view = oom_hook.measure()
        if view is not None:
            seen = wire.Memory(view.free_bytes, view.total_bytes, view.spare_bytes, self.generation)
            self._channel.send(seen, _REPORT_S)

    # --- the runtime's side ---------------------------------------------------------------------------------

    def _check(self) -> None:
        """Raise `Retired` if this trainer has nothing to do in its generation any more."""
        if self._retiring is not None:
            raise Retired(f"generation {self._retiring} is over: this trainer becomes a shadow")

    def _ask_to_retire(self, message: wire.Retire) -> None:
        """Called by the reader thread."""
        self._retiring = message.generation
        self._inbox.put(message)  # who waits for a decision need not wait any longer

    def _leave_generation(self) -> None:
        """Nothing of it is left in here: a shadow knows of no generation."""
        self._promotion, self._retiring = None, None
        self._drills = {}
        self.iteration = 0
        while not self._inbox.empty():
            self._inbox.get()

    def _promoted(self, what: str) -> wire.Promote:
        if self._promotion is None:
            raise ContextError(f"{what} is known after promotion (Trainer.train)")
        return self._promotion

    def _connect_store(self, advance: wire.Advance, timeout_s: float = 60.0) -> Store:
        import torch.distributed as dist

        store = dist.TCPStore(  # type: ignore[attr-defined]
            advance.store_host,
            advance.store_port,
            world_size=None,
            is_master=False,
            timeout=datetime.timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
        prefix = f"leto/{self.job_id}/world{advance.world_id}"
        return dist.PrefixStore(prefix, store)  # type: ignore[attr-defined]

    def _take_rank(self, rank: int) -> None:
        self._rank = rank

    def _enter_world(self, advance: wire.Advance) -> None:
        self._advance, self._parked_bytes = advance, 0

    def _leave_world(self) -> None:
        self._advance, self._parked_bytes = None, 0
        self._store = None

    def _promote(self, message: wire.Promote) -> None:
        self._promotion, self._hinted = message, set()
        self._drills = {drill.id: drill for drill in message.drills if drill.rank == self.rank}
