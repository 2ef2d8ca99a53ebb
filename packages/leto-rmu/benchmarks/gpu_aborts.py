"""Aborts inside kernels and copies of an update on a GPU, with the greatest losses on top; resumed exactly.

    python packages/leto-rmu/benchmarks/gpu_aborts.py --seed 1 --output docs/benchmarks/rmu-aborts-h200

In turn an update is interrupted

* in the kernel that updates a chunk and its parity: a build of it for fault injection does a random part of
  its work and traps, which ends the process's CUDA context, and the process (`proof_ends`) (under the scheme
  "undo", whose operations are kernels of torch and leto-ec: a random part of the operation's bytes is left
  written, and SIGKILL);
* in the kernel that encodes parity (of the gradients, or of a chunk under "undo"): a random part of the
  bytes of its result is left written, then SIGKILL;
* in the copy of parity to the host: its destination is filled with random bytes, then SIGKILL.

Each time 16 pages are lost in every protection group, and one parity page of each is poisoned. A fresh
process recovers and is compared with torch.optim on the same GPU; then the abort counts, and the page is
written anew. SIGTERM ends the script, and what was compared stays.

Beside that leto-ec's kernels are interrupted in the same way as the updater's: a build of them for fault
injection stores a random part of its rows and traps, in the encoding of the gradients' parity and, under
"undo", in the parity of a chunk. Both schemes run side by side, first two rounds of each kind, then these,
then the rest; builds for fault injection are made beside the first of them, once (CuPy keeps them). A part
that fails does not keep the others from running; the page says what failed, and the script ends with status
1.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from proof_faults import Scramble, Trap, arm, arm_codes, faulty_kernel
from proof_lab import (
    Channel,
    Job,
    Judge,
    Lane,
    Place,
    Tell,
    Torn,
    Training,
    command_line,
    done_of,
    folder,
    head,
    in_lanes,
    keep,
    left_behind,
    lose,
    machine,
    open_training,
    oracle,
    parsed,
    progress,
    publish,
)

from leto_rmp import Client, Role, spawn_manager

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
    if arming is not None:
        channel.words.keep()
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


def build(_command: dict[str, Any], channel: Channel) -> None:
    """Have the builds for fault injection made, which other processes find in CuPy's cache then."""
    from leto_rmu.cuda import CudaUpdater, TorchMemory

    plan = Training(1).plan
    up = CudaUpdater(TorchMemory(plan.config), plan, lambda: None)
    for what, make in (
        ("leto-rmu", partial(arm, faulty_kernel(up), 1)),
        ("leto-ec", partial(arm_codes, up, 1)),
    ):
        begun = time.monotonic()
        make()
        progress(f"{what}'s build for fault injection: {time.monotonic() - begun:.1f} s")
    channel.say(built=True)


TASKS = {"life": life, "oracle": oracle, "build": build}


