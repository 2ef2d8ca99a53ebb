"""The choice of a kernel, and what happens where there is no native library or a wrong one."""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import leto_ec
from leto_ec import _engines, _kernel, _native
from leto_ec._buffers import PageGroup

PACKAGE = Path(__file__).parents[1]


@pytest.fixture
def no_library(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(_engines.KERNEL_VARIABLE, raising=False)
    missing = _native.load(Path("/nonexistent/_kernels.so"))
    monkeypatch.setattr(_native, "library", lambda: missing)
    _engines._warn_slow.cache_clear()
    yield
    _engines._warn_slow.cache_clear()


def test_info_describes_the_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(_engines.KERNEL_VARIABLE, raising=False)
    info = leto_ec.info()
    assert info["version"] == leto_ec.__version__
    assert info["kernels"][-1] == "reference"
    assert info["kernel"] == info["kernels"][0]
    assert info["native"] == (info["library"] is not None)
    assert leto_ec.ReedSolomon(4, 2).kernel == info["kernel"]


@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler cc here, so no native kernels are owed")
def test_native_kernels_were_built() -> None:
    """Where there is a compiler, the tests of the kernels must not all be skipped without notice."""
    assert leto_ec.info()["native"], leto_ec.info()["why"]


def test_the_environment_may_choose(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_engines.KERNEL_VARIABLE, "reference")
    assert leto_ec.info()["kernel"] == "reference"
    assert _engines.KERNEL_VARIABLE in leto_ec.info()["why"]
    assert leto_ec.ReedSolomon(4, 2).kernel == "reference"
    assert leto_ec.ReedSolomon(4, 2, kernel=leto_ec.info()["kernels"][0]).kernel != "auto"
    monkeypatch.setenv(_engines.KERNEL_VARIABLE, "abacus")
    with pytest.raises(leto_ec.CodeError, match="abacus"):
        leto_ec.ReedSolomon(4, 2)


def test_without_a_library_it_works_and_says_once_that_it_is_slow(
    no_library: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "leto_ec"):
        code = leto_ec.ReedSolomon(4, 2)
        leto_ec.ReedSolomon(5, 2)
    assert code.kernel == "reference"
    (record,) = caplog.records
    assert "no native library was built" in record.getMessage()
    info = leto_ec.info()
    assert (info["kernels"], info["native"], info["library"]) == (["reference"], False, None)
    assert "no native library was built" in info["why"]
    pages = np.arange(4 * 8, dtype=np.uint8).reshape(4, 8)
    damaged = pages.copy()
    damaged[1] = 0
    code.reconstruct(damaged, code.encode(pages), lost_data=[1])
    assert np.array_equal(damaged, pages)


def test_asking_for_the_reference_is_not_warned_about(
    no_library: None, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, "leto_ec"):
        leto_ec.ReedSolomon(4, 2, kernel="reference")
    assert not caplog.records


def test_what_is_not_a_library_is_told(tmp_path: Path) -> None:
    junk = tmp_path / "_kernels.so"
    junk.write_bytes(b"not a library")
    loaded = _native.load(junk)
    assert loaded.kernels == ()
    assert "cannot be loaded" in loaded.problem


@pytest.mark.skipif(shutil.which("cc") is None, reason="compiles a library: no compiler cc")
@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("unsigned leto_ec_abi(void) { return 4242; }", "has interface 4242, not 3: build it again"),
        ("unsigned something_else(void) { return 1; }", "cannot be loaded: .*leto_ec_abi"),
    ],
)
def test_a_library_of_another_version_is_refused(tmp_path: Path, source: str, problem: str) -> None:
    (tmp_path / "other.c").write_text(source)
    library = tmp_path / "_kernels.so"
    command = ["cc", "-shared", "-fPIC", "-o", str(library), str(tmp_path / "other.c")]
    subprocess.run(command, check=True, timeout=60)
    assert re.search(problem, _native.load(library).problem)


@pytest.mark.skipif(not leto_ec.info()["native"], reason="no native library")
def test_the_library_refuses_what_it_does_not_know() -> None:
    handle = _native.library().handle
    assert handle is not None
    portable = _kernel.Kernel("portable").index

    def run(kernel: int, threads: int, blocks: int, rows: int, columns: int, size: int) -> int:
        work = np.array([kernel, threads, blocks, rows, columns, size, *[0] * 6], np.int64)
        return int(handle.leto_ec_run(work.ctypes.data, 1))

    assert run(1000, 1, 0, 1, 1, 4) == 2
    assert run(1 << 40, 1, 0, 1, 1, 4) == 2
    assert run(portable, 1, 0, 1, 1, 6) == 3
    assert run(portable, 0, 0, 1, 1, 4) == 3
    assert run(portable, 257, 0, 1, 1, 4) == 3
    assert run(portable, 1, 0, 0, 1, 4) == 0
    assert run(portable, 1, 1, 16, 16, 6) == 3
    assert run(portable, 1, 1, 16, 17, 4) == 3
    assert run(portable, 1, 1, 15, 16, 4) == 3
    assert run(portable, 1, 1, 16, 16, 0) == 0
    assert handle.leto_ec_update(1000, 1, 1, 4, 0, 0, 0, 0, 0) == 2
    assert handle.leto_ec_update(portable, 1, 65, 4, 0, 0, 0, 0, 0) == 3
    assert handle.leto_ec_update(portable, 1, 0, 4, 0, 0, 0, 0, 0) == 0
    assert handle.leto_ec_prepare(1000, 1, None, None) == 2
    assert handle.leto_ec_prepare_matrix(1000, 1, 1, None, None) == 2
    assert handle.leto_ec_matrix_bytes(1000, 1, 1) == 0
    assert handle.leto_ec_kernel_basis(1000) == -1
    assert handle.leto_ec_kernel_name(1000) is None
    assert handle.leto_ec_kernel_supported(1000) == 0
    row = PageGroup(np.zeros((1, 4), np.uint8), 4)
    with pytest.raises(RuntimeError, match="returned 2"):
        _kernel.Kernel("abacus").combine(np.ones((1, 1), np.uint32), row, None, row)


def test_the_library_has_no_python_abi() -> None:
    if not leto_ec.info()["native"]:
        pytest.skip("no native library")
    assert sysconfig.get_config_var("SOABI") not in Path(leto_ec.info()["library"]).name


def test_importing_needs_numpy_only() -> None:
    code = "import sys, leto_ec; print(sorted({'torch', 'cupy', 'galois'} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


def test_every_public_name_is_documented() -> None:
    readme = (PACKAGE / "README.md").read_text()
    for name in leto_ec.__all__:
        assert getattr(leto_ec, name).__doc__
        assert re.search(rf"`(leto_ec\.)?{name}\b", readme), f"README.md does not tell what {name} is"
