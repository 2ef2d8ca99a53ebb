"""SIGKILL of one of two ranks inside their update, its peer after it; both resumed by fresh processes.

    python packages/leto-rmu/benchmarks/gpu_ranks.py --seed 1 --output docs/benchmarks/rmu-ranks-h200

Two processes train one model over a state manager each, on one GPU. Their gradients are added up, and
their clip is that of the largest gradient of all. The state is *sharded*: each rank has a part of every
kind (AdamW and SGD: cut in the middle of a tensor; Muon: whole matrices) and passes its part of the model,
in bf16, to the other; or it is *unsharded*: each rank has all of it. Gradients depend on the model: a rank
that goes on with another model than its peer is found by the comparison after the next update.

A rank is killed at an instant drawn from the time that its update takes, the other one after a time drawn
likewise. Two of five times the first one is late between the barrier and its mark: its peer has marked
then that all are synchronized, and may be through with its update. Fresh processes attach, one decision is
made for both, both recover, and the state of each is compared bit for bit with that of one torch.optim
with all of it, on the same GPU; the iteration has to be the one that the marks say. A kill counts when the
marker of the rank that was killed first is between PROTECTED and UPDATED, and both ranks have been
compared. One life in twenty ends at any instant after its second update. One in ten ends in its recovery,
half of these with one rank killed before it hears of the decision that the other follows. About every
second time the ranks in turns lose 15 or 16 pages in every protection group, and a parity page of each on
the host.

The ranks talk through gloo and host memory: NCCL takes no two ranks on one GPU. What is proven here is
what their state goes through; what NCCL does with killed ranks is seen in leto-megatron's tests on two
GPUs. That no rank may write before all have protected their gradients is tested elsewhere
(`test_ranks.py`).

The page is written anew after every comparison; SIGTERM ends the script, and what was compared stays.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
import os
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
from proof_kills import RECENT, Kills, do, pages
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
    goes_on_at,
    head,
    left_behind,
    machine,
    open_training,
    oracle,
    parsed,
    progress,
)

from leto_rmp import Client, Role, spawn_manager
from leto_rmu import ResumableUpdater, SyncResult, decide

RANKS = 2
OPTIMIZERS, SCHEMES, STATES = ("adamw", "sgd", "muon"), ("slots", "undo"), ("sharded", "unsharded")
LOSSES_EVERY = 2
LATE = 0.4  # share of the kills in an update, of a rank that is late between the barrier and its mark
LATE_S = 0.06
COLLECTIVE_S = 30.0
# What is counted, beside actions and ends.
ONE_SIDED = "finished by the peer's result"
REBUILT, UNCHECKED = "pages reconstructed", "recovered pages without a check"
IN_RECOVERY = {False: "killed in recovery", True: "killed in recovery, one before it"}


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
        self.rank, self.late_s = rank, 0.0
        self.group: Group | None = None
        sizes = {s.name: s.numel for s in self.whole.segments}
        self.numel = sum(sizes.values())
        self.owned = [pieces_of(sizes, r, self.muon) for r in range(RANKS)] if sharded else []
        """What each rank has of every segment; of a state that is not sharded, nothing is anybody's own."""
        if sharded:
            self.pieces = self.owned[rank]
            groups = {s.name: s.group for s in self.whole.segments}
            kinds = {name: (numel, groups[name]) for name, (_, numel) in self.pieces.items()}
            self.plan = self._plan(kinds, self.numel)
            owned = sum(numel for pieces in self.owned for _, numel in pieces.values())
            assert owned == self.numel, f"the ranks have {owned} elements of {self.numel}"

    def joined(self) -> Group:
        assert self.group is not None, "this process is no rank of a group"
        return self.group

    def barrier(self) -> None:
        """A rank may be late after it; others go on meanwhile, and mark that all are synchronized."""
        self.joined().barrier()
        time.sleep(self.late_s)

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
        self.hand_out(total, up.grads)

    def hand_out(self, total: torch.Tensor, grads: torch.Tensor) -> None:
        """Put what the plan has of the gradients of the model, in any type, where the plan has them."""
        for s in self.plan.segments:
            grads[s.grad_offset : s.grad_offset + s.numel].copy_(total[self.model_slice(s.name)])

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
        found = torch.zeros(self.rank.plan.grad_numel, dtype=torch.bfloat16, device=Place.device)
        self.rank.hand_out(torch.add(*parts), found)
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
            training.late_s = command["late_s"] if number == command["updates"] else 0.0
            training.update(up, partial(channel.note, number))
            Place.settle()
            channel.say(settled_s=time.monotonic() - channel.noted()[1])
    except PeerGoneError as error:
        channel.say(peer_gone=str(error))
    if channel.hear() is not None:
        client.close()


TASKS = {"life": life, "oracle": partial(oracle, make=JobReference)}


