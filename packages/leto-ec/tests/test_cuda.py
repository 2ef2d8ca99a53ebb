"""GPU memory: every kernel against the golden hash and the host, on every kind of buffer and stream."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import leto_ec
from leto_ec import BufferMismatch, CodeError, InconsistentParity, ReedSolomon, ToleranceExceeded

pytestmark = pytest.mark.gpu
cupy = pytest.importorskip("cupy", reason="needs CuPy: pip install 'leto-ec[cuda]'")

from leto_ec.cuda import Plan, _choice, _launch, _library  # noqa: E402 (imports CuPy)
from leto_ec.cuda._buffers import collect  # noqa: E402

KERNELS = (_choice.CLMAD, _choice.PORTABLE)


NO_DRIVER_OR_DEVICE = (35, 100)  # cudaErrorInsufficientDriver (also: none installed), cudaErrorNoDevice


@pytest.fixture(autouse=True)
def device() -> None:
    try:
        cupy.cuda.runtime.getDeviceCount()
    except cupy.cuda.runtime.CUDARuntimeError as error:
        if error.status not in NO_DRIVER_OR_DEVICE:
            raise
        pytest.skip(f"no CUDA device: {error}")


@pytest.fixture(params=KERNELS)
def kernel(request: pytest.FixtureRequest) -> str:
    """Both builds of the kernels; CLMAD is skipped only on a chip or in a build that is not to have it."""
    properties = cupy.cuda.runtime.getDeviceProperties(0)
    capability = (properties["major"], properties["minor"])
    if request.param == _choice.CLMAD and _choice.cubin_for(capability) is None:
        why = f"no machine code for {capability}: {_choice.build_note()}"
        if capability[0] in (8, 9, 10, 12) and "LETO_EC_NO_CUBINS" not in why:
            pytest.fail(why)
        pytest.skip(why)
    return str(request.param)


def random(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.integers(0, 256, shape, dtype=np.uint8)


# Golden


def test_encode_gives_the_golden_parity(kernel: str, golden: SimpleNamespace) -> None:
    parity = ReedSolomon(1024, 16, kernel=kernel).encode(cupy.asarray(golden.pages()))
    assert golden.digest(parity.get()) == golden.parity_sha256


def test_the_streaming_kernel_gives_the_golden_parity(kernel: str, golden: SimpleNamespace) -> None:
    """Pages of 64 bytes are too short for it: sixteen copies of each make pages of 1 KiB."""
    pages = np.tile(golden.pages(), 16)
    parity = ReedSolomon(1024, 16, kernel=kernel).encode(cupy.asarray(pages)).get()
    for copy in np.split(parity, 16, axis=1):
        assert golden.digest(copy) == golden.parity_sha256


def test_destroyed_parity_and_lost_pages_come_back(kernel: str, golden: SimpleNamespace) -> None:
    pages, parity = cupy.asarray(golden.pages()), cupy.full((16, 64), 0xA5, cupy.uint8)
    code = ReedSolomon(1024, 16, kernel=kernel)
    assert not code.reconstruct(pages, parity, lost_parity=range(16)).verified
    assert golden.digest(parity.get()) == golden.parity_sha256
    pages[100:115] = 0x5A
    assert code.reconstruct(pages, parity, lost_data=range(100, 115)).verified
    assert np.array_equal(pages.get(), golden.pages())


@pytest.mark.parametrize("run", [1, 5, 32])
def test_update_from_nothing_gives_the_golden_parity(kernel: str, golden: SimpleNamespace, run: int) -> None:
    parity, pages = cupy.zeros((16, 64), cupy.uint8), cupy.asarray(golden.pages())
    code = ReedSolomon(1024, 16, kernel=kernel)
    for first in range(0, 1024, run):
        code.update(parity, index=first, delta=pages[first : first + run])
    assert golden.digest(parity.get()) == golden.parity_sha256


@pytest.mark.parametrize("mutant", ["order", "bits"])
def test_wrong_blocks_are_caught(
    kernel: str, golden: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, mutant: str
) -> None:
    true = _launch._blocks.dyadic
    wrong: dict[str, Callable[[Any], Any]] = {
        "order": lambda numbers: true(numbers ^ 1),
        "bits": lambda numbers: true(numbers) ^ (numbers[:, None] << 25).astype(np.uint32),
    }
    monkeypatch.setattr(_launch._blocks, "dyadic", wrong[mutant])
    _launch._coefficients.cache_clear()
    try:
        parity = ReedSolomon(1024, 16, kernel=kernel).encode(cupy.asarray(golden.pages()))
    finally:
        _launch._coefficients.cache_clear()
    assert golden.digest(parity.get()) != golden.parity_sha256


@pytest.mark.parametrize("name", list(_library.STREAMS))
def test_every_streaming_kernel(kernel: str, name: str, rng, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also those that this chip would not choose, with more blocks than a table holds and absent pages."""
    monkeypatch.setattr(_library, "STREAMS", {name: _library.STREAMS[name]})
    _library._loaded.cache_clear()
    try:
        pages: list[Any] = list(random(rng, 2100, 2048))
        pages[5] = pages[2099] = None
        on_device = [None if page is None else cupy.asarray(page) for page in pages]
        code = ReedSolomon(2100, 16, kernel=kernel)
        assert np.array_equal(code.encode(on_device).get(), code.encode(pages))
    finally:
        _library._loaded.cache_clear()


