"""Aborts inside kernels and copies of an update on a GPU, with the greatest losses on top; resumed exactly.

    python packages/leto-rmu/benchmarks/gpu_aborts.py --seed 1 --output docs/benchmarks/rmu-aborts-h200

In turn an update is interrupted

* in the kernel that updates a chunk and its parity: a build of it for fault injection does a random part of
  its work and traps, which ends the process's CUDA context (under the scheme "undo", whose operations are
  kernels of torch and leto-ec: a random part of the operation's bytes is left written, and SIGKILL);
* in the kernel that encodes parity (of the gradients, or of a chunk under "undo"): a random part of the
  bytes of its result is left written, then SIGKILL;
* in the copy of parity to the host: its destination is filled with random bytes, then SIGKILL.

Each time 16 pages are lost in every protection group, and one parity page of each is poisoned. A fresh
process recovers and is compared with torch.optim on the same GPU.

When all of this is done and published, leto-ec's kernels are interrupted in the same way as the updater's: a
build of them for fault injection stores a random part of its rows and traps, in the encoding of the
gradients' parity and, under "undo", in the parity of a chunk. Should that fail, the page says what was left
out and why, and the script ends with status 1.
"""

from __future__ import annotations

import argparse
import importlib
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from proof_lab import (
    Channel,
    Judge,
    Place,
    Torn,
    Training,
    Warm,
    command_line,
    head,
    look,
    lose,
    machine,
    open_training,
    oracle,
    parsed,
    progress,
    publish,
)

from leto_rmp import Client, Role, spawn_manager
from leto_rmu import Executor, Op

KINDS = ("optimizer", "encode", "copy")
# Kernels of leto-ec, for each scheme.
EC_KINDS = {"slots": ("encode kernel",), "undo": ("encode kernel", "parity kernel")}
# Where one kernel updates a chunk and its parity, the operation is called "update".
NAMES = {
    "optimizer": ("update", "parity"),
    "encode": ("protect",),
    "copy": ("drain",),
    "encode kernel": ("protect",),
    "parity kernel": ("parity",),
}


class Scramble(Executor):
    """Random bytes in the n-th operation of one of the names, then SIGKILL."""

    def __init__(self, names: tuple[str, ...], count: int, seed: int) -> None:
        self.names, self.left, self.rng = names, count, np.random.default_rng(seed)

    def run(self, op: Op) -> None:
        self.left -= op.name in self.names
        if self.left >= 0 or op.name not in self.names:
            op.apply()
            return
        Place.settle()
        for view in op.writes:
            noise = self.rng.integers(0, 256, view.nbytes, np.uint8).reshape(view.shape)
            view[...] = torch.from_numpy(noise).to(view.device) if isinstance(view, torch.Tensor) else noise
        Place.settle()
        os.kill(os.getpid(), signal.SIGKILL)


class Trap(Executor):
    """The n-th operation of one of the names runs in a kernel's build for fault injection, which traps.

    ``arm`` puts it in the place of the kernel.
    """

    def __init__(self, names: tuple[str, ...], count: int, arm: Callable[[], None]) -> None:
        self.names, self.left, self.arm = names, count, arm

    def run(self, op: Op) -> None:
        self.left -= op.name in self.names
        if op.name in self.names and self.left < 0:
            self.arm()
        op.apply()
        Place.settle()


def faulty_kernel(up: Any) -> Any:
    """The updater's kernel, where it has one."""
    return getattr(up.memory, "fused", None)


def alone(source: str, name: str) -> str:
    """The source of the kernels with one transaction only: each takes the compiler seconds."""
    lines = source.splitlines(keepends=True)
    kept = [line for line in lines if not line.startswith("TRANSACTION(") or f"({name}," in line]
    assert sum(line.startswith("TRANSACTION(") for line in kept) == 1, f"no single kernel {name}"
    return "".join(kept)


def arm(kernel: Any, seed: int) -> None:
    import cupy

    import leto_ec.cuda
    from leto_rmu.cuda import kernels

    options = (
        "-std=c++17",
        "-DLETO_RMU_FAULT",
        f"-I{leto_ec.cuda.include_dir()}",
        f"-I{kernels.FOLDER}",
    )
    name = kernel.name
    module = cupy.RawModule(code=alone(kernels.SOURCE.read_text(), name), options=options)
    shared = kernel.function.max_dynamic_shared_size_bytes
    kernel.function = module.get_function(name)
    kernel.function.max_dynamic_shared_size_bytes = shared
    kernel.fault = seed


