"""Executors that fail on purpose: for drills and for the crash tests (I-2).

`TearAndKill` leaves a random subset of an operation's bytes written and kills its own process, as a power
cut in the middle of a kernel would. `StopAt` counts operations and raises `Stopped` before a given one, for
exhaustive enumeration of crash points inside one process. `at` builds the usual match.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from leto_rmu import arrays
from leto_rmu.ops import Executor, Op

__all__ = ["StopAt", "Stopped", "TearAndKill", "at", "tear"]

Match = Callable[[Op], bool]


def at(
    name: str | None = None,
    *,
    group: int | None = None,
    chunk: int | None = None,
    iteration: int | None = None,
) -> Match:
    """Match ops by name and place; None matches any."""
    wanted = {"name": name, "group": group, "chunk": chunk, "iteration": iteration}

    def match(op: Op) -> bool:
        return all(value is None or getattr(op, key) == value for key, value in wanted.items())

    return match


def tear(ops: Sequence[Op], rng: np.random.Generator) -> None:
    """Apply ops and take a random subset of the bytes that they wrote back again.

    Each view is drawn anew: untouched, complete, or any mixture, in single bytes or in longer runs.
    """
    for op in ops:
        before = [arrays.saved(view) for view in op.writes]
        op.apply()
        for view, old in zip(op.writes, before, strict=True):
            _mix(view, old, rng)


def _mix(view: Any, old: Any, rng: np.random.Generator) -> None:
    new = arrays.saved(view)
    kind: Any = torch.uint8 if arrays.on_device(view) else np.uint8
    old_bytes, new_bytes = old.reshape(-1).view(kind), new.reshape(-1).view(kind)
    count = new_bytes.shape[0]
    share = float(rng.choice([0.0, 0.1, 0.5, 0.9, 1.0]))
    run = int(rng.choice([1, 4, 64]))  # bytes, words or cache lines reach memory together
    kept = np.repeat(rng.random(-(-count // run)) < share, run)[:count]
    if arrays.on_device(view):
        mask = torch.from_numpy(kept).to(view.device)
        view.copy_(torch.where(mask, new_bytes, old_bytes).view(new.dtype).view(new.shape))
        if view.is_cuda:
            torch.cuda.synchronize(view.device)  # the mixture is there when the process dies
        return
    view[...] = np.where(kept, new_bytes, old_bytes).view(new.dtype).reshape(new.shape)


class TearAndKill(Executor):
    """Kill this process in the middle of the first op that matches.

    ``before`` is called first, so that a drill can report that it fired. Ops of other streams that could be
    in flight are torn too, each with probability one half.
    """

    def __init__(
        self,
        inner: Executor | None = None,
        *,
        match: Match,
        seed: int,
        before: Callable[[], None] | None = None,
    ) -> None:
        self._inner = inner if inner is not None else Executor()
        self._match, self._rng, self._before = match, np.random.default_rng(seed), before

    def choose(self, ready: list[str]) -> int:
        return self._inner.choose(ready)

    def run(self, op: Op) -> None:
        if not self._match(op):
            self._inner.run(op)
            return
        if self._before is not None:
            self._before()
        others = [other for other in self.in_flight if self._rng.random() < 0.5]
        tear([op, *others], self._rng)
        os.kill(os.getpid(), signal.SIGKILL)


class Stopped(BaseException):
    """The simulated crash; not an Exception, so that no handler mistakes it for an error to recover from."""


class StopAt(Executor):
    """Count ops; raise `Stopped` at op number ``stop`` (from 0): torn with ``seed``, else not begun."""

    def __init__(self, stop: int | None = None, *, seed: int | None = None) -> None:
        self.stop, self.count = stop, 0
        self._rng = None if seed is None else np.random.default_rng(seed)

    def run(self, op: Op) -> None:
        if self.count == self.stop:
            if self._rng is not None:
                tear([op], self._rng)
            raise Stopped(f"stopped at {op}")
        self.count += 1
        op.apply()
