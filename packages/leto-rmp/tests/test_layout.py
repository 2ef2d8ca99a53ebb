"""Grouping is a partition of the pages, and the layout hash tells layouts apart (I-1, I-6)."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from leto_rmp import (
    AllocationSpec,
    ConfigError,
    Interleave,
    Kind,
    PoolConfig,
    layout_hash,
    page_count,
    protection_groups,
)
from leto_rmp.layout import PageRef, PageRun, page_runs, section_layouts

PAGE = 4096
CONFIG = PoolConfig(PAGE, 48, 6, 1)


@st.composite
def specs(draw: st.DrawFn) -> AllocationSpec:
    interleave = Interleave(draw(st.integers(1, 5)), draw(st.integers(1, 5)))
    pages = interleave.planes * interleave.run * draw(st.integers(1, 40))
    nbytes = pages * PAGE - draw(st.integers(0, PAGE - 1))
    group = draw(st.none() | st.integers(1, CONFIG.data_pages))
    return AllocationSpec("a", nbytes, draw(st.sampled_from(list(Kind))), interleave, group)


@given(specs())
def test_groups_partition_the_pages(spec: AllocationSpec) -> None:
    groups = protection_groups(spec, CONFIG)
    order = [page for group in groups for page in group.pages]
    size = spec.group_pages or CONFIG.data_pages
    assert sorted(order) == list(range(page_count(spec, CONFIG)))
    assert [group.index for group in groups] == list(range(len(groups)))
    assert all(len(group.pages) == size for group in groups[:-1])
    assert 1 <= len(groups[-1].pages) <= size <= CONFIG.data_pages


@given(specs())
def test_runs_are_congruent_in_every_plane(spec: AllocationSpec) -> None:
    planes, run = spec.interleave.planes, spec.interleave.run
    pages = page_count(spec, CONFIG)
    plane_pages = pages // planes
    order = spec.interleave.logical_order(pages)
    for first in range(0, pages, planes * run):
        chunk = order[first : first + planes * run]
        places = [(page // plane_pages, page % plane_pages) for page in chunk]
        start = places[0][1]
        assert places == [(plane, start + i) for plane in range(planes) for i in range(run)]


def test_interleave_by_hand() -> None:
    assert Interleave(2, 2).logical_order(8) == (0, 1, 4, 5, 2, 3, 6, 7)
    assert Interleave().logical_order(4) == (0, 1, 2, 3)


@given(specs(), st.integers(0, 7))
def test_sections_and_handles_cover_exactly(spec: AllocationSpec, per_handle: int) -> None:
    config = dataclasses.replace(CONFIG, pages_per_handle=per_handle)
    layouts = {layout.section: layout for layout in section_layouts(spec, config)}
    groups = len(protection_groups(spec, config))
    retained = spec.kind is Kind.RETAINED
    assert set(layouts) == ({"data", "tier1", "tier2"} if retained else {"data"})
    if retained:
        assert layouts["tier1"].pages == groups * 6
        assert layouts["tier2"].pages == groups
    for layout in layouts.values():
        assert sum(layout.handle_pages) == layout.pages
        assert all(0 < n <= (per_handle or layout.pages) for n in layout.handle_pages)
        held = [list(layout.pages_of(number)) for number in range(len(layout.handle_pages))]
        assert [page for pages in held for page in pages] == list(range(layout.pages))
        assert all(page in held[layout.handle_of(page)] for page in range(layout.pages))


@pytest.mark.parametrize(
    ("bad", "says"),
    [
        (lambda: PoolConfig(page_bytes=1000), "page_bytes"),
        (lambda: PoolConfig(tier1_pages=0), "tier1_pages"),
        (lambda: PoolConfig(pages_per_handle=-1), "pages_per_handle"),
        (lambda: PoolConfig(gpu_pages_per_handle=0), "gpu_pages_per_handle"),
        (lambda: PoolConfig(gpu_pages_per_handle=513), "gpu_pages_per_handle"),
        (lambda: Interleave(0, 1), "planes"),
        (lambda: AllocationSpec("", 1, Kind.DERIVED), "name"),
        (lambda: AllocationSpec("a\n", 1, Kind.DERIVED), "name"),
        (lambda: AllocationSpec("a", 0, Kind.DERIVED), "nbytes"),
        (lambda: AllocationSpec("a", 1, Kind.DERIVED, group_pages=0), "group_pages"),
        (lambda: protection_groups(AllocationSpec("a", 1, Kind.RETAINED, group_pages=49), CONFIG), "at most"),
        (
            lambda: protection_groups(AllocationSpec("a", 7 * PAGE, Kind.RETAINED, Interleave(3, 1)), CONFIG),
            "7",
        ),
    ],
)
def test_contradictions_are_refused(bad: object, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        bad()  # type: ignore[operator]


def test_placement_decides_what_is_on_the_device() -> None:
    cuda = PoolConfig(2 << 20, 48, 6, 1, backend="cuda")
    here, there = (
        AllocationSpec("a", 96 << 20, Kind.RETAINED, placement=where) for where in ("host", "device")
    )
    assert [x.placement for x in section_layouts(there, cuda)] == ["device", "host", "host"]
    assert [x.placement for x in section_layouts(here, cuda)] == ["host"] * 3
    assert [x.placement for x in section_layouts(there, CONFIG)] == ["host"] * 3
    assert [x.handle_pages for x in section_layouts(there, cuda)] == [(16, 16, 16), (6,), (1,)]
    assert [x.handle_pages for x in section_layouts(there, CONFIG)] == [(48 * 512,), (6 * 512,), (512,)]
    single = dataclasses.replace(cuda, gpu_pages_per_handle=1)
    assert [len(x.handle_pages) for x in section_layouts(there, single)] == [48, 1, 1]
    larger = dataclasses.replace(cuda, gpu_pages_per_handle=20)
    assert [x.handle_pages for x in section_layouts(there, larger)] == [(20, 20, 8), (6,), (1,)]


def test_runs_cover_exactly_the_pages() -> None:
    refs = [PageRef("a", "data", i) for i in (5, 3, 4, 9, 3)] + [
        PageRef("a", "tier1", 6),
        PageRef("b", "data", 6),
    ]
    assert page_runs(refs) == (
        PageRun("a", "data", 3, 3),
        PageRun("a", "data", 9, 1),
        PageRun("a", "tier1", 6, 1),
        PageRun("b", "data", 6, 1),
    )


def test_layout_hash_sees_every_difference_but_order() -> None:
    a = AllocationSpec("a", 24 * PAGE, Kind.RETAINED)
    b = AllocationSpec("b", PAGE, Kind.TRANSACTION)
    variants = [
        (CONFIG, [a]),
        (CONFIG, [a, b]),
        (dataclasses.replace(CONFIG, tier1_pages=7), [a, b]),
        (CONFIG, [dataclasses.replace(a, nbytes=23 * PAGE), b]),
        (CONFIG, [dataclasses.replace(a, interleave=Interleave(2, 2)), b]),
        (CONFIG, [dataclasses.replace(a, group_pages=12), b]),
        (CONFIG, [dataclasses.replace(a, kind=Kind.DERIVED), b]),
        (CONFIG, [dataclasses.replace(a, name="c"), b]),
        (CONFIG, [dataclasses.replace(a, placement="host"), b]),
    ]
    hashes = [layout_hash(config, some) for config, some in variants]
    assert len(set(hashes)) == len(variants)
    assert layout_hash(CONFIG, [b, a]) == layout_hash(CONFIG, [a, b])
    elsewhere = dataclasses.replace(CONFIG, device=3)
    assert layout_hash(elsewhere, [a]) == hashes[0], "the same bytes on another GPU"
    for per_handle in (1, 4):
        other = dataclasses.replace(CONFIG, gpu_pages_per_handle=per_handle)
        assert layout_hash(other, [a]) == hashes[0], "the same bytes in other handles"


def test_layout_hash_is_stable() -> None:
    """A change of this literal breaks re-attaching across versions: then the version must change too."""
    spec = AllocationSpec("arena", 24 * PAGE, Kind.RETAINED, Interleave(3, 2), 12)
    assert layout_hash(CONFIG, [spec]) == "5578c1fd916e17bcb5758972283064e71f7f3c1dd21ad605d1797cd700a424db"
