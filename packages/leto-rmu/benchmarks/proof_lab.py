"""What the proof scripts on a GPU share: a deterministic training, its reference, processes to be killed.

A script forks a few children, which bring CUDA up and wait. Each takes one task, is killed or ends, and is
replaced; so a fresh process goes on where another was killed without anybody waiting for CUDA to start. The
parent itself never touches the GPU. With ``--device cpu`` a script runs over the host backend; with
``--smoke`` it takes every path of its code, as few times as it can. What it is doing goes to stderr, with the
seconds since it began.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib
import json
import os
import platform
import select
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar, NoReturn

import torch

from leto_rmp import Client, PageRef, PoolConfig, Role
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
    __version__,
    decide,
)
from leto_rmu.faults import TearAndKill

DEVICES = ("cuda", "cpu")
DEADLINE_S = 120.0
BEGUN = time.monotonic()
KEPT = 6  # expected states
SLOW_S = 1.0
# What CUDA calls a kernel that ended in a trap, by driver and chip (errors 719, 715).
TRAPS = ("launch failure", "illegal instruction")
Task = Callable[[dict[str, Any], "Channel"], None]


class Place:
    """Where a script runs; set once, before children are forked."""

    device = "cuda"

    @classmethod
    def on_gpu(cls) -> bool:
        return cls.device == "cuda"

    @classmethod
    def config(cls, data_pages: int) -> PoolConfig:
        page, backend = (2 << 20, "cuda") if cls.on_gpu() else (16 << 10, "host")
        return PoolConfig(
            page_bytes=page, data_pages=data_pages, tier1_pages=16, tier2_pages=1, backend=backend
        )

    @classmethod
    def generator(cls, seed: int) -> torch.Generator:
        return torch.Generator(cls.device).manual_seed(seed)

    @classmethod
    def settle(cls) -> None:
        """Wait for the device."""
        if cls.on_gpu():
            torch.cuda.synchronize()

    @classmethod
    def updater(cls, memory: object, plan: UpdatePlan, *more: Any) -> ResumableUpdater:
        if cls.on_gpu():
            from leto_rmu.cuda import CudaUpdater

            return CudaUpdater(memory, plan, lambda: None, *more)
        return ResumableUpdater(memory, plan, lambda: None, *more)


# --- what was measured where ----------------------------------------------------------------------------
def command_line(doc: str | None) -> argparse.ArgumentParser:
    """Parser of a proof script, with the options that all of them have."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="path without suffix; default: print only")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", choices=DEVICES, default="cuda")
    parser.add_argument("--smoke", action="store_true", help="every path of the code, at its smallest")
    return parser


def parsed(parser: argparse.ArgumentParser, smoke: dict[str, Any]) -> argparse.Namespace:
    """Arguments of the command line; ``smoke``: defaults that hold with --smoke. Sets the place."""
    if parser.parse_known_args()[0].smoke:
        parser.set_defaults(**smoke)
    arguments = parser.parse_args()
    Place.device = arguments.device
    progress(f"{Path(sys.argv[0]).name} on {Place.device}, seed {arguments.seed}")
    return arguments


def progress(text: str) -> None:
    """A line for whoever waits, or finds out later where the time went."""
    print(f"[{time.monotonic() - BEGUN:6.1f} s] {text}", file=sys.stderr, flush=True)


class Torn(TearAndKill):
    """A random part of the bytes in the n-th operation of one of the names, then SIGKILL."""

    def __init__(self, names: tuple[str, ...], count: int, seed: int) -> None:
        super().__init__(match=self._counted, seed=seed)
        self._names, self._left = names, count

    def _counted(self, op: Op) -> bool:
        self._left -= op.name in self._names
        return self._left < 0


def machine(**more: str) -> dict[str, str]:
    """What this ran on, and with; ``more``: what else belongs to it."""
    if Place.on_gpu():
        query = ["nvidia-smi", "--query-gpu=name,driver_version", "--format=csv,noheader", "-i", "0"]
        found = subprocess.run(query, capture_output=True, text=True, timeout=60, check=False).stdout.strip()
    else:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        found = f"{(names or [platform.machine()])[0]}, {os.cpu_count()} cores"
    return {
        "gpu" if Place.on_gpu() else "processor": found,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "leto-rmu": __version__,
        **more,
        "date": datetime.date.today().isoformat(),
    }


def head(title: str, result: dict[str, Any], script: str) -> list[str]:
    lines = [f"# {title}", "", *(f"* {key}: {value}" for key, value in result["machine"].items())]
    return [*lines, f"* script: `packages/leto-rmu/benchmarks/{Path(script).name}`", ""]