# The same as on the host (I-1)


@st.composite
def cases(draw: st.DrawFn) -> SimpleNamespace:
    data = draw(st.one_of(st.integers(1, 40), st.integers(41, 1100), st.sampled_from([65_535])))
    parity = draw(st.one_of(st.integers(1, 17), st.integers(18, 64)))
    count = draw(st.integers(1, min(data, 120)))
    size = 4 * draw(st.one_of(st.integers(1, 40), st.sampled_from([255, 256, 257, 1024, 1283])))
    rows = draw(st.permutations(range(parity)))
    lost_parity = rows[: draw(st.integers(0, parity))]
    most = min(count, parity - len(lost_parity))
    lost_data = draw(st.lists(st.integers(0, count - 1), min_size=0, max_size=most, unique=True))
    return SimpleNamespace(
        data=data,
        parity=parity,
        count=count,
        size=size,
        lost_data=lost_data,
        lost_parity=lost_parity,
        gap=draw(st.sampled_from([0, 4, 16])),
        kernel=draw(st.sampled_from(["auto", _choice.PORTABLE])),
        seed=draw(st.integers(0, 2**32)),
    )


@settings(max_examples=150)
@given(cases(), st.booleans())
def test_any_loss_within_tolerance(case: SimpleNamespace, verify: bool) -> None:
    rng = np.random.default_rng(case.seed)
    code = ReedSolomon(case.data, case.parity, kernel=case.kernel)
    pages = random(rng, case.count, case.size)
    parity = code.encode(pages)
    wide = cupy.full((case.count, case.size + case.gap), 0xEE, cupy.uint8)
    group = wide[:, : case.size]
    group[:] = cupy.asarray(pages)
    rows = code.encode(group)
    assert np.array_equal(rows.get(), parity)
    for index in case.lost_data:
        group[index] ^= cupy.asarray(rng.integers(1, 256, case.size, dtype=np.uint8))
    for index in case.lost_parity:
        rows[index] ^= 0x3C
    lost = {"lost_data": case.lost_data, "lost_parity": case.lost_parity}
    result = code.reconstruct(group, rows, **lost, verify=verify)
    assert np.array_equal(group.get(), pages)
    assert np.array_equal(rows.get(), parity)
    assert bool((wide[:, case.size :] == 0xEE).all())
    spares = case.parity - len(case.lost_parity) - len(case.lost_data)
    assert result.verified == (verify and spares > 0)


