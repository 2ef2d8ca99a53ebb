"""Derived state: low-precision model copies cast from the fp32 masters.

Role: the usual ``rebuild_derived`` callback for a plain training loop. Derived memory is never protected:
it is rebuilt from the masters after every update and every attach (docs/concepts/vocabulary.md).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from leto_rmu.updater import ResumableUpdater

__all__ = ["cast_masters"]


def cast_masters(parameters: Mapping[str, torch.Tensor]) -> Callable[[ResumableUpdater], None]:
    """Make a callback that casts each segment's master into the parameter of the same name.

    ``parameters``: segment name -> contiguous tensor with the segment's number of elements, of any float
    dtype.
    """

    def rebuild(updater: ResumableUpdater) -> None:
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.view(-1).copy_(updater.master(name))

    return rebuild
