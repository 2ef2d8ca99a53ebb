"""Element-wise optimizers, bit-equal to ``torch.optim``, applied to slices of flat planes.

Role: the arithmetic of one chunk transaction (paper section 5.2). The functional forms of torch's own
optimizers do the work, the single-tensor ones (``foreach=False``) on the CPU and the multi-tensor ones
(``foreach=True``) on CUDA, so that a torch release that changes the arithmetic changes both sides alike.
Being element-wise, they give the same bits whether a tensor is updated whole or in slices; the tests hold
them to that. One exception is torch's own: with beta1 = 0 the sign of a moment that is exactly zero depends
on whether a vector lane or the scalar tail of a loop computed it.

Step counts are never stored in tensors that a crash could tear: the caller passes the count of the
optimizer step, which the marker holds, so every chunk of an iteration uses it exactly once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import msgspec
import torch
from torch.optim.adamw import adamw
from torch.optim.sgd import sgd

from leto_rmu.errors import UnsupportedOption

__all__ = ["SGD", "AdamW", "Hyper", "Optimizer", "with_beginnings"]

# Options of torch.optim that change no value of the result, or that the RMU replaces.
_IGNORED_KEYS = frozenset({"params", "foreach", "fused", "initial_lr", "begins"})
# Options that change the result in a way that the RMU does not reproduce, unless they have this value.
_REFUSED_KEYS: Mapping[str, object] = {
    "amsgrad": False,
    "maximize": False,
    "capturable": False,
    "differentiable": False,
}

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)  # of the Newton-Schulz iteration, as in torch.optim.Muon


class Hyper(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Hyperparameters of one group for one iteration; staged with the iteration, bit for bit.

    Fields that an optimizer does not use are ignored by it: ``betas`` belongs to AdamW, ``eps`` to AdamW and
    Muon, ``momentum`` and ``nesterov`` to SGD and Muon, ``dampening`` to SGD, the rest from
    ``ns_coefficients`` on to Muon, whose defaults for the others are those of `muon`.

    ``begins`` is the updater's business (`with_beginnings`): no step before this one has used momentum, so
    SGD's buffer, if this one does, begins as a copy of the gradient.
    """

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    momentum: float = 0.0
    dampening: float = 0.0
    nesterov: bool = False
    ns_coefficients: tuple[float, float, float] = NS_COEFFICIENTS
    ns_steps: int = 5
    adjust_lr_fn: str | None = None
    begins: bool = False

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay", "momentum", "dampening"):
            msgspec.structs.force_setattr(self, name, _float(name, getattr(self, name)))
        for name, count in (("betas", 2), ("ns_coefficients", 3)):
            values = getattr(self, name)
            if len(values) != count:
                words = {2: "two", 3: "three"}
                raise UnsupportedOption(f"{name} must be {words[count]} floats, found {values!r}")
            msgspec.structs.force_setattr(self, name, tuple(_float(name, value) for value in values))
        if isinstance(self.ns_steps, bool) or not isinstance(self.ns_steps, int) or self.ns_steps < 0:
            raise UnsupportedOption(f"ns_steps must be a number of steps, found {self.ns_steps!r}")

    @classmethod
    def muon(
        cls,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = NS_COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
    ) -> Hyper:
        """Hyperparameters with the names, the order and the defaults of ``torch.optim.Muon``."""
        return cls(
            lr,
            eps=eps,
            weight_decay=weight_decay,
            momentum=momentum,
            nesterov=nesterov,
            ns_coefficients=ns_coefficients,
            ns_steps=ns_steps,
            adjust_lr_fn=adjust_lr_fn,
        )

    @classmethod
    def from_param_group(cls, group: Mapping[str, Any]) -> Hyper:
        """Read a ``param_groups`` entry of a torch optimizer; refuse by name what is not reproduced.

        Keys that belong to neither torch nor this class (schedulers and Megatron add some) are left alone.
        """
        if group.get("weight_decay") and not group.get("decoupled_weight_decay", True):
            raise UnsupportedOption(
                "weight_decay of torch.optim.Adam is not decoupled, which is not supported by the updater: "
                "use torch.optim.AdamW, or decoupled_weight_decay=True"
            )
        for name, neutral in _REFUSED_KEYS.items():
            if group.get(name, neutral) != neutral:
                raise UnsupportedOption(
                    f"{name}={group[name]!r} is not supported by the updater: use {name}={neutral!r}"
                )
        known = {
            name: group[name] for name in cls.__struct_fields__ if name in group and name not in _IGNORED_KEYS
        }
        for name in ("betas", "ns_coefficients"):
            if isinstance(known.get(name), list):
                known[name] = tuple(known[name])
        return cls(**known)


def _float(name: str, value: object) -> float:
    # torch computes in single precision with tensors, and in double with numbers: not the same bits.
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise UnsupportedOption(
            f"{name} must be a Python float, found {type(value).__name__}: pass float({name})"
        )
    return float(value)


