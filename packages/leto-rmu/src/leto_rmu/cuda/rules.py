"""What the transaction kernel needs to know of each optimizer: the host's half of its rule.

Role: turns hyperparameters into the constants of ``Step`` in transaction.cuh, by the expressions of torch's
own ``foreach=True`` implementations: in double precision, rounded to float where torch rounds. A rule whose
gradients are directions that the caller has computed (Muon) has an entry like any other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from leto_rmu.optimizers import Hyper

__all__ = ["RULES", "Rule"]

Constants = tuple[tuple[float, ...], int]  # values, flags


@dataclass(frozen=True)
class Rule:
    """``kernel``: middle of the kernel's name; ``planes`` and ``run``: of a sub-block, as compiled in.

    ``lean``: whether there is a kernel of that variant too.
    """

    kernel: str
    planes: int
    run: int
    constants: Callable[[Hyper, int], Constants]
    lean: bool = False


def adamw(hyper: Hyper, step: int) -> Constants:
    """Constants of torch.optim.AdamW; ``step`` counts from 1."""
    beta1, beta2 = hyper.betas
    weight = np.float32(1 - beta1)
    return (
        1 - hyper.lr * hyper.weight_decay if hyper.weight_decay != 0 else 1.0,
        float(weight),
        float(np.float32(1) - weight),
        beta2,
        1 - beta2,
        (1 - beta2 ** float(step)) ** 0.5,
        hyper.eps,
        (hyper.lr / (1 - beta1 ** float(step))) * -1,
    ), 0


DECAY, MOMENTUM, FIRST, NESTEROV = 1, 2, 4, 8


def sgd(hyper: Hyper, step: int) -> Constants:
    """Constants of torch.optim.SGD; the momentum buffer begins as a copy of the gradient."""
    flags = DECAY * (hyper.weight_decay != 0) | MOMENTUM * (hyper.momentum != 0)
    flags |= FIRST * (step == 1 or hyper.begins) | NESTEROV * hyper.nesterov
    return (hyper.weight_decay, hyper.momentum, 1 - hyper.dampening, -hyper.lr), flags


RULES = {"adamw": Rule("adamw", 3, 5, adamw, lean=True), "sgd": Rule("sgd", 2, 8, sgd)}
