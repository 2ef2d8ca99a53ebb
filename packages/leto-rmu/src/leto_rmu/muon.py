"""Muon: layer-wise updates as chunk transactions, bit-equal to ``torch.optim.Muon`` on the same device.

Role: the arithmetic of segments that are matrices (paper section 5.1: "Muon operates layer-wise"). Only the
*direction* of a step needs the whole layer: it is a function of the layer's gradient and of its new momentum.
Once it is known, momentum and master change element by element, so a chunk transaction can hold any slice of
the layer. What has to hold for I-2 is that a resumed update finds the same direction when some slices of
the layer are already new: `Layers` takes the momentum of committed chunks as it is and computes that of the
others, so that every matrix product sees the same operands, of the same shape, as in an undisturbed update.

The orthogonalisation is torch's own function, so that a torch release which changes the arithmetic changes
both sides alike; `Muon` checks once that torch's step is still made of the parts that are put together here.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from leto_rmu.errors import UnsupportedOption
from leto_rmu.optimizers import SGD, AdamW, Hyper, Optimizer

__all__ = ["Direction", "Muon"]

_ADJUSTMENTS = (None, "original", "match_rms_adamw")
_STEPS_MAX = 99  # torch refuses 100


class Muon:
    """torch.optim.Muon for the segments that have a ``shape``; ``others`` updates those that have none.

    ``others``: `AdamW` or `SGD`, since torch has Muon for matrices only; embeddings, norms and biases need
    another. None: every segment is a matrix. Momentum lies in the first state plane; beside AdamW, whose
    second plane matrices leave unused, that costs four bytes for each of their elements. Needs torch >= 2.9.
    """

    def __init__(self, others: AdamW | SGD | None = None) -> None:
        _torch_muon()
        self.others = others
        self.name = "muon" if others is None else f"muon+{others.name}"
        self.state_planes: tuple[str, ...] = ("momentum_buffer",) if others is None else others.state_planes

    def check(self, hyper: Hyper) -> None:
        """Options of a group of matrices."""
        for name in ("lr", "momentum", "weight_decay"):
            if getattr(hyper, name) < 0:
                raise UnsupportedOption(f"Muon needs {name} >= 0, found {getattr(hyper, name)}")
        if hyper.dampening:
            raise UnsupportedOption("dampening belongs to SGD, Muon has none")
        if hyper.adjust_lr_fn not in _ADJUSTMENTS:
            raise UnsupportedOption(
                f"adjust_lr_fn must be one of {_ADJUSTMENTS}, found {hyper.adjust_lr_fn!r}"
            )
        if hyper.ns_steps > _STEPS_MAX:
            raise UnsupportedOption(f"ns_steps must be at most {_STEPS_MAX}, found {hyper.ns_steps}")

    def apply(
        self,
        masters: Any,
        states: Any,
        grads: Any,
        hyper: Hyper,
        step: int,
    ) -> None:
        """Update slices of segments without a shape, with ``others``."""
        if self.others is None:
            raise UnsupportedOption("Muon updates matrices: give segments a shape, or Muon other=AdamW()")
        self.others.apply(masters, states, grads, hyper, step)

    @staticmethod
    def direction(gradient: torch.Tensor, momentum: torch.Tensor, new: NewParts, hyper: Hyper) -> Direction:
        """What a step does to a matrix.

        ``momentum``: private, (rows, columns) fp32, before this step; it is overwritten. ``new`` replaces the
        parts of the result that are already in retained memory.
        """
        with torch.no_grad():
            momentum.lerp_(gradient, 1 - hyper.momentum)
            new(momentum.view(-1))
            update = gradient.lerp(momentum, hyper.momentum) if hyper.nesterov else momentum
            orthogonal = _torch_muon()._zeropower_via_newtonschulz(
                update, hyper.ns_coefficients, hyper.ns_steps, hyper.eps
            )
            lr = _torch_muon()._adjust_lr(hyper.lr, hyper.adjust_lr_fn, momentum.shape)
            return Direction(momentum.view(-1), orthogonal.reshape(-1), lr, 1 - hyper.lr * hyper.weight_decay)


NewParts = Callable[[torch.Tensor], None]


class Direction:
    """The step of one matrix, to be applied to slices: new momentum (fp32) and direction (bf16), 1-D."""

    def __init__(self, momentum: torch.Tensor, direction: torch.Tensor, lr: float, decay: float) -> None:
        self._momentum, self._direction, self._lr, self._decay = momentum, direction, lr, decay

    def apply(self, lo: int, hi: int, master: torch.Tensor, momentum: torch.Tensor) -> None:
        """Update the slices of the elements ``lo:hi`` in place."""
        with torch.no_grad():
            momentum.copy_(self._momentum[lo:hi])
            master.mul_(self._decay)
            master.add_(self._direction[lo:hi], alpha=-self._lr)


def elementwise(optimizer: Optimizer) -> Optimizer | None:
    """What updates segments without a shape; None: there must be none."""
    return optimizer.others if isinstance(optimizer, Muon) else optimizer


@lru_cache(maxsize=1)
def _torch_muon() -> Any:
    """torch's module of Muon, once it has been seen to do what is put together here."""
    try:
        from torch.optim import _muon as module
    except ImportError:
        raise UnsupportedOption(
            f"Muon needs torch >= 2.9 (torch.optim.Muon), found {torch.__version__}"
        ) from None
    if not _as_expected(module):
        raise UnsupportedOption(
            f"torch.optim.Muon of torch {torch.__version__} computes its steps in another way than that "
            "of 2.9 to 2.13: use one of these for Muon, or AdamW"
        )
    return module


def _as_expected(module: Any) -> bool:
    """Whether torch's step is put together as `Muon.direction` and `Direction.apply` do it."""
    generator = torch.Generator().manual_seed(1)
    for shape in ((3, 5), (5, 3)):
        gradient, parameter = (torch.randn(shape, generator=generator) for _ in range(2))
        expected = torch.nn.Parameter(parameter.clone())
        expected.grad = gradient
        optimizer: Any = module.Muon([expected], lr=0.5)
        optimizer.step()
        momentum = torch.zeros(shape)
        try:
            with torch.no_grad():
                momentum.lerp_(gradient, 1 - 0.95)
                update = gradient.lerp(momentum, 0.95)
                update = module._zeropower_via_newtonschulz(update, (3.4445, -4.7750, 2.0315), 5, 1e-7)
                lr = module._adjust_lr(0.5, None, parameter.shape)
                parameter.mul_(1 - 0.5 * 0.1).add_(update, alpha=-lr)
        except (AttributeError, TypeError):
            return False
        same = torch.equal(parameter, expected.detach())
        if not same or not torch.equal(momentum, optimizer.state[expected]["momentum_buffer"]):
            return False
    return True
