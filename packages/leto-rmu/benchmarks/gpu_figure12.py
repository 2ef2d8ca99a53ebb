"""The paper's figure 12 on a GPU: what a kill inside the update does to a training run.

    python packages/leto-rmu/benchmarks/gpu_figure12.py --seed 1 --output docs/benchmarks/rmu-figure12-h200

A small GPT is trained three times from one seed: without failures and without Leto (torch.optim.AdamW,
foreach=True); with retained memory and its parity alone (RMP), where the optimizer updates in place and
encodes afterwards; and with the updater (RMP and RMU). Every ten iterations a process of the latter two
dies in the middle of the update, in the optimizer, the parity or the copy of parity to the host in turn,
with a random part of the bytes of that operation written. Then 16 pages are lost in every protection group
and one parity page of each on the host, and a fresh process goes on. What it has recovered is held against
the reference, losses and every bit of the state.

The three runs go on side by side. The page is written anew after every kill that has been recovered from;
SIGTERM ends the script, and what was compared stays.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from figure12_page import KILL_EVERY, markdown, total, verdict
from gpt_lab import GPT, Shape, accumulate, bind, initial, segments, tokens
from proof_children import warm_up
from proof_lab import (
    DEADLINE_S,
    Channel,
    Job,
    Lane,
    Place,
    Tell,
    Torn,
    command_line,
    folder,
    in_lanes,
    keep,
    left_behind,
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
# Operations that an interrupted update stops in, in turn.
TARGETS = (("update", "parity"), ("parity",), ("drain",))


def targets(t: int, one_kernel: bool) -> tuple[str, ...]:
    """Operations for the kill in iteration t. One kernel for a chunk and its parity is called "update"."""
    names = TARGETS[t // KILL_EVERY % len(TARGETS)]
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


def digest(planes: list[torch.Tensor]) -> str:
    """SHA-256 over a sum of every tensor's words, weighted by their places."""
    found = []
    for plane in planes:
        words = plane.contiguous().view(torch.int32).to(torch.int64)
        found.append((words * torch.arange(1, 2 * words.numel(), 2, device=words.device)).sum())
    return hashlib.sha256(torch.stack(found).cpu().numpy().tobytes()).hexdigest()


def prepare() -> None:
    """Have what a model needs of cuBLAS and torch loaded before anybody waits for it."""
    warm_up()
    if not Place.on_gpu():
        return
    deterministic()
    model = GPT(dataclasses.replace(SHAPES[Place.device], layers=1))
    mine = segments(model)
    numel = sum(s.numel for s in mine)
    parameters = bind(model, mine, torch.zeros(numel, dtype=torch.bfloat16, device=Place.device))
    accumulate(parameters, mine, torch.zeros(numel, device=Place.device))
    model(tokens(model.shape, 1, 0, BATCH, model.shape.context).to(Place.device)).backward()
    Place.settle()
    torch.use_deterministic_algorithms(False)  # as a child has it until a `Run` is made
    torch.cuda.empty_cache()


def compared_at(iterations: int) -> set[int]:
    """Iterations at which a process may go on after a kill, and the end."""
    kills = range(KILL_EVERY - 1, iterations, KILL_EVERY)
    return {*kills, *(t + 1 for t in kills), iterations}


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
    losses, states = [], {}

    def state() -> str:
        planes = [masters[s.name].detach() for s in run.plan.segments]
        planes += [
            optimizer.state[masters[s.name]][k] for s in run.plan.segments for k in ("exp_avg", "exp_avg_sq")
        ]
        return digest(planes)

    for t in range(command["iterations"]):
        if t in compared_at(command["iterations"]):
            states[str(t)] = state()
            channel.say(losses=losses, states=states)
        with torch.no_grad():
            for s in run.plan.segments:
                run.parameters[s.name].view(-1).copy_(masters[s.name])
        losses.append(run.compute(t))
        for s in run.plan.segments:
            masters[s.name].grad = run.grads[s.grad_offset : s.grad_offset + s.numel]
        optimizer.step()
    channel.say(losses=losses, states={**states, str(command["iterations"]): state()}, end=True)


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

    def state() -> str:
        planes = [up.read(s.name) for s in plan.segments]
        return digest(planes + [up.read(s.name, k) for s in plan.segments for k in ("exp_avg", "exp_avg_sq")])

    channel.say(iteration=up.iteration, losses=json.loads(up.job_state), state=state())
    while (t := up.iteration) < command["iterations"]:
        if t == command["kill_at"]:
            names = targets(t, getattr(up.memory, "fused", None) is not None)
            up.executor = Torn(names, command["count"], command["tear"])
        losses = json.loads(up.job_state)
        up.compute_begins()
        losses.append(run.compute(t))
        up.step(HYPERS, json.dumps(losses).encode(), SyncResult)
    channel.say(iteration=up.iteration, losses=json.loads(up.job_state), state=state())
    client.close()


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
            places = plan.group_places(g, Rotation())
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
    offsets = {s.name: plan.offsets[s.name][0] for s in plan.segments}

    def state() -> str:
        found = [planes[0][offsets[s.name] : offsets[s.name] + s.numel] for s in plan.segments]
        found += [p[offsets[s.name] : offsets[s.name] + s.numel] for s in plan.segments for p in planes[1:]]
        return digest(found)

    channel.say(iteration=len(losses), losses=losses, state=state())
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
    channel.say(iteration=len(losses), losses=losses, state=state())
    client.close()


