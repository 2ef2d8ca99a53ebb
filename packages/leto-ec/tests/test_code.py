"""I-1: any loss within tolerance is reconstructed to the exact bytes, anything beyond is refused."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import leto_ec
from leto_ec import CodeError, InconsistentParity, ReedSolomon, ToleranceExceeded

KERNELS = leto_ec.info()["kernels"]
FAST = [name for name in KERNELS if name != "reference"] or KERNELS


def subsets(count: int) -> list[tuple[int, ...]]:
    return [chosen for size in range(count + 1) for chosen in itertools.combinations(range(count), size)]


def erase(rows: np.ndarray, lost, rng: np.random.Generator) -> None:
    """Overwrite lost pages with noise that differs from the original in every byte."""
    for index in lost:
        rows[index] ^= rng.integers(1, 256, rows.shape[1], dtype=np.uint8)


@pytest.mark.parametrize("parity_rows", [1, 2, 3])
@pytest.mark.parametrize("data", [1, 2, 3, 5])
def test_every_erasure_pattern_of_small_codes(kernel: str, rng, data: int, parity_rows: int) -> None:
    code = ReedSolomon(data, parity_rows, kernel=kernel)
    pages = rng.integers(0, 256, (data, 12), dtype=np.uint8)
    parity = code.encode(pages)
    refused = 0
    for lost_data, lost_parity in itertools.product(subsets(data), subsets(parity_rows)):
        damaged, rows = pages.copy(), parity.copy()
        erase(damaged, lost_data, rng)
        erase(rows, lost_parity, rng)
        spares = parity_rows - len(lost_parity) - len(lost_data)
        before = damaged.copy(), rows.copy()
        if spares < 0:
            with pytest.raises(ToleranceExceeded) as caught:
                code.reconstruct(damaged, rows, lost_data=lost_data, lost_parity=lost_parity)
            assert (caught.value.lost_data, caught.value.lost_parity) == (len(lost_data), len(lost_parity))
            assert np.array_equal(damaged, before[0])
            assert np.array_equal(rows, before[1])
            refused += 1
            continue
        result = code.reconstruct(damaged, rows, lost_data=lost_data, lost_parity=lost_parity)
        assert np.array_equal(damaged, pages)
        assert np.array_equal(rows, parity)
        assert result == leto_ec.Reconstruction(spares > 0, spares, lost_data, lost_parity)
    assert refused > 0


@st.composite
def losses(draw: st.DrawFn) -> tuple[int, int, int, int, list[int], list[int], int]:
    """Parameters of a code, a (shortened) group, losses within tolerance, and a seed for the bytes."""
    data = draw(st.one_of(st.integers(1, 40), st.integers(41, 1100), st.sampled_from([65_535])))
    parity = draw(st.integers(1, 64 if data < 65_535 else 4))
    count = draw(st.integers(1, min(data, 300)))
    size = 4 * draw(st.one_of(st.integers(1, 40), st.sampled_from([1023, 1024, 1025, 2500])))
    rows = draw(st.permutations(range(parity)))
    lost_parity = rows[: draw(st.integers(0, parity))]
    most = min(count, parity - len(lost_parity))
    lost_data = draw(st.lists(st.integers(0, count - 1), min_size=0, max_size=most, unique=True))
    return data, parity, count, size, lost_data, lost_parity, draw(st.integers(0, 2**32))


@settings(max_examples=120)
@given(losses(), st.sampled_from(FAST), st.booleans())
def test_any_loss_within_tolerance(case, name: str, verify: bool) -> None:
    data, parity_rows, count, size, lost_data, lost_parity, seed = case
    rng = np.random.default_rng(seed)
    code = ReedSolomon(data, parity_rows, kernel=name)
    pages = rng.integers(0, 256, (count, size), dtype=np.uint8)
    parity = code.encode(pages)
    damaged, rows = pages.copy(), parity.copy()
    erase(damaged, lost_data, rng)
    erase(rows, lost_parity, rng)
    result = code.reconstruct(damaged, rows, lost_data=lost_data, lost_parity=lost_parity, verify=verify)
    assert np.array_equal(damaged, pages)
    assert np.array_equal(rows, parity)
    spares = parity_rows - len(lost_parity) - len(lost_data)
    assert result.spares_checked == (spares if verify else 0)
    assert result.verified == (verify and spares > 0)


@settings(max_examples=60)
@given(losses(), st.sampled_from(FAST), st.data())
def test_any_loss_beyond_tolerance_is_refused(case, name: str, data: st.DataObject) -> None:
    pages_full, parity_rows, count, size, _, lost_parity, seed = case
    least = parity_rows - len(lost_parity) + 1
    if least > count:
        return
    lost_data = data.draw(st.lists(st.integers(0, count - 1), min_size=least, max_size=least, unique=True))
    rng = np.random.default_rng(seed)
    pages = rng.integers(0, 256, (count, size), dtype=np.uint8)
    parity = rng.integers(0, 256, (parity_rows, size), dtype=np.uint8)
    before = pages.copy(), parity.copy()
    with pytest.raises(ToleranceExceeded):
        ReedSolomon(pages_full, parity_rows, kernel=name).reconstruct(
            pages, parity, lost_data=lost_data, lost_parity=lost_parity
        )
    assert np.array_equal(pages, before[0])
    assert np.array_equal(parity, before[1])


@settings(max_examples=150)
@given(st.data(), st.sampled_from(KERNELS))
def test_update_is_encoding_again(data: st.DataObject, name: str) -> None:
    """Byte runs at any offset and of any length, and page runs, in place and out of place."""
    pages_count = data.draw(st.integers(1, 12), "data")
    code = ReedSolomon(pages_count, data.draw(st.integers(1, 9), "parity"), kernel=name)
    size = 4 * data.draw(st.one_of(st.integers(1, 30), st.just(1100)), "words")
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32), "seed"))
    pages = rng.integers(0, 256, (pages_count, size), dtype=np.uint8)
    parity = code.encode(pages)
    changed = pages.copy()
    index = data.draw(st.integers(0, pages_count - 1), "index")
    if data.draw(st.booleans(), "run of pages"):
        count = data.draw(st.integers(1, pages_count - index), "count")
        offset = 0
        delta = rng.integers(0, 256, (count, size), dtype=np.uint8)
        changed[index : index + count] ^= delta
    else:
        offset = data.draw(st.integers(0, size), "offset")
        length = data.draw(st.integers(0, size - offset), "length")
        delta = rng.integers(0, 256, length, dtype=np.uint8)
        changed[index, offset : offset + length] ^= delta
    old = parity.copy()
    out = np.full_like(parity, 0x77) if data.draw(st.booleans(), "out of place") else None
    result = code.update(parity, index=index, delta=delta, offset=offset, out=out)
    assert result is (parity if out is None else out)
    assert np.array_equal(result, code.encode(changed))
    if out is not None:
        assert np.array_equal(parity, old)


def test_a_shortened_code_is_the_code_with_zero_pages(kernel: str, rng) -> None:
    code = ReedSolomon(20, 4, kernel=kernel)
    pages = np.zeros((20, 64), np.uint8)
    pages[:7] = rng.integers(0, 256, (7, 64))
    parity = code.encode(pages)
    assert np.array_equal(code.encode(pages[:7]), parity)
    short = pages[:7].copy()
    short[[0, 6]] = 1
    assert code.reconstruct(short, parity, lost_data=[6, 0]).data == (0, 6)
    assert np.array_equal(short, pages[:7])
    # The group may grow: a delta for a page that was not there yet counts from zero.
    code.update(parity, index=12, delta=pages[0])
    pages[12] = pages[0]
    assert np.array_equal(code.encode(pages), parity)


def test_tier_two_protects_parity(rng) -> None:
    """Parity pages are the data pages of the second tier: RS(H1, H2)."""
    tier1, tier2 = ReedSolomon(48, 6), ReedSolomon(6, 1)
    pages = rng.integers(0, 256, (48, 256), dtype=np.uint8)
    H = tier1.encode(pages)
    second = tier2.encode(H)
    damaged, rows = pages.copy(), H.copy()
    erase(damaged, range(10, 16), rng)
    erase(rows, [3], rng)
    tier2.reconstruct(rows, second, lost_data=[3])
    tier1.reconstruct(damaged, rows, lost_data=range(10, 16))
    assert np.array_equal(damaged, pages)


# Verification


@pytest.mark.parametrize("where", ["page", "row"])
@pytest.mark.parametrize(
    ("lost", "lost_rows"), [([], []), ([2], []), ([2, 5], [0]), ([], [1]), ([1, 2, 3], [])]
)
def test_inconsistency_shows_while_spares_are_left(
    kernel: str, rng, where: str, lost: list[int], lost_rows: list[int]
) -> None:
    code = ReedSolomon(8, 4, kernel=kernel)
    pages = rng.integers(0, 256, (8, 40), dtype=np.uint8)
    parity = code.encode(pages)
    erase(pages, lost, rng)
    erase(parity, lost_rows, rng)
    victims = pages if where == "page" else parity
    skip = lost if where == "page" else lost_rows
    for victim in set(range(len(victims))) - set(skip):
        for byte, bit in [(0, 0), (17, 3), (39, 7)]:
            victims[victim, byte] ^= 1 << bit
            before = pages.copy(), parity.copy()
            with pytest.raises(InconsistentParity) as caught:
                code.reconstruct(pages, parity, lost_data=lost, lost_parity=lost_rows)
            assert set(caught.value.rows) <= set(range(4)) - set(lost_rows)
            assert np.array_equal(pages, before[0])
            assert np.array_equal(parity, before[1])
            victims[victim, byte] ^= 1 << bit
    result = code.reconstruct(pages, parity, lost_data=lost, lost_parity=lost_rows)
    assert result.verified
    assert np.array_equal(code.encode(pages), parity)


@settings(max_examples=60)
@given(st.data(), st.sampled_from(FAST))
def test_as_many_corrupt_pages_as_spares_always_show(data: st.DataObject, name: str) -> None:
    D, H = 30, data.draw(st.integers(1, 10))
    code = ReedSolomon(D, H, kernel=name)
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32)))
    pages = rng.integers(0, 256, (D, 32), dtype=np.uint8)
    rows = np.concatenate([pages, code.encode(pages)])
    order = data.draw(st.permutations(range(D + H)))
    lost = order[: data.draw(st.integers(0, H - 1))]
    lost_data = [i for i in lost if i < D]
    lost_parity = [i - D for i in lost if i >= D]
    corrupt = order[len(lost) :][: data.draw(st.integers(1, H - len(lost)))]
    at = int(rng.integers(32))
    for index in corrupt:
        rows[index, at] ^= rng.integers(1, 256, dtype=np.uint8)
    with pytest.raises(InconsistentParity):
        code.reconstruct(rows[:D], rows[D:], lost_data=lost_data, lost_parity=lost_parity)


def test_without_spares_nothing_is_verified_and_the_result_says_so(kernel: str, rng) -> None:
    code = ReedSolomon(8, 2, kernel=kernel)
    pages = rng.integers(0, 256, (8, 40), dtype=np.uint8)
    parity = code.encode(pages)
    pages[0, 0] ^= 1  # silent corruption
    erase(pages, [3, 4], rng)
    result = code.reconstruct(pages, parity, lost_data=[3, 4])
    assert not result.verified
    assert result.spares_checked == 0
    # With one loss fewer it would have been found; unless it was not to be looked for.
    with pytest.raises(InconsistentParity):
        ReedSolomon(8, 2).reconstruct(pages, parity ^ 1, lost_data=[3])
    assert not ReedSolomon(8, 2).reconstruct(pages, parity ^ 1, lost_data=[3], verify=False).verified


def test_a_scrub_writes_nothing(kernel: str, rng) -> None:
    code = ReedSolomon(8, 3, kernel=kernel)
    pages = rng.integers(0, 256, (8, 40), dtype=np.uint8)
    parity = code.encode(pages)
    pages.flags.writeable = parity.flags.writeable = False
    assert code.reconstruct(pages, parity) == leto_ec.Reconstruction(True, 3, (), ())
    assert code.reconstruct(pages, parity, verify=False) == leto_ec.Reconstruction(False, 0, (), ())


# Parameters and indices


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"data": 0, "parity": 1}, "data: 1 to 65535"),
        ({"data": 65_536, "parity": 1}, "data: 1 to 65535"),
        ({"data": 4, "parity": 0}, "parity: 1 to 64"),
        ({"data": 4, "parity": 65}, "parity: 1 to 64"),
        ({"data": 4.0, "parity": 1}, "data: an integer"),
        ({"data": 4, "parity": 1, "kernel": "abacus"}, "kernel: one of auto, .*reference.* found 'abacus'"),
    ],
)
def test_parameters_out_of_range(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(CodeError, match=said):
        ReedSolomon(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("lost", "said"),
    [
        ({"lost_data": [8]}, "lost_data: 0 to 7 is expected, found 8"),
        ({"lost_data": [-1]}, "lost_data: 0 to 7 is expected, found -1"),
        ({"lost_data": [2, 2]}, "lost_data: every index once"),
        ({"lost_data": ["2"]}, "lost_data: an integer"),
        ({"lost_parity": [3]}, "lost_parity: 0 to 2"),
        ({"lost_parity": [1, 1]}, "lost_parity: every index once"),
    ],
)
def test_lost_indices_out_of_range(lost: dict[str, list[int]], said: str, rng) -> None:
    code = ReedSolomon(20, 3)
    pages = rng.integers(0, 256, (8, 40), dtype=np.uint8)
    parity = code.encode(pages)
    before = pages.copy(), parity.copy()
    with pytest.raises(CodeError, match=said):
        code.reconstruct(pages, parity, **lost)
    assert np.array_equal(pages, before[0])
    assert np.array_equal(parity, before[1])


@pytest.mark.parametrize("index", [-1, 20, 19])
def test_update_beyond_the_last_page(index: int) -> None:
    parity = np.zeros((3, 8), np.uint8)
    with pytest.raises(CodeError, match=r"index: 0 to 19|beyond the last page 19"):
        ReedSolomon(20, 3).update(parity, index=index, delta=np.ones((2, 8), np.uint8))
    assert not parity.any()


def test_numpy_integers_are_integers(rng) -> None:
    code = ReedSolomon(np.int64(8), np.uint8(3))
    pages = rng.integers(0, 256, (8, 40), dtype=np.uint8)
    parity = code.encode(pages)
    lost = np.array([1, 4])
    damaged = pages.copy()
    damaged[lost] = 0
    assert code.reconstruct(damaged, parity, lost_data=lost).data == (1, 4)
    assert np.array_equal(damaged, pages)


def test_properties() -> None:
    code = ReedSolomon(8, 3, kernel="reference")
    assert (code.data, code.parity, code.kernel) == (8, 3, "reference")
    assert repr(code) == "ReedSolomon(data=8, parity=3, kernel='reference')"
    assert code.coefficients.shape == (3, 8)
    assert not code.coefficients.flags.writeable


@pytest.mark.parametrize("parity", [1, 5, 16, 17])
@pytest.mark.parametrize("size", [4, 260, 20_000])
def test_plain_arrays_take_a_short_way_to_the_same_rows(kernel: str, rng, parity: int, size: int) -> None:
    code = ReedSolomon(40, parity, kernel=kernel)
    delta = rng.integers(0, 256, size, dtype=np.uint8)
    for index in (0, 17, 39):
        short = rng.integers(0, 256, (parity, size), dtype=np.uint8)
        general = list(short.copy())
        assert code.update(short, index=index, delta=delta) is short
        code.update(general, index=index, delta=memoryview(delta))
        assert np.array_equal(short, general)


def test_the_short_way_refuses_what_the_general_way_refuses(rng) -> None:
    code = ReedSolomon(40, 2)
    memory = rng.integers(0, 256, 3 * 64, dtype=np.uint8)
    before = memory.copy()
    rows, delta = memory[:128].reshape(2, 64), memory[128:]
    read_only = rows[:]
    read_only.flags.writeable = False
    for parity, index, change, said in (
        (rows, 40, delta, "index"),
        (rows, -1, delta, "index"),
        (rows, 3, memory[127:191], "overlap"),
        (rows, 3, memory[:64], "overlap"),
        (read_only, 3, delta, "read-only"),
        (memory.reshape(3, 64), 3, np.zeros(64, np.uint8), "2 parity rows"),
        (rows[:, :62], 3, delta[:62], "multiple of 4"),
        (rows.view(np.int8), 3, delta, "uint8"),
        (rows, 3, delta.view(np.int8), "uint8"),
    ):
        with pytest.raises(CodeError, match=said):
            code.update(parity, index=index, delta=change)
    assert np.array_equal(memory, before)
    code.update(rows, index=3, delta=delta)  # beside the rows, but not in them
    assert not np.array_equal(memory, before)
