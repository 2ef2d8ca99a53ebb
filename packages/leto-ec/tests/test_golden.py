"""Golden hashes through every kernel, and proof that a wrong field or matrix cannot pass them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import leto_ec
from leto_ec import _kernel, _native, _reference, cauchy, field
from leto_ec._buffers import PageGroup

NATIVE = Path(__file__).parents[1] / "native"


def test_encode(kernel: str, golden: SimpleNamespace) -> None:
    parity = leto_ec.ReedSolomon(1024, 16, kernel=kernel).encode(golden.pages())
    assert parity[0, :8].tobytes().hex() == golden.parity_begins
    assert golden.digest(parity) == golden.parity_sha256


def test_reconstruct_after_the_parity_was_destroyed(kernel: str, golden: SimpleNamespace) -> None:
    pages = golden.pages()
    parity = np.full((16, 64), 0xA5, np.uint8)
    code = leto_ec.ReedSolomon(1024, 16, kernel=kernel)
    code.reconstruct(pages, parity, lost_parity=range(16))
    assert golden.digest(parity) == golden.parity_sha256

    pages[100:116] = 0x5A
    code.reconstruct(pages, parity, lost_data=range(100, 116))
    assert np.array_equal(pages, golden.pages())


def test_update_from_nothing(kernel: str, golden: SimpleNamespace) -> None:
    """Parity of zero pages is zero; 1024 pages that arrive as deltas must give the golden parity."""
    parity = np.zeros((16, 64), np.uint8)
    code = leto_ec.ReedSolomon(1024, 16, kernel=kernel)
    pages = golden.pages()
    for first in range(0, 1024, 32):
        code.update(parity, index=first, delta=pages[first : first + 32])
    assert golden.digest(parity) == golden.parity_sha256


def test_sixteen_bit_golden_confirms_the_way_we_read_the_facts(golden: SimpleNamespace) -> None:
    """The same matrix and layout in GF(2^16), x^16 + 0x100B, computed here and not by leto_ec."""

    def multiply(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        result = np.zeros(np.broadcast_shapes(a.shape, b.shape), np.uint32)
        for bit in range(15, -1, -1):
            result = (result << 1) ^ np.where(result >> 15, np.uint32(0x1100B), np.uint32(0))
            result ^= ((b >> np.uint32(bit)) & np.uint32(1)) * a
        return result

    denominators = (np.arange(16)[:, None] ^ np.arange(16, 1040)[None, :]).astype(np.uint32)
    inverse = np.ones_like(denominators)
    power = denominators
    for _ in range(15):  # a^(2^16 - 2) = product of a^(2^k), k = 1..15
        power = multiply(power, power)
        inverse = multiply(inverse, power)
    data = golden.pages().view("<u2").astype(np.uint32)
    rows = [np.bitwise_xor.reduce(multiply(inverse[i][:, None], data), axis=0) for i in range(16)]
    parity = np.array(rows).astype("<u2").view(np.uint8)
    assert parity[0, :8].tobytes().hex() == golden.w16_begins
    assert golden.digest(parity) == golden.w16_sha256


# Mutants: each of these mistakes gives a working code, exact after any loss, that is not *the* code.


@pytest.mark.parametrize("tail", [0xC5, 0x8D, 0xAF])
def test_a_wrong_polynomial_is_caught(
    tail: int, golden: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, fresh_tables
) -> None:
    monkeypatch.setattr(field, "TAIL", tail)
    parity = leto_ec.ReedSolomon(1024, 16, kernel="reference").encode(golden.pages())
    assert golden.digest(parity) != golden.parity_sha256


@pytest.mark.parametrize(
    "denominators",
    [
        lambda i, j, D, H: (D + i) ^ j,  # parity numbered after the data
        lambda i, j, D, H: (H - 1 - i) ^ (H + j),  # rows in the wrong order
        lambda i, j, D, H: i ^ (H + D - 1 - j),  # pages in the wrong order
    ],
)
def test_a_wrong_coefficient_order_is_caught(
    denominators, golden: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def generator(D: int, H: int) -> np.ndarray:
        i, j = np.arange(H)[:, None], np.arange(D)[None, :]
        return field.inverse(np.asarray(denominators(i, j, D, H), np.uint32))

    monkeypatch.setattr(cauchy, "generator", generator)
    parity = leto_ec.ReedSolomon(1024, 16, kernel="reference").encode(golden.pages())
    assert golden.digest(parity) != golden.parity_sha256


@pytest.mark.parametrize(
    "mutant",
    [
        lambda numbers, basis: basis(numbers ^ 1),  # blocks in the wrong order
        lambda numbers, basis: basis(numbers)[:, ::-1],  # coefficients of a block in the wrong order
        lambda numbers, basis: (
            basis(numbers) ^ (numbers[:, None] << 25).astype(np.uint32)
        ),  # a few upper bits
    ],
)
def test_wrong_blocks_are_caught(
    mutant, golden: SimpleNamespace, kernel: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernel == "reference":
        pytest.skip("the reference multiplies by the matrix and knows no blocks")
    monkeypatch.setattr(
        _kernel, "BASES", [lambda n, basis=basis: mutant(n, basis) for basis in _kernel.BASES]
    )
    pages, parity = golden.pages(), np.zeros((16, 64), np.uint8)
    layers = [(np.arange(1024), PageGroup(pages, 64))]
    _kernel.Kernel(kernel).apply(
        cauchy.generator(1024, 16), np.arange(16), layers, None, PageGroup(parity, 64)
    )
    assert golden.digest(parity) != golden.parity_sha256


def test_wrong_endianness_is_caught(golden: SimpleNamespace) -> None:
    pages = golden.pages().view("<u4").byteswap().view(np.uint8)
    parity = leto_ec.ReedSolomon(1024, 16).encode(pages).view("<u4").byteswap()
    assert golden.digest(parity) != golden.parity_sha256


@pytest.mark.skipif(shutil.which("cc") is None, reason="compiles a mutant of the C kernels: no compiler cc")
@pytest.mark.skipif(not NATIVE.exists(), reason="the C sources are not beside the tests")
@pytest.mark.parametrize("mutant", ["faithful", "wrong tail", "lost fold"])
def test_native_mutants_are_caught(mutant: str, golden: SimpleNamespace, tmp_path: Path) -> None:
    """Build the C sources with a deliberate fault; without the fault (the control) they must pass."""
    sources = tmp_path / "native"
    shutil.copytree(NATIVE, sources)
    flags: list[str] = []
    if mutant == "wrong tail":
        flags = ["-DLETO_EC_TAIL=0x8du"]
    if mutant == "lost fold":  # reduction that forgets what the upper half folds into the lower
        for name, true, false in [
            ("clmul.h", "XOR(EVENS(first, second), fold)", "EVENS(first, second)"),
            ("portable.c", "return (word << 1) ^", "return (word << 1) ^ 0 *"),
            ("matrix.h", "c ^= top << t", "c ^= 0 * top << t"),
            ("matrix.h", "columns[j][k] = (word << 1) ^", "columns[j][k] = (word << 1) ^ 0 *"),
            ("gfni.c", "product = XOR(product, _mm512_slli_epi32(top, t))", "(void)top"),
        ]:
            text = (sources / name).read_text()
            assert text.count(true) == 1
            (sources / name).write_text(text.replace(true, false))
    # One kernel of each body; the others compile to nothing without their flags.
    flags_of: dict[str, list[str]] = {source.stem: [] for source in sources.glob("*.c")}
    here = leto_ec.info()["kernels"]
    for name, extra in (
        ("gfni", ["-mavx512bw", "-mavx512vbmi", "-mgfni"]),
        ("vpclmul" if "vpclmul" in here else "pclmul", ["-mavx512f", "-mvpclmulqdq"]),
        ("avx2", ["-mavx2"]),
        ("neon", ["-march=armv8-a+crypto"]),
    ):
        if name in here and not (name == "avx2" and "gfni" in here):
            flags_of[name] = extra if name != "pclmul" else ["-msse4.1", "-mpclmul"]
    for name, extra in flags_of.items():
        command = ["cc", "-O1", "-fPIC", "-c", *flags, *extra, f"{name}.c", "-o", f"{name}.o"]
        subprocess.run(command, cwd=sources, check=True, timeout=60)
    library = tmp_path / "mutant.so"
    subprocess.run(
        ["cc", "-shared", *(f"{name}.o" for name in flags_of), "-o", str(library), "-lpthread"],
        cwd=sources,
        check=True,
        timeout=60,
    )
    loaded = _native.load(library)
    assert set(loaded.kernels) == {"portable", *(name for name, extra in flags_of.items() if extra)}
    pages = golden.pages()
    for name in loaded.kernels:
        parity = np.zeros((16, 64), np.uint8)
        kernel = _kernel.Kernel(name, loaded)
        matrix, source, target = cauchy.generator(1024, 16), PageGroup(pages, 64), PageGroup(parity, 64)
        kernel.combine(matrix, source, None, target)
        assert (golden.digest(parity) == golden.parity_sha256) == (mutant == "faithful"), f"{name} combine"
        parity[:] = 0xA5
        kernel.apply(matrix, np.arange(16), [(np.arange(1024), source)], None, target)
        assert (golden.digest(parity) == golden.parity_sha256) == (mutant == "faithful"), f"{name} product"
        few, true = PageGroup(pages[5:8], 64), PageGroup(np.zeros((16, 64), np.uint8), 64)
        _reference.combine(matrix[:, 5:8], few, None, true)
        kernel.combine(matrix[:, 5:8], few, None, target)
        assert np.array_equal(parity, true.rows) == (mutant == "faithful"), f"{name} combine of few pages"
