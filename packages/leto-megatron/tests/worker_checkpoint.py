"""Rank functions for checkpoints: a child is killed at every step of a save; what is left must be usable."""

from __future__ import annotations

import os
import resource
import signal
import sys
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from ranks import store_path

from leto_megatron.checkpoint import CheckpointError, Checkpoints, digest

IDENTITY = "0" * 64
_WATCHED = ("open", "os.rename", "os.mkdir", "os.remove", "os.rmdir", "shutil.rmtree")


def contents(step: int) -> tuple[dict[str, torch.Tensor], bytes]:
    """The state of a step: every part of it depends on the step."""
    generator = torch.Generator().manual_seed(step)
    tensors = {f"master/{name}": torch.randn(5000, generator=generator) for name in "abc"}
    return tensors, f"job state of step {step}".encode() * 40


class MarkerFirst(Checkpoints):
    """A broken order, which the sweep must notice: visible before its parts are written."""

    def _begin(self, step: int) -> None:
        super()._begin(step)
        self._complete(step, [digest(*contents(step))])
        self._partial(step).mkdir()

    def save(self, step: int, tensors: Mapping[str, torch.Tensor], job_state: bytes) -> bool:
        self._begin(step)
        self._write_part(step, tensors, job_state)
        for path in self._partial(step).iterdir():
            path.rename(self.path(step) / path.name)
        self._partial(step).rmdir()
        self._drop_old()
        return True


class SavesLater(Checkpoints):
    """A broken promise, which the test of case 15 must notice: reads the tensors after `save` returned."""

    def save(self, step: int, tensors: Mapping[str, torch.Tensor], job_state: bytes) -> bool:
        self.finish = lambda: super(SavesLater, self).save(step, tensors, job_state)
        return True


def overwrite(rank: int, world: int, folder: str, broken: bool = False) -> dict[str, Any]:
    """Change every tensor right after `save` returns; what was saved must be what was there before."""
    join(rank, world, folder, "overwrite")
    checkpoints = (SavesLater if broken else Checkpoints)(Path(folder) / "c", IDENTITY)
    tensors, job_state = contents(1 + rank)
    kept = {name: tensor.clone() for name, tensor in tensors.items()}
    checkpoints.save(1, tensors, job_state)
    for tensor in tensors.values():
        tensor.fill_(float("nan"))
    if isinstance(checkpoints, SavesLater):
        checkpoints.finish()
    found = {name: torch.zeros_like(tensor) for name, tensor in tensors.items()}
    same_job = checkpoints.load(1, found) == job_state
    dist.destroy_process_group()
    return {"changed": [name for name in kept if not torch.equal(found[name], kept[name])], "job": same_job}


def join(rank: int, world: int, folder: str, name: str) -> None:
    torch.cuda.current_device = lambda: torch.device("cpu")  # as the CPU shim does
    dist.init_process_group(
        "gloo", store=dist.FileStore(store_path(folder, name), world), rank=rank, world_size=world
    )


def save(checkpoints: Checkpoints, step: int) -> None:
    checkpoints.save(step, *contents(step))


def check(checkpoints: Checkpoints, step: int) -> None:
    """Load a step into other values and compare every bit."""
    tensors, job_state = contents(step)
    found = {name: torch.full_like(tensor, 7.0) for name, tensor in tensors.items()}
    assert checkpoints.load(step, found) == job_state
    for name, tensor in tensors.items():
        assert torch.equal(found[name], tensor), name


class Killer:
    """SIGKILL this process at its n-th file operation (opening, renaming, making, removing) after `arm`."""

    def __init__(self) -> None:
        self.at = -1
        self.count = 0
        sys.addaudithook(self._hook)

    def arm(self, at: int) -> None:
        self.count, self.at = 0, at

    def _hook(self, event: str, _arguments: tuple[Any, ...]) -> None:
        if self.at >= 0 and event in _WATCHED:
            if self.count == self.at:
                os.kill(os.getpid(), signal.SIGKILL)
            self.count += 1


