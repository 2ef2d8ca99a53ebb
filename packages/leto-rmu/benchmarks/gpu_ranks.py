"""SIGKILL of one of two ranks inside their update, its peer after it; both resumed by fresh processes.

    python packages/leto-rmu/benchmarks/gpu_ranks.py --seed 1 --output docs/benchmarks/rmu-ranks-h200

Two processes train one model over a state manager each, on one GPU. Their gradients are added up, their
clip is that of the largest gradient of all, and their barrier keeps both from updating before both have
protected their gradients. The state is *sharded*: each rank has a part of every kind (AdamW and SGD: cut in
the middle of a tensor; Muon: whole matrices) and passes its part of the model, in bf16, to the other; or it
is *unsharded*: each rank has all of it. Gradients depend on the model, so a rank that went on with another
model than its peer would be found by the next comparison.

A rank is killed at an instant drawn from the time that its update takes, the other one after a time drawn
likewise. Then fresh processes attach, one decision is made for both, both recover, and
the state of each is compared bit for bit with that of one torch.optim with all of it, on the same GPU. A
kill counts when the marker of the rank that was killed first is between PROTECTED and UPDATED, and both
ranks have been compared. After every second life the ranks in turns lose 15 or 16 pages in every
protection group, and a parity page of each on the host.

The ranks talk through gloo and host memory: NCCL takes no two ranks on one GPU. What is proven here is what
their state goes through; what NCCL does with killed ranks is seen in leto-megatron's tests on two GPUs.

The page is written anew after every comparison; SIGTERM ends the script, and what was compared stays.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import os
import signal
import sys
import time
from collections import Counter
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from proof_lab import (
    Channel,
    Child,
    Job,
    Judge,
    Lane,
    Place,
    Reference,
    Tell,
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
from leto_rmu import ResumableUpdater, SyncResult, UpdatePlan, decide

RANKS = 2
OPTIMIZERS, SCHEMES, STATES = ("adamw", "sgd", "muon"), ("slots", "undo"), ("sharded", "unsharded")
INSIDE = ("PROTECTED", "SYNCED", "UPDATED")
IN_RECOVERY, ANYWHERE = 0.06, 0.06  # shares of the kills
RECENT = 5  # updates that say how long one takes
LOSSES_EVERY = 2
COLLECTIVE_S = 60.0


class PeerGoneError(RuntimeError):
    """A collective ended without its result."""


class Group:
    """The collectives of the ranks, over host memory."""

    def __init__(self, store: str, rank: int) -> None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # they are processes of one machine
        within = datetime.timedelta(seconds=COLLECTIVE_S)
        try:
            dist.init_process_group(
                "gloo", store=dist.FileStore(store, RANKS), rank=rank, world_size=RANKS, timeout=within
            )
        except RuntimeError as error:
            raise PeerGoneError(str(error)[:300]) from error

    def _collective(self, run: Any, tensor: torch.Tensor, *more: Any) -> torch.Tensor:
        host = tensor.cpu()
        try:
            run(host, *more)
        except RuntimeError as error:
            raise PeerGoneError(str(error)[:300]) from error
        return host

    def add_up(self, tensor: torch.Tensor) -> None:
        tensor.copy_(self._collective(dist.all_reduce, tensor))

    def share(self, tensor: torch.Tensor, owner: int) -> None:
        tensor.copy_(self._collective(dist.broadcast, tensor, owner))

    def highest(self, value: float) -> float:
        return float(self._collective(dist.all_reduce, torch.tensor([value]), dist.ReduceOp.MAX)[0])

    def barrier(self) -> None:
        self._collective(dist.all_reduce, torch.zeros(1))


# --- the training ---------------------------------------------------------------------------------------
def pieces_of(sizes: dict[str, int], rank: int, muon: bool) -> dict[str, tuple[int, int]]:
    """What a rank has of every segment, as (first element, how many). Muon needs whole matrices."""
    if muon:
        return {name: (0, sizes[name]) for name in (("a", "d"), ("b", "c"))[rank]}
    total, found, at = sum(sizes.values()), {}, 0
    begin, end = rank * total // RANKS, (rank + 1) * total // RANKS
    for name, numel in sizes.items():
        first, behind = max(begin - at, 0), min(end - at, numel)
        if first < behind:
            found[name] = (first, behind - first)
        at += numel
    return found


class RankTraining(Training):
    """One of the ranks. What all ranks' gradients add up to depends on the model that they share."""

    def __init__(self, seed: int, optimizer: str, scheme: str, sharded: bool, rank: int) -> None:
        super().__init__(seed, optimizer, scheme)
        self.rank, self.group = rank, None
        sizes = {s.name: s.numel for s in self.whole.segments}
        self.numel = sum(sizes.values())
        self.owned = [pieces_of(sizes, r, self.muon) for r in range(RANKS)] if sharded else []
        """What each rank has of every segment; of a state that is not sharded, nothing is anybody's own."""
        if sharded:
            self.pieces = self.owned[rank]
            groups = {s.name: s.group for s in self.whole.segments}
            kinds = {name: (numel, groups[name]) for name, (_, numel) in self.pieces.items()}
            self.plan = self._plan(kinds, self.numel)

    group: Group | None

    def joined(self) -> Group:
        assert self.group is not None, "this process is no rank of a group"
        return self.group

    def barrier(self) -> None:
        self.joined().barrier()

    def decision(self, summary: bytes, channel: Channel) -> bytes:
        """The script decides for all ranks."""
        channel.say(summary=summary.hex())
        decided = channel.hear()
        assert decided is not None, "the script is gone"
        return bytes.fromhex(decided["decision"])

    def contribution(self, t: int, rank: int, model: torch.Tensor) -> torch.Tensor:
        """The gradient of a rank, fp32[numel], for the model, bf16[numel]."""
        return self._random(self.numel, 3, t, rank) + model.float() * 0.125

    def clipped(self, t: int, highest: float) -> SyncResult:
        """``highest``: the largest element of the scaled gradient, the norm by which it is clipped."""
        scale = 0.5
        return SyncResult(clip=min(1.0, (1 + t % 3) / (highest * scale)), inv_scale=scale, grad_norm=highest)

    def gathered(self, up: ResumableUpdater) -> torch.Tensor:
        """The model, bf16[numel], with the parts of the others."""
        half = up.model.view(torch.bfloat16)
        for owner, pieces in enumerate(self.owned):
            for name, (first, numel) in pieces.items():
                at = self.model_at[name] + first
                self.joined().share(half[at : at + numel].view(torch.uint8), owner)
        return half

    def begin(self, up: ResumableUpdater) -> None:
        t = up.iteration
        assert up.job_state == self.job(t)
        up.compute_begins()
        total = self.contribution(t, self.rank, self.gathered(up))
        self.joined().add_up(total)
        for s in self.plan.segments:
            up.grads[s.grad_offset : s.grad_offset + s.numel].copy_(total[self.model_slice(s.name)])

    def synced(self, up: ResumableUpdater) -> SyncResult:
        mine = max(
            float(up.grads[s.grad_offset : s.grad_offset + s.numel].abs().max()) for s in self.plan.segments
        )
        return self.clipped(up.iteration, self.joined().highest(mine))


