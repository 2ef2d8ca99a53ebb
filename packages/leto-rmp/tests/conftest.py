"""Fixtures: real managers and real worker processes, all ended and reaped whatever a test does."""

from __future__ import annotations

import contextlib
import gc
import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from leto_rmp import (
    AllocationSpec,
    Client,
    Interleave,
    Kind,
    ManagerProcess,
    PoolConfig,
    Role,
    driver,
    spawn_manager,
)
from leto_rmp.errors import CudaUnavailable

PAGE = 4096
DEADLINE_S = 120.0
"""Of everything here. A machine under load is not a bug."""


class Worker:
    """A Python process that runs `code`; it talks by lines on its standard streams."""

    def __init__(self, code: str, *arguments: str) -> None:
        command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, bufsize=0)
        self.pid = self.process.pid

    def line(self) -> str:
        """Return the next line; fail with the worker's stderr when it ends or is silent."""
        assert self.process.stdout is not None
        found = b""
        deadline_s = time.monotonic() + DEADLINE_S
        while not found.endswith(b"\n"):
            ready, _, _ = select.select([self.process.stdout], [], [], max(0, deadline_s - time.monotonic()))
            data = os.read(self.process.stdout.fileno(), 1) if ready else b""
            if not data:
                self.process.kill()
                _, errors = self.process.communicate()
                pytest.fail(f"worker said {found!r} and then nothing; its stderr: {errors.decode()}")
            found += data
        return found.decode().strip()

    def say(self, text: str = "go") -> None:
        """Send a line."""
        assert self.process.stdin is not None
        self.process.stdin.write(text.encode() + b"\n")

    def kill(self) -> None:
        """SIGKILL, and wait for the end."""
        self.process.send_signal(signal.SIGKILL)
        self.process.wait(DEADLINE_S)

    def finish(self) -> tuple[int, str, str]:
        """Let the worker end; return (status, stdout, stderr)."""
        out, errors = self.process.communicate(timeout=DEADLINE_S)
        return self.process.returncode, out.decode(), errors.decode()

    def close(self) -> None:
        """End the worker if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


@pytest.fixture
def worker() -> Iterator[Callable[..., Worker]]:
    """Start workers; end them all."""
    with contextlib.ExitStack() as workers:

        def start(code: str, *arguments: object) -> Worker:
            one = Worker(code, *map(str, arguments))
            workers.callback(one.close)
            return one

        yield start


@pytest.fixture
def ended() -> Callable[..., bool]:
    """Say whether a process, somebody else's child too, has ended within some seconds."""

    def wait(pid: int, timeout_s: float = DEADLINE_S) -> bool:
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:
            return True
        try:
            return bool(select.select([pidfd], [], [], timeout_s)[0])
        finally:
            os.close(pidfd)

    return wait


@pytest.fixture
def config() -> PoolConfig:
    """A small pool: pages of 4 KiB, groups of 12 + 3 + 1."""
    return PoolConfig(page_bytes=PAGE, data_pages=12, tier1_pages=3, tier2_pages=1)


@pytest.fixture
def spawn(tmp_path: Path) -> Iterator[Callable[..., ManagerProcess]]:
    """Start managers in folders of this test; end them all."""
    with contextlib.ExitStack() as managers:

        def start(config: PoolConfig, folder: Path | None = None, **options: object) -> ManagerProcess:
            where = tmp_path / "rank0" if folder is None else folder
            patient = {"timeout_s": DEADLINE_S, **options}
            manager = spawn_manager(where, "job", 0, config, **patient)  # type: ignore[arg-type]
            managers.callback(manager.stop)
            return manager

        yield start


@pytest.fixture
def manager(spawn: Callable[..., ManagerProcess], config: PoolConfig) -> ManagerProcess:
    """A manager of the small pool."""
    return spawn(config)


@pytest.fixture
def attach(manager: ManagerProcess) -> Iterator[Callable[..., Client]]:
    """Connect and attach to `manager`; close all."""
    with contextlib.ExitStack() as clients:

        def connect(role: Role, generation: int = 0, timeout_s: float = DEADLINE_S) -> Client:
            client = Client.connect(manager.socket_path, timeout_s)
            clients.callback(client.close)
            client.attach(role, generation)
            return client

        yield connect


@pytest.fixture
def arena() -> AllocationSpec:
    """24 pages in 3 planes with runs of 2: 2 groups."""
    return AllocationSpec("arena", 24 * PAGE, Kind.RETAINED, Interleave(3, 2))


def fds_of(pid: int | str = "self") -> int:
    """Return how many file descriptors a process holds."""
    return len(os.listdir(f"/proc/{pid}/fd")) - (1 if pid == "self" else 0)


@pytest.fixture
def count_fds() -> Callable[..., int]:
    """Give tests `fds_of`. What other tests have left to the collector is gone by then."""
    gc.collect()
    return fds_of


@pytest.fixture
def eventually() -> Callable[[Callable[[], bool], str], None]:
    """Wait for what another process does, against a deadline."""

    def wait(condition: Callable[[], bool], what: str) -> None:
        deadline_s = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline_s, f"not within {DEADLINE_S} s: {what}"
            select.select([], [], [], 0.01)

    return wait


FAKE_CUDA = Path(__file__).parent / "fake_cuda"


@pytest.fixture
def use_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], str]]:
    """Make this process and its children use the "fake" driver or the real one ("gpu").

    The real one is asked for a device here, and only its absence skips: any other failure is a failure.
    """

    def use(kind: str) -> str:
        for name in [name for name in sys.modules if name == "cuda" or name.startswith("cuda.")]:
            monkeypatch.delitem(sys.modules, name)
        driver.open_driver.cache_clear()
        if kind == "fake":
            monkeypatch.syspath_prepend(FAKE_CUDA)
            old = os.environ.get("PYTHONPATH")
            monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(FAKE_CUDA), *filter(None, [old])]))
            return kind
        try:
            driver.open_driver().device(0)
        except CudaUnavailable as error:
            pytest.skip(f"no CUDA device: {error.message}")
        return kind

    yield use
    driver.open_driver.cache_clear()


@pytest.fixture(params=[pytest.param("fake"), pytest.param("gpu", marks=pytest.mark.gpu)])
def cuda(request: pytest.FixtureRequest, use_cuda: Callable[[str], str]) -> str:
    """Run the test with the fake driver, and with a GPU where there is one."""
    return use_cuda(request.param)


@pytest.fixture
def gpu(use_cuda: Callable[[str], str]) -> None:
    """Skip the test where there is no GPU."""
    use_cuda("gpu")
