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

import dataclasses
import hashlib
import json
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch

from leto_rmu._pool import AllocationSpec, Interleave, Kind, Placement, PoolConfig
from leto_rmu.errors import PlanError
from leto_rmu.geometry import Geometry, Rotation, Scheme
from leto_rmu.muon import Muon, elementwise
from leto_rmu.optimizers import AdamW, Hyper, Optimizer

__all__ = ["CELL_BYTES", "MARKER_REPLICAS", "Piece", "Segment", "UpdatePlan", "marker_pages"]

LAYOUT_VERSION = 2
ELEMENT_BYTES = 4  # masters and moments are fp32
COPY_BYTES = 2  # copies of masters in derived memory are bf16
CELL_BYTES = 256  # one marker cell: two slots of 128 bytes
MARKER_REPLICAS = 3
JOB_HEADER_BYTES = 64
HYPER_BYTES = 256  # room for one group's encoded hyperparameters
RING_BUFFERS = 4  # prefetched, Q, Q', draining

ARENA, GRADS, GRAD_PARITY, UNDO = "arena", "grads", "grad_parity", "undo"
RING, MARKER, JOB_STATE, MODEL = "parity_ring", "marker", "job_state", "model"


def marker_pages(groups: int, page_bytes: int) -> int:
    """Pages of one marker replica."""
    return -(-(CELL_BYTES * (2 + groups)) // page_bytes)


@dataclass(frozen=True)
class Segment:
    """A run of elements with one name: packed in the given order into the planes.

    ``group`` selects the hyperparameters; ``grad_offset`` counts elements in the gradient region. With a
    ``model_offset`` the updater keeps a bf16 copy of the master that many elements into the derived region.
    ``shape``: rows and columns of a matrix, row by row, for `Muon`; other optimizers ignore it.
    """

    name: str
    numel: int
    group: int = 0
    grad_offset: int = 0
    model_offset: int | None = None
    shape: tuple[int, int] | None = None


@dataclass(frozen=True)
class Piece:
    """Elements ``lo:hi`` of the state share hyperparameters, and take gradients ``grad_lo ...``.

    ``matrix`` names the segment where a layer-wise optimizer needs all of it. With a ``model_lo`` their bf16
    copies begin at that element of the derived region.
    """

    group: int
    lo: int
    hi: int
    grad_lo: int
    matrix: str | None = None
    model_lo: int | None = None

    def part(self, lo: int, hi: int) -> Piece:
        """The elements from ``lo`` to ``hi`` of it."""
        model_lo = None if self.model_lo is None else self.model_lo + lo - self.lo
        return Piece(self.group, lo, hi, self.grad_lo + lo - self.lo, self.matrix, model_lo)


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
        names = [s.name for s in self.segments]
        if len(set(names)) != len(names):
            twice = sorted({n for n in names if names.count(n) > 1})
            raise PlanError(f"segment names must be unique, found twice: {twice[:5]}")
        for s in self.segments:
            if s.numel <= 0 or s.group < 0:
                raise PlanError(
                    f"segment {s.name!r}: numel must be positive and group not negative, found {s}"
                )
            if s.grad_offset < 0 or s.grad_offset + s.numel > self.grad_numel:
                raise PlanError(
                    f"segment {s.name!r} takes gradients {s.grad_offset}..{s.grad_offset + s.numel}, "
                    f"but grad_numel is {self.grad_numel}"
                )
            if s.shape is not None and (len(s.shape) != 2 or s.shape[0] * s.shape[1] != s.numel):
                raise PlanError(f"segment {s.name!r}: shape {s.shape} is no matrix of {s.numel} elements")
        self._check_copies()
        self._check_matrices()
        if self.scheme not in ("undo", "slots"):
            raise PlanError(f"scheme must be 'undo' or 'slots', found {self.scheme!r}")
        self.geometry  # noqa: B018 - raises PlanError

    def _check_copies(self) -> None:
        end, before = 0, ""
        for s in sorted(
            (s for s in self.segments if s.model_offset is not None), key=lambda s: s.model_offset or 0
        ):
            assert s.model_offset is not None
            if s.model_offset < end or COPY_BYTES * (s.model_offset + s.numel) > self.model_bytes:
                raise PlanError(
                    f"segment {s.name!r}: its bf16 copy at element {s.model_offset} overlaps "
                    f"{before or 'the beginning'} or does not fit model_bytes={self.model_bytes}"
                )
            end, before = s.model_offset + s.numel, s.name

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
        planes, h1, d, size = self.planes, self.config.tier1_pages, self.config.data_pages, self.chunk_pages
        if self.scheme == "slots" if self.align is None else self.align:
            stride = 1 << (max(h1, planes) - 1).bit_length()
            subrun = stride // planes
            subblocks, rest = divmod(planes * subrun if size is None else size, planes * subrun)
            if rest or subblocks < 1:
                raise PlanError(
                    f"chunk_pages must be a positive multiple of the {planes * subrun} pages of an aligned "
                    f"sub-block, found {size}: or make the plan with align=False"
                )
        else:
            subrun, rest = divmod(planes * max(1, h1 // planes) if size is None else size, planes)
            if rest or subrun < 1:
                raise PlanError(f"chunk_pages must be a positive multiple of {planes} planes, found {size}")
            stride, subblocks = planes * subrun, 1
        if stride * subblocks > d:
            raise PlanError(
                f"a chunk of {planes * subrun * subblocks} pages, {stride * subblocks} in the parity, does "
                f"not fit a group of data_pages={d}"
            )
        chunks = -(-self.numel // (self.page_elements * subrun * subblocks))
        return Geometry(self.scheme, planes, subrun, subblocks, stride, chunks, d // (stride * subblocks))

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
    def _merged(self) -> list[Piece]:
        """Maximal runs with one hyperparameter group, contiguous gradients and copies; matrices alone."""
        out: list[Piece] = []
        for at, s in self.offsets.values():
            matrix = s.name if self.is_matrix(s) else None
            here = Piece(s.group, at, at + s.numel, s.grad_offset, matrix, s.model_offset)
            last = out[-1] if out else None
            if last and last.part(at, here.hi) == here:
                out[-1] = dataclasses.replace(last, hi=here.hi)
            else:
                out.append(here)
        return out

    @cached_property
    def _starts(self) -> list[int]:
        return [p.lo for p in self._merged]

    def pieces(self, group: int, chunk: int) -> list[Piece]:
        """The runs of elements that a chunk updates, in plane order; padding belongs to none."""
        lo = self.index(group, chunk) * self.chunk_elements
        hi, out = lo + self.chunk_elements, []
        for k in range(max(0, bisect_right(self._starts, lo) - 1), len(self._merged)):
            p = self._merged[k]
            if p.lo >= hi:
                break
            a, b = max(lo, p.lo), min(hi, p.hi)
            if a < b:
                out.append(p.part(a, b))
        return out

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
        pages = sorted(self.grad_pages_of(self._merged))
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
        page, h1 = self.config.page_bytes, self.config.tier1_pages

        def transaction(name: str, pages: int, placement: Placement = "device") -> AllocationSpec:
            return AllocationSpec(name=name, nbytes=pages * page, kind=Kind.TRANSACTION, placement=placement)

        arena = AllocationSpec(
            name=ARENA,
            nbytes=self.planes * self.plane_pages * page,
            kind=Kind.RETAINED,
            interleave=Interleave(planes=self.planes, run=self.run),
            group_pages=self.group_pages,
        )
        model = (
            (AllocationSpec(name=MODEL, nbytes=self.model_bytes, kind=Kind.DERIVED),)
            if self.model_bytes
            else ()
        )
        return (
            arena,
            transaction(GRADS, -(-self.grad_bytes // page)),
            *((transaction(GRAD_PARITY, len(self.grad_groups) * h1),) if self.gradients == "parity" else ()),
            *((transaction(UNDO, self.pages_per_chunk),) if self.scheme == "undo" else ()),
            transaction(RING, RING_BUFFERS * h1),
            transaction(MARKER, MARKER_REPLICAS * self.marker_pages, "host"),
            transaction(JOB_STATE, 2 * MARKER_REPLICAS * self.job_pages, "host"),
            *model,
            *self.extra_specs,
        )

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
