"""What every backend must do, run for each one; a new backend adds a line to BACKENDS.

A test uses the backend as the manager and its mapper as a client would: handles are passed as file
descriptors, contents are compared through the client's mapping.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from leto_rmp import Kind, linux
from leto_rmp.allocation import Bytes
from leto_rmp.backend import Backend, Mapper, PoisonMethod, Section, open_backend, open_mapper
from leto_rmp.config import CUDA_PAGE_BYTES, Placement
from leto_rmp.device import DeviceRange
from leto_rmp.errors import ConfigError, CudaError, NotEnoughMemory
from leto_rmp.host import HostSection
from leto_rmp.layout import SectionLayout
from leto_rmp.mapping import SharedRange

PAGES = 10


class HostView:
    """A client's view of a section in host memory."""

    def __init__(self, mapped: SharedRange, page_bytes: int) -> None:
        self._pages: Bytes = np.asarray(mapped).reshape(-1, page_bytes)

    def read(self) -> Bytes:
        return self._pages.copy()

    def write(self, data: Bytes) -> None:
        self._pages[:] = data

    def refresh(self, section: Section, index: int) -> None:
        pass  # pages are replaced in place


class DeviceView:
    """A client's view of a section on a GPU: what a writer does, in terms of the range."""

    def __init__(self, mapped: SharedRange, page_bytes: int) -> None:
        assert isinstance(mapped, DeviceRange)
        self._range = mapped
        assert mapped.zero(0, mapped.page_count)  # fresh pages are undefined until a writer has done this

    def read(self) -> Bytes:
        raw = self._range.read(0, self._range.length)
        return np.frombuffer(raw, np.uint8).reshape(self._range.page_count, -1).copy()

    def write(self, data: Bytes) -> None:
        self._range.write(0, data.tobytes())

    def refresh(self, section: Section, index: int) -> None:
        number = section.layout.handle_of(index)
        (handle,) = section.export(number, 1)
        self._range.replace(number, None if handle is None else handle.fileno())
        if handle is not None:
            assert self._range.zero(index, 1)


@dataclass
class Rig:
    """A backend, its mapper, and how losses have to show."""

    backend: Backend
    mapper: Mapper
    methods: set[PoisonMethod]
    page_bytes: int = 8192
    placement: Placement = "host"

    @property
    def on_device(self) -> bool:
        return self.placement == "device"

    def layout(self, pages: int = PAGES, per_handle: int = 0) -> SectionLayout:
        per_handle = max(1, per_handle) if self.on_device else per_handle
        return SectionLayout("a", "data", Kind.RETAINED, pages, self.page_bytes, per_handle, self.placement)

    def section(self, per_handle: int = 0) -> Section:
        return self.backend.create(self.layout(per_handle=per_handle))

    def map(self, section: Section) -> HostView | DeviceView:
        mapped = self.mapper.reserve(section.layout, writable=True)
        handles = section.export(0, section.handle_count)
        for handle, pages in zip(handles, section.layout.handle_pages, strict=True):
            assert handle is not None
            fd = os.dup(handle.fileno())
            mapped.place(fd, pages * self.page_bytes)
            os.close(fd)
        mapped.finish()
        return (DeviceView if self.on_device else HostView)(mapped, self.page_bytes)

    def noise(self, seed: int) -> bytes:
        return np.random.default_rng(seed).bytes(self.page_bytes)

    def fill(self, view: HostView | DeviceView) -> Bytes:
        view.write(np.random.default_rng(1).integers(0, 256, (PAGES, self.page_bytes), dtype=np.uint8))
        return view.read()


HOST, DEVICE = {PoisonMethod.USERFAULTFD, PoisonMethod.SIMULATED}, {PoisonMethod.UNMAPPED}
BACKENDS = {
    "host": ("host", "auto", HOST),
    "host-simulated": ("host", "simulated", {PoisonMethod.SIMULATED}),
    "cuda-fake": ("cuda", "auto", DEVICE),
    "cuda": ("cuda", "auto", DEVICE),
}
MEMFDS = ["host", "host-simulated"]
GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(params=[GPU if name == "cuda" else name for name in BACKENDS])
def rig(request: pytest.FixtureRequest, use_cuda: Callable[[str], str]) -> Iterator[Rig]:
    name, poison, methods = BACKENDS[request.param]
    if name == "cuda":
        use_cuda("fake" if request.param == "cuda-fake" else "gpu")
    backend = open_backend(name, poison)
    one = Rig(backend, open_mapper(name, backend.device_uuid), methods)
    if name == "cuda":
        one.page_bytes, one.placement = CUDA_PAGE_BYTES, "device"
    yield one
    backend.close()


