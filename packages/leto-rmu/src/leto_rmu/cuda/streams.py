"""Streams of this package's own, for side lanes.

Role: ``torch.cuda.Stream()`` takes one of 32 that PyTorch makes when the first is asked for. On an H200 they
take 70 MiB of GPU memory (docs/concepts/lent-memory.md), which a trainer without other streams would pay for
the two of this package. As PyTorch's, these are never destroyed: its allocator may still look at one when
whoever used it is gone.
"""

from __future__ import annotations

from functools import lru_cache

import torch

__all__ = ["own_stream"]


@lru_cache(maxsize=256)
def own_stream(device: int, name: str) -> torch.cuda.Stream:
    """The stream of that name on a device, the same for all who ask; it does not wait for the default stream.

    Two threads that ask first at once get two, of which later ones get the second.
    """
    import cupy

    with cupy.cuda.Device(device):
        address = cupy.cuda.runtime.streamCreateWithFlags(cupy.cuda.runtime.streamNonBlocking)
    stream: torch.cuda.Stream = torch.cuda.ExternalStream(address, torch.device("cuda", device))  # type: ignore[no-untyped-call]
    return stream