def arm_codes(up: Any, seed: int) -> None:
    """Put leto-ec's kernels that compute parity into the place of those that plans of this process launch."""
    import cupy

    library = importlib.import_module("leto_ec.cuda._library")
    device = up.memory.device.index
    kernels = library.kernels(device, up.memory.code.device_kernel)
    options = ("-std=c++17", "-DLETO_EC_FAULT", f"-I{library.FOLDER}")
    with cupy.cuda.Device(device):
        module = cupy.RawModule(code=(library.FOLDER / "kernels.cu").read_text(), options=options)
        names = {
            "product": "leto_ec_product",
            "short": "leto_ec_product_short",
            "stream": kernels.stream.name,
        }
        faulty = {field: module.get_function(name) for field, name in names.items()}
        faulty["stream"].max_dynamic_shared_size_bytes = kernels.stream_bytes
        module.get_function("leto_ec_set_fault")((1,), (1,), (np.uint32(seed),))
    Place.settle()
    for field, function in faulty.items():
        object.__setattr__(kernels, field, function)  # frozen, for everybody else


def life(command: dict[str, Any], channel: Channel) -> None:
    """Recover, be compared, train one iteration, and end in the middle of the next."""
    training, _client, up = open_training(command, channel)
    training.begin(up)
    training.update(up)
    Place.settle()
    kind, count, seed = command["kind"], command["count"], command["tear"]
    kernel = faulty_kernel(up)
    arming: Callable[[], None] | None = None
    if kind == "optimizer" and kernel is not None:
        arming = partial(arm, kernel, seed)
    elif kind.endswith(" kernel") and Place.on_gpu():
        arming = partial(arm_codes, up, seed)
    channel.say(kernel=arming is not None)
    if arming is not None:
        up.executor = Trap(("update",) if kind == "optimizer" else NAMES[kind], count, arming)
    elif kind == "copy":
        up.executor = Scramble(NAMES[kind], count, seed)
    elif kind != "none":
        up.executor = Torn(NAMES[kind], count, seed)
    training.begin(up)
    try:
        training.update(up)
        Place.settle()
    except RuntimeError as error:  # the kernel trapped; the parent looks at what CUDA calls it
        channel.say(trapped=f"{type(error).__name__}: {error}"[:300])
        os.kill(os.getpid(), signal.SIGKILL)
    channel.say(survived=True)


def run(
    arguments: argparse.Namespace, scheme: str, kinds: Sequence[str], until: float, folder: Path
) -> dict[str, Any]:
    """An abort of each of the kinds, one after another, while there is time."""
    rng, seen = np.random.default_rng(arguments.seed), Counter()
    training = {"seed": arguments.seed, "optimizer": "adamw", "scheme": scheme}
    plan = Training(**training).plan
    rounds: list[dict[str, Any]] = []
    generation = 0
    with (
        spawn_manager(folder / "rank0", f"aborts-{scheme}", 0, plan.config, timeout_s=120.0) as manager,
        Client.connect(manager.socket_path, timeout_s=120.0) as control,
        Warm({"life": life, "oracle": oracle, "look": look}, 4) as warm,
    ):
        control.attach(Role.CONTROL, 0)
        judge = Judge(warm.take(), training, folder)
        for number, kind in enumerate([*kinds, "none"]):
            last = kind == "none" or time.monotonic() > until
            if last:
                kind = "none"
            # On a GPU the gradient groups of one size are encoded in one operation.
            encodes = {len(pages) for pages in plan.grad_groups} if Place.on_gpu() else plan.grad_groups
            most = {
                "optimizer": plan.chunks,
                "encode": len(encodes),
                "copy": plan.groups,
                "encode kernel": len(encodes),
                "parity kernel": plan.chunks,
            }
            generation += 1
            child = warm.take()
            child.begin(
                "life",
                training=training,
                socket=str(manager.socket_path),
                generation=generation,
                kind=kind,
                count=int(rng.integers(most.get(kind, 1))),
                tear=int(rng.integers(1, 2**31)),
            )
            found = {**child.hear(), **child.hear()}
            child.channel.say(path=judge.state(found["iteration"]))
            child.hear()
            judge.ahead(found["iteration"] + 2)
            seen["compared"] += 1
            seen["pages reconstructed"] += found["pages"]
            seen[f"found {found['phase']}"] += 1
            in_kernel = child.hear()["kernel"]
            if last:
                child.hear()
                status = child.end()
                assert status == 0, f"the last trainer ended with status {status}"
                break
            told = child.interrupted(f"{kind}, round {number}")
            assert bool(told) == in_kernel, f"{kind}: a trap of the kernel is told as {told!r}"
            seen["by a trapping kernel"] += in_kernel
            generation += 1
            child = warm.take()
            child.begin("look", training=training, socket=str(manager.socket_path), generation=generation)
            state = child.hear()
            child.end()
            lost = lose(control, state["groups"], rng, 16, poison=True)
            rounds.append({"kind": kind, "left": state["phase"], "trapped": told, **lost})
            progress(f"{scheme} {number}: {kind} left {state['phase']}, {lost['lost']} pages lost {told}")
        judge.end()
    return {"seed": arguments.seed, "scheme": scheme, "rounds": rounds, "seen": dict(sorted(seen.items()))}


