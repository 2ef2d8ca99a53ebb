"""UpdatePlan: where every element, chunk, group, gradient and marker of one rank lies.

Role: the one description from which the RMU derives its allocations and all its addresses (paper section
5.2, "chunk", "protection group"). The layout hash covers everything that gives bytes a meaning, so that
memory written under another plan is refused (I-6).

The arena holds one fp32 plane per kind of state (masters first), each physically contiguous. Its logical page
order interleaves them: a *chunk* is ``run`` congruent pages of every plane, so that one transaction updates
the master and the moments of the same elements. Parity indices are logical, and so are the groups: where a
chunk is physically, `leto_rmu.geometry` says. A chunk may hold several segments, and a segment may span
chunks.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from leto_rmu._pool import AllocationSpec, PoolConfig
from leto_rmu.errors import PlanError
from leto_rmu.geometry import Geometry, Rotation, Scheme, good_chunk_pages
from leto_rmu.muon import Muon, elementwise
from leto_rmu.optimizers import AdamW, Hyper, Optimizer
from leto_rmu.parts import COPY_BYTES, Piece, Pieces, Segment, check_segments
from leto_rmu.regions import CELL_BYTES, RING_BUFFERS, marker_pages, specs

__all__ = ["COPY_BYTES", "Piece", "Segment", "UpdatePlan"]

LAYOUT_VERSION = 2
ELEMENT_BYTES = 4  # masters and moments are fp32
JOB_HEADER_BYTES = 64
HYPER_BYTES = 256  # room for one group's encoded hyperparameters


@dataclass(frozen=True)
class UpdatePlan:
    """Layout of one rank. Sizes in pages of ``config.page_bytes`` bytes.

    ``scheme``: "undo" updates a chunk in place after copying it; "slots" writes it into a free slot, so that
    state moves by one chunk with every step and needs the memory of one chunk more instead of the copy's.

    ``chunk_pages`` counts the pages of all planes together; it must be a multiple of the number of planes.
    Under "undo" a chunk of at most H1 pages survives the loss of its whole undo buffer; larger ones are a
    stated trade. Under "slots" H1 lost pages are survived in every state, whatever the size.

    ``align`` (default: under "slots"): a chunk is made of sub-blocks of at most a power of two of pages, not
    less than H1, each of which begins at a multiple of that in the parity; ``chunk_pages`` is then a multiple
    of a sub-block's pages (15 for AdamW, 16 for SGD, if H1 = 16).

    Without ``chunk_pages`` a chunk has H1 pages or one sub-block; in aligned "slots" of a pool of GPU memory
    it has as many pages as `leto_rmu.geometry.good_chunk_pages` chooses for the plan's elements.

    ``gradients``: "parity" encodes them in every iteration; "recompute" has lost ones computed again, which
    needs all derived state in the ``model`` region (docs/concepts/marker-protocol.md, "Gradients").
    """

    segments: Sequence[Segment]
    optimizer: Optimizer = field(default_factory=AdamW)
    config: PoolConfig = field(kw_only=True)
    grad_numel: int = field(kw_only=True)
    grad_dtype: torch.dtype = field(default=torch.float32, kw_only=True)
    scheme: Scheme = field(default="undo", kw_only=True)
    align: bool | None = field(default=None, kw_only=True)
    chunk_pages: int | None = field(default=None, kw_only=True)
    model_bytes: int = field(default=0, kw_only=True)
    job_state_bytes: int = field(default=64 * 1024, kw_only=True)
    extra_specs: Sequence[AllocationSpec] = field(default=(), kw_only=True)
    gradients: str = field(default="parity", kw_only=True)

    def __post_init__(self) -> None:
        object.__setattr__(self, "segments", tuple(self.segments))
        object.__setattr__(self, "extra_specs", tuple(self.extra_specs))
        c = self.config
        if c.page_bytes % CELL_BYTES:
            raise PlanError(
                f"page_bytes must be a multiple of {CELL_BYTES} (marker cells), found {c.page_bytes}"
            )
        if c.tier1_pages < 1:
            raise PlanError("the updater needs at least one tier-1 parity page (tier1_pages >= 1)")
        if not self.segments:
            raise PlanError("a plan needs at least one segment")
        if self.grad_dtype not in (torch.float32, torch.bfloat16, torch.float16):
            raise PlanError(f"gradients must be float32, bfloat16 or float16, found {self.grad_dtype}")
        if self.job_state_bytes < 0 or self.model_bytes < 0:
            raise PlanError("job_state_bytes and model_bytes must not be negative")
        if self.gradients not in ("parity", "recompute"):
            raise PlanError(f'gradients must be "parity" or "recompute", found {self.gradients!r}')
        if self.gradients == "recompute" and not self.model_bytes:
            raise PlanError(
                'gradients="recompute" needs derived parameters that outlive the trainer: put them into the '
                "model region (model_bytes)"
            )
        check_segments(self.segments, self.grad_numel, self.model_bytes)
        self._check_matrices()
        self.geometry  # noqa: B018 - raises PlanError

    def _check_matrices(self) -> None:
        if elementwise(self.optimizer) is None:
            flat = [s.name for s in self.segments if s.shape is None]
            if flat:
                raise PlanError(
                    f"segments {flat[:5]} have no shape, but Muon updates matrices: give them one, or say "
                    "what updates them: Muon(AdamW())"
                )
        both = self.matrix_groups & {s.group for s in self.segments if not self.is_matrix(s)}
        if both:
            raise PlanError(
                f"hyperparameter groups {sorted(both)} hold segments with a shape (Muon) and without: "
                "each group needs hyperparameters of one kind"
            )

    # --- planes, chunks, groups -----------------------------------------------------------------
    @cached_property
    def plane_names(self) -> tuple[str, ...]:
        return ("master", *self.optimizer.state_planes)

    @property
    def planes(self) -> int:
        return 1 + len(self.optimizer.state_planes)

    @cached_property
    def geometry(self) -> Geometry:
        """Chunks, slots, sub-blocks and parity positions."""
        c = self.config
        align = self.scheme == "slots" if self.align is None else self.align
        pages = self.chunk_pages
        if pages is None and align and self.scheme == "slots" and c.backend == "cuda":
            pages = good_chunk_pages(c, self.planes, self.numel)
        return Geometry.of(
            self.scheme, align, self.planes, (c.data_pages, c.tier1_pages), pages, self._chunks_of
        )

    def _chunks_of(self, pages: int) -> int:
        """Chunks of so many pages of each plane that hold all segments."""
        return -(-self.numel // (self.page_elements * pages))

    @property
    def run(self) -> int:
        """Pages of each plane in a chunk."""
        return self.geometry.run

    @property
    def pages_per_chunk(self) -> int:
        return self.geometry.pages_per_chunk

    @cached_property
    def page_elements(self) -> int:
        return self.config.page_bytes // ELEMENT_BYTES

    @cached_property
    def chunk_elements(self) -> int:
        """Elements of each plane in a chunk."""
        return self.run * self.page_elements

    @cached_property
    def numel(self) -> int:
        return sum(s.numel for s in self.segments)

    @property
    def plane_pages(self) -> int:
        """Pages of one plane, a multiple of ``run``."""
        return self.geometry.plane_pages

    @property
    def chunks(self) -> int:
        return self.geometry.chunks

    @property
    def chunks_per_group(self) -> int:
        return self.geometry.chunks_per_group

    @cached_property
    def padding_pages(self) -> int:
        """Pages at the end of each plane of the last chunk that hold no element; they are zero."""
        return (self.chunks * self.chunk_elements - self.numel) // self.page_elements

    def padding_positions(self, group: int) -> frozenset[int]:
        """Parity positions of these in a group; only the last one has any."""
        return self._padding_positions if group == self.groups - 1 else frozenset()

    @cached_property
    def _padding_positions(self) -> frozenset[int]:
        chunk = (self.chunks - 1) % self.chunks_per_group
        return frozenset(
            self.geometry.position_of(chunk, plane, page)
            for plane in range(self.planes)
            for page in range(self.run - self.padding_pages, self.run)
        )

    def group_places(self, group: int, rotation: Rotation) -> list[int | None]:
        """Physical page of every parity position of a group; None: absent, or padding, which is zero too.

        Padding is lent between two updates, and may hold anything then: nobody who solves may look at it.
        """
        places = self.geometry.group_pages(group, rotation)
        for position in self.padding_positions(group):
            places[position] = None
        return places

    @property
    def group_pages(self) -> int:
        """Data pages of a full group, absent positions not counted."""
        return self.chunks_per_group * self.pages_per_chunk

    @property
    def groups(self) -> int:
        return self.geometry.groups

    def chunks_in(self, group: int) -> int:
        return self.geometry.chunks_in(group)

    def index(self, group: int, chunk: int) -> int:
        """Number in the arena of a chunk that counts inside its group."""
        return group * self.chunks_per_group + chunk

    def position_of(self, chunk: int, plane: str, page: int) -> int:
        """Parity index in the group of page ``page`` (0 .. run - 1) of a plane of its chunk ``chunk``."""
        return self.geometry.position_of(chunk, self.plane_names.index(plane), page)

    def chunk_data_pages(self, group: int, chunk: int, turn: int = 0) -> list[int]:
        """Physical pages of a chunk (``chunk`` counts in its group) in parity order, after ``turn`` steps."""
        slot = self.geometry.slot(self.index(group, chunk), Rotation(turn))
        return [page for page in self.geometry.slot_pages(slot) if page is not None]

    # --- segments ---------------------------------------------------------------------------------
    @cached_property
    def hyper_groups(self) -> int:
        return 1 + max(s.group for s in self.segments)

    @cached_property
    def offsets(self) -> dict[str, tuple[int, Segment]]:
        """Name -> (first element in the planes, segment)."""
        out, at = {}, 0
        for s in self.segments:
            out[s.name] = (at, s)
            at += s.numel
        return out

    @property
    def has_copies(self) -> bool:
        """Whether the updater keeps bf16 copies of segments."""
        return any(s.model_offset is not None for s in self.segments)

    def is_matrix(self, segment: Segment) -> bool:
        """Whether the optimizer updates this segment as a matrix."""
        return segment.shape is not None and isinstance(self.optimizer, Muon)

    @cached_property
    def matrix_groups(self) -> frozenset[int]:
        """Hyperparameter groups of matrices."""
        return frozenset(s.group for s in self.segments if self.is_matrix(s))

    def check_hypers(self, hypers: Sequence[Hyper]) -> tuple[Hyper, ...]:
        """One for each hyperparameter group, each for what updates its segments; raise otherwise."""
        if len(hypers) != self.hyper_groups:
            raise PlanError(f"the plan has {self.hyper_groups} hyperparameter groups, found {len(hypers)}")
        flat = elementwise(self.optimizer)
        for k, hyper in enumerate(hypers):
            if k in self.matrix_groups or flat is None:
                self.optimizer.check(hyper)
            else:
                flat.check(hyper)
        return tuple(hypers)

    def plane_of(self, name: str, state: str) -> str:
        """Plane that holds a segment's state ("master", "exp_avg", "momentum_buffer", ...)."""
        known = {plane: plane for plane in self.plane_names}
        if name in self.offsets and self.is_matrix(self.offsets[name][1]):
            known = {"master": "master", "momentum_buffer": self.plane_names[1]}
        if name not in self.offsets or state not in known:
            raise PlanError(f"no state {state!r} of segment {name!r}: it has {tuple(known)}")
        return known[state]

    @cached_property
    def _pieces(self) -> Pieces:
        return Pieces(
            [
                Piece(
                    s.group,
                    at,
                    at + s.numel,
                    s.grad_offset,
                    s.name if self.is_matrix(s) else None,
                    s.model_offset,
                )
                for at, s in self.offsets.values()
            ]
        )

    def pieces(self, group: int, chunk: int) -> list[Piece]:
        """The runs of elements that a chunk updates, in plane order; padding belongs to none."""
        lo = self.index(group, chunk) * self.chunk_elements
        return self._pieces.between(lo, lo + self.chunk_elements)

    # --- gradients --------------------------------------------------------------------------------
    @property
    def grad_bytes(self) -> int:
        return self.grad_numel * self.grad_dtype.itemsize

    def grad_pages_of(self, pieces: Sequence[Piece]) -> set[int]:
        """Gradient pages that updating these pieces reads: of matrices all."""
        size, page = self.grad_dtype.itemsize, self.config.page_bytes
        found: set[int] = set()
        for p in pieces:
            lo, count = p.grad_lo, p.hi - p.lo
            if p.matrix is not None:
                segment = self.offsets[p.matrix][1]
                lo, count = segment.grad_offset, segment.numel
            found.update(range(lo * size // page, ((lo + count) * size - 1) // page + 1))
        return found

    @cached_property
    def grad_groups(self) -> tuple[tuple[int, ...], ...]:
        """Gradient pages that segments touch, in groups of at most D pages: what R protects."""
        pages = sorted(self.grad_pages_of(self._pieces.runs))
        d = self.config.data_pages
        return tuple(tuple(pages[i : i + d]) for i in range(0, len(pages), d))

    # --- marker and job state -----------------------------------------------------------------------
    @property
    def marker_pages(self) -> int:
        """Pages of one marker replica: a header, the rank cell, one cell per group."""
        return marker_pages(self.groups, self.config.page_bytes)

    @property
    def job_record_bytes(self) -> int:
        """Capacity of one job-state slot, header included."""
        return JOB_HEADER_BYTES + self.job_state_bytes + HYPER_BYTES * (1 + self.hyper_groups)

    @property
    def job_pages(self) -> int:
        """Pages of one replica of one job-state slot."""
        return -(-self.job_record_bytes // self.config.page_bytes)

    # --- allocations --------------------------------------------------------------------------------
    def specs(self) -> tuple[AllocationSpec, ...]:
        """Allocations of this rank, by stable name; the same plan always gives the same specs."""
        return specs(self)

    @cached_property
    def layout_hash(self) -> bytes:
        """SHA-256 over everything that gives the bytes of this rank their meaning."""
        c = self.config
        text = json.dumps(
            {
                "version": LAYOUT_VERSION,
                "pool": [c.page_bytes, c.data_pages, c.tier1_pages, c.tier2_pages],
                "optimizer": [self.optimizer.name, *self.plane_names],
                "arena": [self.scheme, *self.geometry.numbers],
                "segments": [
                    [s.name, s.numel, s.group, s.grad_offset, s.model_offset]
                    + ([list(s.shape or ())] if self.is_matrix(s) else [])
                    for s in self.segments
                ],
                "grads": [self.grad_numel, str(self.grad_dtype)],
                "job": self.job_record_bytes,
                "model": self.model_bytes,
                "ring": RING_BUFFERS,
                "policy": self.gradients,
            },
            separators=(",", ":"),
        )
        return hashlib.sha256(text.encode()).digest()
