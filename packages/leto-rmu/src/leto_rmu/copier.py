"""Copiers: who moves contents into lent memory and out of it, and what waits for whom meanwhile.

Role: `leto_rmu.lending` says what is copied, in which order; a copier has it done. `Copier` does it on the
spot. `StreamCopier` puts all copies on *one* stream of a GPU, in the order in which they are asked for,
beside the computation. A place that is given out again is written after it was read, since the stream does
one after the other, and the update comes after all of them, since it waits for that one stream.

The caller does not wait for what can be done meanwhile: an original is freed when its copy is done, and by
then something else has been computed; what the backward pass needs next is copied out while it is still busy
with what it needs now (``ahead``).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

__all__ = ["Copied", "Copier", "Pairs", "StreamCopier", "Streams"]

Pairs = Sequence[tuple[torch.Tensor, torch.Tensor]]  # flat uint8: to, from


class Copied(NamedTuple):
    """A tensor that a copy fills: complete once ``event`` has happened; made on stream ``maker``."""

    tensor: torch.Tensor
    event: Any = None
    maker: Any = None


class Copier:
    """Each copy has been made when the call returns."""

    ahead = False  # whether it pays to copy out what will be needed next

    def begin(self) -> None:
        """What was issued on the caller's stream so far comes before all copies from here on."""

    def copy_in(self, pairs: Pairs, original: torch.Tensor) -> None:
        """Copy; ``original``, which is read, is kept until `let_go`."""
        for to, since in pairs:
            to.copy_(since)

    def copy_out(self, pairs: Pairs, out: torch.Tensor) -> Copied:
        """Copy; ``out``, which is written, was made on the caller's stream just now."""
        for to, since in pairs:
            to.copy_(since)
        return Copied(out)

    def use(self, copied: Copied) -> torch.Tensor:
        """The tensor, of which all bits are there for what the caller's stream does next."""
        return copied.tensor

    def let_go(self, keep: int = 0) -> None:
        """Forget originals, but for the newest ``keep``: their memory may have another use from here on."""

    def drop(self, tensors: Sequence[torch.Tensor]) -> None:
        """Forget tensors that copies may still be under way to or from, whatever stream made them."""

    def finish(self) -> None:
        """All copies so far come before what the caller's stream does next."""
        self.let_go()


class Streams:
    """Streams of one device, as PyTorch has them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def here(self) -> torch.cuda.Stream:
        """The caller's."""
        return torch.cuda.current_stream(self._device)

    def copy(self, stream: torch.cuda.Stream, pairs: Pairs) -> None:
        """Put copies on that stream."""
        with torch.cuda.stream(stream):
            for to, since in pairs:
                to.copy_(since)

    def outlive(self, tensor: torch.Tensor, stream: torch.cuda.Stream) -> None:
        """Memory of the tensor has no other use before the stream is done with what it holds then."""
        tensor.record_stream(stream)


class StreamCopier(Copier):
    """All copies on ``stream``, in order.

    ``record_stream`` alone would do for originals, but not for memory at its peak: PyTorch gives such a block
    out again only when the *device* has got there, and the host is far ahead of it. So the stream that saved
    an original is made to wait for the copy, which is long done by then, before the original is freed.
    """

    ahead = True

    def __init__(self, stream: Any, streams: Any) -> None:
        self._stream, self._streams = stream, streams
        self._originals: deque[tuple[Any, Any, torch.Tensor]] = deque()  # event, stream that saved it

    def begin(self) -> None:
        self._stream.wait_stream(self._streams.here())

    def _copy(self, pairs: Pairs) -> Any:
        self.begin()
        self._streams.copy(self._stream, pairs)
        return self._stream.record_event()

    def copy_in(self, pairs: Pairs, original: torch.Tensor) -> None:
        self._originals.append((self._copy(pairs), self._streams.here(), original))

    def copy_out(self, pairs: Pairs, out: torch.Tensor) -> Copied:
        return Copied(out, self._copy(pairs), self._streams.here())

    def use(self, copied: Copied) -> torch.Tensor:
        here = self._streams.here()
        here.wait_event(copied.event)
        if here != copied.maker:
            self._streams.outlive(copied.tensor, here)
        return copied.tensor

    def let_go(self, keep: int = 0) -> None:
        while len(self._originals) > keep:
            event, saver, original = self._originals.popleft()
            saver.wait_event(event)
            self._streams.outlive(original, saver)  # it may have been made on yet another stream

    def drop(self, tensors: Sequence[torch.Tensor]) -> None:
        here = self._streams.here()
        if tensors:
            here.wait_stream(self._stream)
        for tensor in tensors:
            self._streams.outlive(tensor, here)

    def finish(self) -> None:
        self.let_go()
        self._streams.here().wait_stream(self._stream)