def publish(result: dict[str, Any], text: str, output: Path | None) -> None:
    print(text, flush=True)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.with_suffix(".json").write_text(json.dumps(result, indent=1) + "\n")
        output.with_suffix(".md").write_text(text.rstrip("\n") + "\n")


# --- a training whose every bit is a function of the seed and the iteration -----------------------------
class Training:
    """One rank: three groups of at most 30 pages, segments that begin and end inside pages."""

    def __init__(self, seed: int, optimizer: str = "adamw", scheme: str = "slots") -> None:
        self.seed = seed
        muon, gpu = optimizer == "muon", Place.on_gpu()
        self.optimizer: Any = {"adamw": AdamW, "sgd": SGD, "muon": lambda: Muon(AdamW())}[optimizer]()
        a, c = ((3000, 2000), (2500, 2800)) if gpu else ((250, 188), (200, 270))
        b, d = (2_333_331, 77_777) if gpu else (18_229, 607)
        shapes = {"a": a, "c": c} if muon else {}
        sizes = (("a", a[0] * a[1], 0), ("b", b, 1), ("c", c[0] * c[1], 0), ("d", d, 1))
        segments, at = [], 3
        for name, numel, group in sizes:
            segments.append(Segment(name, numel, group, at, shape=shapes.get(name)))
            at += numel + 5
        self.plan = UpdatePlan(
            segments,
            self.optimizer,
            config=Place.config(32),
            grad_numel=at,
            grad_dtype=torch.bfloat16,
            model_bytes=2 * sum(numel for _, numel, _ in sizes),
            job_state_bytes=4096,
            scheme=scheme,  # type: ignore[arg-type]
        )
        self.sgd, self.muon = optimizer == "sgd", muon

    def _random(self, numel: int, *key: int) -> torch.Tensor:
        word = self.seed
        for part in key:
            word = (word * 1_000_003 + part) % (1 << 62)
        return torch.randn(numel, generator=Place.generator(word), device=Place.device)

    def gradient(self, t: int) -> torch.Tensor:
        return self._random(self.plan.grad_numel, 1, t).to(self.plan.grad_dtype)

    def initial(self, name: str) -> torch.Tensor:
        at, segment = self.plan.offsets[name]
        return self._random(segment.numel, 2, at)

    def hypers(self, t: int) -> list[Hyper]:
        lr = 0.01 * (1 + t % 7) / 7
        rest = Hyper(lr / 2, momentum=0.9, weight_decay=0.1) if self.sgd else Hyper(lr / 2, betas=(0.9, 0.95))
        if self.muon:
            return [Hyper.muon(lr), rest]
        return [Hyper(lr, momentum=0.9) if self.sgd else Hyper(lr, betas=(0.9, 0.95), weight_decay=0.1), rest]

    def sync(self, t: int) -> SyncResult:
        return SyncResult(clip=0.1 + 0.7 / (t % 5 + 2), inv_scale=0.5, grad_norm=float(t))

    def job(self, t: int) -> bytes:
        return f"job state of iteration {t}".encode()

    def derive(self, up: ResumableUpdater) -> None:
        half, at = up.model.view(torch.bfloat16), 0
        for s in self.plan.segments:
            up.read(s.name, out=half[at : at + s.numel])
            at += s.numel

    def updater(self, memory: object, executor: Any = None) -> ResumableUpdater:
        return Place.updater(memory, self.plan, self.derive, executor)

    def fill(self, up: ResumableUpdater) -> None:
        for s in self.plan.segments:
            up.write(s.name, "master", self.initial(s.name))
        up.initialize(0, self.job(0))

    def begin(self, up: ResumableUpdater) -> None:
        assert up.job_state == self.job(up.iteration)
        up.compute_begins()
        up.grads.copy_(self.gradient(up.iteration))

    def update(self, up: ResumableUpdater) -> None:
        t = up.iteration
        up.step(self.hypers(t), self.job(t + 1), lambda: self.sync(t))

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

    def advance(self, t: int) -> None:
        while self.t < t:
            gradient, sync = self.training.gradient(self.t).float(), self.training.sync(self.t)
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
        torch.cat(parts).cpu().numpy().tofile(path)


