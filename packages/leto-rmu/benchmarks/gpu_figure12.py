"""The paper's figure 12 on a GPU: what a kill inside the update does to a training run.

    python packages/leto-rmu/benchmarks/gpu_figure12.py --seed 1 --output docs/benchmarks/rmu-figure12-h200

A small GPT is trained three times from one seed: without failures and without Leto (torch.optim.AdamW,
foreach=True); with retained memory and its parity alone (RMP), where the optimizer updates in place and
encodes afterwards; and with the updater (RMP and RMU). Every ten iterations a process of the latter two
dies in the middle of the update, in the optimizer, the parity or the copy of parity to the host in turn,
with a random part of the bytes of that operation written. Then 16 pages are lost in every protection group
and one parity page of each on the host, and a fresh process goes on.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gpt_lab import GPT, Shape, accumulate, bind, initial, segments, tokens
from proof_lab import (
    DEADLINE_S,
    Channel,
    Place,
    Torn,
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

from leto_rmp import AllocationSpec, Client, Kind, PageRef, Role, spawn_manager
from leto_rmu import Action, AdamW, Hyper, SyncResult, UpdatePlan, arrays, decide
from leto_rmu.geometry import Rotation
from leto_rmu.views import RankMemory

SHAPES = {
    "cuda": Shape(layers=8, width=512, heads=8, vocabulary=512, context=128),
    "cpu": Shape(layers=2, width=96, heads=4, vocabulary=256, context=64),
}
BATCH = 16
NOTES = 1 << 16  # bytes
HYPERS = (Hyper(1e-3, betas=(0.9, 0.95), weight_decay=0.1), Hyper(1e-3, betas=(0.9, 0.95)))
EVERY = 10
# Operations that an interrupted update stops in, in turn.
TARGETS = (("update", "parity"), ("parity",), ("drain",))


def targets(t: int, one_kernel: bool) -> tuple[str, ...]:
    """Operations for the kill in iteration t. One kernel for a chunk and its parity is called "update"."""
    names = TARGETS[t // EVERY % len(TARGETS)]
    return ("update",) if one_kernel and names == ("parity",) else names


def plan_of(scheme: str) -> tuple[GPT, UpdatePlan]:
    model = GPT(SHAPES[Place.device])
    mine = segments(model)
    numel = sum(s.numel for s in mine)
    plan = UpdatePlan(
        mine,
        AdamW(),
        config=Place.config(64),
        grad_numel=numel,
        model_bytes=2 * numel,
        scheme=scheme,  # type: ignore[arg-type]
        extra_specs=(AllocationSpec("notes", NOTES, Kind.TRANSACTION, placement="host"),),
    )
    return model, plan


def deterministic() -> None:
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)


class Run:
    """A model over given memory."""

    def __init__(self, scheme: str, seed: int, flat: torch.Tensor | None, grads: torch.Tensor | None) -> None:
        deterministic()
        self.seed = seed
        self.model, self.plan = plan_of(scheme)
        numel = self.plan.numel
        self.flat = torch.empty(numel, dtype=torch.bfloat16, device=Place.device) if flat is None else flat
        self.grads = torch.empty(numel, device=Place.device) if grads is None else grads
        self.parameters = bind(self.model, list(self.plan.segments), self.flat)
        accumulate(self.parameters, list(self.plan.segments), self.grads)

    def compute(self, t: int) -> float:
        self.grads.zero_()
        shape = self.model.shape
        loss = self.model(tokens(shape, self.seed, t, BATCH, shape.context).to(Place.device))
        loss.backward()
        return loss.item()


def digest(planes: list[torch.Tensor]) -> list[int]:
    """Of every tensor a sum of its words, weighted by their places."""
    found = []
    for plane in planes:
        words = plane.contiguous().view(torch.int32).to(torch.int64)
        found.append(int((words * torch.arange(1, 2 * words.numel(), 2, device=words.device)).sum()))
    return found


# --- reference ----------------------------------------------------------------------------------------
def reference(command: dict[str, Any], channel: Channel) -> None:
    run = Run("undo", command["seed"], None, None)
    masters = {s.name: torch.nn.Parameter(initial(s, run.seed, Place.device)) for s in run.plan.segments}
    groups = [
        {
            "params": [masters[s.name] for s in run.plan.segments if s.group == g],
            "lr": hyper.lr,
            "betas": hyper.betas,
            "eps": hyper.eps,
            "weight_decay": hyper.weight_decay,
        }
        for g, hyper in enumerate(HYPERS)
    ]
    optimizer = torch.optim.AdamW(groups, foreach=Place.on_gpu())
    losses = []
    for t in range(command["iterations"]):
        with torch.no_grad():
            for s in run.plan.segments:
                run.parameters[s.name].view(-1).copy_(masters[s.name])
        losses.append(run.compute(t))
        for s in run.plan.segments:
            masters[s.name].grad = run.grads[s.grad_offset : s.grad_offset + s.numel]
        optimizer.step()
    states = [masters[s.name].detach() for s in run.plan.segments]
    states += [
        optimizer.state[masters[s.name]][k] for s in run.plan.segments for k in ("exp_avg", "exp_avg_sq")
    ]
    channel.say(losses=losses, digest=digest(states))


# --- RMP and RMU --------------------------------------------------------------------------------------
def with_updater(command: dict[str, Any], channel: Channel) -> None:
    client = Client.connect(command["socket"], timeout_s=DEADLINE_S)
    client.attach(Role.WRITER, command["generation"])
    plan = plan_of(command["scheme"])[1]
    up = Place.updater(client, plan)
    recovered = up.recover(decide([up.summary()]))
    run = Run(command["scheme"], command["seed"], up.model.view(torch.bfloat16), up.grads)
    if recovered.action is Action.FRESH:
        for s in plan.segments:
            up.write(s.name, "master", initial(s, run.seed, Place.device))
        up.initialize(0, b"[]")
    channel.say(iteration=up.iteration, action=str(recovered.action), pages=recovered.pages_reconstructed)
    while (t := up.iteration) < command["iterations"]:
        if t == command["kill_at"]:
            names = targets(t, getattr(up.memory, "fused", None) is not None)
            up.executor = Torn(names, command["count"], command["tear"])
        losses = json.loads(up.job_state)
        up.compute_begins()
        losses.append(run.compute(t))
        up.step(HYPERS, json.dumps(losses).encode(), SyncResult)
    states = [up.read(s.name) for s in plan.segments]
    states += [up.read(s.name, k) for s in plan.segments for k in ("exp_avg", "exp_avg_sq")]
    channel.say(losses=json.loads(up.job_state), digest=digest(states))
    client.close()


def where(command: dict[str, Any], channel: Channel) -> None:
    """Logical groups of a pool without a writer."""
    with Client.connect(command["socket"], timeout_s=DEADLINE_S) as client:
        client.attach(Role.WRITER, command["generation"])
        up = Place.updater(client, plan_of(command["scheme"])[1])
        channel.say(groups=logical_groups(up))


# --- RMP alone ----------------------------------------------------------------------------------------
def restore_rows(memory: RankMemory, group: int, lost: frozenset[PageRef]) -> None:
    """Lost pages of tier 1, from tier 2."""
    rows, count = list(memory.tier1(group)), memory.plan.config.tier1_pages
    gone = [i for i in range(count) if PageRef("arena", "tier1", group * count + i) in lost]
    if gone:
        memory.tier2_code.reconstruct(rows, list(memory.tier2(group)), lost_data=gone, verify=False)


def parity_alone(command: dict[str, Any], channel: Channel) -> None:
    """In-place updates, encoded afterwards: retained memory and parity without transactions."""
    client = Client.connect(command["socket"], timeout_s=DEADLINE_S)
    client.attach(Role.WRITER, command["generation"])
    plan = plan_of("undo")[1]
    memory: RankMemory = Place.updater(client, plan).memory
    run = Run("undo", command["seed"], memory.model.view(torch.bfloat16), memory.grads)
    notes = memory.regions["notes"].pages.reshape(-1)
    raw = bytes(notes[:NOTES]).rstrip(b"\0")
    losses: list[float] = json.loads(raw) if raw else []
    planes = list(memory.planes.values())
    if not raw:
        planes[1].zero_(), planes[2].zero_()
        for s in plan.segments:
            at = plan.offsets[s.name][0]
            planes[0][at : at + s.numel].copy_(initial(s, run.seed, Place.device))
    else:  # what RMP can do by itself: its parity, whatever it belongs to
        lost = memory.lost()
        for g in range(plan.groups):
            restore_rows(memory, g, lost)
            places = plan.geometry.group_pages(g, Rotation())
            pages = memory.group_pages(g, Rotation())
            gone = [
                j
                for j, page in enumerate(places)
                if page is not None and PageRef("arena", "data", page) in lost
            ]
            rows: Any = np.array(memory.tier1(g))
            if Place.on_gpu():
                rows = torch.from_numpy(rows).cuda()
            memory.code.reconstruct(pages, list(rows), lost_data=gone, verify=False)
        client.acknowledge(list(client.marks()))
    channel.say(iteration=len(losses))
    rng = np.random.default_rng(command["tear"])
    while (t := len(losses)) < command["iterations"]:
        for s in plan.segments:
            at = plan.offsets[s.name][0]
            run.parameters[s.name].data.view(-1).copy_(planes[0][at : at + s.numel])
        losses.append(run.compute(t))
        for c in range(plan.chunks):
            old = [arrays.saved(view) for view in memory.slot_runs(c)]
            for piece in plan.pieces(*divmod(c, plan.chunks_per_group)):
                plan.optimizer.apply(
                    [planes[0][piece.lo : piece.hi]],
                    [[plane[piece.lo : piece.hi]] for plane in planes[1:]],
                    [run.grads[piece.grad_lo : piece.grad_lo + piece.hi - piece.lo]],
                    HYPERS[piece.group],
                    t + 1,
                )
            if t == command["kill_at"] and c == command["count"]:
                for view, before in zip(memory.slot_runs(c), old, strict=True):
                    for k in np.flatnonzero(rng.random(view.shape[0]) < 0.5):
                        arrays.copy(view[int(k)], before[int(k)])
                Place.settle()
                os.kill(os.getpid(), signal.SIGKILL)
        for g in range(plan.groups):
            memory.encode_group(g, Rotation())
            memory.tier2_code.encode(memory.tier1(g), out=memory.tier2(g))
        content = json.dumps(losses).encode().ljust(NOTES, b"\0")
        notes[:NOTES] = np.frombuffer(content, np.uint8)
    offsets = {s.name: plan.offsets[s.name][0] for s in plan.segments}
    states = [planes[0][offsets[s.name] : offsets[s.name] + s.numel] for s in plan.segments]
    states += [p[offsets[s.name] : offsets[s.name] + s.numel] for s in plan.segments for p in planes[1:]]
    channel.say(losses=losses, digest=digest(states))
    client.close()


# --- the three runs -----------------------------------------------------------------------------------
def run_mode(mode: str, arguments: argparse.Namespace, warm: Warm, folder: Path) -> dict[str, Any]:
    rng = np.random.default_rng([arguments.seed, len(mode)])
    scheme = arguments.scheme if mode == "with_updater" else "undo"
    plan = plan_of(scheme)[1]
    kills, lost, generation = [], [], 0
    with (
        spawn_manager(folder / mode, f"figure12-{mode}", 0, plan.config, timeout_s=120.0) as manager,
        Client.connect(manager.socket_path, timeout_s=120.0) as control,
    ):
        control.attach(Role.CONTROL, 0)
        common = {"socket": str(manager.socket_path), "scheme": scheme}
        for kill_at in [*range(EVERY - 1, arguments.iterations, EVERY), -1]:
            generation += 1
            child = warm.take()
            groups = plan.groups if targets(max(0, kill_at), False) == ("drain",) else plan.chunks
            count = int(rng.integers(1, groups))
            child.begin(
                mode,
                **common,
                seed=arguments.seed,
                generation=generation,
                iterations=arguments.iterations,
                kill_at=kill_at,
                count=count,
                tear=int(rng.integers(2**31)),
            )
            child.hear()
            if kill_at < 0:
                found = child.hear()
                child.end()
                break
            told = child.interrupted(f"{mode}, iteration {kill_at}")
            assert not told, f"it was to be killed, but says {told}"
            kills.append([kill_at, count])
            if mode == "with_updater":
                generation += 1
                child = warm.take()
                child.begin("where", **common, generation=generation)
                groups_now = child.hear()["groups"]
                child.end()
            else:
                every = [plan.geometry.group_pages(g, Rotation()) for g in range(plan.groups)]
                groups_now = [[page for page in pages if page is not None] for pages in every]
            lost.append(lose(control, groups_now, rng, 16, poison=True))
            progress(f"{mode}: killed in iteration {kill_at}, {lost[-1]['lost']} pages lost")
    return {**found, "kills": kills, "lost": lost}


def markdown(result: dict[str, Any]) -> str:
    reference, alone, both = (result[k] for k in ("reference", "parity_alone", "with_updater"))
    lines = head("Figure 12: killed inside the update", result, __file__)
    lines += [
        f"A GPT of {result['parameters'] / 1e6:.1f} M parameters, {result['iterations']} iterations, seed "
        f"{result['seed']}, scheme {result['scheme']}; {len(both['kills'])} kills inside the update, each",
        "followed by the loss of 16 pages in every protection group and a poisoned parity page of each.",
        "",
        "| run | losses equal to the reference | first difference | loss at the end | state at the end |",
        "| --- | ---: | ---: | ---: | --- |",
    ]
    for name, r in (("reference", reference), ("RMP alone", alone), ("RMP and RMU", both)):
        pairs = list(zip(r["losses"], reference["losses"], strict=True))
        equal = [a == b for a, b in pairs]
        first = equal.index(False) if False in equal else "none"
        same = "every bit" if r["digest"] == reference["digest"] else "differs"
        lines.append(f"| {name} | {sum(equal)} of {len(equal)} | {first} | {r['losses'][-1]:.4f} | {same} |")
    at = [0, *(k for k in range(9, result["iterations"], 10)), *range(10, result["iterations"], 10)]
    at = sorted({k for k in at if k < result["iterations"]} | {result["iterations"] - 1})
    lines += ["", "| iteration | reference | RMP alone | RMP and RMU |", "| ---: | ---: | ---: | ---: |"]
    for k in at:
        lines.append(
            "| " + " | ".join([str(k), *(f"{r['losses'][k]:.4f}" for r in (reference, alone, both))]) + " |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--scheme", default="slots")
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    arguments = parsed(parser, {"iterations": 32})  # a kill of each kind
    tasks = {
        "reference": reference,
        "with_updater": with_updater,
        "parity_alone": parity_alone,
        "where": where,
    }
    result: dict[str, Any] = {"machine": machine(), **vars(arguments), "output": None}
    result["parameters"] = plan_of("undo")[1].numel
    with tempfile.TemporaryDirectory(prefix="leto-figure12-") as folder, Warm(tasks, 4) as warm:
        first = warm.take()
        first.begin("reference", seed=arguments.seed, iterations=arguments.iterations)
        result["reference"] = first.hear()
        first.end()
        progress("the reference is trained")
        for mode in ("parity_alone", "with_updater"):
            result[mode] = run_mode(mode, arguments, warm, Path(folder))
    publish(result, markdown(result), arguments.output)
    assert result["with_updater"]["losses"] == result["reference"]["losses"]
    assert result["with_updater"]["digest"] == result["reference"]["digest"]
    assert result["parity_alone"]["digest"] != result["reference"]["digest"], "RMP alone has to go wrong"


if __name__ == "__main__":
    main()
