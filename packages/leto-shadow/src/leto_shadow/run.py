"""The life of a trainer process: connect to the agent, climb the levels, wait, train, report.

Role: `run(trainer)` is the last line of a user's script. Paper: sections 3.4 and 6. The loop is a state
machine over (level, world, promoted) that is driven by the agent's messages; a message that does not fit the
state ends the process with an error instead of being guessed at.

Upheld here: a trainer never outlives its agent (I-7). Three guards, each for what the others cannot see: the
kernel kills the process when the agent's process dies (PR_SET_PDEATHSIG, works even while a thread keeps the
GIL); the parent is compared before and after, for an agent that died in between; and a reader thread ends the
process when the socket hangs up.
"""

from __future__ import annotations

import ctypes
import os
import queue
import select
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Callable
from typing import NoReturn

from leto_shadow import logs, oom_hook, wire
from leto_shadow import retire as survivors
from leto_shadow.context import Context, ContextError, Inbox, Place, Retired, hold_gil_for_ever
from leto_shadow.localization import is_python_error
from leto_shadow.progress import Phase, ProgressWriter
from leto_shadow.trainer import Trainer

__all__ = ["EXIT_AGENT_GONE", "EXIT_FAILED", "EXIT_PROTOCOL", "EXIT_USAGE", "run"]

EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_AGENT_GONE = 70
EXIT_PROTOCOL = 76

_PR_SET_PDEATHSIG = 1
_ERROR_CHARS = 6000
_OUTSIDE = """\
leto: this script is a Leto trainer, but no agent started it (LETO_AGENT_FD is not set).
leto: start it with:  leto run --nproc-per-node 2 {script} ..."""

_PEER_DIED = (
    "connection closed by peer",
    "connection reset by peer",
    "broken pipe",
    "socket closed",
    "remote process exited",
    "nccl remote error",
    "connection refused",
    "gloo connectfullmesh failed",
    "timed out waiting",  # gloo: a peer did not come for as long as the group's timeout
    "application timeout caused pair closure",  # gloo: nor for another operation that was under way
    "collective operation timeout",  # the same of NCCL
)


def run(trainer: Trainer) -> None:
    """Run `trainer` under the agent that started this process; returns when training is finished.

    Exits the process instead with status 1 if the trainer raised, 2 outside of Leto, 70 if the agent is gone
    and 76 if agent and trainer do not understand each other. `Stop` from the agent ends the process with
    status 0.
    """
    place, channel, progress = _adopt_environment()
    inbox: Inbox = queue.SimpleQueue()
    ctx = Context(place, channel, inbox, progress)
    if os.environ.get(logs.LOG_FORMAT_VARIABLE) == "json":
        logs.adopt_output(ctx.where)
    progress.set(Phase.INIT, 0)
    threading.Thread(target=_read_agent, args=(channel, ctx), name="leto-agent-reader", daemon=True).start()
    level = 0
    try:
        channel.send(wire.Hello(os.getpid(), place.rank, retires=survivors.retires(trainer)))
        while True:
            promotion = _Climb(trainer, ctx, channel, inbox, level).until_promoted()
            ctx._promote(promotion)
            before = survivors.Before.look()
            if _train(trainer, ctx, channel):
                break
            level = _retire(trainer, ctx, channel, before)
    except wire.PeerGoneError:
        _exit(EXIT_AGENT_GONE, "the agent is gone")
    _close_groups()


def _train(trainer: Trainer, ctx: Context, channel: wire.Channel[wire.AgentMessage]) -> bool:
    """Run the active trainer's part; True if it is finished, False if this trainer is to retire."""
    try:
        ctx.progress(Phase.RECOVER, 0)
        trainer.train(ctx)
        ctx.progress(Phase.DONE, ctx.iteration)
        channel.send(wire.Finished(ctx.iteration))
        return True
    except wire.PeerGoneError:
        raise
    except Retired:
        return False
    except BaseException as error:  # noqa: BLE001 - nothing is swallowed: it is reported
        if not (survivors.retires(trainer) and (_is_secondary(error) or survivors.is_of_abort(error, ctx))):
            _fail("train", error, channel)
        text = "".join(traceback.format_exception(error))
        sys.stderr.write(text)
        if ctx._retiring is None:
            channel.send(wire.PeerLost(text[-_ERROR_CHARS:], ctx.generation))
    return False


