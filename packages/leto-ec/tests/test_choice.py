"""The choice between host and device and among CUDA kernels, as far as it goes without a GPU."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import leto_ec
from leto_ec import BufferMismatch, CodeError, ReedSolomon, cuda
from leto_ec._where import on_device
from leto_ec.cuda import _choice


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """An installation with cubins, as a wheel has them."""
    for name in (80, 90, 100, 120):
        (tmp_path / f"kernels_sm_{name}.cubin").write_bytes(b"")
    (tmp_path / "build.json").write_text(json.dumps({"note": "cubins by nvcc V13.5"}))
    monkeypatch.setattr(_choice, "FOLDER", tmp_path)
    monkeypatch.delenv("LETO_EC_KERNEL", raising=False)
    _choice.build_note.cache_clear()
    yield tmp_path
    _choice.build_note.cache_clear()


@pytest.mark.parametrize(
    ("capability", "kernel", "cubin"),
    [
        ((8, 0), "cuda-clmad", "kernels_sm_80.cubin"),
        ((9, 0), "cuda-clmad", "kernels_sm_90.cubin"),
        ((10, 0), "cuda-clmad", "kernels_sm_100.cubin"),
        ((8, 6), "cuda-portable", None),
        ((8, 9), "cuda-portable", None),
        ((10, 3), "cuda-portable", None),
        ((12, 0), "cuda-portable", None),
        ((7, 5), "cuda-portable", None),
        ((13, 0), "cuda-portable", None),
    ],
)
def test_each_chip_gets_its_kernel(built: Path, capability, kernel: str, cubin: str | None) -> None:
    choice = _choice.choose(capability)
    assert choice.kernel == kernel
    assert (None if choice.cubin is None else choice.cubin.name) == cubin
    assert choice.why


def test_machine_code_is_for_its_major_version_from_its_minor_up(built: Path) -> None:
    (built / "kernels_sm_80.cubin").rename(built / "kernels_sm_86.cubin")
    assert _choice.cubin_for((8, 0)) is None
    assert _choice.cubin_for((8, 9)) == built / "kernels_sm_86.cubin"
    assert "no machine code for 8.0: cubins by nvcc" in _choice.choose((8, 0)).why


def test_a_kernel_may_be_asked_for(built: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert _choice.choose((8, 9), "cuda-clmad").cubin == built / "kernels_sm_80.cubin"
    assert _choice.choose((9, 0), "cuda-portable").kernel == "cuda-portable"
    with pytest.raises(CodeError, match=r"no machine code for compute capability 7\.5"):
        _choice.choose((7, 5), "cuda-clmad")
    monkeypatch.setenv("LETO_EC_KERNEL", "cuda-portable")
    assert _choice.choose((9, 0)) == _choice.Choice("cuda-portable", "LETO_EC_KERNEL asks for it", None)
    assert _choice.choose((9, 0), "cuda-clmad").kernel == "cuda-clmad"


def test_a_build_without_nvcc_says_so(built: Path) -> None:
    for path in built.iterdir():
        path.unlink()
    assert "built without cubins" in _choice.choose((9, 0)).why
    assert cuda.info()["cubins"] == []


def test_the_name_of_a_cuda_kernel_leaves_the_host_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    code = ReedSolomon(4, 2, kernel="cuda-portable")
    assert code.kernel == ReedSolomon(4, 2).kernel
    assert (code.device_kernel, ReedSolomon(4, 2).device_kernel) == ("cuda-portable", "auto")
    monkeypatch.setenv("LETO_EC_KERNEL", "cuda-clmad")
    assert ReedSolomon(4, 2).kernel == leto_ec.info()["kernels"][0]


class Elsewhere:
    def __init__(self, device: int) -> None:
        self._device = device

    def __dlpack_device__(self) -> tuple[int, int]:
        return self._device, 0


def test_where_buffers_are() -> None:
    page = np.zeros(8, np.uint8)
    torch_like = SimpleNamespace(device=SimpleNamespace(type="cuda"))
    interface = SimpleNamespace(__cuda_array_interface__={})
    for gpu in (torch_like, interface, Elsewhere(2), Elsewhere(13)):
        assert on_device({"pages": [gpu, None, gpu]})
        with pytest.raises(BufferMismatch, match=r"pages\[2\] is on a GPU and pages\[0\] is not"):
            on_device({"pages": [page, None, gpu]})
        with pytest.raises(BufferMismatch, match="out is on a GPU and pages is not"):
            on_device({"pages": page, "out": gpu})
    for host in (page, b"bytes", 7, "text", Elsewhere(1), Elsewhere(3), SimpleNamespace(device="cpu")):
        assert not on_device({"pages": host, "out": None})
    with pytest.raises(BufferMismatch, match="is on a GPU"):
        ReedSolomon(4, 2).encode([page, page], out=[torch_like, torch_like])
    with pytest.raises(CodeError, match="stream: None is expected"):
        ReedSolomon(4, 2).encode([page, page], stream=0)


def test_the_header_and_its_coefficients_are_installed() -> None:
    header = (cuda.include_dir() / "gf32.cuh").read_text()
    for name in ("superset_sums", "multiply_add", "finish", "reduce", "clmad"):
        assert re.search(rf"__device__ __forceinline__ \w+ {name}\(", header)
    assert cuda.block_coefficients(1, 64).shape == (64, 16)
    assert np.array_equal(cuda.block_coefficients(5, 1, rows=1), cuda.block_coefficients(4, 1))
    with pytest.raises(AttributeError, match="no attribute 'Plane'"):
        cuda.Plane  # noqa: B018
