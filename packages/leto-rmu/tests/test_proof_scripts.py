"""The scripts that prove the updater on a GPU, at their smallest and over the host backend."""

from __future__ import annotations

import contextlib
import importlib.util
import re
import select
import subprocess
import sys
from collections import Counter
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cuda_lab import DeviceWorld
from host_kernel import compiler
from rmu_lab import Pool
from sim_lanes import OneLaunchWorld

from leto_ec import ReedSolomon
from leto_ec.cuda import include_dir
from leto_rmu import Executor, Op, Segment

pytestmark = pytest.mark.timeout(600)

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


def run(script: str, *options: str) -> str:
    command = [sys.executable, str(BENCHMARKS / script), "--device", "cpu", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=540, check=False)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


WORLD: dict[str, Any] = {
    "scheme": "slots",
    "pool": Pool(data_pages=8),
    "segments": (Segment("a", 900, 0, 3, 0),),
    "grad_numel": 910,
    "model_bytes": 1800,
}


def test_aborts_reach_the_kernel_that_updates_chunks(scripts: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where one kernel updates a chunk and its parity; its stand-in on the CPU is not interrupted."""
    aborts, armed = scripts("gpu_aborts"), []
    monkeypatch.setattr(aborts, "arm", lambda kernel, seed: armed.append((kernel, seed)))
    world = OneLaunchWorld("cpu", **WORLD)
    for count in (0, world.plan.chunks - 1):
        _, up = world.start()
        kernel = aborts.faulty_kernel(up)
        up.executor = aborts.Trap(("update",), count, partial(aborts.arm, kernel, 5))
        world.iterate(up)
        assert armed == [(kernel, 5)] * (world.plan.chunks - count), "the kernel would not have trapped"
        armed.clear()


@pytest.mark.parametrize("kind", ["encode kernel", "parity kernel"])
def test_aborts_reach_the_kernels_of_leto_ec(scripts: Any, kind: str) -> None:
    aborts, armed = scripts("gpu_aborts"), []
    scheme = "undo" if kind in aborts.EC_KINDS["undo"] else "slots"
    world = DeviceWorld(
        "cpu", **{**WORLD, "scheme": scheme, "model_bytes": 0, "segments": (Segment("a", 900, 0, 3),)}
    )
    sizes = {len(pages) for pages in world.plan.grad_groups}
    times = {"encode kernel": len(sizes), "parity kernel": world.plan.chunks}[kind]
    for count in sorted({0, times - 1}):
        _, up = world.start()
        up.executor = aborts.Trap(aborts.NAMES[kind], count, lambda: armed.append(kind))
        world.iterate(up)
        assert len(armed) == times - count, "the kernel would not have trapped"
        armed.clear()


def test_kernels_of_leto_ec_are_replaced_by_those_that_trap(
    scripts: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of the arming, with a stand-in for CuPy; plans that were there before launch them."""
    calls: list[Any] = []

    class Kernel:
        num_regs = 96

        def __init__(self, module: Any, name: str) -> None:
            self.faulty, self.name, self.max_dynamic_shared_size_bytes = module.faulty, name, 0

        def __call__(self, grid: Any, block: Any, arguments: Any, shared_mem: int = 0) -> None:
            assert shared_mem <= self.max_dynamic_shared_size_bytes
            calls.append((self.name, self.faulty, arguments[-1]))

    class RawModule:
        def __init__(self, code: str = "", path: str = "", options: tuple[str, ...] = ()) -> None:
            self.code, self.faulty = code, "-DLETO_EC_FAULT" in options
            assert path or any(o.startswith("-I") and (Path(o[2:]) / "gf32.cuh").exists() for o in options)

        def get_function(self, name: str) -> Kernel:
            assert not self.code or name in self.code
            return Kernel(self, name)

    properties = {"major": 9, "minor": 0, "sharedMemPerMultiprocessor": 228 << 10}
    runtime = SimpleNamespace(getDeviceProperties=lambda _device: properties)
    device = lambda _index: contextlib.nullcontext()  # noqa: E731
    cupy = SimpleNamespace(RawModule=RawModule, cuda=SimpleNamespace(Device=device, runtime=runtime))
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    for name in ("leto_ec.cuda._library", "leto_ec.cuda._launch"):
        spec = importlib.util.find_spec(name)
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
    library, launch = sys.modules["leto_ec.cuda._library"], sys.modules["leto_ec.cuda._launch"]
    code = ReedSolomon(300, 16)
    kernels = library.kernels(0, code.device_kernel)
    tables = SimpleNamespace(upload=lambda table: table)
    launches = []
    for pages in (15, 300):  # the short kernel; the streaming one
        rows = [np.full(16, 1 << 20, np.int64)]
        layer = (np.arange(pages), [np.full(pages, 1 << 20, np.int64)])
        launches += launch.product(kernels, tables, 16, [layer], rows, rows, 4096)
    memory = SimpleNamespace(device=torch.device("cuda", 0), code=code)
    for run in launches:
        run()
    scripts("gpu_aborts").arm_codes(SimpleNamespace(memory=memory), 5)
    for run in launches:
        run()
    kinds = ["leto_ec_product_short", "leto_ec_product_stream_48"]
    assert [call[:2] for call in calls[:2]] == [(name, False) for name in kinds]
    assert calls[2] == ("leto_ec_set_fault", True, 5)
    assert [call[:2] for call in calls[3:]] == [(name, True) for name in kinds]


def test_what_fails_in_the_kernels_of_leto_ec_leaves_the_rest(
    scripts: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    aborts = scripts("gpu_aborts")

    def run(_lane: Any, spec: dict[str, Any], tell: Any) -> None:
        if "encode kernel" in spec["kinds"]:
            raise RuntimeError("no such kernel")
        more = {"left": "SYNCED", "lost": 48, "how": "so", "trapped": ""}
        rounds = [{"kind": kind, **more} for kind in spec["kinds"]]
        tell({"rounds": rounds, "seen": {"compared": 4, "pages reconstructed": 1}})

    monkeypatch.setattr(aborts, "run", run)
    monkeypatch.setattr(sys, "argv", ["x", "--device=cpu", "--smoke", f"--output={tmp_path / 'page'}"])
    assert aborts.main() == 1
    page = (tmp_path / "page.md").read_text()
    for scheme, kinds in aborts.EC_KINDS.items():
        assert f"| {scheme} | 1 | 1 / 1 / 1 |" in page
        assert f"1 of 1 aborts (copy, {scheme})" in page
        assert f"0 of 1 aborts (encode kernel, {scheme})" in page
        assert f"**Failed**, {scheme} {', '.join(kinds)}: RuntimeError: no such kernel" in page


# What of CUDA the kernels of leto-ec are made with, as declarations for a processor's compiler.
CUDA = """
#define __device__
#define __global__
#define __shared__
#define __forceinline__ inline
#define __launch_bounds__(...)
#include <algorithm>
using std::min;
struct Index { unsigned x, y, z; };
struct uint4 { unsigned x, y, z, w; };
extern Index threadIdx, blockIdx, blockDim, gridDim;
uint4 make_uint4(unsigned, unsigned, unsigned, unsigned);
uint4 __ldcs(const uint4*);
void __stcs(uint4*, uint4);
unsigned long __cvta_generic_to_shared(const void*);
void __threadfence();
void __syncthreads();
unsigned atomicAdd(unsigned*, unsigned);
void __trap();
"""


@pytest.mark.skipif(compiler() is None, reason="needs a C++ compiler")
def test_only_the_build_for_fault_injection_of_leto_ec_traps(tmp_path: Path) -> None:
    """Both builds compile, as far as a compiler without CUDA can tell; wheels have nothing of it."""
    (tmp_path / "cuda.h").write_text(CUDA)
    folder = include_dir()
    given = [str(compiler()), "-std=c++17", "-x", "c++", "-include", str(tmp_path / "cuda.h"), "-w"]
    for options, traps in ([], 0), (["-DLETO_EC_FAULT"], 1):
        command = [*given, *options, f"-I{folder}", str(folder / "kernels.cu")]
        subprocess.run([*command, "-fsyntax-only"], check=True, timeout=120)
        text = subprocess.run(
            [*command, "-E"], check=True, capture_output=True, text=True, timeout=120
        ).stdout
        code = text[text.index("namespace leto_ec") :]
        assert code.count("__trap") == code.count("atomicAdd") == code.count("leto_ec_set_fault") == traps
    build = Path(__file__).parents[2] / "leto-ec" / "CMakeLists.txt"  # what is installed has none
    assert "LETO_EC_FAULT" not in build.read_text()


class Names(Executor):
    def __init__(self) -> None:
        self.seen = Counter[str]()

    def run(self, op: Op) -> None:
        self.seen[op.name] += 1
        op.apply()


@pytest.mark.parametrize("kind", [OneLaunchWorld, DeviceWorld])
def test_kills_of_figure_12_have_an_operation_to_fall_into(scripts: Any, kind: type[DeviceWorld]) -> None:
    figure, names, world = scripts("gpu_figure12"), Names(), kind("cpu", **WORLD)
    _, up = world.start()
    up.executor = names
    world.iterate(up)
    plan, one_kernel = world.plan, kind is OneLaunchWorld
    assert (getattr(up.memory, "fused", None) is not None) == one_kernel
    for t in range(figure.KILL_EVERY - 1, 4 * figure.KILL_EVERY, figure.KILL_EVERY):
        wanted = figure.targets(t, one_kernel)
        expected = plan.groups if wanted == ("drain",) else plan.chunks
        assert sum(names.seen[name] for name in wanted) >= expected, f"{wanted} of {names.seen}"


def test_the_trapping_kernel_is_compiled_alone(scripts: Any) -> None:
    """Others would take the compiler seconds each."""
    source = (BENCHMARKS.parent / "src" / "leto_rmu" / "cuda" / "kernels.cu").read_text()
    alone = scripts("proof_faults").alone(source, "leto_rmu_sgd_bf16")
    assert [line for line in alone.splitlines() if line.startswith("TRANSACTION(")] == [
        "TRANSACTION(leto_rmu_sgd_bf16, SGD, BF16, false)"
    ]
    assert alone.count("\n") == source.count("\n") - 8
    with pytest.raises(AssertionError, match="no single kernel"):
        scripts("proof_faults").alone(source, "leto_rmu_lion_f32")


@pytest.mark.slow
def test_a_run_killed_inside_its_update_ends_with_the_bits_of_the_reference() -> None:
    """Figure 12, up to its first kill; the script compares losses and state, and RMP alone goes wrong."""
    found = run("gpu_figure12.py", "--iterations", "12")
    assert "| RMP and RMU | 12 of 12 | none |" in found
    assert "| RMP alone | 12 of 12" not in found


@pytest.mark.slow
def test_trainers_are_killed_and_aborted() -> None:
    options = ("--kills", "2", "--others", "0", "--pool", "2", "--losses", "2", "--seconds", "500")
    options += ("--runs", "1")
    found = run("gpu_kills.py", *options)
    assert "comparisons, all exact" in found
    assert "Done of what was planned: 2 of 2 kills with adamw (slots)." in found
    assert "Partial" not in found
    assert "comparisons, all exact" in run("gpu_aborts.py", "--smoke", "--schemes", "slots")
    assert "Pages reconstructed in a round: 45, 48" in run("gpu_repair.py", "--smoke")


@pytest.mark.slow
def test_two_ranks_are_killed_and_compared() -> None:
    """State that is sharded and that is not, each in one job; the last comparison is behind the last kill."""
    found = run("gpu_ranks.py", "--smoke")
    assert "2 of 2 kills inside an update." in found
    for state in "sharded", "unsharded":
        assert re.search(rf"^\| sgd \| slots \| {state} \| \d \| 1 \| ", found, re.MULTILINE)


def test_a_child_that_ended_by_itself_was_not_killed(scripts: Any) -> None:
    """An error inside an update would be taken for a kill there."""
    child = scripts("proof_children").Child(
        {"task": lambda _command, channel: channel.say(error="of its own")}, lambda: None
    )
    child.begin("task")
    assert select.select([child.pidfd], [], [], 60.0)[0]
    with pytest.raises(AssertionError, match=r"ended with status 0; it says .*of its own"):
        child.kill()


def filled_by_another(training: Any, up: Any) -> None:
    for s in training.plan.segments:
        up.write(s.name, "master", training.initial(s.name))
    up.initialize(0, b"another's")


@pytest.mark.slow
@pytest.mark.parametrize("broken", ["share", "add_up", "highest", "gap", "job"])
def test_ranks_that_do_not_train_as_one_are_caught(
    scripts: Any, monkeypatch: pytest.MonkeyPatch, broken: str, capfd: pytest.CaptureFixture[str]
) -> None:
    """Mutants: a rank goes on with its own part of the model, of the gradients, or of the clip;
    elements are nobody's; the state of the job is another one's."""
    ranks = scripts("gpu_ranks")
    why = r"differs at iteration \d"
    if broken == "gap":
        why = r"the ranks have \d+ elements of"
        pieces = ranks.pieces_of
        monkeypatch.setattr(ranks, "pieces_of", lambda *rest: dict([*pieces(*rest).items()][:-1]))
    elif broken == "job":
        why = "job state of 0 is"
        monkeypatch.setattr(ranks.RankTraining, "fill", filled_by_another)
    else:
        monkeypatch.setattr(ranks.Group, broken, lambda self, value, *_: value)
    options = ["--device=cpu", "--kills=1", "--optimizers=adamw", "--schemes=slots", "--states=sharded"]
    monkeypatch.setattr(sys, "argv", ["gpu_ranks.py", *options, "--seconds=300"])
    assert ranks.main() == 1
    found = capfd.readouterr().out
    assert re.search(rf"\*\*Failed\*\*, adamw, seed 1: .*{why}", found)