class JobReference(Reference):
    """torch.optim with the state of all ranks and the gradients that they add up."""

    def __init__(self, **training: Any) -> None:
        self.rank = RankTraining(**training, sharded=False, rank=0)
        super().__init__(self.rank)

    def gradient(self) -> torch.Tensor:
        model = torch.cat([p.detach().reshape(-1) for p in self.parameters.values()]).to(torch.bfloat16)
        parts = [self.rank.contribution(self.t, r, model) for r in range(RANKS)]
        total, at = torch.add(*parts).to(torch.bfloat16), 0
        found = torch.zeros(self.rank.plan.grad_numel, dtype=torch.bfloat16, device=Place.device)
        for s in self.rank.plan.segments:
            found[s.grad_offset : s.grad_offset + s.numel] = total[at : at + s.numel]
            at += s.numel
        return found

    def sync(self, gradient: torch.Tensor) -> SyncResult:
        return self.rank.clipped(self.t, float(gradient.abs().max()))


# --- tasks ----------------------------------------------------------------------------------------------
def life(command: dict[str, Any], channel: Channel) -> None:
    """A rank: recover, be compared, train, and be killed, or hear that the peer was."""
    training, client, up = open_training(command, channel, make=RankTraining)
    try:
        if command["updates"]:
            training.group = Group(command["store"], training.rank)
        for number in range(1, command["updates"] + 1):
            training.begin(up)
            Place.settle()
            training.update(up, partial(channel.note, number))
            Place.settle()
            channel.say(settled_s=time.monotonic() - channel.noted()[1])
    except PeerGoneError as error:
        channel.say(peer_gone=str(error))
    if channel.hear() is not None:
        client.close()