class Killer(Kills):
    """Two ranks over a manager each."""

    IN_RECOVERY, ANYWHERE = 0.1, 0.05

    def __init__(
        self, spec: dict[str, Any], lane: Lane, folder: Path, controls: list[Client], tell: Tell
    ) -> None:
        super().__init__(spec, lane, tell)
        self.folder, self.controls = folder, controls
        self.sharding = {"sharded": spec["state"] == "sharded"}
        ranks = [RankTraining(**self.training, **self.sharding, rank=r) for r in range(RANKS)]
        self.plans, self.numel = [rank.plan for rank in ranks], ranks[0].numel
        self.judge = Judge(lane.standing("oracle"), self.training, folder)
        self.pairs = Counter[str]()
        self.both = ""  # as ``left``, with the peer's
        self.one_sided = False  # of what was left: only the peer had a result to go on with
        self.recoveries: list[float] = []

    def result(self) -> dict[str, Any]:
        more = {"parameters": self.numel, "pairs": dict(sorted(self.pairs.items()))}
        return {**super().result(), **more, "recover_s": self.recoveries}

    def one(self, last: bool = False) -> None:
        """A life of both ranks, up to their end and what they left."""
        rng = self.rng
        kind, target = self.drawn(last)
        self.generation += 1
        victim = int(rng.integers(RANKS))
        late = kind == "update" and bool(rng.random() < LATE)
        ranks = self.lives(0 if last else target, victim if late else None)
        order = [ranks[victim], *(child for child in ranks if child is not ranks[victim])]
        if kind == "recovery":
            self.killed_in_recovery(ranks, order)
            return  # what was left is as it was: the next ones recover from what these made of it
        self.decide(ranks, ranks)
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
        usual = self.usual
        if kind == "anywhere":
            self.killed(order, 2 * usual, usual, "killed anywhere")
        else:
            within = usual + (LATE_S if late else 0.0)
            self.wait_in_update(order[0], target, within)
            self.killed(order, 0.0, usual, "killed late" if late else "killed in an update")
        self.judge.ahead(self.iteration + target)  # not beside the updates that are measured
        self.look(victim)

    def look(self, victim: int) -> None:
        """What both have left; now and then one of them loses pages of it."""
        found = [left_behind(c, plan) for c, plan in zip(self.controls, self.plans, strict=True)]
        phases = [found[victim][0], *(x[0] for r, x in enumerate(found) if r != victim)]
        self.left, self.both = phases[0], " / ".join(phases)
        ways = [goes_on_at(phase, iteration) for phase, iteration, _ in found]
        self.goes_on_at = max(ways)
        self.one_sided = any(
            phase == "PROTECTED" and at < self.goes_on_at
            for (phase, _, _), at in zip(found, ways, strict=True)
        )
        progress(f"{self.label}: life {self.generation} left {self.both}, {self.inside} done")
        if self.generation % LOSSES_EVERY == 0:
            r = self.generation // LOSSES_EVERY % RANKS
            self.lose_pages(self.controls[r], found[r][2], f"rank {r}: ")

    def lives(self, updates: int, late: int | None) -> list[Child]:
        """Processes of all ranks; ``late``: the one that is, in the last update."""
        more = {"updates": updates, "store": str(self.folder / f"store-{self.generation}")}
        return [
            self.lane.next_life(
                control,
                {**self.training, **self.sharding, "rank": r},
                self.generation,
                late_s=LATE_S if r == late else 0.0,
                **more,
            )
            for r, control in enumerate(self.controls)
        ]

    def decide(self, ranks: list[Child], told: list[Child]) -> None:
        """One decision for all ranks, from all their summaries; those of ``told`` hear of it."""
        summaries = []
        for child in ranks:
            child.hear()  # it has attached
            summaries.append(bytes.fromhex(child.hear()["summary"]))
        decided = decide(summaries).hex()
        for child in told:
            child.channel.say(decision=decided)

    def compared(self, ranks: list[Child]) -> None:
        """What both recovered is compared; only now the kills before it count."""
        found = [child.hear() for child in ranks]
        for x in found:
            self.went_on(x["iteration"])
        path = self.judge.state(self.iteration)
        for child in ranks:
            child.channel.say(path=path)
        for child in ranks:
            assert child.hear()["exact"]
        if self.left:
            self.pairs[self.both] += 1
            self.seen[ONE_SIDED] += self.one_sided
        self.counted()
        for x in found:
            self.seen[x["action"]] += 1
            self.seen[REBUILT] += x["pages"]
            self.seen[UNCHECKED] += x["pages"] > 0 and not x["verified"]
            self.recoveries.append(x["recover_s"])
        self.tell(self.result())

    def killed_in_recovery(self, ranks: list[Child], order: list[Child]) -> None:
        """Both, around the time that it takes; or one of them before it hears what both are to do."""
        takes = float(np.median(self.recoveries[-RECENT:]))
        alone = bool(self.rng.random() < 0.5)
        self.decide(ranks, order[:1] if alone else order)
        self.killed(order, 2 * takes, takes, IN_RECOVERY[alone])

    def killed(self, order: list[Child], first_s: float, then_s: float, how: str) -> None:
        """One after the other, each after a time drawn up to so many seconds; nobody may have failed."""
        for child, within in zip(order, (first_s, then_s), strict=True):
            time.sleep(float(self.rng.uniform(0, within)))
            child.signal()
        for child in order:
            said = child.killed()
            errors = [x for x in said if "error" in x or ("peer_gone" in x and child is order[0])]
            assert not errors, f"a rank was to be killed, but had failed before: {errors}"
        self.seen[how] += 1


