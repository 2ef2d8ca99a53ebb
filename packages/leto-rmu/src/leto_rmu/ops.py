"""Op and Executor: every write to surviving memory, one at a time and by name.

Role: the seam between the protocol and memory. An op declares the exact bytes it may write; the production
executor applies it, a test executor can stop before it or leave a random part of its bytes written (I-2).
Streams (prefetch, compute, drain) are generators that yield ops, and conditions to wait for; the executor
interleaves them. The order is deterministic here; tests draw it at random.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from leto_rmu._pool import PageRef
from leto_rmu.errors import ProtocolError

__all__ = ["OP_NAMES", "Bytes", "Condition", "Executor", "Op", "Stream"]

Bytes = npt.NDArray[np.uint8]

OP_NAMES = frozenset(
    {
        "fill",  # initialize: zero moments and padding
        "encode",  # initialize: H of a group
        "layout",  # initialize: marker headers
        "protect",  # R = RS(gradients)
        "stage",  # job state and hyperparameters of the next iteration
        "mark",  # a marker cell other than COMMIT
        "load",  # Q = H
        "undo",  # U = C
        "update",  # C = update(C, G)
        "parity",  # Q' = Q ^ RS(U ^ C)
        "commit",  # the COMMIT cell: this write swaps Q and Q'
        "drain",  # H = Q
        "tier2",  # tier 2 of H
        "copy",  # bf16 copies of the masters
        "recompute",  # recovery: gradients by running forward and backward again
        "heal",  # recovery: all marker replicas equal again
        "repair",  # recovery: reconstructed pages
        "restore",  # recovery: C = U of the open chunk
        "acknowledge",  # recovery: page marks cleared
    }
)


@dataclass(frozen=True, eq=False)
class Op:
    """One operation on surviving memory.

    ``writes`` are views (numpy, or torch) of every byte that ``apply`` may change; ``apply`` reads surviving
    memory and its closure only. ``refs`` are the pages whose marks an acknowledgement clears.
    """

    name: str
    group: int | None
    chunk: int | None
    writes: tuple[Any, ...]
    apply: Callable[[], None]
    iteration: int = -1
    refs: tuple[PageRef, ...] = ()

    def __post_init__(self) -> None:
        if self.name not in OP_NAMES:
            raise ProtocolError(f"unknown operation name {self.name!r}")

    def __str__(self) -> str:
        where = "".join(
            f" {k}={v}" for k, v in (("group", self.group), ("chunk", self.chunk)) if v is not None
        )
        return f"{self.name}{where} iteration={self.iteration}"


Condition = Callable[[], bool]
Stream = Iterator[Op | Condition]


class Executor:
    """Apply ops in order; interleave streams, taking the first ready one in the order given."""

    in_flight: tuple[Op, ...] = ()  # ready ops of the other streams: on a GPU these could be half done too

    def run(self, op: Op) -> None:
        """Apply one op. Subclasses may stop before it, tear it, count it."""
        op.apply()

    def choose(self, ready: list[str]) -> int:
        """Index of the stream to advance; ``ready`` names those with an op that may run now."""
        return 0

    def run_all(self, ops: Iterable[Op]) -> None:
        """Run ops of one stream in order."""
        for op in ops:
            self.run(op)

    def drive(self, streams: Mapping[str, Stream]) -> None:
        """Run streams to their ends; raise ProtocolError when all that are left wait for each other."""
        heads: dict[str, Op | Condition | None] = {name: next(s, None) for name, s in streams.items()}
        while True:
            for name, stream in streams.items():
                head = heads[name]
                while head is not None and not isinstance(head, Op) and head():
                    head = next(stream, None)
                heads[name] = head
            ready = {name: head for name, head in heads.items() if isinstance(head, Op)}
            if not ready:
                break
            names = list(ready)
            name = names[self.choose(names)]
            self.in_flight = tuple(op for other, op in ready.items() if other != name)
            self.run(ready[name])
            self.in_flight = ()
            heads[name] = next(streams[name], None)
        waiting = [name for name, head in heads.items() if head is not None]
        if waiting:
            raise ProtocolError(f"streams {waiting} wait for each other: the ring of parity buffers is stuck")