TASKS = {"life": life, "oracle": partial(oracle, make=JobReference)}


class Killer:
    """Two ranks over a manager each, killed until enough of them were inside their update."""

    def __init__(
        self, spec: dict[str, Any], lane: Lane, folder: Path, controls: list[Client], tell: Tell
    ) -> None:
        self.spec, self.lane, self.folder, self.controls, self.tell = spec, lane, folder, controls, tell
        self.rng = np.random.default_rng(spec["seed"])
        self.training = {name: spec[name] for name in ("seed", "optimizer", "scheme")}
        self.sharding = {"sharded": spec["state"] == "sharded"}
        self.plans: list[UpdatePlan] = [self._of(r).plan for r in range(RANKS)]
        self.judge = Judge(lane.standing("oracle"), self.training, folder)
        self.generation, self.iteration = 0, 0
        self.left: list[str] = []  # phases that kills left, until what was recovered from has been compared
        self.updates: list[float] = []
        self.phases, self.pairs, self.seen = Counter[str](), Counter[str](), Counter[str]()
        self.losses: list[dict[str, Any]] = []
        self.recoveries: list[float] = []

    def _of(self, rank: int) -> RankTraining:
        return RankTraining(**self.training, **self.sharding, rank=rank)

    @property
    def inside(self) -> int:
        """Kills inside an update, after which both ranks were recovered and compared."""
        return sum(self.phases[name] for name in INSIDE)

    @property
    def last(self) -> bool:
        """The next life only has to be compared."""
        found = self.inside + (self.left[:1] != [] and self.left[0] in INSIDE)
        return found >= self.spec["kills"] or time.monotonic() > self.spec["until"]

    def result(self) -> dict[str, Any]:
        return {
            **{name: value for name, value in self.spec.items() if name != "until"},
            "parameters": [plan.numel for plan in self.plans],
            "kills inside the update": self.inside,
            "phases": dict(self.phases),
            "pairs": dict(sorted(self.pairs.items())),
            "seen": dict(sorted(self.seen.items())),
            "iteration": self.iteration,
            "losses": self.losses,
            "recover_s": self.recoveries,
        }

    def run(self) -> None:
        while not self.last:
            self.one()
        self.one(last=True)

    def one(self, last: bool = False) -> None:
        """A life of both ranks, up to their end and what they left."""
        rng, first = self.rng, not self.updates
        target = 4 if first else 3  # the update that one is to die in; the first loads kernels
        kind = str(
            rng.choice(
                ["recovery", "anywhere", "update"], p=[IN_RECOVERY, ANYWHERE, 1 - IN_RECOVERY - ANYWHERE]
            )
        )
        kind = "last" if last else "update" if first else kind
        self.generation += 1
        ranks = self.lives(0 if last else target)
        self.decide(ranks)
        if kind == "recovery":  # or soon after
            self.killed(ranks, 0.05, 0.05, "killed around their recovery")
            return  # self.left is as it was: the next ones recover from what these found
        self.compared(ranks)
        if last:
            for child in ranks:
                child.channel.say(end=True)
            for r, child in enumerate(ranks):
                status = child.end()
                assert status == 0, f"the last trainer of rank {r} ended with status {status}"
            return
        for number in range(1, target):
            told = [child.hear() for child in ranks]
            assert all("settled_s" in x for x in told), f"nobody was killed, but {told} came"
            self.updates += [x["settled_s"] for x in told] if number > 1 else []
        usual = float(np.median(self.updates[-RECENT:]))
        victim = int(rng.integers(RANKS))
        order = [ranks[victim], *(child for child in ranks if child is not ranks[victim])]
        begin = 0.0 if kind == "anywhere" else order[0].noted(target) + float(rng.uniform(0, usual))
        how = "killed in an update" if kind == "update" else "killed anywhere"
        if kind == "anywhere":
            self.killed(order, 2 * usual, usual, how)
        else:
            time.sleep(max(0.0, begin - time.monotonic()))
            self.killed(order, 0.0, usual, how)
        self.judge.ahead(self.iteration + target)  # not beside the updates that are measured
        found = [left_behind(c, plan) for c, plan in zip(self.controls, self.plans, strict=True)]
        self.left = [found[victim][0], *(x[0] for r, x in enumerate(found) if r != victim)]
        apart = len({x[1] for x in found}) > 1
        progress(f"{self.label}: life {self.generation} left {' / '.join(self.left)}, {self.inside} done")
        self.seen["left in two iterations"] += apart
        if self.generation % LOSSES_EVERY == 0:
            r = self.generation // LOSSES_EVERY % RANKS
            count = 16 - len(self.losses) % 2
            self.losses.append(lose(self.controls[r], found[r][2], rng, count, poison=True))
            progress(f"{self.label}: rank {r} lost {self.losses[-1]['lost']} pages")

    def lives(self, updates: int) -> list[Child]:
        more = {"updates": updates, "store": str(self.folder / f"store-{self.generation}")}
        return [
            self.lane.next_life(
                control, {**self.training, **self.sharding, "rank": r}, self.generation, **more
            )
            for r, control in enumerate(self.controls)
        ]

    def decide(self, ranks: list[Child]) -> None:
        """One decision for all ranks, from all their summaries."""
        summaries = []
        for child in ranks:
            child.hear()  # it has attached
            summaries.append(bytes.fromhex(child.hear()["summary"]))
        decided = decide(summaries).hex()
        for child in ranks:
            child.channel.say(decision=decided)

    def compared(self, ranks: list[Child]) -> None:
        """What both recovered is compared; only now the kills before it count."""
        found = [child.hear() for child in ranks]
        (self.iteration,) = {x["iteration"] for x in found}
        path = self.judge.state(self.iteration)
        for child in ranks:
            child.channel.say(path=path)
        for child in ranks:
            assert child.hear()["exact"]
        self.phases[self.left[0] if self.left else "none"] += 1
        if self.left:
            self.pairs[" / ".join(self.left)] += 1
        self.left = []
        for x in found:
            self.seen[x["action"]] += 1
            self.seen["pages reconstructed"] += x["pages"]
            self.seen["recovered pages without a check"] += not x["verified"]
            self.recoveries.append(x["recover_s"])
        self.seen["compared"] += 1
        self.seen["ranks took different ways"] += len({x["action"] for x in found}) > 1
        self.tell(self.result())

    def killed(self, order: list[Child], first_s: float, then_s: float, how: str) -> None:
        """One after the other, each after a time drawn up to so many seconds."""
        for child, within in zip(order, (first_s, then_s), strict=True):
            time.sleep(float(self.rng.uniform(0, within)))
            signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
        for child in order:
            child.end()
        self.seen[how] += 1

    @property
    def label(self) -> str:
        return " ".join(str(self.spec[name]) for name in ("optimizer", "scheme", "state", "seed"))


