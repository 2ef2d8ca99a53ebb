"""RankMemory: the regions of one rank under the paper's names.

Role: turns the plan's page numbers into numpy and torch views, all zero-copy: C (chunks), H and tier 2, Q
(ring), U (undo), G and R (gradients and their parity). Holds the two codes. Pure addressing; writes
nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cached_property, lru_cache

import numpy as np
import torch

from leto_ec import Reconstruction, ReedSolomon
from leto_rmu import arrays
from leto_rmu._pool import PageRef
from leto_rmu.errors import PlanError
from leto_rmu.geometry import Rotation
from leto_rmu.layout import COPY_BYTES, Segment, UpdatePlan
from leto_rmu.memory import Memory, Region
from leto_rmu.ops import Bytes
from leto_rmu.regions import ARENA, GRAD_PARITY, GRADS, JOB_STATE, MARKER, MODEL, RING, UNDO

__all__ = ["RankMemory", "indices"]


@lru_cache(maxsize=64)
def _code(data: int, parity: int) -> ReedSolomon:
    return ReedSolomon(data=data, parity=parity)


class RankMemory:
    """Views of one rank's memory. ``group`` counts protection groups, ``chunk`` counts inside a group."""

    def __init__(self, plan: UpdatePlan, memory: Memory) -> None:
        self.plan = plan
        self.memory = memory
        self.regions: dict[str, Region] = dict(memory.allocate(plan.specs()))
        self._pages: dict[str, Bytes] = {name: region.pages for name, region in self.regions.items()}
        self.own = frozenset(s.name for s in plan.specs()) - {s.name for s in plan.extra_specs}
        arena = self.regions[ARENA]
        # The pool groups physical pages, a free slot among them; parity belongs to the plan's logical groups.
        if arena.tier1 is None or len(arena.groups) < plan.groups:
            raise PlanError(
                f"the pool made {len(arena.groups)} groups of the arena, the plan has {plan.groups}"
            )
        if plan.config.tier2_pages and arena.tier2 is None:
            raise PlanError("the pool made no tier-2 pages for the arena")
        self._tier1: Bytes = arena.tier1
        self._tier2: Bytes | None = arena.tier2
        config = plan.config
        self.code = _code(config.data_pages, config.tier1_pages)
        self.tier2_code = _code(config.tier1_pages, config.tier2_pages) if config.tier2_pages else None
        pages = plan.plane_pages
        self.planes: dict[str, torch.Tensor] = {
            name: arrays.flat(self._pages[ARENA][k * pages : (k + 1) * pages], torch.float32)
            for k, name in enumerate(plan.plane_names)
        }

    # True scratch: private to this process, never read after a crash, made when it is first used. A kernel
    # that does a chunk in one pass needs neither.
    @cached_property
    def gradient_scratch(self) -> torch.Tensor:
        """Room for the gradients of a chunk."""
        device = self.planes["master"].device
        return torch.empty(self.plan.chunk_elements, dtype=torch.float32, device=device)

    @cached_property
    def delta_scratch(self) -> Bytes:
        """Room for the pages of a chunk."""
        scratch: Bytes = arrays.zeros_like(self._pages[ARENA][: self.plan.pages_per_chunk])
        return scratch

    # --- model state --------------------------------------------------------------------------------
    def group_pages(self, group: int, rotation: Rotation) -> list[Bytes | None]:
        """Page of every parity position of a group; None: zero, see `UpdatePlan.group_places`."""
        return self._at(ARENA, self.plan.group_places(group, rotation))

    def arena_pages(self, places: Sequence[int | None], positions: Iterable[int]) -> list[Bytes]:
        """Pages of the arena at some positions of a list of places."""
        pages = self._pages[ARENA]
        return [pages[k] for position in sorted(positions) if (k := places[position]) is not None]

    def slot_pages(self, slot: int) -> list[Bytes | None]:
        """Page of every parity position of the chunk in a slot; None: absent."""
        return self._at(ARENA, self.plan.geometry.slot_pages(slot))

    def _at(self, region: str, places: Sequence[int | None]) -> list[Bytes | None]:
        pages = self._pages[region]
        return [None if k is None else pages[k] for k in places]

    def slot_runs(self, slot: int) -> list[Bytes]:
        """The chunk in a slot: for every plane its run of pages, (run, S)."""
        plan, pages = self.plan, self._pages[ARENA]
        first = slot * plan.run
        return [
            pages[p * plan.plane_pages + first : p * plan.plane_pages + first + plan.run]
            for p in range(plan.planes)
        ]

    def chunk_runs(self, group: int, chunk: int) -> list[Bytes]:
        """C_j where chunks stay in place: for every plane its run of pages, (run, S)."""
        return self.slot_runs(self.plan.index(group, chunk))

    def span(self, index: int, slot: int, lo: int, hi: int) -> slice:
        """Where elements lo..hi of the state are in a plane, if their chunk, ``index``, is in ``slot``."""
        shift = (slot - index) * self.plan.chunk_elements
        return slice(lo + shift, hi + shift)

    @property
    def undo(self) -> Bytes:
        """U, (pages of a chunk, S): plane after plane."""
        return self._pages[UNDO]

    def undo_runs(self) -> list[Bytes]:
        """U in the shape of a chunk: for every plane (run, S)."""
        run = self.plan.run
        return [self.undo[p * run : (p + 1) * run] for p in range(self.plan.planes)]

    def undo_pages(self) -> list[Bytes | None]:
        """U by parity positions; None: absent."""
        return self._at(UNDO, self.plan.geometry.buffer_pages())

    def tier1(self, group: int) -> Bytes:
        """H_i, (H1, S)."""
        rows: Bytes = self._tier1[group]
        return rows

    def tier2(self, group: int) -> Bytes:
        """Tier-2 parity of H_i, (H2, S)."""
        assert self._tier2 is not None
        rows: Bytes = self._tier2[group]
        return rows

    def ring(self, slot: int) -> Bytes:
        """Parity buffer ``slot``, (H1, S)."""
        h1 = self.plan.config.tier1_pages
        return self._pages[RING][slot * h1 : (slot + 1) * h1]

    # --- codes --------------------------------------------------------------------------------------
    def encode_group(self, group: int, rotation: Rotation) -> None:
        """H_i = RS(C_i)."""
        self.code.encode(self.group_pages(group, rotation), out=self.tier1(group))

    def update_parity(
        self,
        source: Bytes,
        target: Bytes,
        chunk: int,
        old: Sequence[Bytes | None],
        new: Sequence[Bytes | None],
    ) -> None:
        """Q' = Q ^ RS_j(old ^ new), out of place; ``chunk`` counts inside its group."""
        free = iter(self.delta_scratch)
        delta: list[Bytes | None] = [
            None if a is None or b is None else np.bitwise_xor(a, b, out=next(free))
            for a, b in zip(old, new, strict=True)
        ]
        index = chunk * self.plan.geometry.positions_per_chunk
        self.code.update(source, index=index, delta=delta, out=target)

    def reconstruct(
        self,
        code: ReedSolomon,
        pages: list[Bytes | None],
        rows: list[Bytes],
        lost_pages: set[int],
        lost_rows: set[int],
    ) -> Reconstruction:
        """Solve for lost pages and rows, in place; raise CodeError."""
        return code.reconstruct(
            pages, rows, lost_data=sorted(lost_pages), lost_parity=sorted(lost_rows), verify=True
        )

    # --- gradients ----------------------------------------------------------------------------------
    @cached_property
    def grads(self) -> torch.Tensor:
        raw = self._pages[GRADS].reshape(-1)[: self.plan.grad_bytes]
        return arrays.flat(raw, self.plan.grad_dtype)

    def grad_group(self, index: int) -> list[Bytes]:
        """Gradient pages that are protected together."""
        pages = self._pages[GRADS]
        return [pages[k] for k in self.plan.grad_groups[index]]

    def grad_run(self, index: int) -> Bytes | list[Bytes]:
        """The same, to be encoded: (n, S) where they are neighbours, else a list.

        A code looks at every entry of a list by itself, which takes 10 us a page on a GPU; thousands of them
        held up the first update after a takeover by 14 ms (docs/benchmarks/recoveries-h200x2-handles.md).
        """
        group = self.plan.grad_groups[index]  # ascending
        first, end = group[0], group[-1] + 1
        return self._pages[GRADS][first:end] if end - first == len(group) else self.grad_group(index)

    def grad_parity(self, index: int) -> Bytes:
        """R, (H1, S)."""
        h1 = self.plan.config.tier1_pages
        return self._pages[GRAD_PARITY][index * h1 : (index + 1) * h1]

    # --- the rest -----------------------------------------------------------------------------------
    @property
    def marker(self) -> Region:
        return self.regions[MARKER]

    @property
    def job_state(self) -> Region:
        return self.regions[JOB_STATE]

    @cached_property
    def model(self) -> torch.Tensor:
        if MODEL not in self.regions:
            return torch.empty(0, dtype=torch.uint8)
        return arrays.flat(self._pages[MODEL], torch.uint8)[: self.plan.model_bytes]

    def model_copy(self, segment: Segment) -> torch.Tensor:
        """The bf16 copy of a segment's master, 1-D."""
        assert segment.model_offset is not None
        first = COPY_BYTES * segment.model_offset
        return self.model[first : first + COPY_BYTES * segment.numel].view(torch.bfloat16)

    def idle(self, rotation: Rotation) -> list[torch.Tensor]:
        """What holds nothing between two updates, as flat uint8 tensors: free slot or U, Q, R, padding."""
        geometry = self.plan.geometry
        runs = [self._pages[name] for name in (UNDO, RING, GRAD_PARITY) if name in self._pages]
        if self.plan.scheme == "slots":
            free = geometry.slot(0, Rotation(geometry.turned(rotation.turn)))  # where the next update begins
            runs += self.slot_runs(free)
        runs += self.padding(rotation)
        return [arrays.flat(pages, torch.uint8) for pages in runs]

    def padding(self, rotation: Rotation) -> list[Bytes]:
        """Pages of the last chunk that hold no element: for every plane its run of them, if there are any."""
        plan, count = self.plan, self.plan.padding_pages
        slot = plan.geometry.slot(plan.chunks - 1, rotation)
        return [run[plan.run - count :] for run in self.slot_runs(slot)] if count else []

    @cached_property
    def addresses(self) -> list[tuple[int, int]]:
        """First address and end of every region."""
        lines = [arrays.flat(pages, torch.uint8) for pages in self._pages.values()]
        return [(line.data_ptr(), line.data_ptr() + line.numel()) for line in lines]

    def lost(self) -> frozenset[PageRef]:
        """Lost pages of the RMU's own regions; those of ``extra_specs`` are their owner's business."""
        return frozenset(ref for ref in self.memory.lost() if ref.allocation in self.own)


def indices(lost: Iterable[PageRef], allocation: str, section: str = "data") -> set[int]:
    """Indices of lost pages in one section."""
    return {ref.index for ref in lost if ref.allocation == allocation and ref.section == section}