def kill_sweep(rank: int, world: int, folder: str, broken: bool = False) -> dict[str, int]:
    """Save step 1; then save step 2 in forked children, each killed at a later moment than the one before."""
    kind_of: type[Checkpoints] = MarkerFirst if broken else Checkpoints
    kills = survivors = complete = 0
    limits = [("operation", n) for n in range(400)] + [("bytes", n) for n in (0, 1, 100, 5000, 60_000)]
    finished_operations = False
    for kind, amount in limits:
        if kind == "operation" and finished_operations:
            continue
        place = Path(folder) / f"{kind}-{amount}"
        pid = os.fork()
        if pid == 0:
            _child(kind_of, place, folder, kind, amount)
        _pid, status = os.waitpid(pid, 0)
        if os.WIFSIGNALED(status):
            assert os.WTERMSIG(status) in (signal.SIGKILL, signal.SIGXFSZ), status
            kills += 1
        else:
            assert status == 0, f"{kind} {amount}: exit status {status}"
            survivors += 1
            finished_operations |= kind == "operation"
        complete += _examine(place, folder, f"{kind}-{amount}")
    return {"kills": kills, "survivors": survivors, "complete": complete}


def _child(kind_of: type[Checkpoints], place: Path, folder: str, kind: str, amount: int) -> None:
    code = 1
    try:
        join(0, 1, folder, f"child-{place.name}")
        checkpoints = kind_of(place, IDENTITY, keep=1)
        save(checkpoints, 1)
        killer = Killer()
        if kind == "operation":
            killer.arm(amount)
        else:  # the kernel stops the process in the middle of a write
            signal.signal(signal.SIGXFSZ, signal.SIG_DFL)
            resource.setrlimit(resource.RLIMIT_FSIZE, (amount, amount))
        save(checkpoints, 2)
        killer.at = -1
        code = 0
    except BaseException:  # noqa: BLE001 (a forked child must not run on into the caller's code)
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        os._exit(code)


def _examine(place: Path, folder: str, name: str) -> int:
    """In another child: what is visible is whole, the next save works. 1 if step 2 was complete."""
    pid = os.fork()
    if pid == 0:
        code = 99
        try:
            join(0, 1, folder, f"examine-{name}")
            checkpoints = Checkpoints(place, IDENTITY, keep=2)
            steps = checkpoints.steps()
            assert steps in ((1,), (1, 2), (2,)), steps
            for step in steps:
                check(checkpoints, step)
            save(checkpoints, 3)
            check(checkpoints, 3)
            assert checkpoints.steps() == (steps[-1], 3)
            left = {path.name for path in place.iterdir()}
            assert left == {f"step-{step:08d}" for step in (steps[-1], 3)}, left
            code = 2 if steps[-1] == 2 else 0
        except BaseException:  # noqa: BLE001 (a forked child must not run on into the caller's code)
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            os._exit(code)
    _pid, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) in (0, 2), f"{name}: what was left cannot be used"
    return int(os.waitstatus_to_exitcode(status) == 2)


def damage(rank: int, world: int, folder: str) -> dict[str, str]:
    """What `load` says to damaged, mixed and foreign checkpoints. Two ranks."""
    join(rank, world, folder, "damage")
    checkpoints = Checkpoints(Path(folder) / "c", IDENTITY, keep=3)
    for step in (1, 2, 3):
        save(checkpoints, step)
    assert checkpoints.steps() == (1, 2, 3)
    said = {}

    def attempt(what: str, step: int, reader: Checkpoints) -> None:
        dist.barrier()
        try:
            check(reader, step)
            said[what] = ""
        except CheckpointError as error:
            said[what] = str(error)
        dist.barrier()

    attempt("whole", 1, checkpoints)
    if rank == 0:  # a component of another step, of the same size
        _copy(checkpoints.path(2) / "__0_0.distcp", checkpoints.path(1) / "__0_0.distcp")
    attempt("mixed", 1, checkpoints)
    attempt("foreign", 2, Checkpoints(checkpoints.folder, "1" * 64))
    if rank == 0:
        data = checkpoints.path(3) / "__1_0.distcp"
        content = bytearray(data.read_bytes())
        for at in range(len(content) // 3, len(content) // 2):  # a run: a single byte may be padding
            content[at] ^= 1
        data.write_bytes(content)
    attempt("flipped", 3, checkpoints)
    if rank == 0:
        os.truncate(checkpoints.path(3) / "__0_0.distcp", 1000)
    attempt("cut off", 3, checkpoints)
    if rank == 1:
        checkpoints.set_aside(3)
    dist.barrier()
    said["after setting aside"] = str(checkpoints.steps())
    said["seen by another run"] = str(Checkpoints(checkpoints.folder, "1" * 64).steps())
    dist.barrier()
    if rank == 0:
        marker = checkpoints.path(2) / "COMPLETE.json"
        marker.write_bytes(marker.read_bytes()[:-40])
    dist.barrier()
    said["torn marker"] = str(checkpoints.steps())
    dist.destroy_process_group()
    return said


def _copy(source: Path, target: Path) -> None:
    target.write_bytes(source.read_bytes())
