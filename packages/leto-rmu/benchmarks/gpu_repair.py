"""How long it takes to localize and reconstruct 16 lost pages in every protection group of a large rank.

    python packages/leto-rmu/benchmarks/gpu_repair.py --output docs/benchmarks/rmu-repair-h200

A trainer initializes 1.007 B parameters (AdamW; 12 GiB of state in groups of up to 1024 + 16 + 1 pages of 2
MiB) over a state manager and is killed. Pages are lost; then, round after round, the manager localizes and
replaces them and a fresh process with CUDA up attaches, votes (which solves for every lost page and checks
the result where parity is to spare) and recovers. Sums of all state, weighted by place, must be those of
the beginning. Over the host backend (--device cpu) the rank is small and the times say nothing.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from proof_lab import (
    DEADLINE_S,
    Channel,
    Place,
    Warm,
    command_line,
    head,
    logical_groups,
    lose,
    machine,
    parsed,
    progress,
    publish,
)

from leto_rmp import Client, Role, spawn_manager
from leto_rmu import Action, AdamW, Segment, UpdatePlan, decide

PARTS = 6
PARAMETERS = {"cuda": 1_006_632_960, "cpu": 240_000}
SMOKE_PARAMETERS = 201_326_592  # two groups


def plan_of(numel: int, scheme: str) -> UpdatePlan:
    part = numel // PARTS
    on_gpu = Place.on_gpu()
    return UpdatePlan(
        [Segment(f"s{k}", part, 0, k * part) for k in range(PARTS)],
        AdamW(),
        config=Place.config(1024 if on_gpu else 64),
        grad_numel=part * PARTS,
        grad_dtype=torch.bfloat16,
        chunk_pages=240 if on_gpu else 30,
        scheme=scheme,  # type: ignore[arg-type]
    )


def sums(up: Any) -> list[int]:
    found = []
    for s in up.plan.segments:
        for name in up.plan.plane_names:
            words = up.read(s.name, name).view(torch.int32)
            weights = torch.arange(1, 2 * words.numel(), 2, device=words.device, dtype=torch.int64)
            found.append(int((words * weights).sum()))
    return found


def attach(command: dict[str, Any], channel: Channel) -> None:
    begun = time.perf_counter()
    client = Client.connect(command["socket"], timeout_s=DEADLINE_S)
    client.attach(Role.WRITER, command["generation"])
    up = Place.updater(client, plan_of(command["numel"], command["scheme"]))
    Place.settle()
    attached = time.perf_counter()
    summary = up.summary()
    voted = time.perf_counter()
    recovered = up.recover(decide([summary]))
    Place.settle()
    done = time.perf_counter()
    if recovered.action is Action.FRESH:
        for k, s in enumerate(up.plan.segments):
            generator = Place.generator(k)
            for name in up.plan.plane_names:
                up.write(s.name, name, torch.randn(s.numel, generator=generator, device=Place.device))
        up.initialize(0, b"", keep_state=True)
    channel.say(
        attach_ms=1000 * (attached - begun),
        vote_ms=1000 * (voted - attached),
        recover_ms=1000 * (done - voted),
        pages=recovered.pages_reconstructed,
        verified=recovered.verified,
        sums=sums(up),
        groups=logical_groups(up),
    )
    channel.hear(3600)


def run(arguments: argparse.Namespace, folder: Path) -> dict[str, Any]:
    rng, rounds = np.random.default_rng(arguments.seed), []
    plan = plan_of(arguments.parameters, arguments.scheme)
    handles = {"handles": f"{plan.config.gpu_pages_per_handle} pages each"} if Place.on_gpu() else {}
    until = time.monotonic() + arguments.seconds
    with (
        spawn_manager(folder / "rank0", "repair", 0, plan.config, timeout_s=120.0) as manager,
        Client.connect(manager.socket_path, timeout_s=120.0) as control,
        Warm({"attach": attach}, 2) as warm,
    ):
        control.attach(Role.CONTROL, 0)
        first: dict[str, Any] = {}
        for number in range(arguments.rounds + 1):
            child = warm.take()
            child.begin(
                "attach",
                socket=str(manager.socket_path),
                generation=1 + number,
                numel=arguments.parameters,
                scheme=arguments.scheme,
            )
            found = child.hear()
            first = first or found
            assert found["sums"] == first["sums"], f"state differs after round {number}"
            child.kill()
            if number:
                this = rounds[-1]
                assert found["pages"] == this["lost"], f"{this['lost']} pages lost, {found['pages']} rebuilt"
                assert found["verified"] == (this["count"] < 16), f"{this['count']} lost: {found['verified']}"
                this.update({k: v for k, v in found.items() if k not in ("sums", "groups")})
                spent = {k: round(v, 1) for k, v in this.items() if k.endswith("_ms")}
                progress(f"round {number}: {this['lost']} pages, {spent}")
            else:
                progress(f"{plan.groups} groups of {arguments.parameters / 1e6:.0f} M parameters are made")
            if number == arguments.rounds or time.monotonic() > until:
                break
            count = 16 - number % 2  # with 15 lost there is parity to spare, which verifies the result
            rounds.append({"count": count, **lose(control, first["groups"], rng, count, poison=False)})
    return {
        "machine": machine(**handles),
        "seed": arguments.seed,
        "parameters": arguments.parameters,
        "scheme": arguments.scheme,
        "groups": plan.groups,
        "rounds": rounds,
    }


def markdown(result: dict[str, Any]) -> str:
    lines = head("Localization and reconstruction of lost pages", result, __file__)
    rounds = result["rounds"]
    lines += [
        f"{result['parameters'] / 1e9:.3f} B parameters, AdamW, {result['groups']} protection groups, scheme "
        f"{result['scheme']}, seed {result['seed']}; 15 or 16 pages lost in each, in turn. Pages were lost "
        f"{rounds[0]['how']}. After every round all state was what it had been.",
        "",
        "| what | median | min | max | rounds | paper, section 8.4 |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    rows: tuple[tuple[str, list[float], str], ...] = (
        ("localize, by handles", [1000 * r["localize_s"] for r in rounds], "36 ms"),
        ("replace the pages", [1000 * r["remap_s"] for r in rounds], ""),
        ("attach a process that has CUDA up", [r["attach_ms"] for r in rounds], ""),
        ("reconstruct: vote, which solves and checks", [r["vote_ms"] for r in rounds], ""),
        ("reconstruct: write, read back, acknowledge, go on", [r["recover_ms"] for r in rounds], ""),
        ("reconstruct, both", [r["vote_ms"] + r["recover_ms"] for r in rounds], "140 ms"),
    )
    for name, values, paper in rows:
        middle = statistics.median(values)
        lines.append(
            f"| {name} | {middle:.1f} ms | {min(values):.1f} | {max(values):.1f} | {len(values)} | {paper} |"
        )
    pages = sorted({r["pages"] for r in rounds})
    lines += ["", f"Pages reconstructed in a round: {', '.join(map(str, pages))}."]
    return "\n".join(lines)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--parameters", type=int, help="default: 1.007 B on a GPU")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--seconds", type=float, default=80.0, help="stop before so many rounds")
    parser.add_argument("--scheme", default="slots")
    arguments = parsed(parser, {"rounds": 2})
    if arguments.parameters is None:
        small = arguments.smoke and Place.on_gpu()
        arguments.parameters = SMOKE_PARAMETERS if small else PARAMETERS[Place.device]
    with tempfile.TemporaryDirectory(prefix="leto-repair-") as folder:
        result = run(arguments, Path(folder))
    publish(result, markdown(result), arguments.output)


if __name__ == "__main__":
    main()
