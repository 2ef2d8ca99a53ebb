"""Kernels under test, and a second opinion on the arithmetic that shares nothing with leto_ec."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import numpy as np
import pytest

import leto_ec
from leto_ec import field

NATIVE_KERNELS = ("portable", "pclmul", "avx2", "vpclmul-256", "gfni-256", "vpclmul", "gfni", "neon")
ALL_KERNELS = ("reference", *NATIVE_KERNELS)


@pytest.fixture(params=ALL_KERNELS)
def kernel(request: pytest.FixtureRequest) -> str:
    """Every kernel that this machine runs."""
    name: str = request.param
    if name not in leto_ec.info()["kernels"]:
        pytest.skip(f"this installation or processor has no kernel {name}")
    return name


@pytest.fixture
def fresh_tables() -> Iterator[Callable[[], None]]:
    """Forget cached field tables now and after the test: for tests that change the field under the code."""
    field.reciprocals.cache_clear()
    yield field.reciprocals.cache_clear
    field.reciprocals.cache_clear()


def _multiply(a: int, b: int, tail: int = 0x400007) -> int:
    """The schoolbook product on Python integers: add, double, reduce at once."""
    result = 0
    while b:
        if b & 1:
            result ^= a
        b >>= 1
        a <<= 1
        if a >> 32:
            a = (a & 0xFFFFFFFF) ^ tail
    return result


def _golden_pages() -> np.ndarray:
    """1024 pages of 64 bytes as facts of the golden hashes define them."""
    page = np.arange(1024)[:, None]
    byte = np.arange(64)[None, :]
    return ((131 * page + 17 * byte + 7) & 255).astype(np.uint8)


# Jerasure and Python integers agree on these; leto_ec had no part in making them.
GOLDEN = SimpleNamespace(
    pages=_golden_pages,
    parity_sha256="02dd072c505f8cb61fb949b06e0191c9b4580b09a43cc77b48a4c66ca89a1080",
    parity_begins="61cd98eb6423478d",
    w16_sha256="8e089db356a762471c25e124830a3675ed3a2cb2f7f5ec3a402ca925be501ab7",
    w16_begins="a025f969a1e6e1f0",
    digest=lambda array: hashlib.sha256(np.ascontiguousarray(array).tobytes()).hexdigest(),
)


@pytest.fixture
def golden() -> SimpleNamespace:
    return GOLDEN


@pytest.fixture
def scalar() -> Callable[..., int]:
    return _multiply


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers from a seed that belongs to the test, printed when it fails."""
    seed = int.from_bytes(hashlib.sha256(request.node.nodeid.encode()).digest()[:4], "little")
    print(f"seed {seed} (fixed by the test's name: running the test again repeats it)")
    return np.random.default_rng(seed)
