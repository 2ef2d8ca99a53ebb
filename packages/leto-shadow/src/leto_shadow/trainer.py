"""The class that a user writes: one training process, as a shadow first and as the active trainer after
promotion.

Role: the seam between Leto and a training loop. Every trainer starts as a shadow, climbs the levels of the
paper's section 6 and waits; the agent promotes it, at the start of the job or when its predecessor died. So
the same script is active trainer and shadow, and recovery is no special path that only runs when things
break.

What each step may do follows from I-4 (one writer): before `train` nothing may write retained memory.
"""

from __future__ import annotations

from typing import ClassVar

from leto_shadow.context import Context

__all__ = ["CannotDisconnectError", "Trainer"]


class CannotDisconnectError(RuntimeError):
    """This trainer cannot leave its world; it ends, and the agent starts another shadow in its place."""


class Trainer:
    """Base class of trainers; pass an instance to `leto_shadow.run`.

    Only `train` must be overridden. An exception in any step ends the process and is reported to the agent.
    """

    spare_level: ClassVar[int] = 0
    """Highest level (0, 1 or 2) whose step needs no `ctx.rank`: trainers of a spare node can wait there.

    They get their rank when the node takes the place of another one. At 0 they have imported what the script
    imports; with 1, `prepare` is done ahead, and with 2 `build`.
    """

    def prepare(self, ctx: Context) -> None:
        """Reach level 1: imports and data; no accelerator state, no communication."""

    def build(self, ctx: Context) -> None:
        """Reach level 2: the accelerator's runtime, and the model in shape only (meta device)."""

    def connect(self, ctx: Context) -> None:
        """Reach level 3: form the process groups through `ctx.store` and warm them.

        The default forms the default process group (gloo) and runs one all-reduce on it.
        """
        ctx.init_process_group()

    def disconnect(self, ctx: Context) -> None:
        """Leave the world of the last `connect`, going back to level 2; `connect` follows for another world.

        Level 3 belongs to the world: when one shadow of it dies, all others stand in a world that can never
        run. The default destroys all process groups if gloo carries them. For other backends, where
        destroying a group whose peer is dead may block, it raises CannotDisconnectError: the process ends and
        a new shadow takes its place.
        """
        import torch.distributed as dist

        if not dist.is_initialized():
            return
        if (backend := dist.get_backend()) != "gloo":
            raise CannotDisconnectError(f"Trainer.disconnect is not overridden for the {backend} backend")
        dist.destroy_process_group()

    def retire(self, ctx: Context) -> int:
        """Go back to being a shadow after a failure of another rank; return the level that is kept: 1 or 2.

        Override it to say that this class can: otherwise its trainers are ended when another one fails, and
        new processes take their places. `train` has been left before, by an exception (`Retired`, which is no
        `Exception`, from a call of `ctx`, or the error of a collective whose peer is gone), and retained
        memory is out of reach already. Left to do: leave the process groups (`self.disconnect(ctx)`), drop
        every view of retained memory and whatever else of the training is kept in attributes and globals, and
        stand where `prepare` (1) or `build` (2) leaves a new process, so that the next `train` computes the
        same bits. What is forgotten is found as far as it can be: groups, views, and threads and processes
        that `train` started.
        """
        raise NotImplementedError("this trainer does not retire")

    def train(self, ctx: Context) -> None:
        """Run as the active trainer: attach to the memory, recover, report `ctx.resumed`, loop; return when
        done.

        Called after promotion; once, unless `retire` is overridden. The predecessor is proven dead, or proven
        to have given up writing, so retained memory may be written.
        """
        raise NotImplementedError("a trainer must override Trainer.train")
