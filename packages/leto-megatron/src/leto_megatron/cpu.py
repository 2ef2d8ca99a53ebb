"""Let Megatron-Core run where there is no GPU: CPU tensors, gloo collectives.

Role in the whole: the host backend. A laptop trains the same Megatron model, with the same optimizer and
the same schedules, that a GPU node trains, so that every failure drill is real.

Megatron-Core 0.16.1 needs five things to stay on the CPU, and each is one function below. Where CUDA is
available only two remain, which both modes need alike: no compiler at import, and a name for the types of
meta tensors. Nothing is changed twice, and only processes of this package call :func:`install`, because some
of the patches are visible through the ``torch`` module.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import logging
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch

__all__ = ["import_megatron", "install"]

_CPU = torch.device("cpu")
_installed = False

_MODULES = (
    "megatron.core",
    "megatron.core.distributed",
    "megatron.core.models.gpt",
    "megatron.core.models.gpt.gpt_layer_specs",
    "megatron.core.optimizer",
    "megatron.core.optimizer_param_scheduler",
    "megatron.core.pipeline_parallel",
    "megatron.core.tensor_parallel.random",
    "megatron.core.transformer.module",
)


def install() -> None:
    """Import Megatron-Core and, where there is no GPU, keep it on the CPU. May be called again."""
    global _installed
    if _installed:
        return
    import_megatron()
    if torch.cuda.is_available():
        _answer_type_checks(only_meta=True)
    else:
        _keep_devices_on_cpu()
        _answer_type_checks(only_meta=False)
        _drive_the_cpu_generator()
        _make_synchronisation_empty()
    _installed = True


def import_megatron() -> None:
    """Import what a trainer uses of Megatron-Core.

    Megatron decorates small functions with ``torch.compile`` while it is imported, which pulls the compiler
    into every shadow's start, for fusions that these runs turn off. So ``torch.compile`` is the identity for
    the duration of the import.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Megatron announces at import which optional packages are missing
        if "megatron.core" in sys.modules:
            _import_all()
            return
        with _eager_compile():
            _import_all()


def _import_all() -> None:
    for name in _MODULES:
        importlib.import_module(name)


@contextlib.contextmanager
def _eager_compile() -> Iterator[None]:
    def identity(model: Any = None, **_options: Any) -> Any:
        return model if model is not None else lambda function: function

    original = torch.compile
    torch.compile = identity
    try:
        yield
    finally:
        torch.compile = original


def _keep_devices_on_cpu() -> None:
    """Send what asks for the current CUDA device, or for the literal "cuda", to the CPU."""
    with torch.device("meta"):
        # `with torch.device(...)` knows factories by identity and lists them at its first use: let it list
        # the originals, or models could no longer be built on the meta device.
        torch.empty(0)
    torch.cuda.current_device = lambda: _CPU  # type: ignore[assignment,return-value]
    for name in ("empty", "ones", "tensor", "zeros"):
        setattr(torch, name, _on_cpu(getattr(torch, name)))
    torch.Tensor.cuda = lambda self, *_args, **_kwargs: self  # type: ignore[method-assign]


def _on_cpu(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def make(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and not isinstance(device, int) and torch.device(device).type == "cuda":
            kwargs["device"] = _CPU
        return factory(*args, **kwargs)

    return make


def _answer_type_checks(*, only_meta: bool) -> None:
    """Megatron tells fp32 from bf16 parameters by the name of a CUDA tensor type: give it that name.

    Meta tensors answer alike, so that a model can be laid out before it has memory.
    """
    original = torch.Tensor.type

    def type_(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        answer = original(self, *args, **kwargs)
        if isinstance(answer, str) and (self.is_meta or not only_meta):
            return "torch.cuda." + answer.rsplit(".", 1)[-1]
        return answer

    torch.Tensor.type = type_  # type: ignore[method-assign,assignment]


def _drive_the_cpu_generator() -> None:
    """Point Megatron's RNG tracker, which forks CUDA streams, at the one CPU generator."""
    from megatron.core.tensor_parallel import random

    def get_state(*_args: Any, **_kwargs: Any) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(state: torch.Tensor, *_args: Any, **_kwargs: Any) -> None:
        torch.set_rng_state(state)

    def seed_cpu(seed: int) -> None:
        torch.default_generator.manual_seed(seed)

    random._get_cuda_rng_state = get_state
    random._set_cuda_rng_state = set_state
    torch.cuda.get_rng_state = get_state
    torch.cuda.set_rng_state = set_state  # type: ignore[assignment]
    torch.cuda.manual_seed = seed_cpu
    # The tracker warns that the CPU generator moved while the "GPU" one was forked: here they are one.
    logging.getLogger(random.__name__).addFilter(
        lambda record: "CPU RNG state changed" not in record.getMessage()
    )


def _make_synchronisation_empty() -> None:
    torch.cuda.synchronize = lambda *_args, **_kwargs: None