@settings(max_examples=60)
@given(cases(), st.data())
def test_any_loss_beyond_tolerance_is_refused(case: SimpleNamespace, data: st.DataObject) -> None:
    least = case.parity - len(case.lost_parity) + 1
    if least > case.count:
        return
    lost = data.draw(st.lists(st.integers(0, case.count - 1), min_size=least, max_size=least, unique=True))
    rng = np.random.default_rng(case.seed)
    pages = random(rng, case.count, case.size)
    parity = random(rng, case.parity, case.size)
    group, rows = cupy.asarray(pages), cupy.asarray(parity)
    with pytest.raises(ToleranceExceeded):
        ReedSolomon(case.data, case.parity).reconstruct(
            group, rows, lost_data=lost, lost_parity=case.lost_parity
        )
    assert np.array_equal(group.get(), pages)
    assert np.array_equal(rows.get(), parity)


@settings(max_examples=150)
@given(st.data(), st.sampled_from(["auto", _choice.PORTABLE]), st.booleans(), st.booleans())
def test_update_is_encoding_again(data: st.DataObject, kernel: str, pair: bool, in_place: bool) -> None:
    """Byte runs at any offset, alignment and length, and runs of pages; delta, or old and new."""
    count = data.draw(st.integers(1, 40), "pages")
    code = ReedSolomon(count, data.draw(st.integers(1, 35), "parity"), kernel=kernel)
    size = 4 * data.draw(st.one_of(st.integers(1, 30), st.sampled_from([256, 1100])), "words")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32), "seed"))
    pages = random(rng, count, size)
    changed = pages.copy()
    index = data.draw(st.integers(0, count - 1), "index")
    offset = 0
    if data.draw(st.booleans(), "run of pages"):
        run = data.draw(st.integers(1, count - index), "run")
        changed[index : index + run] = random(rng, run, size)
        old, new = pages[index : index + run], changed[index : index + run]
    else:
        offset = data.draw(st.integers(0, size), "offset")
        length = data.draw(st.integers(0, size - offset), "length")
        changed[index, offset : offset + length] = random(rng, length)
        old, new = pages[index, offset : offset + length], changed[index, offset : offset + length]
    shift = data.draw(st.integers(0, 5), "shift in memory") if old.ndim == 1 else 0

    def up(array: np.ndarray) -> Any:
        memory = cupy.zeros(array.size + shift, cupy.uint8)
        memory[shift:] = cupy.asarray(np.ascontiguousarray(array)).reshape(-1)
        return memory[shift:].reshape(array.shape)

    parity = cupy.asarray(code.encode(pages))
    out = None if in_place else cupy.full_like(parity, 0x77)
    change = {"old": up(old), "new": up(new)} if pair else {"delta": up(old ^ new)}
    result = code.update(parity, index=index, offset=offset, out=out, **change)
    assert result is (parity if out is None else out)
    assert np.array_equal(result.get(), code.encode(changed))
    if out is not None:
        assert np.array_equal(parity.get(), code.encode(pages))


@pytest.mark.parametrize("where", ["page", "row"])
@pytest.mark.parametrize("lost", [([], []), ([2], []), ([2, 5], [0]), ([], [1]), ([1, 2, 3], [])])
def test_inconsistency_is_found_and_nothing_written(
    kernel: str, rng, where: str, lost: tuple[list[int], list[int]]
) -> None:
    code = ReedSolomon(20, 4, kernel=kernel)
    pages = random(rng, 20, 1036)
    group, rows = cupy.asarray(pages), cupy.asarray(code.encode(pages))
    for index in lost[0]:
        group[index] = 0xDD
    for index in lost[1]:
        rows[index] = 0xDD
    victims = group if where == "page" else rows
    (victim,) = [i for i in range(20) if i not in lost[0 if where == "page" else 1]][-1:]
    if where == "row":
        (victim,) = [i for i in range(4) if i not in lost[1]][-1:]
    for byte in (0, 517, 1035):
        victims[victim, byte] ^= 1
        before = group.get(), rows.get()
        with pytest.raises(InconsistentParity) as caught:
            code.reconstruct(group, rows, lost_data=lost[0], lost_parity=lost[1])
        assert set(caught.value.rows) <= set(range(4)) - set(lost[1])
        assert np.array_equal(group.get(), before[0])
        assert np.array_equal(rows.get(), before[1])
        victims[victim, byte] ^= 1
    assert code.reconstruct(group, rows, lost_data=lost[0], lost_parity=lost[1]).verified
    assert np.array_equal(group.get(), pages)