class Aborts:
    """Aborts of one scheme over one manager, one after another. An abort counts when it has been compared."""

    def __init__(self, spec: dict[str, Any], lane: Lane, folder: Path, control: Client, tell: Tell) -> None:
        self.spec, self.lane, self.control, self.tell = spec, lane, control, tell
        self.rng, self.seen = np.random.default_rng(spec["seed"]), Counter[str]()
        self.training = {"seed": spec["seed"], "optimizer": "adamw", "scheme": spec["scheme"]}
        self.plan = Training(**self.training).plan
        self.judge = Judge(lane.standing("oracle"), self.training, folder)
        self.generation = 0
        self.rounds: list[dict[str, Any]] = []
        self.open: dict[str, Any] | None = None  # the abort that is not compared yet

    def most(self, kind: str) -> int:
        """How many operations of a kind an update has."""
        # On a GPU the gradient groups of one size are encoded in one operation.
        encodes = {len(p) for p in self.plan.grad_groups} if Place.on_gpu() else self.plan.grad_groups
        return {
            "optimizer": self.plan.chunks,
            "encode": len(encodes),
            "copy": self.plan.groups,
            "encode kernel": len(encodes),
            "parity kernel": self.plan.chunks,
        }.get(kind, 1)

    def one(self, kind: str) -> None:
        """Recover from what the last one left, be compared, and abort; "none": end well."""
        begun = time.monotonic()
        self.generation += 1
        child = self.lane.next_life(
            self.control,
            self.training,
            self.generation,
            kind=kind,
            count=int(self.rng.integers(self.most(kind))),
            tear=int(self.rng.integers(1, 2**31)),
        )
        found = {**child.hear(), **child.hear()}
        child.channel.say(path=self.judge.state(found["iteration"]))
        assert child.hear()["exact"]
        self.judge.ahead(found["iteration"] + 2)
        self.seen["compared"] += 1
        self.seen["pages reconstructed"] += found["pages"]
        self.seen[f"found {found['phase']}"] += 1
        if self.open is not None:
            self.rounds.append(self.open)
            self.open = None
        self.tell(self.result())
        in_kernel = child.hear()["kernel"]
        if kind == "none":
            child.hear()
            status = child.end()
            assert status == 0, f"the last trainer ended with status {status}"
            return
        told = child.interrupted(f"{kind}, round {len(self.rounds)}", trapping=in_kernel)
        assert bool(told) == in_kernel, f"{kind}: a trap of the kernel is told as {told!r}"
        died = time.monotonic()
        phase, _, groups = left_behind(self.control, self.plan)
        lost = lose(self.control, groups, self.rng, 16, poison=True)
        spent = {"life_s": died - begun, "loss_s": time.monotonic() - died, "waited_s": child.waited_s}
        self.open = {"kind": kind, "left": phase, "trapped": told, **lost, **spent}
        parts = {**spent, **{name: found[name] for name in ("attach_s", "vote_s", "recover_s")}}
        times = ", ".join(f"{name[:-2]} {value:.2f}" for name, value in parts.items())
        scheme, why = self.spec["scheme"], told.partition("\n")[0]
        progress(
            f"{scheme} {len(self.rounds)}: {kind} left {phase}, {lost['lost']} pages lost; s: {times}; {why}"
        )

    def result(self) -> dict[str, Any]:
        named = {name: self.spec[name] for name in ("seed", "scheme")}
        return {**named, "rounds": self.rounds, "seen": dict(sorted(self.seen.items()))}


def run(lane: Lane, spec: dict[str, Any], tell: Tell) -> None:
    """An abort of each of the kinds, one after another, while there is time."""
    if "scheme" not in spec:
        child = lane.warm.take()
        child.begin("build")
        child.hear()
        child.end()
        return
    if time.monotonic() > spec["until"]:
        return
    config = Training(spec["seed"], "adamw", spec["scheme"]).plan.config
    with (
        folder("leto-aborts-", lane.warm.end_taken, "/dev/shm") as place,
        spawn_manager(place / "rank0", f"aborts-{spec['seed']}", 0, config, timeout_s=120.0) as manager,
        Client.connect(manager.socket_path, timeout_s=120.0) as control,
    ):
        control.attach(Role.CONTROL, 0)
        aborts = Aborts(spec, lane, place, control, tell)
        for kind in spec["kinds"]:
            if time.monotonic() > spec["until"]:
                break
            aborts.one(kind)
        aborts.one("none")
        aborts.judge.end()


# --- the page -------------------------------------------------------------------------------------------
def rounds_of(job: Job) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = job.result["rounds"] if job.result is not None else []
    return found


def total(jobs: Sequence[Job]) -> tuple[bool, str]:
    """Whether all aborts of the plan were compared, and a sentence about it."""
    wanted, done = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for job in jobs:
        wanted.update((job.spec["scheme"], kind) for kind in job.spec.get("kinds", ()))
        done.update((job.spec["scheme"], x["kind"]) for x in rounds_of(job))
    parts = [(done[key], count, f"aborts ({key[1]}, {key[0]})") for key, count in wanted.items()]
    return done_of(parts)


def markdown(result: dict[str, Any], jobs: Sequence[Job]) -> str:
    lines = [*head("Aborted inside a kernel or a copy", result, __file__), total(jobs)[1], ""]
    for job in jobs:
        if job.error:
            what = job.spec.get("scheme", "the builds for fault injection")
            lines += [
                f"**Failed**, {what} {', '.join(sorted(set(job.spec.get('kinds', ()))))}: {job.error}",
                "",
            ]
    rounds = [x for job in jobs for x in rounds_of(job)]
    lines += [
        f"{result['parameters'] / 1e6:.2f} M parameters, AdamW, groups of up to 30 + 16 + 1 pages. After",
        "each abort 16 pages of every group were lost and one parity page of each poisoned; a fresh process",
        "recovered, and all state was compared bit for bit with torch.optim on the same device. An abort",
        "counts when that is done.",
        "",
        *table([job for job in jobs if not in_codes(job)], KINDS),
        "",
        "The optimizer's kernel under slots traps in a build for fault injection. All else in this table is",
        "done in part, the rest left random or unwritten, and the process killed.",
        "",
        f"Pages were lost {rounds[0]['how'] if rounds else 'in no run'}.",
    ]
    if codes := [job for job in jobs if in_codes(job)]:
        lines += [
            "",
            "## Inside the kernels of leto-ec",
            "",
            "As above, but these kernels store a random part of their rows and trap (over the host backend",
            "the operation is torn, then SIGKILL).",
            "",
            *table(codes, EC_KINDS["undo"]),
        ]
    if aborted := sum(x["trapped"].startswith("SIGABRT") for x in rounds):
        lines += [
            "",
            f"Of the processes whose kernel trapped {aborted} ended by SIGABRT: a destructor met the error",
            "before Python did.",
        ]
    return "\n".join(lines)