def with_beginnings(
    hypers: Sequence[Hyper], before: Sequence[Hyper], steps: int, applied: bool
) -> tuple[Hyper, ...]:
    """Set ``begins`` of every group's hyperparameters.

    torch makes a momentum buffer in the first step that has momentum, which need not be the first of all.
    ``before``: hyperparameters of the last iteration, staged with it, and ``applied`` whether its update
    was (found-inf: it was not). Without them, after a checkpoint, buffers are taken as they were loaded.
    """
    if steps == 0:
        return tuple(msgspec.structs.replace(h, begins=True) for h in hypers)
    if not before:
        return tuple(msgspec.structs.replace(h, begins=False) for h in hypers)
    waiting = [b.begins and not (applied and b.momentum != 0) for b in before]
    return tuple(msgspec.structs.replace(h, begins=w) for h, w in zip(hypers, waiting, strict=True))


class Optimizer(Protocol):
    """What the RMU asks of an optimizer: the names of its state planes, and one step over slices."""

    @property
    def name(self) -> str:
        """Stable name; part of the layout hash."""
        ...

    @property
    def state_planes(self) -> tuple[str, ...]:
        """Names of the state kept for each element, one fp32 plane each, zero at the start."""
        ...

    def check(self, hyper: Hyper) -> None:
        """Raise UnsupportedOption when ``hyper`` asks for what this optimizer does not do."""
        ...

    def apply(
        self,
        masters: Sequence[torch.Tensor],
        states: Sequence[Sequence[torch.Tensor]],
        grads: Sequence[torch.Tensor],
        hyper: Hyper,
        step: int,
    ) -> None:
        """Update slices in place. ``states[k]`` are the slices of plane k; ``step`` counts from 1."""
        ...


class AdamW:
    """torch.optim.AdamW (decoupled weight decay, bias correction) without amsgrad."""

    name = "adamw"
    state_planes = ("exp_avg", "exp_avg_sq")

    def check(self, hyper: Hyper) -> None:
        if not (0.0 <= hyper.betas[0] < 1.0 and 0.0 <= hyper.betas[1] < 1.0):
            raise UnsupportedOption(f"AdamW needs betas in [0, 1), found {hyper.betas}")
        if hyper.momentum or hyper.dampening or hyper.nesterov:
            raise UnsupportedOption(
                "momentum, dampening and nesterov belong to SGD: use plan optimizer SGD()"
            )

    def apply(
        self,
        masters: Sequence[torch.Tensor],
        states: Sequence[Sequence[torch.Tensor]],
        grads: Sequence[torch.Tensor],
        hyper: Hyper,
        step: int,
    ) -> None:
        # The functional form adds one to each step tensor: fresh ones per call, so nothing is counted twice.
        with torch.no_grad():
            adamw(
                list(masters),
                list(grads),
                list(states[0]),
                list(states[1]),
                [],
                [torch.tensor(float(step - 1), dtype=torch.float32) for _ in masters],
                foreach=masters[0].is_cuda,
                amsgrad=False,
                beta1=hyper.betas[0],
                beta2=hyper.betas[1],
                lr=hyper.lr,
                weight_decay=hyper.weight_decay,
                eps=hyper.eps,
                maximize=False,
            )


class SGD:
    """torch.optim.SGD with momentum, weight decay, dampening and Nesterov."""

    name = "sgd"
    state_planes = ("momentum_buffer",)

    def check(self, hyper: Hyper) -> None:
        if hyper.nesterov and (hyper.momentum <= 0 or hyper.dampening != 0):
            raise UnsupportedOption("Nesterov momentum needs a momentum and zero dampening")

    def apply(
        self,
        masters: Sequence[torch.Tensor],
        states: Sequence[Sequence[torch.Tensor]],
        grads: Sequence[torch.Tensor],
        hyper: Hyper,
        step: int,
    ) -> None:
        # torch starts the buffer as a copy of the first gradient; 0 * momentum + g would turn -0.0 into 0.0,
        # and dampening would take its part.
        first = (step == 1 or hyper.begins) and hyper.momentum != 0
        foreach = masters[0].is_cuda
        buffers: list[torch.Tensor | None] = (
            [None] * len(masters) if first or hyper.momentum == 0 else list(states[0])
        )
        with torch.no_grad():
            sgd(
                list(masters),
                # torch's foreach form adds Nesterov momentum to the gradients in place.
                [g.clone() for g in grads] if foreach and hyper.nesterov else list(grads),
                buffers,
                foreach=foreach,
                fused=False,
                weight_decay=hyper.weight_decay,
                momentum=hyper.momentum,
                lr=hyper.lr,
                dampening=hyper.dampening,
                nesterov=hyper.nesterov,
                maximize=False,
            )
            if first:
                for plane, buffer in zip(states[0], buffers, strict=True):
                    assert buffer is not None
                    plane.copy_(buffer)