def test_random_erasures(kernel: str) -> None:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}: repeat with np.random.default_rng({seed}) in this test")
    rng = np.random.default_rng(seed)
    code = ReedSolomon(1024, 16, kernel=kernel)
    pages = cupy.asarray(random(rng, 1024, 4096 + 4))
    parity = code.encode(pages)
    wanted, rows = pages.copy(), parity.copy()
    for _ in range(25):
        total = int(rng.integers(1, 17))
        gone = rng.choice(1040, total, replace=False)
        lost_data, lost_parity = gone[gone < 1024], gone[gone >= 1024] - 1024
        pages[lost_data] ^= cupy.asarray(rng.integers(1, 256, 4100, dtype=np.uint8))
        parity[lost_parity] = 0x11
        code.reconstruct(pages, parity, lost_data=lost_data, lost_parity=lost_parity)
        assert bool((pages == wanted).all())
        assert bool((parity == rows).all())


# Buffers, streams, plans


class OnlyDLPack:
    def __init__(self, array: Any) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return self._array.__dlpack_device__()


class OnlyInterface:
    def __init__(self, array: Any) -> None:
        self._array = array
        self.__cuda_array_interface__ = array.__cuda_array_interface__


def as_torch(array: Any) -> Any:
    return pytest.importorskip("torch").from_dlpack(array)


