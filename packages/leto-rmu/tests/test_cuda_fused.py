"""The transaction kernel: every bit that of torch.optim (foreach=True) and of leto-ec, and nothing else
touched.

Each piece pattern runs in the build of the wheel and in the one that NVRTC makes.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from fused_lab import Bench, effective, make_plan, run
from host_kernel import HostChunks, build, compiler

from leto_rmp import PoolConfig
from leto_rmu import SGD, AdamW, Hyper, Muon, Segment, SyncResult, UpdatePlan
from leto_rmu.cuda.fused import STEP, STEPS, FusedChunks, refusal
from leto_rmu.cuda.kernels import CLMAD, FOLDER, MACHINE_CODE, library
from leto_rmu.cuda.rules import RULES

pytestmark = pytest.mark.timeout(600)
SYNCS = [SyncResult(), SyncResult(clip=0.37, inv_scale=2.0**-7 * 1.1), SyncResult(inv_scale=0.125)]


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "optimizer": (
        {"optimizer": Muon(AdamW()), "segments": [Segment("m", 64, shape=(8, 8))], "grad_numel": 64},
        "there is no kernel for the optimizer muon",
    ),
    "scheme": ({"scheme": "undo"}, "the kernel writes chunks into free slots"),
    "parity": ({"config": PoolConfig(4096, 64, 4, 1)}, "the kernel updates 16 parity pages, the pool has 4"),
    "alignment": ({"align": False}, "sub-blocks of 5 pages of 3 planes at each 16, found 5 .* at each 15"),
    "groups": (
        {"segments": [Segment(f"s{k}", 10, k, 10 * k) for k in range(STEPS + 1)]},
        "a chunk holds segments of 17 hyperparameter groups, the kernel takes 16",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_what_there_is_no_kernel_for_is_known_from_the_plan(what: str) -> None:
    changes, words = REFUSED[what]
    asked: dict[str, Any] = {
        "segments": [Segment("a", 1000)],
        "optimizer": AdamW(),
        "config": PoolConfig(4096, 64, 16, 1),
        "grad_numel": 1000,
        "scheme": "slots",
    }
    assert refusal(UpdatePlan(**asked)) == ""
    assert re.search(words, refusal(UpdatePlan(**{**asked, **changes})))


def test_pages_that_do_not_divide_among_threads_are_refused() -> None:
    """No pool has such pages: the kernel of the system has larger ones."""
    plan = UpdatePlan(
        [Segment("a", 10)], config=PoolConfig(4096, 64, 16, 1), grad_numel=10, scheme="slots", optimizer=SGD()
    )
    plan.__dict__["page_elements"] = 1000
    assert refusal(plan).startswith("page_bytes must be a multiple of 512")


def whole(numel: int, copy: bool = True) -> list[Segment]:
    """One segment: every strip is read 16 bytes at a time."""
    return [Segment("a", numel, 0, 0, 0 if copy else None)]


def shifted(numel: int) -> list[Segment]:
    """One segment whose gradients begin at an odd place."""
    return [Segment("a", numel, 0, 3, 5)]


def two(numel: int) -> list[Segment]:
    """A small segment of group 0 and a large one of group 1, whose constants the lean kernel has at hand."""
    part = numel // 4
    return [Segment("a", part, 0, numel - part, 0), Segment("b", numel - part, 1, 0, part)]


def many(numel: int, seed: int = 5) -> list[Segment]:
    """Segments of one element and of many, in three groups; gradients and copies in another order."""
    rng = np.random.default_rng(seed)
    sizes: list[int] = []
    while sum(sizes) < numel:
        sizes.append(min(int(rng.choice([1, 7, 127, 128, 129, 600, 5000, 20000])), numel - sum(sizes)))
    at = {int(k): 0 for k in range(len(sizes))}
    place = 2
    for k in rng.permutation(len(sizes)):
        at[int(k)] = place
        place += sizes[k] + int(rng.integers(0, 4))
    return [Segment(f"s{k}", size, k % 3, at[k], at[k] if k % 4 else None) for k, size in enumerate(sizes)]


ADAMW = [
    Hyper(1e-3, betas=(0.9, 0.95), weight_decay=0.1),
    Hyper(3e-4, betas=(0.3, 0.999), eps=1e-6),  # torch's lerp has another form below one half
    Hyper(0.2, betas=(0.0, 0.5), weight_decay=0.01),
]
MOMENTUM = [
    Hyper(1e-2, momentum=0.9, weight_decay=0.1),
    Hyper(3e-2, momentum=0.7, dampening=0.4),
    Hyper(0.2, momentum=0.95, nesterov=True, weight_decay=0.01),
]
PLAIN = [Hyper(0.1), Hyper(0.1, weight_decay=0.3), Hyper(0.2, momentum=0.5, nesterov=True)]
PATTERNS = {"whole": whole, "shifted": shifted, "two": two, "many": many}


@pytest.mark.gpu
@pytest.mark.parametrize("build", ["clmad", "nvrtc"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("pattern", list(PATTERNS))
@pytest.mark.parametrize("name", ["adamw", "sgd"])
def test_every_bit(name: str, pattern: str, dtype: torch.dtype, build: str) -> None:
    optimizer: Any = AdamW() if name == "adamw" else SGD()
    plan = make_plan(optimizer, PATTERNS[pattern](100_000), grad_dtype=dtype, subblocks=3, data_pages=100)
    assert plan.groups > 1
    bench = Bench(plan, 11)
    kernels = library(torch.device("cuda", 0), CLMAD if build == "clmad" else "cuda-portable")
    if build == "clmad" and kernels.build == "NVRTC":
        pytest.skip(f"no machine code: {kernels.why}")
    fused = FusedChunks(bench.memory, kernels, "plain")
    assert not fused.name.endswith("_lean")
    turn = 0
    settings = [ADAMW] if name == "adamw" else [MOMENTUM, PLAIN]
    for hypers in settings:
        for step, sync in zip((1, 2, 1000), SYNCS, strict=True):
            run(bench, fused, hypers[: plan.hyper_groups], step, sync, turn)
            turn = plan.geometry.turned(turn)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("pattern", list(PATTERNS))
def test_every_bit_of_the_lean_kernel(pattern: str, dtype: torch.dtype) -> None:
    """Also where it has to go the long way, and where a chunk has one sub-block or more than the tables."""
    for subblocks, numel in ((3, 100_000), (1, 30_000), (70, 400_000)):
        plan = make_plan(
            AdamW(), PATTERNS[pattern](numel), grad_dtype=dtype, subblocks=subblocks, data_pages=1200
        )
        bench = Bench(plan, 13)
        kernels = library(torch.device("cuda", 0), CLMAD)
        if kernels.build != MACHINE_CODE:
            pytest.skip(f"no machine code: {kernels.why}")
        fused = FusedChunks(bench.memory, kernels, "lean")
        assert fused.name.endswith("_lean")
        for turn, (step, sync) in enumerate(zip((1, 2, 1000), SYNCS, strict=True)):
            run(bench, fused, ADAMW[: plan.hyper_groups], step, sync, turn % 2)


@pytest.mark.gpu
def test_the_lean_kernel_has_the_bits_of_the_plain_one() -> None:
    """Chunks of 240 pages of 2 MiB, 42 M elements of all sizes; the device's approximations are its own."""
    plan = make_plan(AdamW(), whole(2 * 80 << 19), subblocks=16, page_bytes=2 << 20)
    bench = Bench(plan, 17)
    m, kernels = bench.memory, library(torch.device("cuda", 0), CLMAD)
    plain, lean = (FusedChunks(m, kernels, name) for name in ("plain", "lean"))
    for plane in (*m.planes.values(), m.grads):  # from 2^-60 to 2^20, and some beyond
        plane *= torch.exp2(torch.randint(-60, 21, plane.shape, device="cuda").float())
    m.planes["exp_avg_sq"].abs_()
    m.grads[::10_007] = torch.exp2(torch.randint(-140, 120, m.grads[::10_007].shape, device="cuda").float())
    for step, (_, _, index, source, target) in zip((1, 30), bench.places(0), strict=True):
        found = []
        for fused in (plain, lean):
            fused.prepare(ADAMW[:1], step, SYNCS[1])
            for place in (*m.slot_runs(target), m.ring(1)):
                place.zero_()
            m.model.zero_()
            fused.launch(index, source, target, 0, 1)
            found.append([x.clone() for x in (*m.slot_runs(target), m.ring(1), m.model)])
        for a, b in zip(*found, strict=True):
            assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("subblocks", [1, 5, 70])
