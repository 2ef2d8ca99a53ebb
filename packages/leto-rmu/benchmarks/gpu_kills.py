"""SIGKILL of a training process inside its update on a GPU, again and again; resumed by a fresh process.

    python packages/leto-rmu/benchmarks/gpu_kills.py --seed 1 --output docs/benchmarks/rmu-kills-h200

A trainer attaches to memory of a state manager, recovers, is compared bit for bit with torch.optim on the
same GPU, trains two iterations, and is killed in the next one's update: at an instant drawn uniformly
from the time that this update takes, from when its gradients are protected until step() returns. (A device
ends what was issued up to 10 ms before it learns of the kill; later instants would find the update done.) A
few are killed in their recovery, or at any instant of an iteration. A kill counts when the marker that it
left is between PROTECTED and UPDATED, *and* the state that was recovered from there has been compared. After
every sixth life 15 or 16 pages are lost in every protection group, and one parity page of each on the host.

The page is written anew after every comparison; SIGTERM ends the script, and what was compared stays.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from proof_kills import INSIDE, Kills, do, pages
from proof_lab import (
    Channel,
    Child,
    Job,
    Judge,
    Lane,
    Place,
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

# Parts of a life, in their order. The killed process's end is not one: the next is ready meanwhile.
PARTS = {
    "ready_s": "a child gets ready, beside all else",
    "waited_s": "wait for it",
    "attach_s": "attach",
    "vote_s": "vote",
    "recover_s": "recover",
    "expected_s": "wait for the expected state",
    "compare_s": "compare",
    "update_s": "an update, from PROTECTED until all of it is issued",
    "settled_s": "the same until the device is done",
    "gone_s": "SIGKILL until the process is gone",
    "life_s": "all of a life",
}


def life(command: dict[str, Any], channel: Channel) -> None:
    """Recover, be compared, train, and be killed; after the last update wait for that."""
    training, client, up = open_training(command, channel)
    for number in range(1, command["updates"] + 1):
        training.begin(up)
        Place.settle()
        training.update(up, partial(channel.note, number))
        issued = time.monotonic()
        Place.settle()
        begun = channel.noted()[1]
        channel.say(update_s=issued - begun, settled_s=time.monotonic() - begun)
    if channel.hear() is not None:
        client.close()


TASKS = {"life": life, "oracle": oracle}


class Killer(Kills):
    """Trainers of one kind over one manager."""

    def __init__(self, spec: dict[str, Any], lane: Lane, folder: Path, control: Client, tell: Tell) -> None:
        super().__init__(spec, lane, tell)
        self.control = control
        self.plan = Training(**self.training).plan
        self.judge = Judge(lane.standing("oracle"), self.training, folder)
        self.spent: dict[str, list[float]] = {name: [] for name in PARTS}

    def result(self) -> dict[str, Any]:
        return {**super().result(), "parameters": self.plan.numel, "spent": self.spent}

    def one(self, last: bool = False) -> None:
        """A life, up to its end and what it left."""
        rng, begun = self.rng, time.monotonic()
        kind, target = self.drawn(last)
        self.generation += 1
        updates = 0 if last else target
        child = self.lane.next_life(self.control, self.training, self.generation, updates=updates)
        child.hear()
        if kind == "recovery":  # or soon after
            time.sleep(float(rng.uniform(0, 0.05)))
            self.killed(child, begun, "killed around its recovery")
            return  # self.left is as it was: the next one recovers from what this one found
        self.compared(child, self.recovered(child))
        if last:
            child.channel.say(end=True)
            status = child.end()
            assert status == 0, f"the last trainer ended with status {status}"
            return
        told = [child.hear() for _ in range(target - 1)]
        measured = [x["update_s"] for x in told]
        self.updates += measured[1:]
        for name in ("update_s", "settled_s"):
            self.spent[name] += [x[name] for x in told[1:]]
        usual = self.usual
        if kind == "anywhere":
            time.sleep(float(rng.uniform(0, 2 * usual)))
        else:
            self.wait_in_update(child, target, usual)
        self.killed(child, begun, "killed in an update" if kind == "update" else "killed anywhere")
        self.judge.ahead(self.iteration + target)  # not beside the updates that are measured
        self.left, iteration, groups = left_behind(self.control, self.plan)
        self.goes_on_at = goes_on_at(self.left, iteration)
        progress(f"{self.label}: life {self.generation} left {self.left}, {self.inside} done")
        if self.spec["losses"] and self.generation % self.spec["losses"] == 0:
            self.lose_pages(self.control, groups)

    def recovered(self, child: Child) -> dict[str, Any]:
        found = child.hear()
        self.went_on(found["iteration"])
        if self.generation > 1:
            self.spent["ready_s"].append(child.ready_s)
            self.spent["waited_s"].append(child.waited_s)
            for name in ("attach_s", "vote_s", "recover_s"):
                self.spent[name].append(found[name])
        return found

    def compared(self, child: Child, found: dict[str, Any]) -> None:
        """What the child recovered is compared; only now the kill before it counts."""
        begun = time.monotonic()
        path = self.judge.state(self.iteration)
        expected_s = time.monotonic() - begun
        child.channel.say(path=path)
        told = child.hear()
        assert told["exact"]
        if self.generation > 1:
            self.spent["expected_s"].append(expected_s)
            self.spent["compare_s"].append(told["compare_s"])
        self.counted()
        self.seen[found["action"]] += 1
        self.seen["pages reconstructed"] += found["pages"]
        self.seen["recovered pages without a check"] += not found["verified"]
        self.tell(self.result())

    def killed(self, child: Child, begun: float, how: str) -> None:
        self.spent["gone_s"].append(child.kill())
        self.spent["life_s"].append(time.monotonic() - begun)
        self.seen[how] += 1


def run(lane: Lane, spec: dict[str, Any], tell: Tell) -> None:
    """Kill trainers of one kind until enough of them were inside their update, or time is up."""
    if time.monotonic() > spec["until"]:
        return
    config = Training(spec["seed"], spec["optimizer"], spec["scheme"]).plan.config
    with (
        folder("leto-kills-", lane.warm.end_taken, "/dev/shm") as place,
        spawn_manager(place / "rank0", f"kills-{spec['seed']}", 0, config, timeout_s=120.0) as manager,
        Client.connect(manager.socket_path, timeout_s=120.0) as control,
    ):
        control.attach(Role.CONTROL, 0)
        killer = Killer(spec, lane, place, control, tell)
        killer.run()
        killer.judge.end()


# --- the page -------------------------------------------------------------------------------------------
def total(jobs: list[Job]) -> tuple[bool, str]:
    """Whether as many kills as were wanted hit an update, and a sentence about it."""
    parts = []
    kinds = [(job.spec["optimizer"], job.spec["scheme"]) for job in jobs]
    for optimizer, scheme in dict.fromkeys(kinds):
        mine = [job for job, kind in zip(jobs, kinds, strict=True) if kind == (optimizer, scheme)]
        wanted = sum(job.spec["kills"] for job in mine)
        got = sum(job.result["kills inside the update"] for job in mine if job.result is not None)
        parts.append((got, wanted, f"kills with {optimizer} ({scheme})"))
    return done_of(parts)


def markdown(where: dict[str, str], jobs: list[Job]) -> str:
    results = [job.result for job in jobs if job.result is not None]
    lines = [*head("Killed inside the update", {"machine": where}, __file__), total(jobs)[1], ""]
    for job in jobs:
        if job.error:
            lines += [f"**Failed**, seed {job.spec['seed']}: {job.error}", ""]
    if not results:
        return "\n".join([*lines, "Nothing has been compared yet."])
    lines += [
        f"Trainers of {results[0]['parameters'] / 1e6:.2f} M parameters over a real state manager, killed",
        "with SIGKILL at random instants of the update and resumed by fresh processes. Every resumed state",
        "was compared bit for bit with torch.optim (masters, moments, bf16 copy) before training went on;",
        "a kill counts when that is done.",
        "",
        "| optimizer | scheme | seed | kills in the update | PROTECTED / SYNCED / UPDATED | other kills "
        "| comparisons, all exact | losses: times, pages | pages reconstructed | recovery, median |",
        "| --- | --- | ---: | ---: | --- | ---: | ---: | --- | ---: | ---: |",
    ]
    for r in results:
        lost = f"{len(r['losses'])}, {sum(x['lost'] for x in r['losses'])}"
        marks = " / ".join(str(r["phases"].get(name, 0)) for name in INSIDE)
        inside, seen = r["kills inside the update"], r["seen"]
        elsewhere = sum(count for how, count in seen.items() if how.startswith("killed")) - inside
        lines.append(
            f"| {r['optimizer']} | {r['scheme']} | {r['seed']} | {inside} | {marks} | {elsewhere} "
            f"| {seen['compared']} | {lost} | {seen.get('pages reconstructed', 0)} "
            f"| {middle(r['spent']['recover_s'])} |"
        )
    lines += ["", "Where the time of lives went, over all runs:", "", "| part | median | 90 % | times |"]
    lines.append("| --- | ---: | ---: | ---: |")
    for name, what in PARTS.items():
        times = [x for r in results for x in r["spent"][name]]
        if times:
            lines.append(
                f"| {what} | {middle(times)} | {1000 * np.quantile(times, 0.9):.1f} ms | {len(times)} |"
            )
    how = next((r["losses"][0]["how"] for r in results if r["losses"]), "in no run")
    return "\n".join([*lines, "", f"Pages were lost {how}."])


def middle(times: list[float]) -> str:
    return f"{1000 * float(np.median(times)):.1f} ms" if times else ""


def plan_of(arguments: argparse.Namespace) -> list[Job]:
    """Runs, the most important ones first."""
    runs = 1 if arguments.smoke else arguments.runs
    wanted = [("adamw", arguments.scheme, -(-arguments.kills // runs))] * runs
    if arguments.others:
        wanted += [(name, arguments.scheme, arguments.others) for name in ("sgd", "muon")]
        wanted += [("adamw", "undo", arguments.others)] * (arguments.scheme != "undo")
    return [
        Job(
            {
                "optimizer": name,
                "scheme": scheme,
                "kills": kills,
                "seed": arguments.seed + k,
                "losses": arguments.losses,
            }
        )
        for k, (name, scheme, kills) in enumerate(wanted)
    ]


def main() -> int:
    parser = command_line(__doc__)
    parser.add_argument("--kills", type=int, default=200, help="of AdamW, in all runs together")
    parser.add_argument("--runs", type=int, default=4, help="of AdamW, each with its seed")
    parser.add_argument("--others", type=int, default=10, help="kills with SGD, with Muon and with undo")
    parser.add_argument("--lanes", type=int, help="runs side by side; default: 3 on a GPU, else a core each")
    parser.add_argument("--seconds", type=float, default=80.0, help="no new kills after so many")
    parser.add_argument("--scheme", default="slots")
    parser.add_argument("--pool", type=int, default=3, help="children of a lane that are ready")
    parser.add_argument("--losses", type=int, default=6, help="lose pages after so many lives; 0: never")
    parser.add_argument("--one", help="one run: its specification as JSON")
    smoke = {"kills": 1, "others": 1, "pool": 2, "losses": 1, "seconds": 8.0, "lanes": 1}
    arguments = parsed(parser, smoke)
    jobs = [Job(json.loads(arguments.one))] if arguments.one else plan_of(arguments)
    progress(f"seeds {jobs[0].spec['seed']} to {jobs[-1].spec['seed']}")
    page = pages(machine(), jobs, total, markdown)
    if not do(arguments, jobs, run, TASKS, page, on_gpu=3):
        return 1
    return 0 if total(jobs)[0] or arguments.smoke else 2


if __name__ == "__main__":
    sys.exit(main())
