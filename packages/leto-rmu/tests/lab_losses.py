"""Page losses in every kind of memory, at the tolerance and beyond it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
from lab_judge import gradient_pages, orders, rotation
from lab_record import Truth
from lab_world import World

from leto_rmp import PageRef
from leto_rmu.regions import RING_BUFFERS


def loss_patterns(
    world: World, rng: np.random.Generator, truth: Truth | None = None
) -> dict[str, list[PageRef]]:
    """Losses in every kind of memory, at the tolerance and beyond it, chosen anew with ``rng``.

    Where chunks move, ``truth`` says where they are, and the free slot stands for U.
    """
    plan, pool = world.plan, world.pool
    h1, h2, per = pool.tier1_pages, pool.tier2_pages, plan.group_pages

    def data(name: str, indices: Iterable[int], section: str = "data") -> list[PageRef]:
        return [PageRef(name, section, int(k)) for k in indices]  # type: ignore[arg-type]

    def some(count: int, n: int) -> list[int]:
        return sorted(rng.choice(count, size=min(n, count), replace=False).tolist())

    pages = plan.planes * plan.plane_pages
    truth = truth or Truth("ITERATION", 0, (("idle", 0, 0),) * plan.groups)
    order = [page for pages in orders(world, truth) for page in pages]
    free = world.places(*rotation(world, truth))[1]
    undo = (
        data("undo", range(plan.pages_per_chunk))
        if free is None
        else data("arena", [page for page in world.slot_order(free) if page is not None])
    )
    g = int(rng.integers(plan.groups))
    in_group = order[g * per : (g + 1) * per]
    border = max(0, (1 + int(rng.integers(max(1, plan.groups - 1)))) * per - h1 // 2)
    slot = int(rng.integers(RING_BUFFERS)) * h1
    grad_pages = sorted(gradient_pages(world, 0, plan.numel))
    job, cells = plan.job_pages, plan.marker_pages
    keep = int(rng.integers(3))
    split = rng.integers(3, size=2 * job)
    patterns = {
        "none": [],
        "data at tolerance": data("arena", [in_group[k] for k in some(len(in_group), h1)]),
        "data beyond": data("arena", [in_group[k] for k in some(len(in_group), h1 + 1)]),
        "run over two groups": data("arena", order[border : border + h1]),
        "physical run": data("arena", range(k := int(rng.integers(pages)), min(k + h1, pages))),
        "one page of every group": data("arena", [order[k * per] for k in range(plan.groups)]),
        "all of U": undo,
        "all of U and data at tolerance": undo
        + data("arena", [in_group[k] for k in some(len(in_group), h1)]),
        "one of U": [undo[k] for k in some(len(undo), 1)],
        "one of U and data": [undo[k] for k in some(len(undo), 1)] + data("arena", some(pages, 1)),
        "open and other data": data("arena", some(pages, 2)) + [undo[k] for k in some(len(undo), h1 - 1)],
        "one Q buffer": data("parity_ring", range(slot, slot + h1)),
        "rows of every Q": data("parity_ring", [s * h1 + int(rng.integers(h1)) for s in range(RING_BUFFERS)]),
        "rows of every Q and data": data("parity_ring", [s * h1 + int(rng.integers(h1)) for s in range(4)])
        + data("arena", some(pages, h1 - 1)),
        "all of the ring": data("parity_ring", range(RING_BUFFERS * h1)),
        "ring and data": data("parity_ring", range(RING_BUFFERS * h1)) + data("arena", some(pages, 1)),
        "gradients": data("grads", [grad_pages[k] for k in some(len(grad_pages), h1)]),
        "gradients beyond": data("grads", grad_pages[: h1 + 1]),
        "all of R": data("grad_parity", range(len(plan.grad_groups) * h1)),
        "gradients and R": data("grads", [grad_pages[k] for k in some(len(grad_pages), 1)])
        + data("grad_parity", some(len(plan.grad_groups) * h1, 1)),
        "one H": data("arena", some(plan.groups * h1, 1), "tier1"),
        "H and data at tolerance": data("arena", [g * h1 + int(rng.integers(h1))], "tier1")
        + data("arena", [in_group[k] for k in some(len(in_group), h1)]),
        "two H and data": data("arena", [g * h1, g * h1 + 1][:h1], "tier1") + data("arena", in_group[:1]),
        "all H": data("arena", range(plan.groups * h1), "tier1"),
        "all tier 2": data("arena", range(plan.groups * h2), "tier2"),
        "H, tier 2 and data": data("arena", [g * h1], "tier1")
        + data("arena", range(g * h2, (g + 1) * h2), "tier2")
        + data("arena", [in_group[k] for k in some(len(in_group), h1 - 1)]),
        "two marker replicas": data("marker", [k for k in range(3 * cells) if k // cells != keep]),
        "parts of all marker replicas": data(
            "marker", [r * cells + k for k in range(cells) for r in range(3) if r != split[k % len(split)]]
        ),
        "the marker": data("marker", range(3 * cells)),
        "two replicas of the job state": data(
            "job_state", [k for k in range(6 * job) if k // job % 3 != keep]
        ),
        "parts of all job state replicas": data(
            "job_state",
            [
                (s * 3 + r) * job + k
                for s in (0, 1)
                for k in range(job)
                for r in range(3)
                if r != split[s * job + k]
            ],
        ),
        "the job state": data("job_state", range(6 * job)),
        "derived": data("model", range(-(-plan.model_bytes // pool.page_bytes))),
        "gradients and derived": data("grads", grad_pages) + data("model", range(min(1, plan.model_bytes))),
    }
    known = {spec.name for spec in plan.specs()}
    patterns = {name: [r for r in refs if r.allocation in known] for name, refs in patterns.items()}
    universe = sorted({ref for refs in patterns.values() for ref in refs})
    for count in (1, 2, 4):
        patterns[f"{count} of anything"] = [universe[k] for k in some(len(universe), count)]
    return {name: sorted(set(refs)) for name, refs in patterns.items()}