def test_chunks_of_any_size(subblocks: int) -> None:
    """More sub-blocks than shared memory has room for, too."""
    plan = make_plan(AdamW(), many(subblocks * 5 * 1024 + 9999), subblocks=subblocks, data_pages=1200)
    bench = Bench(plan, 3)
    assert bench.memory.fused is not None
    for turn in range(2):
        run(bench, bench.memory.fused, ADAMW, 4, SYNCS[1], turn)


@pytest.mark.gpu
def test_pages_of_two_mebibytes() -> None:
    plan = make_plan(AdamW(), many(9_000_000), subblocks=1, page_bytes=2 << 20, grad_dtype=torch.bfloat16)
    bench = Bench(plan, 9)
    assert bench.memory.fused is not None
    run(bench, bench.memory.fused, ADAMW, 12, SYNCS[1], 0)


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """The kernel compiled for the processor."""
    if compiler() is None:
        pytest.skip("no C++ compiler")
    return build(tmp_path_factory.mktemp("host"))


def tiny(bench: Bench) -> None:
    """Second moments that come out as denormal numbers, of which the lean kernel takes no quick roots."""
    bench.memory.planes["exp_avg_sq"].zero_()
    bench.memory.grads[19::1777] = 3e-18


def by_rule(fused: HostChunks) -> Callable[..., None]:
    """The reference on a processor: the rule alone, element by element, and no kernel around it."""

    def reference(
        plan: UpdatePlan,
        group: int,
        chunk: int,
        index: int,
        planes: list[torch.Tensor],
        grads: torch.Tensor,
        hypers: Sequence[Hyper],
        step: int,
        sync: SyncResult,
    ) -> None:
        for p, at, gradient in effective(plan, group, chunk, index, grads, sync):
            constants = np.zeros(1, STEP)
            values, constants["flags"] = fused.rule.constants(hypers[p.group], step)
            constants["value"][0, : len(values)] = values
            fused.apply(gradient, [plane[at] for plane in planes], constants)

    return reference


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("pattern", list(PATTERNS))
@pytest.mark.parametrize("name", ["adamw", "adamw lean", "sgd"])
def test_the_kernel_on_a_processor(name: str, pattern: str, dtype: torch.dtype, host: ctypes.CDLL) -> None:
    """All but the arithmetic: strips, gradients, copies, parity; late fetches, threads in any order."""
    name, _, variant = name.partition(" ")
    optimizer: Any = AdamW() if name == "adamw" else SGD()
    plan = make_plan(optimizer, PATTERNS[pattern](40_000), grad_dtype=dtype, subblocks=3, data_pages=100)
    bench = Bench(plan, 11, "cpu")
    bench.memory.grads[13::1511] = float("inf")
    bench.memory.grads[17::1999] = float("nan")
    if variant == "lean":
        tiny(bench)
    for table, turn in ((64, 0), (2, 1)):
        fused = HostChunks(bench.memory, host, table, variant=variant or "plain")
        assert fused.name.endswith("_lean") == (variant == "lean")
        hypers = (ADAMW if name == "adamw" else MOMENTUM)[: plan.hyper_groups]
        run(bench, fused, hypers, 1 + turn, SYNCS[turn], turn, by_rule(fused))