def run(lane: Lane, spec: dict[str, Any], tell: Tell) -> None:
    """Kill ranks of one kind until enough of them were inside their update, or time is up."""
    if time.monotonic() > spec["until"]:
        return
    config = Training(spec["seed"], spec["optimizer"], spec["scheme"]).plan.config
    with folder("leto-ranks-", lane.warm.end_taken, "/dev/shm") as place, ExitStack() as stack:
        controls = []
        for r in range(RANKS):
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
    lines += [f"{got} of {wanted} kills inside an update." if done else sentence, ""]
    for job in jobs:
        if job.error:
            lines += [f"**Failed**, {job.spec['optimizer']}, seed {job.spec['seed']}: {job.error}", ""]
    if not results:
        return "\n".join([*lines, "Nothing has been compared yet."])
    numel = results[0]["parameters"]
    lines += [
        f"Two processes train a model of {numel / 1e6:.2f} M parameters over a real state manager each, on",
        "one device; by gloo they add up their gradients, clip them, meet at a barrier and, sharded,",
        "gather the model. One is killed with SIGKILL at a random instant of its update, its peer",
        f"soon after; two of five times the first is held for {1000 * LATE_S:.0f} ms between the barrier and",
        "its mark. Both are resumed by fresh processes, which one decision tells what to do. All of the",
        "state of both was compared bit for bit with one torch.optim (masters, moments, bf16 copy; the",
        "job's state too) before training went on. A kill counts when that is done, if the marker of the",
        "rank that was killed first is between PROTECTED and UPDATED. Phases, those of kills outside an",
        "update too, are of that rank and of its peer, which may be an iteration further. Where one was",
        "left at PROTECTED and the other beyond, the first is finished by the other's result, from",
        "gradients that its parity protects.",
        "",
        "| optimizer | scheme | state | seed | kills in the update | phases "
        "| one finished by the other's result | killed in recovery: both, one before it "
        "| comparisons of both ranks, all exact | losses: times, pages "
        "| pages reconstructed, without a check | recovery, median |",
        "| --- | --- | --- | ---: | ---: | --- | ---: | ---: | ---: | --- | --- | ---: |",
    ]
    for r in results:
        lost = f"{len(r['losses'])}, {sum(x['lost'] for x in r['losses'])}"
        pairs = ", ".join(f"{count} {pair}" for pair, count in r["pairs"].items())
        seen = Counter(r["seen"])
        lines.append(
            f"| {r['optimizer']} | {r['scheme']} | {r['state']} | {r['seed']} "
            f"| {r['kills inside the update']} | {pairs} | {seen[ONE_SIDED]} "
            f"| {seen[IN_RECOVERY[False]]}, {seen[IN_RECOVERY[True]]} | {seen['compared']} | {lost} "
            f"| {seen[REBUILT]}, {seen[UNCHECKED]} times | {1000 * float(np.median(r['recover_s'])):.1f} ms |"
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
    parser.add_argument("--lanes", type=int, help="jobs side by side; default: 2 on a GPU, else a core each")
    parser.add_argument("--seconds", type=float, default=240.0, help="no new kills after so many")
    parser.add_argument("--pool", type=int, default=4, help="children of a lane that are ready")
    parser.add_argument("--one", help="one job: its specification as JSON")
    smoke = {"kills": 1, "pool": 2, "lanes": 1, "optimizers": ["sgd"], "schemes": ["slots"]}
    arguments = parsed(parser, smoke)
    jobs = [Job(json.loads(arguments.one))] if arguments.one else plan_of(arguments)
    progress(f"seeds {jobs[0].spec['seed']} to {jobs[-1].spec['seed']}")
    page = pages(machine(), jobs, total, markdown)
    if not do(arguments, jobs, run, TASKS, page, on_gpu=2):
        return 1
    return 0 if total(jobs)[0] else 2


if __name__ == "__main__":
    sys.exit(main())
