"""The pool of one manager: allocations, their sections and their page marks (paper section 4.2).

Knows nothing of sockets or roles. Allocation is all or nothing; marks belong to the pool and survive
every trainer; a remap replaces exactly the pages that are LOST.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from leto_rmp.backend import Backend, Handle, Section
from leto_rmp.config import AllocationSpec, Kind, PoolConfig
from leto_rmp.errors import ConfigError, IllegalMark, SpecMismatch, UnknownName
from leto_rmp.layout import PageRef, PageRun, SectionName, group_count, layout_hash, section_layouts
from leto_rmp.marks import MarkEvent, MarkTable, PageMark
from leto_rmp.replaced import Replacements
from leto_rmp.status import AllocationStatus

__all__ = ["Pool"]

_REGION_BYTES = 256 << 20  # one probe of a healthy pool


def _beside(section: Section, ref: PageRef) -> list[PageRef]:
    """Return the pages of the page's handle, itself among them: they get another handle together."""
    pages = section.layout.pages_of(section.layout.handle_of(ref.index))
    return [PageRef(ref.allocation, ref.section, index) for index in pages]


class Pool:
    """Allocations by name."""

    def __init__(self, config: PoolConfig, backend: Backend) -> None:
        self.config = config
        self.backend = backend
        self._specs: dict[str, AllocationSpec] = {}
        self._incarnations: dict[str, int] = {}
        self._made = 0
        self._sections: dict[str, dict[SectionName, Section]] = {}
        self._marks = MarkTable()
        self._replacements = Replacements()

    # -- allocations ---------------------------------------------------------------------------

    @property
    def specs(self) -> tuple[AllocationSpec, ...]:
        """All specifications, in the order of their creation."""
        return tuple(self._specs.values())

    @property
    def incarnations(self) -> tuple[int, ...]:
        """A number per specification that no freed allocation ever had."""
        return tuple(self._incarnations[name] for name in self._specs)

    @property
    def layout_hash(self) -> str:
        """Hash of the configuration and of all specifications."""
        return layout_hash(self.config, self._specs.values())

    def missing(self, specs: Sequence[AllocationSpec]) -> list[AllocationSpec]:
        """Return the specs that do not exist yet; raise SpecMismatch where one exists differently."""
        fresh: dict[str, AllocationSpec] = {}
        for spec in specs:
            found = self._specs.get(spec.name) or fresh.get(spec.name)
            if found is None:
                fresh[spec.name] = spec
            elif found != spec:
                raise SpecMismatch(
                    f"allocation {spec.name!r} exists as {found}, asked for as {spec}: attach with the "
                    "configuration that created it, or free it first",
                    allocation=spec.name,
                )
        return list(fresh.values())

    def create(self, specs: Sequence[AllocationSpec]) -> None:
        """Create all of these (they are `missing`), or none of them."""
        layouts = {spec.name: section_layouts(spec, self.config) for spec in specs}
        self.backend.check_room([layout for some in layouts.values() for layout in some])
        made: dict[str, dict[SectionName, Section]] = {}
        try:
            for name, some in layouts.items():
                made[name] = {}
                for layout in some:
                    made[name][layout.section] = self.backend.create(layout)
        except BaseException:
            for sections in made.values():
                for section in sections.values():
                    section.close()
            raise
        for spec in specs:
            self._made += 1
            self._incarnations[spec.name] = self._made
            self._specs[spec.name] = spec
            self._sections[spec.name] = made[spec.name]
            for which, section in made[spec.name].items():
                if section.replaces_handles:
                    fresh = (PageRef(spec.name, which, index) for index in range(section.layout.pages))
                    self._replacements.fresh(fresh)

    def free(self, names: Sequence[str]) -> None:
        """Forget these allocations, or none if one is unknown."""
        for name in names:
            self._known(name)
        for name in dict.fromkeys(names):
            for section in self._sections.pop(name).values():
                section.close()
            del self._specs[name]
            self._marks.forget(name)
            self._replacements.forget(name)

    def _known(self, name: str) -> dict[SectionName, Section]:
        try:
            return self._sections[name]
        except KeyError:
            known = ", ".join(sorted(self._sections)) or "none"
            raise UnknownName(f"no allocation is called {name!r}; there are: {known}", name=name) from None

    def section(self, name: str, section: SectionName) -> Section:
        """Return one section of one allocation; raise UnknownName."""
        sections = self._known(name)
        if section not in sections:
            raise UnknownName(
                f"allocation {name!r} has no section {section!r}: only retained ones have parity", name=name
            )
        return sections[section]

    def handles(self, name: str, section: SectionName, first: int, count: int) -> Sequence[Handle | None]:
        """Return `count` handles from `first` on, None for those of lost pages."""
        found = self.section(name, section)
        if not 0 <= first < first + count <= found.handle_count:
            raise UnknownName(
                f"handles {first} to {first + count - 1} of {name}/{section} do not exist: "
                f"it has {found.handle_count}"
            )
        return found.export(first, count)

    def _page(self, ref: PageRef) -> Section:
        section = self.section(ref.allocation, ref.section)
        if not 0 <= ref.index < section.layout.pages:
            raise UnknownName(f"page {ref} does not exist: the section has {section.layout.pages} pages")
        return section

    # -- marks ---------------------------------------------------------------------------------

    def marks(self) -> dict[PageRef, PageMark]:
        """Return the pages that are not healthy."""
        return self._marks.marks()

    def localize(self, read: bool = True, unmapped: Sequence[PageRef] = ()) -> None:
        """Scan everything; what cannot be read becomes LOST, and so does what a client found `unmapped`.

        `read`: also have device pages read, which is what shows a contained ECC error.
        """
        for ref in unmapped:
            self._page(ref)
        region = max(1, _REGION_BYTES // self.config.page_bytes)
        names = {
            section: (name, which)
            for name, sections in self._sections.items()
            for which, section in sections.items()
        }
        found = [(section, index) for section in names for index in section.lost(region)]
        if read:
            with self.backend.batch():
                found += self.backend.read_through(list(names))
        lost = {PageRef(*names[section], index) for section, index in found}
        self._marks.apply(MarkEvent.FOUND_LOST, sorted(lost.union(unmapped)))

    def remap(self) -> None:
        """Replace every LOST page by an empty one, page by page: each is REMAPPED once it is replaced."""
        waiting: dict[Section, set[int]] = {}
        for ref in self._marks.refs(PageMark.LOST):
            waiting.setdefault(self._page(ref), set()).add(ref.index)
        with self.backend.batch():
            for ref in self._marks.refs(PageMark.LOST):
                section = self._page(ref)
                waiting[section].discard(ref.index)
                section.heal(ref.index, frozenset(waiting[section]))
                if section.replaces_handles:
                    self._replacements.replaced(_beside(section, ref))
                    self._replacements.fresh([ref])
                self._marks.apply(MarkEvent.REMAPPED, [ref])

    def acknowledge(self, refs: Sequence[PageRef]) -> None:
        """REMAPPED pages become HEALTHY; all of them or none."""
        for ref in refs:
            self._page(ref)
            if self._replacements.is_uncleared(ref):
                raise IllegalMark(
                    f"page {ref} has a fresh handle that no writer has mapped: refresh() and reconstruct it",
                    page=str(ref),
                    mark=str(self._marks.mark(ref)),
                )
        self._marks.apply(MarkEvent.ACKNOWLEDGED, refs)

    # -- handles that change -------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """Grows with every page that gets another handle."""
        return self._replacements.epoch

    def replaced_since(self, epoch: int) -> tuple[PageRun, ...]:
        """Return the pages that got another handle, or lost theirs, after `epoch`."""
        return self._replacements.since(epoch)

    def uncleared(self) -> tuple[PageRun, ...]:
        """Return the fresh pages with undefined contents."""
        return self._replacements.uncleared()

    def cleared(self, runs: Sequence[PageRun], epoch: int) -> None:
        """A writer has zeroed these pages, as their handles were at `epoch`."""
        for run in runs:
            for index in (run.first, run.first + run.count - 1):
                self._page(PageRef(run.allocation, run.section, index))
        self._replacements.cleared(runs, epoch)

    # -- fault injection -----------------------------------------------------------------------

    def inject_lose(self, refs: Sequence[PageRef], seed: int, *, poison: bool) -> str:
        """Destroy the contents of pages, then make them unreadable. Localization has to find them.

        Return how, several ways joined by "+".
        """
        sections = [self._page(ref) for ref in refs]
        methods: set[str] = set()
        with self.backend.batch():
            for ref, section in zip(refs, sections, strict=True):
                noise = random.Random(f"{seed}:{ref}").randbytes(self.config.page_bytes)
                methods.add(section.poison(ref.index, noise) if poison else section.lose(ref.index, noise))
                if section.replaces_handles:
                    self._replacements.replaced(_beside(section, ref))
        return "+".join(sorted(methods)) or self.backend.poison_method

    def inject_flip(self, ref: PageRef, offset: int, mask: bytes) -> None:
        """Corrupt bytes silently."""
        section = self._page(ref)
        if not mask or offset < 0 or offset + len(mask) > self.config.page_bytes:
            raise ConfigError(
                f"a flip of {len(mask)} bytes at offset {offset} does not lie in a page of "
                f"{self.config.page_bytes} bytes"
            )
        with self.backend.batch():
            section.flip(ref.index, offset, mask)

    # -- status --------------------------------------------------------------------------------

    def allocation_status(self) -> tuple[AllocationStatus, ...]:
        """Describe every allocation."""
        rows: list[AllocationStatus] = []
        for name, spec in self._specs.items():
            pages = {which: section.layout.pages for which, section in self._sections[name].items()}
            rows.append(
                AllocationStatus(
                    name=name,
                    kind=spec.kind.value,
                    data_pages=pages["data"],
                    parity_pages=sum(pages.values()) - pages["data"],
                    groups=group_count(spec, self.config) if spec.kind is Kind.RETAINED else 0,
                )
            )
        return tuple(rows)

    def handle_count(self) -> int:
        """Return the handles of all sections."""
        return sum(s.handle_count for sections in self._sections.values() for s in sections.values())

    def allocated_bytes(self) -> int:
        """Return the bytes of all sections, parity included."""
        return sum(s.layout.nbytes for sections in self._sections.values() for s in sections.values())
