"""A stateful model of one GPU's memory: PyTorch's allocator, the hook, the shadow, the real controller.

Hypothesis plays every sequence of allocations, releases, climbing shadows, failures and other users of the
device, and this must hold after each step:

* *OOM-free*: an allocation that fits without a shadow succeeds with one. A sequence fits without a shadow
exactly if
  live blocks, other users and the request fit at every step (after a flush nothing else is held), so the
  check needs no second run. With inexact reuse of cached blocks the same is checked of the failing step.
* *Prompt*: an allocation that does not fit fails, after no wait if no shadow held memory, else after a
bounded one.
* *Not needlessly*: a shadow is ended only when an OOM would surface otherwise.
* *Levels*: the shadow never stands above the allowed level, and is reclaimed at most twice between
recoveries.
* *Promotion*: a shadow at L3 has given back what it needs again at its promotion. It rises there only where
that is free too, and after a takeover that was refused none stands there before the next recovery.

The hook is a model of `native/oom_hook.c` here; a second machine plays the same rules with the real library
on the simulated device. Each broken variant at the end must be caught.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from leto_shadow import oom_protocol
from leto_shadow.preinit import MemoryView, PreinitController, PreinitPolicy, _Rank

MIB = 1 << 20
CAPACITY = 100
FOOTPRINT = {0: 0, 1: 0, 2: 10, 3: 22}
PARKED = 8
"""Held on the way to L3, given back there, and needed again at the promotion."""
DEADLINE = 50
"""Longest wait of the hook, in ticks; the driver gives memory back within `RELEASE`."""
RELEASE = 7
POLICY = PreinitPolicy(reserve_mib=3, l2_mib=FOOTPRINT[2], l3_mib=FOOTPRINT[3] + PARKED, settle_s=2.0)


class OutOfMemoryError(Exception):
    """What training would see."""


class ModelDevice:
    """The device: what the active trainer, its shadow and others hold; a dead shadow's memory comes back
    late."""

    def __init__(self) -> None:
        self.active = self.shadow = self.others = self.leaving = 0
        self.leaves_at = 0
        self.clock = 0

    def tick(self) -> None:
        self.clock += 1
        if self.leaving and self.clock >= self.leaves_at:
            self.leaving = 0

    @property
    def free(self) -> int:
        return CAPACITY - self.active - self.shadow - self.others - self.leaving

    def take(self, size: int) -> bool:
        if size > self.free:
            return False
        self.active += size
        return True

    def give(self, size: int) -> None:
        self.active -= size

    def end_shadow(self, delay: int) -> None:
        self.leaving, self.leaves_at = self.leaving + self.shadow, self.clock + delay
        self.shadow = 0

    def drain(self) -> None:
        self.leaving = 0

    def close(self) -> None:
        """Nothing to release."""


class ModelHook:
    """`native/oom_hook.c` in ten lines."""

    def __init__(self, device: ModelDevice, reclaim: Callable[[int], bool]) -> None:
        self.device, self.reclaim = device, reclaim
        self.failed: int | None = None
        self.waited = 0

    def malloc(self, size: int) -> bool:
        self.waited = 0
        if self.device.take(size):
            self.failed = None
            return True
        if self.failed != size:
            self.failed = size
            return False
        self.failed = None
        return self.take_back(size)

    def take_back(self, size: int) -> bool:
        if not self.reclaim(size):
            return self.device.take(size)
        while self.waited < DEADLINE:
            if self.device.take(size):
                return True
            if not self.device.leaving:
                return False
            self.waited += 1
            self.device.tick()
        return self.device.take(size)


class Allocator:
    """PyTorch's caching allocator: cached block, cudaMalloc, flush, cudaMalloc, error."""

    def __init__(self, hook: Any, give: Callable[[int], None], *, exact: bool) -> None:
        self.hook, self.give, self.exact = hook, give, exact
        self.live: list[int] = []
        self.cached: list[int] = []

    def malloc(self, size: int) -> None:
        fitting = sorted(has for has in self.cached if has == size or (has > size and not self.exact))
        if fitting:
            self.cached.remove(fitting[0])
            self.live.append(fitting[0])
            return
        if not self.hook.malloc(size):
            while self.cached:
                self.give(self.cached.pop())
            if not self.hook.malloc(size):
                raise OutOfMemoryError
        self.live.append(size)


