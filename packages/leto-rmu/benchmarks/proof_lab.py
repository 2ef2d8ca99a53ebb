"""What the proof scripts on a GPU share: a deterministic training, its reference, tasks of its processes.

With ``--device cpu`` a script runs over the host backend; with ``--smoke`` it takes every path of its code,
as few times as it can. Processes are in `proof_children`, the command line and the page in `proof_place`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from proof_children import DEADLINE_S, Channel, Child, Job, Lane, Tell, Warm, in_lanes
from proof_place import (
    Place,
    command_line,
    done_of,
    folder,
    head,
    keep,
    machine,
    parsed,
    progress,
    publish,
)

from leto_rmp import Client, PageRef, Role
from leto_rmu import (
    SGD,
    Action,
    AdamW,
    Hyper,
    Muon,
    Op,
    ResumableUpdater,
    Segment,
    SyncResult,
    UpdatePlan,
    decide,
)
from leto_rmu.faults import TearAndKill
from leto_rmu.geometry import Rotation
from leto_rmu.marker import Marker
from leto_rmu.regions import MARKER
from leto_rmu.views import indices

__all__ = [
    "DEADLINE_S",
    "Channel",
    "Child",
    "Job",
    "Judge",
    "Lane",
    "Place",
    "Reference",
    "Tell",
    "Torn",
    "Training",
    "Warm",
    "command_line",
    "compare",
    "done_of",
    "folder",
    "goes_on_at",
    "head",
    "in_lanes",
    "keep",
    "left_behind",
    "logical_groups",
    "lose",
    "machine",
    "open_training",
    "oracle",
    "parsed",
    "progress",
    "publish",
]

KEPT = 8  # expected states


class Torn(TearAndKill):
    """A random part of the bytes in the n-th operation of one of the names, then SIGKILL."""

    def __init__(self, names: tuple[str, ...], count: int, seed: int) -> None:
        super().__init__(match=self._counted, seed=seed)
        self._names, self._left = names, count

    def _counted(self, op: Op) -> bool:
        self._left -= op.name in self._names
        return self._left < 0


# --- a training whose every bit is a function of the seed and the iteration -----------------------------
class Training:
    """One rank: three groups of at most 30 pages, segments that begin and end inside pages."""

    def __init__(self, seed: int, optimizer: str = "adamw", scheme: str = "slots") -> None:
        self.seed = seed
        muon, gpu = optimizer == "muon", Place.on_gpu()
        self.optimizer: Any = {"adamw": AdamW, "sgd": SGD, "muon": lambda: Muon(AdamW())}[optimizer]()
        a, c = ((3000, 2000), (2500, 2800)) if gpu else ((250, 188), (200, 270))
        b, d = (2_333_331, 77_777) if gpu else (18_229, 607)
        self._shapes = {"a": a, "c": c} if muon else {}
        self._scheme = scheme
        sizes = {"a": (a[0] * a[1], 0), "b": (b, 1), "c": (c[0] * c[1], 0), "d": (d, 1)}
        self.whole = self.plan = self._plan(sizes)
        self.pieces = {name: (0, numel) for name, (numel, _) in sizes.items()}
        """Of every segment of ``whole`` that ``plan`` has something of: the first element, and how many."""
        self.model_at = dict(zip(sizes, accumulate((n for n, _ in sizes.values()), initial=0), strict=False))
        self.sgd, self.muon = optimizer == "sgd", muon

    def _plan(self, sizes: dict[str, tuple[int, int]], model_numel: int | None = None) -> UpdatePlan:
        """``sizes``: elements and hyperparameter group of every segment; ``model_numel``: of the model."""
        segments, at = [], 3
        for name, (numel, group) in sizes.items():
            segments.append(Segment(name, numel, group, at, shape=self._shapes.get(name)))
            at += numel + 5
        return UpdatePlan(
            segments,
            self.optimizer,
            config=Place.config(32),
            grad_numel=at,
            grad_dtype=torch.bfloat16,
            model_bytes=2 * (model_numel or sum(numel for numel, _ in sizes.values())),
            job_state_bytes=4096,
            scheme=self._scheme,  # type: ignore[arg-type]
        )

    def _random(self, numel: int, *key: int) -> torch.Tensor:
        word = self.seed
        for part in key:
            word = (word * 1_000_003 + part) % (1 << 62)
        return torch.randn(numel, generator=Place.generator(word), device=Place.device)

    def gradient(self, t: int) -> torch.Tensor:
        return self._random(self.plan.grad_numel, 1, t).to(self.plan.grad_dtype)

    def initial(self, name: str) -> torch.Tensor:
        at, segment = self.whole.offsets[name]
        first, behind = self.bounds(name)
        return self._random(segment.numel, 2, at)[first:behind]

    def bounds(self, name: str) -> tuple[int, int]:
        """First element of a segment of ``whole`` that ``plan`` has, and the first one behind it."""
        first, numel = self.pieces[name]
        return first, first + numel

    def hypers(self, t: int) -> list[Hyper]:
        lr = 0.01 * (1 + t % 7) / 7
        rest = Hyper(lr / 2, momentum=0.9, weight_decay=0.1) if self.sgd else Hyper(lr / 2, betas=(0.9, 0.95))
        if self.muon:
            return [Hyper.muon(lr), rest]
        return [Hyper(lr, momentum=0.9) if self.sgd else Hyper(lr, betas=(0.9, 0.95), weight_decay=0.1), rest]

    def sync(self, t: int) -> SyncResult:
        return SyncResult(clip=0.1 + 0.7 / (t % 5 + 2), inv_scale=0.5, grad_norm=float(t))

    def synced(self, up: ResumableUpdater) -> SyncResult:
        """What the synchronization of all ranks comes to."""
        return self.sync(up.iteration)

    def job(self, t: int) -> bytes:
        return f"job state of iteration {t}".encode()

    def derive(self, up: ResumableUpdater) -> None:
        half = up.model.view(torch.bfloat16)
        for s in self.plan.segments:
            up.read(s.name, out=half[self.model_slice(s.name)])

    def model_slice(self, name: str) -> slice:
        """Where the model, in bf16, has what ``plan`` has of a segment."""
        first, behind = (self.model_at[name] + bound for bound in self.bounds(name))
        return slice(first, behind)

    def updater(self, memory: object, executor: Any = None) -> ResumableUpdater:
        return Place.updater(memory, self.plan, self.derive, executor, barrier=self.barrier)

    def barrier(self) -> None:
        """There are no other ranks."""

    def decision(self, summary: bytes, _channel: Channel) -> bytes:
        """What all ranks are to do; this is the only one."""
        return decide([summary])

    def fill(self, up: ResumableUpdater) -> None:
        for s in self.plan.segments:
            up.write(s.name, "master", self.initial(s.name))
        up.initialize(0, self.job(0))

    def begin(self, up: ResumableUpdater) -> None:
        assert up.job_state == self.job(up.iteration)
        up.compute_begins()
        up.grads.copy_(self.gradient(up.iteration))

    def update(self, up: ResumableUpdater, protected: Callable[[], None] | None = None) -> None:
        """``protected`` is called when the gradients are: an update is open from then on."""
        t = up.iteration

        def sync() -> SyncResult:
            if protected is not None:
                protected()
            return self.synced(up)

        up.step(self.hypers(t), self.job(t + 1), sync)

    def states(self, segment: Segment) -> tuple[str, ...]:
        return ("momentum_buffer",) if self.plan.is_matrix(segment) else self.plan.optimizer.state_planes


class Reference:
    """torch.optim on the same device: AdamW and SGD (foreach on a GPU), Muon."""

    def __init__(self, training: Training) -> None:
        self.training, self.t, plan = training, 0, training.plan
        self.parameters = {
            s.name: torch.nn.Parameter(
                training.initial(s.name).view(s.shape if plan.is_matrix(s) and s.shape else (s.numel,))
            )
            for s in plan.segments
        }
        self.optimizers = [self._optimizer(g) for g in range(plan.hyper_groups)]

    def _optimizer(self, group: int) -> torch.optim.Optimizer:
        plan = self.training.plan
        mine = [self.parameters[s.name] for s in plan.segments if s.group == group]
        if group in plan.matrix_groups:
            return torch.optim.Muon(mine, lr=1.0)
        kind = torch.optim.SGD if self.training.sgd else torch.optim.AdamW
        return kind(mine, lr=1.0, foreach=Place.on_gpu())

    def gradient(self) -> torch.Tensor:
        """Of iteration ``t``."""
        return self.training.gradient(self.t)

    def sync(self, _gradient: torch.Tensor) -> SyncResult:
        return self.training.sync(self.t)

    def advance(self, t: int) -> None:
        while self.t < t:
            gradient = self.gradient().float()
            sync = self.sync(gradient)
            for s in self.training.plan.segments:
                g = gradient[s.grad_offset : s.grad_offset + s.numel] * sync.inv_scale * sync.clip
                parameter = self.parameters[s.name]
                parameter.grad = g.view(parameter.shape)
            for optimizer, hyper in zip(self.optimizers, self.training.hypers(self.t), strict=True):
                (group,) = optimizer.param_groups
                names = {"lr", "betas", "eps", "weight_decay", "momentum", "nesterov"} & group.keys()
                group.update({name: getattr(hyper, name) for name in names})
                optimizer.step()
            self.t += 1

    def state(self, segment: Segment, name: str) -> torch.Tensor:
        parameter = self.parameters[segment.name]
        if name == "master":
            return parameter.detach().view(-1)
        found = self.optimizers[segment.group].state[parameter].get(name)
        return torch.zeros_like(parameter).view(-1) if found is None else found.view(-1)

    def save(self, t: int, path: Path) -> None:
        """All state at the start of iteration t, one after the other, as bytes."""
        self.advance(t)
        assert self.t == t, f"the training is at {t}, the reference beyond, at {self.t}"
        plan = self.training.plan
        parts = [self.state(s, name) for s in plan.segments for name in ("master", *self.training.states(s))]
        state = torch.cat(parts)
        torch.from_file(str(path), True, state.numel(), dtype=torch.float32).copy_(state)


def compare(training: Training, up: ResumableUpdater, path: Path) -> None:
    """Raise AssertionError unless all state, of the job and of the model too, is that of the reference."""
    assert up.job_state == training.job(up.iteration), f"job state of {up.iteration} is {up.job_state!r}"
    numel = path.stat().st_size // 4
    expected = torch.from_file(str(path), False, numel, dtype=torch.float32).to(Place.device)
    at = 0
    for s in training.whole.segments:
        for name in ("master", *training.states(s)):
            if s.name in training.pieces:
                found, wanted = (
                    up.read(s.name, name),
                    expected[at : at + s.numel][slice(*training.bounds(s.name))],
                )
                same = torch.equal(found.view(torch.int32), wanted.view(torch.int32))
                assert same, f"{name} of segment {s.name} differs at iteration {up.iteration}"
            at += s.numel
    half = up.model.view(torch.bfloat16)
    for s in training.plan.segments:
        derived = torch.equal(half[training.model_slice(s.name)], up.read(s.name).to(torch.bfloat16))
        assert derived, f"the model's part of segment {s.name} differs at iteration {up.iteration}"


# --- tasks ----------------------------------------------------------------------------------------------
def plain_reference(**training: Any) -> Reference:
    return Reference(Training(**training))


def oracle(
    _command: dict[str, Any], channel: Channel, make: Callable[..., Reference] = plain_reference
) -> None:
    """The reference of one training after another, at the iterations that are asked for; see `Judge`."""
    reference, folder = None, Path()
    while (asked := channel.hear(3600)) is not None:
        if "training" in asked:
            reference, folder = make(**asked["training"]), Path(asked["folder"])
            continue
        assert reference is not None, "a state was asked for before a training"
        reference.save(asked["state"], folder / f"state-{asked['state'] % KEPT}")
        channel.say(saved=asked["state"])


class Judge:
    """Expected states, made ahead by a child with the task `oracle`; the newest few are kept."""

    def __init__(self, child: Child, training: dict[str, Any], folder: Path) -> None:
        self._child, self._folder, self._asked, self._saved = child, folder, -1, -1
        child.channel.say(training=training, folder=str(folder))

    def ahead(self, until: int) -> None:
        """Ask for the states up to an iteration; do not wait."""
        while self._asked < until:
            self._asked += 1
            self._child.channel.say(state=self._asked)

    def state(self, t: int) -> str:
        """The file of the state at the start of iteration t."""
        self.ahead(t)
        while self._saved < t:
            self._saved = self._child.hear()["saved"]
        assert t > self._asked - KEPT, f"the state of {t} was overwritten: {self._asked} was asked for"
        return str(self._folder / f"state-{t % KEPT}")

    def end(self) -> None:
        """Hear what is left to be said: the child goes on with another training."""
        while self._saved < self._asked:
            self._saved = self._child.hear()["saved"]


def left_behind(control: Client, plan: UpdatePlan) -> tuple[str, int, list[list[int]]]:
    """What the marker says of a pool whose writer is gone: phase, iteration, pages of every logical group.

    The control client reads it, in the host's memory: a process with CUDA up, only to look, costs as much as
    one to be killed.
    """
    lost = frozenset(control.marks())
    marker = Marker(plan, control.allocations()[MARKER], indices(lost, MARKER))
    cell = marker.rank
    assert cell is not None, "no replica of the marker is left"
    return cell.phase.name, cell.iteration, _groups(plan, marker.rotation)


def goes_on_at(phase: str, iteration: int) -> int:
    """The iteration that a rank that was left so goes on with at least: a synchronized one is finished."""
    return iteration + (phase in ("SYNCED", "UPDATED"))


def _groups(plan: UpdatePlan, rotation: Rotation) -> list[list[int]]:
    groups = [plan.group_places(g, rotation) for g in range(plan.groups)]
    return [[page for page in pages if page is not None] for pages in groups]


def logical_groups(up: ResumableUpdater) -> list[list[int]]:
    """Physical pages of every protection group, as the surviving marker has it."""
    return _groups(up.plan, up.marker.rotation)


def open_training(
    command: dict[str, Any], channel: Channel, executor: Any = None, make: type[Training] = Training
) -> Any:
    """Attach as the writer, recover, compare; (training, client, updater)."""
    training = make(**command["training"])
    client = Client.connect(command["socket"], timeout_s=DEADLINE_S)
    begun = time.perf_counter()
    client.attach(Role.WRITER, command["generation"])
    up = training.updater(client)
    attached = time.perf_counter()
    summary = up.summary()
    found = up.position()
    voted = time.perf_counter()
    channel.say(recovering=found.phase)
    recovered = up.recover(training.decision(summary, channel))
    if recovered.action is Action.FRESH:
        assert found.phase is None, f"state at {found.phase} was given up: {recovered.reason}"
        training.fill(up)
    Place.settle()
    channel.say(
        iteration=up.iteration,
        phase=found.phase or "none",
        action=str(recovered.action),
        pages=recovered.pages_reconstructed,
        verified=recovered.verified,
        attach_s=attached - begun,
        vote_s=voted - attached,
        recover_s=recovered.seconds,
    )
    asked = channel.hear()
    assert asked is not None
    begun = time.perf_counter()
    compare(training, up, Path(asked["path"]))
    assert not client.marks(), "pages are still marked"
    channel.say(exact=True, compare_s=time.perf_counter() - begun)
    if executor is not None:
        up.executor = executor
    return training, client, up


def lose(
    control: Client, groups: Sequence[Sequence[int]], rng: Any, count: int, poison: bool
) -> dict[str, Any]:
    """Unmap ``count`` pages of every group and poison a parity page of each; localize and replace."""
    refs = [
        PageRef("arena", "data", int(page))
        for pages in groups
        for page in rng.choice(pages, size=min(count, len(pages)), replace=False)
    ]
    begun = time.perf_counter()
    how = control.inject_lose(refs, seed=int(rng.integers(2**31)))
    if poison:
        rows = [PageRef("arena", "tier1", g * 16 + int(rng.integers(16))) for g in range(len(groups))]
        how += f", host pages: {control.inject_poison(rows, seed=int(rng.integers(2**31)))}"
        refs += rows
    injected = time.perf_counter()
    control.localize(read=False)
    localized = time.perf_counter()
    control.remap()
    return {
        "lost": len(refs),
        "how": how,
        "inject_s": injected - begun,
        "localize_s": localized - injected,
        "remap_s": time.perf_counter() - localized,
    }