def compare(training: Training, up: ResumableUpdater, path: Path) -> None:
    """Raise AssertionError unless all state, and its parity on the host, is that of the reference."""
    numel = path.stat().st_size // 4
    expected = torch.from_file(str(path), False, numel, dtype=torch.float32).to(Place.device)
    at = 0
    for s in training.plan.segments:
        for name in ("master", *training.states(s)):
            same = torch.equal(
                up.read(s.name, name).view(torch.int32), expected[at : at + s.numel].view(torch.int32)
            )
            assert same, f"{name} of segment {s.name} differs at iteration {up.iteration}"
            at += s.numel
    half = up.model.view(torch.bfloat16)
    first = training.plan.segments[0]
    assert torch.equal(half[: first.numel], up.read(first.name).to(torch.bfloat16)), "derived state differs"


# --- processes ------------------------------------------------------------------------------------------
class Channel:
    """JSON lines over a socket."""

    def __init__(self, end: socket.socket) -> None:
        self.socket, self._rest = end, b""

    def say(self, **values: Any) -> None:
        self.socket.sendall(json.dumps(values).encode() + b"\n")

    def hear(self, timeout_s: float = DEADLINE_S) -> dict[str, Any] | None:
        """The next line; None: the other side is gone."""
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._rest:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.socket], [], [], left)[0]:
                raise TimeoutError(f"nothing heard in {timeout_s} s")
            try:
                more = self.socket.recv(1 << 16)
            except ConnectionResetError:
                return None
            if not more:
                return None
            self._rest += more
        line, _, self._rest = self._rest.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found


class Child:
    """A forked process with CUDA up; it runs one of the tasks."""

    # Ends of the parent. A child closes those that it inherited, or it would keep its siblings from
    # noticing that the parent is gone.
    _ends: ClassVar[set[socket.socket]] = set()

    def __init__(self, tasks: dict[str, Task]) -> None:
        ours, theirs = socket.socketpair()
        self.pid = os.fork()
        if self.pid == 0:
            for end in (ours, *self._ends):
                end.close()
            _child(tasks, Channel(theirs))
        theirs.close()
        self._ends.add(ours)
        self.pidfd, self.channel, self.lives = os.pidfd_open(self.pid), Channel(ours), True

    def begin(self, task: str, **command: Any) -> None:
        begun = time.monotonic()
        ready = self.channel.hear()
        if ready is None or "ready_s" not in ready:
            raise AssertionError(f"a child did not come up: {ready}; see its traceback above")
        if (waited := time.monotonic() - begun) > SLOW_S:
            progress(f"waited {waited:.1f} s for a child, which took {ready['ready_s']:.1f} s to come up")
        self.channel.say(task=task, **command)

    def hear(self) -> dict[str, Any]:
        found = self.channel.hear()
        if found is None:
            raise AssertionError(f"a child ended with status {self.end()}; see its traceback above")
        if "error" in found:
            raise AssertionError(f"a child failed: {found['error']}")
        return found

    def kill(self) -> float:
        """SIGKILL; seconds until the process is gone, its GPU work too."""
        begun = time.perf_counter()
        signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
        self.end()
        return time.perf_counter() - begun

    def end(self, timeout_s: float = DEADLINE_S) -> int:
        """Wait until it is gone; its wait status."""
        if not select.select([self.pidfd], [], [], timeout_s)[0]:
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            raise TimeoutError(f"a child did not end in {timeout_s} s")
        os.close(self.pidfd)
        self.lives = False
        self._ends.discard(self.channel.socket)
        self.channel.socket.close()
        return os.waitpid(self.pid, 0)[1]

    def interrupted(self, what: str) -> str:
        """It was to be killed, or to be trapped and then killed; what it said of a trap, or ""."""
        told, status = self.channel.hear(), self.end()
        found = "" if told is None else str(told.get("trapped", ""))
        if told is not None and not any(error in found for error in TRAPS):
            raise AssertionError(f"{what}: it was to be interrupted, but says {str(told)[:1000]}")
        if status != signal.SIGKILL:
            raise AssertionError(f"{what}: it was to end by SIGKILL, but its status is {status}")
        return found


def _child(tasks: dict[str, Task], channel: Channel) -> NoReturn:
    code, begun = 1, time.monotonic()
    try:
        _warm_up()
        channel.say(ready_s=time.monotonic() - begun)
        command = channel.hear(3600)
        if command is not None:
            tasks[command.pop("task")](command, channel)
        code = 0
    except BaseException as error:  # noqa: BLE001 - the parent hears it, the log has the rest
        traceback.print_exc()
        with contextlib.suppress(OSError):
            channel.say(error=repr(error)[:2000])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _warm_up() -> None:
    torch.set_num_threads(1)
    if not Place.on_gpu():
        return
    from leto_rmu.cuda import CudaUpdater, TorchMemory

    config = PoolConfig(page_bytes=1 << 16, data_pages=32, tier1_pages=16, tier2_pages=1)
    numel = 5 << 14
    plan = UpdatePlan(
        [Segment("a", numel)], config=config, grad_numel=numel, grad_dtype=torch.bfloat16, scheme="slots"
    )
    up = CudaUpdater(TorchMemory(config), plan, lambda: None)
    up.initialize()
    up.compute_begins()
    up.step([Hyper(1e-3)], b"", SyncResult)
    torch.cuda.synchronize()