KINDS: dict[str, Callable[[Any], Any]] = {
    "cupy": lambda a: a,
    "torch": as_torch,
    "dlpack": OnlyDLPack,
    "interface": OnlyInterface,
    "list": list,
    "torch rows": lambda a: list(as_torch(a)),
    "mixed rows": lambda a: [OnlyDLPack(r) if i % 2 else OnlyInterface(r) for i, r in enumerate(a)],
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_in_every_place(kind: str, rng) -> None:
    make = KINDS[kind]
    code = ReedSolomon(6, 3)
    pages = random(rng, 6, 2060)
    expected = code.encode(pages)
    group, out = cupy.asarray(pages), cupy.full((3, 2060), 0xDD, cupy.uint8)
    code.encode(make(group), out=make(out))
    assert np.array_equal(out.get(), expected)
    delta = cupy.asarray(random(rng, 2, 2060))
    code.update(make(out), index=3, delta=make(delta))
    code.update(make(out), index=3, delta=make(delta))
    assert np.array_equal(out.get(), expected)
    group[[0, 5]] = 0
    out[1] = 0
    code.reconstruct(make(group), make(out), lost_data=[0, 5], lost_parity=[1])
    assert np.array_equal(group.get(), pages)
    assert np.array_equal(out.get(), expected)


def test_results_are_where_the_pages_are() -> None:
    torch = pytest.importorskip("torch")
    code = ReedSolomon(4, 2)
    assert isinstance(code.encode(torch.ones((4, 64), dtype=torch.uint8, device="cuda")), torch.Tensor)
    assert isinstance(code.encode(cupy.ones((4, 64), cupy.uint8)), cupy.ndarray)


def test_pages_are_not_copied() -> None:
    memory = cupy.zeros((6, 64), cupy.uint8)
    for kind, make in KINDS.items():
        addresses = collect(make(memory), "pages").addresses.tolist()
        assert addresses == [memory.data.ptr + i * 64 for i in range(6)], kind


def test_absent_pages_are_zero(kernel: str, rng) -> None:
    code = ReedSolomon(40, 5, kernel=kernel)
    pages = random(rng, 40, 1028)
    absent = [0, 7, 15, 16, 39]
    pages[absent] = 0
    group = [None if i in absent else cupy.asarray(page) for i, page in enumerate(pages)]
    parity = code.encode(group)
    assert np.array_equal(parity.get(), code.encode(pages))
    group[3][:] = 1
    code.reconstruct(group, parity, lost_data=[3])
    assert np.array_equal(group[3].get(), pages[3])
    with pytest.raises(BufferMismatch, match="found None"):
        code.reconstruct(group, parity, lost_data=[7])


def test_host_and_device_do_not_mix() -> None:
    code = ReedSolomon(4, 2)
    host, device_memory = np.zeros((4, 64), np.uint8), cupy.zeros((4, 64), cupy.uint8)
    for call in (
        lambda: code.encode(device_memory, out=host[:2]),
        lambda: code.encode([host[0], device_memory[1]]),
        lambda: code.update(device_memory[:2], index=0, delta=host[0]),
        lambda: code.reconstruct(host, device_memory[:2], lost_data=[0]),
    ):
        with pytest.raises(BufferMismatch, match="is on a GPU and"):
            call()
    with pytest.raises(CodeError, match="stream: None"):
        code.encode(host, stream=cupy.cuda.Stream())
    with pytest.raises(CodeError, match="stream: a CuPy or torch stream"):
        code.encode(device_memory, stream="main")


def test_wrong_buffers_are_refused() -> None:
    code = ReedSolomon(6, 3)
    pages, parity = cupy.zeros((6, 64), cupy.uint8), cupy.zeros((3, 64), cupy.uint8)
    memory = cupy.zeros(4096, cupy.uint8)
    for call, said in (
        (lambda: code.encode(pages.view(cupy.float32)), "uint8 are expected, found float32"),
        (lambda: code.encode(pages.reshape(-1)), r"shape \(pages, page_bytes\)"),
        (lambda: code.encode(pages[:, ::2]), "must be contiguous"),
        (lambda: code.encode(pages[:, :30]), "multiple of 4"),
        (lambda: code.encode(memory[1:385].reshape(6, 64)), "begin at a multiple of 4"),
        (lambda: code.encode(cupy.zeros((7, 64), cupy.uint8)), "at most 6 pages"),
        (lambda: code.encode(pages, out=parity[:2]), "3 parity rows"),
        (lambda: code.encode(pages, out=pages[:3]), "overlap"),
        (lambda: code.encode(list(pages[:3]), out=[pages[3], pages[4], pages[4]]), "overlap"),
        (lambda: code.update(parity, index=0, delta=parity[0]), "overlap"),
        (lambda: code.update(parity, index=0, delta=memory[:8], offset=60), "do not fit"),
        (lambda: code.update(parity, index=5, delta=pages[:2]), "beyond the last page"),
        (lambda: code.update(parity, index=0, delta=pages[:2], offset=4), "offset: 0 is expected"),
        (lambda: code.encode([*pages[:2], memory[:32]]), "page 2 has 32"),
    ):
        with pytest.raises(CodeError, match=said):
            call()
    assert not pages.any()
    assert not parity.any()


@pytest.mark.parametrize("form", ["argument", "current", "torch", "address"])
def test_work_is_on_the_callers_stream(form: str, rng) -> None:
    """A stream that is held up: nothing may happen before what was put on it earlier."""
    code = ReedSolomon(64, 16)
    pages = cupy.asarray(random(rng, 64, 1 << 16))
    expected = code.encode(pages)
    source, late = pages.copy(), cupy.zeros_like(pages)
    out = cupy.zeros_like(expected)
    code.encode(pages)  # compiled and loaded
    cupy.cuda.Device().synchronize()
    busy = cupy.ones((3000, 3000), cupy.float32)
    stream: Any = cupy.cuda.Stream(non_blocking=True)
    with stream:
        for _ in range(5):
            busy = busy @ busy * 0
        late[:] = source
    if form == "current":
        with stream:
            code.encode(late, out=out)
    elif form == "torch":
        torch = pytest.importorskip("torch")
        with torch.cuda.stream(torch.cuda.ExternalStream(stream.ptr)):
            code.encode(as_torch(late), out=as_torch(out))
    else:
        code.encode(late, out=out, stream=stream if form == "argument" else stream.ptr)
    stream.synchronize()
    assert bool((out == expected).all())


def test_plans_of_several_groups_and_graphs(kernel: str, rng) -> None:
    code = ReedSolomon(40, 18, kernel=kernel)
    groups = [cupy.asarray(random(rng, 40, 1028 * 4)) for _ in range(3)]
    outs = [cupy.zeros((18, 1028 * 4), cupy.uint8) for _ in groups]
    plan = Plan.encode(code, groups, outs)
    assert plan.kernel == kernel
    plan.run()
    for group, out in zip(groups, outs, strict=True):
        assert np.array_equal(out.get(), code.encode(group.get()))

    pool = cupy.get_default_memory_pool()
    deltas = [cupy.asarray(random(rng, 3, 1028 * 4)) for _ in groups]
    again = [cupy.zeros_like(out) for out in outs]
    for first, count in ((7, 1), (9, 3)):
        change = Plan.update(code, outs, index=first, deltas=[d[:count] for d in deltas], outs=again)
        cupy.cuda.Device().synchronize()
        used = pool.used_bytes()
        stream = cupy.cuda.Stream(non_blocking=True)
        with stream:
            stream.begin_capture()
            change.run(stream)
            graph = stream.end_capture()
        assert pool.used_bytes() == used, "the hot path allocated"
        for _ in range(2):
            graph.launch(stream)
        stream.synchronize()
        for group, delta, out in zip(groups, deltas, again, strict=True):
            changed = group.get()
            changed[first : first + count] ^= delta[:count].get()
            assert np.array_equal(out.get(), code.encode(changed))

    wanted = [group.get() for group in groups]
    lost = [[1, 2], [], [39, 0, 5]]
    for group, gone in zip(groups, lost, strict=True):
        group[gone] = 0xDD
    repair = Plan.reconstruct(code, groups, outs, lost_data=lost, lost_parity=[[], [3], [0]])
    repair.run()
    assert [result.data for result in repair.result()] == [(1, 2), (), (0, 5, 39)]
    for group, right in zip(groups, wanted, strict=True):
        assert np.array_equal(group.get(), right)
    groups[1][0, 0] ^= 1
    groups[0][1] = 0
    repair.run()
    with pytest.raises(InconsistentParity) as caught:
        repair.result()
    assert caught.value.__notes__ == ["in group 1"]
    assert np.array_equal(groups[0].get(), wanted[0])


def test_plans_refuse_what_does_not_belong_together() -> None:
    code = ReedSolomon(6, 3)
    pages, parity = cupy.zeros((6, 64), cupy.uint8), cupy.zeros((3, 64), cupy.uint8)
    short = cupy.zeros((5, 64), cupy.uint8)
    for call, said in (
        (lambda: Plan.encode(code, [pages], []), "at least one group"),
        (lambda: Plan.encode(code, [pages, pages], [parity]), "2 groups are expected"),
        (lambda: Plan.encode(code, [pages, short], [parity, parity.copy()]), "same number of pages"),
        (lambda: Plan.encode(code, [pages, pages], [parity, parity]), "overlap"),
        (lambda: Plan.update(code, [parity], index=0), "either deltas"),
        (lambda: Plan.update(code, [parity], index=0, deltas=[pages[0], pages[1]]), "1 are expected"),
        (lambda: Plan.update(code, [parity], index=0, deltas=[pages[0, :6]]), "multiple of 4"),
        (lambda: Plan.reconstruct(code, [pages], [parity], lost_data=[]), "as many groups"),
    ):
        with pytest.raises(CodeError, match=said):
            call()


# The choice of a kernel


def test_info_names_the_device_and_its_kernel() -> None:
    (found, *_) = leto_ec.info()["cuda"]["devices"]
    assert found["kernel"] in KERNELS
    plan = Plan.encode(
        ReedSolomon(4, 2), [cupy.zeros((4, 64), cupy.uint8)], [cupy.zeros((2, 64), cupy.uint8)]
    )
    assert (plan.kernel, plan.why) == (found["kernel"], found["why"])


def test_the_environment_may_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LETO_EC_KERNEL", _choice.PORTABLE)
    (found, *_) = leto_ec.info()["cuda"]["devices"]
    assert found["kernel"] == _choice.PORTABLE
    assert "LETO_EC_KERNEL" in found["why"]
    assert ReedSolomon(4, 2).kernel == leto_ec.info()["kernels"][0]


def test_the_header_can_be_fused(rng) -> None:
    """A kernel of one's own: y = a + b, and the parity of y on the way, by the header alone."""
    source = r"""
    #include "gf32.cuh"
    extern "C" __global__ void add(const float* a, const float* b, float* y, const unsigned* f, unsigned*
    parity,
                                   unsigned words, unsigned blocks) {
        const unsigned col = blockIdx.x * blockDim.x + threadIdx.x;
        if (col >= words) return;
        unsigned long long acc[16] = {};
        for (unsigned block = 0; block < blocks; ++block) {
            unsigned d[16];
            unsigned long long c[16];
            for (unsigned s = 0; s < 16; ++s) {
                const unsigned at = (block * 16 + s) * words + col;
                const float sum = a[at] + b[at];
                y[at] = sum;
                d[s] = __float_as_uint(sum);
                c[s] = f[block * 16 + s];
            }
            leto_ec::superset_sums(d);
            leto_ec::multiply_add(acc, d, c);
        }
        unsigned row[16];
        leto_ec::finish(row, acc);
        for (unsigned i = 0; i < 16; ++i) parity[i * words + col] = row[i];
    }"""
    from leto_ec import cuda

    module = cupy.RawModule(code=source, options=("-std=c++17", f"-I{cuda.include_dir()}"))
    words, pages = 100, 48
    a = cupy.asarray(rng.standard_normal((pages, words), np.float32))
    b = cupy.asarray(rng.standard_normal((pages, words), np.float32))
    y, parity = cupy.zeros_like(a), cupy.zeros((16, words), np.uint32)
    f = cupy.asarray(cuda.block_coefficients(1, 3))
    module.get_function("add")((1,), (128,), (a, b, y, f, parity, np.uint32(words), np.uint32(3)))
    expected = ReedSolomon(pages, 16).encode(y.get().view(np.uint8))
    assert np.array_equal(parity.get().view(np.uint8), expected)


def test_the_twenty_lines_of_the_how_to() -> None:
    """docs/leto-ec/gpu-state.md, on a GPU (the tests of the documentation run it on the host)."""
    pytest.importorskip("torch")
    page = Path(__file__).parents[3] / "docs" / "leto-ec" / "gpu-state.md"
    if not page.exists():
        pytest.skip("the documentation is not beside the package")
    source = page.read_text(encoding="utf-8").split("```python\n")[1].split("```")[0]
    assert len(source.strip().splitlines()) <= 22
    names: dict[str, Any] = {}
    exec(compile(source, str(page), "exec"), names)  # our own documentation
    assert names["device"] == "cuda"
    assert names["result"].verified