def lost(section: Section) -> list[int]:
    return section.lost(region_pages=4)


@pytest.mark.parametrize("per_handle", [0, 1, 3])
def test_fresh_pages_are_zero_shared_and_readable(rig: Rig, per_handle: int) -> None:
    section = rig.section(per_handle=per_handle)
    one, other = rig.map(section), rig.map(section)
    assert not one.read().any()
    kept = rig.fill(one)
    assert np.array_equal(other.read(), kept)
    assert lost(section) == []
    assert rig.backend.read_through([section]) == []
    assert np.array_equal(one.read(), kept), "a probe leaves the contents alone"


@pytest.mark.parametrize("per_handle", [0, 1, 3])
@pytest.mark.parametrize("inject", ["lose", "poison"])
def test_a_lost_page_is_found_and_its_bytes_are_gone(rig: Rig, per_handle: int, inject: str) -> None:
    section = rig.section(per_handle=per_handle)
    view = rig.map(section)
    kept = rig.fill(view)
    for index in (3, PAGES - 1):
        method = getattr(section, inject)(index, rig.noise(index))
        assert method in rig.methods
        assert rig.on_device or method is rig.backend.poison_method
    assert lost(section) == [3, PAGES - 1]
    assert lost(section) == [3, PAGES - 1], "finding it does not heal it"
    found = view.read()
    changed = [i for i in range(PAGES) if not np.array_equal(found[i], kept[i])]
    assert changed == [3, PAGES - 1]
    assert found[3].tobytes() == rig.noise(3)
    if rig.on_device:
        number = section.layout.handle_of(3)
        assert section.export(number, 2)[0] is None, "there is nothing to map any more"
        assert rig.backend.read_through([section]) == [], "what is known to be lost is not read"
        return
    simulated = rig.backend.poison_method is PoisonMethod.SIMULATED
    assert rig.backend.simulated_pages() == (2 if simulated else 0)
    assert bool(rig.backend.poison_reason) == simulated


@pytest.mark.parametrize("per_handle", [0, 1, 3])
def test_a_healed_page_is_zero_at_the_same_address_everywhere(rig: Rig, per_handle: int) -> None:
    section = rig.section(per_handle=per_handle)
    one, other = rig.map(section), rig.map(section)
    kept = rig.fill(one)
    section.lose(4, rig.noise(4))
    section.heal(4)
    assert lost(section) == []
    one.refresh(section, 4)
    other.refresh(section, 4)
    kept[4] = 0
    assert np.array_equal(one.read(), kept)
    kept[4] = 9
    one.write(kept)
    assert np.array_equal(other.read(), kept)
    assert rig.backend.simulated_pages() == 0


def test_a_page_can_be_lost_twice_and_again_after_healing(rig: Rig) -> None:
    section = rig.section()
    view = rig.map(section)
    for seed in range(3):
        section.lose(2, rig.noise(seed))
        section.lose(2, rig.noise(seed + 10))
        if not rig.on_device:  # there, a lost page is gone from the manager
            assert view.read()[2].tobytes() == rig.noise(seed + 10)
        assert lost(section) == [2]
        section.heal(2)
        view.refresh(section, 2)
        assert lost(section) == []


@pytest.mark.parametrize("per_handle", [0, 3])
def test_neighbours_are_lost_and_healed_one_by_one(rig: Rig, per_handle: int) -> None:
    section = rig.section(per_handle=per_handle)
    for index in range(PAGES):
        section.lose(index, rig.noise(index))
    for index in range(PAGES):
        assert lost(section) == list(range(index, PAGES))
        section.heal(index)
    assert lost(section) == []


