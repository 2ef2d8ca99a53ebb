"""The checks of `leto doctor`: each judges one property of a machine and says what it means and how to fix
it.

Role: pure functions from a `Machine` to a `Result`. "fail": Leto cannot work here. "warn": it works with a
stated loss. Why each property matters is in the text of its result, so that this file is also the list of
what Leto needs.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Literal

import msgspec

from leto_rmp.memory import MemoryBudget
from leto_shadow.machine import Machine
from leto_shadow.room import Need, Room, size, why_not

__all__ = ["CHECKS", "Machine", "Result", "check_pool"]

Status = Literal["ok", "warn", "fail"]

_GIB = 1 << 30
_MIN_FREE_BYTES = 2 * _GIB
_MIN_FILES = 1024
_GPU_FILES = 16384
"""More than a GPU needs: a descriptor a handle of 32 MiB (`GPU_PAGES_PER_HANDLE`) is 3,200 for 100 GiB."""
_MEGATRON = "0.16.1"


class Result(msgspec.Struct, frozen=True):
    """Outcome of one check; `fix` is empty where there is nothing to fix."""

    name: str
    status: Status
    found: str
    meaning: str
    fix: str = ""


def _tried(name: str, reason: str | None, meaning: str, fix: str, worse: Status = "fail") -> Result:
    """Result of something that was tried."""
    if reason is None:
        return Result(name, "ok", "works", meaning)
    return Result(name, worse, f"refused: {reason}", meaning, fix)


def _numbers(text: str) -> tuple[int, ...]:
    """Leading version numbers of a text: "6.8.0-41-generic" is (6, 8, 0)."""
    match = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in match.group().split(".")) if match else ()


def check_python(machine: Machine) -> Result:
    version = machine.python()
    found = "Python {}.{}".format(*version)
    meaning = "tested with Python 3.11 to 3.13"
    if version < (3, 11):
        return Result("python", "fail", found, meaning, "use Python 3.11 or newer")
    if version > (3, 13):
        return Result("python", "warn", found, meaning, "use Python 3.13 if something breaks")
    return Result("python", "ok", found, meaning)


def check_kernel(machine: Machine) -> Result:
    system, release = machine.system(), machine.kernel()
    found = f"{system} {release}"
    if system != "Linux":
        meaning = "memfds, pidfds and userfaultfd exist on Linux only"
        return Result("kernel", "fail", found, meaning, "use a Linux machine or a virtual one")
    if _numbers(release) < (5, 14):
        meaning = "MADV_POPULATE_READ, which finds lost pages, came with Linux 5.14"
        return Result("kernel", "fail", found, meaning, "use Linux 5.14 or newer")
    if _numbers(release) < (6, 6):
        meaning = "before Linux 6.6 an injected page loss is a declared simulation"
        return Result("kernel", "warn", found, meaning, "use Linux 6.6 or newer for real poison in drills")
    return Result("kernel", "ok", found, "has everything that Leto uses")


def check_pidfd(machine: Machine) -> Result:
    meaning = "proves that a trainer is dead before another one may write its memory"
    fix = "allow pidfd_open in the container's seccomp profile"
    return _tried("pidfd", machine.try_pidfd(), meaning, fix)


def check_peer_pidfd(machine: Machine) -> Result:
    meaning = "without it a peer's process is found by its number, which is safe while the socket is open"
    fix = "nothing is needed; Linux 6.5 or newer has SO_PEERPIDFD"
    return _tried("peer-pidfd", machine.try_peer_pidfd(), meaning, fix, "warn")


def check_death_signal(machine: Machine) -> Result:
    meaning = "ends a trainer whose agent died, even one that hangs"
    return _tried("death-signal", machine.try_death_signal(), meaning, "allow prctl in the seccomp profile")


def check_memfd(machine: Machine) -> Result:
    meaning = "holds retained pages; lost ones are replaced by punching holes"
    fix = "allow memfd_create and fallocate in the container's seccomp profile"
    return _tried("memfd", machine.try_memfd(), meaning, fix)


def check_populate_read(machine: Machine) -> Result:
    meaning = "finds lost host pages"
    return _tried("populate-read", machine.try_populate_read(), meaning, "use Linux 5.14 or newer")


def check_poison(machine: Machine) -> Result:
    meaning = "without it an injected page loss is a declared simulation; recovery itself needs no poison"
    fix = (
        "Linux 6.6 or newer, and userfaultfd allowed (seccomp profile; vm.unprivileged_userfaultfd=1 or root)"
    )
    return _tried("poison", machine.try_poison(), meaning, fix, "warn")


def check_loopback(machine: Machine) -> Result:
    meaning = "agent, stores and gloo talk over it on a single node"
    return _tried(
        "loopback", machine.try_loopback(), meaning, "bring the interface lo up (ip link set lo up)"
    )


def check_open_files(machine: Machine) -> Result:
    soft, hard = machine.open_files()
    found = f"soft {'none' if soft < 0 else soft}, hard {'none' if hard < 0 else hard}"
    fix = "raise the hard limit: ulimit -Hn 1048576, LimitNOFILE= in systemd, or --ulimit nofile= in docker"
    if 0 <= hard < _MIN_FILES:
        meaning = f"Leto raises the soft limit, but needs about {_MIN_FILES} descriptors"
        return Result("open-files", "fail", found, meaning, fix)
    if machine.gpu_devices() and 0 <= hard < _GPU_FILES:
        meaning = (
            "GPU memory takes a descriptor for every 32 MiB, 3,200 for 100 GiB (51,200 with "
            "--gpu-pages-per-handle 1); without room for them trainers attach more slowly"
        )
        return Result("open-files", "warn", found, meaning, fix)
    return Result("open-files", "ok", found, "the soft limit is raised when it is needed")


def check_mappings(machine: Machine) -> Result:
    text = (machine.read("/proc/sys/vm/max_map_count") or "").strip()
    meaning = "every page handle is a mapping of its own"
    if not text.isdecimal():
        return Result("mappings", "ok", "vm.max_map_count cannot be read", meaning)
    found = f"vm.max_map_count = {text}"
    if int(text) < 65530:
        return Result("mappings", "warn", found, meaning, "sysctl -w vm.max_map_count=1048576")
    return Result("mappings", "ok", found, meaning)


def check_memory(machine: Machine) -> Result:
    free, source = machine.memory()
    found = f"{free / _GIB:.1f} GiB free ({source})"
    meaning = "retained pages are charged to the memory cgroup and reserved when a job starts"
    if free < _MIN_FREE_BYTES:
        return Result(
            "memory", "warn", found, meaning, "raise the memory limit of the container or the machine"
        )
    return Result("memory", "ok", found, meaning)


def check_pool(machine: Machine, need: Need) -> Result:
    """The least that the pools of a job take, which this check alone is told."""
    free, source = machine.memory()
    gpus = machine.gpus() if need.on_gpu else ()
    meaning = "the least that the pools of a job's ranks take here: see leto doctor --help"
    lack = why_not(need, Room(MemoryBudget(free, source), machine.file_bytes(), gpus))
    if lack is not None:
        return Result("pool", "fail", lack.found, meaning, lack.fix)
    on_gpu = f", {size(need.data)} of each GPU" if need.on_gpu else ""
    found = f"{need.told}: at least {size(need.host)} of host memory{on_gpu}"
    return Result("pool", "ok", found, meaning)


def check_temp_dir(machine: Machine) -> Result:
    folder = machine.temp_dir()
    meaning = "sockets, logs and events of a job lie in it; a socket's address has 107 bytes"
    if len(folder) > 50:
        return Result("temp-dir", "warn", folder, meaning, "set TMPDIR to a shorter path, or give --run-dir")
    reason = machine.try_write(folder)
    if reason is not None:
        found = f"{folder}: no socket can be made: {reason}"
        return Result("temp-dir", "fail", found, meaning, "set TMPDIR to a writable local folder")
    return Result("temp-dir", "ok", folder, meaning)


def check_cores(machine: Machine) -> Result:
    cores = machine.cores()
    found = f"{cores} cores"
    meaning = "a shadow starts up beside a running trainer"
    if cores < 2:
        return Result(
            "cores", "warn", found, meaning, "give the job two cores or more, or use --shadow-level 0"
        )
    return Result("cores", "ok", found, meaning)


def check_torch(machine: Machine) -> Result:
    version = machine.version("torch")
    meaning = "torch 2.8 or newer with torch.distributed and gloo"
    fix = "install torch 2.8 or newer (without a GPU: from the index of CPU builds, see README)"
    if version is None:
        return Result("torch", "fail", "not installed", meaning, fix)
    if _numbers(version) < (2, 8):
        return Result("torch", "fail", f"torch {version}", meaning, fix)
    distributed, gloo = machine.torch_features()
    if not distributed:
        return Result("torch", "fail", f"torch {version} without torch.distributed", meaning, fix)
    if not gloo:
        found = f"torch {version} without gloo"
        return Result("torch", "warn", found, "no training on CPU", fix)
    return Result("torch", "ok", f"torch {version}", meaning)


def check_gpu(machine: Machine) -> Result:
    devices = machine.gpu_devices()
    if not devices:
        return Result("gpu", "ok", "none", "host memory and gloo are used")
    meaning = "retained memory can be on it: leto run --backend cuda"
    driver = re.search(
        r"Kernel Module.*?(\d+\.\d+(\.\d+)?)", machine.read("/proc/driver/nvidia/version") or ""
    )
    if driver is None:
        found = ", ".join(devices)
        return Result(
            "gpu", "warn", found, "the driver does not say its version", "load the NVIDIA kernel module"
        )
    found = f"{len(devices)} device(s), driver {driver.group(1)}"
    if _numbers(driver.group(1)) < (525,):
        return Result("gpu", "warn", found, "tested with driver 580", "update the driver")
    reason = machine.try_gpus()
    if reason is not None:
        fix = "see what nvidia-smi says; in a container, give it the devices and libnvidia-ml.so.1"
        return Result("gpu", "warn", f"{found}: {reason}", meaning, fix)
    return Result("gpu", "ok", found, meaning)


def check_gpu_packages(machine: Machine) -> Result:
    meaning = "cuda-bindings maps GPU pages, CuPy runs leto-ec's kernels on them"
    if not machine.gpu_devices():
        return Result("gpu-packages", "ok", "not needed", meaning)
    missing = [name for name in ("cuda.bindings", "cupy") if not machine.importable(name)]
    if missing:
        fix = "pip install 'leto-rmp[cuda]' 'leto-ec[cuda]'"
        found = f"not installed: {', '.join(missing)}"
        return Result("gpu-packages", "warn", found, f"{meaning}; --backend host does without", fix)
    return Result("gpu-packages", "ok", "cuda-bindings and CuPy", meaning)


def check_oom_hook(machine: Machine) -> Result:
    meaning = "takes GPU memory back from a shadow when training needs it"
    reason = machine.try_oom_hook()
    if reason is None:
        return Result("oom-hook", "ok", "libleto_oom.so", meaning)
    status: Status = "warn" if machine.gpu_devices() else "ok"
    without = f"{meaning}; without it shadows wait without GPU memory (L1)"
    return Result("oom-hook", status, reason, without, "install a C compiler, then leto-shadow again")


def check_erasure_code(machine: Machine) -> Result:
    info = machine.ec_info()
    meaning = "computes the parity pages"
    if info is None:
        return Result(
            "leto-ec", "warn", "not installed", meaning, "install packages/leto-ec, unless it is not used"
        )
    found = f"kernel {info.get('kernel')} ({info.get('why')})"
    if not info.get("native", True):
        fix = "install a wheel with native kernels, or a C compiler and reinstall leto-ec"
        return Result("leto-ec", "warn", found, f"{meaning}, slowly without a native kernel", fix)
    return Result("leto-ec", "ok", found, meaning)


def check_updater(machine: Machine) -> Result:
    meaning = "decides on recovery unless --decide names something else"
    version = machine.version("leto-rmu")
    if version is None and not machine.importable("leto_rmu"):
        return Result("leto-rmu", "warn", "not installed", meaning, "install packages/leto-rmu, or --decide")
    return Result("leto-rmu", "ok", version or "importable", meaning)


def check_megatron(machine: Machine) -> Result:
    version = machine.version("megatron-core")
    meaning = f"leto-megatron is tested with megatron-core {_MEGATRON}; other trainers do not need it"
    if version is not None and version != _MEGATRON:
        return Result("megatron-core", "warn", version, meaning, f"pip install megatron-core=={_MEGATRON}")
    return Result("megatron-core", "ok", version or "not installed", meaning)


CHECKS: tuple[Callable[[Machine], Result], ...] = (
    check_python,
    check_kernel,
    check_pidfd,
    check_peer_pidfd,
    check_death_signal,
    check_memfd,
    check_populate_read,
    check_poison,
    check_loopback,
    check_open_files,
    check_mappings,
    check_memory,
    check_temp_dir,
    check_cores,
    check_torch,
    check_gpu,
    check_gpu_packages,
    check_oom_hook,
    check_erasure_code,
    check_updater,
    check_megatron,
)
