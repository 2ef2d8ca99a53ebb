"""The judge: recover from a crash point; the result is exact, or refused for a reason that counting confirms.

Nothing here uses the updater's own idea of what is lost or recoverable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from lab_record import Point, Truth
from lab_world import LabMemory, World, Wrong

import leto_rmu
from leto_rmp import PageRef
from leto_rmu import Action, Decision, Executor


def rotation(world: World, truth: Truth) -> tuple[int, int]:
    """Complete updates behind the truth, and chunks that an update in progress has committed."""
    steps = world.steps(truth.iteration)
    if not truth.updating:
        return steps + int(truth.phase == "UPDATED" and truth.iteration not in world.no_ops), 0
    per = world.plan.chunks_per_group
    count = {"idle": lambda g, c: 0, "undo": lambda g, c: c, "commit": lambda g, c: c + 1}
    count["drained"] = lambda g, c: min(per, world.chunks - g * per)
    return steps, sum(count[state](g, chunk) for g, (state, chunk, _) in enumerate(truth.groups))


def orders(world: World, truth: Truth) -> list[list[int]]:
    """For every group its pages at the truth, in the order of the parity."""
    found = world.group_orders(*rotation(world, truth))
    return [[page for page in order if page is not None] for order in found]


def padding(world: World, truth: Truth) -> set[int]:
    """Pages of the last chunk behind its last element: they are zero, whatever becomes of them."""
    plan, slot = world.plan, world.places(*rotation(world, truth))[0][-1]
    rest = plan.numel - (world.chunks - 1) * plan.run * plan.page_elements
    slots = world.chunks + (plan.scheme == "slots")
    return {
        (p * slots + slot) * plan.run + k
        for p in range(plan.planes)
        for k in range(-(-rest // plan.page_elements), plan.run)
    }


def beyond_tolerance(world: World, truth: Truth, lost: Iterable[PageRef]) -> str:
    """Why these losses exceed what the paper promises, or "" - by counting, without the RMU's code."""
    plan, pool = world.plan, world.pool
    h1, h2 = pool.tier1_pages, pool.tier2_pages
    gone: dict[tuple[str, str], set[int]] = {}
    for ref in lost:
        gone.setdefault((ref.allocation, ref.section), set()).add(ref.index)

    def of(name: str, section: str = "data") -> set[int]:
        return gone.get((name, section), set())

    cells = plan.marker_pages  # the first 256 bytes are a header, which recovery can write again
    if any(
        all(r * cells + k in of("marker") for r in range(3)) for k in range(256 // pool.page_bytes, cells)
    ):
        return "marker"
    finish = truth.phase in ("SYNCED", "UPDATED")
    tag, size = truth.iteration + int(finish), plan.job_pages
    slots = [((tag % 2) * 3 + r) * size for r in range(3)]
    if any(all(s + k in of("job_state") for s in slots) for k in range(size)):
        return "job state"

    per_group = plan.group_pages
    order = orders(world, truth)
    chunk_pages = plan.planes * plan.run
    arena = of("arena") - padding(world, truth)
    needed: set[int] = set()
    for g in range(plan.groups):
        state, chunk, slot = truth.groups[g] if truth.updating else ("idle", 0, 0)
        pages = order[g]
        data = {j for j, page in enumerate(pages) if page in arena}
        if state in ("undo", "commit"):
            rows = h1 - len({slot * h1 + i for i in range(h1)} & of("parity_ring"))
            if state == "undo":
                data -= set(range(chunk * chunk_pages, (chunk + 1) * chunk_pages))
        else:
            lost1 = len({g * h1 + i for i in range(h1)} & of("arena", "tier1"))
            lost2 = len({g * h2 + i for i in range(h2)} & of("arena", "tier2"))
            rows = h1 if lost1 <= h2 - lost2 else h1 - lost1
        count = len(data) + (len(of("undo")) if state == "undo" else 0)
        if count > rows:
            return f"group {g}: {count} pages, {rows} parities"
        if truth.updating and state != "drained":
            first = {"idle": 0, "undo": chunk, "commit": chunk + 1}[state]
            begin = g * per_group // plan.planes + first * plan.run
            end = min(begin - first * plan.run + per_group // plan.planes, world.chunks * plan.run)
            needed |= gradient_pages(world, begin * plan.page_elements, end * plan.page_elements)
    if plan.gradients == "recompute":
        again = needed if truth.regrading else needed & of("grads")
        slots = [((truth.iteration % 2) * 3 + r) * size for r in range(3)]
        if again and truth.iteration not in world.no_ops:
            if of("model"):
                return "gradients and the parameters that they come from"
            if any(all(s + k in of("job_state") for s in slots) for k in range(size)):
                return "job state"
    elif truth.updating and truth.iteration not in world.no_ops:
        touched = sorted(gradient_pages(world, 0, plan.numel))
        for k in range(0, len(touched), pool.data_pages):
            group = set(touched[k : k + pool.data_pages])
            first_row = k // pool.data_pages * h1
            rows = h1 - len(set(range(first_row, first_row + h1)) & of("grad_parity"))
            if group & needed and len(group & of("grads")) > rows:
                return f"gradients from page {touched[k]}"
    return ""


def gradient_pages(world: World, begin: int, end: int) -> set[int]:
    """Gradient pages that the elements begin..end of the planes need, element by element."""
    at, pages, item = 0, set(), world.plan.grad_dtype.itemsize
    for s in world.plan.segments:
        elements = np.arange(max(begin, at), min(end, at + s.numel)) - at + s.grad_offset
        if elements.size and world.plan.is_matrix(s):
            elements = np.arange(s.numel) + s.grad_offset  # a direction is a function of the whole layer
        if elements.size:
            first, last = elements[[0, -1]] * item // world.pool.page_bytes
            pages.update(range(first, (elements[-1] * item + item - 1) // world.pool.page_bytes + 1))
            assert last <= max(pages)
        at += s.numel
    return pages


@dataclass
class Outcome:
    """``action`` None: refused, for ``reason``."""

    action: Action | None
    reason: str = ""
    verified: bool = True


def examine(
    world: World,
    memory: LabMemory,
    point: Point,
    losses: Sequence[PageRef] = (),
    *,
    seed: int = 0,
    go_on: int = 1,
    executor: Callable[[], Executor] | None = None,
) -> Outcome:
    """Crash at ``point`` with ``losses`` on top, recover, judge; train ``go_on`` iterations, judge again.

    Raises Wrong with everything needed to repeat it. Leaves memory as recovered.
    """
    memory.restore(point.state)
    memory.lose(losses, seed)
    lost = frozenset(memory.marks)
    try:
        up = world.updater(memory, executor() if executor else None)
        decision = leto_rmu.decide([up.summary()])
        decoded = Decision.decode(decision)
        reasons = [beyond_tolerance(world, truth, lost) for truth in point.truths]
        if decoded.action in (Action.FRESH, Action.CHECKPOINT):
            if not any(reasons):
                raise Wrong(f"refused within tolerance: {decoded.reason}")
            return Outcome(None, decoded.reason)
        # Checksummed records may be better off than counted: short, or already repaired but still marked.
        if all(reason and reason not in ("marker", "job state") for reason in reasons):
            raise Wrong(f"accepted beyond tolerance: {reasons}")
        recovered = up.recover(decision)
        ends = {t.iteration + int(t.phase in ("SYNCED", "UPDATED")) for t in point.truths}
        if recovered.iteration not in ends:
            raise Wrong(f"recovered to iteration {recovered.iteration}, expected one of {ends}")
        world.check(memory, up)
        if go_on:
            world.train(up, up.iteration + go_on)
            world.check(memory, up)
        return Outcome(recovered.action, recovered.reason, recovered.verified)
    except Wrong as wrong:
        text = ", ".join(map(str, sorted(lost)))
        raise Wrong(f"{wrong} - crash {point.label}; lost {text or 'nothing'}; loss seed {seed}") from None


def examine_all(
    world: World,
    memory: LabMemory,
    points: Iterable[Point],
    losses_of: Callable[[Point, int], Mapping[str, Sequence[PageRef]]],
    *,
    share: int,
) -> Iterator[tuple[str, Outcome]]:
    """Examine every point with every pattern of losses, or with one in `share` of them, at each point others.

    An odd share, as points before and in an operation alternate: every pattern is to meet both. `losses_of`
    gets a point and its number; some of the trainings go on for one more iteration.
    """
    for i, point in enumerate(points):
        for j, (kind, losses) in enumerate(losses_of(point, i).items()):
            if (i + j) % share == 0:
                yield kind, examine(world, memory, point, losses, seed=i, go_on=int((i + j) % 7 == 0))
