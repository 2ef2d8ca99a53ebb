"""What differs between the host and a GPU where a rank's pages are attached: the updater, and mapping ahead.

Role in the whole: the one place of this package that knows leto_rmu's two updaters. Both follow one protocol;
the rest of the trainer does not care where the pages are.

A shadow on a GPU maps the rank's pages as an observer (level 3), since importing and mapping thousands of
pages takes longer than all the rest of a takeover. It may write only after promotion (I-4).
"""

from __future__ import annotations

import logging
from collections.abc import Callable

from leto_rmp import Client, Role
from leto_rmp.errors import RmpError
from leto_rmu import ClientMemory, Executor, ResumableUpdater, UpdatePlan
from leto_shadow import Context

__all__ = ["attach", "describe", "make_updater", "map_ahead", "settle"]

_log = logging.getLogger("leto_megatron")


def map_ahead(ctx: Context) -> Client | None:
    """Map what the rank's state manager holds now, to look at; None where there is nothing to map yet.

    Whatever goes wrong here costs time at the takeover and nothing else.
    """
    socket = ctx.run_dir / f"rank{ctx.rank}" / "manager.sock"
    try:
        client = Client.connect(socket)
    except RmpError as error:
        _log.info("no pages are mapped ahead: %s", error)
        return None
    try:
        client.attach(Role.OBSERVER, 0)
        client.allocations()
    except RmpError as error:
        _log.info("no pages are mapped ahead: %s", error)
        client.close()
        return None
    return client


def attach(ctx: Context, ahead: Client | None) -> Client:
    """Become the writer of the rank's memory, with the mappings made ahead if its manager is the same."""
    if ahead is not None:
        try:
            ahead.become_writer(ctx.generation)
        except RmpError as error:
            _log.info("mappings made ahead are given up: %s", error)
            ahead.close()
        else:
            return ahead
    client = Client.connect(ctx.manager_socket)
    try:
        client.attach(Role.WRITER, ctx.generation)
    except BaseException:
        client.close()
        raise
    return client


def make_updater(
    client: Client,
    plan: UpdatePlan,
    barrier: Callable[[], None],
    rebuild_derived: Callable[[ResumableUpdater], None],
    executor: Executor,
) -> ResumableUpdater:
    """The updater of a rank, over the memory of its state manager, wherever that keeps its pages.

    `executor` looks at every operation; on a GPU that has them done one by one, so it is used there only
    where the caller puts it in (`updater.executor`).
    """
    if client.config.backend == "host":
        return ResumableUpdater(ClientMemory(client), plan, barrier, rebuild_derived, executor)
    from leto_rmu.cuda import CudaUpdater

    return CudaUpdater(client, plan, barrier, rebuild_derived)


def describe(updater: ResumableUpdater, why_undo: str = "") -> str:
    """How chunks are updated, in words for the log: it decides how long an update takes.

    why_undo: `Config.why_undo`, where the scheme was not asked for.
    """
    memory = updater.memory
    if not hasattr(memory, "fused"):
        return "chunks are updated on the host"
    if memory.fused is not None:
        library = memory.fused.library
        return f"chunks are updated by one kernel each ({library.build}: {library.why})"
    if why_undo:
        return f"chunks are updated by separate operations, scheme undo: {why_undo}"
    return f"chunks are updated by separate operations: {getattr(memory, 'no_kernel', '')}"


def settle(updater: ResumableUpdater) -> None:
    """Return when all that the updater has issued is done."""
    wait = getattr(updater, "wait", None)  # the host's is done when its calls return
    if wait is not None:
        wait()