def markdown(result: dict[str, Any]) -> str:
    lines = head("Aborted inside a kernel or a copy", result, __file__)
    lines += [
        f"{result['parameters'] / 1e6:.2f} M parameters, AdamW, groups of up to 30 + 16 + 1 pages. After",
        "each abort 16 pages of every group were lost and one parity page of each poisoned; a fresh process",
        "recovered, and all state was compared bit for bit with torch.optim on the same device.",
        "",
        *table(result["runs"], KINDS),
        "",
        "Pages were lost " + result["runs"][0]["rounds"][0]["how"] + ".",
    ]
    if result.get("kernels") or result.get("left out"):
        lines += [
            "",
            "## Inside the kernels of leto-ec",
            "",
            "As above, but these kernels store a random part of their rows and trap (over the host backend",
            "the operation is torn, then SIGKILL).",
            "",
            *table(result.get("kernels", []), EC_KINDS["undo"]),
        ]
    for scheme, why in result.get("left out", {}).items():
        lines += ["", f"**Left out: the kernels of leto-ec under {scheme!r}**, since this failed: {why}"]
    return "\n".join(lines)


def table(runs: Sequence[dict[str, Any]], kinds: Sequence[str]) -> list[str]:
    lines = [
        f"| scheme | seed | aborts: {' / '.join(kinds)} | in a trapping kernel | marker left "
        "| pages lost | pages reconstructed | comparisons, all exact |",
        "| --- | ---: | --- | ---: | --- | ---: | ---: | ---: |",
    ]
    for r in runs:
        done = Counter(x["kind"] for x in r["rounds"])
        left = ", ".join(f"{n} {name}" for name, n in sorted(Counter(x["left"] for x in r["rounds"]).items()))
        lines.append(
            f"| {r['scheme']} | {r['seed']} | {' / '.join(str(done[k]) for k in kinds)} "
            f"| {r['seen'].get('by a trapping kernel', 0)} | {left} "
            f"| {sum(x['lost'] for x in r['rounds'])} | {r['seen']['pages reconstructed']} "
            f"| {r['seen']['compared']} |"
        )
    return lines


def codes_too(arguments: argparse.Namespace, result: dict[str, Any]) -> None:
    """The kernels of leto-ec. Whatever fails is said in the result; nothing else is lost by it."""
    result["kernels"], result["left out"] = [], {}
    for scheme in arguments.schemes:
        kinds = EC_KINDS[scheme] * arguments.kernel_rounds
        until = time.monotonic() + arguments.kernel_seconds
        try:
            with tempfile.TemporaryDirectory(prefix="leto-aborts-", dir="/dev/shm") as folder:
                found = run(arguments, scheme, kinds, until, Path(folder))
            result["kernels"].append(found)
        except Exception as error:  # noqa: BLE001 - the page has it
            traceback.print_exc()
            result["left out"][scheme] = f"{type(error).__name__}: {error}"[:500]
            continue
        if missing := set(EC_KINDS[scheme]) - {x["kind"] for x in found["rounds"]}:
            result["left out"][scheme] = f"no time for: {', '.join(sorted(missing))}"


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=6, help="of each kind of abort")
    parser.add_argument("--seconds", type=float, default=50.0, help="of a scheme; stop before so many rounds")
    parser.add_argument("--kernel-rounds", type=int, default=3, help="of each kind, in leto-ec's kernels")
    parser.add_argument("--kernel-seconds", type=float, default=30.0, help="of a scheme, for these")
    parser.add_argument("--schemes", nargs="+", choices=list(EC_KINDS), default=["slots", "undo"])
    arguments = parsed(parser, {"rounds": 1, "kernel_rounds": 1})
    result: dict[str, Any] = {"machine": machine(), "parameters": Training(1).plan.numel, "runs": []}
    for scheme in arguments.schemes:
        with tempfile.TemporaryDirectory(prefix="leto-aborts-", dir="/dev/shm") as folder:
            until = time.monotonic() + arguments.seconds
            kinds = KINDS * arguments.rounds
            result["runs"].append(run(arguments, scheme, kinds, until, Path(folder)))
    publish(result, markdown(result), arguments.output)
    # On a processor there are no such kernels, and a smoke run goes through the motions; on a GPU a smoke run
    # has no time for the compiler.
    if arguments.kernel_rounds and Place.on_gpu() != arguments.smoke:
        codes_too(arguments, result)
        publish(result, markdown(result), arguments.output)
    if result.get("left out"):
        progress(f"left out, by a failure: the kernels of leto-ec under {', '.join(result['left out'])}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