class Judge:
    """Expected states, made ahead by a child."""

    def __init__(self, child: Child, training: dict[str, Any], folder: Path) -> None:
        self._child, self._folder, self._asked, self._saved = child, folder, -1, -1
        child.begin("oracle", training=training, folder=str(folder))

    def ahead(self, until: int) -> None:
        """Ask for the states up to an iteration; do not wait."""
        if until > self._asked:
            self._asked = until
            self._child.channel.say(until=until)

    def state(self, t: int) -> str:
        """The file of the state at the start of iteration t."""
        self.ahead(t)
        while self._saved < t:
            self._saved = self._child.hear()["saved"]
        return str(self._folder / f"state-{t}")

    def end(self) -> None:
        self._child.kill()


class Warm:
    """A few children that are ready; each is handed out once."""

    def __init__(self, tasks: dict[str, Task], size: int) -> None:
        # Children inherit what takes long to import. No CUDA call is made here: a torch optimizer would.
        for name in ("cupy", "leto_ec.cuda", "leto_rmu.cuda") if Place.on_gpu() else ():
            importlib.import_module(name)
        self._tasks = tasks
        if torch.cuda.is_initialized():
            raise AssertionError("CUDA is up in the parent: its children could not use it")
        progress(f"starting {size} children")
        self._taken: list[Child] = []
        self._ready = deque(Child(tasks) for _ in range(size))

    def take(self) -> Child:
        self._ready.append(Child(self._tasks))
        self._taken = [child for child in self._taken if child.lives]
        self._taken.append(self._ready.popleft())
        return self._taken[-1]

    def __enter__(self) -> Warm:
        return self

    def __exit__(self, *_: object) -> None:
        left = [child for child in (*self._taken, *self._ready) if child.lives]
        progress(f"ending {len(left)} children that are left")
        for child in left:
            signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
        for child in left:
            child.end()


# --- tasks ----------------------------------------------------------------------------------------------
def oracle(command: dict[str, Any], channel: Channel) -> None:
    """The reference, iteration after iteration; the newest few states are kept."""
    reference = Reference(Training(**command["training"]))
    folder, done = Path(command["folder"]), -1
    while (asked := channel.hear(3600)) is not None:
        while done < asked["until"]:
            done += 1
            reference.save(done, folder / f"state-{done}")
            (folder / f"state-{done - KEPT}").unlink(missing_ok=True)
        channel.say(saved=done)


def look(command: dict[str, Any], channel: Channel) -> None:
    """Where every logical group's pages are, and what the marker says, of a pool without a writer."""
    training = Training(**command["training"])
    with Client.connect(command["socket"], timeout_s=DEADLINE_S) as client:
        client.attach(Role.WRITER, command["generation"])
        up = training.updater(client)
        found = up.position()
        channel.say(phase=found.phase, iteration=found.iteration, groups=logical_groups(up))


def logical_groups(up: ResumableUpdater) -> list[list[int]]:
    """Physical pages of every protection group, as the surviving marker has it."""
    plan = up.plan
    rotation = up.marker.rotation
    groups = [plan.geometry.group_pages(g, rotation) for g in range(plan.groups)]
    return [[page for page in pages if page is not None] for pages in groups]


def open_training(command: dict[str, Any], channel: Channel, executor: Any = None) -> Any:
    """Attach as the writer, recover, compare; (training, client, updater)."""
    training = Training(**command["training"])
    client = Client.connect(command["socket"], timeout_s=DEADLINE_S)
    begun = time.perf_counter()
    client.attach(Role.WRITER, command["generation"])
    up = training.updater(client)
    attached = time.perf_counter() - begun
    summary = up.summary()
    found = up.position()
    channel.say(recovering=found.phase)
    recovered = up.recover(decide([summary]))
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
        attach_s=attached,
        recover_s=recovered.seconds,
    )
    asked = channel.hear()
    assert asked is not None
    compare(training, up, Path(asked["path"]))
    assert not client.marks(), "pages are still marked"
    channel.say(exact=True)
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