class OomFree(RuleBasedStateMachine):
    """The rules; subclasses choose device and hook."""

    def __init__(self) -> None:
        super().__init__()
        self.controller = PreinitController([0], 3, POLICY)
        self.now = 0.0
        self.level = 0
        self.reclaims = 0
        self.reclaimed_at = 4
        self.refused = False
        self.least: int | None = None
        self.held_at_ask = 0
        self.device: Any = self.make_device()

    def make_device(self) -> Any:
        return ModelDevice()

    def make_hook(self) -> Any:
        return ModelHook(self.device, self.reclaim)

    @initialize(exact=st.booleans(), delay=st.integers(0, RELEASE))
    def begin(self, exact: bool, delay: int) -> None:
        self.exact, self.delay = exact, delay
        self.allocator = Allocator(self.make_hook(), self.device.give, exact=exact)

    def teardown(self) -> None:
        self.device.close()

    # --- the agent --------------------------------------------------------------------------------

    def reclaim(self, size: int) -> bool:
        """The hook asks; True: a shadow was ended, and its memory is on its way."""
        self.held_at_ask = self.device.shadow
        assert not self.allocator.cached, "asked before PyTorch has flushed its cache"
        if self.level <= 1:
            return False
        assert sum(self.allocator.live) + self.device.others + self.device.shadow + size > CAPACITY
        level, self.level = self.level, 0
        self.device.end_shadow(self.delay)
        self.reclaims += 1
        self.reclaimed_at = level
        self.controller.reclaimed(0, level, self.now)
        self.controller.footprint(0, level, FOOTPRINT[level] * MIB)
        return True

    def fits(self, size: int) -> bool:
        """Without a shadow and without a cache."""
        return sum(self.allocator.live) + self.device.others + size <= CAPACITY

    # --- training ---------------------------------------------------------------------------------

    @rule(size=st.integers(1, 40))
    def allocate(self, size: int) -> None:
        live, fits = sum(self.allocator.live), self.fits(size)
        self.held_at_ask = 0
        before = self.reclaims
        try:
            self.allocator.malloc(size)
        except OutOfMemoryError:
            assert not fits, f"OOM although {live} live, {self.device.others} and {size} fit in {CAPACITY}"
            if not self.held_at_ask:
                assert self.allocator.hook.waited == 0, "waited although no shadow held memory"
        assert self.allocator.hook.waited <= DEADLINE
        if self.reclaims > before:
            self.measure(0, 0)

    @precondition(lambda self: self.allocator.live)
    @rule(which=st.integers(0, 1000))
    def release(self, which: int) -> None:
        self.allocator.cached.append(self.allocator.live.pop(which % len(self.allocator.live)))

    @rule()
    def end_of_iteration(self) -> None:
        self.allocator.cached += self.allocator.live
        self.allocator.live = []

    @rule(size=st.integers(1, 10))
    def others_take(self, size: int) -> None:
        if size <= self.device.free:
            self.device.others += size

    @rule()
    def others_give(self) -> None:
        self.device.others = 0

    # --- shadow, controller, failures -------------------------------------------------------------

    @rule()
    def the_shadow_climbs(self) -> None:
        if self.level >= self.controller.level(0):
            return
        step = FOOTPRINT[self.level + 1] - FOOTPRINT[self.level]
        parks = PARKED if self.level == 2 else 0
        if step + parks <= self.device.free:
            self.level += 1
            self.device.shadow += step
            if parks:
                self.controller.footprint(0, 3, FOOTPRINT[3] * MIB, PARKED * MIB)
        else:  # it runs out of memory itself, and dies of it
            level, self.level = self.level + 1, 0
            self.device.end_shadow(0)
            self.device.drain()
            self.controller.did_not_fit(0, level, self.now)

    @rule(seconds=st.floats(0.1, 4.0))
    def time_passes(self, seconds: float) -> None:
        self.now += seconds
        self.device.drain()
        self.measure(self.level, sum(self.allocator.cached))
        self.controller.tick(self.now)

    def measure(self, held_level: int, spare: int) -> None:
        """The controller hears of the device; `least`: what a successor would find, at the worst."""
        free = self.device.free
        room = free + FOOTPRINT[held_level] + spare
        self.least = room if self.least is None else min(self.least, room)
        self.controller.measured(0, MemoryView(free * MIB, CAPACITY * MIB, spare * MIB), held_level)

    @precondition(lambda self: self.level == 3)
    @rule(left=st.integers(0, PARKED))
    def a_takeover_finds_so_much(self, left: int) -> None:
        """Others were faster, for a moment: where too little is left for what the shadow has parked, a
        trainer that has parked nothing takes over in its place."""
        if left < PARKED:
            self.controller.refused(0)
        self.a_failure_is_recovered()
        self.refused = left < PARKED

    @rule()
    def a_failure_is_recovered(self) -> None:
        """The active trainer dies, the shadow takes over with empty hands; the next shadow begins from
        nothing."""
        for size in (*self.allocator.live, *self.allocator.cached):
            self.device.give(size)
        least, self.refused, self.least = self.least, False, None
        self.device.end_shadow(0)
        self.device.drain()
        self.level = self.reclaims = 0
        self.reclaimed_at = 4
        self.allocator = Allocator(self.make_hook(), self.device.give, exact=self.exact)
        self.controller.recovered(self.now)
        if least is not None and self.controller.level(0) == 3:
            needed = FOOTPRINT[3] + PARKED + POLICY.reserve_mib
            assert least >= needed, f"promoted from L3 it would need {needed}, and find {least}"

    # --- what always holds ------------------------------------------------------------------------

    @invariant()
    def levels_are_allowed(self) -> None:
        assert self.level <= self.controller.level(0) <= self.controller.ceiling(0)
        assert self.level < self.reclaimed_at, "back at the level that was reclaimed, before a recovery"
        assert self.reclaims <= 2
        assert not (self.refused and self.controller.level(0) == 3), "it would be refused again"

    @invariant()
    def the_device_is_not_overbooked(self) -> None:
        assert self.device.free >= 0


