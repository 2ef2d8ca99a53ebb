"""The laboratory of the crash tests: a deterministic training, a recording executor, an independent judge.

* `World` trains one rank whose gradients, hyperparameters, sync results and job states are functions of the
  seed and the iteration, and computes what every iteration must look like with plain torch.optim alone.
* `Recorder` is an executor that, before every operation, keeps copies of memory as a crash would leave it:
  not begun, or torn together with any operations of other streams that could be in flight.
* `examine` recovers from such a copy. The result is exact or it is refused; a refusal is held against
  `beyond_tolerance`, which knows only the order of operations and the counts of lost pages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

import leto_ec
import leto_rmu
from leto_ec import ReedSolomon
from leto_rmp import PageRef
from leto_rmu import Action, ArrayMemory, Decision, Executor, Hyper, Op, ResumableUpdater, Segment, SyncResult
from leto_rmu.faults import Stopped, tear
from leto_rmu.layout import MARKER_REPLICAS, RING_BUFFERS
from leto_rmu.marker import Marker


@dataclass(frozen=True)
class Pool:
    """A PoolConfig without its lower bound on page sizes: the protocol does not care, and small is fast."""

    page_bytes: int = 256
    data_pages: int = 6
    tier1_pages: int = 3
    tier2_pages: int = 1
    backend: str = "host"
    pages_per_handle: int = 0


class Wrong(AssertionError):  # noqa: N818 - a verdict
    """A recovery that ended in a wrong state, or refused what it had to repair."""


@dataclass
class State:
    """A copy of everything that survives a trainer."""

    arrays: list[np.ndarray]
    marks: frozenset[PageRef]


class LabMemory(ArrayMemory):
    """ArrayMemory that can be copied and put back; arrays keep their addresses."""

    def _arrays(self) -> list[np.ndarray]:
        return [
            array
            for region in self.regions.values()
            for array in (region.pages, region.tier1, region.tier2)
            if array is not None
        ]

    def snapshot(self) -> State:
        return State([array.copy() for array in self._arrays()], frozenset(self.marks))

    def restore(self, state: State) -> None:
        for array, saved in zip(self._arrays(), state.arrays, strict=True):
            np.copyto(array, saved)
        self.marks = set(state.marks)


SEGMENTS = (Segment("a", 100, 0, 3), Segment("b", 77, 1, 103), Segment("c", 190, 0, 190))


class World:
    """A deterministic training of one rank."""

    def __init__(
        self,
        *,
        seed: int = 0,
        pool: Pool | None = None,
        segments: Sequence[Segment] = SEGMENTS,
        optimizer: leto_rmu.optimizers.Optimizer | None = None,
        grad_numel: int = 384,
        grad_dtype: torch.dtype = torch.float32,
        chunk_pages: int | None = None,
        model_bytes: int = 512,
        no_ops: frozenset[int] = frozenset(),
        updater: type[ResumableUpdater] = ResumableUpdater,
    ) -> None:
        self.seed, self.no_ops, self.updater_class = seed, no_ops, updater
        self.pool = pool or Pool()
        self.plan = leto_rmu.UpdatePlan(
            segments,
            optimizer if optimizer is not None else leto_rmu.AdamW(),
            config=self.pool,  # type: ignore[arg-type]
            grad_numel=grad_numel,
            grad_dtype=grad_dtype,
            chunk_pages=chunk_pages,
            model_bytes=model_bytes,
            job_state_bytes=200,
        )
        self.sgd = isinstance(self.plan.optimizer, leto_rmu.SGD)
        self._arena: list[np.ndarray] = []
        # The judge prefers another kernel than the product would choose.
        kernel = "portable" if "portable" in leto_ec.info()["kernels"] else "reference"
        self._code = ReedSolomon(data=self.pool.data_pages, parity=self.pool.tier1_pages, kernel=kernel)
        if self.pool.tier2_pages:
            self._code2 = ReedSolomon(self.pool.tier1_pages, self.pool.tier2_pages, kernel=kernel)

    # --- functions of the iteration -------------------------------------------------------------------
    def _random(self, *key: int) -> torch.Generator:
        word = int(np.random.SeedSequence([self.seed, *key]).generate_state(1, np.uint64)[0] >> 1)
        return torch.Generator().manual_seed(word)

    def gradient(self, t: int) -> torch.Tensor:
        raw = torch.randn(self.plan.grad_numel, generator=self._random(1, t)) * 10.0 ** (t % 3 - 1)
        return raw.to(self.plan.grad_dtype)

    def initial(self, name: str) -> torch.Tensor:
        at, segment = self.plan.offsets[name]
        return torch.randn(segment.numel, generator=self._random(2, at))

    def hypers(self, t: int) -> list[Hyper]:
        lr = 0.01 * (t + 1) / 3  # a warm-up: a stale or repeated value shows
        if self.sgd:
            return [
                Hyper(lr / (g + 1), momentum=0.9, weight_decay=0.1 * g, nesterov=g == 1)
                for g in range(self.plan.hyper_groups)
            ]
        return [
            Hyper(lr / (g + 1), betas=(0.9, 0.95), weight_decay=0.1 * (1 - g))
            for g in range(self.plan.hyper_groups)
        ]

    def sync(self, t: int) -> SyncResult:
        return SyncResult(
            clip=None if t % 3 == 2 else 0.1 + 0.7 / (t + 2),
            inv_scale=None if t % 4 == 3 else 2.0 ** -(t % 4),
            found_inf=t in self.no_ops,
            grad_norm=1.5 * t,
        )

    def job(self, t: int) -> bytes:
        return f"job state of iteration {t} ".encode() * (1 + t % 3)

    def steps(self, t: int) -> int:
        return t - sum(1 for k in self.no_ops if k < t)

    # --- what must come out, without the RMU ------------------------------------------------------------
    def arena(self, t: int) -> np.ndarray:
        """Bytes of the data pages at the start of iteration t, from plain torch.optim."""
        while len(self._arena) <= t:
            self._extend()
        return self._arena[t]

    def _extend(self) -> None:
        plan = self.plan
        if not self._arena:
            self._parameters = {s.name: torch.nn.Parameter(self.initial(s.name)) for s in plan.segments}
            groups = [
                {"params": [self._parameters[s.name] for s in plan.segments if s.group == g]}
                for g in range(plan.hyper_groups)
            ]
            kind = torch.optim.SGD if self.sgd else torch.optim.AdamW
            self._optimizer = kind([g for g in groups if g["params"]], lr=1.0, foreach=False)
            self._arena.append(self._pages())
            return
        t = len(self._arena) - 1
        gradient, sync = self.gradient(t).float(), self.sync(t)
        if not sync.found_inf:
            for s in plan.segments:
                g = gradient[s.grad_offset : s.grad_offset + s.numel].clone()
                if sync.inv_scale is not None:
                    g = g * sync.inv_scale
                if sync.clip is not None:
                    g = g * sync.clip
                self._parameters[s.name].grad = g
            used = sorted({s.group for s in plan.segments})
            for group, k in zip(self._optimizer.param_groups, used, strict=True):
                hyper = self.hypers(t)[k]
                names = ("lr", "weight_decay") + (("momentum", "nesterov") if self.sgd else ("betas", "eps"))
                group.update({name: getattr(hyper, name) for name in names})
            self._optimizer.step()
        self._arena.append(self._pages())

    def _pages(self) -> np.ndarray:
        plan = self.plan
        planes = np.zeros((plan.planes, plan.plane_pages * plan.page_elements), np.float32)
        for name, parameter in self._parameters.items():
            at, segment = plan.offsets[name]
            state = self._optimizer.state[parameter]
            planes[0, at : at + segment.numel] = parameter.detach().numpy()
            for k, plane in enumerate(plan.optimizer.state_planes, 1):
                if state.get(plane) is not None:
                    planes[k, at : at + segment.numel] = state[plane].numpy()
        return planes.view(np.uint8).reshape(-1, plan.config.page_bytes)

    # --- training ---------------------------------------------------------------------------------------
    def derive(self, up: ResumableUpdater) -> None:
        half = up.memory.planes["master"][: min(self.plan.numel, up.model.numel() // 2)].to(torch.bfloat16)
        up.model[: 2 * half.numel()].copy_(half.view(torch.uint8))

    def updater(
        self, memory: LabMemory, executor: Executor | None = None, barrier: Callable[[], None] | None = None
    ) -> ResumableUpdater:
        return self.updater_class(memory, self.plan, barrier or (lambda: None), self.derive, executor)

    def start(self, executor: Executor | None = None) -> tuple[LabMemory, ResumableUpdater]:
        memory = LabMemory(self.pool)  # type: ignore[arg-type]
        memory.allocate(self.plan.specs())
        rng = np.random.default_rng(self.seed)
        for name in ("grads", "grad_parity", "undo", "parity_ring"):  # nobody may rely on zeros
            pages = memory.regions[name].pages
            pages[:] = rng.integers(0, 256, pages.shape, np.uint8)
        up = self.updater(memory)
        for s in self.plan.segments:
            up.master(s.name).copy_(self.initial(s.name))
        up.initialize(0, self.job(0))
        if executor is not None:
            up.executor = executor
        return memory, up

    def begin(self, up: ResumableUpdater) -> None:
        """Forward and backward."""
        if up.job_state != self.job(up.iteration):
            raise Wrong(f"job state of iteration {up.iteration} is {up.job_state!r}")
        up.compute_begins()
        up.grads.copy_(self.gradient(up.iteration))

    def iterate(self, up: ResumableUpdater) -> None:
        self.begin(up)
        t = up.iteration
        up.step(self.hypers(t), self.job(t + 1), lambda: self.sync(t))

    def train(self, up: ResumableUpdater, until: int) -> None:
        while up.iteration < until:
            self.iterate(up)

    # --- the judge ----------------------------------------------------------------------------------------
    def check(self, memory: LabMemory, up: ResumableUpdater) -> None:
        """Raise Wrong unless memory is exactly that of an uninterrupted run at the start of an iteration."""
        t, plan = up.iteration, self.plan
        arena = memory.regions["arena"]
        if not np.array_equal(arena.pages, self.arena(t)):
            bad = np.flatnonzero((arena.pages != self.arena(t)).any(axis=1)).tolist()
            raise Wrong(f"data pages {bad} of iteration {t}")
        if up.job_state != self.job(t) or up.steps != self.steps(t):
            raise Wrong(f"job state {up.job_state!r}, steps {up.steps} of iteration {t}")
        for group in arena.groups:
            assert arena.tier1 is not None
            h = arena.tier1[group.index]
            if not np.array_equal(h, self._code.encode([arena.pages[k] for k in group.pages])):
                raise Wrong(f"tier 1 of group {group.index}")
            if arena.tier2 is not None and not np.array_equal(
                arena.tier2[group.index], self._code2.encode(h)
            ):
                raise Wrong(f"tier 2 of group {group.index}")
        if memory.marks:
            raise Wrong(f"pages still marked: {sorted(memory.marks)}")
        marker = memory.regions["marker"]
        for alone in range(MARKER_REPLICAS):
            others = [k for k in range(len(marker.pages)) if k // plan.marker_pages != alone]
            if Marker(plan, marker, others).rank != up.marker.rank:
                raise Wrong(f"marker replica {alone} does not hold the newest record")
        model = memory.regions.get("model")
        if model is not None:
            before = model.pages.copy()
            self.derive(up)
            if not np.array_equal(before, model.pages):
                raise Wrong("derived state is not that of the masters")


# --- crash points --------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Truth:
    """What has been completed, from the order of operations alone. ``groups``: (state, chunk, ring slot)."""

    phase: str
    iteration: int
    groups: tuple[tuple[str, int, int], ...]

    @property
    def updating(self) -> bool:
        return self.phase == "SYNCED"


@dataclass
class Point:
    """A crash: memory as it was left, and what may be true of it (a torn mark may count or not)."""

    label: str
    state: State
    truths: list[Truth]


@dataclass
class Recorder(Executor):
    """Apply everything; keep a copy of memory before each op, and ``tears`` torn ones."""

    memory: LabMemory
    world: World
    truth: list[Truth]
    rng: np.random.Generator
    tears: int = 1
    shuffle: bool = False
    recovering: bool = False
    only: int | None = None  # keep this op's points only, then crash there
    points: list[Point] = field(default_factory=list)
    count: int = 0
    _slots: dict[int, int] = field(default_factory=dict)  # where a group's newest parity was written
    _last: dict[int, str] = field(default_factory=dict)  # a group's newest op that is no mark

    def choose(self, ready: list[str]) -> int:
        return int(self.rng.integers(len(ready))) if self.shuffle else 0

    def run(self, op: Op) -> None:
        if self.only is None or self.only == self.count:
            self._keep(op)
        if self.only == self.count:
            raise Stopped(str(op))
        self.count += 1
        op.apply()
        if op.group is not None and op.name not in ("mark", "commit"):
            self._last[op.group] = op.name
        self.truth = [self._after(op, truth) for truth in self.truth]

    def _keep(self, op: Op) -> None:
        here = self.memory.snapshot()
        label = f"op {self.count}{' of recovery' if self.recovering else ''}: {op}"
        self.points.append(Point(f"before {label}", here, list(self.truth)))
        for _ in range(self.tears):
            flying = [op, *(other for other in self.in_flight if self.rng.random() < 0.5)]
            possible = list(self.truth)
            slots = dict(self._slots)
            for one in flying:
                self._tear(one)
                possible += [self._after(one, truth) for truth in possible]
            self._slots = slots
            names = " + ".join(str(one) for one in flying[1:])
            self.points.append(
                Point(f"in {label} {'with ' + names if names else ''}", self.memory.snapshot(), possible)
            )
            self.memory.restore(here)

    def _tear(self, op: Op) -> None:
        if op.name == "acknowledge":
            kept = [ref for ref in op.refs if self.rng.random() < 0.5 and ref in self.memory.marks]
            self.memory.acknowledge(kept)
        else:
            tear([op], self.rng)

    def _after(self, op: Op, truth: Truth) -> Truth:
        """What is true once ``op`` is complete."""
        if op.name in ("load", "parity"):
            self._slots[op.group] = self._slot(op)  # type: ignore[index]
        if op.name not in ("mark", "commit"):
            return truth
        if op.group is None:
            return self._rank(truth)
        groups = list(truth.groups)
        slot = self._slots.get(op.group, groups[op.group][2])
        if op.name == "commit":
            groups[op.group] = ("commit", op.chunk or 0, slot)
        elif self._last.get(op.group) in ("drain", "tier2"):
            groups[op.group] = ("drained", 0, 0)
        else:
            groups[op.group] = ("undo", op.chunk or 0, slot)
        return dataclasses.replace(truth, groups=tuple(groups))

    def _rank(self, truth: Truth) -> Truth:
        idle = tuple(("idle", 0, 0) for _ in truth.groups)
        t = truth.iteration
        if self.recovering and truth.phase in ("COMPUTE", "PROTECTED"):
            return Truth("ITERATION", t, idle)
        following = {
            "ITERATION": Truth("COMPUTE", t, idle),
            "COMPUTE": Truth("PROTECTED", t, idle),
            "PROTECTED": Truth("SYNCED", t, idle),
            "SYNCED": Truth("UPDATED", t, idle),
            "UPDATED": Truth("ITERATION", t + 1, idle),
        }
        return following[truth.phase]

    def _slot(self, op: Op) -> int:
        ring = self.memory.regions["parity_ring"].pages
        offset = op.writes[0].__array_interface__["data"][0] - ring.__array_interface__["data"][0]
        return int(offset) // (self.world.pool.tier1_pages * self.world.pool.page_bytes)


def truth_of(world: World, up: ResumableUpdater) -> list[Truth]:
    """Between two iterations nothing is open."""
    return [Truth("ITERATION", up.iteration, tuple(("idle", 0, 0) for _ in range(world.plan.groups)))]


def record_iteration(
    world: World, *, seed: int, tears: int, shuffle: bool = False, before: int = 1
) -> list[Point]:
    """All crash points of iteration number ``before``, after so many uninterrupted ones."""
    memory, up = world.start()
    world.train(up, before)
    recorder = Recorder(memory, world, truth_of(world, up), np.random.default_rng(seed), tears, shuffle)
    up.executor = recorder
    world.iterate(up)
    recorder.points.append(Point("after the last op", memory.snapshot(), list(recorder.truth)))
    up.executor = Executor()
    world.check(memory, up)
    return recorder.points


def logical_order(plan: leto_rmu.UpdatePlan) -> list[int]:
    """Physical page of every logical index: chunk by chunk, in it plane by plane."""
    return [
        p * plan.plane_pages + r * plan.run + k
        for r in range(plan.plane_pages // plan.run)
        for p in range(plan.planes)
        for k in range(plan.run)
    ]


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
    order = logical_order(plan)
    chunk_pages = plan.planes * plan.run
    needed: set[int] = set()
    for g in range(plan.groups):
        state, chunk, slot = truth.groups[g] if truth.updating else ("idle", 0, 0)
        pages = order[g * per_group : (g + 1) * per_group]
        data = {j for j, page in enumerate(pages) if page in of("arena")}
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
            end = min(begin - first * plan.run + per_group // plan.planes, plan.plane_pages)
            needed |= _gradients(world, begin * plan.page_elements, end * plan.page_elements)
    if truth.updating and truth.iteration not in world.no_ops:
        touched = sorted(_gradients(world, 0, plan.numel))
        for k in range(0, len(touched), pool.data_pages):
            group = set(touched[k : k + pool.data_pages])
            first_row = k // pool.data_pages * h1
            rows = h1 - len(set(range(first_row, first_row + h1)) & of("grad_parity"))
            if group & needed and len(group & of("grads")) > rows:
                return f"gradients from page {touched[k]}"
    return ""


def _gradients(world: World, begin: int, end: int) -> set[int]:
    """Gradient pages that the elements begin..end of the planes need, element by element."""
    at, pages, item = 0, set(), world.plan.grad_dtype.itemsize
    for s in world.plan.segments:
        elements = np.arange(max(begin, at), min(end, at + s.numel)) - at + s.grad_offset
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


def record_recovery(
    world: World,
    memory: LabMemory,
    point: Point,
    losses: Sequence[PageRef] = (),
    *,
    seed: int,
    tears: int = 1,
    shuffle: bool = False,
    only: int | None = None,
) -> list[Point]:
    """Crash points of the recovery from ``point`` with ``losses``; empty if that recovery is refused."""
    memory.restore(point.state)
    memory.lose(losses, seed)
    up = world.updater(memory)
    raw = leto_rmu.decide([up.summary()])
    action = Decision.decode(raw).action
    if action not in (Action.RESTART, Action.FINISH):
        return []
    ahead = ("ITERATION", "COMPUTE", "PROTECTED")
    truths = [t for t in point.truths if (t.phase in ahead) == (action is Action.RESTART)]
    recorder = Recorder(memory, world, truths, np.random.default_rng(seed), tears, shuffle, True, only)
    up.executor = recorder
    try:
        up.recover(raw)
    except Stopped:
        pass
    else:
        recorder.points.append(Point("after recovery", memory.snapshot(), list(recorder.truth)))
    for found in recorder.points:
        found.label += f" (first crash {point.label}; lost {', '.join(map(str, losses)) or 'nothing'})"
    return recorder.points


# --- page losses ---------------------------------------------------------------------------------------
def loss_patterns(world: World, rng: np.random.Generator) -> dict[str, list[PageRef]]:
    """Losses in every kind of memory, at the tolerance and beyond it, chosen anew with ``rng``."""
    plan, pool = world.plan, world.pool
    h1, h2, per = pool.tier1_pages, pool.tier2_pages, plan.group_pages

    def data(name: str, indices: Iterable[int], section: str = "data") -> list[PageRef]:
        return [PageRef(name, section, int(k)) for k in indices]  # type: ignore[arg-type]

    def some(count: int, n: int) -> list[int]:
        return sorted(rng.choice(count, size=min(n, count), replace=False).tolist())

    pages = plan.planes * plan.plane_pages
    order = logical_order(plan)
    g = int(rng.integers(plan.groups))
    in_group = order[g * per : (g + 1) * per]
    border = max(0, (1 + int(rng.integers(max(1, plan.groups - 1)))) * per - h1 // 2)
    slot = int(rng.integers(RING_BUFFERS)) * h1
    grad_pages = sorted(_gradients(world, 0, plan.numel))
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
        "all of U": data("undo", range(plan.pages_per_chunk)),
        "one of U": data("undo", some(plan.pages_per_chunk, 1)),
        "one of U and data": data("undo", some(plan.pages_per_chunk, 1)) + data("arena", some(pages, 1)),
        "open and other data": data("arena", some(pages, 2))
        + data("undo", some(plan.pages_per_chunk, h1 - 1)),
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
    }
    universe = sorted({ref for refs in patterns.values() for ref in refs})
    for count in (1, 2, 4):
        patterns[f"{count} of anything"] = [universe[k] for k in some(len(universe), count)]
    return {name: sorted(set(refs)) for name, refs in patterns.items()}
