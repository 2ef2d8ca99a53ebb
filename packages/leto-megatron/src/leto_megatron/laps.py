"""Where the time of an iteration goes, phase by phase: by the host's clock, and on a GPU by the device's.

The first iteration after a recovery is slower than the others. Which part of it, and whether the host is slow
to issue work or the device to do it, is told by comparing its phases with those of the others. Marks
are events in the order of the stream, read one iteration later, when they have passed: nobody waits for them.

Role in the whole: `MegatronTrainer` reports what it says with the numbers of an iteration (``--laps``);
`leto-shadow/benchmarks/experiment.py` makes a table of it.
"""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable
from functools import partial
from time import monotonic
from typing import Any

import torch

__all__ = ["PHASES", "Laps"]

PHASES = ("data", "first", "others", "backward", "reduce", "protect", "update", "report")
"""In this order: the batch; forward of the first microbatch; that of the others with the backward passes in
between; the last backward pass; reduction of gradients; norm, parity of gradients and the barrier; the rest
of the update; the record. On stages of a pipeline but the last no loss tells where a forward pass ends: what
follows the first one's beginning counts as "first" there."""


class Laps:
    """Of one trainer. ``new_event`` makes an event as of `torch.cuda.Event` with timing, None where there is
    no GPU; ``memory`` returns how often memory of the device was asked for so far, and the bytes reserved."""

    def __init__(
        self,
        new_event: Callable[[], Any] | None = None,
        memory: Callable[[], tuple[int, int]] = lambda: (0, 0),
    ) -> None:
        self._new_event = new_event
        self._memory = memory
        self._asked: int | None = None
        self._marks: list[tuple[str, float, Any]] = []
        self._before: list[tuple[str, float, Any]] = []
        self._spare: list[Any] = []
        self._collecting_s = self._collected_s = 0.0
        gc.callbacks.append(self._collection)

    @classmethod
    def on(cls, backend: str) -> Laps:
        """Those that go with a backend of the memory pool."""
        if backend != "cuda":
            return cls()
        return cls(partial(torch.cuda.Event, enable_timing=True), _device_memory)

    def begin(self) -> None:
        """An iteration begins, with its first phase. What was marked since the last one ended counts for
        none: a recovery passes some of the same places."""
        self._spare += [event for _, _, event in self._marks if event is not None]
        self._marks, self._collected_s = [], 0.0
        if self._asked is None:
            self._asked, _ = self._memory()
        self.mark(PHASES[0])

    def mark(self, phase: str) -> None:
        """From here on it is ``phase``, until the next mark."""
        event = None
        if self._new_event is not None:
            event = self._spare.pop() if self._spare else self._new_event()
            event.record()
        self._marks.append((phase, monotonic(), event))

    def end(self) -> dict[str, float]:
        """End the iteration; return seconds: ``lap_<phase>_s`` of it by the host's clock,
        ``lap_collection_s`` in Python's cyclic collector, ``gpu_lap_<phase>_s`` of the iteration *before* by
        the device's, if it has passed. On a device also ``lap_allocations``, how often its memory was asked
        for, and ``lap_reserved_mib``, what PyTorch's cache holds.
        """
        self.mark("")
        asked, reserved = self._memory()
        told = _sums("lap", self._marks, lambda one, two: two[1] - one[1])
        told["lap_collection_s"] = self._collected_s
        if self._new_event is not None:
            told["lap_allocations"] = float(asked - (self._asked or 0))
            told["lap_reserved_mib"] = reserved / (1 << 20)
            if self._before and self._before[-1][2].query():
                told |= _sums("gpu_lap", self._before, lambda one, two: one[2].elapsed_time(two[2]) / 1e3)
        self._spare += [event for _, _, event in self._before if event is not None]
        self._asked = asked
        self._before, self._marks = self._marks, []
        return told

    def close(self) -> None:
        """Listen to the collector no more."""
        if self._collection in gc.callbacks:
            gc.callbacks.remove(self._collection)

    def _collection(self, phase: str, _info: dict[str, int]) -> None:
        if phase == "start":
            self._collecting_s = monotonic()
        else:
            self._collected_s += monotonic() - self._collecting_s


def _sums(
    prefix: str, marks: list[tuple[str, float, Any]], between: Callable[[Any, Any], float]
) -> dict[str, float]:
    found: dict[str, float] = {}
    for one, two in itertools.pairwise(marks):
        name = f"{prefix}_{one[0]}_s"
        found[name] = found.get(name, 0.0) + between(one, two)
    return found


def _device_memory() -> tuple[int, int]:
    stats = torch.cuda.memory_stats()
    return int(stats.get("num_device_alloc", 0)), int(stats.get("reserved_bytes.all.current", 0))