def _retire(
    trainer: Trainer,
    ctx: Context,
    channel: wire.Channel[wire.AgentMessage],
    before: survivors.Before,
) -> int:
    """Become a shadow again; return its level."""
    generation = ctx.generation
    _step("retire", lambda _ctx: survivors.give_up(before), ctx, channel)
    survivors.wait_to_be_asked(ctx)
    channel.send(wire.Released(generation))
    kept: list[int] = []
    _step("retire", lambda ctx: kept.append(survivors.become_shadow(trainer, ctx, before)), ctx, channel)
    ctx.progress(Phase.IDLE, 0)
    channel.send(wire.Retired(kept[0], generation))
    return kept[0]


class _Climb:
    """The shadow's part: from `level` to 3, until promotion."""

    def __init__(
        self,
        trainer: Trainer,
        ctx: Context,
        channel: wire.Channel[wire.AgentMessage],
        inbox: Inbox,
        level: int = 0,
    ) -> None:
        self._trainer = trainer
        self._ctx = ctx
        self._channel = channel
        self._inbox = inbox
        self._level = level
        self._world_id = 0
        self._is_spare = ctx._rank < 0

    def _take_rank(self, message: wire.TakeRank) -> None:
        """This node is no spare any more; from here on everything is as in a trainer that had its rank at
        once."""
        self._is_spare = False
        self._ctx._take_rank(message.rank)
        os.environ.update(dict.fromkeys(("LETO_RANK", "RANK"), str(message.rank)))
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        fd = os.open(message.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
        for number in (1, 2):
            os.dup2(fd, number)
        os.close(fd)

    def until_promoted(self) -> wire.Promote:
        """Follow `Advance` messages; return the `Promote`. A shadow may wait for ever: the reader guards the
        agent's life."""
        while True:
            message = self._inbox.get()
            if isinstance(message, wire.Advance):
                self._advance(message)
            elif isinstance(message, wire.TakeRank) and self._is_spare:
                self._take_rank(message)
            elif isinstance(message, wire.Promote):
                if self._level != 3 or message.world_id != self._world_id:
                    _protocol_error(
                        self._channel,
                        f"promoted in world {message.world_id}, but this trainer stands at level "
                        f"{self._level} of world {self._world_id}",
                    )
                return message
            else:
                _protocol_error(self._channel, f"{type(message).__name__} is no message for a shadow")

    def _advance(self, to: wire.Advance) -> None:
        """Go to `to.level`, answering LevelReached after each level; leave a world that is given up."""
        if not 1 <= to.level <= 3:
            _protocol_error(self._channel, f"there is no level {to.level}")
        ctx, trainer = self._ctx, self._trainer
        level = min(to.level, trainer.spare_level) if self._is_spare else to.level
        if self._level == 3 and (to.level < 3 or to.world_id != self._world_id):
            ctx.progress(Phase.INIT, 0)
            _step("disconnect", trainer.disconnect, ctx, self._channel)
            ctx._leave_world()
            self._level = 2
        self._world_id = to.world_id
        if self._level >= level:  # nothing to do: say so, the agent may have asked twice
            self._channel.send(wire.LevelReached(self._level, self._world_id, ctx._parked_bytes))
        while self._level < level:
            ctx.progress(Phase.INIT, 0)
            if self._level == 0:
                _step("prepare", trainer.prepare, ctx, self._channel)
            elif self._level == 1:
                _step("build", _build(trainer), ctx, self._channel)
            else:
                _step("connect", self._connect(to), ctx, self._channel)
            self._level += 1
            self._channel.send(wire.LevelReached(self._level, self._world_id, ctx._parked_bytes))
        ctx.progress(Phase.IDLE, 0)

    def _connect(self, to: wire.Advance) -> Callable[[Context], None]:
        def connect(ctx: Context) -> None:
            ctx._enter_world(to)
            self._trainer.connect(ctx)

        return connect


def _build(trainer: Trainer) -> Callable[[Context], None]:
    def build(ctx: Context) -> None:
        trainer.build(ctx)
        oom_hook.check_allocator()

    return build


def _adopt_environment() -> tuple[Place, wire.Channel[wire.AgentMessage], ProgressWriter]:
    """Take over what the agent passed: variables and two descriptors, which no child of ours may inherit."""
    fds = []
    for name in ("LETO_AGENT_FD", "LETO_PROGRESS_FD"):
        value = os.environ.pop(name, None)
        if value is None:
            print(_OUTSIDE.format(script=os.path.basename(sys.argv[0]) or "script.py"), file=sys.stderr)
            raise SystemExit(EXIT_USAGE)
        fds.append(value)
    try:
        agent_fd, progress_fd = (int(value) for value in fds)
        os.set_inheritable(agent_fd, False)
        os.set_inheritable(progress_fd, False)
        sock = socket.socket(fileno=agent_fd)
        progress = ProgressWriter(progress_fd)
        place = Place.from_environment(os.environ, sys.argv[1:])
        oom_hook.attach(os.environ)
    except (OSError, ValueError, ContextError, oom_hook.OomHookError) as error:
        print(f"leto: what the agent passed to this trainer cannot be used: {error}", file=sys.stderr)
        raise SystemExit(EXIT_USAGE) from error
    os.close(progress_fd)  # the mapping stays
    channel: wire.Channel[wire.AgentMessage] = wire.Channel(sock, wire.TrainerDecoder())
    os.register_at_fork(after_in_child=channel.close)
    _die_with_agent(sock)
    return place, channel, progress


def _die_with_agent(sock: socket.socket) -> None:
    """Have the kernel SIGKILL this process when the agent dies, and exit at once if it died already."""
    parent = os.getppid()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    poller = select.poll()
    poller.register(sock, select.POLLHUP)
    if os.getppid() != parent or poller.poll(0):
        _exit(EXIT_AGENT_GONE, "the agent died while this trainer was starting")


def _read_agent(channel: wire.Channel[wire.AgentMessage], ctx: Context) -> None:
    """Reader thread: queue messages for the main thread; act at once on those that must not wait for it."""
    while True:
        try:
            message = channel.recv(None)
        except wire.PeerGoneError:
            _exit(EXIT_AGENT_GONE, "the agent is gone")
        except wire.FrameError as error:
            _exit(EXIT_PROTOCOL, f"the agent sent what this version cannot read: {error}")
        if isinstance(message, wire.Stop):
            _exit(0, f"stopped by the agent: {message.reason}")
        elif isinstance(message, wire.Inject):
            hold_gil_for_ever()
        elif isinstance(message, wire.Retire):
            survivors.end_world(ctx, message)
        else:
            ctx._inbox.put(message)


def _step(
    phase: str, call: Callable[[Context], None], ctx: Context, channel: wire.Channel[wire.AgentMessage]
) -> None:
    """Call one of the trainer's methods; report whatever it raises and exit."""
    try:
        call(ctx)
    except wire.PeerGoneError:
        raise
    except BaseException as error:  # noqa: BLE001 - nothing is swallowed: it is reported and the process ends
        _fail(phase, error, channel)


def _is_secondary(error: BaseException) -> bool:
    """Whether an error looks like the consequence of a peer's end, or of a peer that stands still."""
    return isinstance(error, (RuntimeError, OSError)) and any(
        sign in str(error).lower() for sign in _PEER_DIED
    )


def _fail(phase: str, error: BaseException, channel: wire.Channel[wire.AgentMessage]) -> NoReturn:
    """Report an error and exit."""
    text = "".join(traceback.format_exception(error))
    sys.stderr.write(text)
    if isinstance(error, SystemExit):
        text += "a trainer must return from its methods instead of calling sys.exit\n"
    _report(
        channel,
        wire.Failed(
            phase,
            text[-_ERROR_CHARS:],
            _is_secondary(error),
            is_python_error(error),
            type(error).__name__ == "OutOfMemoryError",  # torch's, without importing it
        ),
    )
    _exit(EXIT_FAILED, f"failed in {phase}")


def _report(channel: wire.Channel[wire.AgentMessage], message: wire.Failed) -> None:
    """Send the last message of this process, as far as somebody still listens."""
    try:
        channel.send(message, timeout_s=5.0)
    except (wire.PeerGoneError, wire.WireTimeoutError) as error:
        sys.stderr.write(f"leto: the failure could not be reported: {error}\n")


def _protocol_error(channel: wire.Channel[wire.AgentMessage], what: str) -> NoReturn:
    _report(channel, wire.Failed("protocol", what))
    _exit(EXIT_PROTOCOL, what)


def _close_groups() -> None:
    """Leave torch's process groups, so that interpreter exit finds no thread of theirs."""
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        distributed.destroy_process_group()


def _exit(status: int, reason: str) -> NoReturn:
    """End the process from any thread at once, without waiting for other threads (they may hang in a
    collective)."""
    try:
        sys.stderr.write(f"leto: trainer {os.getpid()} ends: {reason}\n")
        sys.stderr.flush()
        sys.stdout.flush()
    except (OSError, ValueError):
        pass  # nobody reads our output any more; the exit status still tells
    os._exit(status)
