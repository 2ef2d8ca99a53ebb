"""How a trainer that survives a failure of another one becomes a shadow again (paper section 3.4).

The trainer's half of `leto_shadow.agent_survivors`; called by `leto_shadow.run` with nothing of
`Trainer.train` left on the stack. Upheld here: I-4. `Released` is sent when no code of the old generation can
run any more and no write of this process can reach retained memory. What cannot be given up (a thread, a
process, a view of retained memory, a process group) is found, and ends this process: a new one takes its
place, which costs time and nothing else. I-7: nothing of the old generation is in the new shadow.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
from dataclasses import dataclass

from leto_shadow import linux, wire
from leto_shadow.context import Context
from leto_shadow.trainer import Trainer

__all__ = [
    "Before",
    "CannotRetireError",
    "abort_communicators",
    "become_shadow",
    "end_world",
    "give_up",
    "is_of_abort",
    "retires",
    "wait_to_be_asked",
]


class CannotRetireError(RuntimeError):
    """This trainer cannot become a shadow again; the text says what is in the way."""


def retires(trainer: Trainer) -> bool:
    """Whether the script says that its trainers can become shadows again."""
    return type(trainer).retire is not Trainer.retire


@dataclass(frozen=True)
class Before:
    """What ran in this process, and below it, before it was promoted."""

    threads: frozenset[threading.Thread]
    running: frozenset[int]
    children: frozenset[int]

    @classmethod
    def look(cls) -> Before:
        """Take down what there is."""
        return cls(
            frozenset(threading.enumerate()),
            frozenset(sys._current_frames()),
            frozenset(linux.descendants(os.getpid())),
        )

    def check(self) -> None:
        """Raise `CannotRetireError` if `Trainer.train` left something running: it is of the past."""
        for thread in threading.enumerate():
            # A thread of another language that has called Python has a stand-in here, which never goes.
            if thread not in self.threads and not isinstance(thread, threading._DummyThread):
                raise CannotRetireError(
                    f"thread {thread.name!r}, started in train(), runs on when it has ended"
                )
        self.check_unknown()
        left = set(linux.descendants(os.getpid())) - self.children
        if left:
            raise CannotRetireError(f"processes {sorted(left)}, started in train(), run on when it has ended")

    def check_unknown(self) -> None:
        """Raise `CannotRetireError` if there is a thread that `threading` does not know."""
        listed = (t for t in threading.enumerate() if not isinstance(t, threading._DummyThread))
        known = {thread.ident for thread in listed}
        if unknown := set(sys._current_frames()) - self.running - known:
            raise CannotRetireError(
                f"{len(unknown)} threads that `threading` does not know run on when train() has ended"
            )


def give_up(before: Before) -> None:
    """Make sure that nothing of this process writes for the old generation.

    Raises `CannotRetireError` or leto_rmp's `RmpError` where that cannot be said.
    """
    before.check()
    retreat = sys.modules.get("leto_rmp.retreat")  # without it this process has never mapped anything
    if retreat is not None:
        retreat.give_up_writing()


def become_shadow(trainer: Trainer, ctx: Context, before: Before) -> int:
    """Leave the old generation behind; return the level reached.

    Raises `CannotRetireError`, and whatever `Trainer.retire` raises.
    """
    ctx._leave_generation()
    level = trainer.retire(ctx)
    if level not in (1, 2):
        raise CannotRetireError(
            f"Trainer.retire must return 1 or 2, the level that it keeps; found {level!r}"
        )
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        raise CannotRetireError("Trainer.retire has not left the process groups: call self.disconnect(ctx)")
    ctx._leave_world()
    gc.collect()
    before.check_unknown()  # again: one that had not had its first turn yet could not be seen from Python
    retreat = sys.modules.get("leto_rmp.retreat")
    if retreat is not None and (left := retreat.mapped_bytes()):
        raise CannotRetireError(f"views of {left} bytes of retained memory are left after Trainer.retire")
    return level


def wait_to_be_asked(ctx: Context) -> None:
    """A peer is gone, and train() has ended of it: the fence, or the end of this process, is on its way.

    No deadline: the agent has one for this process, and the reader guards the agent's life.
    """
    while ctx._retiring is None:
        ctx._inbox.get()  # a decision may be on its way still


def end_world(ctx: Context, message: wire.Retire) -> None:
    """The world of this trainer is over. Called by another thread than the main thread.

    The order is what makes updates sound (I-6, `leto_rmu.updater`): first the main thread is told, then its
    communicators are aborted. An aborted collective of NCCL returns without an error, with any bits. When the
    main thread has what a collective left, and looks (`Context._check`), either nothing had been aborted by
    then, or it sees that it is to leave. What a peer's abort has put into it, it cannot see: the peer looks
    too, before `Context.barrier`, and leaves, so that nobody passes that.
    """
    ctx._ask_to_retire(message)
    abort_communicators(ctx)


def abort_communicators(ctx: Context) -> None:
    """Have a main thread that waits in a collective raise, where that needs help: on GPUs.

    Called by another thread. gloo has no such help, and needs none: when a rank ends or leaves, its sockets
    close, and the collectives of those that wait for it raise, one after the other.

    What cannot be aborted (the main thread may be leaving its groups at this very moment) is no reason to end
    the calling thread, which guards this process: the agent's deadline is there for a main thread that stays.
    """
    distributed = sys.modules.get("torch.distributed.distributed_c10d")
    if ctx.backend == "cuda" and distributed is not None and distributed.is_initialized():
        try:
            distributed._abort_process_group()
        except Exception as error:  # noqa: BLE001 - whatever its library says
            sys.stderr.write(f"leto: communicators could not be aborted: {error}\n")


def is_of_abort(error: BaseException, ctx: Context) -> bool:
    """Whether an error may come of `abort_communicators`: torch then says that there is no process group, or
    whatever its library says. An error of the device is none of these for long: `give_up` waits for it."""
    return ctx.backend == "cuda" and ctx._retiring is not None and isinstance(error, Exception)
