"""No build of the kernels flushes denormal numbers, whatever its compiler was told.

CuPy has NVRTC compile with -ftz=true: every operator of the language takes denormal numbers for zeros, and
even a minus sign does. On a processor the kernel's floats have operators like those, and its rules must not
show it. The PTX must hold nothing but single operations with their own rounding. Neither needs a GPU.
"""

from __future__ import annotations

import ctypes
import importlib.util
import re
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
import torch
from host_kernel import build, compiler

import leto_ec.cuda
from leto_rmu import Hyper
from leto_rmu.cuda.fused import STEP
from leto_rmu.cuda.kernels import FOLDER
from leto_rmu.cuda.rules import RULES

pytestmark = pytest.mark.timeout(600)

# The first has the weight 0.1, the second 0.7: torch's lerp has two forms. Then SGD in all its forms.
SETTINGS = [
    ("adamw", Hyper(1e-3, betas=(0.9, 0.95), weight_decay=0.1), 2),
    ("adamw", Hyper(3e-4, betas=(0.3, 0.999), eps=1e-6), 1),
    ("adamw", Hyper(1e-38, betas=(0.3, 0.999), eps=1e-40, weight_decay=1.0), 3),
    ("sgd", Hyper(1e-2, momentum=0.9, weight_decay=0.1), 1),
    ("sgd", Hyper(3e-2, momentum=0.7, dampening=0.4), 2),
    ("sgd", Hyper(0.2, momentum=0.95, nesterov=True, weight_decay=0.01), 2),
    ("sgd", Hyper(0.1, weight_decay=1e-39), 2),
]