def run(lane: Lane, spec: dict[str, Any], tell: Tell) -> None:
    """Kill ranks of one kind until enough of them were inside their update, or time is up."""
    if time.monotonic() > spec["until"]:
        return
    with folder("leto-ranks-", lane.warm.end_taken, "/dev/shm") as place, ExitStack() as stack:
        controls = []
        for r in range(RANKS):
            config = Place.config(32)
            name = f"ranks-{spec['seed']}"
            manager = stack.enter_context(spawn_manager(place / f"rank{r}", name, r, config, timeout_s=120.0))
            controls.append(stack.enter_context(Client.connect(manager.socket_path, timeout_s=120.0)))
            controls[-1].attach(Role.CONTROL, 0)
        killer = Killer(spec, lane, place, controls, tell)
        killer.run()
        killer.judge.end()


# --- the page -------------------------------------------------------------------------------------------
def total(jobs: list[Job]) -> tuple[bool, str]:
    """Whether as many kills as were wanted hit an update, and a sentence about it."""
    parts = []
    for job in jobs:
        got = 0 if job.result is None else job.result["kills inside the update"]
        parts.append(
            (got, job.spec["kills"], " ".join(job.spec[x] for x in ("optimizer", "scheme", "state")))
        )
    return done_of(parts)


def markdown(where: dict[str, str], jobs: list[Job]) -> str:
    results = [job.result for job in jobs if job.result is not None]
    done, sentence = total(jobs)
    wanted, got = sum(job.spec["kills"] for job in jobs), sum(r["kills inside the update"] for r in results)
    lines = [*head("Two ranks, killed inside the update", {"machine": where}, __file__)]
    lines += [f"{got} of {wanted} kills." if done else sentence, ""]
    for job in jobs:
        if job.error:
            lines += [f"**Failed**, {job.spec['optimizer']}, seed {job.spec['seed']}: {job.error}", ""]
    if not results:
        return "\n".join([*lines, "Nothing has been compared yet."])
    whole = max(r["parameters"][0] for r in results)
    lines += [
        f"Two processes train a model of {whole / 1e6:.2f} M parameters over a real state manager each, on",
        "one device, with gradients that they add up, a clip, a barrier and, sharded, a model that they",
        "gather by gloo. One is killed with SIGKILL at a random instant of its update, its peer soon after,",
        "and both are resumed by fresh processes. The state of both was compared bit for bit with one",
        "torch.optim (masters, moments, bf16 copy) before training went on; a kill counts when that is done.",
        "Phases are those of the rank that was killed first, and of its peer.",
        "",
        "| optimizer | scheme | state | seed | kills in the update | phases | ranks that took different ways "
        "| comparisons of both ranks, all exact | losses: times, pages | pages reconstructed "
        "| recovery, median |",
        "| --- | --- | --- | ---: | ---: | --- | ---: | ---: | --- | ---: | ---: |",
    ]
    for r in results:
        lost = f"{len(r['losses'])}, {sum(x['lost'] for x in r['losses'])}"
        pairs = ", ".join(f"{count} {pair}" for pair, count in r["pairs"].items())
        lines.append(
            f"| {r['optimizer']} | {r['scheme']} | {r['state']} | {r['seed']} "
            f"| {r['kills inside the update']} | {pairs} | {r['seen'].get('ranks took different ways', 0)} "
            f"| {r['seen']['compared']} | {lost} | {r['seen'].get('pages reconstructed', 0)} "
            f"| {1000 * float(np.median(r['recover_s'])):.1f} ms |"
        )
    how = next((r["losses"][0]["how"] for r in results if r["losses"]), "in no run")
    return "\n".join([*lines, "", f"Pages were lost {how}."])


