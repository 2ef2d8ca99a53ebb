"""Watch torch.distributed: while the main thread is inside a collective, it waits and is not to blame.

Role: the hang detector blames the rank that stands still without waiting for others (paper section 3.4).
Where ranks meet in the middle of a phase (tensor parallel all-reduces, pipeline sends) the phase does not
tell who waits, so the blocking functions of torch.distributed are wrapped: they raise a flag in the progress
record on entry and lower it on return, two stores of a few words. Only calls of the main thread count.

This fits backends whose calls block the calling thread (gloo). With NCCL the calls return at once and the
thread waits elsewhere: there the phases decide.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

from leto_shadow.progress import ProgressWriter

__all__ = ["BLOCKING", "watch_collectives"]

BLOCKING = (
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "monitored_barrier",
    "new_group",
    "recv",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
    "send",
    "_all_gather_base",
    "_reduce_scatter_base",
)
"""Functions of torch.distributed that may wait for other ranks; `Work.wait` is the other place."""


def watch_collectives(writer: ProgressWriter) -> None:
    """Wrap torch.distributed so that `writer` shows when the main thread waits. Imports torch; idempotent."""
    import torch.distributed as dist

    if getattr(dist, "_leto_watched", None) is writer:
        return
    for name in BLOCKING:
        function = getattr(dist, name, None)
        if function is not None:
            setattr(dist, name, _guarded(getattr(function, "__wrapped_by_leto__", function), writer))
    work: Any = dist.Work
    work.wait = _guarded(getattr(work.wait, "__wrapped_by_leto__", work.wait), writer)
    dist._leto_watched = writer  # type: ignore[attr-defined]
    writer.watched()


def _guarded(function: Callable[..., Any], writer: ProgressWriter) -> Callable[..., Any]:
    main = threading.main_thread().ident

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != main:
            return function(*args, **kwargs)
        with writer.waiting():
            return function(*args, **kwargs)

    call.__wrapped_by_leto__ = function  # type: ignore[attr-defined]
    return call
