"""Lending: activations wait for their backward pass in memory that only an update needs.

Role: the temporary buffers of the update (free slot or U, Q, R) hold nothing from ITERATION(t+1) until the
next gradients are protected (paper section 5.2; docs/concepts/lent-memory.md). In between they take copies of
tensors that autograd saves, through `torch.autograd.graph.saved_tensors_hooks`: what is saved is copied into
lent memory, and the original is freed as soon as nobody else holds it; the backward pass gets a new tensor
with the same bits.

That no live tensor is in lent memory when the update begins (I-2) needs no look at anybody's books: *none is
ever made*. Lent memory is only copied into and out of, here and under one lock; what the graph holds is a
`Saved`, which is no tensor. `take_back` moves the contents of those that are left into memory of their own,
on the spot and before anything is written, and from then on nothing is lent. Where that memory cannot be had,
it raises, and the update has not begun.

On a GPU the copies are put on the stream that is current where a tensor is saved or needed. Each comes after
the one before, on whatever stream that was; the first comes after what the updater had issued, and the update
after the last. (Copies on a stream of their own, beside the computation, were tried, and cost more:
docs/concepts/lent-memory.md.)
"""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from leto_rmu.errors import ProtocolError
from leto_rmu.gaps import Gaps, Piece

__all__ = ["MIN_BYTES", "Activation", "Lender", "Saved"]

MIN_BYTES = 1 << 20  # smaller tensors are left where they are: a copy takes two launches
Key = tuple[int, int, int, int]  # storage, address, bytes, version
_log = logging.getLogger("leto_rmu")


