"""Layers: the directions of the matrices that an update is in the middle of.

Role: between the chunk transactions and `leto_rmu.muon`. A direction is computed before the first chunk of
its layer that is still to be updated, kept in process memory, and dropped after the last one. It is never
read after a crash: the next trainer computes it again, from the gradients, which nobody changes, and from
momentum of which some chunks may be new already. Those are taken as they are, the others are computed, with
operations on the whole matrix: every product sees the operands of an undisturbed update (I-2).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from leto_rmu import segments
from leto_rmu.layout import Piece
from leto_rmu.muon import Direction, Muon

if TYPE_CHECKING:
    from leto_rmu.update import ChunkTransactions

__all__ = ["Layers"]


class Layers:
    """Directions of one update of one rank."""

    def __init__(self, transactions: ChunkTransactions) -> None:
        self._transactions = transactions
        self._plan, self._memory = transactions.plan, transactions.memory
        self._known: dict[str, Direction] = {}

    def update(self, piece: Piece, master: torch.Tensor, momentum: torch.Tensor) -> None:
        """Update the elements of a matrix that lie in one chunk; the slices hold their old values."""
        assert piece.matrix is not None
        at, _ = self._extent(piece.matrix)
        for name in [n for n in self._known if sum(self._extent(n)) <= piece.lo]:
            del self._known[name]  # its last chunk is behind us
        if piece.matrix not in self._known:
            self._known[piece.matrix] = self._direction(piece.matrix)
        self._known[piece.matrix].apply(piece.lo - at, piece.hi - at, master, momentum)

    def _extent(self, name: str) -> tuple[int, int]:
        at, segment = self._plan.offsets[name]
        return at, segment.numel

    def _direction(self, name: str) -> Direction:
        segment, optimizer = self._plan.offsets[name][1], self._plan.optimizer
        assert segment.shape is not None
        assert isinstance(optimizer, Muon)
        gradient = self._memory.grads[segment.grad_offset : segment.grad_offset + segment.numel]
        scratch = torch.empty(segment.numel, device=gradient.device)
        return optimizer.direction(
            self._transactions.effective(gradient, scratch).view(segment.shape),
            segments.read(self._memory, self._transactions.where, name, "momentum_buffer", None).view(
                segment.shape
            ),
            lambda momentum: self.take_new(name, momentum),
            self._transactions.hypers[segment.group],
        )

    def take_new(self, name: str, momentum: torch.Tensor) -> None:
        """Momentum of committed chunks is in retained memory already."""
        at, width = self._extent(name)[0], self._plan.chunk_elements
        for begin, piece in segments.pieces(self._memory, self._transactions.where, name, "momentum_buffer"):
            lo, end = begin, begin + piece.numel()
            while lo < end:
                chunk = (at + lo) // width
                hi = min(end, (chunk + 1) * width - at)
                if self._transactions.is_new(chunk):
                    momentum[lo:hi].copy_(piece[lo - begin : hi - begin])
                lo = hi
