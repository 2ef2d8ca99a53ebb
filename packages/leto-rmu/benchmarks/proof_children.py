"""Processes of the proof scripts: children with CUDA up, each to be killed once; lanes that use them up.

A script forks a few *lanes*, processes that do jobs side by side and tell what they have proven so far. A
lane forks *children*, which bring CUDA up and wait. Each takes one task, is killed or ends, and is
replaced; so a fresh process goes on where another was killed without anybody waiting for CUDA to start.
Neither the script nor a lane touches the GPU.

Few lanes are faster than many: processes that bring CUDA up, map pages and end do so one after another,
under the driver's locks. With 60 of them at once on an H200 every call of the driver took some 10 ms
instead of 30 us, and an attach of 215 pages makes 645 calls.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import mmap
import os
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, NoReturn

import torch
from proof_ends import LastWords, interruption
from proof_place import Asked, Place, Stopped, progress, stop_at_sigterm

from leto_rmp import Client, PoolConfig
from leto_rmu import Hyper, Segment, SyncResult, UpdatePlan

DEADLINE_S = 300.0
GRACE_S = 4.0  # for the last words of lanes that are stopped
LOOK_S = 5e-5
SLOW_S = 1.0
NOTE = struct.Struct("qq")  # a number; CLOCK_MONOTONIC when it was noted, ns
Task = Callable[[dict[str, Any], "Channel"], None]
Tell = Callable[[dict[str, Any]], None]
Work = Callable[["Lane", dict[str, Any], Tell], None]


class Channel:
    """JSON lines over a socket, a note in memory that both sides see, and last words."""

    def __init__(self, end: socket.socket, notes: mmap.mmap, words: LastWords) -> None:
        self.socket, self._rest, self._notes, self.words = end, b"", notes, words

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

    def arrived(self) -> tuple[list[dict[str, Any]], bool]:
        """Of a socket that is readable: the lines that are here, and whether the other side is gone."""
        try:
            more = self.socket.recv(1 << 16)
        except ConnectionResetError:
            more = b""
        *lines, self._rest = (self._rest + more).split(b"\n")
        return [json.loads(line) for line in lines], not more

    def note(self, number: int) -> None:
        """Leave a number and the time, without a system call."""
        self._notes[8:16] = struct.pack("q", time.monotonic_ns())
        self._notes[0:8] = struct.pack("q", number)

    def noted(self) -> tuple[int, float]:
        """The newest number, and when it was noted, in seconds of the monotonic clock."""
        number, when_ns = NOTE.unpack_from(self._notes)
        return number, when_ns / 1e9


class Child:
    """A forked process that gets ready, with CUDA up if need be, and runs one of the tasks."""

    # Ends of the parent, and the parent's own to its parent. A child closes those that it inherited, or it
    # would keep its siblings from noticing that the parent is gone, and the parent's parent that it is.
    _ends: ClassVar[set[socket.socket]] = set()
    _up: ClassVar[set[socket.socket]] = set()

    def __init__(self, tasks: dict[str, Task], prepare: Callable[[], None]) -> None:
        ours, theirs = socket.socketpair()
        notes, words = mmap.mmap(-1, NOTE.size), LastWords()
        # What a handler raises in one of Python's own hooks after a fork would be ignored there: it waits.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        self.pid = os.fork()
        if self.pid == 0:
            for end in (ours, *self._ends, *self._up):
                end.close()
            self._ends.clear()
            self._up.clear()
            self._up.add(theirs)
            _child(tasks, prepare, Channel(theirs, notes, words))
        theirs.close()
        self._ends.add(ours)
        self.pidfd, self.channel, self.lives = os.pidfd_open(self.pid), Channel(ours, notes, words), True
        self.last_words = ""
        self.ready_s = self.waited_s = 0.0
        signal.pthread_sigmask(signal.SIG_SETMASK, before)

    def begin(self, task: str, **command: Any) -> None:
        begun = time.monotonic()
        ready = self.channel.hear()
        if ready is None or "ready_s" not in ready:
            raise AssertionError(f"a child did not come up: {ready}; see its traceback above")
        self.ready_s, self.waited_s = ready["ready_s"], time.monotonic() - begun
        if self.waited_s > SLOW_S:
            progress(f"waited {self.waited_s:.1f} s for a child, which took {self.ready_s:.1f} s to come up")
        self.channel.say(task=task, **command)

    def hear(self) -> dict[str, Any]:
        found = self.channel.hear()
        if found is None:
            raise AssertionError(f"a child ended with status {self.end()}; see its traceback above")
        if "error" in found:
            raise AssertionError(f"a child failed: {found['error']}")
        return found

    def noted(self, number: int, timeout_s: float = DEADLINE_S) -> float:
        """Wait until the child has noted a number; when that was, in seconds of the monotonic clock."""
        deadline = time.monotonic() + timeout_s
        while (found := self.channel.noted())[0] < number:
            if select.select([self.pidfd], [], [], LOOK_S)[0]:
                raise AssertionError(f"a child ended early; it says {self.hear()}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"{number} was not noted in {timeout_s} s")
        return found[1]

    def kill(self) -> float:
        """SIGKILL; seconds until the process is gone, its GPU work too."""
        begun = time.perf_counter()
        self.signal()
        self.killed()
        return time.perf_counter() - begun

    def signal(self) -> None:
        """Send SIGKILL; do not wait."""
        signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)

    def killed(self) -> list[dict[str, Any]]:
        """Wait until it is gone, by SIGKILL and nothing else; what it had said that nobody has heard."""
        if not select.select([self.pidfd], [], [], DEADLINE_S)[0]:
            raise TimeoutError(f"a child that was sent SIGKILL did not end in {DEADLINE_S} s")
        said, gone = [], False
        while not gone:
            more, gone = self.channel.arrived()
            said += more
        status = self.end()
        if not (os.WIFSIGNALED(status) and os.WTERMSIG(status) == signal.SIGKILL):
            raise AssertionError(f"a child was to be killed, but ended with status {status}; it says {said}")
        return said

    def end(self, timeout_s: float = DEADLINE_S) -> int:
        """Wait until it is gone; its wait status. What it left on stderr is in ``last_words`` then."""
        if not select.select([self.pidfd], [], [], timeout_s)[0]:
            signal.pidfd_send_signal(self.pidfd, signal.SIGKILL)
            raise TimeoutError(f"a child did not end in {timeout_s} s")
        self.lives = False
        os.close(self.pidfd)
        self._ends.discard(self.channel.socket)
        self.channel.socket.close()
        self.last_words = self.channel.words.end()
        return os.waitpid(self.pid, 0)[1]

    def interrupted(self, what: str, *, trapping: bool = False) -> str:
        """It was to be killed, or, ``trapping``, to end by the trap of a kernel; what is known of a trap."""
        told, status = self.channel.hear(), self.end()
        return interruption(what, told, status, self.last_words, trapping)


def _child(tasks: dict[str, Task], prepare: Callable[[], None], channel: Channel) -> NoReturn:
    code, begun = 1, time.monotonic()
    try:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # blocked while it was forked
        gc.freeze()  # what is inherited is not collected here: that would unshare its memory
        prepare()
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


def warm_up() -> None:
    """Bring CUDA up, and load the kernels that every task uses."""
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
    up.write("a", "master", torch.randn(numel, generator=Place.generator(1), device="cuda"))
    up.initialize()
    up.compute_begins()
    up.grads.copy_(torch.randn(numel, device="cuda").to(torch.bfloat16))
    up.step([Hyper(1e-3)], b"", SyncResult)
    read = up.read("a")
    torch.equal(read.view(torch.int32), read.clone().view(torch.int32))
    torch.equal(read.to(torch.bfloat16), read.to(torch.bfloat16))
    torch.cuda.synchronize()
    # Updaters are in cycles with their memory, so the collector of cycles frees them; here, not in a task.
    del up, read
    gc.collect()


def preload() -> None:
    """Import what children inherit. No CUDA call is made here: a torch optimizer would."""
    for name in ("cupy", "leto_ec.cuda", "leto_rmu.cuda") if Place.on_gpu() else ():
        importlib.import_module(name)
    if torch.cuda.is_initialized():
        raise AssertionError("CUDA is up in the parent: its children could not use it")


class Warm:
    """A few children that are ready; each is handed out once."""

    def __init__(self, tasks: dict[str, Task], size: int, prepare: Callable[[], None] | None = None) -> None:
        preload()
        self._make = partial(Child, tasks, warm_up if prepare is None else prepare)
        progress(f"starting {size} children")
        self._taken: list[Child] = []
        self._ready = deque(self._make() for _ in range(size))

    def take(self) -> Child:
        self._ready.append(self._make())
        self._taken = [child for child in self._taken if child.lives]
        self._taken.append(self._ready.popleft())
        return self._taken[-1]

    def end_taken(self) -> None:
        """Kill those that were handed out and live."""
        self._end([child for child in self._taken if child.lives])

    def _end(self, left: Sequence[Child]) -> None:
        for child in left:
            signal.pidfd_send_signal(child.pidfd, signal.SIGKILL)
        for child in left:
            child.end()

    def __enter__(self) -> Warm:
        return self

    def __exit__(self, *_: object) -> None:
        left = [child for child in (*self._taken, *self._ready) if child.lives]
        progress(f"ending {len(left)} children that are left")
        self._end(left)


# --- lanes ----------------------------------------------------------------------------------------------
@dataclass
class Job:
    """``result``: what has been proven of it so far, None: nothing; ``error``: what it failed of."""

    spec: dict[str, Any]
    result: dict[str, Any] | None = None
    error: str = ""


class Lane:
    """What the jobs of one lane share: children that are ready, and one with a standing task."""

    def __init__(self, warm: Warm) -> None:
        self.warm = warm
        self._standing: Child | None = None

    def standing(self, task: str) -> Child:
        """The child of this lane that goes on with a task from job to job."""
        if self._standing is None or not self._standing.lives:
            self._standing = self.warm.take()
            self._standing.begin(task)
        return self._standing

    def next_life(self, control: Client, training: dict[str, Any], generation: int, **command: Any) -> Child:
        """A child that goes on with a training over the memory of a manager: its task "life" has begun."""
        child = self.warm.take()
        where = str(control.socket_path)
        child.begin("life", training=training, socket=where, generation=generation, **command)
        return child


def _serve(work: Work, warm: Callable[[], Warm], _command: dict[str, Any], channel: Channel) -> None:
    """A lane: do one job after another until there is none, or SIGTERM comes."""
    stop_at_sigterm()
    try:
        with warm() as children:
            lane = Lane(children)
            while (asked := channel.hear(3600)) is not None:
                number = asked["job"]
                try:
                    work(
                        lane,
                        asked["spec"],
                        lambda result, number=number: channel.say(job=number, result=result),
                    )
                except Exception as error:  # noqa: BLE001 - the page has it; other jobs go on
                    traceback.print_exc()
                    children.end_taken()  # whatever state they are in
                    channel.say(job=number, ended=f"{type(error).__name__}: {error}"[:1000])
                else:
                    channel.say(job=number, ended="")
    except Stopped:
        progress("a lane is stopped")


class _Lanes:
    """The script's side."""

    def __init__(self, jobs: Sequence[Job], count: int, work: Work, warm: Callable[[], Warm]) -> None:
        self.jobs, self.waiting = jobs, deque(range(len(jobs)))
        tasks: dict[str, Task] = {"serve": partial(_serve, work, warm)}
        self.doing: dict[Child, int | None] = {}
        for _ in range(min(count, len(jobs))):
            lane = Child(tasks, lambda: None)
            self.doing[lane] = None
            lane.begin("serve")
            self.next_of(lane)

    def next_of(self, lane: Child) -> None:
        """Give a lane its next job; without one it ends, and its children with it."""
        if self.waiting:
            self.doing[lane] = number = self.waiting.popleft()
            lane.channel.say(job=number, spec=self.jobs[number].spec)
        else:
            self.doing[lane] = None
            lane.channel.socket.shutdown(socket.SHUT_WR)

    def hear(self, timeout_s: float, wake: socket.socket | None = None) -> bool:
        """Take in what lanes have to say by then; ``wake`` ends the wait as well. False: nothing happened."""
        ends = {lane.channel.socket: lane for lane in self.doing}
        ready = select.select([*ends, *([wake] if wake else [])], [], [], timeout_s)[0]
        for end in ready:
            if end is wake:
                continue
            lane = ends[end]
            lines, gone = lane.channel.arrived()
            for told in lines:
                self.take_in(lane, told)
            if gone:
                self.gone(lane)
        return bool(ready)

    def take_in(self, lane: Child, told: dict[str, Any]) -> None:
        if "result" in told:
            self.jobs[told["job"]].result = told["result"]
        elif "ended" in told:
            self.jobs[told["job"]].error = told["ended"]
            self.next_of(lane)
        elif (number := self.doing[lane]) is not None:  # the lane itself has failed
            self.jobs[number].error = str(told.get("error", told))
            self.doing[lane] = None

    def gone(self, lane: Child) -> None:
        number, status = self.doing.pop(lane), lane.end()
        if number is not None:
            self.jobs[number].error = f"its lane ended with status {status}; see its traceback above"

    def stop(self) -> None:
        """Ask lanes to end, hear their last words, and see to it that they end."""
        self.waiting.clear()
        until = time.monotonic() + GRACE_S
        for lane in self.doing:
            self.doing[lane] = None  # that it is not done is no error of the job
            signal.pidfd_send_signal(lane.pidfd, signal.SIGTERM)
        while self.doing and (left := until - time.monotonic()) > 0:
            self.hear(left)
        for lane in self.doing:
            signal.pidfd_send_signal(lane.pidfd, signal.SIGKILL)
        while self.doing and self.hear(DEADLINE_S):  # what they had said, however late it is read
            pass
        for lane in list(self.doing):
            self.gone(lane)


def in_lanes(
    jobs: Sequence[Job],
    count: int,
    work: Work,
    tasks: dict[str, Task],
    pool: int,
    changed: Callable[[], None],
    prepare: Callable[[], None] | None = None,
) -> bool:
    """Do jobs, the first ones first, so many side by side; False: SIGTERM came before all had ended.

    ``work`` does one in a lane, and tells its result whenever it has proven more; a job that fails does not
    keep the others from being done. ``pool``: children of a lane that are ready, after ``prepare``
    (default: `warm_up`). ``changed`` is called after every change of a result: it writes the page.
    """
    with Asked() as asked:
        preload()
        lanes = _Lanes(jobs, count, work, lambda: Warm(tasks, pool, prepare))
        while lanes.doing and not asked.told:
            if lanes.hear(3600.0, asked.socket):
                changed()
        if not lanes.doing:
            return True
        progress("SIGTERM: keeping what is proven")
        lanes.stop()
        changed()
        return False