class Form(NamedTuple):
    """How bytes are a tensor."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]


class Activation:
    """A run of bytes in lent memory, but for its end if there was too little room (``rest``), or moved out
    (``own``)."""

    # No __del__: until that returns, weak references to what is dying still find it, and another thread that
    # saves the same bytes would have it back when its room is given away.
    __slots__ = ("__weakref__", "form", "moved", "own", "pieces", "rest", "storage")

    def __init__(
        self,
        form: Form,
        pieces: Sequence[Piece],
        rest: torch.Tensor | None,
        storage: StorageWeakRef,
    ) -> None:
        self.form, self.pieces, self.rest = form, pieces, rest
        self.storage = storage  # kept: no other storage has its identity meanwhile
        self.own: torch.Tensor | None = None
        self.moved: Any = None  # on a GPU: event behind the copy into ``own``


class Saved:
    """What the graph holds of a tensor: the tensor and its version, or an activation and the form it has."""

    __slots__ = ("activation", "form", "tensor", "version")

    def __init__(
        self,
        tensor: torch.Tensor | None = None,
        activation: Activation | None = None,
        form: Form | None = None,
    ) -> None:
        self.tensor, self.activation, self.form = tensor, activation, form
        self.version = tensor._version if tensor is not None else 0


class Lender:
    """What is lent of one updater. Closed until `open`, and again from `take_back` or `abandon` on.

    ``moved`` counts activations that were still needed when an update began, ``held`` bytes that were in lent
    memory at once at most since lending began.
    """

    def __init__(self) -> None:
        self.moved = self.held = 0
        self._lock = threading.Lock()
        self._ranges: list[torch.Tensor] = []
        self._gaps = Gaps()
        self._retained: list[tuple[int, int]] = []
        self._returned: deque[tuple[int, Key, weakref.ref[Activation], Sequence[Piece]]] = deque()
        self._held: dict[Key, weakref.ref[Activation]] = {}  # of this round, by the bytes that they copy
        self._round = 0  # what an activation of an earlier round gives back is not ours any more
        self._stream: Any = None  # on a GPU: of the newest copy, or the updater's
        self._used = False

    @property
    def lent(self) -> int:
        """Bytes that are lent now."""
        return sum(line.numel() for line in self._ranges)

    # --- the updater's side -------------------------------------------------------------------------
    def open(self, ranges: Sequence[torch.Tensor], retained: Sequence[tuple[int, int]]) -> None:
        """Lend flat uint8 tensors of one device, which nobody else uses until `take_back`.

        ``retained``: addresses (first, end) of memory that outlives the trainer: what lies there (parameters)
        is not moved, since nothing would be freed.
        """
        with self._lock:
            if self._ranges:
                raise ProtocolError("memory is lent already: take it back first")
            self._ranges = [line for line in ranges if line.numel()]
            self._gaps = Gaps([line.numel() for line in self._ranges])
            self._retained = list(retained)
            self._returned.clear()
            if self._ranges and self._ranges[0].is_cuda:
                self._stream = torch.cuda.current_stream(self._ranges[0].device)

    def take_back(self) -> bool:
        """Nothing is in lent memory any more when this returns; whether anything was used.

        Activations that are still needed are moved to memory of their own. Raises what torch raises where
        there is none (torch.OutOfMemoryError); then memory is lent still.
        """
        with self._lock:
            used = self._used
            left = self._left()
            if used:
                self._enter_stream(self._ranges[0].device)
            for one in left:
                if one.own is None:
                    one.own = self._copy_out(one)
                    one.moved = self._stream.record_event() if one.own.is_cuda else None
            self._close(left)
        if left:
            say = _log.debug if self.moved else _log.warning  # once is enough
            self.moved += len(left)
            say(
                "%d saved tensors are needed beyond the update (retain_graph, or a loss that is kept?): they "
                "were moved out of lent memory, and gain nothing by it",
                len(left),
            )
        return used

    def abandon(self) -> None:
        """As `take_back`, where the iteration was given up: what is left is lost, and says so if needed."""
        with self._lock:
            if self._used:
                self._enter_stream(self._ranges[0].device)
            self._close(self._left())

    def _left(self) -> list[Activation]:
        """Activations of this round that a graph still holds."""
        return [one for one in (ref() for ref in self._held.values()) if one is not None]

    def _close(self, left: Sequence[Activation]) -> None:
        for one in left:
            one.pieces, one.rest = (), None
        self._ranges, self._gaps, self._used = [], Gaps(), False
        self._held = {}
        self._round += 1

    # --- autograd's side ----------------------------------------------------------------------------
    def activations(self, min_bytes: int = MIN_BYTES) -> AbstractContextManager[Any]:
        """Tensors of at least so many bytes that autograd saves inside go to lent memory while there is
        room."""
        return torch.autograd.graph.saved_tensors_hooks(partial(self._pack, min_bytes), self._unpack)

    def _pack(self, min_bytes: int, tensor: torch.Tensor) -> Saved:
        with torch.no_grad():
            found = self._move(tensor, min_bytes) if self._may_move(min_bytes, tensor) else None
            # Detached: what an operation saves of its own results would hold itself otherwise.
            return found or Saved(tensor.detach())

    def _unpack(self, saved: Saved) -> torch.Tensor:
        one = saved.activation
        if one is None:
            assert saved.tensor is not None
            # With hooks autograd leaves it to them to notice.
            if saved.tensor._version != saved.version:
                raise RuntimeError(
                    "a tensor that is needed for the gradient has been modified by an in-place operation: "
                    f"{saved.tensor.dtype} of shape {tuple(saved.tensor.shape)} is at version "
                    f"{saved.tensor._version}, expected version {saved.version}"
                )
            return saved.tensor
        with self._lock, torch.no_grad():
            tensor = self._copy_out(one) if one.own is None else one.own
            if one.moved is not None:
                here = torch.cuda.current_stream(tensor.device)
                here.wait_event(one.moved)
                tensor.record_stream(here)
            assert saved.form is not None
            if saved.form == one.form:
                return tensor
            return torch.as_strided(_line(tensor).view(saved.form.dtype), saved.form.size, saved.form.stride)

    def _may_move(self, min_bytes: int, tensor: torch.Tensor) -> bool:
        """Whether moving it could free memory: big, dense, and neither a parameter nor in retained memory."""
        if not self._ranges or type(tensor) is not torch.Tensor or tensor.layout is not torch.strided:
            return False
        if tensor.is_nested:  # has no strides, though its layout is strided
            return False
        if tensor.nbytes < min_bytes or tensor.is_conj() or tensor.is_neg() or tensor.is_quantized:
            return False
        base = tensor._base if tensor._is_view() else tensor
        if isinstance(base, torch.nn.Parameter) or (base is not None and base.is_leaf and base.requires_grad):
            return False
        at = tensor.data_ptr()
        return _dense(tensor) and not any(first <= at < end for first, end in self._retained)

    def _move(self, tensor: torch.Tensor, min_bytes: int) -> Saved | None:
        """Copy it into lent memory; None: there is no room, or it is elsewhere.

        Bytes that are there already are not copied again: an operation's result is often saved by the
        operation and by the next one, as views of one shape and another.
        """
        with self._lock:
            if not self._ranges or tensor.device != self._ranges[0].device:
                return None
            if tensor.is_cuda and torch.cuda.is_current_stream_capturing():
                return None  # a graph would copy into memory that is lent no more when it is replayed
            self._take_in()
            form = Form(tensor.dtype, tensor.size(), tensor.stride())
            storage = StorageWeakRef(tensor.untyped_storage())  # type: ignore[no-untyped-call]
            key = (storage.cdata, tensor.data_ptr(), tensor.nbytes, tensor._version)
            ref = self._held.get(key)
            one = ref() if ref is not None else None
            if one is None:
                one = self._copy_in(tensor, form, storage, min_bytes)
                if one is None:
                    return None
                self._hold(key, one)
            return Saved(activation=one, form=form)

    def _hold(self, key: Key, one: Activation) -> None:
        number, returned, pieces = self._round, self._returned, one.pieces

        def gone(ref: weakref.ref[Activation]) -> None:
            # In any thread, in the middle of anything: an append to a deque needs no lock.
            returned.append((number, key, ref, pieces))

        self._held[key] = weakref.ref(one, gone)

    def _copy_in(
        self, tensor: torch.Tensor, form: Form, storage: StorageWeakRef, min_bytes: int
    ) -> Activation | None:
        room, rest = min(tensor.nbytes, self._gaps.free), None
        if room < min_bytes:
            return None
        if room < tensor.nbytes:
            try:
                rest = torch.empty(tensor.nbytes - room, dtype=torch.uint8, device=tensor.device)
            except torch.OutOfMemoryError:
                _log.debug("no memory for what is left of a saved tensor: it stays where it is")
                return None
        one = Activation(form, self._gaps.take(room), rest, storage)
        self._used = True
        self.held = max(self.held, self.lent - self._gaps.free)
        self._enter_stream(tensor.device)
        try:
            for there, own in self._pairs(one, _line(tensor)):
                there.copy_(own)
        except BaseException:  # nobody knows the activation yet
            self._gaps.give(one.pieces)
            raise
        if tensor.is_cuda:
            # Freed earlier than autograd would: not before what this stream still reads of it.
            tensor.record_stream(self._stream)
        return one

    def _copy_out(self, one: Activation) -> torch.Tensor:
        if not one.pieces:
            raise ProtocolError(
                "this saved tensor was in memory that an updater had lent, and its iteration was given up "
                "(recover() or initialize()): compute it again, forward pass included"
            )
        dtype, size, stride = one.form
        device = self._ranges[0].device
        out = torch.empty_strided(size, stride, dtype=dtype, device=device)
        self._enter_stream(device)
        for there, own in self._pairs(one, _line(out)):
            own.copy_(there)
        if one.rest is not None and one.rest.is_cuda:
            one.rest.record_stream(self._stream)
        return out

    def _pairs(self, one: Activation, line: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(lent, own) for every piece; ``line``: all bytes of the tensor."""
        pairs, at = [], 0
        for k, lo, hi in one.pieces:
            count = min(hi - lo, line.numel() - at)
            pairs.append((self._ranges[k][lo : lo + count], line[at : at + count]))
            at += count
        if one.rest is not None:
            pairs.append((one.rest, line[at:]))
        return pairs

    def _take_in(self) -> None:
        """Room that activations have left since."""
        while self._returned:
            number, key, ref, pieces = self._returned.popleft()
            if number == self._round:
                self._gaps.give(pieces)
                if self._held.get(key) is ref:
                    del self._held[key]

    def _enter_stream(self, device: torch.device) -> None:
        """The current stream goes on after all copies so far, and after the updater's work before them."""
        if device.type != "cuda":
            return
        here = torch.cuda.current_stream(device)
        if here.cuda_stream != self._stream.cuda_stream:
            here.wait_stream(self._stream)
            self._stream = here


def _dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill one run of memory, in whatever order, each once."""
    expected = 1
    for stride, size in sorted(
        (st, n) for st, n in zip(tensor.stride(), tensor.size(), strict=True) if n != 1
    ):
        if stride != expected:
            return False
        expected *= size
    return math.prod(tensor.size()) > 0


def _line(tensor: torch.Tensor) -> torch.Tensor:
    """All bytes of a dense tensor, in the order of memory."""
    whole = torch.as_strided(tensor.detach(), (tensor.numel(),), (1,), tensor.storage_offset())
    return whole.view(torch.uint8)
