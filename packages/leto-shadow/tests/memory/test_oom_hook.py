"""The allocator hook, compiled from its source, in real processes on a simulated device; the test is the
agent.

Each scenario states one rule of `native/oom_hook.c`; the mutants at the end break one rule each and are
caught.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from leto_shadow.oom_protocol import Ask, Report, Verdict

MIB = 1 << 20


class Bench:
    """What a scenario works with."""

    def __init__(
        self, gpu: Callable[..., Any], programs: Callable[..., Any], hook: Path, **options: Any
    ) -> None:
        self.gpu, self.programs, self.hook = gpu, programs, hook
        self.options = {"wait_ms": 100_000, **options}

    def pair(self, *, shadow_mib: int = 300, delay_ms: int = 0, **more: Any) -> tuple[Any, Any]:
        """An active trainer with the hook and a shadow that holds memory, on a device of 1000 MiB."""
        gpu = self.gpu(1000 * MIB, delay_ms)
        active = self.programs(gpu, self.hook, **{**self.options, **more})
        shadow = self.programs(gpu)
        assert shadow.do("malloc", size=shadow_mib * MIB) == "ok"
        return active, shadow

    def assert_no_deadline_was_met(self, active: Any) -> None:
        """The allocation ended because of what happened, not because its time was up."""
        report = active.asked()
        assert isinstance(report, Report)
        assert report.waited_s < self.options["wait_ms"] / 2000


@pytest.fixture
def bench(gpu: Callable[..., Any], programs: Callable[..., Any], hook: Path) -> Bench:
    return Bench(gpu, programs, hook)


# --- scenarios --------------------------------------------------------------------------------------


def a_flush_comes_before_a_reclaim(bench: Bench) -> None:
    active, shadow = bench.pair()
    for _ in range(3):
        assert active.do("malloc", size=200 * MIB) == "ok"
    for _ in range(3):
        active.do("free", size=200 * MIB)
    assert active.do("malloc", size=650 * MIB) == "ok"  # fits beside the shadow once the cache is gone
    assert active.do("info")["flushes"] == 1
    assert active.silent()
    assert shadow.process.poll() is None


def the_shadow_goes_when_an_oom_would_surface(bench: Bench) -> None:
    active, shadow = bench.pair()
    assert active.do("malloc", size=400 * MIB) == "ok"
    active.say("malloc", size=500 * MIB)
    ask = active.asked()
    assert ask == Ask(1, 0, 500 * MIB, 300 * MIB, 1000 * MIB)
    shadow.die()
    active.answer(ask, Verdict.GONE)
    assert active.hear() == "ok"
    report = active.asked()
    assert isinstance(report, Report)
    assert (report.satisfied, report.freed_bytes, report.free_bytes) == (True, 300 * MIB, 100 * MIB)
    assert report.waited_s > 0
    assert active.do("calls") == 3


def memory_that_comes_back_late_is_waited_for(bench: Bench) -> None:
    """The driver may count the memory as used for a while after the process is gone."""
    active, shadow = bench.pair(delay_ms=100)
    active.say("malloc", size=800 * MIB)
    ask = active.asked()
    active.answer(ask, Verdict.GONE, settle_s=60.0)  # first, so that it is never there when the memory is
    shadow.die()
    assert active.hear() == "ok"
    report = active.asked()
    assert isinstance(report, Report)
    assert report.satisfied


def memory_is_taken_as_soon_as_it_is_free(bench: Bench) -> None:
    """Measured free memory counts, not the answer: here none ever comes."""
    active, shadow = bench.pair()
    active.say("malloc", size=800 * MIB)
    active.asked()
    shadow.die()
    assert active.hear() == "ok"
    bench.assert_no_deadline_was_met(active)


def a_real_oom_surfaces_at_once(bench: Bench) -> None:
    active, shadow = bench.pair()
    shadow.die()
    assert active.do("malloc", size=600 * MIB) == "ok"
    active.say("malloc", size=600 * MIB)
    active.answer(active.asked(), Verdict.NONE, settle_s=1000.0)
    assert active.hear() == "OutOfMemoryError"
    bench.assert_no_deadline_was_met(active)
    assert active.do("malloc", size=400 * MIB) == "ok"  # and training may go on


def a_real_oom_surfaces_after_the_shadow_is_gone(bench: Bench) -> None:
    active, shadow = bench.pair()
    assert active.do("malloc", size=600 * MIB) == "ok"
    active.say("malloc", size=600 * MIB)
    ask = active.asked()
    shadow.die()
    active.answer(ask, Verdict.GONE, settle_s=0.05)
    assert active.hear() == "OutOfMemoryError"


def what_no_device_could_hold_costs_no_shadow(bench: Bench) -> None:
    active, shadow = bench.pair()
    assert active.do("malloc", size=1001 * MIB) == "OutOfMemoryError"
    assert active.silent()
    assert shadow.process.poll() is None


def a_silent_agent_costs_a_bounded_wait(bench: Bench) -> None:
    active, _ = bench.pair(wait_ms=500)
    active.say("malloc", size=800 * MIB)
    late = active.asked()
    assert active.hear() == "OutOfMemoryError"
    assert not active.asked().satisfied
    # What the agent says afterwards is no answer to the next request.
    active.answer(late, Verdict.NONE)
    active.say("malloc", size=800 * MIB)
    ask = active.asked()
    assert ask.sequence == late.sequence + 1
    active.answer(late, Verdict.NONE)
    assert active.hear() == "OutOfMemoryError"
    assert active.asked().waited_s >= 0.49, "an old answer ended the wait"


def an_agent_that_is_gone_costs_no_wait(bench: Bench) -> None:
    active, _ = bench.pair()
    active.agent.close()
    assert active.do("malloc", size=800 * MIB) == "OutOfMemoryError"


def garbage_is_no_answer(bench: Bench) -> None:
    active, shadow = bench.pair()
    active.say("malloc", size=800 * MIB)
    active.asked()
    active.agent.send(b"garbage" * 3)
    assert active.hear() == "OutOfMemoryError"
    bench.assert_no_deadline_was_met(active)
    assert shadow.process.poll() is None


def the_size_tells_a_second_attempt_from_another_allocation(bench: Bench) -> None:
    active, _ = bench.pair()
    assert active.do("raw", size=801 * MIB) is False
    assert active.do("raw", size=802 * MIB) is False
    assert active.silent()


def a_success_in_between_begins_anew(bench: Bench) -> None:
    active, _ = bench.pair()
    assert active.do("raw", size=801 * MIB) is False
    assert active.do("raw", size=10 * MIB) is True
    assert active.do("raw", size=801 * MIB) is False
    assert active.silent()


def each_thread_has_its_own_first_attempt(bench: Bench) -> None:
    active, _ = bench.pair()
    for thread in (1, 2):
        assert active.do("raw", size=801 * MIB, thread=thread)["result"] is False
    assert active.silent()


def every_thread_is_served(bench: Bench) -> None:
    """Backward threads allocate too; those that fail together share one reclaim."""
    active, shadow = bench.pair()
    for thread in range(4):
        active.say("malloc", size=200 * MIB, thread=thread)
    ask = active.asked()
    shadow.die()
    active.answer(ask, Verdict.GONE)
    results = [active.hear()["result"] for _ in range(4)]
    assert results == ["ok"] * 4
    assert isinstance(active.asked(), Report)
    assert active.silent()


def the_gil_may_be_held(bench: Bench) -> None:
    active, shadow = bench.pair()
    active.say("malloc", size=800 * MIB, gil=True)
    ask = active.asked()
    shadow.die()
    active.answer(ask, Verdict.GONE)
    assert active.hear() == "ok"


def signals_do_not_disturb(bench: Bench) -> None:
    active, shadow = bench.pair()
    active.say("malloc", size=800 * MIB)
    ask = active.asked()
    for number in (signal.SIGCONT, signal.SIGWINCH, signal.SIGCHLD):
        os.kill(active.process.pid, number)
    os.kill(active.process.pid, signal.SIGSTOP)
    shadow.die()
    active.answer(ask, Verdict.GONE)
    os.kill(active.process.pid, signal.SIGCONT)
    assert active.hear() == "ok"


def a_capture_gets_one_attempt(bench: Bench) -> None:
    """PyTorch does not come back inside a capture: the first failure counts."""
    active, shadow = bench.pair()
    assert active.do("capture")
    active.say("malloc", size=800 * MIB, flush=False)
    ask = active.asked()
    shadow.die()
    active.answer(ask, Verdict.GONE)
    assert active.hear() == "ok"


def an_eager_hook_takes_the_first_failure(bench: Bench) -> None:
    active, shadow = bench.pair(eager=True)
    active.say("malloc", size=800 * MIB, flush=False)
    ask = active.asked()
    shadow.die()
    active.answer(ask, Verdict.GONE)
    assert active.hear() == "ok"


def a_forked_child_does_not_ask(bench: Bench) -> None:
    active, _ = bench.pair()
    assert active.do("fork", then={"do": "malloc", "size": 800 * MIB}) == "OutOfMemoryError"
    assert active.silent()


SCENARIOS: list[Callable[[Bench], None]] = [
    a_flush_comes_before_a_reclaim,
    the_shadow_goes_when_an_oom_would_surface,
    memory_that_comes_back_late_is_waited_for,
    memory_is_taken_as_soon_as_it_is_free,
    a_real_oom_surfaces_at_once,
    a_real_oom_surfaces_after_the_shadow_is_gone,
    what_no_device_could_hold_costs_no_shadow,
    a_silent_agent_costs_a_bounded_wait,
    an_agent_that_is_gone_costs_no_wait,
    garbage_is_no_answer,
    the_size_tells_a_second_attempt_from_another_allocation,
    a_success_in_between_begins_anew,
    each_thread_has_its_own_first_attempt,
    every_thread_is_served,
    the_gil_may_be_held,
    signals_do_not_disturb,
    a_capture_gets_one_attempt,
    an_eager_hook_takes_the_first_failure,
    a_forked_child_does_not_ask,
]


@pytest.mark.parametrize("scenario", SCENARIOS, ids=[one.__name__ for one in SCENARIOS])
def test_the_hook(scenario: Callable[[Bench], None], bench: Bench) -> None:
    scenario(bench)


def test_without_an_agent_nothing_changes(gpu: Callable[..., Any], programs: Callable[..., Any]) -> None:
    """The twin of the first scenarios: without the hook the shadow is the cause of an OOM."""
    device = gpu()
    active, shadow = programs(device), programs(device)
    assert shadow.do("malloc", size=300 * MIB) == "ok"
    assert active.do("malloc", size=800 * MIB) == "OutOfMemoryError"
    shadow.die()
    assert active.do("malloc", size=800 * MIB) == "ok"


# --- mutants ----------------------------------------------------------------------------------------

MUTANTS: dict[str, tuple[str, str, Callable[[Bench], None]]] = {
    "reclaims at the first failure": (
        "failed_size != size && !atomic_load(&eager)",
        "0 && !atomic_load(&eager)",
        a_flush_comes_before_a_reclaim,
    ),
    "takes any second failure for a second attempt": (
        "failed_size != size && !atomic_load(&eager)",
        "failed_size == 0 && !atomic_load(&eager)",
        the_size_tells_a_second_attempt_from_another_allocation,
    ),
    "remembers a failure past a success": (
        "        failed_size = 0;\n        return error;",
        "        return error;",
        a_success_in_between_begins_anew,
    ),
    "one memory for all threads": (
        "static __thread size_t failed_size",
        "static size_t failed_size",
        each_thread_has_its_own_first_attempt,
    ),
    "never asks": ("if (send_message(fd, &message)) {", "if (0) {", the_gil_may_be_held),
    "does not wait for the memory": (
        "uint64_t settled = now_us() + 1000u * (uint64_t)answer.settle_ms;",
        "uint64_t settled = now_us();",
        memory_that_comes_back_late_is_waited_for,
    ),
    "trusts the answer instead of the driver": (
        "(free_bytes > seen || got > 0)",
        "(free_bytes > seen + ((size_t)1 << 60) || got > 0)",
        memory_is_taken_as_soon_as_it_is_free,
    ),
    "waits although nobody holds memory": (
        "if (got < 0 || (got > 0 && answer.verdict != GONE))",
        "if (got < 0)",
        a_real_oom_surfaces_at_once,
    ),
    "kills a shadow for what no device could hold": (
        " && size <= total) {",
        ") {",
        what_no_device_could_hold_costs_no_shadow,
    ),
    "waits for ever": (
        "int over = now_us() >= until;",
        "int over = now_us() >= until && !size;",
        a_silent_agent_costs_a_bounded_wait,
    ),
    "believes an old answer": (
        "if (answer->sequence == wanted)",
        "if (answer->sequence || wanted)",
        a_silent_agent_costs_a_bounded_wait,
    ),
    "believes garbage": (
        "if (got != (ssize_t)sizeof *answer || answer->magic != MAGIC || answer->version != VERSION)",
        "if (got == 0)",
        garbage_is_no_answer,
    ),
    "does not see a capture": ("&& !is_capturing()", "&& (is_capturing(), 1)", a_capture_gets_one_attempt),
    "leaves the capture mode changed": (
        "    exchange_capture_mode(&ours);\n",
        "    (void)ours;\n",
        the_size_tells_a_second_attempt_from_another_allocation,
    ),
    "asks from a forked child": (" || getpid() != owner", "", a_forked_child_does_not_ask),
    "leaves the error behind": (
        "    if (peek_error && last_error && peek_error() == CUDA_OUT_OF_MEMORY_)\n        last_error();",
        "    (void)last_error;",
        the_shadow_goes_when_an_oom_would_surface,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_hook_is_caught(
    name: str,
    gpu: Callable[..., Any],
    programs: Callable[..., Any],
    broken_hook: Callable[[str, str], Path],
) -> None:
    old, new, scenario = MUTANTS[name]
    bench = Bench(gpu, programs, broken_hook(old, new), wait_ms=1000, patience_s=2.5)
    with pytest.raises((AssertionError, OSError, ValueError, AttributeError, EOFError)):
        scenario(bench)
