"""What tests of a GPU do where there is none, and where there is one that does not work."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from enum import IntEnum
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_lab import need_gpu

from leto_rmp import driver
from leto_rmp.errors import CudaError


class Code(IntEnum):
    CUDA_SUCCESS = 0
    CUDA_ERROR_STUB_LIBRARY = 34
    CUDA_ERROR_NO_DEVICE = 100
    CUDA_ERROR_SYSTEM_NOT_READY = 802
    CUDA_ERROR_UNKNOWN = 999


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Make this process one of a machine whose driver, packages and torch are stand-ins."""

    def make(
        init: Code | Exception = Code.CUDA_SUCCESS,
        count: tuple[Code, int] = (Code.CUDA_SUCCESS, 1),
        cupy: bool = True,
        torch_error: Exception | None = None,
        bindings: bool = True,
    ) -> None:
        def cu_init(_: int) -> tuple[Code]:
            if isinstance(init, Exception):
                raise init
            return (init,)

        def torch_init() -> None:
            if torch_error is not None:
                raise torch_error

        named = SimpleNamespace(
            CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR=1, CU_POINTER_ATTRIBUTE_MEMORY_TYPE=2
        )
        api = SimpleNamespace(
            cuInit=cu_init,
            cuDeviceGetCount=lambda: count,
            cuDeviceGet=lambda ordinal: (Code.CUDA_SUCCESS, ordinal),
            cuDeviceGetUuid=lambda _: (Code.CUDA_SUCCESS, SimpleNamespace(bytes=bytes(16))),
            cuDeviceGetName=lambda *_: (Code.CUDA_SUCCESS, b"stand-in\0"),
            CUmemAllocationHandleType=named,
            CUpointer_attribute=named,
        )
        found: Any = ModuleType("cuda.bindings")
        found.driver = api
        monkeypatch.setitem(sys.modules, "cuda", ModuleType("cuda"))
        monkeypatch.setitem(sys.modules, "cuda.bindings", found if bindings else None)
        monkeypatch.setitem(sys.modules, "cupy", ModuleType("cupy") if cupy else None)
        monkeypatch.setattr(torch.cuda, "init", torch_init)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: torch_error is None)
        driver.open_driver.cache_clear()

    driver.open_driver.cache_clear()
    yield make
    driver.open_driver.cache_clear()


def skipped_for(check: Callable[[], None]) -> str:
    with pytest.raises(pytest.skip.Exception) as skipped:
        check()
    return str(skipped.value)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"bindings": False}, "cuda-bindings"),
        ({"init": RuntimeError("libcuda.so.1 not found")}, "no CUDA driver"),
        ({"init": Code.CUDA_ERROR_NO_DEVICE}, "finds no device"),
        ({"init": Code.CUDA_ERROR_STUB_LIBRARY}, "finds no device"),
        ({"count": (Code.CUDA_SUCCESS, 0)}, "no device 0"),
        ({"cupy": False}, "needs CuPy"),
    ],
)
def test_only_what_is_not_there_skips(machine: Any, options: dict[str, Any], reason: str) -> None:
    machine(**options)
    assert reason in skipped_for(need_gpu)


BROKEN: list[tuple[dict[str, Any], type[Exception]]] = [
    ({"init": Code.CUDA_ERROR_SYSTEM_NOT_READY}, CudaError),
    ({"init": Code.CUDA_ERROR_UNKNOWN}, CudaError),
    ({"count": (Code.CUDA_ERROR_UNKNOWN, 0)}, CudaError),
    ({"torch_error": RuntimeError("CUDA initialization: driver too old")}, RuntimeError),
    ({"torch_error": AssertionError("Torch not compiled with CUDA enabled")}, AssertionError),
]


@pytest.mark.parametrize(("options", "error"), BROKEN)
def test_a_device_that_does_not_work_is_a_failure(
    machine: Any, options: dict[str, Any], error: type[Exception]
) -> None:
    machine(**options)
    with pytest.raises(error):
        need_gpu()


def test_a_device_that_works_is_used(machine: Any) -> None:
    machine()
    need_gpu()


def test_asking_torch_would_have_skipped_them(machine: Any) -> None:
    """The old check, which a broken machine passed as "skipped": the tests above tell it from the new one."""

    def old() -> None:
        if not torch.cuda.is_available():
            pytest.skip("no CUDA device")

    machine(torch_error=RuntimeError("CUDA initialization: driver too old"))
    assert skipped_for(old) == "no CUDA device"


def test_no_test_decides_by_itself() -> None:
    """Tests of a GPU are marked; conftest.py sees to the rest."""
    others = [path for path in Path(__file__).parent.glob("test_*.py") if path != Path(__file__)]
    assert not [path.name for path in others if "cuda.is_available" in path.read_text()]
