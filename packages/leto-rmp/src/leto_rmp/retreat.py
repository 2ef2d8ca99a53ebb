"""A process gives up writing retained memory, all of it, and goes on living (I-4; paper section 3.4).

Role in the whole: a trainer that survives a failure of another rank ends its part in the old generation this
way, and may become a shadow of the next one. What a process can write with is known here: the clients that
are writers, and every range that any client of it has mapped. A writer is kept in the list until it releases
or is closed. One that was dropped without that is not mapped any more, but its manager takes this process for
the writer still: such a process cannot give up.
"""

from __future__ import annotations

import os
import threading
import weakref
from typing import TYPE_CHECKING

from leto_rmp.errors import RmpError
from leto_rmp.mapping import SharedRange

if TYPE_CHECKING:
    from leto_rmp.client import Client

__all__ = ["forget_writer", "give_up_writing", "mapped_bytes", "note_range", "note_writer"]

_lock = threading.Lock()
_writers: list[tuple[weakref.ref[Client], str]] = []
"""The clients, and the sockets of their managers."""
_ranges: weakref.WeakSet[SharedRange] = weakref.WeakSet()


def note_writer(client: Client) -> None:
    """The client is a writer from now on."""
    with _lock:
        _writers.append((weakref.ref(client), str(client.socket_path)))


def forget_writer(client: Client) -> None:
    """The client does not write any more."""
    with _lock:
        _writers[:] = [one for one in _writers if one[0]() is not client]


def note_range(mapped: SharedRange) -> None:
    """This process has mapped a range."""
    with _lock:
        _ranges.add(mapped)


def _after_fork() -> None:
    """A forked child has inherited neither the mappings nor the role."""
    global _lock
    _lock = threading.Lock()
    _writers.clear()
    _ranges.clear()


os.register_at_fork(after_in_child=_after_fork)


def give_up_writing() -> None:
    """End every writer's role that this process has, and make all that it has mapped inaccessible.

    On return no write of this process can reach retained memory: on the host every mapping is without any
    access (a view that is left ends the process when it is touched), on a GPU all work is done and pages are
    read-only. Then every manager knows that its writer has released. The caller has ended what else of this
    process uses the memory: threads, and what it registered with others.

    Raises RmpError where that cannot be said (a manager does not answer, a writer was dropped unclosed):
    then the process must end.
    """
    with _lock:
        writers, ranges = list(_writers), list(_ranges)
    for reference, socket in writers:
        client = reference()
        if client is None:
            raise RmpError(
                f"expected every writer to be released or closed, found one of {socket} that was dropped: "
                "its manager takes this process for the writer until it ends; close clients"
            )
        client.release()
    for mapped in ranges:
        mapped.seal()


def mapped_bytes() -> int:
    """How much address space of this process is mapped retained memory still: views of it are left."""
    with _lock:
        return sum(mapped.length for mapped in _ranges)
