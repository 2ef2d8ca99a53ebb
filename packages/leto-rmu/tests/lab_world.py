"""A deterministic training of one rank over memory that can be copied, and what it must come to.

The reference is plain torch.optim: it shares no code with the updater.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

import leto_ec
import leto_rmu
from leto_ec import ReedSolomon
from leto_rmp import PageRef
from leto_rmu import ArrayMemory, Executor, Hyper, ResumableUpdater, Segment, SyncResult
from leto_rmu.marker import Marker
from leto_rmu.muon import elementwise
from leto_rmu.regions import MARKER_REPLICAS


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
MATRICES = (
    Segment("a", 100, 0, 3, shape=(10, 10)),
    Segment("b", 77, 1, 103),
    Segment("c", 190, 0, 190, shape=(19, 10)),
    Segment("d", 60, 2, 380, shape=(4, 15)),
)
OPTIONS = (
    *("lr", "weight_decay", "betas", "eps", "momentum", "dampening", "nesterov"),
    *("ns_steps", "adjust_lr_fn"),
)


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
        scheme: str = "undo",
        align: bool | None = None,
        model_bytes: int = 512,
        no_ops: frozenset[int] = frozenset(),
        gradients: str = "parity",
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
            scheme=scheme,  # type: ignore[arg-type]
            align=align,
            model_bytes=model_bytes,
            job_state_bytes=200,
            gradients=gradients,
        )
        self.device = torch.device("cpu")
        self.sgd = isinstance(elementwise(self.plan.optimizer), leto_rmu.SGD)
        self.origin = 0  # optimizer steps behind the state that was last loaded from outside
        self._arena: list[np.ndarray] = []
        self._parity: dict[tuple[int, int, int], tuple[np.ndarray, np.ndarray | None]] = {}
        self._orders: dict[tuple[int, int], list[list[int | None]]] = {}
        # The judge prefers another kernel than the product would choose.
        kernel = "portable" if "portable" in leto_ec.info()["kernels"] else "reference"
        self._code = ReedSolomon(data=self.pool.data_pages, parity=self.pool.tier1_pages, kernel=kernel)
        if self.pool.tier2_pages:
            self._code2 = ReedSolomon(self.pool.tier1_pages, self.pool.tier2_pages, kernel=kernel)

    # --- functions of the iteration -------------------------------------------------------------------
    def _random(self, *key: int) -> torch.Generator:
        word = int(np.random.SeedSequence([self.seed, *key]).generate_state(1, np.uint64)[0]) >> 1
        return torch.Generator().manual_seed(word)

    def gradient(self, t: int) -> torch.Tensor:
        raw = torch.randn(self.plan.grad_numel, generator=self._random(1, t)) * 10.0 ** (t % 3 - 1)
        return raw.to(self.plan.grad_dtype)

    def initial(self, name: str) -> torch.Tensor:
        at, segment = self.plan.offsets[name]
        return torch.randn(segment.numel, generator=self._random(2, at))

    def hypers(self, t: int) -> list[Hyper]:
        lr = 0.01 * (t + 1) / 3  # a warm-up: a stale or repeated value shows

        def hyper(g: int) -> Hyper:
            if g in self.plan.matrix_groups:
                adjust = (None, "original", "match_rms_adamw")[g % 3]
                return Hyper.muon(
                    lr / (g + 1), 0.1 * g, 0.9 - 0.1 * g, g != 1, ns_steps=5 - g, adjust_lr_fn=adjust
                )
            if self.sgd:
                return Hyper(lr / (g + 1), momentum=0.9, weight_decay=0.1 * g, nesterov=g == 1)
            return Hyper(lr / (g + 1), betas=(0.9, 0.95), weight_decay=0.1 * (1 - g))

        return [hyper(g) for g in range(self.plan.hyper_groups)]

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

    # --- where everything is, by playing it through -----------------------------------------------------
    def places(self, steps: int, moved: int = 0) -> tuple[list[int], int | None]:
        """The slot of every chunk after ``steps`` optimizer steps and ``moved`` chunks; the free slot."""
        chunks = self.chunks
        places, free = list(range(chunks)), chunks
        if self.plan.scheme == "undo":
            return places, None
        for _ in range(steps - self.origin):
            for c in range(chunks):
                places[c], free = free, places[c]
        for c in range(moved):
            places[c], free = free, places[c]
        return places, free

    @property
    def chunks(self) -> int:
        return -(-self.plan.numel // (self.plan.run * self.plan.page_elements))

    def slot_order(self, slot: int) -> list[int | None]:
        """Physical pages of a slot in the order of the parity; None: a position without a page."""
        plan, h1 = self.plan, self.pool.tier1_pages
        stride, blocks = plan.pages_per_chunk, 1
        if plan.align is True or (plan.align is None and plan.scheme == "slots"):
            stride = 1
            while stride < max(h1, plan.planes):
                stride *= 2
            blocks = plan.run // (stride // plan.planes)
        per = plan.run // blocks
        slots = self.chunks + (plan.scheme == "slots")
        order: list[int | None] = []
        for b in range(blocks):
            for p in range(plan.planes):
                order += [p * slots * plan.run + slot * plan.run + b * per + k for k in range(per)]
            order += [None] * (stride - plan.planes * per)
        return order

    def group_orders(self, steps: int, moved: int = 0) -> list[list[int | None]]:
        """For every group its physical pages, in the order of the parity. Not to be changed: it is kept."""
        key = steps - self.origin, moved
        if key not in self._orders:
            places, per = self.places(steps, moved)[0], self.plan.chunks_per_group
            self._orders[key] = [
                [page for slot in places[first : first + per] for page in self.slot_order(slot)]
                for first in range(0, len(places), per)
            ]
        return self._orders[key]

    # --- what must come out, without the RMU ------------------------------------------------------------
    def arena(self, t: int) -> np.ndarray:
        """Bytes of all chunks' pages at the start of iteration t, plane by plane, from plain torch.optim."""
        while len(self._arena) <= t:
            self._extend()
        return self._arena[t]

    def _extend(self) -> None:
        plan = self.plan
        if not self._arena:
            self._parameters = {
                s.name: torch.nn.Parameter(self.initial(s.name).view(self._shape(s)).to(self.device))
                for s in plan.segments
            }
            self._optimizers = {
                g: self._optimizer(g, [self._parameters[s.name] for s in plan.segments if s.group == g])
                for g in sorted({s.group for s in plan.segments})
            }
            self._arena.append(self._pages())
            return
        t = len(self._arena) - 1
        gradient, sync = self.gradient(t).to(self.device).float(), self.sync(t)
        if not sync.found_inf:
            for s in plan.segments:
                g = gradient[s.grad_offset : s.grad_offset + s.numel].clone()
                if sync.inv_scale is not None:
                    g = g * sync.inv_scale
                if sync.clip is not None:
                    g = g * sync.clip
                self._parameters[s.name].grad = g.view(self._shape(s))
            for k, optimizer in self._optimizers.items():
                (group,), hyper = optimizer.param_groups, self.hypers(t)[k]
                group.update({name: getattr(hyper, name) for name in group.keys() & set(OPTIONS)})
                optimizer.step()
        self._arena.append(self._pages())

    def _shape(self, segment: Segment) -> tuple[int, ...]:
        return segment.shape if self.plan.is_matrix(segment) else (segment.numel,)

    def _optimizer(self, group: int, parameters: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
        if group in self.plan.matrix_groups:
            return torch.optim.Muon(parameters, lr=1.0)
        kind = torch.optim.SGD if self.sgd else torch.optim.AdamW
        return kind(parameters, lr=1.0, foreach=self.device.type == "cuda")

    def _pages(self) -> np.ndarray:
        plan = self.plan
        planes = np.zeros((plan.planes, self.chunks * plan.run * plan.page_elements), np.float32)
        for name, parameter in self._parameters.items():
            at, segment = plan.offsets[name]
            state = self._optimizers[segment.group].state[parameter]
            planes[0, at : at + segment.numel] = parameter.detach().cpu().reshape(-1).numpy()
            names = ("momentum_buffer",) if plan.is_matrix(segment) else plan.optimizer.state_planes
            for k, plane in enumerate(names, 1):
                if state.get(plane) is not None:
                    planes[k, at : at + segment.numel] = state[plane].cpu().reshape(-1).numpy()
        return planes.view(np.uint8).reshape(-1, plan.config.page_bytes)

    # --- training ---------------------------------------------------------------------------------------
    def derive(self, up: ResumableUpdater) -> None:
        whole = torch.cat([up.read(s.name) for s in self.plan.segments])
        half = whole[: min(self.plan.numel, up.model.numel() // 2)].to(torch.bfloat16)
        up.model[: 2 * half.numel()].copy_(half.view(torch.uint8))

    def updater(
        self, memory: LabMemory, executor: Executor | None = None, barrier: Callable[[], None] | None = None
    ) -> ResumableUpdater:
        return self.updater_class(memory, self.plan, barrier or (lambda: None), self.derive, executor)

    def start(self, executor: Executor | None = None) -> tuple[LabMemory, ResumableUpdater]:
        memory = LabMemory(self.pool)  # type: ignore[arg-type]
        memory.allocate(self.plan.specs())
        rng = np.random.default_rng(self.seed)
        for name in ("grads", "grad_parity", "undo", "parity_ring", "arena"):  # nobody may rely on zeros
            if name in memory.regions:
                pages = memory.regions[name].pages
                pages[:] = rng.integers(0, 256, pages.shape, np.uint8)
        up = self.updater(memory)
        for s in self.plan.segments:
            up.write(s.name, "master", self.initial(s.name))
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
        places, _ = self.places(self.steps(t))
        found = arena.pages.reshape(plan.planes, -1, plan.run, self.pool.page_bytes)[:, places]
        wanted = self.arena(t).reshape(found.shape)
        if not np.array_equal(found, wanted):
            bad = sorted(set(np.nonzero((found != wanted).any(axis=(2, 3)))[1].tolist()))
            raise Wrong(f"chunks {bad} of iteration {t}")
        if up.job_state != self.job(t) or up.steps != self.steps(t):
            raise Wrong(f"job state {up.job_state!r}, steps {up.steps} of iteration {t}")
        for g, order in enumerate(self.group_orders(self.steps(t))):
            assert arena.tier1 is not None
            tier1, tier2 = self._parity_of(t, g, arena.pages, order)
            if not np.array_equal(arena.tier1[g], tier1):
                raise Wrong(f"tier 1 of group {g}")
            if arena.tier2 is not None and not np.array_equal(arena.tier2[g], tier2):
                raise Wrong(f"tier 2 of group {g}")
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

    def _parity_of(
        self, t: int, g: int, pages: np.ndarray, order: list[int | None]
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Parity of a group whose pages have been compared with `arena(t)`, encoded once an iteration."""
        key = t, self.origin, g
        if key not in self._parity:
            tier1 = self._code.encode([None if k is None else pages[k] for k in order])
            self._parity[key] = tier1, self._code2.encode(tier1) if self.pool.tier2_pages else None
        return self._parity[key]
