"""Every kind of buffer, without copies; and everything wrong with a buffer, with all buffers untouched."""

from __future__ import annotations

import array
import mmap
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from leto_ec import BufferMismatch, CodeError, ReedSolomon
from leto_ec._buffers import collect

D, H, SIZE = 6, 3, 48
# Before 2.1 numpy takes all memory that comes through DLPack for read-only.
DLPACK_WRITES = np.lib.NumpyVersion(np.__version__) >= "2.1.0"


class DLPackOnly:
    """An object that speaks DLPack and nothing else."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array

    def __dlpack__(self, **options: Any) -> Any:
        return self._array.__dlpack__(**options)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._array.__dlpack_device__()


def as_torch(pages: np.ndarray) -> Any:
    return pytest.importorskip("torch").from_numpy(pages)


def strided(pages: np.ndarray) -> np.ndarray:
    """The same bytes as every second row of a wider array."""
    wide = np.full((2 * len(pages), pages.shape[1] + 9), 0xEE, np.uint8)
    result = wide[::2, 5:-4]
    result[:] = pages
    return result


def backwards(pages: np.ndarray) -> np.ndarray:
    return pages[::-1].copy()[::-1]


def mapped(pages: np.ndarray) -> memoryview:
    memory = mmap.mmap(-1, pages.size)
    memory[:] = pages.tobytes()
    return memoryview(memory).cast("B", pages.shape)


def torch_rows(pages: np.ndarray) -> list[Any]:
    return list(as_torch(pages.copy()))


KINDS: dict[str, Callable[[np.ndarray], Any]] = {
    "array": np.copy,
    "strided": strided,
    "backwards": backwards,
    "memoryview": lambda pages: memoryview(pages.copy()),
    "mmap": mapped,
    "torch": lambda pages: as_torch(pages.copy()),
    "torch strided": lambda pages: as_torch(strided(pages)),
    "dlpack": lambda pages: DLPackOnly(pages.copy()),
    "list": lambda pages: [row.copy() for row in pages],
    "tuple": lambda pages: tuple(row.copy() for row in pages),
    "bytearrays": lambda pages: [bytearray(row.tobytes()) for row in pages],
    "torch rows": torch_rows,
    "mixed list": lambda pages: [
        memoryview(row.copy()) if i % 2 else DLPackOnly(row.copy()) for i, row in enumerate(pages)
    ],
    "array.array": lambda pages: [array.array("B", row.tobytes()) for row in pages],
}


def contents(pages: Any) -> np.ndarray:
    if isinstance(pages, (list, tuple)):
        return np.array([contents(row) for row in pages])
    if isinstance(pages, DLPackOnly):
        return pages._array
    return np.asarray(pages)


@pytest.fixture
def pages(rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, 256, (D, SIZE), dtype=np.uint8)


@pytest.fixture
def code() -> ReedSolomon:
    return ReedSolomon(D, H)


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_in_every_place(kind: str, kernel: str, pages: np.ndarray, rng) -> None:
    if kind in ("dlpack", "mixed list") and not DLPACK_WRITES:
        pytest.skip("numpy before 2.1 does not write through DLPack")
    code = ReedSolomon(D, H, kernel=kernel)
    make = KINDS[kind]
    parity = code.encode(pages)
    noise = np.full((H, SIZE), 0xDD, np.uint8)

    out = make(noise)
    assert code.encode(make(pages), out=out) is out
    assert np.array_equal(contents(out), parity)

    delta = rng.integers(0, 256, (2, SIZE), dtype=np.uint8)
    changed = pages.copy()
    changed[3:5] ^= delta
    assert code.update(out, index=3, delta=make(delta)) is out
    assert np.array_equal(contents(out), code.encode(changed))
    other = make(noise)
    code.update(out, index=3, delta=make(delta), out=other)
    assert np.array_equal(contents(other), parity)
    code.update(other, index=0, delta=contents(make(delta))[0][3:30], offset=7)
    code.update(other, index=0, delta=memoryview(delta[0])[3:30], offset=7)
    assert np.array_equal(contents(other), parity)

    damaged = pages.copy()
    damaged[[0, 5]] = 0xDD
    mine, rows = make(damaged), make(np.concatenate([noise[:1], parity[1:]]))
    code.reconstruct(mine, rows, lost_data=[0, 5], lost_parity=[0])
    assert np.array_equal(contents(mine), pages)
    assert np.array_equal(contents(rows), parity)


def test_strided_outputs_leave_the_gaps_alone(kernel: str, pages: np.ndarray) -> None:
    code = ReedSolomon(D, H, kernel=kernel)
    wide = np.full((2 * H, SIZE + 9), 0xEE, np.uint8)
    code.encode(pages, out=wide[::2, 5:-4])
    wide[::2, 5:-4] = 0xEE
    assert (wide == 0xEE).all()


def test_pages_stand_in_for_others(code: ReedSolomon, pages: np.ndarray) -> None:
    """A page list may name one buffer twice and pages from anywhere: an undo page for a chunk page."""
    zero, undo = np.zeros(SIZE, np.uint8), pages[2].copy()
    expected = pages.copy()
    expected[[0, 4]] = 0
    pages[2] = 0xDD
    assert np.array_equal(
        code.encode([zero, pages[1], undo, pages[3], zero, pages[5]]), code.encode(expected)
    )


def test_read_only_inputs_are_fine(code: ReedSolomon, pages: np.ndarray) -> None:
    parity = code.encode(pages)
    frozen = [row.tobytes() for row in pages]
    assert np.array_equal(code.encode(frozen), parity)
    out = np.empty_like(parity)
    code.update([row.tobytes() for row in parity], index=0, delta=frozen[0], out=out)
    pages[0] = 0
    assert np.array_equal(out, code.encode(pages))
    lost = np.zeros(SIZE, np.uint8)
    code.reconstruct([*frozen[:5], lost], [row.tobytes() for row in parity], lost_data=[5])
    assert lost.tobytes() == frozen[5]


def overlapping_rows(shift: int) -> np.ndarray:
    memory = np.zeros(SIZE * H, np.uint8)
    return np.lib.stride_tricks.as_strided(memory, (H, SIZE), (SIZE - shift, 1))


# name: (wrong buffer made from a right one, what the message says)
WRONG: dict[str, tuple[Callable[[np.ndarray], Any], str]] = {
    "float": (lambda a: a.view(np.float32), "uint8 are expected, found float32"),
    "int8": (lambda a: a.view(np.int8), "uint8 are expected, found int8"),
    "torch dtype": (lambda a: as_torch(a).view(pytest.importorskip("torch").int32), "uint8 .* found int32"),
    "meta device": (lambda a: as_torch(a).to("meta"), "host memory is expected, found a tensor on meta"),
    "torch bfloat16": (lambda a: as_torch(a).view(pytest.importorskip("torch").bfloat16), "found Tensor"),
    "flat": (lambda a: a.reshape(-1), r"shape \(pages, page_bytes\) or a list"),
    "3-d": (lambda a: a.reshape(len(a), 2, -1), r"shape \(pages, page_bytes\)"),
    "2-d in a list": (lambda a: [a[:1] for _ in a], "one-dimensional"),
    "strided bytes": (lambda a: np.repeat(a, 2, 1)[:, ::2], "bytes of a page must be contiguous"),
    "strided bytes in a list": (lambda a: list(np.repeat(a, 2, 1)[:, ::2]), "must be contiguous"),
    "unequal": (lambda a: [*a[:-1], a[-1][:-4]], "page .* has 44"),
    "odd size": (lambda a: a[:, :-2], "multiple of 4, found 46|pages of 48 bytes are expected, found 46"),
    "empty pages": (lambda a: a[:, :0], "multiple of 4, found 0|pages of 48 bytes are expected, found 0"),
    "empty": (lambda a: a[:0], "at least one page"),
    "empty list": (lambda a: [], "at least one page"),
    "a number": (lambda a: 7, "found int"),
    "numbers": (lambda a: [1, 2, 3], "found int"),
    "text": (lambda a: "pages", "found str"),
    "too many": (lambda a: np.concatenate([a, a, a]), "at most 6 pages|3 parity rows are expected, found 9"),
}


@pytest.mark.parametrize("kind", WRONG)
@pytest.mark.parametrize(
    "place", ["pages", "out", "parity", "update out", "reconstruct pages", "reconstruct parity"]
)
def test_wrong_buffers_are_refused(kind: str, place: str, code: ReedSolomon, pages: np.ndarray) -> None:
    make, said = WRONG[kind]
    parity = code.encode(pages)
    right = pages if place.endswith("pages") else parity
    before = pages.copy(), parity.copy()
    wrong = make(right.copy())
    spoiled = np.zeros((H, SIZE), np.uint8)
    calls = {
        "pages": lambda: code.encode(wrong, out=spoiled),
        "out": lambda: code.encode(pages, out=wrong),
        "parity": lambda: code.update(wrong, index=0, delta=pages[:1]),
        "update out": lambda: code.update(parity, index=0, delta=pages[:1], out=wrong),
        "reconstruct pages": lambda: code.reconstruct(wrong, parity, lost_data=[0]),
        "reconstruct parity": lambda: code.reconstruct(pages, wrong, lost_data=[0]),
    }
    with pytest.raises(BufferMismatch, match=said) as caught:
        calls[place]()
    assert isinstance(caught.value, CodeError)
    assert isinstance(caught.value, ValueError)
    assert np.array_equal(pages, before[0])
    assert np.array_equal(parity, before[1])
    assert not spoiled.any()


@pytest.mark.parametrize(
    ("delta", "offset", "said"),
    [
        (np.ones(SIZE + 1, np.uint8), 0, "do not fit a page of 48"),
        (np.ones(8, np.uint8), 41, "bytes 41 to 49 do not fit"),
        (np.ones((1, SIZE), np.uint8), 4, "offset: 0 is expected with whole pages, found 4"),
        (np.ones((1, SIZE - 4), np.uint8), 0, "pages of 48 bytes are expected, found 44"),
        (np.ones(8, np.uint8), -1, "offset: 0 to 48"),
        (np.ones(8, np.uint8), 49, "offset: 0 to 48"),
        (np.ones(8, np.uint16), 0, "found uint16"),
        (np.ones(16, np.uint8)[::2], 0, "contiguous"),
        (np.ones((1, 1, SIZE), np.uint8), 0, "found shape"),
        (7, 0, "found int"),
    ],
)
def test_wrong_deltas_are_refused(code: ReedSolomon, delta: Any, offset: int, said: str) -> None:
    parity = np.zeros((H, SIZE), np.uint8)
    with pytest.raises(CodeError, match=said):
        code.update(parity, index=0, delta=delta, offset=offset)
    assert not parity.any()


def test_read_only_outputs_are_refused(code: ReedSolomon, pages: np.ndarray) -> None:
    parity = code.encode(pages)
    frozen = parity.copy()
    frozen.flags.writeable = False
    frozen_rows = [parity[0], parity[1], bytes(SIZE)]
    before = pages.copy(), parity.copy()
    for rows in (frozen, frozen_rows, DLPackOnly(frozen if DLPACK_WRITES else parity)):
        with pytest.raises(BufferMismatch, match="read-only"):
            code.encode(pages, out=rows)
        with pytest.raises(BufferMismatch, match="read-only"):
            code.update(rows, index=0, delta=pages[0])
        with pytest.raises(BufferMismatch, match="read-only"):
            code.reconstruct(pages, rows, lost_parity=[2])
    with pytest.raises(BufferMismatch, match="read-only"):
        code.reconstruct([*pages[:5], bytes(SIZE)], parity, lost_data=[5])
    assert np.array_equal(pages, before[0])
    assert np.array_equal(parity, before[1])


def test_overlap_is_refused(code: ReedSolomon) -> None:
    memory = np.arange(20 * SIZE, dtype=np.uint32).astype(np.uint8)
    before = memory.copy()
    pages = memory[: D * SIZE].reshape(D, SIZE)
    apart = memory[D * SIZE : (D + H) * SIZE].reshape(H, SIZE)
    overlapping = [
        memory[(D - 1) * SIZE + 4 :][: H * SIZE].reshape(H, SIZE),  # the first row begins in the last page
        pages[1:4],
        [apart[0], apart[1], pages[3]],
        [apart[0], apart[1], memory[SIZE // 2 :][:SIZE]],
        [apart[0], apart[1], apart[1]],
        [apart[0], apart[1], memory[apart.size :][:SIZE]],
        memory[D * SIZE - 1 :][: H * SIZE].reshape(H, SIZE),  # by one byte
    ]
    for rows in overlapping:
        with pytest.raises(BufferMismatch, match="overlap"):
            code.encode(pages, out=rows)
    for rows in (overlapping_rows(1), overlapping_rows(SIZE)):
        with pytest.raises(BufferMismatch, match="overlap"):
            code.update(rows, index=0, delta=pages[0])
    with pytest.raises(BufferMismatch, match="parity and delta overlap"):
        code.update(apart, index=0, delta=memory[D * SIZE - 8 :][:9])
    with pytest.raises(BufferMismatch, match="out and parity overlap"):
        code.update(apart, index=0, delta=pages[0], out=apart)
    with pytest.raises(BufferMismatch, match="out and parity overlap"):
        code.update(apart, index=0, delta=pages[0], out=memory[(D + 1) * SIZE :][: H * SIZE].reshape(H, SIZE))
    with pytest.raises(BufferMismatch, match="surviving pages overlap"):
        code.reconstruct([*pages[:5], pages[0]], apart, lost_data=[5])
    with pytest.raises(BufferMismatch, match="surviving parity overlap"):
        code.reconstruct(pages, [apart[0], apart[1], pages[0]], lost_data=[0])
    with pytest.raises(BufferMismatch, match="overlap"):
        code.reconstruct(pages, [apart[0], apart[1], pages[0]], lost_data=[0], lost_parity=[2])
    assert np.array_equal(memory, before)


def test_neighbours_do_not_overlap(code: ReedSolomon) -> None:
    memory = np.arange((D + H) * SIZE, dtype=np.uint32).astype(np.uint8)
    interleaved = memory.reshape(D + H, SIZE)
    pages, rows = list(interleaved[::3]) + list(interleaved[2::3]), list(interleaved[1::3])
    expected = code.encode(pages)
    assert np.array_equal(code.encode(pages, out=rows), expected)


def test_pages_are_not_copied(code: ReedSolomon, pages: np.ndarray) -> None:
    """What an engine is given points into the caller's memory, torch and DLPack included."""
    torch = pytest.importorskip("torch")
    for wrapped in (pages, memoryview(pages), torch.from_numpy(pages), DLPackOnly(pages), list(pages)):
        addresses = collect(wrapped, "pages").addresses
        assert addresses.tolist() == [pages.ctypes.data + i * SIZE for i in range(D)]