@pytest.fixture(scope="module")
def exact(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernel with operators that keep denormal numbers."""
    if compiler() is None:
        pytest.skip("no C++ compiler")
    return build(tmp_path_factory.mktemp("exact"), "-O0", exact=True)


def operands(count: int, planes: int, seed: int = 3) -> torch.Tensor:
    """(1 + planes, count) fp32: gradients and states from 2^-149 to 2^20, half of them next to nothing.

    A quarter of all elements have gradients near their momentum: differences are denormal numbers, too. The
    first element is the one that was lost once.
    """
    rng = np.random.default_rng(seed)
    exponents = rng.uniform(-149, 20, (1 + planes, count))
    exponents[:, : count // 2] = rng.uniform(-149, -120, (1 + planes, count // 2))
    values = rng.choice([-1.0, 1.0], exponents.shape) * np.exp2(exponents)
    values[rng.random(values.shape) < 0.1] = 0
    values[0, ::4] = values[2, ::4] * (1 + 2.0**-20)
    values[-1] = abs(values[-1])
    values[:, 0] = 0, 1.8e-40, *([3.7e-40] * (planes - 1))
    return torch.from_numpy(values.astype(np.float32))


def updated(library: ctypes.CDLL, name: str, hyper: Hyper, step: int) -> torch.Tensor:
    """(planes, count) bits: what a rule makes of all operands."""
    rule = RULES[name]
    constants = np.zeros(1, STEP)
    values, constants["flags"] = rule.constants(hyper, step)
    constants["value"][0, : len(values)] = values
    gradient, *states = operands(200_000, rule.planes).contiguous().unbind()
    pointers = (ctypes.c_void_p * len(states))(*(state.data_ptr() for state in states))
    number = 0 if name == "adamw" else 1
    library.apply(number, gradient.numel(), gradient.data_ptr(), pointers, constants.ctypes.data)
    return torch.stack(states).view(torch.int32)


def differences(library: ctypes.CDLL, exact: ctypes.CDLL) -> dict[int, int]:
    """How many numbers differ, by setting."""
    found = {}
    for k, (name, hyper, step) in enumerate(SETTINGS):
        a, b = updated(library, name, hyper, step), updated(exact, name, hyper, step)
        found[k] = int((a != b).sum())
    return found


def test_rules_do_not_show_that_operators_flush(exact: ctypes.CDLL, tmp_path: Path) -> None:
    assert set(differences(build(tmp_path, "-O0"), exact).values()) == {0}


def test_what_was_lost_once(exact: ctypes.CDLL) -> None:
    """AdamW with beta1 = 0.3, gradient zero, momentum 3.7e-40: 0.3 of it is left, and moves the master."""
    master, momentum, _ = updated(exact, *SETTINGS[1]).view(torch.float32)[:, 0].tolist()
    kept = 3.7e-40 * 0.3
    assert momentum == pytest.approx(kept, rel=1e-4)
    assert master == pytest.approx(1.8e-40 - 3e-4 / 0.7 * kept / 1e-6, rel=1e-3)


MINUS = ("fma(negative(ahead), s.value[counterweight], g)", "fma(-ahead, s.value[counterweight], g)")
MUTANTS = {
    "a minus sign": MINUS,
    "a product": ("mul(x[0], s.value[keep]), m", "x[0] * s.value[keep], m"),
    "a product of momentum": ("mul(x[1], s.value[momentum])", "x[1] * s.value[momentum]"),
}


@pytest.mark.parametrize("mutant", list(MUTANTS))
def test_operators_of_the_language_are_caught(mutant: str, exact: ctypes.CDLL, tmp_path: Path) -> None:
    mutate(*MUTANTS[mutant], tmp_path)
    assert sum(differences(build(tmp_path, "-O0", first=tmp_path), exact).values()) > 0


def mutate(old: str, new: str, folder: Path) -> None:
    """transaction.cuh with one expression replaced."""
    source = (FOLDER / "transaction.cuh").read_text()
    assert source.count(old) == 1
    (folder / "transaction.cuh").write_text(source.replace(old, new))


# --- PTX -------------------------------------------------------------------------------------------------
NUMBERS = re.compile(
    r"^\s*(?:@!?%p\d+\s+)?([a-z][\w.:]*\.(?:f32|f64|tf32|b?f16(?:x2)?)[\w.]*)\s+([^;]*);", re.M
)
MOVES = re.compile(r"(ld|st|mov|selp|cvta)[.\w]*$")  # bits, as they are
# What device.cuh has; a comparison with one half, of which flushing makes no difference; and what quick.cuh
# does with numbers in its ranges, where no denormal ones are.
SINGLE = {
    *("add.rn.f32", "sub.rn.f32", "mul.rn.f32", "fma.rn.f32", "div.rn.f32", "sqrt.rn.f32", "neg.f32"),
    *("cvt.rn.bf16.f32", "cvt.f32.f16"),
}
HALF = re.compile(r"setp\.(lt|geu|ge|ltu)(\.ftz)?\.f32 .*, 0f3F000000$")
LEAN = re.compile(r"(rcp|rsqrt)\.approx\.ftz\.f32 .*$|setp\.(eq|neu)(\.ftz)?\.f32 .*, 0f00000000$")


def suspects(ptx: str, lean: bool) -> set[str]:
    """Instructions on numbers that may not be what the source says."""
    found = set()
    for name, arguments in NUMBERS.findall(ptx):
        text = f"{name} {arguments}"
        if MOVES.match(name) or name in SINGLE or HALF.match(text) or (lean and LEAN.match(text)):
            continue
        found.add(name)
    return found


@cache
def nvrtc() -> ctypes.CDLL | None:
    """NVRTC of an installed wheel (torch's, CuPy's), or of the system."""
    package = importlib.util.find_spec("nvidia")
    places = [Path(root) for root in (package.submodule_search_locations or [])] if package else []
    places.append(Path("/usr/local/cuda"))
    for place in places:
        for path in sorted(place.glob("**/lib*/libnvrtc.so.1?")):
            for part in sorted(path.parent.glob("libnvrtc-builtins.so.*")):
                ctypes.CDLL(str(part), mode=ctypes.RTLD_GLOBAL)  # else it is looked for by its name alone
            return ctypes.CDLL(str(path))
    return None


def compile_ptx(options: tuple[str, ...], first: Path | None = None, edit: Callable[[str], str] = str) -> str:
    """The kernels as PTX, by NVRTC, for compute capability 8.0 or, with ``options``, another."""
    library = nvrtc()
    if library is None:
        pytest.skip("no NVRTC")
    folders = ((first,) if first else ()) + (leto_ec.cuda.include_dir(), FOLDER)
    words = ("-std=c++17", *(f"-I{folder}" for folder in folders), *options)
    arguments = (ctypes.c_char_p * len(words))(*(word.encode() for word in words))
    source = edit((FOLDER / "kernels.cu").read_text()).encode()
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    assert library.nvrtcCreateProgram(ctypes.byref(program), source, b"kernels.cu", 0, None, None) == 0
    try:
        status = library.nvrtcCompileProgram(program, len(words), arguments)
        kind = "ProgramLog" if status else "PTX"
        assert getattr(library, f"nvrtcGet{kind}Size")(program, ctypes.byref(size)) == 0
        text = ctypes.create_string_buffer(size.value)
        assert getattr(library, f"nvrtcGet{kind}")(program, text) == 0
        assert status == 0, text.value.decode()
        return text.value.decode()
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def one_kernel(source: str, name: str = "adamw_f32") -> str:
    """Of the transactions AdamW's of fp32 gradients: enough to see what a line of its rule becomes."""
    lines = source.splitlines(keepends=True)
    return "".join(line for line in lines if not line.startswith("TRANSACTION(") or f"_{name}, " in line)


@pytest.mark.slow
@pytest.mark.parametrize("lean", [False, True], ids=["NVRTC's", "and lean"])
def test_ptx_holds_single_operations_alone(lean: bool) -> None:
    """The source as NVRTC gets it from CuPy, and as the wheel's nvcc does, told more than CuPy ever says."""
    ptx = compile_ptx(("-arch=compute_80", "--use_fast_math") + ("-DLETO_EC_CLMAD",) * lean)
    assert ptx.count(".entry leto_rmu_") == (10 if lean else 7)
    assert ptx.count("div.rn.f32") >= 30, "the pattern no longer sees what is there"
    assert "neg.f32" in ptx
    assert suspects(ptx, lean) == set()


@pytest.mark.slow
def test_a_minus_sign_is_seen_in_ptx(tmp_path: Path) -> None:
    mutate(*MINUS, tmp_path)
    ptx = compile_ptx(("-arch=compute_80", "-ftz=true"), tmp_path, one_kernel)
    assert suspects(ptx, False) == {"neg.ftz.f32"}


@pytest.mark.slow
def test_the_lean_kernel_is_in_builds_for_fault_injection() -> None:
    """Which NVRTC makes, as no wheel has them."""
    options = ("-arch=compute_80", "-ftz=true", "-DLETO_RMU_FAULT")
    ptx = compile_ptx(options, edit=partial(one_kernel, name="adamw_f32_lean"))
    assert ".entry leto_rmu_adamw_f32_lean" in ptx
    assert "trap;" in ptx
    assert suspects(ptx, True) == set()