# --- the three runs -----------------------------------------------------------------------------------
TASKS = {"reference": reference, "with_updater": with_updater, "parity_alone": parity_alone}


def run(lane: Lane, spec: dict[str, Any], tell: Tell) -> None:
    if spec["mode"] == "reference":
        child = lane.warm.take()
        child.begin("reference", seed=spec["seed"], iterations=spec["iterations"])
        while "end" not in (found := child.hear()):
            tell(found)
        tell(found)
        child.end()
        progress("the reference is trained")
        return
    with folder("leto-figure12-", lane.warm.end_taken) as place:
        run_mode(lane, spec, place, tell)


def run_mode(lane: Lane, spec: dict[str, Any], place: Path, tell: Tell) -> None:
    """Kill every ten iterations. After each recovery its losses and a digest of its state are told."""
    mode, rng = spec["mode"], np.random.default_rng([spec["seed"], len(spec["mode"])])
    plan = plan_of(spec["scheme"])[1]
    kills: list[list[int]] = []
    lost: list[dict[str, Any]] = []
    found: dict[str, Any] = {"recovered": [], "kills": kills, "lost": lost}
    with (
        spawn_manager(place / mode, f"figure12-{mode}", 0, plan.config, timeout_s=120.0) as manager,
        Client.connect(manager.socket_path, timeout_s=120.0) as control,
    ):
        control.attach(Role.CONTROL, 0)
        for generation, kill_at in enumerate([*range(KILL_EVERY - 1, spec["iterations"], KILL_EVERY), -1], 1):
            child = lane.warm.take()
            groups = plan.groups if targets(max(0, kill_at), False) == ("drain",) else plan.chunks
            count = int(rng.integers(1, groups))
            child.begin(
                mode,
                **{name: spec[name] for name in ("scheme", "seed", "iterations")},
                socket=str(manager.socket_path),
                generation=generation,
                kill_at=kill_at,
                count=count,
                tear=int(rng.integers(2**31)),
            )
            told = child.hear()
            if kills:
                found["recovered"].append([told["iteration"], told["state"]])
                tell({**found, "kills": kills, "losses": told["losses"]})
            if kill_at < 0:
                told = child.hear()
                child.end()
                tell({**found, "losses": told["losses"], "end": told["state"]})
                return
            trap = child.interrupted(f"{mode}, iteration {kill_at}")
            assert not trap, f"it was to be killed, but says {trap}"
            kills.append([kill_at, count])
            if mode == "with_updater":
                pages = left_behind(control, plan)[2]
            else:
                every = [plan.group_places(g, Rotation()) for g in range(plan.groups)]
                pages = [[page for page in group if page is not None] for group in every]
            lost.append(lose(control, pages, rng, 16, poison=True))
            progress(f"{mode}: killed in iteration {kill_at}, {lost[-1]['lost']} pages lost")


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--iterations", type=int, default=100)
    parser.add_argument("--scheme", default="slots")
    parser.add_argument("--lanes", type=int, help="runs side by side; default: 3 on a GPU, else a core each")
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"
    arguments = parsed(parser, {"iterations": 32})  # a kill of each kind
    common = {"seed": arguments.seed, "iterations": arguments.iterations}
    schemes = {"reference": "undo", "with_updater": arguments.scheme, "parity_alone": "undo"}
    jobs = [Job({"mode": mode, "scheme": schemes[mode], **common}) for mode in schemes]
    fixed = {"machine": machine(), **common, "scheme": arguments.scheme}
    fixed["parameters"] = plan_of("undo")[1].numel

    def page() -> tuple[dict[str, Any], str]:
        done = {str(job.spec["mode"]): job.result for job in jobs if job.result is not None}
        errors = [f"{job.spec['mode']}: {job.error}" for job in jobs if job.error]
        found = {**fixed, "errors": errors, **done}
        found["plan"] = total(found)[1]
        return found, markdown(found)

    lanes = arguments.lanes or (3 if Place.on_gpu() else os.cpu_count() or 1)
    in_lanes(jobs, lanes, run, TASKS, 2, lambda: keep(*page(), arguments.output), prepare)
    publish(*page(), arguments.output)
    found = page()[0]
    for wrong in [*found["errors"], *verdict(found)]:
        progress(wrong)
    if found["errors"] or verdict(found):
        return 1
    return 0 if total(found)[0] else 2


if __name__ == "__main__":
    sys.exit(main())
