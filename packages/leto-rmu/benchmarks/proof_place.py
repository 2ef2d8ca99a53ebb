"""Where a proof script runs, what it is asked for, and the page that it leaves.

A page is written anew whenever more has been proven, and says how much of the plan is done: whoever stops a
script keeps what it had. SIGTERM asks for exactly that; see `Asked` and `stop_at_sigterm`. What a script is
doing goes to stderr, with the seconds since it began.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from leto_rmp import PoolConfig
from leto_rmu import ResumableUpdater, UpdatePlan, __version__

DEVICES = ("cuda", "cpu")
BEGUN = time.monotonic()


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
    def updater(
        cls, memory: object, plan: UpdatePlan, *more: Any, barrier: Callable[[], None] = lambda: None
    ) -> ResumableUpdater:
        if cls.on_gpu():
            from leto_rmu.cuda import CudaUpdater

            return CudaUpdater(memory, plan, barrier, *more)
        return ResumableUpdater(memory, plan, barrier, *more)


class Stopped(BaseException):
    """SIGTERM came: end what runs, keep what is proven. No handler of errors may take it for one."""


def _at_sigterm(act: Callable[[], None]) -> Any:
    """From now on SIGTERM does that in this process, and ends a fork of it; what it did before."""
    owner = os.getpid()

    def handle(number: int, _frame: object) -> None:
        if os.getpid() != owner:
            os._exit(128 + number)
        act()

    return signal.signal(signal.SIGTERM, handle)


def stop_at_sigterm() -> None:
    """From now on SIGTERM raises `Stopped` in this process, once; in a fork of it, it ends the fork."""

    def stop() -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise Stopped

    _at_sigterm(stop)


class Asked:
    """SIGTERM as something to read, for a process that takes in what others tell: `Stopped`, raised after the
    reading of a line and before its keeping, would lose what was proven. In a fork SIGTERM ends the fork."""

    def __init__(self) -> None:
        self.socket, self._other = socket.socketpair()
        self.told = False
        self._before = _at_sigterm(self._ask)

    def _ask(self) -> None:
        if not self.told:
            self.told = True
            self._other.send(b"!")  # wakes a select that has the other end

    def close(self) -> None:
        # Asked once, a script is about to write its page: it is not to be ended by a second signal.
        signal.signal(signal.SIGTERM, signal.SIG_IGN if self.told else self._before)
        self.socket.close()
        self._other.close()

    def __enter__(self) -> Asked:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@contextlib.contextmanager
def folder(prefix: str, end_users: Callable[[], None], within: str | None = None) -> Iterator[Path]:
    """A folder that is removed in the end. After an error, or `Stopped`, ``end_users`` is called before that:
    a process that still writes there would make the removal fail, and its error would hide the first one."""
    with tempfile.TemporaryDirectory(prefix=prefix, dir=within) as name:
        try:
            yield Path(name)
        except BaseException:
            end_users()
            raise


# --- command line ---------------------------------------------------------------------------------------
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


# --- the page -------------------------------------------------------------------------------------------
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


def done_of(parts: Sequence[tuple[int, int, str]]) -> tuple[bool, str]:
    """Whether the plan was fulfilled, and a sentence about it; ``parts``: done, planned, of what."""
    found = (
        f"Done of what was planned: {', '.join(f'{done} of {planned} {of}' for done, planned, of in parts)}."
    )
    enough = all(done >= planned for done, planned, _ in parts)
    return enough, found if enough else f"**Partial.** {found}"


def keep(result: dict[str, Any], text: str, output: Path | None) -> None:
    """Write the page and its data anew. Whoever looks, at any moment, finds a whole page."""
    if output is None:
        return
    output.parent.mkdir(parents=True, exist_ok=True)
    contents = {".json": json.dumps(result, indent=1) + "\n", ".md": text.rstrip("\n") + "\n"}
    for suffix, content in contents.items():
        path = output.with_suffix(suffix)
        fresh = path.with_name(f"{path.name}.new")
        fresh.write_text(content)
        fresh.replace(path)


def publish(result: dict[str, Any], text: str, output: Path | None) -> None:
    print(text, flush=True)
    keep(result, text, output)