@pytest.mark.parametrize("subblocks", [1, 2, 5])
def test_the_lean_kernel_fetches_q_in_chunks_of_any_size(subblocks: int, host: ctypes.CDLL) -> None:
    """Through a stage that must be free, in the last round of the tables only."""
    plan = make_plan(AdamW(), whole(subblocks * 5 * 1024 + 2000), subblocks=subblocks)
    bench = Bench(plan, 19, "cpu")
    for table in {1, 2, subblocks}:
        fused = HostChunks(bench.memory, host, table, variant="lean")
        run(bench, fused, ADAMW[:1], 3, SYNCS[1], 0, by_rule(fused))


def test_quick_roots_and_quotients_are_exact(host: ctypes.CDLL) -> None:
    """Of both binades every root; quotients of every kind of dividend and divisor, the edges too.

    A processor's nearly right reciprocals are better than a GPU's, so this is about ranges and signs.
    """
    assert host.roots(0x3F800000, 0x407FFFFF) == 0
    for exponent in (-96, -95, -1, 115):
        bits = (127 + exponent) << 23
        assert host.roots(bits, bits + 40_000) == 0
    assert host.roots(0, 0) == 0
    for bits in (0x80000000, 1, 0x7F800000, 0x7FC00000, 0xBF800000, ((127 - 96) << 23) - 1):
        assert host.roots(bits, bits) == -1
    rng = np.random.default_rng(23)
    count = 2_000_000
    mantissas = 1 + rng.integers(0, 1 << 23, (2, count)) / 2**23
    mantissas[:, : count // 8] = 2 - 2.0**-23 * rng.integers(1, 4, (2, count // 8))
    exponents = rng.integers([[-96], [-60]], [[60], [20]], (2, count))
    a, b = (mantissas * 2.0**exponents).astype(np.float32)
    a[::3] *= -1
    a[::101] = 0
    assert host.quotients(count, a.ctypes.data, b.ctypes.data) == 0
    for a_bad, b_bad in (
        (-0.0, 1),
        (1e-40, 1),
        (np.inf, 1),
        (np.nan, 1),
        (1, 0),
        (1, -1),
        (1, 1e30),
        (1, np.nan),
    ):
        a, b = np.array([a_bad], np.float32), np.array([b_bad], np.float32)
        assert host.quotients(1, a.ctypes.data, b.ctypes.data) == -1


def test_machine_code_runs_lean_and_nvrtc_plain(host: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless a variant is asked for; and SGD has one kernel."""
    bench = Bench(make_plan(AdamW(), whole(9000)), 1, "cpu")
    sgd = Bench(make_plan(SGD(), whole(9000)), 1, "cpu")

    def name(bench: Bench) -> str:
        memory = bench.memory
        memory.__dict__.update(library=object())
        memory.__dict__.pop("fused", None)
        return memory.fused.name if memory.fused is not None else memory.no_kernel

    def chunks(memory: Any, _library: Any, variant: str) -> HostChunks:
        return HostChunks(memory, host, variant=variant)

    monkeypatch.setattr("leto_rmu.cuda.views.FusedChunks", chunks)
    assert name(bench) == "leto_rmu_adamw_f32_lean"
    assert name(sgd) == "leto_rmu_sgd_f32"
    bench.memory.kernel_variant = "plain"
    assert name(bench) == "leto_rmu_adamw_f32"
    del bench.memory.kernel_variant
    monkeypatch.setattr("host_kernel._Functions.build", "NVRTC")
    assert name(bench) == "leto_rmu_adamw_f32"


def test_an_unknown_variant_is_refused() -> None:
    bench = Bench(make_plan(AdamW(), whole(9000)), 1, "cpu")
    with pytest.raises(ValueError, match="lean"):
        FusedChunks(bench.memory, SimpleNamespace(), "fast")  # type: ignore[arg-type]


def test_shared_memory_is_asked_for_on_the_device_of_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """CuPy keeps a kernel's attributes for each device; the current one may be another."""
    current, asked = [0], []

    class Device:
        def __init__(self, index: int) -> None:
            self.index = index

        def __enter__(self) -> None:
            current.append(self.index)

        def __exit__(self, *_: object) -> None:
            current.pop()

    class Function:
        @property
        def max_dynamic_shared_size_bytes(self) -> int:
            return 48 << 10

        @max_dynamic_shared_size_bytes.setter
        def max_dynamic_shared_size_bytes(self, size: int) -> None:
            asked.append((current[-1], size))

    runtime = SimpleNamespace(getDeviceProperties=lambda index: {"sharedMemPerMultiprocessor": 228 << 10})
    cuda = SimpleNamespace(Device=Device, runtime=runtime)
    monkeypatch.setitem(sys.modules, "cupy", SimpleNamespace(cuda=cuda))
    fused: Any = FusedChunks.__new__(FusedChunks)
    fused.plan = make_plan(SGD(), whole(100_000), subblocks=64)
    fused.rule, fused.function, fused.device = RULES["sgd"], Function(), torch.device("cuda", 1)
    fused._shared_memory()
    assert asked == [(1, fused._shared)]
    assert fused._shared > 48 << 10


MUTANTS = {
    "one barrier for all": (
        "            __syncthreads();  // sub-block",
        "            if (b == 0) __syncthreads();  //",
    ),
    "read before it arrives": ("wait_for_fetches<STAGES - 2>()", "wait_for_fetches<STAGES - 1>()"),
    "parity of the first sub-block": ("s_f + b * 16", "s_f"),
    "one group for all": ("c.steps[kind % STEPS]", "c.steps[0]"),
    "copies of the next element": ("copy += 2 * threadIdx.x", "copy += 2 * threadIdx.x + 2"),
    "lean, Q read before it arrives": (
        "        wait_for_fetches<0>();\n        __syncthreads();\n        const",
        "        const",
    ),
    "lean, Q over what is read": ("fetched = ahead % STAGES", "fetched = b % STAGES"),
    "lean, the group of others": ("if (other == 0)", "if (other != ~0u)"),
    "lean, without a look at the range": ("if (!fit) return false;", ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", list(MUTANTS))
def test_mutants_of_the_kernel_are_caught(mutant: str, tmp_path: Path) -> None:
    if compiler() is None:
        pytest.skip("no C++ compiler")
    old, new = MUTANTS[mutant]
    source = (FOLDER / "transaction.cuh").read_text()
    assert source.count(old) == 1
    (tmp_path / "transaction.cuh").write_text(source.replace(old, new))
    # Of many small segments no sub-block is one group's alone.
    segments = (two if mutant.startswith("lean") else many)(40_000)
    plan = make_plan(AdamW(), segments, subblocks=3, data_pages=100)
    bench = Bench(plan, 11, "cpu")
    tiny(bench)
    variant = "lean" if mutant.startswith("lean") else "plain"
    # Machine code, which alone has the lean kernel, is compiled with operators that keep denormal numbers.
    library = build(tmp_path, "-O0", first=tmp_path, exact=variant == "lean")
    fused = HostChunks(bench.memory, library, variant=variant)
    with pytest.raises(AssertionError):
        run(bench, fused, ADAMW[: plan.hyper_groups], 1, SYNCS[1], 0, by_rule(fused))