@pytest.mark.parametrize("per_handle", [0, 1, 3])
def test_what_somebody_else_found_lost_stays_lost_until_it_is_healed_too(rig: Rig, per_handle: int) -> None:
    section = rig.section(per_handle=per_handle)
    view = rig.map(section)
    kept = rig.fill(view)
    for first, second in ((3, 5), (5, 3)):
        section.lose(first, rig.noise(0))
        section.heal(first, frozenset({second}))
        section.heal(second)
        assert lost(section) == []
        for index in (first, second):
            view.refresh(section, index)
        kept[first] = kept[second] = 0
        assert np.array_equal(view.read(), kept)


def test_a_flip_is_silent(rig: Rig) -> None:
    section = rig.section(per_handle=3)
    view = rig.map(section)
    kept = rig.fill(view)
    section.flip(7, rig.page_bytes - 2, b"\x01\x80")
    assert lost(section) == []
    found = view.read()
    different = np.argwhere(found != kept)
    assert different.tolist() == [[7, rig.page_bytes - 2], [7, rig.page_bytes - 1]]
    assert (found[7] ^ kept[7])[-2:].tolist() == [1, 128]


def test_mapped_memory_outlives_its_section(rig: Rig) -> None:
    section = rig.section(per_handle=4)
    view = rig.map(section)
    kept = rig.fill(view)
    section.close()
    assert np.array_equal(view.read(), kept)


def test_closing_gives_everything_back(rig: Rig, count_fds: Callable[..., int]) -> None:
    rig.map(rig.section())  # what a driver opens once and for all
    before, maps = count_fds(), Path("/proc/self/maps").read_text().count("leto:a:")
    section = rig.section(per_handle=1)
    view = rig.map(section)
    assert count_fds() == before + PAGES
    section.lose(1, rig.noise(1))
    section.close()
    del view
    assert count_fds() == before
    assert section.handle_count == 0
    assert Path("/proc/self/maps").read_text().count("leto:a:") == maps
    assert rig.backend.simulated_pages() == 0


@pytest.mark.parametrize("rig", MEMFDS, indirect=True)
def test_handles_cannot_be_truncated(rig: Rig) -> None:
    """A shrunk file would kill every trainer with SIGBUS."""
    section = rig.section()
    (handle,) = section.export(0, 1)
    assert handle is not None
    with pytest.raises(PermissionError):
        os.ftruncate(handle.fileno(), rig.page_bytes)


def test_room_is_checked_for_all_sections_together(rig: Rig) -> None:
    rig.backend.check_room([rig.layout()])
    huge = dataclasses.replace(rig.layout(1 << 30), placement="host", pages_per_handle=0)
    with pytest.raises(NotEnoughMemory):
        rig.backend.check_room([rig.layout(), huge])


@pytest.mark.parametrize("rig", MEMFDS, indirect=True)
def test_a_hole_under_a_poisoned_page_blocks_nobody(rig: Rig) -> None:
    """With a range left registered in userfaultfd, this populate would wait for ever."""
    section = rig.section()
    section.lose(5, rig.noise(5))
    (handle,) = section.export(0, 1)
    assert handle is not None
    linux.punch_hole(handle.fileno(), 4 * rig.page_bytes, 3 * rig.page_bytes)
    assert lost(section) == [5]
    section.heal(5)
    assert lost(section) == []


def test_losing_without_overwriting_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mutant: poison alone leaves the bytes readable through every other mapping."""
    backend = open_backend("host")
    rig = Rig(backend, open_mapper("host"), HOST)
    real = HostSection.poison

    def keeps_the_bytes(self: HostSection, index: int, noise: bytes) -> PoisonMethod:
        fd, offset = self._where(index)
        return real(self, index, os.pread(fd, rig.page_bytes, offset))

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


@pytest.mark.parametrize("rig", ["cuda-fake", GPU], indirect=True)
def test_a_handle_that_is_no_memory_is_refused(rig: Rig) -> None:
    """A client that was handed something else must hear it from the driver, not from the next kernel."""
    mapped = rig.mapper.reserve(rig.layout(), writable=True)
    with open("/dev/null") as other, pytest.raises(CudaError, match="cuMemImportFromShareableHandle"):
        mapped.place(other.fileno(), rig.page_bytes)