SETTINGS = settings(
    max_examples=150, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestOomFree = OomFree.TestCase
TestOomFree.settings = SETTINGS


# --- the same with the real hook --------------------------------------------------------------------


class FileDevice:
    """The simulated device of `fake_cudart.c`, one MiB a unit; holders that never die stand for others and
    the shadow."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(struct.pack("<QQ", CAPACITY * MIB, 0) + bytes(64 * 24))
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        self._late: threading.Timer | None = None
        self.cuda: Any = None
        self.pointers: dict[int, list[int]] = {}

    def _get(self, slot: int) -> int:
        return int(struct.unpack_from("<Q", self._map, 16 + 24 * slot + 8)[0]) // MIB

    def _set(self, slot: int, held: int) -> None:
        # Pid 1 lives as long as the machine: these holders come and go by their number alone.
        struct.pack_into("<QQQ", self._map, 16 + 24 * slot, 1, held * MIB, 0)

    shadow = property(lambda self: self._get(62), lambda self, held: self._set(62, held))
    others = property(lambda self: self._get(63), lambda self, held: self._set(63, held))

    @property
    def free(self) -> int:
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.cuda.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total))
        return free.value // MIB

    def give(self, size: int) -> None:
        assert self.cuda.cudaFree(ctypes.c_void_p(self.pointers[size].pop())) == 0

    def end_shadow(self, delay: int) -> None:
        if delay:  # milliseconds here
            self._late = threading.Timer(delay / 1000, self._set, (62, 0))
            self._late.start()
        else:
            self._set(62, 0)

    def drain(self) -> None:
        if self._late is not None:
            self._late.join(100.0)

    def close(self) -> None:
        self.drain()
        for size, pointers in self.pointers.items():
            while pointers:
                self.give(size)


class RealHook:
    """`libleto_oom.so` in this process; a thread is the agent."""

    def __init__(
        self,
        device: FileDevice,
        library: Any,
        reclaim: Callable[[int], bool],
        fits: Callable[[int], bool],
    ) -> None:
        self.device, self.library, self.reclaim, self.fits = device, library, reclaim, fits
        self.waited = 0
        self.errors: list[BaseException] = []

    def malloc(self, size: int) -> bool:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        agent = threading.Thread(target=self._serve, args=(ours,))
        agent.start()
        self.library.leto_oom_attach(theirs.fileno(), 100_000, 0)
        pointer = ctypes.c_void_p()
        error = self.library.cudaMalloc(ctypes.byref(pointer), ctypes.c_size_t(size * MIB))
        self.library.leto_oom_attach(-1, 0, 0)
        theirs.close()
        agent.join(100.0)
        ours.close()
        if self.errors:
            raise self.errors[0]
        if error:
            self.device.cuda.cudaGetLastError()
            return False
        self.device.pointers.setdefault(size, []).append(pointer.value)  # type: ignore[arg-type]
        return True

    def _serve(self, sock: socket.socket) -> None:
        try:
            while data := sock.recv(1024):
                message = oom_protocol.decode(data)
                if isinstance(message, oom_protocol.Ask):
                    gone = self.reclaim(message.size_bytes // MIB)
                    verdict = oom_protocol.Verdict.GONE if gone else oom_protocol.Verdict.NONE
                    # Wait long for what will be enough; what will not be is not worth a wait.
                    settle_s = 60.0 if self.fits(message.size_bytes // MIB) else 0.01
                    sock.send(oom_protocol.encode_answer(message.sequence, verdict, settle_s))
        except AssertionError as error:
            self.errors.append(error)


@pytest.fixture
def real_machine(hook: Path, fake_cudart: Path, tmp_path: Path) -> Iterator[type[OomFree]]:
    """The machine with the real hook; libraries are loaded into this process."""
    path = tmp_path / "gpu"
    path.write_bytes(bytes(16 + 64 * 24))
    os.environ["FAKE_GPU"] = str(path)
    cuda = ctypes.CDLL(str(fake_cudart))
    library = ctypes.CDLL(str(hook))
    library.leto_oom_attach.argtypes = (ctypes.c_int, ctypes.c_uint32, ctypes.c_int)

    class RealOomFree(OomFree):
        number: ClassVar[int] = 0

        def make_device(self) -> FileDevice:
            device = FileDevice(path)
            device.cuda = cuda
            return device

        def make_hook(self) -> RealHook:
            return RealHook(self.device, library, self.reclaim, self.fits)

    yield RealOomFree
    os.environ.pop("FAKE_GPU")


def test_the_real_hook_keeps_the_same_rules(real_machine: type[OomFree]) -> None:
    run_state_machine_as_test(
        real_machine,
        settings=settings(
            max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


# --- mutants ----------------------------------------------------------------------------------------


class HookThatNeverAsks(ModelHook):
    def take_back(self, size: int) -> bool:
        return False


class HookThatAsksAtOnce(ModelHook):
    def malloc(self, size: int) -> bool:
        return self.device.take(size) or self.take_back(size)


class HookThatDoesNotWait(ModelHook):
    def take_back(self, size: int) -> bool:
        self.reclaim(size)
        return self.device.take(size)


class HookThatAlwaysWaits(ModelHook):
    def take_back(self, size: int) -> bool:
        done = super().take_back(size)
        if not done:
            self.waited = DEADLINE
        return done


class HookThatWaitsForEver(ModelHook):
    def take_back(self, size: int) -> bool:
        done = super().take_back(size)
        if not done:
            self.waited = DEADLINE + 1
        return done


HOOKS: list[type[ModelHook]] = [
    HookThatNeverAsks,
    HookThatAsksAtOnce,
    HookThatDoesNotWait,
    HookThatAlwaysWaits,
    HookThatWaitsForEver,
]


@pytest.mark.parametrize("broken", HOOKS, ids=[one.__name__ for one in HOOKS])
def test_a_broken_hook_breaks_a_rule(broken: type[ModelHook]) -> None:
    class Broken(OomFree):
        def make_hook(self) -> ModelHook:
            return broken(self.device, self.reclaim)

    assert_caught(Broken)


def never_lowers(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PreinitController, "_lower", lambda self, rank, level, now, why: [])


def test_a_controller_that_never_lowers_breaks_a_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    never_lowers(monkeypatch)

    class Broken(OomFree):
        pass

    assert_caught(Broken)


@pytest.mark.parametrize("forgotten", ["parked", "refused"])
def test_a_controller_that_forgets_what_is_parked_breaks_a_rule(
    forgotten: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if forgotten == "parked":
        monkeypatch.setattr(_Rank, "promotion", lambda self, level: self.footprint[level])
    else:
        monkeypatch.setattr(PreinitController, "refused", lambda self, rank: None)

    class Broken(OomFree):
        @initialize(size=st.integers(60, 72))
        def others_are_there(self, size: int) -> None:
            """About as much as leaves room for what L3 holds and not for what it has parked."""
            self.device.others = size

    assert_caught(Broken)


def test_an_agent_that_forgets_to_kill_breaks_a_rule() -> None:
    class Broken(OomFree):
        def reclaim(self, size: int) -> bool:
            self.held_at_ask = self.device.shadow
            return self.level > 1

    assert_caught(Broken)


def assert_caught(machine: type[OomFree]) -> None:
    """Some sequence breaks a rule; it is not reduced to the shortest one."""
    search = settings(
        SETTINGS,
        max_examples=20_000,
        derandomize=True,
        database=None,
        report_multiple_bugs=False,
        phases=[Phase.generate],
    )
    with pytest.raises(AssertionError):
        run_state_machine_as_test(machine, settings=search)
