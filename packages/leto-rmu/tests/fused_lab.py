"""The transaction kernel over all chunks of an arena, and what torch and leto-ec make of the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from leto_rmp import PoolConfig
from leto_rmu import SGD, AdamW, Hyper, Segment, SyncResult, UpdatePlan
from leto_rmu.cuda import TorchMemory
from leto_rmu.cuda.fused import FusedChunks
from leto_rmu.cuda.views import CudaRankMemory
from leto_rmu.geometry import Rotation
from leto_rmu.parts import Piece

PAGE = 4096


def make_plan(
    optimizer: Any,
    segments: Sequence[Segment],
    *,
    subblocks: int = 2,
    grad_dtype: torch.dtype = torch.float32,
    page_bytes: int = PAGE,
    data_pages: int = 1024,
) -> UpdatePlan:
    """A plan of aligned sub-blocks of 15 or 16 pages."""
    planes = 1 + len(optimizer.state_planes)
    return UpdatePlan(
        segments,
        optimizer,
        config=PoolConfig(page_bytes=page_bytes, data_pages=data_pages, tier1_pages=16, tier2_pages=1),
        grad_numel=max(s.grad_offset + s.numel for s in segments) + 5,
        grad_dtype=grad_dtype,
        scheme="slots",
        chunk_pages=subblocks * (16 // planes) * planes,
        model_bytes=2 * max((s.model_offset or 0) + s.numel for s in segments) + 6,
    )


class Bench:
    """Random state of one rank on a device."""

    def __init__(self, plan: UpdatePlan, seed: int, device: str = "cuda") -> None:
        self.plan = plan
        self.memory = CudaRankMemory(plan, TorchMemory(plan.config, device))
        generator = torch.Generator(device).manual_seed(seed)
        m = self.memory
        for name, plane in m.planes.items():
            plane.normal_(0, 0.02, generator=generator)
            if name == "exp_avg_sq":
                plane.square_()
            plane[::97] = 0.0
            plane[5::101] *= 1e-38  # denormal numbers, some of which meet a gradient of zero
        gradients = torch.randn(plan.grad_numel, generator=generator, device=device)
        gradients[::89] = 0.0
        gradients[7::911] *= 1e-30
        m.grads.copy_(gradients.to(plan.grad_dtype))
        pages = m._pages["parity_ring"]
        pages.copy_(
            torch.randint(0, 256, tuple(pages.shape), dtype=torch.uint8, device=device, generator=generator)
        )
        m.model.random_(0, 255, generator=generator)

    def places(self, turn: int) -> list[tuple[int, int, int, int, int]]:
        """(group, chunk, index, source slot, target slot) in the order of an update."""
        geometry = self.plan.geometry
        found = []
        for g in range(self.plan.groups):
            for c in range(self.plan.chunks_in(g)):
                index = self.plan.index(g, c)
                at = (
                    geometry.slot(index, Rotation(turn)),
                    geometry.slot(index, Rotation(geometry.turned(turn))),
                )
                found.append((g, c, index, *at))
        return found


def run(
    bench: Bench,
    fused: FusedChunks,
    hypers: Sequence[Hyper],
    step: int,
    sync: SyncResult,
    turn: int,
    reference: Callable[..., None] | None = None,
) -> None:
    """Run the kernel over all chunks and compare every bit; raise AssertionError."""
    plan, m = bench.plan, bench.memory
    fused.prepare(hypers, step, sync)
    for g, c, index, source, target in bench.places(turn):
        old = [run.clone() for run in m.slot_runs(source)]
        ring, model = m._pages["parity_ring"].clone(), m.model.clone()
        arena = m._pages["arena"].clone()
        fused.launch(index, source, target, 0, 1)
        expected = [run.view(-1).view(torch.float32).clone() for run in old]
        (reference or update)(plan, g, c, index, expected, m.grads, hypers, step, sync)
        what = f"chunk {c} of group {g}, step {step}, {plan.optimizer.name}, {plan.grad_dtype}"
        for name, want, got in zip(plan.plane_names, expected, m.slot_runs(target), strict=True):
            got = got.view(-1).view(torch.float32)
            bad = (got.view(torch.int32) != want.view(torch.int32)).nonzero().view(-1)
            if len(bad):
                k = int(bad[0])
                raise AssertionError(
                    f"{what}: {len(bad)} of {len(want)} of {name} differ, first {k}: {got[k]!r} {want[k]!r}"
                )
        copied = model.clone().view(torch.bfloat16)
        for p in plan.pieces(g, c):
            if p.model_lo is not None:
                at = p.lo - index * plan.chunk_elements
                copied[p.model_lo : p.model_lo + p.hi - p.lo] = expected[0][at : at + p.hi - p.lo].bfloat16()
        halves = m.model.view(torch.bfloat16)  # torch has one NaN on a GPU and two on a processor
        equal = (halves.view(torch.int16) == copied.view(torch.int16)) | (halves.isnan() & copied.isnan())
        assert bool(equal.all()), f"{what}: bf16 copies"
        after = ring.clone()
        h1 = plan.config.tier1_pages
        pages = plan.geometry.buffer_pages()
        flat_old = torch.cat([run.view(-1, plan.config.page_bytes) for run in old])
        flat_new = torch.cat([e.view(torch.uint8).view(-1, plan.config.page_bytes) for e in expected])
        m.code.update(
            ring[:h1],
            index=c * plan.geometry.positions_per_chunk,
            old=[None if k is None else flat_old[k] for k in pages],
            new=[None if k is None else flat_new[k] for k in pages],
            out=after[h1 : 2 * h1],
        )
        assert torch.equal(m._pages["parity_ring"], after), f"{what}: parity"
        # Nothing else is touched: above all neither the old slot nor Q.
        for run, want in zip(m.slot_runs(target), expected, strict=True):
            run.copy_(want.view(torch.uint8).view(run.shape))
        for p in range(plan.planes):
            first = p * plan.plane_pages + target * plan.run
            arena[first : first + plan.run] = m._pages["arena"][first : first + plan.run]
        assert torch.equal(arena, m._pages["arena"]), f"{what}: pages of other slots"
        ring[:h1] = m.ring(1)
        m.ring(0).copy_(m.ring(1))


def effective(
    plan: UpdatePlan, group: int, chunk: int, index: int, grads: torch.Tensor, sync: SyncResult
) -> Iterator[tuple[Piece, slice, torch.Tensor]]:
    """Pieces of a chunk, where they are in it, and their gradients, scaled and clipped in two roundings."""
    for p in plan.pieces(group, chunk):
        lo, hi = p.lo - index * plan.chunk_elements, p.hi - index * plan.chunk_elements
        gradient = grads[p.grad_lo : p.grad_lo + hi - lo].float().clone()
        for factor in (sync.inv_scale, sync.clip):
            if factor is not None:
                gradient = gradient * factor
        yield p, slice(lo, hi), gradient


def update(
    plan: UpdatePlan,
    group: int,
    chunk: int,
    index: int,
    planes: list[torch.Tensor],
    grads: torch.Tensor,
    hypers: Sequence[Hyper],
    step: int,
    sync: SyncResult,
) -> None:
    """torch.optim with foreach=True, in place, on the elements of a chunk."""
    for p, at, gradient in effective(plan, group, chunk, index, grads, sync):
        parameter = torch.nn.Parameter(planes[0][at].clone())
        parameter.grad = gradient
        h = hypers[p.group]
        optimizer: torch.optim.Optimizer
        if isinstance(plan.optimizer, AdamW):
            optimizer = torch.optim.AdamW(
                [parameter], lr=h.lr, betas=h.betas, eps=h.eps, weight_decay=h.weight_decay, foreach=True
            )
            optimizer.state[parameter] = {
                "step": torch.tensor(float(step - 1)),
                "exp_avg": planes[1][at],
                "exp_avg_sq": planes[2][at],
            }
        else:
            assert isinstance(plan.optimizer, SGD)
            optimizer = torch.optim.SGD(
                [parameter],
                lr=h.lr,
                momentum=h.momentum,
                dampening=h.dampening,
                weight_decay=h.weight_decay,
                nesterov=h.nesterov,
                foreach=True,
            )
            if step > 1 and h.momentum:
                optimizer.state[parameter] = {"momentum_buffer": planes[1][at]}
        optimizer.step()
        if isinstance(plan.optimizer, SGD) and step == 1 and h.momentum:
            planes[1][at] = optimizer.state[parameter]["momentum_buffer"]
        planes[0][at] = parameter.detach()