def plan_of(arguments: argparse.Namespace) -> list[Job]:
    """Jobs of every optimizer, scheme and kind of state that is asked for, each with its seed."""
    kinds = itertools.product(arguments.schemes, arguments.states, arguments.optimizers)
    return [
        Job(
            {
                "optimizer": optimizer,
                "scheme": scheme,
                "state": state,
                "kills": arguments.kills,
                "seed": arguments.seed + k,
            }
        )
        for k, (scheme, state, optimizer) in enumerate(kinds)
    ]


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--kills", type=int, default=10, help="of each kind")
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--schemes", nargs="+", choices=SCHEMES, default=list(SCHEMES))
    parser.add_argument("--states", nargs="+", choices=STATES, default=list(STATES))
    parser.add_argument("--lanes", type=int, help="jobs side by side; default: 2 on a GPU, else 1")
    parser.add_argument("--seconds", type=float, default=240.0, help="no new kills after so many")
    parser.add_argument("--pool", type=int, default=4, help="children of a lane that are ready")
    smoke = {"kills": 1, "pool": 2, "lanes": 1, "optimizers": ["sgd"], "schemes": ["slots"]}
    arguments = parsed(parser, smoke)
    jobs, where, until = plan_of(arguments), machine(), time.monotonic() + arguments.seconds
    progress(f"seeds {jobs[0].spec['seed']} to {jobs[-1].spec['seed']}")
    for job in jobs:
        job.spec["until"] = until

    def page() -> tuple[dict[str, Any], str]:
        results = [job.result for job in jobs if job.result is not None]
        errors = {str(job.spec["seed"]): job.error for job in jobs if job.error}
        found = {"machine": where, "plan": total(jobs)[1], "runs": results, "errors": errors}
        return found, markdown(where, jobs)

    lanes = arguments.lanes or (2 if Place.on_gpu() else 1)
    in_lanes(jobs, lanes, run, TASKS, arguments.pool, lambda: keep(*page(), arguments.output))
    publish(*page(), arguments.output)
    if any(job.error for job in jobs):
        progress("failed, in part: see the page")
        return 1
    return 0 if total(jobs)[0] else 2


if __name__ == "__main__":
    sys.exit(main())
