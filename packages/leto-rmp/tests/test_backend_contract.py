"""What every backend must do, run for each one; a new backend adds a line to BACKENDS.

A test uses the backend as the manager and its mapper as a client would: handles are passed as file
descriptors, contents are compared through the client's mapping.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from leto_rmp import Kind, linux
from leto_rmp.allocation import Bytes
from leto_rmp.backend import Backend, Mapper, PoisonMethod, Section, open_backend, open_mapper
from leto_rmp.errors import ConfigError, NotEnoughMemory
from leto_rmp.host import HostSection
from leto_rmp.layout import SectionLayout
from leto_rmp.localize import find_lost

PAGE = 8192
PAGES = 10


@dataclass
class Rig:
    """A backend, its mapper, and how losses have to show."""

    backend: Backend
    mapper: Mapper
    methods: set[PoisonMethod]

    def section(self, pages: int = PAGES, per_handle: int = 0) -> Section:
        layout = SectionLayout("a", "data", Kind.RETAINED, pages, PAGE, per_handle)
        return self.backend.create(layout)

    def map(self, section: Section, writable: bool = True) -> Bytes:
        mapped = self.mapper.reserve(section.layout, writable)
        for handle, pages in zip(section.handles, section.layout.handle_pages, strict=True):
            fd = os.dup(handle.fileno())
            mapped.place(fd, pages * PAGE)
            os.close(fd)
        assert mapped.complete
        return np.asarray(mapped).reshape(-1, PAGE)


BACKENDS = {
    "host": ("host", {"poison": "auto"}, {PoisonMethod.USERFAULTFD, PoisonMethod.SIMULATED}),
    "host-simulated": ("host", {"poison": "simulated"}, {PoisonMethod.SIMULATED}),
}


@pytest.fixture(params=BACKENDS)
def rig(request: pytest.FixtureRequest) -> Iterator[Rig]:
    name, options, methods = BACKENDS[request.param]
    backend = open_backend(name, **options)
    yield Rig(backend, open_mapper(name), methods)
    backend.close()


def noise(seed: int) -> bytes:
    return np.random.default_rng(seed).bytes(PAGE)


def lost(section: Section) -> list[int]:
    return find_lost(section.layout.pages, section.probe, region_pages=4)


def fill(view: Bytes) -> Bytes:
    view[:] = np.random.default_rng(1).integers(0, 256, view.shape, dtype=np.uint8)
    return view.copy()


@pytest.mark.parametrize("per_handle", [0, 1, 3])
def test_fresh_pages_are_zero_shared_and_readable(rig: Rig, per_handle: int) -> None:
    section = rig.section(per_handle=per_handle)
    one, other = rig.map(section), rig.map(section)
    assert not one.any()
    kept = fill(one)
    assert np.array_equal(other, kept)
    assert lost(section) == []
    assert np.array_equal(one, kept), "a probe leaves the contents alone"


@pytest.mark.parametrize("per_handle", [0, 1, 3])
@pytest.mark.parametrize("inject", ["lose", "poison"])
def test_a_lost_page_is_found_and_its_bytes_are_gone(rig: Rig, per_handle: int, inject: str) -> None:
    section = rig.section(per_handle=per_handle)
    view = rig.map(section)
    kept = fill(view)
    for index in (3, PAGES - 1):
        method = getattr(section, inject)(index, noise(index))
        assert method in rig.methods
        assert method is rig.backend.poison_method
    assert lost(section) == [3, PAGES - 1]
    assert lost(section) == [3, PAGES - 1], "finding it does not heal it"
    changed = [i for i in range(PAGES) if not np.array_equal(view[i], kept[i])]
    assert changed == [3, PAGES - 1]
    assert view[3].tobytes() == noise(3)
    simulated = rig.backend.poison_method is PoisonMethod.SIMULATED
    assert rig.backend.simulated_pages() == (2 if simulated else 0)
    assert bool(rig.backend.poison_reason) == simulated


@pytest.mark.parametrize("per_handle", [0, 1, 3])
def test_a_healed_page_is_zero_at_the_same_address_everywhere(rig: Rig, per_handle: int) -> None:
    section = rig.section(per_handle=per_handle)
    one, other = rig.map(section), rig.map(section)
    kept = fill(one)
    section.lose(4, noise(4))
    section.heal(4)
    assert lost(section) == []
    assert not one[4].any()
    one[4] = 9
    assert (other[4] == 9).all()
    rest = [i for i in range(PAGES) if i != 4]
    assert np.array_equal(other[rest], kept[rest])
    assert rig.backend.simulated_pages() == 0


def test_a_page_can_be_lost_twice_and_again_after_healing(rig: Rig) -> None:
    section = rig.section()
    view = rig.map(section)
    for seed in range(3):
        section.lose(2, noise(seed))
        section.lose(2, noise(seed + 10))
        assert view[2].tobytes() == noise(seed + 10)
        assert lost(section) == [2]
        section.heal(2)
        assert lost(section) == []


def test_neighbours_are_lost_and_healed_one_by_one(rig: Rig) -> None:
    section = rig.section()
    for index in range(PAGES):
        section.lose(index, noise(index))
    for index in range(PAGES):
        assert lost(section) == list(range(index, PAGES))
        section.heal(index)


def test_a_flip_is_silent(rig: Rig) -> None:
    section = rig.section(per_handle=3)
    view = rig.map(section)
    kept = fill(view)
    section.flip(7, PAGE - 2, b"\x01\x80")
    assert lost(section) == []
    different = np.argwhere(view != kept)
    assert different.tolist() == [[7, PAGE - 2], [7, PAGE - 1]]
    assert (view[7] ^ kept[7])[-2:].tolist() == [1, 128]


def test_mapped_memory_outlives_its_section(rig: Rig) -> None:
    section = rig.section(per_handle=1)
    view = rig.map(section)
    kept = fill(view)
    section.close()
    assert np.array_equal(view, kept)


def test_closing_gives_everything_back(rig: Rig, count_fds: Callable[..., int]) -> None:
    before, maps = count_fds(), Path("/proc/self/maps").read_text().count("leto:a:")
    section = rig.section(per_handle=1)
    view = rig.map(section)
    assert count_fds() == before + PAGES
    section.lose(1, noise(1))
    section.close()
    del view
    assert count_fds() == before
    assert Path("/proc/self/maps").read_text().count("leto:a:") == maps
    assert rig.backend.simulated_pages() == 0


def test_handles_cannot_be_truncated(rig: Rig) -> None:
    """A shrunk file would kill every trainer with SIGBUS."""
    fd = rig.section().handles[0].fileno()
    with pytest.raises(PermissionError):
        os.ftruncate(fd, PAGE)


def test_room_is_checked_for_all_sections_together(rig: Rig) -> None:
    one = SectionLayout("a", "data", Kind.RETAINED, PAGES, PAGE, 0)
    rig.backend.check_room([one])
    with pytest.raises(NotEnoughMemory):
        rig.backend.check_room([SectionLayout("a", "data", Kind.RETAINED, 1 << 30, PAGE, 0)])


def test_a_hole_under_a_poisoned_page_blocks_nobody(rig: Rig) -> None:
    """With a range left registered in userfaultfd, this populate would wait for ever."""
    section = rig.section()
    section.lose(5, noise(5))
    linux.punch_hole(section.handles[0].fileno(), 4 * PAGE, 3 * PAGE)
    assert lost(section) == [5]
    section.heal(5)
    assert lost(section) == []


def test_losing_without_overwriting_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: poison alone leaves the bytes readable through every other mapping."""
    backend = open_backend("host")
    rig = Rig(backend, open_mapper("host"), BACKENDS["host"][2])
    real = HostSection.poison

    def keeps_the_bytes(self: HostSection, index: int, noise: bytes) -> PoisonMethod:
        fd, offset = self._where(index)
        return real(self, index, os.pread(fd, PAGE, offset))

    monkeypatch.setattr(HostSection, "poison", keeps_the_bytes)
    with pytest.raises(AssertionError):
        test_a_lost_page_is_found_and_its_bytes_are_gone(rig, 0, "lose")
    backend.close()


def test_unknown_names_are_refused() -> None:
    for opener in (open_backend, open_mapper):
        with pytest.raises(ConfigError, match="abacus"):
            opener("abacus")
    with pytest.raises(ConfigError, match="sometimes"):
        open_backend("host", poison="sometimes")
