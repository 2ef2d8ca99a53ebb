"""SIGKILL of a training process inside its update on a GPU, again and again; resumed by a fresh process.

    python packages/leto-rmu/benchmarks/gpu_kills.py --seed 1 --output docs/benchmarks/rmu-kills-h200

A trainer attaches to memory of a state manager, recovers, is compared bit for bit with torch.optim on the
same GPU, trains one iteration, and is killed at a random instant of the next one's update, or of its own
recovery. A kill counts when the marker that it left is between PROTECTED and UPDATED. After every fourth
one 15 or 16 pages are lost in every protection group, and one parity page of each on the host.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from proof_lab import (
    Channel,
    Judge,
    Place,
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

INSIDE = ("PROTECTED", "SYNCED", "UPDATED")


def life(command: dict[str, Any], channel: Channel) -> None:
    """Recover, be compared, train, and be killed."""
    training, client, up = open_training(command, channel)
    spent = 0.0
    for _ in range(command["iterations"]):
        training.begin(up)
        Place.settle()
        channel.say(updating=up.iteration, last_s=spent)
        begun = time.perf_counter()
        training.update(up)
        Place.settle()
        spent = time.perf_counter() - begun
    channel.say(ended=up.iteration)
    client.close()


def run(spec: dict[str, Any], folder: Path) -> dict[str, Any]:
    """Kill trainers of one kind until enough of them were inside their update, or time is up."""
    seed, losing = spec["seed"], spec["losses"]
    rng, seen, phases = np.random.default_rng(seed), Counter(), Counter()
    training = {name: spec[name] for name in ("seed", "optimizer", "scheme")}
    plan = Training(**training).plan
    config = plan.config
    losses, attach, recover, gone = [], [], [], []
    label = f"{spec['optimizer']} {spec['scheme']} {seed}"
    generation, inside, again = 0, 0, False
    with (
        spawn_manager(folder / "rank0", f"kills-{seed}", 0, config, timeout_s=120.0) as manager,
        Client.connect(manager.socket_path, timeout_s=120.0) as control,
        Warm({"life": life, "oracle": oracle, "look": look}, spec["pool"]) as warm,
    ):
        control.attach(Role.CONTROL, 0)
        common = {"training": training, "socket": str(manager.socket_path)}
        judge = Judge(warm.take(), training, folder)
        begun = time.monotonic()  # a child is up
        while True:
            last = inside >= spec["kills"] or time.monotonic() - begun > spec["seconds"]
            generation += 1
            child = warm.take()
            child.begin("life", **common, generation=generation, iterations=1 if last else 50)
            found = child.hear()
            if generation > 1 and found["recovering"] in INSIDE:
                # One that died while it recovered left what it had found: no further kill in an update.
                inside += not again
                seen["interrupted recoveries"] += again
                phases[found["recovering"]] += not again
            again = False
            if rng.random() < 0.1 and generation > 1 and not last:  # in its recovery, or soon after
                time.sleep(float(rng.uniform(0, 0.05)))
                gone.append(child.kill())
                seen["killed around its recovery"] += 1
                again = True
                continue
            found = child.hear()
            if generation > 1:
                attach.append(found["attach_s"])
                recover.append(found["recover_s"])
            seen[found["action"]] += 1
            seen["pages reconstructed"] += found["pages"]
            seen["recovered pages without a check"] += not found["verified"]
            child.channel.say(path=judge.state(found["iteration"]))
            judge.ahead(found["iteration"] + 2)
            child.hear()
            seen["compared"] += 1
            child.hear()  # it updates, for the first time
            if last:
                child.hear()
                status = child.end()
                assert status == 0, f"the last trainer ended with status {status}"
                break
            duration = child.hear()["last_s"]
            time.sleep(float(rng.uniform(0, duration)))
            gone.append(child.kill())
            seen["killed in or after an update"] += 1
            progress(f"{label}: life {generation} killed from iteration {found['iteration']} on, {inside} in")
            if losing and generation % losing == 0:
                generation += 1
                child = warm.take()
                child.begin("look", **common, generation=generation)
                groups = child.hear()["groups"]
                child.end()
                losses.append(lose(control, groups, rng, 16 - len(losses) % 2, poison=True))
                progress(f"{label}: {losses[-1]['lost']} pages lost")
        judge.end()
    return {
        **spec,
        "parameters": plan.numel,
        "kills inside the update": inside,
        "phases": dict(phases),
        "seen": dict(sorted(seen.items())),
        "iteration": found["iteration"],
        "losses": losses,
        "attach_s": attach,
        "recover_s": recover,
        "gone_s": gone,
        "took_s": time.monotonic() - begun,
    }


def markdown(where: dict[str, str], results: list[dict[str, Any]]) -> str:
    lines = head("Killed inside the update", {"machine": where}, __file__)
    lines += [
        f"Trainers of {results[0]['parameters'] / 1e6:.2f} M parameters over a real state manager, killed",
        "with SIGKILL at random instants of the update and resumed by fresh processes. Every resumed state",
        "was compared bit for bit with torch.optim (masters, moments, bf16 copy) before training went on.",
        "",
        "| optimizer | scheme | seed | kills in the update | PROTECTED / SYNCED / UPDATED "
        "| comparisons, all exact | losses: times, pages | pages reconstructed | recovery, median |",
        "| --- | --- | ---: | ---: | --- | ---: | --- | ---: | ---: |",
    ]
    for r in results:
        lost, middle = sum(x["lost"] for x in r["losses"]), 1000 * float(np.median(r["recover_s"]))
        marks = " / ".join(str(r["phases"].get(name, 0)) for name in INSIDE)
        lines.append(
            f"| {r['optimizer']} | {r['scheme']} | {r['seed']} | {r['kills inside the update']} | {marks} "
            f"| {r['seen']['compared']} | {len(r['losses'])}, {lost} "
            f"| {r['seen'].get('pages reconstructed', 0)} | {middle:.1f} ms |"
        )
    lines += [
        "",
        total(results)[1],
        "",
        "Pages were lost " + (results[0]["losses"] or [{"how": "in no run"}])[0]["how"] + ".",
    ]
    return "\n".join(lines)


def total(results: list[dict[str, Any]]) -> tuple[bool, str]:
    """Whether as many kills as were wanted hit an update, and a sentence about it."""
    parts, enough = [], True
    for optimizer, scheme in dict.fromkeys((r["optimizer"], r["scheme"]) for r in results):
        runs = [r for r in results if (r["optimizer"], r["scheme"]) == (optimizer, scheme)]
        wanted, got = sum(r["kills"] for r in runs), sum(r["kills inside the update"] for r in runs)
        enough = enough and got >= wanted
        parts.append(f"{got} of {wanted} with {optimizer} ({scheme})")
    found = f"Kills inside an update: {', '.join(parts)}."
    return enough, found if enough else found + " **Fewer than planned**: time was up."


def main() -> None:
    parser = command_line(__doc__)
    parser.add_argument("--kills", type=int, default=200, help="of AdamW, in all runs side by side")
    parser.add_argument("--runs", type=int, default=2, help="of AdamW side by side, each with its seed")
    parser.add_argument("--others", type=int, default=20, help="kills with SGD, with Muon and with undo")
    parser.add_argument("--seconds", type=float, default=80.0, help="stop before that many kills")
    parser.add_argument("--scheme", default="slots")
    parser.add_argument("--pool", type=int, default=5)
    parser.add_argument("--losses", type=int, default=6, help="lose pages after so many lives")
    parser.add_argument("--one", help="one run: its specification as JSON; prints its result as JSON")
    arguments = parsed(parser, {"kills": 1, "others": 1, "pool": 2, "losses": 1, "seconds": 8.0})
    if arguments.one:
        with tempfile.TemporaryDirectory(prefix="leto-kills-", dir="/dev/shm") as folder:
            print(json.dumps(run(json.loads(arguments.one), Path(folder))))
        return
    side_by_side = 1 if arguments.smoke else arguments.runs
    wanted = [("adamw", arguments.scheme, -(-arguments.kills // side_by_side))] * side_by_side
    if arguments.others:
        wanted += [(name, arguments.scheme, arguments.others) for name in ("sgd", "muon")]
        wanted += [("adamw", "undo", arguments.others)] * (arguments.scheme != "undo")
    common = {name: getattr(arguments, name) for name in ("seconds", "pool", "losses")}
    specs = [
        {"optimizer": name, "scheme": scheme, "kills": kills, "seed": arguments.seed + k, **common}
        for k, (name, scheme, kills) in enumerate(wanted)
    ]
    progress(f"seeds {arguments.seed} to {arguments.seed + len(specs) - 1}")
    command = [sys.executable, __file__, "--device", arguments.device, "--one"]
    running = [subprocess.Popen([*command, json.dumps(s)], stdout=subprocess.PIPE, text=True) for s in specs]
    answers = [process.communicate()[0] for process in running]
    failed = [spec for spec, process in zip(specs, running, strict=True) if process.returncode]
    if failed:
        raise SystemExit(f"failed, see above; repeat with {command[-2:]} {json.dumps(failed[0])!r}")
    results = [json.loads(answer.strip().splitlines()[-1]) for answer in answers]
    publish({"machine": machine(), "runs": results}, markdown(machine(), results), arguments.output)
    if not total(results)[0] and not arguments.smoke:
        raise SystemExit("time was up before as many kills as were wanted had hit an update")


if __name__ == "__main__":
    main()
