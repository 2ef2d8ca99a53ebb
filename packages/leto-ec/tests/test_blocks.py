"""Blocks: their coefficients against definitions, and products against the matrix, whatever the shape."""

from __future__ import annotations

import numpy as np
import pytest

import leto_ec
from leto_ec import ReedSolomon, _blocks, _engines, cauchy, field
from leto_ec._buffers import PageGroup

COSETS = [0, 1, 2, 3, 64, 65, 4099]


def test_superset_sums_are_an_involution(rng: np.random.Generator) -> None:
    values = rng.integers(0, 1 << 32, (3, 16), dtype=np.uint32)
    sums = _blocks.superset_sums(values)
    for m in range(16):
        expected = np.bitwise_xor.reduce([values[:, s] for s in range(16) if s & m == m])
        assert np.array_equal(sums[:, m], expected)
    assert np.array_equal(_blocks.superset_sums(sums), values)


def test_dyadic_coefficients_are_81_products_for_a_matrix(rng: np.random.Generator) -> None:
    numbers = np.array(COSETS[1:])
    data = rng.integers(0, 1 << 32, 16, dtype=np.uint32)
    for number, f in zip(numbers, _blocks.dyadic(numbers), strict=True):
        matrix = field.inverse((16 * number ^ np.arange(16)[:, None] ^ np.arange(16)).astype(np.uint32))
        expected = np.bitwise_xor.reduce(field.multiply(matrix, data[None, :]), axis=1)
        d = _blocks.superset_sums(data)
        acc = np.zeros(16, np.uint32)
        products = 0
        for k in range(16):
            for m in range(16):
                if m & ~k == 0:
                    acc[k] ^= field.multiply(f[k ^ m], d[m])
                    products += 1
        assert products == 81
        assert np.array_equal(_blocks.superset_sums(acc), expected)


def vanishing(level: int, x: int, scalar) -> int:
    """W_l(x), the product of x ^ v over all v < 2^l."""
    result = 1
    for v in range(1 << level):
        result = scalar(result, x ^ v)
    return result


def test_fft_coefficients_are_what_they_say(scalar) -> None:
    numbers = np.array(COSETS)
    for number, f in zip(numbers.tolist(), _blocks.fft(numbers).tolist(), strict=True):
        at = 0
        for level in range(4):
            for g in range(0, 16, 2 << level):
                unit = vanishing(level, 1 << level, scalar)
                assert scalar(f[at], unit) == vanishing(level, 16 * number ^ g, scalar)
                at += 1
        spread = 1
        for v in range(1, 16):
            spread = scalar(spread, v)
        if number:
            assert scalar(f[15], vanishing(4, 16 * number, scalar)) == spread
        else:
            assert f[15] == 0


@pytest.mark.parametrize("parity", [1, 5, 15, 16, 17, 31, 33, 48, 63, 64])
@pytest.mark.parametrize("count", [1, 14, 200])
def test_products_are_the_matrix(rng, parity: int, count: int) -> None:
    """Slices, blocks that rows and pages share, absent pages, chosen rows, a first page anywhere."""
    matrix = cauchy.generator(400, parity)
    first = int(rng.integers(0, 400 - count))
    pages: list[np.ndarray | None] = list(rng.integers(0, 256, (count, 260), dtype=np.uint8))
    for index in rng.choice(count, count // 5, replace=False):
        pages[index] = None
    if all(page is None for page in pages):
        pages[0] = np.ones(260, np.uint8)
    indices = np.arange(first, first + count)
    group = PageGroup(pages, 260)
    rows = np.sort(rng.choice(parity, int(rng.integers(1, parity + 1)), replace=False))
    order = rng.permutation(rows)
    base = rng.integers(0, 256, (len(order), 260), dtype=np.uint8)
    outputs = {}
    for name in leto_ec.info()["kernels"]:
        outputs[name] = base.copy()
        target = PageGroup(outputs[name], 260)
        layers = [(indices, group), (indices[:1], PageGroup(np.full((1, 260), 7, np.uint8), 260))]
        _engines.select(name)[0].apply(matrix, order, layers, target, target)
    for name, found in outputs.items():
        assert np.array_equal(found, outputs["reference"]), name


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_threads_change_nothing(kernel: str, rng, threads: int) -> None:
    pages = rng.integers(0, 256, (80, 40_004), dtype=np.uint8)
    one, many = ReedSolomon(80, 9, kernel=kernel), ReedSolomon(80, 9, kernel=kernel, threads=threads)
    assert (one.threads, many.threads) == (1, threads)
    parity = one.encode(pages)
    assert np.array_equal(many.encode(pages), parity)
    damaged, rows = pages.copy(), parity.copy()
    damaged[[3, 70]] = rows[2] = 0xDD
    many.reconstruct(damaged, rows, lost_data=[3, 70], lost_parity=[2])
    assert np.array_equal(damaged, pages)
    assert np.array_equal(rows, parity)


def test_the_environment_sets_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_engines.THREADS_VARIABLE, "3")
    assert ReedSolomon(4, 2).threads == leto_ec.info()["threads"] == 3
    assert ReedSolomon(4, 2, threads=2).threads == 2
    for wrong in ("0", "257", "many", ""):
        monkeypatch.setenv(_engines.THREADS_VARIABLE, wrong)
        with pytest.raises(leto_ec.CodeError, match="1 to 256"):
            ReedSolomon(4, 2)
    for number in (0, 257):
        with pytest.raises(leto_ec.CodeError, match="threads: 1 to 256"):
            ReedSolomon(4, 2, threads=number)


