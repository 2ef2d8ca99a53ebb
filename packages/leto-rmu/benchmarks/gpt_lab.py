"""A GPT whose parameters are views of one flat buffer of bf16, wherever that is; for the proof scripts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 - as everybody calls it
from torch import nn

from leto_rmu import Segment

__all__ = ["GPT", "Shape", "accumulate", "bind", "segments", "tokens"]


@dataclass(frozen=True)
class Shape:
    layers: int
    width: int
    heads: int
    vocabulary: int
    context: int


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, width = shape.heads, shape.width
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(self.before(x)).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.between(x)), approximate="tanh"))


class GPT(nn.Module):
    """Made on the meta device; `bind` gives it memory."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        with torch.device("meta"):
            self.embedding = nn.Embedding(shape.vocabulary, shape.width)
            self.positions = nn.Embedding(shape.context, shape.width)
            self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
            self.last = nn.LayerNorm(shape.width)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """The mean loss of predicting each next token."""
        x = self.embedding(ids[:, :-1]) + self.positions.weight[: ids.shape[1] - 1]
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.last(x), self.embedding.weight)
        return F.cross_entropy(logits.view(-1, logits.shape[-1]).float(), ids[:, 1:].reshape(-1))


def segments(model: GPT) -> list[Segment]:
    """Matrices first (group 0, with weight decay), then vectors (group 1); bf16 copies in the same order."""
    named = sorted(model.named_parameters(), key=lambda item: item[1].dim() < 2)
    found, at = [], 0
    for name, p in named:
        found.append(Segment(name, p.numel(), int(p.dim() < 2), at, model_offset=at))
        at += p.numel()
    return found


def bind(model: GPT, plan_segments: list[Segment], flat: torch.Tensor) -> dict[str, nn.Parameter]:
    """Make every parameter a view of ``flat`` (bf16) at its segment's offset."""
    bound = {}
    for s in plan_segments:
        path, _, leaf = s.name.rpartition(".")
        owner = model.get_submodule(path)
        at = s.grad_offset
        parameter = nn.Parameter(flat[at : at + s.numel].view(owner._parameters[leaf].shape))  # type: ignore[union-attr]
        owner._parameters[leaf] = parameter
        bound[s.name] = parameter
    return bound


def initial(s: Segment, seed: int, device: str = "cuda") -> torch.Tensor:
    """fp32, the same for the same seed."""
    generator = torch.Generator(device).manual_seed(seed * 1_000_003 + s.grad_offset)
    if s.name.endswith("bias"):
        return torch.zeros(s.numel, device=device)
    if s.group == 1:
        return torch.ones(s.numel, device=device)
    return 0.02 * torch.randn(s.numel, generator=generator, device=device)


def accumulate(
    parameters: dict[str, nn.Parameter], plan_segments: list[Segment], grads: torch.Tensor
) -> None:
    """From now on, every backward pass adds its gradients to ``grads`` (fp32)."""
    for s in plan_segments:
        parameter = parameters[s.name]
        place = grads[s.grad_offset : s.grad_offset + s.numel].view(parameter.shape)

        def add(p: torch.Tensor, place: torch.Tensor = place) -> None:
            assert p.grad is not None
            place.add_(p.grad)
            p.grad = None

        parameter.register_post_accumulate_grad_hook(add)


def tokens(shape: Shape, seed: int, t: int, batch: int, length: int) -> torch.Tensor:
    """Text of a language in which every word has four successors; a function of seed and iteration."""
    table = np.random.default_rng(seed).integers(0, shape.vocabulary, (shape.vocabulary, 4))
    rng = np.random.default_rng([seed, t])
    text = np.empty((batch, length + 1), np.int64)
    text[:, 0] = rng.integers(0, shape.vocabulary, batch)
    choices = rng.integers(0, 4, (batch, length))
    for k in range(length):
        text[:, k + 1] = table[text[:, k], choices[:, k]]
    return torch.from_numpy(text)
