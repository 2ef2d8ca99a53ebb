"""Chunk transactions of one iteration (pseudocode 1 of the paper), as three streams of ops.

Role: after all ranks' gradients are protected, prefetch brings H_i into a parity buffer, compute updates the
chunks one by one, drain takes the final parity back to H_i and refreshes tier 2. Upholds I-2 by order alone
(this is the scheme "undo"; `leto_rmu.slots` has the other one):

* U holds C_j before UNDO(j) is visible, and UNDO(j) is visible before C_j changes: until COMMIT(j) the old
  parity with U in place of C_j is authoritative;
* Q' is written out of place and is complete before COMMIT(j, q'): that one marker write is the swap;
* U and the old Q are not written again before COMMIT(j) is visible;
* H_i and tier 2 are invalid from the drain's first byte to DRAINED(i): until then Q is authoritative, and a
  parity buffer is free again only after DRAINED(i).

The gradients are only read. Unscaling and clipping go into scratch, as the two roundings of the reference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from leto_rmu import arrays
from leto_rmu.errors import ProtocolError
from leto_rmu.geometry import Rotation
from leto_rmu.layers import Layers
from leto_rmu.marker import GroupCell, Marker, Phase, SyncResult
from leto_rmu.ops import Condition, Op, Stream
from leto_rmu.optimizers import Hyper
from leto_rmu.regions import RING_BUFFERS
from leto_rmu.views import RankMemory

__all__ = ["ChunkTransactions", "OpenGroup"]


@dataclass(frozen=True)
class OpenGroup:
    """A group whose authoritative parity is in the ring.

    ``chunk`` is the next one to update; ``redo``: its U is valid and C has been restored from it.
    """

    chunk: int
    slot: int
    redo: bool


class ChunkTransactions:
    """The update of one iteration on one rank, from the beginning or from where a crash left it.

    ``step`` is the optimizer's step count, from 1. ``open_groups`` and ``drained`` describe what an earlier
    trainer left; both are empty in a normal update. Gradients must be the effective ones' inputs: complete,
    reduced, and unchanged until the update ends. ``copies``: the update op also writes the bf16 copies of the
    segments with a ``model_offset``.
    """

    copies = False

    def __init__(
        self,
        memory: RankMemory,
        marker: Marker,
        *,
        iteration: int,
        step: int,
        hypers: Sequence[Hyper],
        sync: SyncResult,
        open_groups: Mapping[int, OpenGroup] | None = None,
        drained: frozenset[int] = frozenset(),
    ) -> None:
        self.memory, self.plan, self.marker = memory, memory.plan, marker
        self.iteration, self.step, self.hypers, self.sync = iteration, step, hypers, sync
        self.resumed = dict(open_groups or {})
        self.todo = [g for g in range(self.plan.groups) if g not in drained]
        # Volatile progress: what one stream may rely on another to have finished.
        self.drained = set(drained)
        self.current: dict[int, int] = {
            g: o.slot for g, o in self.resumed.items()
        }  # authoritative, or loaded
        self.spare: dict[int, int] = {}  # Q' of the group in compute
        self.loaded: set[int] = set(self.resumed)
        self.begun: set[int] = set()
        self.committed: dict[int, int] = {g: o.chunk for g, o in self.resumed.items()}  # chunks of a group
        self.layers = Layers(self)
        self.computed: set[int] = set()
        if len(set(self.current.values())) != len(self.current):
            raise ProtocolError(f"two groups claim one parity buffer: {self.current}")

    def streams(self) -> dict[str, Stream]:
        """Streams in their order of priority: the oldest group first."""
        return {"drain": self.drain(), "compute": self.compute(), "prefetch": self.prefetch()}

    # --- ring of parity buffers ---------------------------------------------------------------------
    def _free(self) -> list[int]:
        held = {*self.spare.values(), *(s for g, s in self.current.items() if g not in self.drained)}
        return [s for s in range(RING_BUFFERS) if s not in held]

    def _has_free(self) -> bool:
        return bool(self._free())

    # --- streams ------------------------------------------------------------------------------------
    def prefetch(self) -> Stream:
        """Q = H of the group after the one in compute; needs no mark: H stays authoritative."""
        previous: int | None = None
        for g in self.todo:
            if g not in self.loaded:
                # One group ahead only: a further load could take the buffer that compute needs for Q'.
                if previous is not None:
                    yield self._when(self.begun, previous)
                yield self._has_free
                self.current[g] = self._free()[0]
                yield self.load(g, self.current[g])
                self.loaded.add(g)
            previous = g

    def compute(self) -> Stream:
        """Chunk transactions, group after group."""
        for g in self.todo:
            start = self.resumed.get(g)
            first = start.chunk if start else 0
            if first < self.plan.chunks_in(g):
                yield self._when(self.loaded, g)
                yield self._has_free
                self.spare[g] = self._free()[0]
                self.begun.add(g)
                for c in range(first, self.plan.chunks_in(g)):
                    old, new = self.current[g], self.spare[g]
                    yield from self.chunk_ops(g, c, old, new, bool(start and start.redo and c == first))
                    self.committed[g] = c + 1
                    self.current[g], self.spare[g] = new, old
                del self.spare[g]
            self.begun.add(g)
            self.computed.add(g)

    def drain(self) -> Stream:
        """H = Q and tier 2 of groups that are computed; then their buffer is free."""
        for g in self.todo:
            yield self._when(self.computed, g)
            yield from self.drain_ops(g, self.current[g])
            self.drained.add(g)

    @staticmethod
    def _when(done: set[int], group: int) -> Condition:
        return lambda: group in done

    # --- transactions -------------------------------------------------------------------------------
    def chunk_ops(self, group: int, chunk: int, old: int, new: int, redo: bool) -> Iterator[Op]:
        """One transaction; ``redo`` leaves out what an earlier trainer completed."""
        if not redo:
            yield self.undo(group, chunk)
            yield self.mark(group, Phase.UNDO, chunk, old)
        yield self.update(group, chunk)
        yield self.parity(group, chunk, old, new)
        yield self.mark(group, Phase.COMMIT, chunk, new, name="commit")

    def drain_ops(self, group: int, slot: int) -> Iterator[Op]:
        """Parity back to the host, tier 2, then the mark."""
        yield self.drain_tier1(group, slot)
        if self.memory.tier2_code is not None:
            yield self.drain_tier2(group)
        yield self.mark(group, Phase.DRAINED, 0, slot)

    @property
    def where(self) -> Rotation:
        """Where chunks are now: committed ones in their new places."""
        return Rotation()

    def is_new(self, chunk: int) -> bool:
        """Whether a chunk, counted over all groups, is committed in this iteration."""
        group, local = divmod(chunk, self.plan.chunks_per_group)
        return group in self.drained or local < self.committed.get(group, 0)

    # --- single ops ---------------------------------------------------------------------------------
    def _op(
        self,
        name: str,
        group: int,
        chunk: int | None,
        writes: Sequence[np.ndarray],
        apply: Callable[[], None],
    ) -> Op:
        return Op(name, group, chunk, tuple(writes), apply, self.iteration)

    def mark(self, group: int, phase: Phase, chunk: int, slot: int, name: str = "mark") -> Op:
        return self.marker.write(group, GroupCell(phase, self.iteration, chunk, slot), name=name)

    def load(self, group: int, slot: int) -> Op:
        """Q = H_i."""
        source, target = self.memory.tier1(group), self.memory.ring(slot)
        return self._op("load", group, None, [target], lambda: arrays.copy(target, source))

    def undo(self, group: int, chunk: int) -> Op:
        """U = C_j."""
        runs, saved = self.memory.chunk_runs(group, chunk), self.memory.undo_runs()

        def apply() -> None:
            for target, source in zip(saved, runs, strict=True):
                arrays.copy(target, source)

        return self._op("undo", group, chunk, [self.memory.undo], apply)

    def update(self, group: int, chunk: int) -> Op:
        """C_j = update(C_j, G_j), in place."""
        slot = self.plan.index(group, chunk)
        return self._op(
            "update", group, chunk, self.memory.slot_runs(slot), lambda: self.update_slot(group, chunk, slot)
        )

    def update_slot(self, group: int, chunk: int, slot: int) -> None:
        """Apply the optimizer to the contents of a chunk, which are in ``slot``."""
        memory, plan = self.memory, self.plan
        index = plan.index(group, chunk)
        master, *states = memory.planes.values()
        by_group: dict[int, list[tuple[slice, torch.Tensor]]] = {}
        for piece in plan.pieces(group, chunk):
            place = memory.span(index, slot, piece.lo, piece.hi)
            if piece.matrix is not None:
                self.layers.update(piece, master[place], states[0][place])
                continue
            size = piece.hi - piece.lo
            at = piece.lo - index * plan.chunk_elements
            gradient = self.effective(
                memory.grads[piece.grad_lo : piece.grad_lo + size],
                memory.gradient_scratch[at : at + size],
            )
            by_group.setdefault(piece.group, []).append((place, gradient))
        for hyper_group, items in by_group.items():
            plan.optimizer.apply(
                [master[place] for place, _ in items],
                [[plane[place] for place, _ in items] for plane in states],
                [gradient for _, gradient in items],
                self.hypers[hyper_group],
                self.step,
            )

    def effective(self, gradient: torch.Tensor, scratch: torch.Tensor) -> torch.Tensor:
        """(g * inv_scale) * clip in fp32, each product rounded; in scratch, never in place."""
        out = gradient if gradient.dtype == torch.float32 else scratch.copy_(gradient)
        for factor in (self.sync.inv_scale, self.sync.clip):
            if factor is not None:
                out = torch.mul(out, factor, out=scratch)
        return out

    def parity(self, group: int, chunk: int, old: int, new: int) -> Op:
        """Q' = Q ^ RS_j(U ^ C_j), out of place."""
        memory = self.memory
        source, target = memory.ring(old), memory.ring(new)
        before, after = memory.undo_pages(), memory.slot_pages(self.plan.index(group, chunk))

        def apply() -> None:
            memory.update_parity(source, target, chunk, before, after)

        return self._op("parity", group, chunk, [target], apply)

    def drain_tier1(self, group: int, slot: int) -> Op:
        """H_i = Q."""
        source, target = self.memory.ring(slot), self.memory.tier1(group)
        return self._op("drain", group, None, [target], lambda: arrays.copy(target, source))

    def drain_tier2(self, group: int) -> Op:
        """Tier 2 of the H_i just written."""
        memory = self.memory
        assert memory.tier2_code is not None
        code, target = memory.tier2_code, memory.tier2(group)

        def apply() -> None:
            code.encode(memory.tier1(group), out=target)

        return self._op("tier2", group, None, [target], apply)