def test_absent_pages_are_zero(kernel: str, rng) -> None:
    code = ReedSolomon(40, 5, kernel=kernel)
    pages = rng.integers(0, 256, (40, 1028), dtype=np.uint8)
    absent = [0, 7, 15, 16, 39]
    pages[absent] = 0
    group = [None if i in absent else page.copy() for i, page in enumerate(pages)]
    parity = code.encode(group)
    assert np.array_equal(parity, code.encode(pages))
    group[3][:] = 1
    code.reconstruct(group, parity, lost_data=[3])
    assert np.array_equal(group[3], pages[3])
    change = [pages[1], None, pages[3]]
    expected = pages.copy()
    expected[[10, 12]] ^= pages[[1, 3]]
    assert np.array_equal(code.update(parity, index=10, delta=change), code.encode(expected))
    with pytest.raises(leto_ec.BufferMismatch, match="found None"):
        code.reconstruct(group, parity, lost_data=[7])
    with pytest.raises(leto_ec.BufferMismatch, match="found None only"):
        code.encode([None, None])
    with pytest.raises(leto_ec.BufferMismatch, match="found NoneType"):
        code.encode(pages, out=[None] * 5)


@pytest.mark.parametrize("run", [1, 3, 20])
def test_old_and_new_in_the_place_of_a_delta(kernel: str, rng, run: int) -> None:
    code = ReedSolomon(40, 7, kernel=kernel)
    pages = rng.integers(0, 256, (40, 516), dtype=np.uint8)
    after = pages.copy()
    after[9 : 9 + run] = rng.integers(0, 256, (run, 516))
    parity = code.encode(pages)
    out = np.zeros_like(parity)
    code.update(parity, index=9, old=pages[9 : 9 + run], new=after[9 : 9 + run], out=out)
    assert np.array_equal(out, code.encode(after))
    code.update(out, index=9, old=after[9, 5:99], new=pages[9, 5:99], offset=5)
    after[9, 5:99] = pages[9, 5:99]
    assert np.array_equal(out, code.encode(after))


def test_a_change_is_a_delta_or_a_pair() -> None:
    code = ReedSolomon(4, 2)
    parity, page = np.zeros((2, 64), np.uint8), np.ones(64, np.uint8)
    for wrong in (
        {},
        {"old": page},
        {"new": page},
        {"delta": page, "old": page, "new": page},
        {"delta": page, "new": page},
    ):
        with pytest.raises(leto_ec.CodeError, match="either delta, or both old and new"):
            code.update(parity, index=0, **wrong)
    with pytest.raises(leto_ec.BufferMismatch, match="as many bytes of as many pages"):
        code.update(parity, index=0, old=page, new=page[:32])
    assert not parity.any()


def test_random_erasures(kernel: str) -> None:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print(f"seed {seed}: repeat with np.random.default_rng({seed}) in this test")
    rng = np.random.default_rng(seed)
    count = 100 if kernel == "reference" else 1024
    code = ReedSolomon(count, 16, kernel=kernel)
    pages = rng.integers(0, 256, (count, 516), dtype=np.uint8)
    parity = code.encode(pages)
    wanted, rows = pages.copy(), parity.copy()
    for _ in range(1 if kernel == "reference" else 8):
        gone = rng.choice(count + 16, int(rng.integers(1, 17)), replace=False)
        lost_data, lost_parity = gone[gone < count], gone[gone >= count] - count
        pages[lost_data] ^= rng.integers(1, 256, 516, dtype=np.uint8)
        parity[lost_parity] = 0x11
        code.reconstruct(pages, parity, lost_data=lost_data, lost_parity=lost_parity)
        assert np.array_equal(pages, wanted)
        assert np.array_equal(parity, rows)