def in_codes(job: Job) -> bool:
    return not set(job.spec.get("kinds", ())).isdisjoint(EC_KINDS["undo"])


def table(jobs: Sequence[Job], kinds: Sequence[str]) -> list[str]:
    lines = [
        f"| scheme | seed | aborts: {' / '.join(kinds)} | in a trapping kernel | marker left "
        "| pages lost | pages reconstructed | comparisons, all exact |",
        "| --- | ---: | --- | ---: | --- | ---: | ---: | ---: |",
    ]
    for job in jobs:
        if job.result is None:
            continue
        rounds, seen = rounds_of(job), job.result["seen"]
        done = Counter(x["kind"] for x in rounds)
        left = ", ".join(f"{n} {name}" for name, n in sorted(Counter(x["left"] for x in rounds).items()))
        lines.append(
            f"| {job.spec['scheme']} | {job.spec['seed']} | {' / '.join(str(done[k]) for k in kinds)} "
            f"| {sum(bool(x['trapped']) for x in rounds)} | {left} "
            f"| {sum(x['lost'] for x in rounds)} | {seen['pages reconstructed']} | {seen['compared']} |"
        )
    return lines


def plan_of(arguments: argparse.Namespace) -> list[Job]:
    """Jobs, the most important first: two rounds of each kind, leto-ec's kernels, the other rounds."""
    first = min(2, arguments.rounds)
    # On a processor there are no such kernels, and a smoke run goes through the motions; on a GPU a smoke run
    # has no time for the compiler.
    codes = arguments.kernel_rounds if Place.on_gpu() != arguments.smoke else 0
    parts: list[Callable[[str], tuple[str, ...]]] = [
        lambda scheme: KINDS * first,
        lambda scheme: EC_KINDS[scheme] * codes,
        lambda scheme: KINDS * (arguments.rounds - first),
    ]
    specs: list[dict[str, Any]] = [{}] if Place.on_gpu() and not arguments.smoke else []
    for number, part in enumerate(parts):
        for scheme in arguments.schemes:
            seed = arguments.seed + number
            specs.append({"scheme": scheme, "seed": seed, "kinds": part(scheme)})
    return [Job(spec) for spec in specs if spec.get("kinds", True)]


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--rounds", type=int, default=6, help="of each kind of abort")
    parser.add_argument("--seconds", type=float, default=100.0, help="no new aborts after so many")
    parser.add_argument("--kernel-rounds", type=int, default=3, help="of each kind, in leto-ec's kernels")
    parser.add_argument("--schemes", nargs="+", choices=list(EC_KINDS), default=["slots", "undo"])
    parser.add_argument("--lanes", type=int, help="side by side; default: 3 on a GPU, else a core each")
    parser.add_argument("--pool", type=int, default=2, help="children of a lane that are ready")
    arguments = parsed(parser, {"rounds": 1, "kernel_rounds": 1})
    jobs, until = plan_of(arguments), time.monotonic() + arguments.seconds
    for job in jobs:
        job.spec["until"] = until
    common = {"machine": machine(), "parameters": Training(1).plan.numel}

    def page() -> tuple[dict[str, Any], str]:
        runs = [job.result for job in jobs if job.result is not None]
        errors = [job.error for job in jobs if job.error]
        found = {**common, "plan": total(jobs)[1], "runs": runs, "errors": errors}
        return found, markdown(found, jobs)

    lanes = arguments.lanes or (3 if Place.on_gpu() else os.cpu_count() or 1)
    in_lanes(jobs, lanes, run, TASKS, arguments.pool, lambda: keep(*page(), arguments.output))
    publish(*page(), arguments.output)
    if any(job.error for job in jobs):
        progress("failed, in part: see the page")
        return 1
    return 0 if total(jobs)[0] else 2


if __name__ == "__main__":
    sys.exit(main())
